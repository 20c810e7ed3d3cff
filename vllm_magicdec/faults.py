# SPDX-License-Identifier: Apache-2.0
"""Faults that tests inject into drafting: whatever breaks in it may cost speed, and never an answer.

`VLLM_MAGICDEC_FAULT` names one, with what limits it, as in `third_step:first=10,last=60,rank=1`: the
occasions on which it happens, counted from 0, and the tensor-parallel rank. With `drafts=4` `auto` lets
every round draft by passes meanwhile, so many at most: where lookups bring all that pays, it would make no
pass for a fault to happen in. A path instead names a file that holds such a text, or none, and is read
again whenever it has changed: so faults come and go in a server that runs. The first time that one happens
is a line of the log.

| name | what happens |
| --- | --- |
| `batch` | reading a round's requests raises |
| `selection` | the policy raises |
| `third_step` | a pass that makes a round's third draft raises |
| `lookup` | a lookup raises |
| `controller` | the controller of `auto` raises |
| `capture` | capturing a CUDA graph of draft steps raises |
| `slow` | a draft pass takes 20 times as long |
| `stuck` | a draft pass does not come back, until the fault is over (an occasion every 50 ms) |
| `nan` | a draft pass has logits that are not numbers |
| `summaries` | `verify-topk`'s summaries of pages are garbage before it selects |

Nothing is wrapped, and nothing asked on the way, unless the variable is set when an engine starts.
"""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_magicdec import envs

logger = init_logger(f"vllm.{__name__}")

NAMES = (
    "batch",
    "selection",
    "third_step",
    "lookup",
    "controller",
    "capture",
    "slow",
    "stuck",
    "nan",
    "summaries",
)
LIMITS = ("first", "last", "rank", "drafts")
_SLOWER = 20
_STUCK_S = 0.05
# Whose drafts may be verified after the last choice that was told.
_STEPS_IN_FLIGHT = 4
_NEVER = 2**63


class InjectedError(RuntimeError):
    """What a fault raises."""


class Fault:
    """The fault that is injected at present.

    Args:
        setting: see the module.
        rank: this worker's.
    """

    def __init__(self, setting: str, rank: int) -> None:
        self._file = Path(setting) if setting.startswith("/") else None
        self._rank = rank
        self._changed_at = -1.0
        self._set("" if self._file else setting)

    def _set(self, text: str) -> None:
        self._name, _, limits = text.strip().partition(":")
        if self._name and self._name not in NAMES:
            raise ValueError(f"VLLM_MAGICDEC_FAULT names {self._name!r}; use one of {', '.join(NAMES)}")
        given = dict(limit.split("=") for limit in limits.split(",") if limit)
        if unknown := given.keys() - LIMITS:
            raise ValueError(f"VLLM_MAGICDEC_FAULT limits by {min(unknown)!r}; use {', '.join(LIMITS)}")
        self._first, self._last = int(given.get("first", 0)), int(given.get("last", _NEVER))
        self._is_here = int(given.get("rank", self._rank)) == self._rank
        self._drafts = int(given.get("drafts", 0))
        self._occasions = Counter[str]()

    def _read_again(self) -> None:
        if self._file is not None and self._file.exists():
            changed_at = self._file.stat().st_mtime
            if changed_at != self._changed_at:
                self._changed_at = changed_at
                self._set(self._file.read_text())

    @property
    def drafts(self) -> int:
        """That `auto` lets every round make by passes now; 0: as many as it likes."""
        self._read_again()
        return self._drafts

    def happens(self, name: str) -> bool:
        """Whether this fault happens now; to be asked once on each of its occasions."""
        self._read_again()
        if name != self._name or not self._is_here:
            return False
        occasion = self._occasions[name]
        self._occasions[name] += 1
        if occasion == self._first <= self._last:
            logger.warning("The fault %s happens, on purpose.", name)
        return self._first <= occasion <= self._last

    def raise_if(self, name: str) -> None:
        """Raise if this fault happens now."""
        if self.happens(name):
            raise InjectedError(f"{name}, on purpose")


def inject_into_drafter(drafter: Any) -> None:
    """Wrap what a `drafting.drafter.Drafter` calls, if a fault is set."""
    if not envs.fault():
        return
    fault, runner = Fault(envs.fault(), get_tp_group().rank_in_group), drafter._runner
    drafter._prepare = _before(drafter._prepare, lambda: fault.raise_if("selection"))
    summaries = [found for views in drafter._views if (found := _summaries_of(views)) is not None]
    if summaries:
        drafter._prepare = _before(drafter._prepare, lambda: _spoil(summaries, fault))
    # A runner outlives its first drafter where vLLM lays the KV cache out twice.
    for name in ("draft_step", "draft_pass"):
        setattr(runner, name, _faulty_pass(inspect.unwrap(getattr(runner, name)), runner, fault))
    runner._make_batch = _before(inspect.unwrap(runner._make_batch), lambda: fault.raise_if("batch"))
    if drafter._staged is not None:
        lookups = drafter._staged._lookups
        lookups.look_up = _before(lookups.look_up, lambda: fault.raise_if("lookup"))
    if drafter._wide is not None:
        wide = drafter._wide
        wide._look_up = _before(wide._look_up, lambda: fault.raise_if("lookup"))


def inject_into_controller(controller: Any) -> None:
    """Wrap what the scheduler of `auto` asks its `adaptive.controller.Controller`, if a fault is set."""
    if envs.fault():
        fault = Fault(envs.fault(), rank=0)
        _let_it_draft(controller, fault)
        controller.choose = _before(controller.choose, lambda: fault.raise_if("controller"))


def inject_into_graphs(graphs: Any) -> None:
    """Wrap what `vllm_api.draft_graphs.DraftGraphs` calls before every capture, if a fault is set."""
    if envs.fault():
        fault = Fault(envs.fault(), get_tp_group().rank_in_group)
        graphs._prepare_capture = _before(graphs._prepare_capture, lambda: fault.raise_if("capture"))


def _before(function: Callable[..., Any], do: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def do_and_call(*args: Any, **kwargs: Any) -> Any:
        do()
        return function(*args, **kwargs)

    return do_and_call


def _let_it_draft(controller: Any, fault: Fault) -> None:
    """While a fault wants drafts, choose a trial of as many; it is not the controller that pays for it."""
    choose, plan, lost_seconds = controller.choose, controller.plan, controller._lost_seconds
    unpaid = 0  # steps

    @functools.wraps(choose)
    def choose_as_told(*args: Any, **kwargs: Any) -> Any:
        nonlocal unpaid
        drafts = fault.drafts
        if not drafts:
            controller.plan = plan
            unpaid = max(0, unpaid - 1)
            return choose(*args, **kwargs)
        unpaid = _STEPS_IN_FLIGHT
        controller.plan = lambda choice: _cut(plan(choice), drafts)
        controller.is_planned = True
        lengths = [length for length in controller.lengths if length <= drafts]
        length = max(lengths, default=controller.lengths[0])
        return next(choice for choice in controller._drafting if choice.drafts == length)

    controller.choose = choose_as_told
    controller._lost_seconds = lambda *args: 0.0 if unpaid else lost_seconds(*args)


def _cut(plan: Any, drafts: int) -> Any:
    """A `DraftPlan` of so many drafts at most, none of which is weighed."""
    own = type(plan)(min(plan, drafts), lookups_alone=plan.lookups_alone)
    by_kind = [own] * len(plan.by_kind)
    return type(plan)(own, by_kind=by_kind, lookups_alone=own.lookups_alone)


def _faulty_pass(run: Callable[..., Any], runner: Any, fault: Fault) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_faultily(tokens: torch.Tensor, taken: Any) -> Any:
        queries = getattr(taken, "queries", None)
        makes = taken.index + 1 if queries is None else int((queries.firsts + queries.lens).max())
        if makes >= 3:
            fault.raise_if("third_step")
        began = time.perf_counter()
        if fault.happens("nan"):
            with _NoNumbers(runner.model):
                return run(tokens, taken)
        drawn = run(tokens, taken)
        if fault.happens("slow"):
            time.sleep((_SLOWER - 1) * (time.perf_counter() - began))
        while fault.happens("stuck"):
            time.sleep(_STUCK_S)
        return drawn

    return run_faultily


class _NoNumbers:
    """While it lasts, a model's logits are NaN."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        compute_logits = self._model.compute_logits
        self._model.compute_logits = lambda *args, **kwargs: compute_logits(*args, **kwargs).fill_(
            torch.nan
        )

    def __exit__(self, *_: object) -> None:
        del self._model.compute_logits


def _summaries_of(views: Any) -> Any:
    return getattr(getattr(getattr(views, "_selector", None), "_policy", None), "summaries", None)


def _spoil(summaries: list[Any], fault: Fault) -> None:
    for of_views in summaries if fault.happens("summaries") else ():
        of_views.least.normal_().mul_(1e4)
        of_views.greatest.fill_(torch.nan)
