# SPDX-License-Identifier: Apache-2.0
"""`magicdec profile`: step times of a model on this machine, in the real engine, written to a file.

`auto` starts from the file (its field `profile`).
"""

import argparse
import itertools
import json
import os
import platform
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm_magicdec.adaptive.controller import CHOSEN, PLAIN, Choice, Controller, How
from vllm_magicdec.adaptive.step_times import StepTimes, TimedStep
from vllm_magicdec.planner.console import UserError

# How often each kind of step is made.
_REPEATS = 4
_CONTEXTS = (256, 2048, 8192)  # tokens
_LEAST_CONTEXT = 32


class _Tour(Controller):
    """Goes through all lengths instead of choosing, and keeps what it sees.

    Each length in turn with plain decoding, then alone. So drafting without verifying, verifying without
    drafting, both and none are all seen, and every time of MagicDec's Eq. 2 is a difference of two.
    """

    def __init__(self, lengths: Sequence[int], budget: int) -> None:
        super().__init__(lengths, budget, StepTimes())
        choices = [PLAIN] * _REPEATS
        for drafting in map(Choice, self.lengths):
            choices += [PLAIN, drafting] * _REPEATS + [drafting] * _REPEATS
        # The last drafts are verified in one step more, and that one is learnt from in the next.
        self.num_steps = len(choices) + 2
        self.max_tokens = sum(choice.drafts for choice in choices) + self.num_steps
        self.timed_steps: list[TimedStep] = []
        self._choices_to_come = itertools.cycle(choices)

    def choose(self, num_reqs: int, context_tokens: int, *, is_timed: bool = True) -> Choice:
        return next(self._choices_to_come)

    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        made: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        how: How = CHOSEN,
    ) -> None:
        super().observe(rounds, made, timed, drafted, how)
        if timed is not None:
            self.timed_steps.append(timed)


def tokens_to_grow(max_drafts: int) -> int:
    """By how many tokens a request may grow while it is measured."""
    return _Tour(range(max_drafts + 1), budget=1).max_tokens


def make_prompts(vocab_size: int, batch: int, context: int) -> list[list[int]]:
    """`batch` prompts of `context` token ids; a longer context begins with the shorter one."""
    return [[(31 * place + row) % (vocab_size - 1) + 1 for place in range(context)] for row in range(batch)]


def fill_prefix_cache(llm: Any, prompts: list[list[int]]) -> None:
    """Make all requests start to decode in the same step, if the prefix cache is on."""
    from vllm import SamplingParams

    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)


def _when_idle() -> float:
    """The time after the device has done what it was given.

    The V2 runner hands out a step's tokens before its drafts are made, which by the plain clock take their
    time in the next step.
    """
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()


def _come_late(engine: Any) -> bool:
    """Whether a step's drafts fall into the time of the next one.

    By `_when_idle` they do not, unless the device belongs to another process, as under tensor parallelism.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    backend = engine.vllm_config.parallel_config.distributed_executor_backend
    return scheduler._drafts_come_late and backend != "uni"


def measure_cell(llm: Any, batch: int, context: int) -> list[TimedStep]:
    """Every kind of step of `batch` requests with `context` tokens each, several times.

    The host's work for a step is part of its time, and nothing overlaps with it.

    Args:
        llm: an engine with `num_speculative_tokens: auto` that schedules synchronously, its core in this
            process.

    Raises:
        ValueError: it schedules asynchronously.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    if engine.vllm_config.scheduler_config.async_scheduling:
        raise ValueError("steps that overlap cannot be timed one by one; use async_scheduling=False")
    prompts = make_prompts(engine.model_config.get_vocab_size(), batch, context)
    fill_prefix_cache(llm, prompts)
    controller, clock = scheduler._controller, scheduler.clock
    tour = _Tour(controller.lengths, controller.budget)
    come_late = scheduler._drafts_come_late
    scheduler._drafts_come_late = _come_late(engine)
    scheduler._controller, scheduler.clock = tour, _when_idle
    # Room for every step to accept everything it drafts.
    limit = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=None)
    ids = [
        engine.add_request(f"{row}", {"prompt_token_ids": prompt}, limit)
        for row, prompt in enumerate(prompts)
    ]
    decoding: set[str] = set()
    steps = 0
    while engine.has_unfinished_requests() and steps < tour.num_steps:
        decoding |= {output.request_id for output in engine.step()}
        steps += len(decoding) == batch
    engine.abort_request(ids, internal=True)
    scheduler._drafts_come_late = come_late
    scheduler._controller, scheduler.clock = controller, clock
    return [timed for timed in tour.timed_steps if timed.step.num_reqs == batch]


def measure(llm: Any, batches: list[int], contexts: list[int]) -> StepTimes:
    """Step times of every batch size with every context, for every number of drafts.

    Args:
        llm: as for `measure_cell`.
        batches: numbers of requests.
        contexts: tokens per request.
    """
    times = StepTimes()
    for context, batch in itertools.product(sorted(contexts), sorted(batches, reverse=True)):
        steps = measure_cell(llm, batch, context)
        for timed in steps:
            times.add(timed)
        print(f"batch {batch}, context {context}: {len(steps)} steps", flush=True)
    times.fit()
    return times


def _model_len(options: argparse.Namespace) -> int:
    """Tokens that the engine may read."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}  # `LLM` takes others, too
    given = {name: value for name, value in options.engine.items() if name in known}
    arguments = {"model": options.model, **given}
    return int(EngineArgs(**arguments).create_model_config().max_model_len)


def _within(most: int, room: int) -> list[int]:
    """Lengths of contexts that a model has room for.

    Args:
        most: tokens of them.
        room: beside a context, for what is generated while its steps are measured.

    Raises:
        UserError: there is next to none.
    """
    if most < _LEAST_CONTEXT:
        raise UserError(
            f"measuring takes {room} tokens beside a context, and the model's length leaves "
            f"{most}; use fewer drafts ('max_num_speculative_tokens')"
        )
    return sorted({min(length, most) for length in _CONTEXTS})


def run(options: argparse.Namespace) -> None:
    """The subcommand."""
    # The scheduler, which holds the times, must be within reach.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.platforms import current_platform

    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": "auto",
        **{
            name: value
            for name, value in options.speculative_config.items()
            if not name.startswith("draft_lookup")
        },
        # These prompts repeat themselves as no user's text does. What lookups spare is learnt in use.
        "draft_lookup": "off",
    }
    drafts = spec["num_speculative_tokens"]
    most = int(spec.get("max_num_speculative_tokens", 8) if drafts == "auto" else drafts)
    room = tokens_to_grow(most)
    contexts = options.context or _within(_model_len(options) - room, room)
    llm = LLM(
        **{
            "model": options.model,
            # vLLM captures full CUDA graphs of no more lengths than that.
            "max_num_seqs": max(*options.batch, most + 1),
            "max_model_len": max(contexts) + room,
            "disable_log_stats": True,
            "async_scheduling": False,
            # In this process, the worker would compute with all cores; a server's leaves one to others.
            **({"distributed_executor_backend": "mp"} if current_platform.is_cpu() else {}),
            **options.engine,
            "speculative_config": spec,
        }
    )
    try:
        times = measure(llm, options.batch, contexts)
    finally:
        llm.llm_engine.engine_core.shutdown()
    description = {
        "model": options.model,
        "machine": platform.processor() or platform.machine(),
        "engine": options.engine,
        "speculative_config": spec,
    }
    times.save(options.out, description)
    print(f'wrote {options.out}; use it with the field "profile": "{options.out}"')


def add_command(subparsers: Any) -> None:
    """Add `profile` to the command line."""
    parser = subparsers.add_parser("profile", help="measure step times for num_speculative_tokens 'auto'")
    parser.add_argument("--model", required=True, help="what 'vllm serve' would be given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8], help="requests at a time")
    lengths = " ".join(map(str, _CONTEXTS))
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        help=f"tokens per request (default: {lengths}, as far as the model reads them)",
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM() as JSON")
    parser.add_argument(
        "--speculative-config", type=json.loads, default={}, help="draft_kv_* fields and the like as JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("magicdec-profile.json"))
    parser.set_defaults(run=run)
