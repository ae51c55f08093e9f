#!/usr/bin/env bash
# Start with two data-parallel ranks and go on with two tensor-parallel ones: a checkpoint fits every layout.
#
#   bash examples/change_layout.sh [OUTPUT]
set -euo pipefail
output=${1:-change_layout}
run=("${PYTHON:-python3}" -m raytrain_llama3 train --config "$(dirname "$0")/../configs/demo.toml" --exp-name layouts
  --data-cache-path "$output/data" --checkpoint-path "$output/checkpoints" --logs-path "$output/logs"
  --tensorboard-logs-path "$output/tensorboard" --eval-interval 0 --log-interval 10 --lr-decay-samples 4800)

"${run[@]}" --train-iters 20
"${run[@]}" --train-iters 40 --tp-size 2
