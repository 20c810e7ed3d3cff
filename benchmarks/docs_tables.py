# SPDX-License-Identifier: Apache-2.0
"""The tables of results in README and docs/: what a page quotes is what a committed file says.

A table stands between `<!-- result: PATH ... -->` and `<!-- end -->`, where each PATH is a JSON file in
results/ and all are of one script. `python benchmarks/docs_tables.py` writes them anew.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import acceptance
import auto
import confidence
import datastore
import decode
import kernel_share
import kv_tokens
import lookups
import native_attention
import plain_steps
import roofline
import simulation
import spire
import suite
import trees
import wide_passes
from common.tables import console, markdown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md")))
_TABLE = re.compile(r"(?P<begin><!-- result: (?P<paths>.+?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_TABLE_OF = {
    "acceptance": acceptance.table_of,
    "auto": lambda records: auto.table_of(*records),
    "confidence": confidence.table_of,
    "datastore": lambda records: datastore.table_of(*records),
    "decode": decode.table_of,
    "kernel_share": lambda records: kernel_share.table_of(*records),
    "kv_tokens": lambda records: kv_tokens.table_of(*records),
    "lookups": lookups.table_of,
    "native_attention": lambda records: native_attention.page_table_of(*records),
    "plain_steps": lambda records: plain_steps.table_of(*records),
    "roofline": lambda records: roofline.table_of(*records),
    "simulation": lambda records: simulation.table_of(*records),
    "spire": spire.table_of,
    "suite": lambda records: suite.tables_of(*records)[0],
    "trees": lambda records: trees.table_of(*records),
    "wide passes": lambda records: wide_passes.table_of(*records),
}


def table_of(paths: Iterable[str]) -> str:
    """In Markdown; `paths`: of the records, within results/."""
    records: list[dict[str, Any]] = [json.loads((RESULTS / path).read_text()) for path in paths]
    return markdown(_TABLE_OF[records[0]["benchmark"]](records))


def filled(text: str) -> str:
    """A page with the tables of its results."""

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}{table_of(found['paths'].split())}\n{found['end']}"

    return _TABLE.sub(fill, text)


def fill_tables(pages: Iterable[Path] = PAGES) -> list[Path]:
    """Write the tables of the pages anew; returns those that have changed."""
    changed = []
    for page in pages:
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            changed.append(page)
    return changed


if __name__ == "__main__":
    for page in fill_tables():
        console.print(f"filled the tables of {page}")
