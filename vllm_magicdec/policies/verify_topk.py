# SPDX-License-Identifier: Apache-2.0
"""The policy `verify-topk`: the verification's queries select the pages of the next round's drafts.

Pages are scored by summaries of their keys, as in Quest (Tang et al. 2024, arXiv 2406.10774): with the
element-wise minimum and maximum of a page's keys, `sum_d max(q_d * min_d, q_d * max_d)` bounds every logit
of the page from above. A page's score is a softmax over these bounds, summed over the accepted positions of
the round and over query heads.

A round reads, by layer, the summaries of a request's pages and the keys of the few pages that it wrote to.
A whole context is summarised when its request starts to decode. A page's summary is as large as two keys.
On GPUs that have fp8 it is in fp8, if keys have no bias: rounding moves it by a few hundredths, which is
little beside the distance of a bound from its logits.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from vllm_magicdec.policies.base import Engine
from vllm_magicdec.policies.page_summaries import PageSummaries
from vllm_magicdec.policies.verification import Verification, VerificationPolicy
from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.tensors import ceil_div, has_kernels

if TYPE_CHECKING:
    from vllm_magicdec.policies.verify_topk_kernels import LayerTable


class VerifyTopK(VerificationPolicy):
    """Selects the pages that the verification's queries attend to most."""

    def __init__(self, fields: Any, engine: Engine, verification: Verification) -> None:
        super().__init__(fields, engine, verification)
        self.summaries = PageSummaries(engine)
        self._table: LayerTable | None = None  # for kernels
        # A round's tokens may start anywhere in a page, so they may touch one page more.
        self._num_touched = ceil_div(verification.num_queries, engine.page_size) + 1

    @property
    @override
    def memory_bytes(self) -> Mapping[str, int]:
        memory = {"page summaries": 2 * self.summaries.min_keys.nbytes}
        if self.engine.limits.device_type == "cuda":
            from vllm_magicdec.policies.verify_topk_kernels import SCRATCH_BYTES

            memory["logits of pages"] = SCRATCH_BYTES
        return memory

    @override
    def update(self, batch: Batch, unknown: Mapping[int, int]) -> None:
        caches, page_size = self.verification.caches, self.engine.page_size
        if has_kernels(batch.context_lens.device):
            from vllm_magicdec.policies.verify_topk_kernels import LayerTable

            if self._table is None or not self._table.holds(caches):
                self._table = LayerTable(caches)
        for index, first in unknown.items():
            full = slice(first // page_size, int(batch.known_lens[index]) // page_size)
            own = batch.block_table[index, full].long()
            if len(own):
                self._summarise(own, torch.full_like(own, page_size))
        last = (batch.context_lens - 1) // page_size
        touched = torch.arange(-self._num_touched + 1, 1, device=last.device)
        pages = (last.unsqueeze(1) + touched).clamp(min=0)
        blocks = batch.block_table.gather(1, pages).long().flatten()
        num_verified = batch.context_lens.unsqueeze(1) - pages * page_size
        self._summarise(blocks, num_verified.clamp(max=page_size).flatten())

    def _summarise(self, blocks: torch.Tensor, num_verified: torch.Tensor) -> None:
        """Update the summaries of all layers."""
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_kernels import summarise

            summarise(self._table, self.summaries, blocks, num_verified)
            return
        for layer, (cache, _) in self.verification.caches.items():
            self.summaries.update(layer, cache, blocks, num_verified)

    @override
    def score_pages(self, batch: Batch, num_pages: int) -> torch.Tensor:
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_kernels import score_pages

            return score_pages(self._table, self.summaries, self.verification, batch, num_pages)
        blocks = batch.block_table[:, :num_pages].long()
        last = (batch.context_lens - 1) // self.engine.page_size
        is_seen = torch.arange(num_pages, device=last.device) <= last.unsqueeze(1)
        scores = []
        for layer in range(self.engine.num_layers):
            _, softmax = self.verification.caches[layer]
            queries, is_accepted = self.verification.queries_by_head(layer, batch)
            bounds = self.summaries.bounds(layer, queries, blocks)
            weights = softmax.weights(bounds, is_seen[:, None, None])
            scores.append((weights * is_accepted).sum((1, 2)))
        return torch.stack(scores)
