# SPDX-License-Identifier: Apache-2.0
"""The files of a datastore: tokens of documents, indexed for lookups.

- `header.json`: the fields of `Header`.
- `tokens.npy`: `[num_tokens] uint8, uint16 or uint32`, the smallest type that holds the vocabulary. After
  each document follows `Header.separator`, an id that no token has, so that no match crosses documents.
- `suffix_array.npy`: `[num_places] uint32`, the positions of tokens that are not their document's last one,
  ordered by the text that ends there, read backwards: the suffix array of the reversed text. So the
  positions with the longest match to the end of a text are adjacent, and one binary search finds them.

libdivsufsort sorts the array, through pydivsufsort (the extra `index`). Reading needs only NumPy.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_magicdec import files
from vllm_magicdec.errors import METHOD, MagicDecConfigError, quoted

VERSION = 1
MAX_TOKENS = 2**32 - 1  # a position has four bytes
MAX_HEADER_BYTES = 2**20
_HEADER, _TOKENS, _SUFFIX_ARRAY = "header.json", "tokens.npy", "suffix_array.npy"


class UnfitDocumentsError(ValueError):
    """The documents do not make a datastore."""


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer."""

    size: int  # every id is below
    fingerprint: str  # hash of all tokens with their ids

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> "Vocabulary":
        """Make it from a tokenizer's `get_vocab()`."""
        listed = json.dumps(sorted((index, token) for token, index in ids.items()))
        return cls(max(ids.values(), default=-1) + 1, hashlib.sha256(listed.encode()).hexdigest())


@dataclass(frozen=True)
class Header:
    """The fields of `header.json`."""

    version: int
    model: str  # name of the tokenizer's model, for error messages
    vocab_size: int
    vocab_fingerprint: str
    num_documents: int
    num_tokens: int  # length of `tokens.npy`, with a separator per document
    num_places: int  # length of `suffix_array.npy`

    @property
    def separator(self) -> int:
        """The id after each document."""
        return self.vocab_size


def write(path: Path, documents: Iterable[np.ndarray], vocabulary: Vocabulary, model: str) -> Header:
    """Write a datastore atomically.

    Memory holds the tokens and, while they are sorted, about 5 bytes for each of their bytes.

    Args:
        documents: token ids, [num] integers each.
        model: see `Header`.

    Raises:
        FileExistsError: `path` exists.
        ImportError: pydivsufsort is not installed.
        UnfitDocumentsError: no document has two tokens, there are more than MAX_TOKENS, or an id is not in
            the vocabulary.
    """
    import pydivsufsort

    if path.exists():
        raise FileExistsError(path)
    dtype = np.min_scalar_type(vocabulary.size)
    separator = np.array([vocabulary.size], dtype)
    parts: list[np.ndarray] = []
    num_tokens = num_documents = 0
    for document in documents:
        if len(document) == 0:
            continue
        if document.min() < 0 or document.max() >= vocabulary.size:
            raise UnfitDocumentsError(f"a document has a token that is not below {vocabulary.size}")
        num_documents += 1
        num_tokens += len(document) + 1
        if num_tokens > MAX_TOKENS:
            raise UnfitDocumentsError(f"the documents have more than {MAX_TOKENS} tokens")
        parts += (document.astype(dtype), separator)
    tokens = np.concatenate([*parts, np.empty(0, dtype)])
    parts.clear()
    has_next = np.zeros(num_tokens, dtype=bool)
    has_next[:-1] = (tokens[:-1] != separator) & (tokens[1:] != separator)
    if not has_next.any():
        raise UnfitDocumentsError("the documents have no two tokens in a row")
    suffixes = pydivsufsort.divsufsort(np.ascontiguousarray(tokens[::-1]))
    suffix_array = (num_tokens - 1 - suffixes).astype(np.uint32)
    suffix_array = suffix_array[has_next[suffix_array]]

    sizes = num_documents, num_tokens, len(suffix_array)
    header = Header(VERSION, model, vocabulary.size, vocabulary.fingerprint, *sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        np.save(folder / _TOKENS, tokens)
        np.save(folder / _SUFFIX_ARRAY, suffix_array)
        (folder / _HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n")
        folder.chmod(0o755)
        os.rename(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return header


def read(
    path: Path, vocab_size: int, vocabulary: Vocabulary | None = None
) -> tuple[Header, np.ndarray, np.ndarray]:
    """Map a datastore that fits a model into memory; does not import Numba.

    Args:
        vocab_size: of the served model, padding included.
        vocabulary: of its tokenizer, if there is one.

    Returns:
        Its header, its tokens `[num_tokens]` and its suffix array `[num_places] uint32`, both read-only.

    Raises:
        MagicDecConfigError: it is missing, damaged, or of another version or tokenizer.
    """
    header = _read_header(path)
    tokens = _map(path / _TOKENS, np.min_scalar_type(header.separator), header.num_tokens)
    suffix_array = _map(path / _SUFFIX_ARRAY, np.dtype(np.uint32), header.num_places)
    is_same = vocabulary is None or vocabulary.fingerprint == header.vocab_fingerprint
    if not is_same or header.vocab_size > vocab_size:
        raise _refusal(path, f"was made with another tokenizer, that of {header.model!r}")
    return header, tokens, suffix_array


class OpenSizes:
    """Detects that the memory-mapped files of a datastore were cut.

    Reading a page that its file has lost ends the process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self._files = [
            (name, os.open(path / name, os.O_RDONLY | os.O_CLOEXEC), (path / name).stat().st_size)
            for name in (_TOKENS, _SUFFIX_ARRAY)
        ]

    def check(self) -> None:
        """Raise an OSError if a file is shorter than it was; takes about a microsecond."""
        for name, descriptor, size in self._files:
            if os.fstat(descriptor).st_size < size:
                raise OSError(f"{name} was cut while it was in use")

    def __del__(self) -> None:
        for _, descriptor, _ in self._files:
            os.close(descriptor)


def _refusal(path: Path, reason: str) -> MagicDecConfigError:
    return MagicDecConfigError(
        f"{METHOD}: {path} {reason}; make a datastore with: magicdec index FILES --model MODEL --out PATH"
    )


def _read_header(path: Path) -> Header:
    try:
        text = files.read(path / _HEADER, MAX_HEADER_BYTES)
    except (OSError, ValueError) as error:
        why = f"{_HEADER}: {files.reason(error)}"
        raise _refusal(path, f"is no datastore that can be read ({why})") from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal(path, f"is a damaged datastore ({_HEADER} is no JSON)") from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise _refusal(
            path, f"is a datastore of version {quoted(version)}, and this plugin reads version {VERSION}"
        )
    types = Header.__annotations__
    if fields.keys() != types.keys() or any(type(fields[name]) is not types[name] for name in types):
        raise _refusal(path, f"is a damaged datastore ({_HEADER} has other fields than it should)")
    return Header(**fields)


def _map(file: Path, dtype: np.dtype, length: int) -> np.ndarray:
    try:
        files.refuse_untrusted(file)
        is_regular = file.is_file()
    except (OSError, ValueError) as error:
        raise _refusal(
            file.parent, f"is no datastore that can be read ({file.name}: {files.reason(error)})"
        ) from None
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False) if is_regular else None
    except Exception:  # whatever NumPy makes of a damaged header
        raise _refusal(file.parent, f"is a damaged datastore ({file.name} is cut or no array)") from None
    if not isinstance(array, np.memmap) or array.dtype != dtype or array.shape != (length,):
        raise _refusal(file.parent, f"is a damaged datastore ({file.name} is not what its header says)")
    return array.view(np.ndarray)  # what compiled loops take
