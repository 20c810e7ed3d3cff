# SPDX-License-Identifier: Apache-2.0
"""Configurations of vLLM's own methods with `num_speculative_tokens: auto`."""

import pickle

import pytest
from test_config import configure
from vllm.config.utils import replace

from vllm_magicdec.config import VllmMethodConfig
from vllm_magicdec.errors import MagicDecConfigError

AUTO = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": "auto"}


@pytest.mark.parametrize(("fields", "most"), [({}, 8), ({"max_num_speculative_tokens": 5}, 5)])
def test_a_controller_chooses_up_to_the_maximum(model_dir, fields, most):
    config = configure(model_dir, {**AUTO, **fields})
    spec = config.speculative_config
    assert type(spec) is VllmMethodConfig and spec.method == "ngram"
    assert spec.num_speculative_tokens == most
    assert spec.lengths == tuple(range(most + 1))
    assert spec.uses_dynamic_speculative_decoding()
    assert "vllm_magicdec.adaptive.scheduler" in str(config.scheduler_config.scheduler_cls)
    for copied in (replace(spec), pickle.loads(pickle.dumps(spec))):
        assert (type(copied), copied.lengths, copied.adaptive) == (VllmMethodConfig, spec.lengths, True)


def test_suffix_decoding_drafts_as_many_tokens_as_without_auto(model_dir, monkeypatch):
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    fields = {"method": "suffix", "num_speculative_tokens": "auto", "suffix_decoding_max_tree_depth": 20}
    spec = configure(model_dir, fields).speculative_config
    assert (spec.num_speculative_tokens, spec.lengths) == (20, tuple(range(21)))


def test_a_language_model_drafts(model_dir):
    spec = configure(model_dir, {"model": model_dir, "num_speculative_tokens": "auto"}).speculative_config
    assert type(spec) is VllmMethodConfig and spec.method == "draft_model"


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(256, 256), (0.5, 2048), (4, None)],  # of a context of 4,096
)
def test_a_draft_with_a_kv_cache_may_have_a_window(model_dir, budget, tokens):
    fields = {"method": "draft_model", "model": model_dir, "num_speculative_tokens": 4}
    fields |= {"draft_kv_budget": budget}
    if tokens is None:
        with pytest.raises(MagicDecConfigError, match="draft_model: draft_kv_budget=4 is below one KV"):
            configure(model_dir, fields)
        return
    config = configure(model_dir, fields)
    spec = config.speculative_config
    assert type(spec) is VllmMethodConfig and not spec.adaptive
    assert config.scheduler_config.scheduler_cls is None
    assert spec.budget_tokens(4096) == spec.window(32, 4096).max_tokens == tokens
    assert pickle.loads(pickle.dumps(spec)).draft_kv_budget == budget


@pytest.mark.parametrize(
    ("fields", "engine", "sentence"),
    [
        ({"draft_kv_budget": 64}, {}, "draft_kv_budget is not possible with method='ngram', which"),
        ({"draft_kv_sink": 4}, {}, "draft_kv_sink belongs to method='magicdec-self'"),
        ({"num_speculative_tokens": 4, "max_num_speculative_tokens": 8}, {}, "max_num_speculative_tokens"),
        ({"num_speculative_tokens_per_batch_size": [(1, 8, 2)]}, {}, "both choose drafts; remove one"),
        ({"enable_adaptive_verification": True}, {}, "both choose drafts; remove one"),
        ({"parallel_drafting": True}, {}, "drafts in parallel the number"),
        ({}, {"data_parallel_size": 2}, "is not possible with data parallelism"),
        ({}, {"scheduler_cls": "a.B"}, "needs its own scheduler; remove --scheduler-cls"),
        (
            {"method": "extract_hidden_states", "draft_model_config": None},
            {},
            "is not possible with method='extract_hidden_states', which drafts nothing; use a number",
        ),
    ],
)
def test_what_is_not_possible_gets_one_sentence(model_dir, fields, engine, sentence):
    with pytest.raises(MagicDecConfigError, match=sentence):
        configure(model_dir, {**AUTO, **fields}, **engine)
