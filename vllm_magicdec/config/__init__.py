# SPDX-License-Identifier: Apache-2.0
"""User configuration and its validation.

`MagicDecSpeculativeConfig` (`speculative.py`) replaces vLLM's `SpeculativeConfig` for the methods
`magicdec-self` and `magicdec`. The rest of vLLM sees the method `draft_model`, with the target itself or a
draft model (`has_draft_model`), and so provides lookahead slots, padded batches and async scheduling.

vLLM's own methods keep theirs, with a controller or a window over the draft's KV cache where the user asks
for them (`vllm_methods.py`).

`fields.py` declares fields, `given.py` checks user input before pydantic, `speculative.py` checks fields
against each other, `refusals.py` refuses models and layouts, and `reasons.py` shortens library errors.
"""

from vllm_magicdec.config.adaptive import AdaptiveConfig, nested_lengths
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
    drafts_with_adapters,
    extends_method,
    fit_adapters,
    refuse_misspelt_method,
    selects_magicdec,
)
from vllm_magicdec.config.speculative import MagicDecSpeculativeConfig
from vllm_magicdec.config.vllm_methods import VllmMethodConfig

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MODEL_FIELDS",
    "AdaptiveConfig",
    "MagicDecFields",
    "MagicDecSpeculativeConfig",
    "VllmMethodConfig",
    "check_field_names",
    "check_given",
    "default_of",
    "documented_fields",
    "drafts_with_adapters",
    "extends_method",
    "fit_adapters",
    "nested_lengths",
    "refuse_misspelt_method",
    "selects_magicdec",
    "user_fields",
]
