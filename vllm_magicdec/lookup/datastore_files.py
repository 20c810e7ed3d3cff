# SPDX-License-Identifier: Apache-2.0
"""A datastore on disk: tokens of documents, in which lookups find how a text may go on.

A folder of three files:

- `header.json`: what `Header` says.
- `tokens.npy`: `[num_tokens] uint8, uint16 or uint32`, the smallest that holds the vocabulary; after each
  document an id that no token has (`Header.separator`), so that no match goes beyond its document.
- `suffix_array.npy`: `[num_places] uint32`, the places of tokens that another one follows, ordered by the
  text that ends there, read backwards: the suffix array of the reversed text. So the places where the
  latest tokens of a text stood before, as many of them as possible, lie side by side, and one binary search
  finds them. Nobody looks for what the longest match has in front of it, only for what follows.

libdivsufsort sorts it, through pydivsufsort (the extra `index`), which turns tokens of several bytes into
big-endian ones. Reading needs NumPy alone.
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
MAX_TOKENS = 2**32 - 1  # a place has four bytes
MAX_HEADER_BYTES = 2**20
_HEADER, _TOKENS, _SUFFIX_ARRAY = "header.json", "tokens.npy", "suffix_array.npy"


class UnfitDocumentsError(ValueError):
    """No datastore can be made of them."""


@dataclass(frozen=True)
class Vocabulary:
    """What token ids mean."""

    size: int  # every id is below
    fingerprint: str  # of all tokens with their ids

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> "Vocabulary":
        """Of a tokenizer's `get_vocab()`."""
        listed = json.dumps(sorted((index, token) for token, index in ids.items()))
        return cls(max(ids.values(), default=-1) + 1, hashlib.sha256(listed.encode()).hexdigest())


@dataclass(frozen=True)
class Header:
    """What a datastore says of itself."""

    version: int
    model: str  # whose tokenizer it was, for people
    vocab_size: int
    vocab_fingerprint: str
    num_documents: int
    num_tokens: int  # entries of `tokens.npy`, a separator per document included
    num_places: int  # entries of `suffix_array.npy`

    @property
    def separator(self) -> int:
        """The id after each document."""
        return self.vocab_size

    @property
    def token_dtype(self) -> np.dtype:
        """Of `tokens.npy`."""
        return np.min_scalar_type(self.separator)


def write(path: Path, documents: Iterable[np.ndarray], vocabulary: Vocabulary, model: str) -> Header:
    """Write a datastore, all of it or nothing.

    In memory are the tokens and, while they are sorted, about 5 bytes for each of their bytes.

    Args:
        path: the folder; it must not be there yet.
        documents: [num] integers each, ids of the vocabulary.
        vocabulary: theirs.
        model: a name to remember.

    Raises:
        FileExistsError: there is something at `path`.
        ImportError: pydivsufsort is not installed.
        UnfitDocumentsError: the documents have no two tokens in a row, more than MAX_TOKENS, or an id that
            is not of the vocabulary.
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
    goes_on = np.zeros(num_tokens, dtype=bool)
    goes_on[:-1] = (tokens[:-1] != separator) & (tokens[1:] != separator)
    if not goes_on.any():
        raise UnfitDocumentsError("the documents have no two tokens in a row")
    suffixes = pydivsufsort.divsufsort(np.ascontiguousarray(tokens[::-1]))
    places = (num_tokens - 1 - suffixes).astype(np.uint32)
    places = places[goes_on[places]]

    header = Header(
        version=VERSION,
        model=model,
        vocab_size=vocabulary.size,
        vocab_fingerprint=vocabulary.fingerprint,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_places=len(places),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        np.save(folder / _TOKENS, tokens)
        np.save(folder / _SUFFIX_ARRAY, places)
        (folder / _HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n")
        folder.chmod(0o755)
        os.rename(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return header


def read(path: Path) -> tuple[Header, np.ndarray, np.ndarray]:
    """Map a datastore into memory.

    Returns:
        Its header, its tokens `[num_tokens]` and its suffix array `[num_places] uint32`, both read-only.

    Raises:
        MagicDecConfigError: it is none, another version's, or not whole.
    """
    header = _read_header(path)
    tokens = _map(path / _TOKENS, header.token_dtype, header.num_tokens)
    return header, tokens, _map(path / _SUFFIX_ARRAY, np.dtype(np.uint32), header.num_places)


class OpenSizes:
    """Tells when the files of a datastore that is mapped into memory are cut.

    Their lost pages must not be read: the operating system ends a process that does (SIGBUS).

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self._files = [
            (name, os.open(path / name, os.O_RDONLY | os.O_CLOEXEC), (path / name).stat().st_size)
            for name in (_TOKENS, _SUFFIX_ARRAY)
        ]

    def check(self) -> None:
        """Takes about a microsecond.

        Raises:
            OSError: a file is shorter than it was.
        """
        for name, descriptor, size in self._files:
            if os.fstat(descriptor).st_size < size:
                raise OSError(f"{name} was cut while it was in use")

    def __del__(self) -> None:
        for _, descriptor, _ in self._files:
            os.close(descriptor)


def check(path: Path, vocab_size: int, vocabulary: Vocabulary | None = None) -> None:
    """Refuse a datastore that a server cannot look up in; loads no Numba, so that any process may ask.

    Args:
        path: its folder.
        vocab_size: of the model that is served, padding included.
        vocabulary: of its tokenizer; None if there is no tokenizer.

    Raises:
        MagicDecConfigError: there is none, it is damaged, or of another version or tokenizer.
    """
    header, _, _ = read(path)
    is_same = vocabulary is None or vocabulary.fingerprint == header.vocab_fingerprint
    if not is_same or header.vocab_size > vocab_size:
        raise _refusal(path, f"was made with another tokenizer, that of {header.model!r}")


def _refusal(path: Path, reason: str) -> MagicDecConfigError:
    """What is wrong with a datastore, with the way out."""
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
