#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The ablations of SPIRe's paper (Figure 5), a draft each, as tiny-spire but in float32 and for 1,000 steps;
# then their acceptance. Two at a time, a core each: 25 minutes a pair on a Zen 3, but an hour for those
# without sparse KV and without target activations. In the project's folder:
#   sh benchmarks/tiny-spire/ablations.sh FOLDER
# Run again after an interruption, it goes on. The draft without sparse KV sees more than it was trained on
# (2,048 tokens) at 4,000 and 7,000 tokens of context.
set -e
mkdir -p "$1"
export OUT="$1"
if ! test -e "$OUT/data.jsonl"; then
    python benchmarks/tiny-spire/make_data.py --out "$OUT/data.part"
    mv "$OUT/data.part" "$OUT/data.jsonl"
fi
xargs -P 2 -L 1 sh -c 'name=$1; shift
    test -e "$OUT/$name/config.json" || OMP_NUM_THREADS=1 python -m vllm_magicdec train-draft \
        --model examples/tiny-llama --data "$OUT/data.jsonl" --out "$OUT/$name" --batch 1 \
        --learning-rate 2e-3 --float32 --steps 1000 "$@" > "$OUT/$name.log" 2>&1
    test -e "$OUT/$name/config.json"' train <<END
no-target-activations --no-target-activations
no-sparse-kv --no-sparse-kv
whole
no-distillation --no-distillation
random-init --random-init
no-feedback-memory --no-feedback-memory
omega-1 --omega 1
END
python benchmarks/spire.py --only-spire --out "$OUT/spire-ablations.json" --spire "$OUT/whole" "$OUT/no-sparse-kv" \
    "$OUT/no-target-activations" "$OUT/no-distillation" "$OUT/random-init" "$OUT/no-feedback-memory" "$OUT/omega-1"
