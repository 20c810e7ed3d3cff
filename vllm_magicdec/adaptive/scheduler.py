# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with a controller that sets the number of drafts of every step.

vLLM can vary that number by itself (`num_speculative_tokens_per_batch_size`): the scheduler puts it into
each `SchedulerOutput`, and both model runners follow. Here a controller sets it instead of a table.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_magicdec import envs
from vllm_magicdec.adaptive.controller import CHOSEN, PLAIN, Choice, Controller, How
from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.adaptive.lookup_controller import LookupController
from vllm_magicdec.adaptive.metrics import Failures, SpeculationGauges, counts_of
from vllm_magicdec.adaptive.places import NONE_FOUND
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD

logger = init_logger(f"vllm.{__name__}")

_STEPS_PER_REPORT = 32


@dataclass
class _InFlight:
    """A step that was handed out."""

    began: float  # by the clock
    made: Choice  # how the drafts that it verifies were made
    how: How  # these drafts came to be
    drafted: Choice  # how it drafts
    num_passes: int  # draft steps that it makes
    decoding: Collection[str]  # requests that were drafted for
    budget: int  # K/V entries that each draft step reads per request, at most
    context_tokens: int
    verified: float | None  # per request; None: it does not do the same for every request

    @property
    def step(self) -> Step | None:
        """None: its time tells nothing."""
        if self.verified is None:
            return None
        budget = self.budget if self.num_passes else 0
        return Step(len(self.decoding), self.context_tokens, self.verified, self.num_passes, budget)


class _AdaptiveSpeculation(Scheduler):
    """What both schedulers get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = self.vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        self.clock: Callable[[], float] = perf_counter
        # On the device they change what passes take, and nothing that the scheduler hears of.
        self._with_lookups = spec.draft_lookup == "on" and not spec.looks_up_on_device
        # With lookups a step may have more drafts than it can take, so that some requests wait.
        self._drafts_must_not_wait = self._with_lookups and spec.draft_sample_method == "probabilistic"
        self._controller = self._make_controller(spec)
        self._latest = PLAIN  # what the step before drafted
        self._made = PLAIN  # how the latest drafts were made
        self._how = CHOSEN  # how the latest drafts came to be
        self._newest: _InFlight | None = None
        # On a GPU the V2 runner hands out a step's tokens before it drafts. So what passes between two
        # outputs is the drafts of the step before and the verification of this one.
        on_gpu = self.vllm_config.device_config.device_type == "cuda"
        self._drafts_come_late = on_gpu and self.vllm_config.use_v2_model_runner
        self._in_flight: dict[int, _InFlight] = {}  # by id() of their SchedulerOutput
        self._lessons: list[Callable[[], None]] = []  # to be learnt while the workers compute
        counts = counts_of(self)
        self._gauges = SpeculationGauges(counts, self._controller.budget)
        self._failures = Failures(counts)
        self._gave_up = False
        self._updated_at: float | None = None  # None: the engine has been idle since
        self._num_reports = 0

    def _make_controller(self, spec: MagicDecSpeculativeConfig) -> Controller:
        budget = spec.budget_tokens(self.max_model_len)
        times = StepTimes.load(Path(spec.profile)) if spec.profile else StepTimes()
        if self._with_lookups:
            controller: Controller = LookupController(spec.lengths[-1], budget, times)
        else:
            controller = Controller(spec.lengths, budget, times)
        if spec.profile:
            self._say_what_will_happen(controller)
            return controller
        every = range(spec.lengths[-1] + 1)
        is_any = self._with_lookups or len(every) == len(spec.lengths)
        drafts = f"0 to {every[-1]}" if is_any else _either(spec.lengths)
        logger.info_once(
            "%s will try several choices in the first steps and then choose %s drafts for every step. To "
            "start with measured times: 'magicdec profile', then the field 'profile'.",
            METHOD,
            drafts,
        )
        return controller

    def _say_what_will_happen(self, controller: Controller) -> None:
        parts = []
        for num_reqs in sorted({1, min(8, self.max_num_running_reqs), self.max_num_running_reqs}):
            least = controller.least_context(num_reqs, self.max_model_len)
            where = "no context" if least is None else f"contexts above about {least:,} tokens"
            parts.append(f"{'every context' if least == 1 else where} at batch {num_reqs}")
        logger.info("%s: speculating for %s.", METHOD, ", ".join(parts))

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        # Before the base class: it makes placeholders for as many drafts.
        scheduler_output.num_spec_tokens_to_schedule = 0
        if scheduler_output.num_scheduled_tokens and not self._gave_up:
            try:
                self._choose(scheduler_output)
            except Exception:
                self._give_up()
        if self._drafts_must_not_wait:
            # The V1 runner keeps the drafts' probabilities for one step. Without them it would verify the
            # drafts of the whole batch as if each had been certain.
            for request in self.running:
                if request.request_id not in scheduler_output.num_scheduled_tokens:
                    request.spec_token_ids = []
        super()._update_after_schedule(scheduler_output)

    def _give_up(self) -> None:
        """A fault in the controller costs speed, not requests."""
        if envs.strict():
            raise
        self._gave_up = True
        self._failures.count("controller")
        logger.exception("The controller of %s failed; from now on decoding is plain.", METHOD)

    def _choose(self, output: SchedulerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        requests = [self.requests[req_id] for req_id in scheduled]
        context_tokens = sum(request.num_computed_tokens for request in requests)
        decoding = [r.request_id for r in requests if r.num_computed_tokens >= r.num_prompt_tokens]
        verified = self._verified_per_request(output) if len(decoding) == len(requests) else None
        choice = self._controller.choose(len(requests), context_tokens, is_timed=verified is not None)
        output.num_spec_tokens_to_schedule = self._controller.plan(choice)
        drafted = self._latest if self._drafts_come_late else choice
        self._newest = self._in_flight[id(output)] = _InFlight(
            began=self.clock(),
            made=self._made,
            how=self._how,
            drafted=drafted,
            num_passes=drafted.drafts,
            budget=self._controller.budget,
            decoding=decoding,
            context_tokens=context_tokens,
            verified=verified,
        )
        self._latest, self._how = choice, How(is_planned=self._controller.is_planned)
        if choice.drafts or self._with_lookups:
            self._made = choice

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """vLLM's, after it was noted how the drafts were made."""
        drafts, controller, newest = draft_token_ids.draft_token_ids, self._controller, self._newest
        if newest is not None and newest.drafted.drafts:
            has_failed = not isinstance(drafts, DraftLists) if self._with_lookups else not any(drafts)
            if has_failed:
                # Neither drafts nor times tell anything.
                self._made, newest.verified = PLAIN, None
            elif isinstance(controller, LookupController):
                assert isinstance(drafts, DraftLists)
                newest.num_passes = drafts.num_passes
                self._how = self._how._replace(num_passes=drafts.num_passes, kind=drafts.kind)
                if drafts.num_passes == 0:
                    newest.drafted = self._made = controller.unread
        super().update_draft_token_ids(draft_token_ids)

    def _verified_per_request(self, output: SchedulerOutput) -> float | None:
        """Drafts that a pure decode step verifies; None if requests differ and are not to."""
        drafts, scheduled = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        if not self._with_lookups:
            return _uniform_drafts(drafts, scheduled)
        if not all(number == 1 + len(drafts.get(req_id, ())) for req_id, number in scheduled.items()):
            return None
        number = sum(map(len, drafts.values())) / len(scheduled)
        return max(number, NONE_FOUND) if self._made.drafts else number

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """vLLM's, asked for once the workers have begun: the time to learn from the steps before."""
        self._learn()
        return super().get_grammar_bitmask(scheduler_output)

    def _learn(self) -> None:
        lessons, self._lessons = self._lessons, []
        if self._gave_up:
            return
        try:
            for learn in lessons:
                learn()
        except Exception:
            self._give_up()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's, after it was noted what the controller has to learn from the step."""
        now = self.clock()
        self._learn()  # nothing, unless a step went without a bitmask
        if not self._gave_up:
            try:
                self._observe(scheduler_output, model_runner_output, now)
            except Exception:
                self._give_up()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._updated_at = now if self.running else None
        return outputs

    def _observe(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        known = self._in_flight.pop(id(output), None)
        if known is None:
            return
        # A busy engine's step lasts from output to output, whatever overlaps within.
        seconds = now - (self._updated_at or known.began)
        rounds = _accepted(output, result, known.decoding if self._with_lookups else ())
        if not known.made.drafts:
            rounds = {}  # those of a request that the step before left out are of an earlier choice
        self._lessons.append(partial(self._teach, known, rounds.values(), seconds))

    def _teach(self, known: _InFlight, rounds: Collection[tuple[int, int]], seconds: float) -> None:
        step = known.step
        timed = None if step is None else TimedStep(step, seconds)
        made = known.made if rounds else PLAIN
        self._controller.observe(rounds, made, timed, known.drafted, known.how)
        if timed is not None:
            self._report(timed.step)

    def _report(self, step: Step) -> None:
        self._num_reports += 1
        if self._num_reports % _STEPS_PER_REPORT == 1:
            controller = self._controller
            forecast = controller.forecast(step.num_reqs, step.context_tokens)
            self._gauges.set(forecast, controller.achieved_speedup, controller.num_switches)


class MagicDecScheduler(_AdaptiveSpeculation):
    """For synchronous scheduling."""


class MagicDecAsyncScheduler(_AdaptiveSpeculation, AsyncScheduler):
    """For asynchronous scheduling: a step's drafts are chosen before the step before it has ended."""


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _uniform_drafts(drafts: Mapping[str, list[int]], scheduled: Mapping[str, int]) -> int | None:
    """The drafts that every request of a pure decode step verifies; None if they differ."""
    numbers = {len(drafts.get(req_id, ())) for req_id in scheduled}
    if len(numbers) != 1:
        return None
    (number,) = numbers
    return number if set(scheduled.values()) == {number + 1} else None


def _accepted(
    output: SchedulerOutput, result: ModelRunnerOutput, decoding: Collection[str]
) -> dict[str, tuple[int, int]]:
    """(verified, accepted) drafts of each request that has some, and of those named, which need not."""
    rounds = {}
    drafts = output.scheduled_spec_decode_tokens
    for req_id in drafts.keys() | decoding:
        sampled = result.sampled_token_ids and result.sampled_token_ids[result.req_id_to_index[req_id]]
        if sampled:
            rounds[req_id] = len(drafts.get(req_id, ())), len(sampled) - 1
    return rounds
