# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with a controller that sets the number of drafts of every step.

vLLM can vary that number by a table (`num_speculative_tokens_per_batch_size`): the scheduler writes it into
each `SchedulerOutput`, and both model runners follow. Here a controller replaces the table.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_magicdec import envs
from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.adaptive.lookup_value import LookupValue
from vllm_magicdec.adaptive.metrics import SpeculationGauges, counts_of
from vllm_magicdec.adaptive.request_limits import limit_of
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import (
    NONE_FOUND,
    PLAIN,
    UNPLANNED,
    AcceptanceValue,
    Choice,
    RoundInfo,
    Value,
)
from vllm_magicdec.config import AdaptiveConfig, MagicDecSpeculativeConfig

logger = init_logger(f"vllm.{__name__}")

_STEPS_PER_REPORT = 32


@dataclass
class _InFlight:
    """A step that the workers have not finished."""

    began: float  # seconds, by the scheduler's clock
    made: Choice  # choice that made the drafts that the step verifies
    info: RoundInfo  # how these drafts were made
    drafted: Choice  # choice by which the step drafts
    num_passes: int  # draft steps
    decoding: Collection[str]  # requests that are past their prompts
    budget: int  # K/V entries that each draft step reads per request, at most
    context_tokens: int
    verified: float | None  # drafts per request; None if the step does not do the same for every request

    @property
    def step(self) -> Step | None:
        """The step to learn the time of; None if its time is not usable."""
        if self.verified is None:
            return None
        budget = self.budget if self.num_passes else 0
        return Step(len(self.decoding), self.context_tokens, self.verified, self.num_passes, budget)


class _AdaptiveSpeculation(Scheduler):
    """Base of both schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = self.vllm_config.speculative_config
        assert isinstance(spec, AdaptiveConfig)
        self._spec = spec
        self.clock: Callable[[], float] = perf_counter
        # Since vLLM 0.33 the V2 runner may skip drafts that no request can use, and not say so. The
        # controller would learn the time of a step without them as the time of one with them.
        self.can_skip_drafts = False
        # Lookups on the device change the passes' times but send the scheduler nothing.
        self._with_lookups = spec.looks_up_on_host
        # With lookups and with vLLM's methods the drafts may exceed the step's token budget, so that some
        # requests wait.
        self._is_own_method = isinstance(spec, MagicDecSpeculativeConfig)
        may_wait = self._with_lookups or not self._is_own_method
        self._drafts_must_not_wait = may_wait and spec.draft_sample_method == "probabilistic"
        self._controller = self._make_controller()
        self._latest = PLAIN  # choice by which the previous step drafted
        self._most_drafts = 0  # of a request, by that choice
        self._made = PLAIN  # choice that made the latest drafts
        self._info = UNPLANNED  # of the latest drafts
        self._newest: _InFlight | None = None
        # On a GPU the V2 runner returns a step's tokens before it drafts. So the time between two outputs
        # covers the drafts of the previous step and the verification of this one.
        on_gpu = self.vllm_config.device_config.device_type == "cuda"
        self._drafts_come_late = on_gpu and self.vllm_config.use_v2_model_runner
        self._in_flight: dict[int, _InFlight] = {}  # by id() of the SchedulerOutput
        self._lessons: list[Callable[[], None]] = []  # to run while the workers compute
        self._gauges = SpeculationGauges(counts_of(self), self._controller.value.budget)
        self._gave_up = False
        self._updated_at: float | None = None  # None if the engine was idle since
        self._num_reports = 0

    def _make_controller(self) -> Controller:
        spec = self._spec
        budget = spec.budget_tokens(self.max_model_len)
        profile = spec.profile if isinstance(spec, MagicDecSpeculativeConfig) else None
        times = StepTimes.load(Path(profile)) if profile else StepTimes()
        lengths = range(spec.lengths[-1] + 1) if self._with_lookups else spec.lengths
        value: Value = (
            LookupValue(lengths[-1], budget)
            if self._with_lookups
            else AcceptanceValue(lengths, budget, may_lack=spec.drafts_differ)
        )
        if not profile:
            is_range = len(lengths) == lengths[-1] + 1
            logger.info_once(
                "%s will try several choices and then choose %s drafts for every step.%s",
                spec.name,
                f"0 to {lengths[-1]}" if is_range else " or ".join(map(str, lengths)),
                " To start with measured times, run 'magicdec profile' and set the field 'profile'."
                if self._is_own_method
                else "",
            )
        return Controller(value, times)

    @override
    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        # Before the base class, which makes placeholders for as many drafts.
        scheduler_output.num_spec_tokens_to_schedule = self.num_spec_tokens if self._spec.drafts_all else 0
        self._most_drafts = 0
        if scheduler_output.num_scheduled_tokens:
            self._guard(lambda: self._choose(scheduler_output))
        if self._drafts_must_not_wait:
            # The V1 runner keeps draft probabilities for one step. Without them it would verify the drafts
            # of the whole batch as if each had been certain.
            for request in self.running:
                if request.request_id not in scheduler_output.num_scheduled_tokens:
                    request.spec_token_ids = []
        super()._update_after_schedule(scheduler_output)

    def _guard(self, action: Callable[[], None]) -> None:
        """Run an action of the controller, whose failures must cost speed, not requests."""
        if self._gave_up:
            return
        try:
            action()
        except Exception:
            if envs.strict():
                raise
            self._gave_up = True
            counts_of(self).count_failure("controller")
            logger.exception("The controller of %s failed; decoding is plain from now on.", self._spec.name)

    def _choose(self, output: SchedulerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        requests = [self.requests[req_id] for req_id in scheduled]
        context_tokens = sum(request.num_computed_tokens for request in requests)
        decoding = [r.request_id for r in requests if r.num_computed_tokens >= r.num_prompt_tokens]
        limits = {limit_of(request) for request in requests}
        may_differ = self._spec.drafts_differ or limits != {None}
        is_decoding = len(decoding) == len(requests)
        verified = self._verified_per_request(output, may_differ) if is_decoding else None
        choice = PLAIN
        if limits != {0}:
            # Limited steps calibrate nothing.
            is_timed = verified is not None and None in limits
            choice = self._controller.choose(len(requests), context_tokens, is_timed=is_timed)
            choice = self._lower(choice, limits)
        plan = self._controller.plan(choice)
        self._most_drafts = int(plan)
        if not self._spec.drafts_all:
            output.num_spec_tokens_to_schedule = plan if self._is_own_method else self._most_drafts
        drafted = self._latest if self._drafts_come_late else choice
        self._newest = self._in_flight[id(output)] = _InFlight(
            began=self.clock(),
            made=self._made,
            info=self._info,
            drafted=drafted,
            num_passes=drafted.drafts if self._controller.value.budget else 0,
            budget=self._controller.value.budget,
            decoding=decoding,
            context_tokens=context_tokens,
            verified=verified,
        )
        self._latest, self._info = choice, RoundInfo(is_planned=self._controller.is_planned)
        if choice.drafts or self._spec.drafts_differ:
            self._made = choice

    def _lower(self, choice: Choice, limits: Collection[int | None]) -> Choice:
        """Return the largest choice, up to this one, that some request's limit allows."""
        if self._with_lookups or None in limits:  # with lookups the number is an upper bound
            return choice
        most = max(limit for limit in limits if limit is not None)
        return Choice(max(n for n in (0, *self._spec.lengths) if n <= min(most, choice.drafts)))

    @override
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        drafts, newest = draft_token_ids.draft_token_ids, self._newest
        if newest is not None and newest.drafted.drafts:
            if self._with_lookups:
                has_failed = not isinstance(drafts, DraftLists)
            else:
                has_failed = not any(drafts) and not self._spec.drafts_differ
            if has_failed:
                # Neither drafts nor times are usable.
                self._made, newest.verified = PLAIN, None
            elif self._with_lookups:
                assert isinstance(drafts, DraftLists)
                newest.num_passes = drafts.num_passes
                self._info = self._info._replace(num_passes=drafts.num_passes, bucket=drafts.bucket)
                if drafts.num_passes == 0:
                    newest.drafted = self._made = newest.drafted._replace(lookups_alone=True)
        if not self._is_own_method:  # some of vLLM's proposers make all drafts, however many were chosen
            chosen = [own[: self._most_drafts] for own in drafts]
            draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, chosen)
        super().update_draft_token_ids(draft_token_ids)

    def _verified_per_request(self, output: SchedulerOutput, may_differ: bool) -> float | None:
        """Return the drafts per request that a decode-only step verifies; None if times are not usable."""
        scheduled = output.num_scheduled_tokens
        counts = [len(output.scheduled_spec_decode_tokens.get(req_id, ())) for req_id in scheduled]
        if list(scheduled.values()) != [1 + count for count in counts]:
            return None
        if not may_differ:
            return counts[0] if len(set(counts)) == 1 else None
        mean = sum(counts) / len(counts)
        return max(mean, NONE_FOUND) if self._made.drafts else mean

    @override
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        self._learn()  # the workers compute meanwhile
        return super().get_grammar_bitmask(scheduler_output)

    def _learn(self) -> None:
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            self._guard(lesson)

    @override
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now = self.clock()
        self._learn()  # only if the step did not ask for a bitmask
        self._guard(lambda: self._observe(scheduler_output, model_runner_output, now))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._updated_at = now if self.running else None
        return outputs

    def _observe(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        known = self._in_flight.pop(id(output), None)
        if known is None:
            return
        # A busy engine's step lasts from output to output, whatever overlaps in between.
        seconds = now - (self._updated_at or known.began)
        rounds = _accepted(output, result, known.decoding if self._spec.drafts_differ else ())
        if not known.made.drafts:
            rounds = {}  # drafts of a request that the previous step left out were made by an older choice
        self._lessons.append(partial(self._teach, known, rounds.values(), seconds))

    def _teach(self, known: _InFlight, rounds: Collection[tuple[int, int]], seconds: float) -> None:
        step, controller = known.step, self._controller
        timed = None if step is None else TimedStep(step, seconds)
        controller.observe(rounds, known.made if rounds else PLAIN, timed, known.drafted, known.info)
        if step is not None:
            self._num_reports += 1
            if self._num_reports % _STEPS_PER_REPORT == 1:
                forecast = controller.forecast(step.num_reqs, step.context_tokens)
                self._gauges.set(forecast, controller.achieved_speedup, controller.num_switches)


class MagicDecScheduler(_AdaptiveSpeculation):
    """For synchronous scheduling."""


class MagicDecAsyncScheduler(_AdaptiveSpeculation, AsyncScheduler):
    """For asynchronous scheduling: a step's drafts are chosen before the previous step has ended."""


def _accepted(
    output: SchedulerOutput, result: ModelRunnerOutput, decoding: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return (verified, accepted) drafts of the requests with drafts and of those in `decoding`."""
    rounds = {}
    drafts = output.scheduled_spec_decode_tokens
    for req_id in drafts.keys() | decoding:
        sampled = result.sampled_token_ids and result.sampled_token_ids[result.req_id_to_index[req_id]]
        if sampled:
            rounds[req_id] = len(drafts.get(req_id, ())), len(sampled) - 1
    return rounds
