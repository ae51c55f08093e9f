#!/usr/bin/env bash
# AIStudio, once for a container: its root filesystem stays, so what this installs is there for every later job.
# Run it in the container's shell, in a checkout of this repository:
#   bash cluster/aistudio/init.sh
# It needs the image of cluster/Dockerfile, or any other with Python 3.12, a CUDA toolkit and a compiler.
set -euo pipefail
cd "$(dirname "$0")/../.."

python3.12 -m venv --system-site-packages .venv
# Transformer Engine is compiled against the torch that is there: torch comes first.
.venv/bin/pip install --quiet 'torch>=2.11,<2.12' ninja
.venv/bin/pip install --quiet --no-build-isolation -e '.[gpu,hf,wandb]'
.venv/bin/python -m raytrain_llama3 check
