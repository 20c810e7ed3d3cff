# SPDX-License-Identifier: Apache-2.0
"""Predicted speedups of models with window layers; prints docs/performance.md's table."""

from dataclasses import replace

from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Deployment
from vllm_magicdec.planner.shapes import ModelShape

CELLS = ((8, 32_768), (32, 16_384), (24, 32_768), (6, 131_072))  # batch, tokens per request
WINDOW = 1024
HYBRIDS = ("gemma-3-12b", "gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b")


def shapes() -> list[ModelShape]:
    """Return Llama-3.1-8B with decreasing numbers of full-attention layers, then real hybrids."""
    llama = MODELS["llama-3.1-8b"]
    fewer = [
        replace(llama, name="the same with windows", num_window_layers=32 - full, window=WINDOW)
        for full in (24, 16, 8, 4)
    ]
    return [llama, *fewer, *(MODELS[name] for name in HYBRIDS)]


def speedups(shape: ModelShape) -> list[float]:
    """Return the speedups in `CELLS` with the best gamma up to 8 on one H200."""
    deployment = Deployment(shape, HARDWARE["H200"])
    for batch, context in CELLS:
        assert batch * context <= deployment.kv_capacity_tokens(context), f"{shape.name} does not fit"
    return [deployment.best({512: 0.8}, 8, *cell).speedup for cell in CELLS]


def documented() -> list[str]:
    cells = (f"{batch} x {context:,}" for batch, context in CELLS)
    lines = [
        f"| model | layers that see everything | {' | '.join(cells)} |",
        "| --- | --- |" + " --: |" * len(CELLS),
    ]
    for shape in shapes():
        full = f"{shape.num_layers - shape.num_window_layers} of {shape.num_layers}"
        predicted = " | ".join(f"{speedup:.2f}" for speedup in speedups(shape))
        lines.append(f"| {shape.name} | {full} | {predicted} |")
    return lines


if __name__ == "__main__":
    print("\n".join(documented()))
