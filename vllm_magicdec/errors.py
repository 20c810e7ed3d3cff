# SPDX-License-Identifier: Apache-2.0
"""Names of the methods, and the error for invalid settings. This module imports nothing of the package."""

import re

METHOD = "magicdec-self"
MODEL_METHOD = "magicdec"  # with a draft model

_MAX_WORD = 160  # characters; longer words are a user's values


class MagicDecConfigError(ValueError):
    """An invalid setting: one sentence that says what to type instead.

    Control characters are escaped and long words cut, so that a quoted value cannot break the line.
    """

    def __init__(self, sentence: str) -> None:
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
        super().__init__(re.sub(rf"(\S{{{_MAX_WORD - 40}}})\S{{41,}}", r"\1...", line))


def quoted(value: object) -> str:
    """Return the repr of a user's value for an error, shortened if long."""
    try:
        text = repr(value)
    except ValueError:  # Python limits the conversion of long integers
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_WORD else f"{text[: _MAX_WORD - 40]}..."
