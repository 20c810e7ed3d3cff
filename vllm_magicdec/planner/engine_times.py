# SPDX-License-Identifier: Apache-2.0
"""How long a simulated engine's step takes: by a profile of this machine, or by the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

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
    """Of each of them, if there are any; 0: the engine decodes plainly."""
    drafting_tokens: int
    """Tokens of their contexts, over all of them."""


class EngineTimes(Protocol):
    """Seconds by what a step does."""

    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        ...


class TimedChunk(BaseModel):
    """A chunk of a prompt, alone in its step, and how long that took, as profiles have it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    prompt_tokens: int = Field(ge=1, le=2**40)
    context_tokens: int = Field(ge=0, le=2**40)
    """Of the prompt, before the chunk."""
    drafts: int = Field(default=0, ge=0, le=2**40)
    """That the step made behind it."""
    budget: int = Field(default=0, ge=0, le=2**40)
    """K/V entries that each of these read, at most."""
    seconds: float = Field(ge=1e-7, le=1e5)


@dataclass(frozen=True)
class PromptTimes:
    """Seconds of a step that reads a prompt: a pass, more for every token and pair of query and key."""

    per_pass: float
    per_token: float
    per_pair: float

    @classmethod
    def of(cls, chunks: Sequence[TimedChunk]) -> "PromptTimes":
        """Fitted to relative errors (non-negative least squares), whatever was drafted.

        Raises:
            ValueError: there are none.
        """
        import numpy as np
        from scipy.optimize import nnls

        if not chunks:
            raise ValueError("no prompts were measured")
        rows = [(1.0, one.prompt_tokens, pairs_of(one.prompt_tokens, one.context_tokens)) for one in chunks]
        features = np.array(rows) / np.array([[one.seconds] for one in chunks])
        scale = features.max(axis=0)
        solution, _ = nnls(features / scale, np.ones(len(chunks)))
        return cls(*(solution / scale).tolist())

    def seconds(self, tokens: int, pairs: float) -> float:
        """Of a step's chunks."""
        return self.per_pass + self.per_token * tokens + self.per_pair * pairs


def pairs_of(tokens: int, before: int) -> float:
    """Query-key pairs of a chunk: each token sees itself, the chunk's tokens and those `before` it."""
    return tokens * (before + (tokens + 1) / 2)


@dataclass(frozen=True)
class ProfiledTimes:
    """By `magicdec profile`.

    Attributes:
        prompts: read by an engine that decodes plainly.
        drafting_prompts: read by one that drafts, without the drafts: it takes longer in reading them, and
            a model of its own has to read them too.
        budget: tokens that a draft step reads; one that the profile has.
    """

    steps: StepTimes
    prompts: PromptTimes
    drafting_prompts: PromptTimes
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
            prompts = PromptTimes.of(_chunks(steps.description["prompts"]))
            drafting = _chunks(steps.description["drafting_prompts"])
            drafting_prompts = PromptTimes.of([_without_drafts(chunk, steps) for chunk in drafting])
        except (KeyError, ValueError):
            raise UserError(
                f"{path} has no times of prompts with and without drafts; measure it again with this "
                "version's 'magicdec profile'"
            ) from None
        return cls(steps, prompts, drafting_prompts, budget)

    def seconds(self, work: Work) -> float:
        """See `EngineTimes`."""
        seconds = 0.0
        drafts = work.drafts if work.drafting else 0
        if work.decoding:
            budget = self.budget if drafts else 0
            step = Step(work.decoding, work.context_tokens, work.verified, drafts, budget)
            seconds += self.steps.predict(step)
        if work.prompt_tokens:
            prompts = self.drafting_prompts if work.drafts else self.prompts
            reading = prompts.seconds(work.prompt_tokens, work.prompt_pairs)
            # Beside requests that decode, a plain pass is theirs already.
            seconds += max(0.0, reading - self.prompts.per_pass) if work.decoding else reading
        if drafts and work.drafting > work.decoding:  # some prompts end in this step
            seconds += drafts * self._pass_seconds(work.drafting, work.drafting_tokens)
            seconds -= drafts * self._pass_seconds(work.decoding, work.context_tokens)
        return seconds

    def _pass_seconds(self, num_reqs: int, context_tokens: int) -> float:
        return self.steps.pass_seconds(num_reqs, context_tokens, self.budget) if num_reqs else 0.0


def _chunks(rows: object) -> list[TimedChunk]:
    """Of a profile; raises ValueError (pydantic's): they are something else."""
    return TypeAdapter(list[TimedChunk]).validate_python(rows)


def _without_drafts(chunk: TimedChunk, steps: StepTimes) -> TimedChunk:
    """What reading it took of its step."""
    context = chunk.context_tokens + chunk.prompt_tokens
    drafting = chunk.drafts * steps.pass_seconds(1, context, chunk.budget)
    # Drafts of another hour may be said to take longer than all of the step.
    return chunk.model_copy(update={"seconds": max(chunk.seconds - drafting, chunk.seconds / 10)})


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
