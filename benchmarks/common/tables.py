# SPDX-License-Identifier: Apache-2.0
"""Tables on a console that is wide enough for them."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

console = Console(highlight=False, width=150)


def make_table(title: str, numbers: Iterable[str], names: Iterable[str] = ()) -> Table:
    """An empty table: columns of names, flush left and never wrapped, then columns of numbers."""
    table = Table(title=title)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def markdown(table: Table) -> str:
    """The same table for a page, without its title."""
    columns = table.columns
    heads = [str(column.header).replace("\n", " ") for column in columns]
    rules = ["--:" if column.justify == "right" else "---" for column in columns]
    cells = [[str(cell).replace("\n", " ") for cell in column.cells] for column in columns]
    lines = [heads, rules, *(list(row) for row in zip(*cells, strict=True))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
