# SPDX-License-Identifier: Apache-2.0
"""For trees.py: what draft passes of any width and verifications of any size take."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from time import process_time
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
from common.engines import PAGE, engine, engine_settings
from kv_heavy import KV_HEAVY, model_folder
from token_trees import TokenTree

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.step_times import Step, StepTimes
from vllm_magicdec.planner import profile
from vllm_magicdec.planner.performance import Deployment

MEASURED_DRAFTS = (1, 2, 4, 8, 16, 32)  # numbers between them are interpolated


class Costs(Protocol):
    """Milliseconds, of `batch` requests with `context` tokens each."""

    name: str

    def plain_ms(self, batch: int, context: int) -> float:
        """T_T of a plain step."""

    def draft_ms(self, batch: int, context: int, width: int) -> float:
        """T_D of a draft pass that reads `width` positions per request."""

    def verify_ms(self, batch: int, context: int, drafts: int) -> float:
        """T_V, with all that a round has beside passes."""


@dataclass(frozen=True)
class MeasuredCosts:
    """From steps of an engine."""

    name: str
    times: StepTimes
    budget: int  # tokens per request that a draft pass sees

    def plain_ms(self, batch: int, context: int) -> float:
        """See `Costs`."""
        return 1e3 * self.times.predict(Step(batch, batch * context, 0, 0))

    def draft_ms(self, batch: int, context: int, width: int) -> float:
        """See `Costs`. No engine makes wide draft passes of this kind: each position beyond the second
        takes what it takes in a verification over as many tokens, and the second takes nothing."""
        most = MEASURED_DRAFTS[-1]
        drafting = self.times.predict(Step(batch, batch * context, 0, most, self.budget))
        one = (1e3 * drafting - self.plain_ms(batch, context)) / most
        if width <= 2:
            return one
        seen = min(context, self.budget)
        return one + max(0.0, self.verify_ms(batch, seen, width - 1) - self.verify_ms(batch, seen, 1))

    def verify_ms(self, batch: int, context: int, drafts: int) -> float:
        """See `Costs`."""
        measured = [
            1e3 * self.times.predict(Step(batch, batch * context, known, 0)) for known in MEASURED_DRAFTS
        ]
        return float(np.interp(drafts, MEASURED_DRAFTS, measured))


@dataclass(frozen=True)
class PlannedCosts:
    """From a data sheet."""

    name: str
    deployment: Deployment
    budget: int  # tokens per request that a draft pass sees

    def plain_ms(self, batch: int, context: int) -> float:
        """See `Costs`."""
        return self.deployment.plain_step_ms(batch, context)

    def draft_ms(self, batch: int, context: int, width: int) -> float:
        """See `Costs`."""
        return self.deployment.forward_ms(batch, width, min(context, self.budget))

    def verify_ms(self, batch: int, context: int, drafts: int) -> float:
        """See `Costs`."""
        extra = self.deployment.costs.round_overhead_ms
        return self.deployment.verify_ms(drafts, batch, context) + extra


class Cell:
    """What rounds cost at one batch and context.

    Args:
        costs: where its times are from.
        batch: requests.
        context: tokens of each.
    """

    def __init__(self, costs: Costs, batch: int, context: int) -> None:
        self.costs, self.batch, self.context = costs, batch, context
        self.plain_ms = costs.plain_ms(batch, context)
        self.draft_ms = cache(lambda width: costs.draft_ms(batch, context, width))
        self.verify_ms = cache(lambda drafts: costs.verify_ms(batch, context, drafts))

    def round_ms(self, tree: TokenTree) -> float:
        """Drafting a tree level by level and verifying it."""
        return sum(map(self.draft_ms, tree.widths)) + self.verify_ms(tree.size)

    def speedup(self, tree: TokenTree, tokens_per_round: float) -> float:
        """Over plain decoding (MagicDec's Eq. 2)."""
        return tokens_per_round * self.plain_ms / self.round_ms(tree)


def measure(
    batches: Iterable[int], contexts: Iterable[int], budget: int, most_tokens: int, dtype: str
) -> StepTimes:
    """Step times of the KV-heavy copy in an engine on this machine: the processor's, in this process.

    So what else runs on the machine counts little: with one thread that is the time on the wall when
    nothing else runs.

    Args:
        batches: requests.
        contexts: tokens of each. A batch that holds more than `most_tokens`, or than the KV cache does, is
            measured with shorter ones; its times at the whole contexts are those of the fit.
        budget: tokens per request that a draft step sees.
        most_tokens: see `contexts`.
        dtype: of the model, as vLLM names it.

    Raises:
        SystemExit: vLLM computes with several threads.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, one thread
    times = StepTimes()
    room = profile._Tour(MEASURED_DRAFTS, budget).max_tokens + 2 * PAGE
    batches, contexts = sorted(batches), sorted({budget, *contexts})
    with model_folder(KV_HEAVY) as model:
        settings = engine_settings(
            model,
            dtype,
            batch=batches[-1],
            model_len=contexts[-1] + room,
            distributed_executor_backend="uni",
            async_scheduling=False,
        )
        spec = {
            "method": "magicdec-self",
            "num_speculative_tokens": "auto",
            "max_num_speculative_tokens": MEASURED_DRAFTS[-1],
            "draft_lookup": "off",  # every number of drafts is timed
            "draft_kv_budget": budget,
        }
        with engine(settings, spec) as llm:
            if (threads := torch.get_num_threads()) > 1:
                raise SystemExit(
                    f"vLLM computes with {threads} threads; begin the command with 'taskset -c 0'"
                )
            for batch in batches[::-1]:
                fits = min(capacity_of(llm) // batch - room, most_tokens // batch)
                for context in sorted({min(context, fits) for context in contexts}):
                    for timed in measure_lengths(llm, batch, context):
                        times.add(timed)
                    print(f"step times of batch {batch}, context {context}: measured", flush=True)
    times.fit()
    return times


def capacity_of(llm: Any) -> int:
    """Tokens that the KV cache holds, but for one page."""
    cache_config = llm.llm_engine.vllm_config.cache_config
    return (cache_config.num_gpu_blocks - 1) * cache_config.block_size


def measure_lengths(llm: Any, batch: int, context: int) -> list[Any]:
    """`measure_cell` for `MEASURED_DRAFTS` alone, by the processor's time."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    own = scheduler._controller
    scheduler._controller = Controller(MEASURED_DRAFTS, own.budget, StepTimes())
    try:
        with patch.object(profile, "_when_idle", process_time):
            return profile.measure_cell(llm, batch, context)
    finally:
        scheduler._controller = own
