# SPDX-License-Identifier: Apache-2.0
"""What a user can set, checked once: the first room a value reaches and the last where it is judged.

`MagicDecSpeculativeConfig` (`speculative.py`) *is* vLLM's `SpeculativeConfig` for the method
`magicdec-self`: vLLM's own fields that mean something for a draft that is the target, plus those of
`fields.py`. To the rest of vLLM it is a `draft_model` whose draft is the target itself, which brings
lookahead slots, padded batches and asynchronous scheduling without a change to the scheduler. With the
method `magicdec` the draft is a model of its own (`has_draft_model`), which vLLM loads as it does for
`draft_model`.

`given.py` judges what was typed before pydantic does: names, method, `auto`; `refusals.py` judges models
and layouts, and `reasons.py` makes a line of what a library says of a value. A new field goes into
`fields.py`; what it may not be together with another, into `speculative.py`.
"""

from vllm_magicdec.config.fields import (
    DEFAULT_MAX_TOKENS,
    MODEL_FIELDS,
    MagicDecFields,
    default_of,
    documented_fields,
    user_fields,
)
from vllm_magicdec.config.given import (
    check_field_names,
    check_given,
    refuse_misspelt_method,
    selects_magicdec,
)
from vllm_magicdec.config.speculative import MagicDecSpeculativeConfig, nested_lengths

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MODEL_FIELDS",
    "MagicDecFields",
    "MagicDecSpeculativeConfig",
    "check_field_names",
    "check_given",
    "default_of",
    "documented_fields",
    "nested_lengths",
    "refuse_misspelt_method",
    "selects_magicdec",
    "user_fields",
]
