# SPDX-License-Identifier: Apache-2.0
"""A policy of one's own: besides sinks and recent tokens, the draft sees every n-th token of the context.

    pip install examples/custom-policy
    vllm serve MODEL --speculative-config '{"method": "magicdec-self", "draft_kv_policy": "strided"}'

The package names the class in the entry-point group `vllm_magicdec.policies` (pyproject.toml). Whatever a
policy chooses, the output stays the target's: a poor choice only costs acceptance.
"""

import torch

from vllm_magicdec.policies import Observation, TokenPolicy


class Strided(TokenPolicy):
    """Evenly spread tokens; attention is not looked at."""

    window = 1  # it needs no queries, and one token is the least

    def score(self, observation: Observation) -> torch.Tensor:
        """A position's score is how often 2 divides it: the best ones are spread evenly."""
        num_kv_heads, num_tokens, _ = observation.keys.shape
        positions = torch.arange(num_tokens, device=observation.keys.device)
        lowest_bit = positions & -positions
        return lowest_bit.float().expand(num_kv_heads, num_tokens).clone()
