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
