# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft as `model`: resolved configurations and refusals."""

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_config
from small_models import SIZES, write_llama
from vllm.config.utils import replace

from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register
from vllm_magicdec.spire.settings import SpireSettings
from vllm_magicdec.vllm_api.engine_config import reads_activations

register()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


def write_draft(path: Path, changes: dict | None = None, **fields) -> str:
    """Write a draft's config.json; configuring an engine needs no weights."""
    target = {"target": "small", "target_num_hidden_layers": 6, "target_layers": [4, 5]}
    described = {"version": 1, **target, "sinks": 4, "window": 252, "num_draft_steps": 4}
    described |= {"feedback_memory": True, "target_activations": True, **(changes or {})}
    config = {
        "architectures": ["MagicDecSpireForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "eagle_aux_hidden_state_layer_ids": [4, 5, 6],
        "spire": {name: value for name, value in described.items() if value is not None},
        **SIZES,
        **fields,
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return write_draft(tmp_path_factory.mktemp("draft"))


def configure(target: str, draft: str, engine: dict | None = None, **fields):
    spec = {"method": MODEL_METHOD, "model": draft, **fields}
    return test_config.configure(target, spec, **(engine or {}))


def test_view_of_training_is_used(target, draft):
    spec = configure(target, draft).speculative_config
    assert (spec.draft_kv_budget, spec.draft_kv_sink) == (256, 4)
    assert spec.spire.window == 252 and spec.spire.aux_layers == (4, 5, 6)
    assert reads_activations(spec)
    budget = spec.policy.parse_budget(spec, spec.limits(configure(target, draft), 32), 256)
    assert str(budget) == "256 tokens (4 sinks, the 252 latest)"


def test_serving_reads_settings_of_training(target, tmp_path):
    settings = SpireSettings.pruned("small", 6, None, sinks=2, window=30)
    spec = configure(target, write_draft(tmp_path, **settings.config_fields())).speculative_config
    assert spec.spire == settings and spec.draft_kv_budget == 32


@pytest.mark.parametrize("max_model_len", [128, 4096])
def test_view_of_training_may_be_given_and_is_clipped_to_the_model(target, draft, max_model_len):
    view = {"draft_kv_budget": 256, "draft_kv_sink": 4, "draft_kv_policy": "streamingllm"}
    spec = configure(target, draft, {"max_model_len": max_model_len}, **view).speculative_config
    assert spec.draft_kv_budget == min(256, max_model_len)


def test_configuration_survives_copies(target, draft):
    """Under `auto`, the target may verify lookups without the draft."""
    config = configure(target, draft, num_speculative_tokens="auto", draft_lookup="on")
    spec = config.speculative_config
    assert spec.draft_lookup == "on"
    for copied in (pickle.loads(pickle.dumps(config)).speculative_config, copy.copy(spec), replace(spec)):
        assert repr(copied) == repr(spec) and copied.spire == spec.spire
        assert copied.policy is spec.policy and copied.draft_kv_budget == spec.draft_kv_budget


QUANTISED = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
NO_DRAFT = "this is no SPIRe draft of version 1"


@pytest.mark.parametrize(
    ("spire", "written", "fields", "sentence"),
    [
        ({}, {}, {"draft_kv_budget": 512}, "was trained with 4 sinks and a window of 252 tokens"),
        ({}, {}, {"draft_kv_policy": "snapkv"}, "was trained with 4 sinks and a window of 252 tokens"),
        ({"sinks": 8}, {}, {"draft_kv_sink": 4}, "draft_kv_sink=4 is not possible"),
        ({}, {}, {"draft_lookup": "on"}, "draft_lookup='on' is not supported with a SPIRe draft"),
        ({}, {}, {"quantization": "fp8"}, "quantization='fp8' is not possible with a SPIRe draft"),
        ({"target_num_hidden_layers": 12}, {}, {}, "with num_hidden_layers=12, and"),
        ({}, {"hidden_size": 128, "head_dim": 64}, {}, "with hidden_size=128, and"),
        ({"version": 2}, {}, {}, NO_DRAFT),
        ({"window": None}, {}, {}, NO_DRAFT),
        ({"target_activations": False}, {}, {}, NO_DRAFT),
        ({"window": 0}, {}, {}, "contradicts itself"),
        ({}, {"num_hidden_layers": 3}, {}, "contradicts itself"),
        ({}, QUANTISED, {}, "a quantised SPIRe draft (fp8) is not possible"),
        ({"target_layers": ["a"]}, {}, {}, "spire.target_layers"),
        ({"sinks": True}, {}, {}, "spire.sinks"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(target, tmp_path, spire, written, fields, sentence):
    with pytest.raises(MagicDecConfigError) as error:
        configure(target, write_draft(tmp_path, spire, **written), **fields)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", [".", "config.json"])
def test_draft_writable_by_any_user_is_refused(target, tmp_path, name):
    draft = write_draft(tmp_path)
    configure(target, draft)
    changed = tmp_path / name
    changed.chmod(0o777)
    with pytest.raises(MagicDecConfigError, match=f"model='{draft}' is not trusted: any user .*chmod o-w"):
        configure(target, draft)


def test_link_loop_is_refused(target, tmp_path):
    draft = write_draft(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(MagicDecConfigError, match="is not trusted: it is a link that leads to itself"):
        configure(target, draft)


def test_lookups_work_without_feedback_memory(target, tmp_path, monkeypatch):
    config = configure(target, write_draft(tmp_path, {"feedback_memory": False}), draft_lookup="on")
    assert config.speculative_config.draft_lookup == "on"
    # On GPUs, passes of several tokens need KV pages.
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    parts = {name: getattr(config, name) for name in ("device_config", "model_config", "scheduler_config")}
    runner = SimpleNamespace(use_v2_model_runner=True, **parts)
    with pytest.raises(MagicDecConfigError, match="a SPIRe draft reads single tokens; use draft_lo"):
        config.speculative_config._check_lookups(runner)
