# SPDX-License-Identifier: Apache-2.0
"""Read documents from text, JSON lines and Parquet files, and tokenize them."""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from vllm_magicdec.planner.console import UserError, require

EXTRA = "index"
FORMATS = "JSON lines (.jsonl, .ndjson), Parquet (.parquet), anything else as text"
_BATCH_CHARACTERS = 2**21  # tokenized together
# Longer documents are tokenized in pieces: an encoding takes far more memory than its tokens.
_PIECE_CHARACTERS = 2**20


def find_files(paths: Iterable[Path], patterns: list[str]) -> list[Path]:
    """List the given files and, in the given folders, the files whose names match a pattern.

    Raises:
        UserError: a path does not exist, or there are no files.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no {path}; name files or folders of documents")
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file())
            files += [file for file in found if any(fnmatch(file.name, each) for each in patterns)]
        else:
            files.append(path)
    if not files:
        raise UserError(f"no file matches {' '.join(patterns)}; give patterns with --include, as in '*.py'")
    return files


def read_texts(files: Iterable[Path], field: str) -> Iterator[str]:
    """Yield the documents of all files.

    Args:
        field: JSON field or Parquet column that holds the text.

    Raises:
        UserError: a file cannot be read, or has no such field.
    """
    for file in files:
        reader = _READERS.get(file.suffix.lower(), _read_text)
        try:
            yield from reader(file, field)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def encode(texts: Iterable[str], tokenizer: Any) -> Iterator[np.ndarray]:
    """Yield each text's tokens, `[num_tokens]` int64, without special tokens."""
    texts = iter(texts)
    while batch := list(_take(texts, _BATCH_CHARACTERS)):
        pieces = [list(_pieces(text)) for text in batch]
        ids = iter(tokenizer(list(itertools.chain(*pieces)), add_special_tokens=False)["input_ids"])
        for parts in pieces:
            tokens = list(itertools.chain.from_iterable(itertools.islice(ids, len(parts))))
            yield np.array(tokens, dtype=np.int64)


def load_tokenizer(model: str, load: Callable[[str], Any]) -> Any:
    """Return `load(model)`, or raise UserError."""
    try:
        return load(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {model} has no tokenizer that can be loaded: {reason}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select files and the field with the text."""
    parser.add_argument(
        "--include",
        nargs="+",
        metavar="PATTERN",
        default="*.txt *.md *.jsonl *.ndjson *.parquet".split(),
        help="files to read in folders (default: *.txt *.md *.jsonl *.ndjson *.parquet)",
    )
    parser.add_argument(
        "--field", default="text", help="JSON field or Parquet column with the text (default: %(default)s)"
    )


def _take(texts: Iterator[str], num_characters: int) -> Iterator[str]:
    """Yield texts until they have `num_characters` in total."""
    for text in texts:
        yield text
        num_characters -= len(text)
        if num_characters <= 0:
            return


def _pieces(text: str) -> Iterator[str]:
    """Split a very long text, after line breaks where possible."""
    begin = 0
    while len(text) - begin > _PIECE_CHARACTERS:
        end = text.rfind("\n", begin, begin + _PIECE_CHARACTERS) + 1 or begin + _PIECE_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _read_text(file: Path, field: str) -> Iterator[str]:
    yield file.read_text(encoding="utf-8", errors="replace")


def _read_json_lines(file: Path, field: str) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                raise UserError(f"line {number} of {file} is no JSON; every line has to be") from None
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(
                    f"line {number} of {file} has no text {field!r}; name the field with --field"
                )
            yield text


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet", EXTRA)
    arrow = require("pyarrow", EXTRA)
    try:
        with parquet.ParquetFile(file) as opened:
            columns = opened.schema_arrow.names
            if field not in columns:
                raise UserError(f"{file} has no column {field!r}, it has {', '.join(columns)}; try --field")
            for batch in opened.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise UserError(f"column {field!r} of {file} is no text; name one with --field")
                    yield text or ""
    except arrow.ArrowInvalid:
        raise UserError(f"{file} is no Parquet file; name another") from None


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
}
