# SPDX-License-Identifier: Apache-2.0
"""Greedy output of the shipped model: magicdec against plain decoding.

Engines, prompts and the comparison of float32 are those of the tests. In float32 tokens must be the same.
In bfloat16 the order of a sum often decides which of two tokens is the likelier one, so there every token
is judged by itself: see `judge_near_ties`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import engines
import texts
from greedy import assert_same_tokens

from benchmarks.common.policies import POLICIES

GAMMA = 4
# More rounding than this (a logprob) and a wrong token could pass for a near-tie.
MAX_NEAR_TIE = 0.5
Scores = list[list[tuple[float, float]]]  # of `tests/scenarios.py: score`


@dataclass(frozen=True)
class Case:
    """A policy with a budget."""

    policy: str  # of `POLICIES`
    budget: int  # tokens
    draft_lookup: str = "off"

    def suits(self, mode: "Mode") -> bool:
        """On a GPU V2 alone has lookups."""
        return self.draft_lookup == "off" or mode.runner == "v2"


CASES = (
    Case("streamingllm", 128),
    Case("snapkv", 128),
    Case("snapkv-token", 128),
    Case("verify-topk", 192),
    Case("streamingllm", engines.MODEL_LEN),  # a view of the whole context
    Case("streamingllm", 128, "on"),
    Case("snapkv", 128, "on"),
)
SMALL_CASES = CASES[:1]  # in bfloat16, where a CPU has nothing to show but that it runs


@dataclass(frozen=True)
class Mode:
    """How the engines that are compared run."""

    name: str
    runner: str  # "v1", "v2"
    dtype: str = "float32"
    graphs: bool = False  # CUDA graphs, of draft steps too

    @property
    def reads_with_flashinfer(self) -> bool:
        """Whether draft steps over chosen tokens have to: FlashInfer knows no float32."""
        return self.graphs and self.dtype == "bfloat16"


MODES = {
    mode.name: mode
    for mode in (
        Mode("graphs", "v2", graphs=True),
        Mode("bfloat16-graphs", "v2", "bfloat16", graphs=True),
        Mode("v2", "v2"),
        Mode("v1", "v1"),
        Mode("bfloat16-v1", "v1", "bfloat16"),
    )
}


def check(
    mode: Mode, num_prompts: int, max_tokens: int, cases: Sequence[Case] = CASES
) -> Iterator[dict[str, Any]]:
    """Compare every case in one mode.

    Args:
        mode: of the engines.
        num_prompts: of 300 to 1,500 tokens.
        max_tokens: generated for each.
        cases: to compare.

    Yields:
        A result for each case; its `status` is "ok", "wrong" or "failed".
    """
    cases = [case for case in cases if case.suits(mode)]
    prompts = texts.prompts(num_prompts, 300, 1500)
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    sizes = {"requests": num_prompts, "tokens": max_tokens}
    try:
        plain = _generate(mode, prompts, sampling)
    except RuntimeError as error:
        yield from ({**_about(mode, c), **sizes, "status": "failed", "reason": str(error)} for c in cases)
        return
    runs: dict[Case, engines.EngineRun] = {}
    results: dict[Case, dict[str, Any]] = {}
    for case in cases:
        result = results[case] = {**_about(mode, case), **sizes}
        spec = engines.magicdec(
            GAMMA,
            draft_kv_budget=case.budget,
            draft_lookup=case.draft_lookup,
            **POLICIES[case.policy],
        )
        try:
            run = _generate(mode, prompts, sampling, speculative_config=spec)
            result |= {"drafted": run.drafted, "accepted": run.accepted}
            result |= _how_it_drafted(plain, run, mode, case)
        except RuntimeError as error:
            yield {**result, "status": "failed", "reason": str(error)}
            continue
        if mode.dtype == "float32":
            yield _settled(result, partial(_judge_tokens, plain, run, case))
        else:
            runs[case] = run
    if runs:
        decoded, scores = _tokens_logprobs(plain), _score(mode, prompts, [plain, *runs.values()])
        for case, scored in zip(runs, scores[1:], strict=True):
            judge = partial(judge_near_ties, decoded, scores[0], scored)
            yield _settled(results[case], judge)


def _about(mode: Mode, case: Case) -> dict[str, Any]:
    known = {"mode": mode.name, "runner": mode.runner, "dtype": mode.dtype, "gamma": GAMMA}
    return {**known, **asdict(case)}


def _settled(result: dict[str, Any], judge: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {**result, **judge(), "status": "ok", "reason": ""}
    except AssertionError as error:
        return {**result, "status": "wrong", "reason": str(error)}


def _judge_tokens(plain: engines.EngineRun, run: engines.EngineRun, case: Case) -> dict[str, Any]:
    assert_same_tokens(plain.results[0][0], run.results[0][0], f"{case.policy}, budget {case.budget}")
    if case.budget == engines.MODEL_LEN:
        assert run.accepted == run.drafted > 0, (
            f"{run.accepted} of {run.drafted} drafts accepted with the whole context in view"
        )
    return {}


def judge_near_ties(decoded: list[list[float]], plain: Scores, speculative: Scores) -> dict[str, float]:
    """Whether every token is the target's best but for rounding, in the context that it was made in.

    The target scores each finished text in one pass (`tests/scenarios.py: score`), which sums in another
    order than decoding did. How far that moves plain decoding's own logprobs is the rounding of this
    device, and a token may be behind the best one by twice the largest such step: either of the two may
    have moved.

    Args:
        decoded: the logprobs that plain decoding gave its own tokens, by request.
        plain: the scores of the same tokens.
        speculative: the scores of the tokens under test.

    Returns:
        `rounding`, the largest step; `near_ties`, how many tokens are behind; `largest_margin` of them.

    Raises:
        AssertionError: a token is further behind, or rounding would hide such a one.
    """
    rounding = max(
        abs(before - after)
        for before_all, after_all in zip(decoded, plain, strict=True)
        for before, (after, _) in zip(before_all, after_all, strict=True)
    )
    assert 2 * rounding < MAX_NEAR_TIE, f"rounding moves logprobs by {rounding:.3f}: nothing is proved"
    margins = {
        (request, place): best - own
        for request, scores in enumerate(speculative)
        for place, (own, best) in enumerate(scores)
    }
    (request, place), largest = max(margins.items(), key=lambda item: item[1])
    assert largest <= 2 * rounding, (
        f"token {place} of request {request} is {largest:.4f} behind the target's best one; rounding "
        f"explains {2 * rounding:.4f}"
    )
    near_ties = sum(margin > 0 for margin in margins.values())
    return {"rounding": rounding, "near_ties": near_ties, "largest_margin": largest}


def _generate(mode: Mode, prompts: list[list[int]], sampling: Any, **engine: Any) -> engines.EngineRun:
    """The run; `results` are what was generated and, with draft steps from graphs, their numbers."""
    generate = ("generate", {"batches": [{"prompts": prompts, "sampling": sampling}]})
    if not (mode.graphs and "speculative_config" in engine):
        return _run(mode, [generate], **engine)
    run = _run(mode, [("watch_draft_steps", {}), generate, ("count_draft_steps", {})], **engine)
    return replace(run, results=run.results[1:])


def _score(mode: Mode, prompts: list[list[int]], runs: list[engines.EngineRun]) -> list[Scores]:
    """What the target alone makes of every run's tokens; one engine scores all."""
    made = [
        {"prompt": prompt, "tokens": tokens}
        for run in runs
        for prompt, tokens in zip(prompts, engines.tokens_of(run.results[0][0]), strict=True)
    ]
    scores = _run(replace(mode, graphs=False), [("score", {"texts": made})]).results[0]
    return [scores[first : first + len(prompts)] for first in range(0, len(scores), len(prompts))]


def _run(mode: Mode, steps: list[tuple[str, dict[str, Any]]], **engine: Any) -> engines.EngineRun:
    is_v2 = mode.runner == "v2"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": str(int(is_v2))}
    return engines.run(
        steps,
        v2=is_v2,
        env=env,
        own_process=torch.cuda.is_available(),  # whose end frees the device's memory
        dtype=mode.dtype,
        enforce_eager=not mode.graphs,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=257,
        **engine,
    )


def _tokens_logprobs(run: engines.EngineRun) -> list[list[float]]:
    """Of every generated token, its own logprob."""
    completions = [request["completions"][0] for request in run.results[0][0]]
    return [
        [step[str(token)] for token, step in zip(c["tokens"], c["logprobs"], strict=True)]
        for c in completions
    ]


def _how_it_drafted(
    plain: engines.EngineRun, run: engines.EngineRun, mode: Mode, case: Case
) -> dict[str, Any]:
    """How draft steps ran, if that is counted.

    Raises:
        RuntimeError: not as the mode says, so that sameness would prove something else.
    """
    if not plain.v2_runner == run.v2_runner == (mode.runner == "v2"):
        raise RuntimeError(f"vLLM took another model runner than {mode.runner}")
    if run.draft_failures:
        raise RuntimeError(f"drafting failed {run.draft_failures} times")
    if case.draft_lookup == "on" and not run.metrics["vllm:magicdec_lookup_tokens"]:
        raise RuntimeError("no pass took a token that was looked up")
    if not mode.graphs:
        return {}
    steps = run.results[1]
    if not steps["graph"]:
        raise RuntimeError("no draft step came from a CUDA graph")
    if mode.reads_with_flashinfer and case.policy.endswith("-token") and not steps["flashinfer"]:
        raise RuntimeError("FlashInfer read in no draft step")
    return {"draft_steps": steps}


def budgets_differ(results: list[dict[str, Any]]) -> bool:
    """Whether some view was small enough to lose drafts, so that sameness had something to prove."""
    return any(result.get("accepted", 0) < result.get("drafted", 0) for result in results)
