# SPDX-License-Identifier: Apache-2.0
"""Long real text for prompts: the standard library's sources, or a folder of text files."""

import sysconfig
from collections.abc import Callable
from pathlib import Path


def read_text(folder: Path | None) -> str:
    """All documents of a folder one after the other; without a folder, modules of the standard library."""
    if folder is not None:
        paths = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    else:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise SystemExit(f"{folder} holds no .txt files")
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def excerpts(
    encode: Callable[[str], list[int]], count: int, num_tokens: int, folder: Path | None = None
) -> list[list[int]]:
    """`count` excerpts of `num_tokens` token ids each, spread evenly, overlapping if need be."""
    text = read_text(folder)
    # Text beyond what could be used costs only time.
    tokens = encode(text[: 12 * count * num_tokens])
    if len(tokens) < num_tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens; {num_tokens} are needed")
    stride = (len(tokens) - num_tokens) // max(1, count - 1) if count > 1 else 0
    return [tokens[i * stride : i * stride + num_tokens] for i in range(count)]
