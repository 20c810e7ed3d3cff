# SPDX-License-Identifier: Apache-2.0
"""Greedy output of the shipped model: magicdec against plain decoding, token by token.

Engines, prompts and the comparison are those of the tests. Everything is float32: in bfloat16 even the
order of a sum can decide which of two tokens is the likelier one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import engines
import texts
from greedy import assert_same_tokens

from benchmarks.common.policies import POLICIES

GAMMA = 4


@dataclass(frozen=True)
class Case:
    """A policy with a budget."""

    policy: str  # of `POLICIES`
    budget: int  # tokens


CASES = (
    Case("streamingllm", 128),
    Case("snapkv", 128),
    Case("snapkv-token", 128),
    Case("verify-topk", 192),
    Case("verify-topk-token", 128),
    Case("streamingllm", engines.MODEL_LEN),  # a view of the whole context
)


def check(runner: str, num_prompts: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Compare every case on one of vLLM's model runners.

    Args:
        runner: "v1" or "v2".
        num_prompts: of 300 to 1,500 tokens.
        max_tokens: generated for each.

    Yields:
        A result for each case; its `status` is "ok", "wrong" or "failed".
    """
    prompts = texts.prompts(num_prompts, 300, 1500)
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    plain: engines.EngineRun | None = None
    for case in CASES:
        spec = engines.magicdec(GAMMA, draft_kv_budget=case.budget, **POLICIES[case.policy])
        result = {
            "runner": runner,
            "policy": case.policy,
            "budget": case.budget,
            "gamma": GAMMA,
            "requests": num_prompts,
            "tokens": max_tokens,
        }
        try:
            if plain is None:
                plain = _generate(runner, prompts, sampling)
            run = _generate(runner, prompts, sampling, speculative_config=spec)
            result |= {"drafted": run.drafted, "accepted": run.accepted}
            _judge(plain, run, runner, case)
        except AssertionError as error:
            yield {**result, "status": "wrong", "reason": str(error)}
        except RuntimeError as error:
            yield {**result, "status": "failed", "reason": str(error)}
        else:
            yield {**result, "status": "ok", "reason": ""}


def _generate(runner: str, prompts: list[list[int]], sampling: Any, **engine: Any) -> engines.EngineRun:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
    return engines.generate(
        prompts,
        sampling,
        v2=runner == "v2",
        env=env,
        own_process=torch.cuda.is_available(),  # whose end frees the device's memory
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=257,
        **engine,
    )


def _judge(plain: engines.EngineRun, run: engines.EngineRun, runner: str, case: Case) -> None:
    what = f"{runner}, {case.policy}, budget {case.budget}"
    assert plain.v2_runner == run.v2_runner == (runner == "v2"), f"{what}: another runner"
    assert_same_tokens(plain.results[0][0], run.results[0][0], what)
    assert run.draft_failures == 0, f"{what}: drafting failed {run.draft_failures} times"
    if case.budget == engines.MODEL_LEN:
        assert run.accepted == run.drafted > 0, f"{what}: {run.accepted} of {run.drafted} drafts accepted"


def budgets_differ(results: list[dict[str, Any]]) -> bool:
    """Whether some view was small enough to lose drafts, so that sameness had something to prove."""
    return any(result.get("accepted", 0) < result.get("drafted", 0) for result in results)
