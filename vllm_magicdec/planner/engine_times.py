# SPDX-License-Identifier: Apache-2.0
"""How long a simulated engine's step takes: by a profile of this machine, or by the roofline."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm_magicdec import files
from vllm_magicdec.adaptive.step_times import Step, StepTimes
from vllm_magicdec.planner.console import UserError
from vllm_magicdec.planner.performance import Deployment


class Work(NamedTuple):
    """What a step does: requests that decode, chunks of prompts, drafts for what comes next."""

    decoding: int
    """Requests that decode."""
    context_tokens: int
    """K/V entries that these read, over all of them."""
    verified: float
    """Drafts of each of them that are verified, on average."""
    prompt_tokens: int
    """Of the chunks of prompts that are computed."""
    prompt_pairs: float
    """Query-key pairs of these: the sum of what each of their tokens attends to."""
    drafting: int
    """Requests that draft afterwards: all that have produced a token."""
    drafts: int
    """Of each of them; 0: plain decoding, even where a prompt's chunk is not its last."""
    drafting_tokens: int
    """Tokens of their contexts, over all of them."""


class EngineTimes(Protocol):
    """Seconds by what a step does."""

    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        ...


@dataclass(frozen=True)
class PromptTimes:
    """Seconds of computing prompts: a pass, more for every token and for every pair of query and key.

    Where a chunk goes along with requests that decode, the pass is theirs already.
    """

    per_pass: float
    per_token: float
    per_pair: float

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "PromptTimes":
        """Fitted to relative errors of measured chunks (non-negative least squares).

        Args:
            rows: `prompt_tokens` of a chunk, `context_tokens` before it, `seconds` of its step.

        Raises:
            ValueError, TypeError, KeyError: they are something else.
        """
        import numpy as np
        from scipy.optimize import nnls

        seconds = np.array([float(row["seconds"]) for row in rows])
        chunks = ((int(row["prompt_tokens"]), int(row["context_tokens"])) for row in rows)
        features = np.array([[1.0, tokens, pairs_of(tokens, before)] for tokens, before in chunks])
        if len(rows) < 1 or not (seconds > 0).all() or not (features > 0).all():
            raise ValueError("its prompts were measured in no time")
        scale = (features / seconds[:, None]).max(axis=0)
        solution, _ = nnls(features / seconds[:, None] / scale, np.ones(len(rows)))
        return cls(*(solution / scale).tolist())

    def seconds(self, tokens: int, pairs: float, *, is_alone: bool) -> float:
        """Of a step's chunks."""
        return self.per_pass * is_alone + self.per_token * tokens + self.per_pair * pairs


def pairs_of(tokens: int, before: int) -> float:
    """Query-key pairs of a chunk: each token sees itself, the chunk's tokens and those `before` it."""
    return tokens * (before + (tokens + 1) / 2)


@dataclass(frozen=True)
class ProfiledTimes:
    """By `magicdec profile`.

    Attributes:
        budget: tokens that a draft step reads; one that the profile has.
    """

    steps: StepTimes
    prompts: PromptTimes
    budget: int

    @classmethod
    def load(cls, path: Path, budget: int | None = None) -> "ProfiledTimes":
        """From a file.

        Args:
            budget: one that was measured; None: the largest.

        Raises:
            UserError: it is no profile, has no times of prompts or not of that budget.
        """
        try:
            steps = StepTimes.load(path)
        except ValueError as error:
            raise UserError(str(error)) from None
        budget = budget or max(steps.budgets, default=0)
        if budget not in steps.budgets:
            raise UserError(f"{path} has no draft steps of a budget of {budget}; it has {steps.budgets}")
        try:
            prompts = PromptTimes.of(json.loads(files.read(path, 2**26))["prompts"])
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{path} has no times of prompts; measure it again with this version's 'magicdec profile'"
            ) from None
        return cls(steps, prompts, budget)

    def seconds(self, work: Work) -> float:
        """See `EngineTimes`."""
        seconds = 0.0
        drafts = work.drafts if work.drafting else 0
        budget = self.budget if drafts else 0
        if work.decoding:
            step = Step(work.decoding, work.context_tokens, work.verified, 0)
            seconds += self.steps.predict(step._replace(drafted=drafts, budget=budget))
        elif drafts:
            # Nobody has decoded: what drafting adds to a step of those that draft.
            alone = Step(work.drafting, work.drafting_tokens, 0, drafts, budget)
            seconds += max(
                0.0, self.steps.predict(alone) - self.steps.predict(alone._replace(drafted=0, budget=0))
            )
        if work.prompt_tokens:
            is_alone = not work.decoding
            seconds += self.prompts.seconds(work.prompt_tokens, work.prompt_pairs, is_alone=is_alone)
        return seconds


@dataclass(frozen=True)
class PredictedTimes:
    """By the roofline of a deployment."""

    deployment: Deployment
    budget: int

    def seconds(self, work: Work) -> float:
        """See `EngineTimes`."""
        deployment = self.deployment
        milliseconds = deployment.step_ms(
            work.decoding, work.verified, work.context_tokens, work.prompt_tokens, work.prompt_pairs
        )
        if work.prompt_tokens and work.drafts:
            milliseconds += deployment.draft_prompt_ms(work.prompt_tokens, work.prompt_pairs)
        if work.drafting and work.drafts:
            context = max(1, work.drafting_tokens // work.drafting)
            milliseconds += work.drafts * deployment.draft_step_ms(work.drafting, context, self.budget)
            milliseconds += deployment.costs.round_overhead_ms
            milliseconds += deployment.catch_up_ms(work.drafts, work.drafting)
        return milliseconds / 1e3
