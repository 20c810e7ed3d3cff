# SPDX-License-Identifier: Apache-2.0
"""Base classes of policies, which make the views of an engine's draft steps.

Other packages register theirs in the entry-point group `vllm_magicdec.policies`. They subclass `PagePolicy`
(pages by position), `observing.TokenPolicy` (by the attention of a prompt's last tokens),
`verification.VerificationPolicy` (by that of verified tokens), or `Policy` itself.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from vllm_magicdec.attention.observing import LayerObserver, QueryRecorder
from vllm_magicdec.views.pages import ChoosesPages, PageBudget, PageViews
from vllm_magicdec.views.round import Views
from vllm_magicdec.views.selections import Budget, Selections, fixed_tokens
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tokens import PlannedAttention


@dataclass(frozen=True)
class Limits:
    """The limits of an engine that a budget must respect, known before any worker starts."""

    page_size: int  # tokens per page of the block tables
    max_model_len: int  # tokens
    num_speculative_tokens: int  # maximum drafts of a round
    device_type: str  # "cpu", "cuda"


# Runs the target over the last tokens of some requests: their indices in the batch, the number of tokens,
# and the observer.
Observe = Callable[[Sequence[int], int, LayerObserver], None]


class SwitchAttention(Protocol):
    """Installs the plugin's switch in every layer of the target (`attention.switch.install_switches`)."""

    def __call__(
        self, recorder: QueryRecorder | None = None, *, layer_pages: bool = False
    ) -> Sequence[PlannedAttention]:
        """Switch attention once, for policies whose views differ by layer; return plans for token views.

        With `layer_pages` the views are pages by layer, which vLLM's attention has to read.
        """


@dataclass(frozen=True)
class Engine:
    """Dimensions and services of a worker's engine."""

    limits: Limits
    num_layers: int  # attention layers of the target
    num_heads: int  # query heads of one worker
    num_kv_heads: int  # KV heads of one worker
    head_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype  # dtype of keys as read (`attention.rows.read_dtype`)
    num_blocks: int  # pages of the KV cache
    max_num_reqs: int
    max_batched_tokens: int  # maximum query tokens of one pass
    device: torch.device
    observe: Observe
    switch_attention: SwitchAttention
    has_key_bias: bool = False  # the target adds a bias to keys, which may then be in the hundreds

    @property
    def page_size(self) -> int:
        """Tokens per page of the block tables."""
        return self.limits.page_size

    def make_draft_slots(self) -> DraftSlots:
        """Allocate positions and slots of drafted tokens."""
        return DraftSlots(
            page_size=self.page_size,
            max_num_reqs=self.max_num_reqs,
            max_num_steps=self.limits.num_speculative_tokens,
            max_model_len=self.limits.max_model_len,
            device=self.device,
        )

    def make_selections(self, num_heads: int, max_selected: int) -> Selections:
        """Allocate selections; see `Selections` for the arguments."""
        return Selections(
            num_layers=self.num_layers,
            num_heads=num_heads,
            max_num_reqs=self.max_num_reqs,
            max_selected=max_selected,
            device=self.device,
        )


class Policy(ABC):
    """Chooses the parts of the KV cache that drafts read. The draft loop uses only its views."""

    granularities: ClassVar[tuple[str, ...]] = ()
    """Units that a user may select, "page" or "token"; the first is the default."""

    @classmethod
    @abstractmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        """Convert a budget to the policy's units.

        Args:
            fields: the speculative configuration (`config.MagicDecFields`).
            budget: tokens, or a fraction of the context when below 1.

        Raises:
            ValueError: the policy does not support the budget; one sentence that names a valid one.
        """

    @classmethod
    @abstractmethod
    def make_views(cls, fields: Any, engine: Engine, budget: Any) -> Views:
        """Make the views of a worker's draft steps.

        This is also called when vLLM sizes the KV cache, with an engine on torch's device "meta", for the
        size of the buffers (`Views.memory_bytes`).
        """

    @classmethod
    def granularity(cls, fields: Any, device_type: str) -> str | None:
        """Return the unit of selections on a device type; None if users cannot configure it."""
        return fields.draft_kv_granularity or next(iter(cls.granularities), None)


class PagePolicy(Policy, ChoosesPages):
    """Chooses the same pages for all layers and heads. Any attention backend can read such a view."""

    def __init__(self, fields: Any, budget: PageBudget, device: torch.device) -> None:
        self.budget = budget
        self.device = device

    @classmethod
    @override
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> PageBudget:
        return parse_page_budget(fields, limits, budget)

    @classmethod
    @override
    def make_views(cls, fields: Any, engine: Engine, budget: PageBudget) -> PageViews:
        return PageViews(cls(fields, budget, engine.device), engine.make_draft_slots())


def parse_page_budget(fields: Any, limits: Limits, budget: float, recent_pages: int = 0) -> PageBudget:
    """Round a budget up to whole pages; see `PageBudget.from_tokens`."""
    return PageBudget.from_tokens(
        budget=budget,
        min_budget=fields.draft_kv_min_budget,
        sink=fields.draft_kv_sink,
        page_size=limits.page_size,
        num_speculative_tokens=limits.num_speculative_tokens,
        max_model_len=limits.max_model_len,
        recent_pages=recent_pages,
    )


def parse_budget_of_selected_pages(
    fields: Any,
    limits: Limits,
    budget: float,
    recent_pages: Callable[[int], int],
    *,
    by_token: bool = False,
) -> PageBudget:
    """Round a budget up to whole pages, some of which are selected.

    Args:
        budget: tokens, or a fraction of the context when below 1.
        recent_pages: returns the minimum number of latest pages in view for a number of tokens in budget.
        by_token: the policy can select single tokens instead.

    Raises:
        ValueError: the budget is below one page, or leaves nothing to select.
    """
    name, tokens = fixed_tokens(budget, fields.draft_kv_min_budget)
    pages = parse_page_budget(fields, limits, budget, recent_pages(tokens))
    page, sinks = limits.page_size, pages.num_sinks

    def leaves_some(count: int, recent: int) -> bool:
        return sinks + recent < count or count * page >= limits.max_model_len

    if leaves_some(pages.min_entries, pages.num_recent):
        return pages
    required = next(n for n in itertools.count(pages.min_entries) if leaves_some(n, recent_pages(n * page)))
    others = (
        "a smaller --block-size, or draft_kv_granularity='token'"
        if by_token
        else "or a smaller --block-size"
    )
    raise ValueError(
        f"{name}={tokens} leaves no page to choose beside {sinks + pages.num_recent} pages of {page} "
        f"tokens for sinks and recent tokens; use at least {required * page}, {others}"
    )
