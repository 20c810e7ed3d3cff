# SPDX-License-Identifier: Apache-2.0
"""A window over the KV cache of vLLM's own drafters: attention sinks and the latest tokens.

A drafter's groups of attention layers make the metadata of a pass from block tables and lengths.
`DraftWindow` replaces these by block tables of fewer pages and the lengths in them. Cached keys have the
rotation of their true positions, and new K/V go to slots that vLLM computes from its whole block tables, so
nothing else changes. The target has groups of its own.
"""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.config import VllmMethodConfig
from vllm_magicdec.drafting.layer_groups import is_readable
from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.hooking import after, before
from vllm_magicdec.views.pages import PageBudget, sinks_and_latest, table_width
from vllm_magicdec.views.tensors import ceil_div

logger = init_logger(f"vllm.{__name__}")


class DraftWindow:
    """The view of one group of attention layers.

    The first query of a pass sees the pages in budget, and later queries also the tokens since. The view
    of a pass with few queries lies in buffers that live with the engine, for CUDA graphs.

    Args:
        budget: pages of the kernel's size.
        max_num_reqs: requests, padding included.
        max_queries: queries per request of a pass that verifies or drafts; others are prompts.
    """

    def __init__(
        self, budget: PageBudget, *, max_num_reqs: int, max_queries: int, device: torch.device
    ) -> None:
        self._budget = budget
        self._max_queries = max_queries
        shape = (max_num_reqs, self._width(max_queries))
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._source: CommonAttentionMetadata | None = None

    def _width(self, queries: int) -> int:
        """Columns of the block table of a pass with at most `queries` queries per request."""
        page = self._budget.unit
        return table_width(self._budget.max_entries + ceil_div(queries - 1, page), page)

    def of(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the metadata of a pass over the window."""
        width, num_reqs = self._width(common.max_query_len), common.seq_lens.shape[0]
        if common.max_query_len <= self._max_queries and num_reqs <= self._lens.shape[0]:
            self._source = common
            self.refresh()
            table, lens = self._block_table[:num_reqs], self._lens[:num_reqs]
        else:
            table, lens = self._view(common, width)
        upper = common.seq_lens_cpu_upper_bound
        return common.replace(
            block_table_tensor=table,
            seq_lens=lens,
            max_seq_len=min(common.max_seq_len, width * self._budget.unit),
            seq_lens_cpu_upper_bound=None if upper is None else self._bound(common, upper),
            mm_req_doc_ranges=None,  # positions in the whole context
            _num_computed_tokens_cache=None,
        )

    def refresh(self) -> None:
        """Write the latest pass's view again, from its lengths; a CUDA graph may record the operators."""
        assert self._source is not None
        num_reqs = self._source.seq_lens.shape[0]
        table, lens = self._view(self._source, self._block_table.shape[1])
        self._block_table[:num_reqs] = table
        self._lens[:num_reqs] = lens

    def _view(self, common: CommonAttentionMetadata, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table, [num_reqs, width] int32, and the lengths, [num_reqs] int32."""
        whole, seq_lens = common.block_table_tensor, common.seq_lens
        starts = common.query_start_loc[: seq_lens.shape[0] + 1]
        skipped_tokens = self._skipped_tokens(seq_lens, starts)
        pages = sinks_and_latest(width, self._budget.num_sinks, skipped_tokens // self._budget.unit)
        # Columns past the view are never read; any page keeps them valid.
        table = whole.gather(1, pages.clamp_(max=whole.shape[1] - 1))
        return table, seq_lens - skipped_tokens

    def _skipped_tokens(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the tokens of whole pages between sinks and window, [num_reqs] as `seq_lens`."""
        page = self._budget.unit
        seen = seq_lens - starts.diff() + 1  # by the first query
        pages = (seen + page - 1) // page
        skipped = (pages - self._budget.entries(seen)).clamp_(min=0)
        return (skipped * page).to(seq_lens.dtype)

    def _bound(self, common: CommonAttentionMetadata, upper: torch.Tensor) -> torch.Tensor:
        """Bound the view's lengths, [num_reqs] on the host, exactly for prompts, as vLLM does."""
        starts = common.query_start_loc_cpu[: upper.shape[0] + 1]
        queries = starts.diff()
        exact = upper - self._skipped_tokens(upper, starts)
        # A bound of the whole length may lie on a page whose view is shorter than that of the length.
        largest = torch.minimum(upper, self._budget.max_tokens + queries - 1)
        return torch.where(queries > self._max_queries, exact, largest).to(upper.dtype)


def window_groups(groups: Iterable[AttentionGroup], vllm_config: VllmConfig, device: torch.device) -> None:
    """Let a drafter's attention groups read its KV cache through windows.

    Raises:
        MagicDecConfigError: a layer's KV cache cannot be read in part.
    """
    for group in groups:
        _window_group(group, vllm_config, device)


def _window_group(group: AttentionGroup, vllm_config: VllmConfig, device: torch.device) -> None:
    spec, cache = vllm_config.speculative_config, group.kv_cache_spec
    assert isinstance(spec, VllmMethodConfig)
    if isinstance(cache, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return  # they read little, and vLLM frees the pages of their sinks
    if not is_readable(cache):
        raise MagicDecConfigError(
            f"{spec.name}: draft_kv_budget is not possible with the KV cache of layer "
            f"{group.layer_names[0]} ({type(cache).__name__}); remove it"
        )
    page_size = group.get_metadata_builder().kv_cache_spec.block_size
    budget = spec.window(page_size, vllm_config.model_config.max_model_len)
    logger.info_once("%s: a draft step reads at most %s of the draft's KV cache.", spec.name, budget)
    window = DraftWindow(
        budget,
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        # A draft model's first pass has the sampled token beside the verified ones.
        max_queries=spec.num_speculative_tokens + 2,
        device=device,
    )
    group._with_kernel_block_table = after(lambda common, *_, **__: window.of(common))(
        group, group._with_kernel_block_table
    )
    group.update_draft_decode_metadata = before(lambda *_, **__: window.refresh())(
        group, group.update_draft_decode_metadata
    )
