# SPDX-License-Identifier: Apache-2.0
"""What a policy is: a class that is given the facts of the engine and makes the views of its draft steps.

Another package names one in the entry-point group `vllm_magicdec.policies`. It subclasses what chooses as
it wants to: `PagePolicy` (pages by position), `observing.TokenPolicy` (by the attention of a prompt's last
tokens), `verification.VerificationPolicy` (by that of verified tokens), or `Policy` itself.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from vllm_magicdec.attention.observing import LayerObserver, QueryRecorder
from vllm_magicdec.views.base import DraftSlots, Views
from vllm_magicdec.views.pages import PageBudget, PageViews
from vllm_magicdec.views.rings import Ring
from vllm_magicdec.views.selections import Budget
from vllm_magicdec.views.tokens import PlannedAttention


@dataclass(frozen=True)
class Limits:
    """What a budget is judged by, before any worker starts."""

    page_size: int  # tokens per page of the block tables
    max_model_len: int  # tokens
    num_speculative_tokens: int  # drafts of a round, at most
    device_type: str  # "cpu", "cuda"


class Observe(Protocol):
    """Runs the target over the last tokens of some requests; see `drafting.drafter.Runner.observe`."""

    def __call__(self, indices: Sequence[int], window: int, observer: LayerObserver) -> None:
        """The last `window` tokens of the batch's requests at `indices`."""


class SwitchAttention(Protocol):
    """Puts the plugin's switch into every layer of the target (`attention.switch.install_switches`)."""

    def __call__(
        self, recorder: QueryRecorder | None = None, *, layer_pages: bool = False
    ) -> Sequence[PlannedAttention]:
        """To be called once, by policies whose views are not block tables for all layers alike.

        Args:
            recorder: gets the queries of every pass of the target.
            layer_pages: views are pages of every layer's own, which vLLM's attention has to read.

        Returns:
            Attention that is planned for full token views.
        """
        ...


@dataclass(frozen=True)
class Engine:
    """The facts of a worker's engine that a policy makes its views for."""

    limits: Limits
    num_layers: int  # attention layers of the target
    num_heads: int  # query heads of one worker
    num_kv_heads: int  # of one worker
    head_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype  # that keys are read in (`attention.rows.read_dtype`)
    num_blocks: int  # pages of the KV cache
    max_num_reqs: int
    max_batched_tokens: int  # query tokens of one pass, at most
    device: torch.device
    observe: Observe
    switch_attention: SwitchAttention

    @property
    def page_size(self) -> int:
        """Tokens per page of the block tables."""
        return self.limits.page_size

    def make_draft_slots(self) -> DraftSlots:
        """Where the drafted tokens go."""
        return DraftSlots(
            page_size=self.page_size,
            max_num_reqs=self.max_num_reqs,
            max_num_steps=self.limits.num_speculative_tokens,
            max_model_len=self.limits.max_model_len,
            device=self.device,
        )


class Policy(ABC):
    """Who chooses where the draft looks. The loop knows a policy and its views, and nothing more of it."""

    granularities: ClassVar[tuple[str, ...]] = ()
    """What a user may have it choose, "page" or "token"; the first is the default."""

    @classmethod
    @abstractmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        """What comes of a budget, in the policy's own units.

        Args:
            fields: the speculative configuration (`config.MagicDecFields`).
            limits: of the engine.
            budget: tokens, or a fraction of the context when below 1.

        Raises:
            ValueError: the policy cannot work with it; one sentence with the way out.
        """

    @classmethod
    @abstractmethod
    def make_views(cls, fields: Any, engine: Engine, budget: Any) -> Views:
        """Everything that a worker drafts with.

        It is also called when vLLM sizes the KV cache, with an engine on torch's device "meta", to learn
        what the views' buffers will take (`Views.memory_bytes`).

        Args:
            fields: as for `parse_budget`.
            engine: what views are made for.
            budget: as `parse_budget` returned it.
        """

    @classmethod
    def granularity(cls, fields: Any, device_type: str) -> str | None:
        """What is chosen on a kind of device; None where there is nothing for a user to say."""
        return fields.draft_kv_granularity or next(iter(cls.granularities), None)

    @classmethod
    def ring(cls, budget: Any, limits: Limits) -> Ring | None:
        """What a cache that is read by these views alone has to keep of a request; None: everything.

        Args:
            budget: as `parse_budget` returned it.
            limits: of the engine.
        """
        return None

    @classmethod
    def reads_generated_tokens(cls, fields: Any) -> bool:
        """Whether a choice in mid-generation needs the latest token ids on the host."""
        return False


class PagePolicy(Policy):
    """Chooses pages, the same for all layers and heads. Any attention backend reads such a view.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
        budget: in whole pages.
        device: where `choose_pages` works.
    """

    def __init__(self, fields: Any, budget: PageBudget, device: torch.device) -> None:
        self.budget = budget
        self.device = device

    @classmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> PageBudget:
        """See `Policy`; rounded up to whole pages."""
        return parse_page_budget(fields, limits, budget)

    @classmethod
    def make_views(cls, fields: Any, engine: Engine, budget: PageBudget) -> PageViews:
        """See `Policy`."""
        return PageViews(cls(fields, budget, engine.device), engine.make_draft_slots())

    @property
    def max_pages(self) -> int:
        """Columns of the view's block table."""
        return self.budget.max_pages

    @property
    def is_sinks_and_latest(self) -> bool:
        """Whether `choose_pages` takes the sinks and the latest pages; on a GPU a kernel then does it."""
        return False

    def most_pages(self, context_lens: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Pages of a view of sinks and the latest ones, if the request has so many, [num_reqs] int64.

        Args:
            context_lens: [num_reqs] int64, verified tokens.
            num_steps: drafts of the round.
        """
        return self.budget.pages(context_lens)

    @abstractmethod
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the pages of one round.

        Args:
            context_lens: [num_reqs] int64, verified tokens.
            last_pages: [num_reqs] int64, page of the round's last drafted token.

        Returns:
            pages: [num_reqs, max_pages] int64, page numbers within the request, ascending. The chosen
                ones come first and end with a run of neighbours up to `last_pages`.
            num_pages: [num_reqs] int64.
        """


def parse_page_budget(fields: Any, limits: Limits, budget: float, recent_pages: int = 0) -> PageBudget:
    """A budget in whole pages; `recent_pages` as in `PageBudget`.

    Raises:
        ValueError: it is below one page.
    """
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
    by_token: bool,
) -> PageBudget:
    """A budget in whole pages, some of which are selected.

    Args:
        fields: the speculative configuration.
        limits: of the engine.
        budget: tokens, or a fraction of the context when below 1.
        recent_pages: least number of latest pages in view, by tokens in budget.
        by_token: the policy can select single tokens instead.

    Raises:
        ValueError: it is below one page, or leaves nothing to select.
    """
    name, tokens = (
        ("draft_kv_min_budget", fields.draft_kv_min_budget)
        if budget < 1
        else ("draft_kv_budget", int(budget))
    )
    pages = parse_page_budget(fields, limits, budget, recent_pages(tokens))
    page, sinks = limits.page_size, pages.sink_pages

    def leaves_some(count: int, recent: int) -> bool:
        return sinks + recent < count or count * page >= limits.max_model_len

    if leaves_some(pages.min_pages, pages.recent_pages):
        return pages
    least = next(n for n in itertools.count(pages.min_pages) if leaves_some(n, recent_pages(n * page)))
    others = (
        "a smaller --block-size, or draft_kv_granularity='token'"
        if by_token
        else "or a smaller --block-size"
    )
    raise ValueError(
        f"{name}={tokens} leaves no page to choose beside {sinks + pages.recent_pages} pages of {page} "
        f"tokens for sinks and recent tokens; use at least {least * page}, {others}"
    )
