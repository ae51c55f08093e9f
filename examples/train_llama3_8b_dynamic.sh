#!/usr/bin/env bash
# A drop-in for the tutorial's script of this name: the same environment variables, the same four arguments.
#
#   TP_SIZE=2 DTYPE=fp8 bash examples/train_llama3_8b_dynamic.sh [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]
#
# Every variable is an option of `python -m raytrain_llama3 --help`; try `FAST_TEST_MODE=1` first.
set -euo pipefail
exec "${PYTHON:-python3}" -m raytrain_llama3 train "$@"
