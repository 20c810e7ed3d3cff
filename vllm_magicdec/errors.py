# SPDX-License-Identifier: Apache-2.0
"""What every sentence to the user starts with: the method's name, and the error that carries the sentence.

The ground floor: any module may refuse a setting, so this one imports nothing of the package.
"""

import re

METHOD = "magicdec-self"
MODEL_METHOD = "magicdec"  # the same with a draft model of its own


_LONGEST_WORD = 160  # characters; only what a user has typed is longer


class MagicDecConfigError(ValueError):
    """A setting that cannot work, in one sentence that says what to type instead.

    It is one line of reasonable length, whatever a user's value that it quotes looks like.
    """

    def __init__(self, sentence: str) -> None:
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
        super().__init__(re.sub(rf"(\S{{{_LONGEST_WORD - 40}}})\S{{41,}}", r"\1...", line))


def quoted(value: object) -> str:
    """What a user typed, for a sentence: a long value by its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_WORD else f"{text[: _LONGEST_WORD - 40]}..."
