# SPDX-License-Identifier: Apache-2.0
"""Tables for the console and for pages."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

console = Console(highlight=False, width=150)


def make_table(title: str, numbers: Iterable[str], names: Iterable[str] = ()) -> Table:
    """Return an empty table with left-aligned columns of names, then columns of numbers."""
    table = Table(title=title)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def markdown(table: Table) -> str:
    """Return the table in Markdown, without its title."""
    columns = table.columns
    heads = [str(column.header).replace("\n", " ") for column in columns]
    rules = ["--:" if column.justify == "right" else "---" for column in columns]
    cells = [[str(cell).replace("\n", " ") for cell in column.cells] for column in columns]
    lines = [heads, rules, *(list(row) for row in zip(*cells, strict=True))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
