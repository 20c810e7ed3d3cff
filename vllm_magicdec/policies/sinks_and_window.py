# SPDX-License-Identifier: Apache-2.0
"""Sinks and a window by the token, for drafts that were trained on exactly these.

`streamingllm` rounds both up to whole pages, which such a draft has never seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from vllm_magicdec.policies.base import Engine, Limits, Policy
from vllm_magicdec.views.round import Batch, Selector
from vllm_magicdec.views.tokens import TokenBudget, TokenViews


@dataclass(frozen=True)
class WindowBudget(TokenBudget):
    """A budget without selected tokens."""

    def __str__(self) -> str:
        return f"{self.min_entries} tokens ({self.num_sinks} sinks, the {self.num_recent} latest)"


class SinksAndWindow(Policy):
    """Views of the first `draft_kv_sink` tokens and the latest ones up to the budget."""

    @classmethod
    @override
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> WindowBudget:
        tokens = min(int(budget), limits.max_model_len)
        sink = min(fields.draft_kv_sink, tokens - 1)
        return WindowBudget(1, sink, tokens, tokens, num_recent=tokens - sink)

    @classmethod
    @override
    def make_views(cls, fields: Any, engine: Engine, budget: WindowBudget) -> TokenViews:
        selections = engine.make_selections(engine.num_kv_heads, 0)
        plans = engine.switch_attention()
        return TokenViews(selections, _NoSelector(), budget, engine.make_draft_slots(), plans)


class _NoSelector(Selector):
    """Selects nothing."""

    memory_bytes: Mapping[str, int] = {}

    @override
    def update(self, batch: Batch, num_steps: int) -> None:
        pass
