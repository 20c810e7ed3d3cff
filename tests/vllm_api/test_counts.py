# SPDX-License-Identifier: Apache-2.0
"""A worker's counts reach the front end exactly once, through every transport."""

import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_magicdec.adaptive import metrics
from vllm_magicdec.adaptive.controller import Forecast
from vllm_magicdec.adaptive.metrics import Changes, Counts, counts_of
from vllm_magicdec.adaptive.value import Choice
from vllm_magicdec.vllm_api.counts import pass_on, send


class Late(AsyncModelRunnerOutput):
    def get_output(self):
        return step_output()

    def get_kv_connector_output(self):  # abstract since vLLM 0.33
        return None


def step_output():
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[1]])


@pytest.fixture(scope="module")
def config(configure_tiny):
    return configure_tiny(num_speculative_tokens="auto")


@pytest.fixture
def front_end(config):
    return StatLoggerManager(config, engine_idxs=[0, 1], enable_default_loggers=False)


def shown(name, engine, **labels):
    labels |= {"engine": str(engine)}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == f"vllm:magicdec_{name}" and labels.items() <= sample.labels.items():
                return sample.value
    return None


def test_the_number_of_switches_never_falls_when_a_controller_restarts():
    counts = Counts()
    gauges = metrics.SpeculationGauges(counts, budget=512)
    taken = []
    for num_switches in (2, 3, 1, 1):
        gauges.set(Forecast(Choice(4), 1.2, 0.3), 1.1, num_switches)
        taken.append(counts.take().added.get("switches", 0))
    assert taken == [2, 1, 1, 0]


def through_the_core(scheduler, output, stats):
    """Statistics that the front end gets of a step, serialised as in vLLM."""
    outputs = {0: EngineCoreOutputs(scheduler_stats=stats)}
    pass_on(scheduler, pickle.loads(pickle.dumps(output)), outputs.values())
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    return decoded.scheduler_stats


def test_nothing_is_lost_in_steps_without_statistics(front_end):
    scheduler, counts = SimpleNamespace(), Counts()
    for stats in (None, None, SchedulerStats()):
        counts.add("draft_failures")
        outputs = EngineCoreOutputs(scheduler_stats=stats)
        pass_on(scheduler, send(counts, step_output()), [outputs])
    front_end.record(outputs.scheduler_stats, None, engine_idx=0)
    assert shown("draft_failures_total", 0) == 3


def test_outputs_that_are_late_or_shared_or_none():
    counts, scheduler = Counts(), SimpleNamespace()
    counts.add("draft_failures")
    assert send(counts, None) is None
    empty = send(counts, EMPTY_MODEL_RUNNER_OUTPUT)
    assert empty is not EMPTY_MODEL_RUNNER_OUTPUT, "the shared output must stay without counts"
    counts.add("draft_failures", 2)
    late = send(counts, Late())
    for output in (empty, late.get_output(), step_output()):
        pass_on(scheduler, output, [])
    assert counts_of(scheduler).take().added == {"draft_failures": 3}


def test_a_late_output_is_freed():
    counts, output = Counts(), Late()
    counts.add("draft_failures")
    gc.disable()
    try:
        kept = weakref.ref(output)
        send(counts, output).get_output()
        del output
        assert kept() is None, "and its buffers on the device"
    finally:
        gc.enable()


@pytest.mark.parametrize("changes", [Changes({"of_another_version": 1}, {}), Changes({}, {"unknown": 1})])
def test_unknown_counts_fail_only_in_strict_mode(front_end, changes, monkeypatch):
    stats = SchedulerStats()
    metrics.attach(stats, changes)
    monkeypatch.setenv("VLLM_MAGICDEC_STRICT", "0")
    front_end.record(stats, None, engine_idx=0)
    assert stats.ec_connector_stats is None, "other loggers do not meet it"
    metrics.attach(stats, changes)
    monkeypatch.setenv("VLLM_MAGICDEC_STRICT", "1")
    with pytest.raises(KeyError):
        front_end.record(stats, None, engine_idx=0)


def test_statistics_of_an_encoder_cache_connector_are_kept(front_end):
    scheduler = SimpleNamespace()
    counts_of(scheduler).add("draft_failures")
    stats = through_the_core(scheduler, step_output(), SchedulerStats(ec_connector_stats={"saved": 1}))
    front_end.stat_loggers[0].record(stats, None, engine_idx=1)
    assert stats.ec_connector_stats == {"saved": 1}
    assert shown("draft_failures_total", 1) == 1


def test_metrics_are_recorded_in_ray(config, monkeypatch):
    """As in replicas with `log_engine_metrics`, but without a Ray cluster."""
    of_ray = pytest.importorskip("ray.util.metrics", reason="Ray is not installed")
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    recorded = {}

    def record(metric, value=1.0, tags=None):
        assert tags.keys() == set(metric.info["tag_keys"]), "Ray refuses others"
        recorded[metric.info["name"]] = value, tags

    monkeypatch.setattr(of_ray.Counter, "inc", record)
    monkeypatch.setattr(of_ray.Gauge, "set", record)
    loggers = {"custom_stat_loggers": [RayPrometheusStatLogger], "enable_default_loggers": False}
    front_end = StatLoggerManager(config, engine_idxs=[0, 1], **loggers)
    before = shown("draft_failures_total", 1)
    counts = Counts()
    counts.count_failure("selection")
    counts.add("draft_failures")
    counts.set("num_speculative_tokens", 3)
    stats = through_the_core(SimpleNamespace(), send(counts, step_output()), SchedulerStats())
    front_end.record(stats, None, engine_idx=1)
    tags = {"model_name": config.model_config.served_model_name, "engine": "1", "ReplicaId": ""}
    assert recorded["vllm_magicdec_failures"] == (1, {**tags, "what": "selection"})
    assert recorded["vllm_magicdec_draft_failures"] == (1, tags)
    assert recorded["vllm_magicdec_num_speculative_tokens"] == (3, tags)
    assert "vllm_num_requests_running" in recorded, "beside vLLM's own"
    assert shown("draft_failures_total", 1) == before, "and Prometheus does not count them too"
