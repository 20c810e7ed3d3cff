# SPDX-License-Identifier: Apache-2.0
"""A custom verification-guided policy that scores a page by its first key.

    pip install examples/custom-policy
    vllm serve MODEL --speculative-config '{"method": "magicdec-self", "draft_kv_policy": "first-key"}'

After every verification, the draft of each layer reads the pages whose first token gets the most attention
from the verified queries. Unlike `verify-topk`, it keeps no summaries of pages.
"""

import torch

from vllm_magicdec.policies import VerificationPolicy
from vllm_magicdec.views.round import Batch


class FirstKey(VerificationPolicy):
    """Score pages by the attention weight of their first token."""

    def score_pages(self, batch: Batch, num_pages: int) -> torch.Tensor:
        """Return a softmax over the first tokens, summed over accepted positions and query heads."""
        page_size = self.engine.page_size
        first_slots = batch.block_table[:, None, :num_pages].long() * page_size  # [num_reqs, 1, pages]
        starts = torch.arange(num_pages, device=first_slots.device) * page_size
        is_beyond = starts >= batch.context_lens.unsqueeze(1)  # [num_reqs, pages]
        scores = []
        for layer, (cache, softmax) in self.verification.caches.items():
            # queries [num_reqs, num_kv_heads, n, head_size], and which of the n are accepted
            queries, is_accepted = self.verification.queries_by_head(layer, batch)
            keys = cache.keys.gather(first_slots.expand(-1, cache.num_kv_heads, -1)).float()
            weights = softmax.weights(queries @ keys.transpose(2, 3), ~is_beyond[:, None, None])
            scores.append((weights * is_accepted).sum((1, 2)))
        return torch.stack(scores)
