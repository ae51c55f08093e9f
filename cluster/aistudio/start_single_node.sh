#!/usr/bin/env bash
# AIStudio, one worker: the start command of the job.
#   bash /workspace/raytrain_llama3/cluster/aistudio/start_single_node.sh --fast-test-mode
# Whatever stands after it is passed on as options; the options of a finished test are dropped for the real run.
set -euo pipefail
cd "$(dirname "$0")/../.."
# exec: the platform's SIGTERM has to reach the driver, which then saves a checkpoint.
exec .venv/bin/python -m raytrain_llama3 --env-file configs/config_aistudio_single_node.env "$@"
