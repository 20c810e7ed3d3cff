# SPDX-License-Identifier: Apache-2.0
"""Sinks and a window by the token, which a draft was trained to see; no more and no less.

`streamingllm` rounds both up to whole pages. A draft that has never seen more than its window is to see
that in serving as well, whatever the size of the pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_magicdec.policies.base import Engine, Limits, Policy
from vllm_magicdec.views.base import Batch
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.tokens import TokenBudget, TokenViews


@dataclass(frozen=True)
class WindowBudget(TokenBudget):
    """Nothing is selected between the sinks and the window."""

    def __str__(self) -> str:
        return f"{self.min_tokens} tokens ({self.sink} sinks, the {self.window} latest)"


class SinksAndWindow(Policy):
    """The first `draft_kv_sink` tokens and the latest ones, up to the budget. Keeps no state."""

    @classmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> WindowBudget:
        """See `Policy`; of a model that is shorter than the budget, all tokens."""
        tokens = min(int(budget), limits.max_model_len)
        sink = min(fields.draft_kv_sink, tokens - 1)
        return WindowBudget(sink, tokens - sink, tokens, tokens)

    @classmethod
    def make_views(cls, fields: Any, engine: Engine, budget: WindowBudget) -> TokenViews:
        """See `Policy`."""
        selections = Selections(
            num_layers=engine.num_layers,
            num_heads=engine.num_kv_heads,
            max_num_reqs=engine.max_num_reqs,
            max_selected=0,
            device=engine.device,
        )
        plans = engine.switch_attention()
        return TokenViews(selections, _NoSelector(selections), budget, engine.make_draft_slots(), plans)


class _NoSelector:
    """Selects nothing; see `views.base.Selector`."""

    memory_bytes: Mapping[str, int] = {}

    def __init__(self, selections: Selections) -> None:
        self._selections = selections

    def update(self, batch: Batch, num_steps: int) -> None:
        self._selections.begin_round(batch.req_ids)
