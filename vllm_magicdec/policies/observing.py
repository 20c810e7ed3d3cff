# SPDX-License-Identifier: Apache-2.0
"""When and how a `TokenPolicy` gets to choose: one forward pass of the target over a request's last tokens.

The queries that a policy scores are those of a prompt's last tokens. They may have been computed in several
chunks, or, on a prefix-cache hit, not at all. So they are computed again, for all cases alike, when the
prompt is whole: the pass reads the KV cache and writes nothing.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.switch import LayerObserver
from vllm_magicdec.policies.base import Observation, TokenPolicy
from vllm_magicdec.views.base import Batch
from vllm_magicdec.views.tokens import Selections, TokenBudget, budget_to_select


class ObservingRunner(Protocol):
    """What a selection needs from a vLLM model runner; implemented by vLLM's adapters."""

    def observe(self, indices: Sequence[int], window: int, observer: LayerObserver) -> None:
        """Run the target over the last `window` tokens before `Batch.observable_lens` of some requests.

        Args:
            indices: places in the batch.
            window: tokens per request; none has fewer.
            observer: gets the queries of all requests, one after the other.
        """
        ...


class Selector:
    """Keeps the selections of a batch up to date.

    Args:
        policy: scores tokens.
        budgets: of a request, the smallest first.
        selections: where choices are kept.
        page_size: tokens per page of the block tables.
        max_batched_tokens: most query tokens of one forward pass.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        budgets: Sequence[TokenBudget],
        selections: Selections,
        *,
        page_size: int,
        max_batched_tokens: int,
    ) -> None:
        self._policy = policy
        self._budget = budget_to_select(budgets)
        self._least_budget = budgets[0]
        self._selections = selections
        self._page_size = page_size
        self._max_reqs_per_pass = max(1, max_batched_tokens // policy.window)

    def update(self, runner: ObservingRunner, batch: Batch) -> None:
        """Select for the requests of the batch that are due. Launches nothing when none is."""
        self._selections.begin_round(batch.req_ids)
        due = [index for index in range(len(batch.req_ids)) if self._is_due(batch, index)]
        if not due:
            return
        # Where all that could be chosen fits into every budget, nothing has to be scored.
        crowded = [i for i in due if self._num_eligible(batch.known_lens[i]) > self._allowed(batch, i)]
        for first in range(0, len(crowded), self._max_reqs_per_pass):
            indices = crowded[first : first + self._max_reqs_per_pass]
            rows = self._selections.rows([batch.req_ids[i] for i in indices])
            runner.observe(indices, self._policy.window, self._score_layer(batch, indices, rows))
        self._take_everything(batch, [i for i in due if i not in set(crowded)])
        lens = batch.observable_lens[due]
        ends = (lens - self._budget.window).clamp(min=0)
        counts = torch.minimum(
            (ends - self._budget.sink).clamp(min=0),
            self._budget.tokens(lens) - self._budget.sink - self._budget.window,
        )
        self._selections.set(
            [batch.req_ids[i] for i in due], [int(batch.known_lens[i]) for i in due], counts, ends
        )

    def _is_due(self, batch: Batch, index: int) -> bool:
        if batch.is_prefilling[index]:
            return False
        made_at = self._selections.made_at(batch.req_ids[index])
        if made_at is None or batch.is_first[index]:
            return True
        return 0 < self._policy.refresh <= batch.known_lens[index] - made_at

    def _num_eligible(self, length: int) -> int:
        return max(0, length - self._budget.window - self._budget.sink)

    def _allowed(self, batch: Batch, index: int) -> int:
        budget = self._least_budget.tokens(torch.tensor([batch.known_lens[index]]))
        return int(budget) - self._budget.sink - self._budget.window

    def _take_everything(self, batch: Batch, indices: Sequence[int]) -> None:
        if indices:
            rows = self._selections.rows([batch.req_ids[i] for i in indices])
            num_selected = self._selections.positions.shape[-1]
            everything = self._budget.sink + torch.arange(num_selected, device=rows.device)
            self._selections.positions[rows] = everything.to(torch.int32)

    def _score_layer(self, batch: Batch, indices: Sequence[int], rows: torch.Tensor) -> LayerObserver:
        window, sink, recent = self._policy.window, self._budget.sink, self._budget.window

        def score(layer: int, queries: torch.Tensor, cache: KVRows, scale: float, soft_cap: float) -> None:
            for place, index in enumerate(indices):
                length = batch.observable_lens[index]
                num_pages = -(-int(batch.known_lens[index]) // self._page_size)
                pages = cache.keys_by_page(batch.block_table[index, :num_pages])
                observation = Observation(
                    queries=queries[place * window : (place + 1) * window],
                    keys=pages.transpose(0, 1).flatten(1, 2),
                    length=length,
                    scale=scale,
                    soft_cap=soft_cap,
                )
                scores = self._policy.score(observation)
                positions = torch.arange(scores.shape[-1], device=scores.device)
                scores.masked_fill_((positions < sink) | (positions >= length - recent), float("-inf"))
                count = min(self._selections.positions.shape[-1], scores.shape[-1])
                chosen = scores.topk(count).indices
                self._selections.positions[rows[place], layer, :, :count] = chosen.to(torch.int32)

        return score
