#!/usr/bin/env bash
# Train a small model on your own text, on this machine's CPU: tokenize a folder, look at it, train on it.
#
#   bash examples/train_on_your_text.sh FOLDER [OUTPUT]
set -euo pipefail
text=${1:?give a folder of .txt, .md, .rst, .py or .jsonl files}
output=${2:-own_text}
python=${PYTHON:-python3}

[ -d "$output/data" ] || "$python" -m raytrain_llama3 data tokenize --input "$text" --output "$output/data"
"$python" -m raytrain_llama3 data inspect "$output/data"
exec "$python" -m raytrain_llama3 train --config "$(dirname "$0")/../configs/demo.toml" --exp-name own-text \
  --data-arg "$output/data" --checkpoint-path "$output/checkpoints" --tensorboard-logs-path "$output/tensorboard" \
  --logs-path "$output/logs"
