# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification on a CPU, in a worker that has started without it.

vLLM has it on GPUs alone: it copies confidences by a CUDA stream, and measures its costs by CUDA graphs.
Here the copies are done at once and the costs are given; all else is vLLM's own. scenarios.py has
`collective_rpc` call these.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# Seconds of a step without verified tokens, and of drafting.
_STEP, _DRAFTING = 1.0, 0.5


class _Torch:
    """Torch, with streams for which nobody has to wait."""

    cuda = SimpleNamespace(
        Stream=lambda device: SimpleNamespace(wait_stream=lambda other: None),
        Event=lambda blocking: SimpleNamespace(synchronize=lambda: None, record=lambda: None),
        current_stream=lambda device: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def verify_adaptively(worker: Any, token_cost: float) -> None:
    """Make vLLM drop drafts that are not worth verifying from now on, and count what it does.

    Args:
        worker: The engine's worker.
        token_cost: Cost of verifying one token, in steps; at 0 every draft is verified.
    """
    runner = worker.model_runner
    if runner.adaptive_verification is None:
        _install(runner)
    runner.timed = _timed_steps(runner)  # after rounds, too: vLLM warms up before it times
    manager, costs = runner.adaptive_verification, np.arange(runner.max_num_tokens + 1)
    manager.cost_tables = np.full(runner.max_num_reqs + 1, _DRAFTING), _STEP + token_cost * costs
    names = ("drafts", "verified", "accepted", "uneven", "predicted", "difference")
    runner.adaptive_counts.update(dict.fromkeys(names, 0))


def _install(runner: Any) -> None:
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    adaptive_verification.torch = _Torch()
    adaptive_verification.stream = lambda to, back: nullcontext()
    assign = adaptive_verification._assign_draft_token_budget
    adaptive_verification._assign_draft_token_budget_compiled = assign

    draft = runner.speculator
    draft.enable_adaptive_verification = True
    draft.draft_token_confidence_probs.fill_(1.0)  # drafts without a prediction are verified
    draft.acceptance_estimator = OnlineAcceptanceEstimator(
        runner.max_num_reqs, runner.num_speculative_steps, runner.device
    )
    runner.adaptive_verification = adaptive_verification.AdaptiveVerificationManager(
        runner.req_states, runner.input_buffers.query_start_loc, 1, max_total_logits=10**6
    )
    runner.rejection_sampler.enable_adaptive_verification = True
    runner.adaptive_counts = {}
    _count_lengths(runner.adaptive_verification, runner.adaptive_counts)
    _count_drafts(draft, runner.adaptive_counts)


def _timed_steps(runner: Any) -> int:
    """Count the draft steps that vLLM times at start-up, with a batch of 4."""
    draft, steps = runner.speculator, []
    run = draft.run
    draft.run = lambda step: steps.append(len(step.tokens)) or run(step)
    draft.capture()
    runner._dummy_run(num_tokens=4, context_len=64)
    del draft.run
    assert set(steps) <= {4}
    return len(steps)


def verified(worker: Any) -> dict[str, float]:
    """Return the counts since `verify_adaptively`.

    Drafts scheduled, verified and accepted; steps that verified unequal numbers of drafts per request
    ("uneven"); predictions and their largest difference from a direct computation; timed draft steps.
    """
    return {**worker.model_runner.adaptive_counts, "timed": worker.model_runner.timed}


def _count_lengths(manager: Any, counts: dict[str, float]) -> None:
    reallocate = manager.reallocate_drafts

    def reallocate_and_count(req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        scheduled = [manager._batch_budget[0][req_id] for req_id in req_ids]
        given = reallocate(req_ids, idx_mapping)
        kept = manager._batch_draft_capacity[: len(req_ids)].tolist()
        assert sum(kept) == given[2] and all(0 <= k <= s for k, s in zip(kept, scheduled, strict=True))
        counts["drafts"] += sum(scheduled)
        counts["verified"] += sum(kept)
        counts["uneven"] += len({k for k, s in zip(kept, scheduled, strict=True) if s}) > 1
        return given

    manager.reallocate_drafts = reallocate_and_count


def _count_drafts(draft: Any, counts: dict[str, float]) -> None:
    """Count accepted drafts, and compare predictions with the formula of vLLM's estimator."""
    compute, propose = draft.compute_draft_logits, draft.propose
    logits: list[torch.Tensor] = []

    def compute_and_keep(hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        logits.append(compute(hidden_states, step).clone())
        return logits[-1]

    def propose_and_compare(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits.clear()
        drafts = propose(*args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        batch, num_sampled = args[0], args[5]
        counts["accepted"] += int((num_sampled - 1).clamp(min=0).sum())
        estimator, rows = draft.acceptance_estimator, draft.idx_mapping[: batch.num_reqs]
        temperature = draft.temperature[rows].double()
        temperature = temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
        for step, step_logits in enumerate(logits):
            likeliest = (step_logits.double() / temperature).softmax(dim=-1).amax(dim=-1)
            odds = (likeliest.log() - (-likeliest).log1p()).clamp(-40, 40)
            expected = torch.sigmoid(estimator.slope * odds + estimator.intercepts[step])
            got = draft.draft_token_confidence_probs[: batch.num_reqs, step]
            counts["difference"] = max(counts["difference"], float((got - expected).abs().max()))
            counts["predicted"] += batch.num_reqs
        return drafts

    draft.compute_draft_logits, draft.propose = compute_and_keep, propose_and_compare
