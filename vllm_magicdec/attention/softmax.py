# SPDX-License-Identifier: Apache-2.0
"""Attention weights from products of queries and keys."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Softmax:
    """Softmax parameters of one layer.

    Sinks do not change the order of one query's tokens, but they do change scores, which are summed over
    queries and heads with different sinks.
    """

    scale: float  # scale of products with keys as stored; includes an fp8 cache's scale
    soft_cap: float = 0.0  # above 0, logits become `soft_cap * tanh(logits / soft_cap)`
    sinks: torch.Tensor | None = None  # [num_heads], learned logits that only add to the denominator

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the soft cap to scaled products."""
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def sinks_by_kv_head(self, num_kv_heads: int) -> torch.Tensor | None:
        """Return the query heads' sinks, [num_kv_heads, group] float32."""
        return None if self.sinks is None else self.sinks.float().unflatten(0, (num_kv_heads, -1))

    def weights(self, products: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        """Return attention weights over the keys, float32 in the products' shape.

        Args:
            products: [num_reqs, num_kv_heads, n, num_keys] float32, as ordered by
                `policies.verification.Verification.queries_by_head`.
            is_seen: bool, broadcast to the products.
        """
        logits = self.capped(products * self.scale).masked_fill(~is_seen, float("-inf"))
        sinks = self.sinks_by_kv_head(products.shape[1])
        if sinks is not None:
            sinks = sinks.repeat(1, products.shape[2] // sinks.shape[1]).unsqueeze(2)
        return weights_of(logits, sinks)


def weights_of(logits: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return attention weights over the last axis, [..., n] float32; they sum to 1 minus the sink's share.

    Args:
        logits: [..., n] float32, -inf where nothing is seen.
        sinks: [..., 1] float32, broadcast to the logits; they only add to the denominator.
    """
    if sinks is None:
        return logits.softmax(-1)
    return (logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sinks)).exp_()
