# SPDX-License-Identifier: Apache-2.0
"""The plugin's Prometheus metrics, and how they reach the front end.

Worker, scheduler and front end are separate processes, perhaps on different hosts. Each process keeps only
its latest changes (`Counts`), which travel with messages that vLLM sends anyway (`vllm_api/counts.py`).
`CountsLogger` sums them up in the front end, with the labels of vLLM's own metrics. As with those, there
are none where vLLM logs no statistics.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from vllm_magicdec import envs
from vllm_magicdec.adaptive.controller import Forecast
from vllm_magicdec.config import AdaptiveConfig, MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD

logger = init_logger(f"vllm.{__name__}")

# Key in `SchedulerStats.ec_connector_stats`, a mapping that only encoder-cache connectors use.
_KEY = "vllm_magicdec"
_COUNTS = "_magicdec_counts"  # attribute of a scheduler

_DRAFT_COUNTERS = {
    "draft_failures": "Rounds whose drafting failed.",
    "draft_pauses": "Pauses of drafting after repeated failures.",
    "paused_rounds": "Rounds without drafts in these pauses.",
}
_LOOKUP_COUNTERS = {
    "lookup_rounds": "Rounds drafted with lookups.",
    "lookup_passes": "Draft passes in these rounds.",
    "pass_accepted_tokens": "Accepted drafts of passes, of requests that drafted again in the next round.",
    "lookup_tokens": "Looked-up tokens that the draft checked.",
    "lookup_accepted_tokens": "Of these, tokens that the draft sampled itself.",
    "lookup_unchecked_tokens": "Looked-up tokens verified without a check by the draft.",
    "lookup_unchecked_accepted_tokens": "Of these, accepted tokens.",
    "lookup_unread_tokens": "Deprecated: the same as lookup_unchecked_tokens.",
    "lookup_unread_accepted_tokens": "Deprecated: the same as lookup_unchecked_accepted_tokens.",
    "lookup_failures": "Failures of lookups, at most one per round.",
    "lookup_pauses": "Pauses of lookups after repeated failures.",
    "cut_tokens": "Drafts that were too unlikely to be verified.",
    "left_out_tokens": "Drafts of a fixed number that were not made: too few would be accepted.",
}
_CONTROLLER_COUNTERS = {"switches": "Changes of the choice."}
_CONTROLLER_GAUGES = {
    "num_speculative_tokens": "Drafts per round, the current choice.",
    "draft_kv_budget": "K/V entries that a draft step reads per request, at most.",
    "draft_share": "Share of a round's time spent in draft steps.",
    "predicted_speedup": "Expected speedup over plain decoding.",
    "achieved_speedup": "Speedup of the latest steps over plain decoding.",
}
_FAILURES = "failures"
_FAILURES_HELP = "Failures that cost only speed, by component."


class Changes(NamedTuple):
    """Changes of counters and values of gauges by name, in types that any serializer supports.

    The counter `failures` has one name per component: `failures:draft_step`.
    """

    added: dict[str, float]
    values: dict[str, float]


class Counts:
    """Changes in one process since they were last taken."""

    def __init__(self) -> None:
        self._added = Counter[str]()
        self._values: dict[str, float] = {}

    def add(self, name: str, number: float = 1) -> None:
        """Increase a counter."""
        # msgpack, unlike pickle, cannot serialize NumPy's numbers, and its exception would end the engine.
        self._added[name] += float(number)  # type: ignore[assignment]

    def count_failure(self, component: str) -> None:
        """Count a failure that costs only speed."""
        self.add(f"{_FAILURES}:{component}")

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._values[name] = float(value)

    def join(self, changes: Changes) -> None:
        """Add the changes of another process."""
        for name, number in changes.added.items():
            self.add(name, number)
        for name, value in changes.values.items():
            self.set(name, value)

    def take(self) -> Changes | None:
        """Return and reset the changes; None if there are none."""
        if not self._added and not self._values:
            return None
        changes = Changes(dict(self._added), self._values)
        self._added, self._values = Counter(), {}
        return changes


def counts_of(scheduler: Scheduler) -> Counts:
    """Return the changes of an engine core and its workers that the front end has not received."""
    counts: Counts = vars(scheduler).setdefault(_COUNTS, Counts())
    return counts


class LookupCounters:
    """Counts looked-up tokens by outcome, and drafts that were not worth making or verifying."""

    def __init__(self, counts: Counts) -> None:
        self.totals = dict.fromkeys(_LOOKUP_COUNTERS, 0)
        self._counts = counts

    def count(self, **numbers: int) -> None:
        """Increase some of the counters."""
        for name, number in numbers.items():
            if number:
                self.totals[name] += number
                self._counts.add(name, number)

    def count_round(self, num_passes: int, num_checked: int, num_accepted: int) -> None:
        """Record a round's draft passes, the looked-up tokens they checked, and those the draft sampled."""
        self.count(lookup_rounds=1, lookup_passes=num_passes)
        self.count(lookup_tokens=num_checked, lookup_accepted_tokens=num_accepted)

    def count_unchecked(self, num_tokens: int, num_accepted: int) -> None:
        """Record a request's unchecked lookups after their verification."""
        self.count(lookup_unchecked_tokens=num_tokens, lookup_unchecked_accepted_tokens=num_accepted)
        self.count(lookup_unread_tokens=num_tokens, lookup_unread_accepted_tokens=num_accepted)

    def count_failure(self) -> None:
        """Record a failure of a source of lookups, or of all of them."""
        self._counts.count_failure("lookup")
        self.count(lookup_failures=1)


class SpeculationGauges:
    """Metrics of the controller of `auto`, in the engine core's process."""

    def __init__(self, counts: Counts, budget: int) -> None:
        self._counts = counts
        self._num_switches = 0
        counts.set("draft_kv_budget", budget)

    def set(self, forecast: Forecast, achieved_speedup: float, num_switches: int) -> None:
        """Update all of them."""
        self._counts.set("num_speculative_tokens", forecast.choice.drafts)
        self._counts.set("draft_share", forecast.draft_share)
        self._counts.set("predicted_speedup", forecast.speedup)
        self._counts.set("achieved_speedup", achieved_speedup)
        # Another controller, such as that of `magicdec profile`, starts at 0; a counter must not fall.
        before = self._num_switches if num_switches >= self._num_switches else 0
        self._counts.add("switches", num_switches - before)
        self._num_switches = num_switches


def attach(stats: SchedulerStats, changes: Changes) -> None:
    """Add changes to the statistics that vLLM sends to the front end after a step."""
    stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), _KEY: list(changes)}


def detach(stats: SchedulerStats) -> Changes | None:
    """Remove the changes from the statistics, so that no other logger meets them."""
    found = (stats.ec_connector_stats or {}).pop(_KEY, None)
    if not stats.ec_connector_stats:
        stats.ec_connector_stats = None
    return found and Changes(*found)


def shown_metrics(spec: AdaptiveConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of an engine's counters and gauges with their descriptions."""
    counters: dict[str, str] = {}
    if isinstance(spec, MagicDecSpeculativeConfig):
        counters |= _DRAFT_COUNTERS
        if spec.draft_lookup == "on":
            counters |= _LOOKUP_COUNTERS
    if not spec.adaptive:
        return counters, {}
    return counters | _CONTROLLER_COUNTERS, _CONTROLLER_GAUGES


class CountsLogger(AggregateStatLoggerBase):
    """Exports the metrics of all engines (data-parallel ranks) of a front end, for `StatLoggerManager`.

    The metrics have the classes of vLLM's own logger `prometheus`: Prometheus's or Ray's.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: Sequence[int], prometheus: type[PrometheusStatLogger]
    ) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, AdaptiveConfig)
        labels = ["model_name", "engine"]
        self._model = vllm_config.model_config.served_model_name

        def create(metric_type: Any, metrics: dict[str, str], **options: Any) -> dict[str, dict[int, Any]]:
            created = {}
            for name, help_text in metrics.items():
                metric = metric_type(
                    name=_full_name(name), documentation=help_text, labelnames=labels, **options
                )
                created[name] = {index: metric.labels(self._model, str(index)) for index in engine_indexes}
            return created

        counters, gauges = shown_metrics(spec)
        self._counters = create(prometheus._counter_cls, counters)
        self._gauges = create(prometheus._gauge_cls, gauges, multiprocess_mode="mostrecent")
        self._failures = prometheus._counter_cls(
            name=_full_name(_FAILURES), documentation=_FAILURES_HELP, labelnames=[*labels, "what"]
        )

    @override
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        try:
            if changes := detach(scheduler_stats):
                self._show(changes, engine_idx)
        except Exception as error:  # it would end all requests of this front end
            if envs.strict():
                raise
            logger.warning_once("Cannot export metrics of %s: %r", METHOD, error)

    def _show(self, changes: Changes, engine_idx: int) -> None:
        for name, number in changes.added.items():
            name, _, component = name.partition(":")
            if component:
                self._failures.labels(self._model, str(engine_idx), component).inc(number)
            else:
                self._counters[name][engine_idx].inc(number)
        for name, value in changes.values.items():
            self._gauges[name][engine_idx].set(value)

    @override
    def log_engine_initialized(self) -> None:
        pass


def _full_name(name: str) -> str:
    return f"vllm:magicdec_{name}"
