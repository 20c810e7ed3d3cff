# SPDX-License-Identifier: Apache-2.0
"""Write the tables of fields and hooks into the pages: `make tables`; with --check, see whether they are.

The fields' meanings stand in `config/fields.py`, the hooks' reasons in `vllm_api/hooks.py`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm.config.utils import get_attr_docs

from vllm_magicdec.config.fields import MagicDecFields, default_of, documented_fields
from vllm_magicdec.vllm_api.hooks import HOOKS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def fields() -> str:
    """Return the table of the plugin's fields, in Markdown."""
    meanings = get_attr_docs(MagicDecFields)
    rows = []
    for name in documented_fields():
        default = default_of(name)
        shown = default if isinstance(default, str) else json.dumps(default)
        default_cell = "" if default is None else f"`{shown}`"
        rows.append((f"`{name}`", default_cell, " ".join(meanings[name].split())))
    return table(("field", "default", "meaning"), rows)


def hooks() -> str:
    """Return the table of the hooks, in Markdown."""
    rows = []
    for hook in HOOKS:
        version = " (V2)" if ".worker.gpu." in f"{hook.module}." else ""
        target = ".".join(filter(None, (hook.owner, hook.name)))
        rows.append((f"`{target}`{version}", hook.reason))
    return table(("target", "reason"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write or check both tables, each between two comments with its name."""
    stale = []
    for name, page, made in (("fields", "usage.md", fields()), ("hooks", "internals.md", hooks())):
        path = DOCS / page
        text = path.read_text()
        marks = f"<!-- {name}: make tables -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(marks[0])
        assert found, f"{path}: no place for the table of {name}"
        new = before + made.join(marks) + rest.partition(marks[1])[2]
        if new != text:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        sys.exit(f"The tables of {', '.join(stale)} are out of date; run `make tables`.")


if __name__ == "__main__":
    main()
