# SPDX-License-Identifier: Apache-2.0
"""`method: magicdec`: resolved configurations and refusals."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_models import write_llama
from test_config import configure
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vllm_magicdec.adaptive import profiles
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register
from vllm_magicdec.vllm_api.engine_config import EngineSpeculativeConfig

register()


def test_draft_model_configuration(model_dir, draft):
    config = configure(model_dir, {"method": MODEL_METHOD, "model": draft, "draft_kv_budget": 256})
    spec = config.speculative_config
    assert type(spec) is EngineSpeculativeConfig and spec.uses_draft_model() and spec.has_draft_model
    assert (spec.model, spec.draft_model_config.model) == (draft, draft)
    assert spec.draft_model_config.get_num_layers(config.parallel_config) == 1
    assert spec.draft_kv_budget == 256 and config.num_lookahead_tokens == 4
    assert repr(spec).startswith(f"SpeculativeConfig(method='magicdec', model={draft!r}")


@pytest.mark.parametrize(
    ("written", "fields", "sentence"),
    [
        ({}, {"model": None}, "name one in 'model'"),
        ({}, {"model": METHOD}, f"or use method='{METHOD}'"),
        ({}, {"model": "/no/such/draft"}, "'/no/such/draft'"),
        ({}, {"method": METHOD}, "use method='magicdec' to draft with that model"),
        ({}, {"draft_kv_policy": "snapkv"}, "use draft_kv_policy='streamingllm'"),
        ({}, {"draft_kv_policy": "verify-topk"}, "use draft_kv_policy='streamingllm'"),
        ({}, {"parallel_drafting": True}, "magicdec does not take 'parallel_drafting'"),
        ({}, {"draft_kv_cache": "ring"}, "no longer supported; remove it: a draft model's KV cache"),
        ({"vocab_size": 128}, {}, "vocab_size=64. Draft model vocab_size=128"),
        ({"max_position_embeddings": 2048}, {}, "reads at most 2048 tokens; use --max-model-len 2048"),
        ({"attention_chunk_size": 512}, {}, "draft models with local chunks"),
        ({"architectures": ["NoSuchForCausalLM"]}, {}, "NoSuchForCausalLM"),
        ({}, {"quantization": "none such"}, "or remove quantization"),
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, {}, "or add --trust-remote-code"),
    ],
)
def test_what_cannot_work_is_refused(model_dir, tmp_path, monkeypatch, written, fields, sentence):
    # vLLM waits for two seconds before it retries a read.
    monkeypatch.setattr("vllm.transformers_utils.repo_utils.time", SimpleNamespace(sleep=lambda _: None))
    config = Path(write_llama(tmp_path, num_hidden_layers=1), "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), **written}))
    with pytest.raises(MagicDecConfigError) as error:
        configure(model_dir, {"method": MODEL_METHOD, "model": str(tmp_path), **fields})
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_targets_that_take_embeddings_are_refused(model_dir, draft):
    with pytest.raises(MagicDecConfigError, match="the target takes more than text"):
        configure(model_dir, {"method": MODEL_METHOD, "model": draft}, enable_prompt_embeds=True)


def write_tokenizer(path: str, words: list[str], added: Sequence[str] = ()) -> None:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0])
    whole.add_tokens(list(added))
    whole.save_pretrained(path)


def test_different_tokenizers_are_refused(model_dir, draft, tmp_path):
    """Reserved ids at the end may differ, and a draft without a tokenizer gets a warning."""
    own, theirs = shutil.copytree(model_dir, tmp_path / "t"), shutil.copytree(draft, tmp_path / "d")
    words = [f"word{index}" for index in range(60)]
    fields = {"method": MODEL_METHOD, "model": str(theirs)}
    write_tokenizer(own, words, ["<think>", "<end>"])
    configure(str(own), fields, skip_tokenizer_init=False)
    for added in ([], ["<reserved 0>"], ["<reserved 0>", "<end>"]):
        write_tokenizer(theirs, words, added)
        configure(str(own), fields, skip_tokenizer_init=False)
    swapped = [*words[:58], *words[:57:-1]]
    for others in ((words, ["<end>", "<think>"]), (swapped, ["<think>", "<end>"])):
        write_tokenizer(theirs, *others)
        with pytest.raises(MagicDecConfigError, match="2 tokens have other ids in the tokenizer"):
            configure(str(own), fields, skip_tokenizer_init=False)


@pytest.fixture
def profile(tmp_path):
    """Write a profile that was measured with these fields; return its path."""

    def write(description: dict, budgets: Sequence[int] = (512,)) -> str:
        path = tmp_path / "profile.json"
        steps = [TimedStep(Step(1, 100, 0, 2, budget), 0.01) for budget in budgets]
        StepTimes(steps).save(path, description)
        return str(path)

    return write


def auto_with(profile: str, draft: str | None = None) -> dict:
    fields = {"method": METHOD} if draft is None else {"method": MODEL_METHOD, "model": draft}
    return {**fields, "num_speculative_tokens": "auto", "profile": profile}


@pytest.fixture
def warned(monkeypatch):
    lines = []
    monkeypatch.setattr(profiles.logger, "warning_once", lambda text, *values: lines.append(text % values))
    return lambda: [line for line in lines if "profile: " in line]


def test_profile_of_the_same_draft_is_accepted(model_dir, draft, profile, warned, monkeypatch):
    monkeypatch.chdir(Path(draft).parent)
    name = Path(draft).name
    for model in (
        *(draft, f"{draft}/", name, f"publisher/{name}", f"/elsewhere/{name.upper()}"),
        f"/cache/models--publisher--{name}/snapshots/0f",
    ):
        measured = {"speculative_config": {"method": MODEL_METHOD, "model": model}}
        configure(model_dir, auto_with(profile(measured), draft))
    monkeypatch.chdir(draft)
    configure(model_dir, auto_with(profile(measured), "."))
    for measured in ({"method": METHOD}, {"model": METHOD}):
        path = profile({"model": f"publisher/{Path(model_dir).name}", "speculative_config": measured})
        configure(model_dir, auto_with(path))
    assert not warned()


@pytest.mark.parametrize(
    ("measured", "drafts", "sentence"),
    [
        ({"method": METHOD}, True, "was measured with method='magicdec-self', not"),
        ({"method": MODEL_METHOD, "model": "org/other"}, False, "was measured with method='magicdec', not"),
        ({"method": METHOD, "draft_weights": "int8"}, False, "with draft_weights='int8', not 'target'"),
    ],
)
def test_profile_of_another_method_or_precision_is_refused(
    model_dir, draft, profile, measured, drafts, sentence
):
    path = profile({"model": model_dir, "speculative_config": measured})
    with pytest.raises(MagicDecConfigError, match=sentence):
        configure(model_dir, auto_with(path, draft if drafts else None))


@pytest.mark.parametrize(
    ("measured", "drafts", "what"),
    [
        # The folder may be mounted under another name, or be a link.
        ({"method": MODEL_METHOD, "model": "org/other"}, True, "with drafts of 'org/other', not '{draft}'"),
        ({"method": METHOD}, False, "with drafts of 'org/other', not '{target}'"),
        ({"method": MODEL_METHOD, "model": "{draft}"}, True, "with 'org/other', not '{target}'"),
        (None, True, "does not name the model that drafted"),
        ({"method": MODEL_METHOD, "model": 5}, True, "does not name the model that drafted"),
    ],
)
def test_profile_of_another_model_gets_a_warning(model_dir, draft, profile, warned, measured, drafts, what):
    if measured and measured.get("model") == "{draft}":
        measured = {**measured, "model": draft}
    path = profile({"model": "org/other", "speculative_config": measured})
    configure(model_dir, auto_with(path, draft if drafts else None))
    assert any(what.format(draft=draft, target=model_dir) in line for line in warned())
