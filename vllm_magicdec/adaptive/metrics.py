# SPDX-License-Identifier: Apache-2.0
"""What the plugin counts, on its way to the Prometheus endpoint of the front end.

Worker, scheduler and front end are processes of their own, perhaps on different hosts. So a process
keeps its latest changes only (`Counts`), and these travel with what is returned anyway: a worker's with
the tokens of a step, all of the engine's with vLLM's statistics of that step (`vllm_api/counts.py`).
`CountsLogger` adds them up in the front end, beside vLLM's own metrics and with the same labels. Like
those they are there where vLLM logs statistics.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from vllm_magicdec import envs
from vllm_magicdec.adaptive.controller import Forecast
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD

logger = init_logger(f"vllm.{__name__}")

# In `SchedulerStats.ec_connector_stats`, a field for any names, which only an encoder-cache connector uses.
_KEY = "vllm_magicdec"
_COUNTS = "_magicdec_counts"  # on a scheduler

_DRAFT_COUNTERS = {
    "draft_failures": "Rounds whose drafting failed.",
    "draft_pauses": "Pauses of drafting because it had failed several times.",
    "paused_rounds": "Rounds without drafts in these pauses.",
}
_LOOKUP_COUNTERS = {
    "lookup_rounds": "Rounds drafted with lookups.",
    "lookup_passes": "Passes of the draft in these rounds.",
    "pass_accepted_tokens": "Drafts of passes that stood, of requests that drafted in the next round, too.",
    "lookup_tokens": "Tokens that were looked up and read by the draft.",
    "lookup_accepted_tokens": "Looked-up tokens that the draft drew itself.",
    "lookup_unread_tokens": "Looked-up tokens that were drafts without a pass.",
    "lookup_unread_accepted_tokens": "Of these, those that the text went on with.",
    "lookup_failures": "Failures of lookups, one a round at most in each source.",
    "lookup_pauses": "Pauses of lookups, or of one source, because they had failed several times.",
    "cut_tokens": "Drafts that were too unlikely to be verified.",
    "left_out_tokens": "Drafts of a fixed number that were not made: too few of them would stand.",
}
_CONTROLLER_COUNTERS = {"switches": "Changes of the choice."}
_CONTROLLER_GAUGES = {
    "num_speculative_tokens": "Drafts per round chosen at present.",
    "draft_kv_budget": "K/V entries that a draft step reads per request, at most.",
    "draft_share": "Draft steps' share of a round's time.",
    "predicted_speedup": "Expected speed over plain decoding.",
    "achieved_speedup": "Speed over plain decoding of the latest steps.",
}
_FAILURES = "failures"
_FAILURES_HELP = "Failures that cost speed alone, by what failed."


class Changes(NamedTuple):
    """Of counters and gauges, by name (`failures`: with ":" and what failed), for any serialisation."""

    added: dict[str, float]
    values: dict[str, float]


class Counts:
    """What has changed in one process since it was last asked for."""

    def __init__(self) -> None:
        self._added = Counter[str]()
        self._values: dict[str, float] = {}

    def add(self, name: str, number: float = 1) -> None:
        """Raise a counter."""
        # NumPy's numbers would do for `pickle`, but end the engine where msgpack takes the statistics.
        self._added[name] += float(number)  # type: ignore[assignment]

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._values[name] = float(value)

    def join(self, changes: Changes) -> None:
        """Take in those of another process."""
        for name, number in changes.added.items():
            self.add(name, number)
        for name, value in changes.values.items():
            self.set(name, value)

    def take(self) -> Changes | None:
        """The changes, once; None: there are none."""
        if not self._added and not self._values:
            return None
        changes = Changes(dict(self._added), self._values)
        self._added, self._values = Counter(), {}
        return changes


def counts_of(scheduler: Scheduler) -> Counts:
    """Those of a scheduler's engine core, its own and its workers', that the front end lacks."""
    if not hasattr(scheduler, _COUNTS):
        setattr(scheduler, _COUNTS, Counts())
    counts: Counts = getattr(scheduler, _COUNTS)
    return counts


class Failures:
    """Counts what failed in a part of the plugin, by what it was; none of it costs more than speed."""

    def __init__(self, counts: Counts) -> None:
        self.totals = Counter[str]()
        self._counts = counts

    def count(self, what: str) -> None:
        """Record a failure."""
        self.totals[what] += 1
        self._counts.add(f"{_FAILURES}:{what}")


class DraftFailures:
    """Counts what failed in drafting, and rounds that this left without useful drafts."""

    def __init__(self, counts: Counts) -> None:
        self.by_stage = Failures(counts)
        self.totals = dict.fromkeys(_DRAFT_COUNTERS, 0)
        self._counts = counts

    def count_round(self) -> None:
        """Record a round whose drafting failed."""
        self._count("draft_failures")

    def count_pause(self) -> None:
        """Record that drafting pauses."""
        self._count("draft_pauses")

    def count_paused_round(self) -> None:
        """Record a round of a pause."""
        self._count("paused_rounds")

    def _count(self, name: str) -> None:
        self.totals[name] += 1
        self._counts.add(name)


class LookupCounters:
    """What became of looked-up tokens, and of drafts that were not worth verifying."""

    def __init__(self, counts: Counts) -> None:
        self._failures = Failures(counts)
        self.totals = dict.fromkeys(_LOOKUP_COUNTERS, 0)
        self._counts = counts

    def count_round(self, num_passes: int, num_looked_up: int, num_accepted: int) -> None:
        """Record a round.

        Args:
            num_passes: of the draft over the batch.
            num_looked_up: tokens of all requests that were read in them.
            num_accepted: of these, those that the draft drew itself.
        """
        self._count(
            lookup_rounds=1,
            lookup_passes=num_passes,
            lookup_tokens=num_looked_up,
            lookup_accepted_tokens=num_accepted,
        )

    def count_stood(self, num_tokens: int) -> None:
        """Record a request's drafts of passes that stood, once its next round knows it."""
        self._count(pass_accepted_tokens=num_tokens)

    def count_unread(self, num_tokens: int, num_accepted: int) -> None:
        """Record a request's looked-up drafts that the draft had not read, once they are verified."""
        self._count(lookup_unread_tokens=num_tokens, lookup_unread_accepted_tokens=num_accepted)

    def count_cut(self, num_tokens: int) -> None:
        """Record drafts of a request that are not verified."""
        self._count(cut_tokens=num_tokens)

    def count_left_out(self, num_tokens: int) -> None:
        """Record drafts of a request that were wanted and not made."""
        self._count(left_out_tokens=num_tokens)

    def count_failure(self) -> None:
        """Record that a source of lookups failed in a round, or all of them."""
        self._failures.count("lookup")
        self._count(lookup_failures=1)

    def count_pause(self) -> None:
        """Record that lookups pause, or one source."""
        self._count(lookup_pauses=1)

    def _count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            if number:
                self.totals[name] += number
                self._counts.add(name, number)


class SpeculationGauges:
    """What the controller of `auto` is doing.

    Args:
        counts: of the engine core's process.
        budget: K/V entries that a draft step reads per request, at most.
    """

    def __init__(self, counts: Counts, budget: int) -> None:
        self._counts = counts
        self._num_switches = 0
        counts.set("draft_kv_budget", budget)

    def set(self, forecast: Forecast, achieved_speedup: float, num_switches: int) -> None:
        """Show the present choice."""
        self._counts.set("num_speculative_tokens", forecast.choice.drafts)
        self._counts.set("draft_share", forecast.draft_share)
        self._counts.set("predicted_speedup", forecast.speedup)
        self._counts.set("achieved_speedup", achieved_speedup)
        # Another controller, such as that of `magicdec profile`, counts anew; a counter must not fall.
        before = self._num_switches if num_switches >= self._num_switches else 0
        self._counts.add("switches", num_switches - before)
        self._num_switches = num_switches


def attach(stats: SchedulerStats, changes: Changes) -> None:
    """Let changes travel to the front end with vLLM's statistics of a step."""
    stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), _KEY: list(changes)}


def detach(stats: SchedulerStats) -> Changes | None:
    """Take them out again, so that no other logger meets them."""
    found = (stats.ec_connector_stats or {}).pop(_KEY, None)
    if not stats.ec_connector_stats:
        stats.ec_connector_stats = None
    return found and Changes(*found)


def shown_metrics(spec: MagicDecSpeculativeConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Counters and gauges of an engine, with what they mean."""
    counters = dict(_DRAFT_COUNTERS)
    if spec.draft_lookup == "on":
        counters |= _LOOKUP_COUNTERS
    if not spec.adaptive:
        return counters, {}
    return counters | _CONTROLLER_COUNTERS, _CONTROLLER_GAUGES


class CountsLogger(AggregateStatLoggerBase):
    """Shows the plugin's metrics of all engines of a front end; for vLLM's `StatLoggerManager`.

    Args:
        vllm_config: whose speculative configuration is the plugin's.
        engine_indexes: of the data-parallel ranks.
        prometheus: vLLM's own logger, of whose kind the metrics are: Prometheus's or Ray's.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: Sequence[int], prometheus: type[PrometheusStatLogger]
    ) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        labels = ["model_name", "engine"]
        model = vllm_config.model_config.served_model_name
        counters, gauges = shown_metrics(spec)
        counter, gauge = prometheus._counter_cls, prometheus._gauge_cls

        def by_engine(metric: Any) -> dict[int, Any]:
            return {index: metric.labels(model, str(index)) for index in engine_indexes}

        self._counters: Mapping[str, dict[int, Any]] = {
            name: by_engine(counter(name=_full_name(name), documentation=meaning, labelnames=labels))
            for name, meaning in counters.items()
        }
        self._gauges: Mapping[str, dict[int, Any]] = {
            name: by_engine(
                gauge(
                    name=_full_name(name),
                    documentation=meaning,
                    labelnames=labels,
                    multiprocess_mode="mostrecent",
                )
            )
            for name, meaning in gauges.items()
        }
        self._model = model
        self._failures = counter(
            name=_full_name(_FAILURES), documentation=_FAILURES_HELP, labelnames=[*labels, "what"]
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add up what has come with a step's statistics."""
        if scheduler_stats is None:
            return
        try:
            changes = detach(scheduler_stats)
            if changes is not None:
                self._show(changes, engine_idx)
        except Exception as error:  # which would end all requests of this front end
            if envs.strict():
                raise
            logger.warning_once("Metrics of %s could not be shown: %r", METHOD, error)

    def _show(self, changes: Changes, engine_idx: int) -> None:
        for name, number in changes.added.items():
            name, _, what = name.partition(":")
            if what:
                self._failures.labels(self._model, str(engine_idx), what).inc(number)
            else:
                self._counters[name][engine_idx].inc(number)
        for name, value in changes.values.items():
            self._gauges[name][engine_idx].set(value)

    def log_engine_initialized(self) -> None:
        """Nothing is to be said."""


def _full_name(name: str) -> str:
    return f"vllm:magicdec_{name}"
