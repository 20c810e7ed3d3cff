# SPDX-License-Identifier: Apache-2.0
"""Start vLLM's engines in Python, and let them take turns."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

PAGE = 32  # tokens; the smallest page of vLLM's CPU attention
IDLE_SPIN_S = 1.5  # vLLM's idle workers poll for a second before they yield their core
T = TypeVar("T")


def set_environment(*, kv_cache_gib: int, **variables: str) -> None:
    """Set the environment of the engines that this process starts.

    Args:
        kv_cache_gib: default size of a CPU's KV cache.
        variables: variables that override the user's.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A failure while drafting ends the benchmark instead of slowing it down.
    os.environ.setdefault("VLLM_MAGICDEC_STRICT", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    os.environ.update(variables)


def engine_settings(model: str, dtype: str, *, batch: int, model_len: int, **others: Any) -> dict[str, Any]:
    """Return arguments of `LLM` without the speculative configuration."""
    return {
        "model": model,
        "dtype": dtype,
        "block_size": PAGE,
        "max_num_seqs": batch,
        "max_model_len": model_len,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "disable_log_stats": False,
        **others,
    }


@contextmanager
def engine(settings: dict[str, Any], speculative_config: dict[str, Any] | None = None) -> Iterator[Any]:
    """Run an engine (vLLM's `LLM`) until the block ends."""
    from vllm import LLM

    llm = LLM(**settings, speculative_config=speculative_config)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Turn:
    """Separates the turns of engines that are alive at the same time."""

    def __init__(self) -> None:
        self._latest: Any = None

    def of(self, llm: Any) -> Any:
        """Return the engine after the previous engine's workers have stopped polling a CPU's cores."""
        if llm is not self._latest and not torch.cuda.is_available():
            time.sleep(IDLE_SPIN_S)
        self._latest = llm
        return llm


def take_turns(contenders: dict[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Call the contenders in turns, every other turn backwards, and return their results by name."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            results[name].append(contenders[name]())
    return results
