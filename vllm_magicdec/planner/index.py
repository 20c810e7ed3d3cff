# SPDX-License-Identifier: Apache-2.0
"""`magicdec index`: build a datastore for lookups from documents.

The server's tokenizer encodes the texts a few at a time; `lookup/datastore_files.py` writes the tokens and
their suffix array.
"""

import argparse
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Vocabulary
from vllm_magicdec.planner import documents
from vllm_magicdec.planner.console import UserError, require


def run(options: argparse.Namespace) -> None:
    """Run `magicdec index`."""
    require("pydivsufsort", documents.EXTRA)
    if options.out.exists():
        raise UserError(f"{options.out} exists already; remove it, or give --out another path")
    files = documents.find_files(options.files, options.include)
    started = perf_counter()
    from transformers.utils import logging
    from vllm.tokenizers import get_tokenizer

    logging.set_verbosity_error()  # suppresses warnings about texts longer than the model's context
    fields = {"tokenizer_mode": options.tokenizer_mode, "trust_remote_code": options.trust_remote_code}
    tokenizer = documents.load_tokenizer(options.model, partial(get_tokenizer, **fields))
    loaded = perf_counter()
    vocabulary = Vocabulary.of(tokenizer.get_vocab())
    encoded = documents.encode(documents.read_texts(files, options.field), tokenizer)
    try:
        header = datastore_files.write(options.out, encoded, vocabulary, Path(options.model).name)
    except datastore_files.UnfitDocumentsError as error:
        raise UserError(f"{error}; name other files") from None
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(
        f"wrote {options.out}: {header.num_documents:,} documents of {len(files):,} files, "
        f"{header.num_tokens:,} tokens, {size / 1e6:,.1f} MB ({size / header.num_tokens:.1f} bytes each), "
        f"in {perf_counter() - loaded:.1f} s, and {loaded - started:.1f} s to load the tokenizer"
    )


def add_command(subparsers: Any) -> None:
    """Add `index` to the command line."""
    parser = subparsers.add_parser(
        "index",
        help="build a datastore for lookups from documents",
        description=f"Build a datastore for lookups from documents. Formats: {documents.FORMATS}.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files or folders")
    parser.add_argument("--model", required=True, help="the server's model, for its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    documents.add_options(parser)
    parser.add_argument(
        "--tokenizer-mode", default="auto", help="as for 'vllm serve' (default: %(default)s)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="as for 'vllm serve'")
    parser.set_defaults(run=run)
