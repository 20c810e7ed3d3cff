# SPDX-License-Identifier: Apache-2.0
"""Generate the tables of results in README and docs/ from committed JSON files.

A table is between `<!-- result: PATH ... -->` and `<!-- end -->`, where each PATH is a JSON file in
results/, or a pattern of several (`*/auto.json`), all of one script. `python benchmarks/docs_tables.py`
writes the tables again. A page may show a part of a table:

    <!-- result: PATH ...; columns: NAME | NAME; rows: NAME = VALUE | VALUE; rows: ... -->

Columns are shown in the order of the list, in which `*` stands for any text. Records of different machines
get a column `machine`.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acceptance
import auto
import confidence
import datastore
import decode
import draft_weights
import draft_window
import kernel_share
import lookups
import native_attention
import quantised_linear
import roofline
import spire
import suite
from common.machine import device_of
from common.tables import console, make_table, markdown
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md")))
_TABLE = re.compile(r"(?P<begin><!-- result: (?P<source>.+?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_TABLE_OF = {
    "acceptance": acceptance.table_of,
    "auto": lambda records: auto.table_of(*records),
    "confidence": confidence.table_of,
    "datastore": lambda records: datastore.table_of(*records),
    "decode": decode.table_of,
    "draft_weights": draft_weights.table_of,
    "draft_window": draft_window.table_of,
    "kernel_share": lambda records: kernel_share.table_of(*records),
    "lookups": lookups.table_of,
    "native_attention": lambda records: native_attention.page_table_of(*records),
    "quantised_linear": quantised_linear.table_of,
    "roofline": lambda records: roofline.table_of(*records),
    "step_parts": draft_weights.parts_table_of,
    "spire": lambda records: spire.table_of(*records),
    "suite": lambda records: suite.tables_of(*records)[0],
}


@dataclass(frozen=True)
class Source:
    """The records that a table's comment names, and the part of the table to show."""

    paths: list[str]  # within results/; patterns
    columns: list[str]  # names or patterns of them; empty: all
    rows: dict[str, list[str]]  # the values that a column may have

    def records(self) -> list[dict[str, Any]]:
        """Load the records by path.

        Raises:
            FileNotFoundError: no file matches a pattern.
        """
        found = []
        for path in self.paths:
            files = sorted(RESULTS.glob(path))
            if not files:
                raise FileNotFoundError(f"no {path} in {RESULTS}")
            found += [json.loads(file.read_text()) for file in files]
        return found

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Parse a comment.

        Raises:
            ValueError: a clause is neither `columns` nor `rows`.
        """
        paths, *clauses = text.split("; ")
        columns: list[str] = []
        rows = {}
        for clause in clauses:
            name, _, value = clause.partition(": ")
            if name == "columns":
                columns = value.split(" | ")
            elif name == "rows":
                column, _, values = value.partition(" = ")
                rows[column] = values.split(" | ")
            else:
                raise ValueError(f"{clause!r}: only 'columns: ...' and 'rows: ...' are known")
        return cls(paths.split(), columns, rows)


def table_of(source: Source) -> str:
    """Return the table of a page in Markdown."""
    records = source.records()
    make = _TABLE_OF[records[0]["benchmark"]]
    if len({device_of(record["machine"]) for record in records}) == 1:
        return markdown(select(make(records), source))
    return markdown(join([(device_of(r["machine"]), select(make([r]), source)) for r in records]))


def select(table: Table, source: Source) -> Table:
    """Return the part of a table that a page shows.

    Raises:
        ValueError: the table has no such column, or no such row.
    """
    if not (source.columns or source.rows):
        return table
    by_name = {str(column.header).replace("\n", " "): column for column in table.columns}
    cells = {name: [str(cell) for cell in column.cells] for name, column in by_name.items()}
    shown = list(by_name) if not source.columns else []
    for pattern in source.columns:
        shown += fnmatch.filter(by_name, pattern) or [pattern]
    if unknown := {*shown, *source.rows} - by_name.keys():
        raise ValueError(f"no column {', '.join(sorted(unknown))} in {' '.join(source.paths)}")
    chosen = make_table("", [])
    for name in shown:
        chosen.add_column(name, justify=by_name[name].justify)
    for index in range(table.row_count):
        if all(cells[name][index] in values for name, values in source.rows.items()):
            chosen.add_row(*(cells[name][index] for name in shown))
    if not chosen.row_count:
        raise ValueError(f"no row of {' '.join(source.paths)} is chosen")
    return chosen


def join(tables: Sequence[tuple[str, Table]]) -> Table:
    """Concatenate tables with the same columns, and add a column with each table's machine."""
    joined = make_table("", [], names=["machine"])
    for column in tables[0][1].columns:
        joined.add_column(column.header, justify=column.justify)
    for machine, table in tables:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            joined.add_row(machine.removesuffix(", 2 cores"), *row)
    return joined


def filled(text: str) -> str:
    """Return a page with its tables filled."""

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}{table_of(Source.parse(found['source']))}\n{found['end']}"

    return _TABLE.sub(fill, text)


def fill_tables(pages: Iterable[Path] = PAGES) -> list[Path]:
    """Write the tables of the pages again; return the changed pages."""
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
