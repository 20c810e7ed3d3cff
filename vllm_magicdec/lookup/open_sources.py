# SPDX-License-Identifier: Apache-2.0
"""Construction of `Lookups` from the configured source names."""

from collections.abc import Sequence
from pathlib import Path

from vllm_magicdec.lookup.datastore import Datastore
from vllm_magicdec.lookup.lookups import Lookups, Source
from vllm_magicdec.lookup.served import ServedAnswers


def open_lookups(names: Sequence[str], max_num_reqs: int, vocab_size: int, max_drafts: int) -> Lookups:
    """Open the sources `context`, `served` and paths of datastores; see `Lookups` for the other arguments.

    Raises:
        MagicDecConfigError: a datastore cannot be read.
    """
    sources: dict[str, Source] = {}
    for name in names:
        if name == "served":
            sources[name] = ServedAnswers()
        elif name != "context":
            sources[name] = Datastore.open(Path(name), vocab_size)
    return Lookups(max_num_reqs, vocab_size, max_drafts, sources, in_context="context" in names)
