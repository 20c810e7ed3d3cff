# SPDX-License-Identifier: Apache-2.0
"""A custom policy: besides sinks and recent tokens, the draft reads every n-th token of the context.

    pip install examples/custom-policy
    vllm serve MODEL --speculative-config '{"method": "magicdec-self", "draft_kv_policy": "strided"}'

The package registers the class in the entry-point group `vllm_magicdec.policies` (pyproject.toml). A policy
does not change the output: a poor choice only lowers acceptance.
"""

import torch

from vllm_magicdec.policies import Observation, TokenPolicy


class Strided(TokenPolicy):
    """Select evenly spread tokens, without attention."""

    window = 1  # the minimum; no queries are needed

    def score(self, observation: Observation) -> torch.Tensor:
        """Score a position by its largest power of two, so that the best ones are evenly spread."""
        num_kv_heads, num_tokens, _ = observation.keys.shape
        positions = torch.arange(num_tokens, device=observation.keys.device)
        lowest_bit = positions & -positions
        return lowest_bit.float().expand(num_kv_heads, num_tokens).clone()
