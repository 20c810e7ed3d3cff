# SPDX-License-Identifier: Apache-2.0
"""Damaged draft folders are accepted, or refused in one sentence before weights are read."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_cases import LONGEST_SENTENCE, cases, is_named, junk, text_of
from damaging import damage, do_damage, replace_file
from hypothesis import example, given
from hypothesis import strategies as st
from test_config import configure
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.model_executor.model_loader import weight_utils

from vllm_magicdec.config import speculative
from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "examples" / "tiny-llama")
DRAFTS = {name: ROOT / "benchmarks" / name for name in ("tiny-draft", "tiny-spire")}
CONFIGS = {name: json.loads((path / "config.json").read_text()) for name, path in DRAFTS.items()}
# Files that vLLM reads during configuration, and the weights, which it must not read.
FILES = "config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors".split()
# Optional fields of a model configuration that vLLM reads.
MORE = [
    *("sliding_window", "layer_types", "quantization_config", "rope_scaling", "text_config", "auto_map"),
    *("attention_chunk_size", "num_experts", "torch_dtype", "max_seq_len", "is_causal", "n_predict"),
]


def configure_draft(draft: Path) -> None:
    fields = {"method": MODEL_METHOD, "model": str(draft)}
    configure(TARGET, fields, skip_tokenizer_init=False)


@pytest.fixture(scope="module", autouse=True)
def no_weight_reads() -> None:
    """Fail if weights are read, and exclude from timing what vLLM does once per model."""

    def read(*args, **kwargs) -> None:
        pytest.fail("weights are read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_utils, "safe_open", read)
        patch.setattr("safetensors.torch.load_file", read)
        patch.setattr("torch.load", read)
        # vLLM waits for two seconds before it retries a read.
        patch.setattr(
            "vllm.transformers_utils.repo_utils.time", SimpleNamespace(sleep=lambda seconds: None)
        )
        for path in DRAFTS.values():
            configure_draft(path)
        yield


flip = st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7))
to_a_file = st.one_of(damage, flip, st.sampled_from([("gone",), ("empty",), ("folder",), ("link",)]))
near = [-1, 0, 1, 2, 2**31, 10**30, 0.5, "", "2", [], [1], {}, None, True, float("nan")]
names_by_draft = {
    name: [*fields, *(f"spire.{part}" for part in fields.get("spire", {})), *MORE]
    for name, fields in CONFIGS.items()
}
to_a_field = st.one_of(st.just(("gone",)), st.tuples(st.just("is"), st.one_of(st.sampled_from(near), junk)))
damages = st.sampled_from(sorted(DRAFTS)).flatmap(
    lambda draft: st.tuples(
        st.just(draft),
        st.one_of(
            st.tuples(st.sampled_from(names_by_draft[draft]), to_a_field),
            st.tuples(st.just("config.json"), to_a_file),
            st.tuples(st.sampled_from(FILES), to_a_file),
        ),
    )
)


def damage_file(path: Path, kind: str, *how) -> None:
    if kind == "flip":
        position, bit = how
        whole = bytearray(path.read_bytes())
        whole[int(position * (len(whole) - 1))] ^= 1 << bit
        path.write_bytes(whole)
    elif kind in ("gone", "empty", "folder", "link"):
        replace_file(path, kind)
    else:
        do_damage(path, kind, *how)


def damage_field(path: Path, name: str, kind: str, value=None) -> None:
    fields = json.loads(path.read_text())
    inner, name = (fields["spire"], name[6:]) if name.startswith("spire.") else (fields, name)
    if kind == "gone":
        inner.pop(name, None)
    else:
        inner[name] = value
    path.write_text(text_of(fields))


def damaged_copy(draft: str, target: str, how, path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    damaged = target if target in FILES else "config.json"
    for file in DRAFTS[draft].iterdir():
        if file.name == damaged:
            shutil.copy(file, path)
        else:
            os.symlink(file, path / file.name)
    if not (path / damaged).exists():
        (path / damaged).write_text("{}")
    if target in FILES:
        damage_file(path / target, *how)
    else:
        damage_field(path / "config.json", target, *how)
    return path


@cases(500)
@given(damages)
@example(("tiny-spire", ("eagle_aux_hidden_state_layer_ids", ("is", 5))))
@example(("tiny-spire", ("eagle_aux_hidden_state_layer_ids", ("is", [[4], 5, 6]))))
@example(("tiny-draft", ("config.json", ("new", 0.0, b"[" * 100_000))))
def test_damaged_drafts(tmp_path, case):
    name, (target, how) = case
    path = damaged_copy(name, target, how, tmp_path / "draft")
    try:
        configure_draft(path)
    except MagicDecConfigError as error:
        sentence = str(error)
        assert sentence.isprintable() and len(sentence) < LONGEST_SENTENCE, sentence
        assert str(path) in sentence and is_named("model", sentence), sentence


@pytest.mark.parametrize("error_type", [TypeError, OSError])
def test_other_errors_are_not_reported_as_unreadable_drafts(monkeypatch, error_type):
    """A bug of the plugin or vLLM keeps its type."""

    def fail(*args, **kwargs) -> None:
        raise error_type("a fault")

    for owner, attribute in (
        (SpeculativeConfig, "create_draft_parallel_config"),
        (speculative, "check_draft_model"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fail)
            with pytest.raises(error_type, match="a fault"):
                configure_draft(DRAFTS["tiny-draft"])


@pytest.mark.parametrize(
    "error_type", [TypeError, AttributeError, KeyError, OSError, ValueError, RecursionError]
)
def test_errors_while_reading_name_the_draft(monkeypatch, error_type):
    read = ModelConfig.get_model_arch_config

    def fail(model):
        if model.runner == "draft":
            raise error_type("a field")
        return read(model)

    monkeypatch.setattr(ModelConfig, "get_model_arch_config", fail)
    with pytest.raises(MagicDecConfigError, match=r"vLLM cannot use model='.*' as a draft \("):
        configure_draft(DRAFTS["tiny-draft"])
