# SPDX-License-Identifier: Apache-2.0
"""`magicdec profile`: step times of a model on this machine, in the real engine, written to a file.

The file is what `num_speculative_tokens: auto` starts from (its field `profile`).
"""

import argparse
import itertools
import json
import os
import platform
from pathlib import Path
from typing import Any

from vllm_magicdec.controller import Controller
from vllm_magicdec.step_times import StepTimes

# How often each kind of step is made.
_REPEATS = 4


class _Tour(Controller):
    """Goes through all lengths instead of choosing.

    Each length in turn with plain decoding, then alone. So drafting without verifying, verifying without
    drafting, both and none are all seen, and every time of MagicDec's Eq. 2 is a difference of two.
    """

    def __init__(self, max_tokens: int, times: StepTimes) -> None:
        super().__init__(max_tokens, times)
        lengths = [0] * _REPEATS
        for length in self._lengths[1:]:
            lengths += [0, length] * _REPEATS + [length] * _REPEATS
        self.num_steps = len(lengths) + 1  # the last drafts are verified
        self.max_tokens = sum(lengths) + self.num_steps
        self._lengths_to_come = itertools.cycle(lengths)

    def choose(self, num_reqs: int, context_tokens: int) -> int:
        return next(self._lengths_to_come)


def measure(llm: Any, batches: list[int], contexts: list[int]) -> StepTimes:
    """Step times of every batch size with every context, for every number of drafts.

    Args:
        llm: an engine with `num_speculative_tokens: auto`, its core in this process.
        batches: numbers of requests.
        contexts: tokens per request.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    tour = _Tour(scheduler.num_spec_tokens, StepTimes(scheduler._controller.times.budget))
    scheduler._controller = tour
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    names = itertools.count()
    for context, batch in itertools.product(sorted(contexts), sorted(batches, reverse=True)):
        # Room for every step to accept everything it drafts.
        limit = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=None)
        ids = []
        for row in range(batch):
            prompt = [(31 * place + row) % (vocab_size - 1) + 1 for place in range(context)]
            ids.append(engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, limit))
        decoding: set[str] = set()
        steps = 0
        while engine.has_unfinished_requests() and steps < tour.num_steps:
            decoding |= {output.request_id for output in engine.step()}
            steps += len(decoding) == batch
        engine.abort_request(ids)
        print(f"batch {batch}, context {context}: {steps} steps", flush=True)
    tour.times.fit()
    return tour.times


def run(options: argparse.Namespace) -> None:
    """The subcommand."""
    # The scheduler, which holds the times, must be within reach.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": "auto",
        **options.speculative_config,
    }
    limit = int(spec.get("max_num_speculative_tokens", 8))
    room = _Tour(limit, StepTimes(1)).max_tokens
    llm = LLM(
        **{
            "model": options.model,
            "max_num_seqs": max(options.batch),
            "max_model_len": max(options.context) + room,
            "disable_log_stats": True,
            **options.engine,
            "speculative_config": spec,
        }
    )
    times = measure(llm, options.batch, options.context)
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
    parser.add_argument(
        "--context", type=int, nargs="+", default=[256, 2048, 8192], help="tokens per request"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM() as JSON")
    parser.add_argument(
        "--speculative-config", type=json.loads, default={}, help="draft_kv_* fields and the like as JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("magicdec-profile.json"))
    parser.set_defaults(run=run)
