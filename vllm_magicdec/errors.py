# SPDX-License-Identifier: Apache-2.0
"""What every sentence to the user starts with: the method's name, and the error that carries the sentence.

The ground floor: any module may refuse a setting, so this one imports nothing.
"""

METHOD = "magicdec-self"
MODEL_METHOD = "magicdec"  # the same with a draft model of its own


class MagicDecConfigError(ValueError):
    """A setting that cannot work, in one sentence that says what to type instead."""
