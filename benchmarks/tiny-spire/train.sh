#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tiny-spire again, on one core: an hour where others want that one, too. In the project's folder:
#   sh benchmarks/tiny-spire/train.sh FOLDER
# Options after the folder (--steps 400 --no-feedback-memory, say) are those of magicdec train-draft.
set -e
out=$1
shift
mkdir -p "$out"
test -e "$out.jsonl" || python benchmarks/tiny-spire/make_data.py --out "$out.jsonl"
OMP_NUM_THREADS=1 python -m vllm_magicdec train-draft --model examples/tiny-llama --data "$out.jsonl" --out "$out" \
    --batch 1 --learning-rate 2e-3 --steps 4600 "$@"
