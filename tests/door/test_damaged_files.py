# SPDX-License-Identifier: Apache-2.0
"""Files of a configuration, damaged or special: read, or refused in a sentence before weights are read."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from config_cases import (
    accepted_or_refused,
    assert_one_sentence,
    cases,
    junk,
    known_models,  # noqa: F401 - a fixture
    text_of,
    within_the_limit,
)
from hypothesis import example, given
from hypothesis import strategies as st
from test_config import configure
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.model_executor.model_loader import weight_utils

from vllm_magicdec import files
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.config import speculative
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Header

OTHER_FORMATS = [b"[" * 100_000, b"PK\x03\x04" + b"\0" * 60, b"\x93NUMPY\x01\0\xff\xff", b"\x80\x04K."]
damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("new"), st.just(0.0), st.binary(max_size=200) | st.sampled_from(OTHER_FORMATS)),
)


def do_damage(path: Path, how: str, position: float = 0.0, content: bytes = b"") -> None:
    """Cut, overwrite or replace a file, or put nothing or something special in its place."""
    whole = path.read_bytes()
    at = int(position * len(whole))
    if how == "writable by all":
        path.chmod(0o666)
        return
    path.unlink()
    make = {
        "cut": lambda: path.write_bytes(whole[:at]),
        "put": lambda: path.write_bytes(whole[:at] + content + whole[at + len(content) :]),
        "new": lambda: path.write_bytes(content),
        "gone": lambda: None,
        "empty": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/nowhere"),
        "device link": lambda: path.symlink_to("/dev/zero"),
    }
    make[how]()


def write_profile(path: Path) -> None:
    steps = [Step(1, 100, 0, 0), Step(1, 100, 0, 2, 512), Step(1, 100, 2, 2, 512), Step(4, 9000, 2, 0)]
    StepTimes([TimedStep(step, 0.01 * (1 + step.num_reqs)) for step in steps]).save(path, {"model": "m"})


@cases(300)
@given(st.one_of(damage, st.tuples(st.just("json"), st.integers(0, 5), junk)))
def test_damaged_profiles(model_dir, tmp_path, case):
    path = tmp_path / "profile.json"
    write_profile(path)
    if case[0] == "json":
        profile, (_, index, value) = json.loads(path.read_text()), case
        name = [*Step._fields, "seconds"][index]
        profile["steps"][index % len(profile["steps"])][name] = value
        path.write_text(text_of(profile))
    else:
        do_damage(path, *case)
    fields = {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path)}
    try:
        with within_the_limit():
            configure(model_dir, fields)
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), ["profile"])
        return
    times = StepTimes.load(path)
    for context in (1, 10**6):
        assert times.predict(Step(3, context, 2, 2, 512)) > 0


def write_datastore(path: Path) -> None:
    """Write a datastore as `magicdec index` does, without its sorter."""
    tokens = np.array([1, 2, 3, 1, 2, 4, 64], dtype=np.uint8)
    suffixes = np.array([0, 3, 1, 4, 2], dtype=np.uint32)
    header = Header(datastore_files.VERSION, "m", 64, "f", 1, len(tokens), len(suffixes))
    path.mkdir()
    np.save(path / "tokens.npy", tokens)
    np.save(path / "suffix_array.npy", suffixes)
    (path / "header.json").write_text(json.dumps(vars(header)))


@cases(400)
@given(
    st.one_of(
        st.tuples(st.sampled_from(["header.json", "tokens.npy", "suffix_array.npy"]), damage),
        st.tuples(st.sampled_from([*Header.__annotations__, "more"]), junk),
    )
)
def test_damaged_datastores(model_dir, tmp_path, case):
    path = tmp_path / "store"
    shutil.rmtree(path, ignore_errors=True)
    write_datastore(path)
    name, change = case
    if "." in name:
        do_damage(path / name, *change)
    else:
        header = json.loads((path / "header.json").read_text())
        (path / "header.json").write_text(text_of({**header, name: change}))
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(path)]}
    accepted_or_refused(model_dir, None, fields, ["draft_lookup_sources"])


@pytest.mark.parametrize("name", ["header.json", "tokens.npy", "suffix_array.npy"])
@pytest.mark.parametrize("file_type", ["pipe", "folder", "device link", "link", "writable by all"])
def test_special_and_writable_files_are_refused(model_dir, tmp_path, name, file_type):
    path = tmp_path / "store"
    write_datastore(path)
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(path)]}
    configure(model_dir, fields)
    do_damage(path / name, file_type)
    with within_the_limit(), pytest.raises(MagicDecConfigError) as raised:
        configure(model_dir, fields)
    assert_one_sentence(str(raised.value), ["draft_lookup_sources"])


def test_profile_in_writable_folder_is_refused(model_dir, tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    write_profile(path / "profile.json")
    fields = {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path / "profile.json")}
    configure(model_dir, fields)
    path.chmod(0o777)
    with pytest.raises(MagicDecConfigError, match=f"any user may replace .*chmod o-w {path}"):
        configure(model_dir, fields)
    path.chmod(0o1777)  # like /tmp
    configure(model_dir, fields)


def test_no_advice_takes_rights_from_a_folder_for_temporary_files(tmp_path):
    """Like /tmp: any user may write it, and nobody may replace others' files."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ValueError, match=r"any user may write .*shared: use a folder of"):
        files.refuse_untrusted(shared)
    with pytest.raises(ValueError, match="it is a folder; name a file"):
        files.read(shared, 1)
    if os.geteuid() == 0:  # only root can give a file away
        (shared / "file").write_text("")
        os.chown(shared / "file", 12345, 12345)
        with pytest.raises(ValueError, match=r"any user may replace .*: copy it to a folder of"):
            files.refuse_untrusted(shared / "file")


def test_replaceable_intermediate_link_is_refused(tmp_path, monkeypatch):
    """A link to a link, each in another folder."""
    home, between, real = (tmp_path / name for name in ("home", "between", "real"))
    for folder in (home, between, real):
        folder.mkdir()
    (real / "file").write_text("")
    (between / "link").symlink_to(real)
    (home / "named").symlink_to("../between/link")
    monkeypatch.chdir(home)
    for path in (home / "named" / "file", Path("named/file"), Path("../home/named/../real/file")):
        files.refuse_untrusted(path)
        between.chmod(0o777)
        with pytest.raises(ValueError, match=f"any user may replace {between}/link: chmod o-w {between}"):
            files.refuse_untrusted(path)
        between.chmod(0o755)
    real.chmod(0o777)
    with pytest.raises(ValueError, match=f"any user may replace {real}/file"):
        files.refuse_untrusted(Path("named/file"))


ROOT = Path(__file__).parents[2]
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
    target, fields = ROOT / "examples" / "tiny-llama", {"method": MODEL_METHOD, "model": str(draft)}
    configure(str(target), fields, skip_tokenizer_init=False)


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
        patch.setattr("vllm.transformers_utils.repo_utils.time", SimpleNamespace(sleep=lambda _: None))
        for path in DRAFTS.values():
            configure_draft(path)
        yield


to_a_file = st.one_of(damage, st.sampled_from([("gone",), ("empty",), ("folder",), ("link",)]))
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


def damaged_copy(draft: str, target: str, how, path: Path) -> Path:
    """Write a draft, of which a file or a field of config.json is damaged."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    damaged = path / (target if target in FILES else "config.json")
    for file in DRAFTS[draft].iterdir():
        if file.name != damaged.name:
            os.symlink(file, path / file.name)
    own = DRAFTS[draft] / damaged.name
    damaged.write_bytes(own.read_bytes() if own.exists() else b"{}")
    if target in FILES:
        do_damage(damaged, *how)
        return path
    fields = json.loads(damaged.read_text())
    inner, name = (fields["spire"], target[6:]) if target.startswith("spire.") else (fields, target)
    inner.pop(name, None)
    if how[0] == "is":
        inner[name] = how[1]
    damaged.write_text(text_of(fields))
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
        with within_the_limit():
            configure_draft(path)
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), ["model"])
        assert str(path) in str(error)


@pytest.mark.parametrize("error_type", [TypeError, OSError])
def test_other_errors_are_not_reported_as_unreadable_drafts(monkeypatch, error_type):
    """A bug of the plugin or vLLM keeps its type."""

    def fail(*args, **kwargs) -> None:
        raise error_type("a fault")

    calls = {"create_draft_parallel_config": SpeculativeConfig, "check_draft_model": speculative}
    for attribute, owner in calls.items():
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
