# SPDX-License-Identifier: Apache-2.0
"""User configuration and its validation.

`MagicDecSpeculativeConfig` (`speculative.py`) replaces vLLM's `SpeculativeConfig` for the methods
`magicdec-self` and `magicdec`. The rest of vLLM sees the method `draft_model`, with the target itself or a
draft model (`has_draft_model`), and so provides lookahead slots, padded batches and async scheduling.

vLLM's own methods keep theirs, with a controller or a window over the draft's KV cache where the user asks
for them (`vllm_methods.py`).

`fields.py` and `adaptive.py` declare fields. `given.py` checks user input before pydantic, `speculative.py`
checks fields against each other, `refusals.py` refuses models and layouts, and `reasons.py` shortens errors
of libraries.
"""

from vllm_magicdec.config.adaptive import AdaptiveConfig
from vllm_magicdec.config.speculative import MagicDecSpeculativeConfig
from vllm_magicdec.config.vllm_methods import VllmMethodConfig

__all__ = ["AdaptiveConfig", "MagicDecSpeculativeConfig", "VllmMethodConfig"]
