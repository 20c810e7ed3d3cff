# SPDX-License-Identifier: Apache-2.0
"""The configuration of Ray Serve's replicas, without Ray; `tests/engine/test_ray.py` runs the example."""

import sys
from types import ModuleType

import pytest
import ray_cluster
import ray_serve


@pytest.fixture
def told(monkeypatch):
    of_ray = ModuleType("ray.serve.llm")
    of_ray.LLMConfig, of_ray.build_openai_app = dict, dict
    monkeypatch.setitem(sys.modules, of_ray.__name__, of_ray)

    def application(*options):
        # A name, not a folder: that would import Ray's own parts for models.
        args = ray_serve.make_parser().parse_args(["--model", "some/model", *options])
        (config,) = ray_serve.application(args)["llm_configs"]
        return config

    return application


def scaling_of(config):
    """As Ray reads it, which refuses what makes no sense."""
    of_serve = pytest.importorskip("ray.serve.config", reason="Ray is not installed")
    return of_serve.AutoscalingConfig(**config["deployment_config"]["autoscaling_config"])


def test_ray_scales_as_the_options_say(told):
    replicas = ("--min-replicas", "2", "--max-replicas", "5", "--target-requests", "3")
    scaling = scaling_of(told(*replicas, "--upscale-delay", "1.5", "--downscale-delay", "20"))
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.target_ongoing_requests == 3
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (1.5, 20)
    config = told()
    assert scaling_of(config).min_replicas == scaling_of(config).max_replicas == 1
    assert config["engine_kwargs"]["speculative_config"]["method"] == "magicdec-self"


def test_replicas_share_cores_and_memory(told, monkeypatch):
    monkeypatch.setattr(ray_cluster, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(ray_cluster.os, "sched_getaffinity", lambda _: range(8))
    assert told("--max-replicas", "4")["placement_group_config"] == {"bundles": [{"CPU": 2}]}
    assert told("--max-replicas", "4", "--cpus", "1")["placement_group_config"] == {"bundles": [{"CPU": 1}]}
    monkeypatch.setattr(ray_cluster, "runs_on_cpu", lambda: False)
    assert told("--max-replicas", "4")["placement_group_config"] is None, "Ray looks for GPUs itself"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--min-replicas 3 --max-replicas 2", "--min-replicas has to be from 0 to --max-replicas"),
        ("--min-replicas -1", "--min-replicas has to be from 0 to --max-replicas"),
        ("--target-requests 0", "'0' is no whole number from 1"),
    ],
)
def test_invalid_numbers_are_refused_before_ray_starts(options, says, monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "connect", lambda *_: pytest.fail("Ray was to start"))
    monkeypatch.setattr(sys, "argv", ["ray_serve.py", *options.split()])
    with pytest.raises(SystemExit) as refused:
        ray_serve.main()
    assert says in f"{refused.value}{capsys.readouterr().err}"
