# SPDX-License-Identifier: Apache-2.0
"""What an engine of the engine layer does in a process of its own.

`python -m benchmarks.gpu.engine_scenarios` is `tests/engine_process.py`, which has to be on the path, with
scenarios that measure. A cell is a batch of requests of the same context.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import engine_process
import scenarios
import torch

from benchmarks.common.decoding import decode, medians
from benchmarks.common.documents import excerpts
from benchmarks.gpu import stand_in

WARMUP_TURNS = 1  # whatever is compiled at its first use is compiled in these


def step_times(llm: Any, cells: list[tuple[int, int]], tours: int) -> dict[str, Any]:
    """Median time of every kind of step; see `vllm_magicdec.planner.profile.measure_cell`."""
    from vllm_magicdec.planner.profile import measure_cell, tokens_to_grow

    def measure(batch: int, context: int) -> dict[str, Any]:
        seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
        for turn in range(WARMUP_TURNS + tours):
            for timed in measure_cell(llm, batch, context):
                if turn >= WARMUP_TURNS:
                    seconds[timed.step.verified, timed.step.drafted].append(timed.seconds)
        kinds = [
            {"verified": v, "drafted": d, "ms": 1000 * statistics.median(times), "count": len(times)}
            for (v, d), times in sorted(seconds.items())
        ]
        return {"kinds": kinds}

    room = tokens_to_grow(llm.llm_engine.vllm_config.num_speculative_tokens)
    return {
        "cells": for_each_cell(llm, cells, room, measure),
        "attention_backends": llm.collective_rpc(_attention_backends)[0],
    }


def decode_speed(
    llm: Any,
    cells: list[tuple[int, int]],
    tokens: int,
    turns: int,
    *,
    as_many_as_fit: bool = False,
    text: bool = False,
) -> dict[str, Any]:
    """Decoding with all requests of the batch, as served.

    Args:
        llm: the engine.
        cells: (batch, context) each.
        tokens: to generate per request.
        turns: whose medians count.
        as_many_as_fit: of a batch that does not fit, measure the part that does.
        text: prompts are real text, as acceptance has to be, and not just numbers.
    """
    from vllm_magicdec.planner.profile import fill_prefix_cache, make_prompts

    def measure(batch: int, context: int) -> dict[str, Any]:
        if text:
            prompts = excerpts(llm.get_tokenizer(), batch, context)
        else:
            prompts = make_prompts(llm.llm_engine.model_config.get_vocab_size(), batch, context)
        fill_prefix_cache(llm, prompts)
        decodings = [decode(llm, prompts, tokens) for _ in range(WARMUP_TURNS + turns)][WARMUP_TURNS:]
        return asdict(medians(decodings))

    if as_many_as_fit:
        cells = [(min(batch, fitting(llm, context + tokens)), context) for batch, context in cells]
    return {"cells": for_each_cell(llm, cells, tokens, measure)}


def for_each_cell(
    llm: Any, cells: list[tuple[int, int]], room: int, measure: Callable[[int, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """`measure` cell by cell; a cell that does not fit or fails has a reason instead.

    Args:
        room: tokens by which each request may grow.
    """
    config = llm.llm_engine.vllm_config
    results: list[dict[str, Any]] = []
    for batch, context in cells:
        cell: dict[str, Any] = {"batch": batch, "context": context, "reason": ""}
        failed = any(result["status"] == "failed" for result in results)
        reason = why_not(
            batch,
            context + room + config.num_speculative_tokens,
            max_model_len=config.model_config.max_model_len,
            num_pages=num_pages(llm),
            page_size=config.cache_config.block_size,
        )
        if failed or reason:
            reason = reason or "the engine had failed before"
            results.append({**cell, "status": "skipped", "reason": reason})
            continue
        try:
            results.append({**cell, "status": "ok", **measure(batch, context)})
        except Exception as error:  # what was measured before is kept
            results.append({**cell, "status": "failed", "reason": f"{type(error).__name__}: {error}"})
    return results


def num_pages(llm: Any) -> int:
    """Of the KV cache that requests may have; vLLM never gives one out."""
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1


def fitting(llm: Any, tokens: int) -> int:
    """How many requests of so many tokens, and the drafts of a round, the KV cache holds; at least 1."""
    config = llm.llm_engine.vllm_config
    pages = -(-(tokens + config.num_speculative_tokens) // config.cache_config.block_size)
    return max(1, num_pages(llm) // pages)


def why_not(batch: int, context: int, *, max_model_len: int, num_pages: int, page_size: int) -> str:
    """Why an engine cannot hold `batch` requests of `context` tokens; empty if it can."""
    if context > max_model_len:
        return f"{context} tokens per request; the engine takes {max_model_len}"
    needed, room = batch * -(-context // page_size) * page_size, num_pages * page_size
    return f"{needed} tokens of KV cache; the engine has {room}" if needed > room else ""


def _attention_backends(worker: Any) -> list[str]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase).values()
    return sorted({layer.get_attn_backend().get_name() for layer in layers})


scenarios.SCENARIOS |= {scenario.__name__: scenario for scenario in (step_times, decode_speed)}

if __name__ == "__main__":
    if not torch.cuda.is_available():
        stand_in.install_synthetic_acceptance()
    engine_process.main()
