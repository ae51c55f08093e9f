#!/usr/bin/env bash
# From Parquet files with a column of text, such as WikiText-103's, to training, on this machine's CPU.
#
#   bash examples/wikitext.sh FOLDER_OF_PARQUET_FILES [OUTPUT [TOKENIZER [VOCAB_SIZE]]]
#
# Fetch the files first, for example wikitext-103-raw-v1 of the dataset Salesforce/wikitext from its hub. TOKENIZER is
# `bytes` unless you give a tokenizer.json.
set -euo pipefail
parquet=${1:?give a folder of Parquet files with a column "text"}
output=${2:-wikitext}
tokenizer=${3:-bytes}
vocab_size=${4:-257}
python=${PYTHON:-python3}

[ -d "$output/data" ] || "$python" -m raytrain_llama3 data tokenize --input "$parquet"/*.parquet --column text \
  --tokenizer "$tokenizer" --output "$output/data" ${WORKERS:+--workers "$WORKERS"}
"$python" -m raytrain_llama3 data inspect "$output/data" --seq-length 128 --global-batch-size 16
exec "$python" -m raytrain_llama3 train --config "$(dirname "$0")/../configs/demo.toml" --exp-name wikitext \
  --data-arg "$output/data" --tokenizer-arg "$tokenizer" --vocab-size "$vocab_size" \
  --checkpoint-path "$output/checkpoints" --tensorboard-logs-path "$output/tensorboard" --logs-path "$output/logs"
