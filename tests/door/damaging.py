# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that truncate, overwrite or replace files."""

import os
from pathlib import Path

from hypothesis import strategies as st

OTHER_FORMATS = [
    b"[" * 100_000,
    b"PK\x03\x04" + b"\0" * 60,
    b"\x93NUMPY\x01\0\xff\xff",
    b"\x80\x04K.",
    b"{}",
]
damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("new"), st.just(0.0), st.binary(max_size=200)),
    st.tuples(st.just("new"), st.just(0.0), st.sampled_from(OTHER_FORMATS)),
)


def replace_file(path: Path, how: str) -> None:
    """Put nothing, or something that is no plain file, in the place of a file."""
    path.unlink()
    make = {
        "gone": lambda: None,
        "empty": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/nowhere"),
        "device link": lambda: path.symlink_to("/dev/zero"),
    }
    make[how]()


def do_damage(path: Path, how: str, position: float, content: bytes) -> None:
    whole = path.read_bytes()
    at = int(position * len(whole))
    new = {"cut": whole[:at], "put": whole[:at] + content + whole[at + len(content) :], "new": content}
    path.write_bytes(new[how])
