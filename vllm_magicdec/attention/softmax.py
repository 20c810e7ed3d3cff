# SPDX-License-Identifier: Apache-2.0
"""How a layer makes attention weights of products of queries and keys."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Softmax:
    """One layer's way from products to weights.

    Policies that score go the whole of it. Learned sinks leave the order of one query's tokens as it is,
    but scores are summed over queries and heads: those that give most of their weight to their sink ask for
    less of the context than others.
    """

    scale: float  # of products with keys as they are stored: an fp8 cache's own scale is in it
    soft_cap: float = 0.0  # above 0, logits become `soft_cap * tanh(logits / soft_cap)`
    sinks: torch.Tensor | None = None  # [num_heads], learned logits without a key or a value

    def sinks_by_kv_head(self, num_kv_heads: int) -> torch.Tensor | None:
        """[num_kv_heads, group] float32: the query heads' sinks."""
        return None if self.sinks is None else self.sinks.float().unflatten(0, (num_kv_heads, -1))

    def weights(self, products: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        """Attention weights over the keys.

        Args:
            products: [num_reqs, num_kv_heads, n, num_keys] float32, of queries whose heads of a group are
                neighbours (`policies.verification.Verification.queries_by_head`).
            is_seen: bool, broadcast to the products.

        Returns:
            the products' shape, float32.
        """
        logits = products * self.scale
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        logits = logits.masked_fill(~is_seen, float("-inf"))
        sinks = self.sinks_by_kv_head(products.shape[1])
        if sinks is not None:
            sinks = sinks.repeat(1, products.shape[2] // sinks.shape[1]).unsqueeze(2)
        return weights_of(logits, sinks)


def weights_of(logits: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention weights over the last axis.

    Args:
        logits: [..., n] float32, -inf where nothing is seen.
        sinks: [..., 1] float32, broadcast to the logits; they take part in the denominator alone.

    Returns:
        [..., n] float32, of a sum of 1 less the sink's share.
    """
    if sinks is None:
        return logits.softmax(-1)
    return (logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sinks)).exp_()
