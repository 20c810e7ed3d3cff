# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that injects faults into drafting, which may cost speed but must not change outputs.

vLLM loads it from the dist-info beside this file if this folder is on PYTHONPATH; `engines.py` adds it for
tests that set `VLLM_MAGICDEC_TEST_FAULT`. The variable names a fault and its limits, for example
`third_step:first=10,last=60,rank=1`: the first and last occasion, counted from 0, and the tensor-parallel
rank. `drafts=4` also makes `auto` draft up to 4 tokens by passes in every round, so that passes can fail.
If the variable is a path, the file has this text and is read again whenever it changes, so that faults
start and stop in a running server. The log says when a fault first happens.

| name | effect |
| --- | --- |
| `batch` | reading the requests of a round raises |
| `selection` | the policy raises |
| `third_step` | a pass that makes the third draft of a round raises |
| `lookup` | a lookup on the host raises |
| `controller` | the controller of `auto` raises |
| `capture` | capturing a CUDA graph of draft steps raises |
| `slow` | a draft pass takes 20 times as long |
| `stuck` | a draft pass does not return until the fault is over (an occasion every 50 ms) |
| `nan` | a draft pass has NaN logits |
| `summaries` | `verify-topk` selects by garbage summaries of pages |
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.logger import init_logger

logger = init_logger("vllm.injected_faults")

VARIABLE = "VLLM_MAGICDEC_TEST_FAULT"
NAMES = "batch selection third_step lookup controller capture slow stuck nan summaries".split()
LIMITS = ("first", "last", "rank", "drafts")
SLOWER = 20
STUCK_S = 0.05
# Number of steps after the last forced choice that may still verify its drafts.
STEPS_IN_FLIGHT = 4


class InjectedError(RuntimeError):
    """Raised by a fault."""


class Fault:
    """The current fault; the docstring of the module describes `setting`."""

    def __init__(self, setting: str) -> None:
        self._file = Path(setting) if setting.startswith("/") else None
        self._changed_at = 0
        self._parse("" if self._file else setting)

    def _parse(self, text: str) -> None:
        self._name, _, limits = text.strip().partition(":")
        given = dict(limit.split("=") for limit in limits.split(",") if limit)
        unknown = {self._name} - {"", *NAMES} | given.keys() - LIMITS
        if unknown:
            raise ValueError(f"{VARIABLE}: unknown {min(unknown)!r}; use {', '.join((*NAMES, *LIMITS))}")
        self._limits = {limit: int(value) for limit, value in given.items()}
        self._occasions = Counter[str]()

    def _reload(self) -> None:
        if self._file is not None and self._file.exists():
            changed_at = self._file.stat().st_mtime_ns
            if changed_at != self._changed_at:
                self._changed_at = changed_at
                self._parse(self._file.read_text())

    @property
    def drafts(self) -> int:
        """Number of draft tokens that `auto` is forced to make by passes; 0: not forced."""
        self._reload()
        return self._limits.get("drafts", 0)

    def happens(self, name: str) -> bool:
        """Return whether this fault happens now; called once per occasion."""
        self._reload()
        if name != self._name or self._limits.get("rank", own_rank()) != own_rank():
            return False
        occasion, first = self._occasions[name], self._limits.get("first", 0)
        self._occasions[name] += 1
        happens = first <= occasion <= self._limits.get("last", occasion)
        if happens and occasion == first:
            logger.warning("The fault %s happens, on purpose.", name)
        return happens

    def raise_if(self, name: str) -> None:
        if self.happens(name):
            raise InjectedError(f"{name}, on purpose")


def own_rank() -> int:
    """Return the tensor-parallel rank of this process; 0 without a group, as in the engine core."""
    return parallel_state.get_tp_group().rank_in_group if parallel_state._TP is not None else 0


@functools.cache  # vLLM may load plugins several times
def install() -> None:
    """Patch the plugin's classes if the environment sets a fault."""
    setting = os.environ.get(VARIABLE, "")
    if not setting:
        return
    from vllm_magicdec.adaptive.scheduler import _AdaptiveSpeculation
    from vllm_magicdec.drafting.drafter import Drafter
    from vllm_magicdec.drafting.staged import StagedDrafts
    from vllm_magicdec.policies.verify_topk import VerifyTopK
    from vllm_magicdec.vllm_api.draft_graphs import DraftGraphs
    from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer
    from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator

    fault = Fault(setting)

    def raise_before(owner: Any, method: str, name: str) -> None:
        call_before(owner, method, lambda *_: fault.raise_if(name))

    raise_before(Drafter, "_prepare", "selection")
    raise_before(DraftGraphs, "_prepare_capture", "capture")
    # Importing `Lookups` would load Numba, and a CPU worker of vLLM could not start (cpu_llvmlite.py).
    call_before(StagedDrafts, "__init__", lambda *args: raise_before(args[2], "look_up", "lookup"))
    call_before(VerifyTopK, "score_pages", lambda self, *_: spoil(self.summaries, fault))
    for runner in (MagicDecProposer, MagicDecSpeculator):
        raise_before(runner, "_make_batch", "batch")
        runner.run = faulty_pass(runner.run, fault)
    make_controller = _AdaptiveSpeculation._make_controller
    _AdaptiveSpeculation._make_controller = lambda self: faulty_controller(make_controller(self), fault)


def call_before(owner: Any, method: str, do: Callable[..., None]) -> None:
    """Make a method of a class or an object call `do` first, with its positional arguments."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def do_and_call(*args: Any, **kwargs: Any) -> Any:
        do(*args)
        return original(*args, **kwargs)

    setattr(owner, method, do_and_call)


def spoil(summaries: Any, fault: Fault) -> None:
    if fault.happens("summaries"):
        summaries.min_keys.normal_().mul_(1e4)
        summaries.max_keys.fill_(torch.nan)


def faulty_pass(run: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_faultily(runner: Any, draft_pass: Any) -> Any:
        if draft_pass.queries.lasts.max() >= 2:
            fault.raise_if("third_step")
        began = time.perf_counter()
        if fault.happens("nan"):
            compute = runner.model.compute_logits
            runner.model.compute_logits = lambda *args, **kwargs: compute(*args, **kwargs).fill_(torch.nan)
            try:
                return run(runner, draft_pass)
            finally:
                del runner.model.compute_logits
        sampled = run(runner, draft_pass)
        if fault.happens("slow"):
            time.sleep((SLOWER - 1) * (time.perf_counter() - began))
        while fault.happens("stuck"):
            time.sleep(STUCK_S)
        return sampled

    return run_faultily


def faulty_controller(controller: Any, fault: Fault) -> Any:
    """Raise, or choose trials with a fault's drafts; if charged, none would be allowed for hours."""
    choose, plan, explorer = controller.choose, controller.plan, controller.explorer
    lost_seconds = explorer._lost_seconds
    uncharged = 0  # steps

    def faulty_choose(*args: Any, **kwargs: Any) -> Any:
        nonlocal uncharged
        fault.raise_if("controller")
        drafts = fault.drafts
        if not drafts:
            controller.plan = plan
            uncharged = max(0, uncharged - 1)
            return choose(*args, **kwargs)
        uncharged = STEPS_IN_FLIGHT
        controller.plan = lambda choice: limited(plan(choice), drafts)
        explorer.is_planned = True
        _, *drafting = controller.value.choices  # the first is plain decoding
        allowed = [choice for choice in drafting if choice.drafts <= drafts]
        return max(allowed, default=drafting[0])

    controller.choose = faulty_choose
    explorer._lost_seconds = lambda *args: 0.0 if uncharged else lost_seconds(*args)
    return controller


def limited(plan: Any, drafts: int) -> Any:
    """Return a `DraftPlan` of at most `drafts` drafts, without thresholds."""
    own = type(plan)(min(plan, drafts), lookups_alone=plan.lookups_alone)
    by_bucket = [own] * len(plan.by_bucket)
    return type(plan)(own, by_bucket=by_bucket, lookups_alone=own.lookups_alone)
