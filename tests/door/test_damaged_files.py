# SPDX-License-Identifier: Apache-2.0
"""Files that a configuration names: damaged files, special files, and files that any user may replace.

Each file is read, or refused in one sentence that names the field.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from config_cases import (  # noqa: F401
    accepted_or_refused,
    assert_one_sentence,
    cases,
    draft,
    junk,
    known_models,
    text_of,
    within_the_limit,
)
from damaging import damage, do_damage, replace_file
from hypothesis import given
from hypothesis import strategies as st
from test_config import configure, model_dir  # noqa: F401

from vllm_magicdec import files
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Header


def write_profile(path: Path) -> None:
    steps = [Step(1, 100, 0, 0), Step(1, 100, 0, 2, 512), Step(1, 100, 2, 2, 512), Step(4, 9000, 2, 0)]
    StepTimes([TimedStep(step, 0.01 * (1 + step.num_reqs)) for step in steps]).save(path, {"model": "m"})


@cases(300)
@given(st.one_of(damage, st.tuples(st.just("json"), st.integers(0, 5), junk)))
def test_damaged_profiles(model_dir, tmp_path, case):  # noqa: F811
    path = tmp_path / "profile.json"
    write_profile(path)
    if case[0] == "json":
        profile, (_, index, value) = json.loads(path.read_text()), case
        name = [*Step._fields, "seconds"][index]
        profile["steps"][index % len(profile["steps"])][name] = value
        path.write_text(text_of(profile))
    else:
        do_damage(path, *case)
    try:
        configure(model_dir, {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path)})
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
def test_damaged_datastores(model_dir, tmp_path, case):  # noqa: F811
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
def test_special_and_writable_files_are_refused(model_dir, tmp_path, name, file_type):  # noqa: F811
    path = tmp_path / "store"
    write_datastore(path)
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(path)]}
    configure(model_dir, fields)
    file = path / name
    if file_type == "writable by all":
        file.chmod(0o666)
    else:
        replace_file(file, file_type)
    with within_the_limit(), pytest.raises(MagicDecConfigError) as raised:
        configure(model_dir, fields)
    assert_one_sentence(str(raised.value), ["draft_lookup_sources"])


def test_profile_in_writable_folder_is_refused(model_dir, tmp_path):  # noqa: F811
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
