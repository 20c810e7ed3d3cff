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


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


def test_draft_model_configuration(target, draft):
    config = configure(target, {"method": MODEL_METHOD, "model": draft, "draft_kv_budget": 256})
    spec = config.speculative_config
    assert type(spec) is EngineSpeculativeConfig and spec.uses_draft_model() and spec.has_draft_model
    assert (spec.model, spec.draft_model_config.model) == (draft, draft)
    assert spec.draft_model_config.get_num_layers(config.parallel_config) == 1
    assert spec.draft_kv_budget == 256 and config.num_lookahead_tokens == 4
    assert repr(spec).startswith(f"SpeculativeConfig(method='magicdec', model={draft!r}")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": None}, "name one in 'model'"),
        ({"model": METHOD}, f"or use method='{METHOD}'"),
        ({"model": "/no/such/draft"}, "'/no/such/draft'"),
        ({"method": METHOD}, "use method='magicdec' to draft with that model"),
        ({"draft_kv_policy": "snapkv"}, "use draft_kv_policy='streamingllm'"),
        ({"parallel_drafting": True}, "magicdec does not take 'parallel_drafting'"),
        (
            {"draft_kv_cache": "ring"},
            "magicdec: draft_kv_cache is no longer supported; remove it: a draft model's KV cache holds",
        ),
        ({"draft_kv_bugdet": 1}, "did you mean 'draft_kv_budget'?"),
    ],
)
def test_wrong_fields_get_one_sentence(target, draft, fields, sentence):
    with pytest.raises(MagicDecConfigError) as error:
        configure(target, {"method": MODEL_METHOD, "model": draft, **fields})
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"vocab_size": 128},
            "has a vocab_size of 128 and the target one of 64 .*; name a model of the target",
        ),
        ({"max_position_embeddings": 2048}, "reads at most 2048 tokens; use --max-model-len 2048"),
        ({"attention_chunk_size": 512}, "draft models with local chunks .* are not supported"),
    ],
)
def test_incompatible_drafts_are_refused(target, tmp_path, fields, sentence):
    with pytest.raises(MagicDecConfigError, match=sentence):
        configure(target, {"method": MODEL_METHOD, "model": write_llama(tmp_path, **fields)})


def test_targets_that_take_embeddings_are_refused(target, draft):
    with pytest.raises(MagicDecConfigError, match="the target takes more than text"):
        configure(target, {"method": MODEL_METHOD, "model": draft}, enable_prompt_embeds=True)


def write_tokenizer(path: str, words: list[str], added: Sequence[str] = ()) -> None:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0])
    whole.add_tokens(list(added))
    whole.save_pretrained(path)


def test_different_tokenizers_are_refused(target, draft, tmp_path):
    """Reserved ids at the end may differ, and a draft without a tokenizer gets a warning."""
    own, theirs = (shutil.copytree(model, tmp_path / name) for model, name in ((target, "t"), (draft, "d")))
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
    """Capture warnings of the profile check."""
    lines = []
    monkeypatch.setattr(profiles.logger, "warning_once", lambda text, *values: lines.append(text % values))
    return lambda: [line for line in lines if "profile: " in line]


def test_profile_of_the_same_draft_is_accepted(target, draft, profile, warned, monkeypatch):
    monkeypatch.chdir(Path(draft).parent)
    name = Path(draft).name
    for model in (
        *(draft, f"{draft}/", name, f"publisher/{name}", f"/elsewhere/{name.upper()}"),
        f"/cache/models--publisher--{name}/snapshots/0f",
    ):
        measured = {"speculative_config": {"method": MODEL_METHOD, "model": model}}
        configure(target, auto_with(profile(measured), draft))
    monkeypatch.chdir(draft)
    configure(target, auto_with(profile(measured), "."))
    for measured in ({"method": METHOD}, {"model": METHOD}):
        path = profile({"model": f"publisher/{Path(target).name}", "speculative_config": measured})
        configure(target, auto_with(path))
    assert not warned()


@pytest.mark.parametrize(
    ("measured", "drafts"),
    [({"method": METHOD}, True), ({"method": MODEL_METHOD, "model": "org/other"}, False)],
)
def test_profile_of_the_other_method_is_refused(target, draft, profile, measured, drafts):
    path = profile({"model": target, "speculative_config": measured})
    with pytest.raises(MagicDecConfigError) as error:
        configure(target, auto_with(path, draft if drafts else None))
    assert f"profile: {path} was measured with method='{measured['method']}', not" in str(error.value)
    assert "measure again with 'magicdec profile', or remove 'profile'" in str(error.value)


def test_profile_of_other_draft_weights_is_refused(target, profile):
    measured = {"method": METHOD, "draft_weights": "int8"}
    path = profile({"model": target, "speculative_config": measured})
    with pytest.raises(MagicDecConfigError, match="measured with draft_weights='int8', not 'target'"):
        configure(target, auto_with(path))
    configure(target, {**auto_with(path), "draft_weights": "int8"})


BY_OTHER = {"model": "org/other", "speculative_config": {"method": MODEL_METHOD, "model": "org/other"}}
NAMELESS = "does not name the model that drafted"


@pytest.mark.parametrize(
    ("measured", "drafts", "what"),
    [
        # The folder may be mounted under another name, or be a link.
        (BY_OTHER, True, "was measured with drafts of 'org/other', not '{draft}'"),
        (
            {"model": "org/other", "speculative_config": {"method": METHOD}},
            False,
            "was measured with drafts of 'org/other', not '{target}'",
        ),
        ({"model": "org/larger"}, True, "was measured with 'org/larger', not '{target}'"),
        ({"speculative_config": None}, True, NAMELESS),
        ({"speculative_config": 5}, True, NAMELESS),
        ({"speculative_config": {"method": MODEL_METHOD, "model": 5}}, True, NAMELESS),
    ],
)
def test_profile_of_another_model_gets_a_warning(target, draft, profile, warned, measured, drafts, what):
    same = {"model": target, "speculative_config": {"method": MODEL_METHOD, "model": draft}}
    configure(target, auto_with(profile(same), draft))
    assert not warned()
    path = profile({**same, **measured})
    configure(target, auto_with(path, draft if drafts else None))
    (line,) = warned()
    assert f"{path} {what.format(draft=draft, target=target)}" in line
    assert line.endswith("measure again with 'magicdec profile'")


@pytest.mark.parametrize(
    ("damaged", "fields", "reason"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, {}, "NoSuchForCausalLM"),
        ({}, {"quantization": "none such"}, "none such"),
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, {}, "custom code"),
    ],
)
def test_unsupported_draft_gets_vllms_reason(target, draft, tmp_path, monkeypatch, damaged, fields, reason):
    # vLLM waits for two seconds before it retries a read.
    monkeypatch.setattr(
        "vllm.transformers_utils.repo_utils.time", SimpleNamespace(sleep=lambda seconds: None)
    )
    path = shutil.copytree(draft, tmp_path / "draft")
    whole = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**whole, **damaged}))
    with pytest.raises(MagicDecConfigError) as error:
        configure(target, {"method": MODEL_METHOD, "model": str(path), **fields})
    sentence = str(error.value)
    beside = "".join(f", {name}='{value}'," for name, value in fields.items())
    assert f"vLLM cannot use model='{path}'{beside} as a draft (" in sentence and reason in sentence
    advice = "); use another draft, or a folder with a whole config.json"
    more = [f", or remove {name}" for name in fields]
    if reason == "custom code":
        more = [", or add --trust-remote-code"]
    assert sentence.endswith(advice + "".join(more))
