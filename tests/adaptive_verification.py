# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification on a CPU, in a worker that has started without it.

vLLM has it on GPUs alone: it copies confidences by a CUDA stream, and measures its costs by CUDA graphs.
Here the copies are done at once and the costs are given; all else is vLLM's own. The scenarios of
engine_process.py call this.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# Verifying a token more takes a twentieth of a step, so that drafts that will hardly stand are left out.
_STEP, _TOKEN = 1.0, 0.05


class _Torch:
    """Torch, with streams for which nobody has to wait."""

    cuda = SimpleNamespace(
        Stream=lambda device: SimpleNamespace(wait_stream=lambda other: None),
        Event=lambda blocking: SimpleNamespace(synchronize=lambda: None, record=lambda: None),
        current_stream=lambda device: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def verify_adaptively(worker: Any) -> None:
    """From now on vLLM leaves out drafts that are not worth verifying, and what it does is noted."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    adaptive_verification.torch = _Torch()
    adaptive_verification.stream = lambda to, back: nullcontext()
    assign = adaptive_verification._assign_draft_token_budget
    adaptive_verification._assign_draft_token_budget_compiled = assign

    runner = worker.model_runner
    draft, states = runner.speculator, runner.req_states
    draft.acceptance_estimator = OnlineAcceptanceEstimator(
        runner.max_num_reqs, runner.num_speculative_steps, runner.device
    )
    manager = adaptive_verification.AdaptiveVerificationManager(
        states, runner.input_buffers.query_start_loc, 1, max_total_logits=10**6
    )
    costs = _STEP + _TOKEN * np.arange(runner.max_num_tokens + 1)
    manager.cost_tables = np.zeros(runner.max_num_reqs + 1), costs
    runner.adaptive_verification = manager
    runner.rejection_sampler.enable_adaptive_verification = True

    noted = worker.verified = {"drafts": 0, "verified": 0, "uneven": 0, "predicted": 0, "difference": 0.0}
    _note_lengths(manager, noted)
    _note_predictions(draft, noted)


def verified(worker: Any) -> dict[str, float]:
    """Drafts scheduled and verified; steps that verified more of one request than of another.

    Also how many predictions there were, and by how much they differ from a plain computation, at most.
    """
    return dict(worker.verified)


def _note_lengths(manager: Any, noted: dict[str, float]) -> None:
    reallocate = manager.reallocate_drafts

    def reallocate_and_note(req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        scheduled = [manager._batch_budget[0][req_id] for req_id in req_ids]
        given = reallocate(req_ids, idx_mapping)
        kept = manager._batch_draft_capacity[: len(req_ids)].tolist()
        assert sum(kept) == given[2] and all(0 <= k <= s for k, s in zip(kept, scheduled, strict=True))
        noted["drafts"] += sum(scheduled)
        noted["verified"] += sum(kept)
        noted["uneven"] += len({k for k, s in zip(kept, scheduled, strict=True) if s}) > 1
        return given

    manager.reallocate_drafts = reallocate_and_note


def _note_predictions(draft: Any, noted: dict[str, float]) -> None:
    """Compare them with what vLLM's estimator says it computes, of the logits of the draft's steps."""
    compute, propose = draft.compute_draft_logits, draft.propose
    logits: list[torch.Tensor] = []

    def compute_and_keep(hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        logits.append(compute(hidden_states, step).clone())
        return logits[-1]

    def propose_and_compare(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits.clear()
        drafts = propose(batch, *args, **kwargs)
        estimator, rows = draft.acceptance_estimator, draft.idx_mapping[: batch.num_reqs]
        temperature = draft.temperature[rows].double()
        temperature = temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
        for step, of_step in enumerate(logits):
            likeliest = (of_step.double() / temperature).softmax(dim=-1).amax(dim=-1)
            odds = (likeliest.log() - (-likeliest).log1p()).clamp(-40, 40)
            expected = torch.sigmoid(estimator.slope * odds + estimator.intercepts[step])
            got = draft.draft_token_confidence_probs[: batch.num_reqs, step]
            noted["difference"] = max(noted["difference"], float((got - expected).abs().max()))
            noted["predicted"] += batch.num_reqs
        return drafts

    draft.compute_draft_logits, draft.propose = compute_and_keep, propose_and_compare
