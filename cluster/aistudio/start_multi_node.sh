#!/usr/bin/env bash
# AIStudio, two workers or more: the same start command in each of them.
#   bash /workspace/raytrain_llama3/cluster/aistudio/start_multi_node.sh --exp-dir /shared/experiments
# The platform gives each pod WORLD_SIZE (the number of pods), RANK, MASTER_ADDR and MASTER_PORT: pod 0 becomes Ray's
# head, the others join it, and all end with the same exit code. --exp-dir has to be on storage that all pods share: the
# checkpoints are there, and the token with which the pods know each other.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m raytrain_llama3 --env-file configs/config_aistudio_multi_node.env "$@"
