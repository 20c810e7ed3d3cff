# SPDX-License-Identifier: Apache-2.0
"""`magicdec profile`: measure a model's step times in the real engine and write them to a file.

The field `profile` of the speculative config names the file; `auto` then starts from these times.
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

from typing_extensions import override

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.step_times import StepTimes, TimedStep
from vllm_magicdec.adaptive.value import PLAIN, UNPLANNED, AcceptanceValue, Choice, RoundInfo
from vllm_magicdec.planner.console import UserError

_REPEATS = 4  # of each type of step
_CONTEXTS = (256, 2048, 8192)  # tokens
_MIN_CONTEXT = 32


class _Sweep(Controller):
    """Try every number of drafts and record the step times.

    Each number alternates with plain decoding first, then repeats alone. The steps cover drafting without
    verification, verification without drafting, both, and neither, so every time of MagicDec's Eq. 2 is a
    difference of two measured ones.
    """

    def __init__(self, lengths: Sequence[int], budget: int) -> None:
        value = AcceptanceValue(lengths, budget)
        super().__init__(value, StepTimes())
        choices = [PLAIN] * _REPEATS
        for drafting in value.choices[1:]:
            choices += [PLAIN, drafting] * _REPEATS + [drafting] * _REPEATS
        # One more step verifies the last drafts, and the controller observes that step in the next.
        self.num_steps = len(choices) + 2
        self.max_tokens = sum(choice.drafts for choice in choices) + self.num_steps
        self.timed_steps: list[TimedStep] = []
        self._sweep = itertools.cycle(choices)

    @override
    def choose(self, num_reqs: int, context_tokens: int, *, is_timed: bool = True) -> Choice:
        return next(self._sweep)

    @override
    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        verified: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        info: RoundInfo = UNPLANNED,
    ) -> None:
        super().observe(rounds, verified, timed, drafted, info)
        if timed is not None:
            self.timed_steps.append(timed)


def fill_prefix_cache(llm: Any, prompts: list[list[int]]) -> None:
    """Compute the prompts' K/V, so that all requests start to decode in the same step."""
    from vllm import SamplingParams

    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)


def _synchronized_clock() -> float:
    """Return the time after the device has finished.

    The V2 runner returns a step's tokens before it has drafted; without synchronization the drafting time
    would count for the next step.
    """
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()


def measure_cell(llm: Any, batch: int, context: int) -> list[TimedStep]:
    """Measure every type of step several times at one batch and context, host time included.

    The `LLM` needs `num_speculative_tokens: auto`, synchronous scheduling (else ValueError), and its engine
    core in this process.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    if engine.vllm_config.scheduler_config.async_scheduling:
        raise ValueError("overlapping steps cannot be timed separately; use async_scheduling=False")
    last_id = engine.model_config.get_vocab_size() - 1
    # A longer context begins with the shorter one.
    prompts = [[(31 * index + row) % last_id + 1 for index in range(context)] for row in range(batch)]
    fill_prefix_cache(llm, prompts)
    controller, clock, come_late = scheduler._controller, scheduler.clock, scheduler._drafts_come_late
    sweep = _Sweep([choice.drafts for choice in controller.value.choices], controller.value.budget)
    # A device of another process, as under tensor parallelism, cannot be synchronized from here.
    if engine.vllm_config.parallel_config.distributed_executor_backend == "uni":
        scheduler._drafts_come_late = False
    scheduler._controller, scheduler.clock = sweep, _synchronized_clock
    # No limit: a step may accept all of its drafts.
    limit = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=None)
    ids = [
        engine.add_request(f"{row}", {"prompt_token_ids": prompt}, limit)
        for row, prompt in enumerate(prompts)
    ]
    decoding: set[str] = set()
    steps = 0
    while engine.has_unfinished_requests() and steps < sweep.num_steps:
        decoding |= {output.request_id for output in engine.step()}
        steps += len(decoding) == batch
    engine.abort_request(ids, internal=True)
    scheduler._drafts_come_late = come_late
    scheduler._controller, scheduler.clock = controller, clock
    return [timed for timed in sweep.timed_steps if timed.step.num_reqs == batch]


def measure(llm: Any, batches: list[int], contexts: list[int]) -> StepTimes:
    """Measure step times for every batch size, context and number of drafts."""
    times = StepTimes()
    for context, batch in itertools.product(sorted(contexts), sorted(batches, reverse=True)):
        steps = measure_cell(llm, batch, context)
        for timed in steps:
            times.add(timed)
        print(f"batch {batch}, context {context}: {len(steps)} steps", flush=True)
    times.fit()
    return times


def _max_model_len(options: argparse.Namespace) -> int:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}  # `LLM` accepts others, too
    arguments = {"model": options.model, **options.engine}
    engine = EngineArgs(**{name: value for name, value in arguments.items() if name in known})
    return int(engine.create_model_config().max_model_len)


def _default_contexts(max_context: int, generated: int) -> list[int]:
    """Choose contexts of at most `max_context` tokens, or raise UserError; measuring adds `generated`."""
    if max_context < _MIN_CONTEXT:
        raise UserError(
            f"measuring generates {generated} tokens, which leaves {max_context} tokens of the model's "
            "length for a context; use fewer drafts ('max_num_speculative_tokens')"
        )
    return sorted({min(length, max_context) for length in _CONTEXTS})


def run(options: argparse.Namespace) -> None:
    """Run `magicdec profile`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # makes the scheduler accessible from here
    from vllm import LLM
    from vllm.platforms import current_platform

    # The prompts repeat themselves more than real text, so they are measured without lookups, whose gain
    # `auto` learns in use.
    fields = options.speculative_config.items()
    given = {name: value for name, value in fields if not name.startswith("draft_lookup")}
    spec = {"method": "magicdec-self", "num_speculative_tokens": "auto", **given, "draft_lookup": "off"}
    drafts = spec["num_speculative_tokens"]
    max_drafts = int(spec.get("max_num_speculative_tokens", 8) if drafts == "auto" else drafts)
    generated = _Sweep(range(max_drafts + 1), budget=1).max_tokens
    contexts = options.context or _default_contexts(_max_model_len(options) - generated, generated)
    llm = LLM(
        **{
            "model": options.model,
            # vLLM captures no more full CUDA graphs than this.
            "max_num_seqs": max(*options.batch, max_drafts + 1),
            "max_model_len": max(contexts) + generated,
            "disable_log_stats": True,
            "async_scheduling": False,
            # A worker in this process would use all cores; a server's worker leaves one for others.
            **({"distributed_executor_backend": "mp"} if current_platform.is_cpu() else {}),
            **options.engine,
            "speculative_config": spec,
        }
    )
    try:
        times = measure(llm, options.batch, contexts)
    finally:
        llm.llm_engine.engine_core.shutdown()
    machine = platform.processor() or platform.machine()
    description = {"model": options.model, "machine": machine, "engine": options.engine}
    times.save(options.out, {**description, "speculative_config": spec})
    print(f'wrote {options.out}; use it with the field "profile": "{options.out}"')


def add_command(subparsers: Any) -> None:
    """Add `profile` to the command line."""
    parser = subparsers.add_parser("profile", help="measure step times for num_speculative_tokens 'auto'")
    parser.add_argument("--model", required=True, help="the model, as for 'vllm serve'")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8], help="requests per step")
    contexts = f"{' '.join(map(str, _CONTEXTS))}, limited by the model's length"
    parser.add_argument("--context", type=int, nargs="+", help=f"tokens per request (default: {contexts})")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM() as JSON")
    parser.add_argument(
        "--speculative-config", type=json.loads, default={}, help="fields of the speculative config as JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("magicdec-profile.json"))
    parser.set_defaults(run=run)
