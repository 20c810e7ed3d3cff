# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention metadata for passes of the draft."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.attention.metadata import DraftMetadata, TokenMetadata, draft_metadata
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.round import PageView, Part, Pass, Queries, TokenView
from vllm_magicdec.views.tensors import on_device


class PageMetadata:
    """Builds attention metadata, by layer, for passes of the draft.

    Args:
        target_groups: the target's attention groups, by KV-cache group.
        attention_groups: vLLM's attention groups of each layer group.
        groups: the layer groups.
        lengths: numbers of queries per request in captured passes, which get static buffers.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        target_groups: Sequence[Sequence[AttentionGroup]],
        attention_groups: Sequence[list[AttentionGroup]],
        groups: Sequence[LayerGroup],
        max_num_reqs: int,
        device: torch.device,
        lengths: Collection[int],
    ) -> None:
        self._kv_cache_config = kv_cache_config
        self._target_groups = [list(groups) for groups in target_groups]
        self._groups, self._device = groups, device
        self._is_prefilling = torch.zeros(max_num_reqs, dtype=torch.bool)
        # vLLM expects a list for every KV-cache group, and skips empty ones.
        self._attention_groups: list[list[list[AttentionGroup]]] = []
        for own, group in zip(attention_groups, groups, strict=True):
            by_kv_cache_group: list[list[AttentionGroup]] = [[] for _ in target_groups]
            by_kv_cache_group[group.kv_cache_group] = own
            self._attention_groups.append(by_kv_cache_group)
        arange = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._query_start_locs = {n: arange * n for n in lengths}

    def of_pass(self, draft_pass: Pass, *, for_capture: bool = False) -> dict[str, Any]:
        """Build the metadata of a pass."""
        attn_metadata: dict[str, Any] = {}
        for index, (part, group) in enumerate(zip(draft_pass.parts, self._groups, strict=True)):
            of_pages = partial(self._of_part, index, part, draft_pass.queries, for_capture=for_capture)
            attn_metadata |= draft_metadata(part.view, group.layer_names, of_pages)
        return attn_metadata

    def refresh(self, draft_pass: Pass) -> None:
        """Rebuild the metadata that a captured pass's graph does not update; token views have none."""
        for index, part in enumerate(draft_pass.parts):
            if not isinstance(part.view, TokenView) and not self._is_recorded(index):
                self._of_part(index, part, draft_pass.queries, part.view.of_layer(0))

    def _of_part(
        self, index: int, part: Part, queries: Queries, view: PageView, *, for_capture: bool = False
    ) -> dict[str, Any]:
        """Build the metadata of a pass over a view of pages, for layer group `index`."""
        num_reqs, length = view.lens.shape[0], queries.uniform_len
        if length in self._query_start_locs:
            starts = self._query_start_locs[length][: num_reqs + 1]
        else:
            starts = on_device(queries.starts, self._device).to(torch.int32)
        return self._build(
            self._attention_groups[index],
            [view.block_table] * len(self._attention_groups[index]),
            part.slots,
            positions=part.positions,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=torch.from_numpy(queries.starts),
            max_query_len=queries.max_len,
            seq_lens=view.lens,
            max_seq_len=view.max_len,
            for_cudagraph_capture=for_capture,
        )

    def _is_recorded(self, index: int) -> bool:
        """Whether graphs of passes update the metadata of layer group `index` (`record_refresh`).

        Only a rebuild maps the block table of a backend that splits vLLM's pages.
        """
        return all(
            group.supports_draft_decode_metadata_update and group.kernel_block_size is None
            for own in self._attention_groups[index]
            for group in own
        )

    def record_refresh(self, attn_metadata: Mapping[str, Any]) -> None:
        """Update a pass's metadata, by layer, from its lengths; a CUDA graph may record the operators."""
        for index, groups in enumerate(self._attention_groups):
            if not self._is_recorded(index):
                continue
            for group in itertools.chain.from_iterable(groups):
                metadata = attn_metadata[group.layer_names[0]]
                if not isinstance(metadata, TokenMetadata):
                    own = metadata.own if isinstance(metadata, DraftMetadata) else metadata
                    group.update_draft_decode_metadata({group.layer_names[0]: own})

    def of_target(
        self, block_tables: Sequence[torch.Tensor], slots: torch.Tensor, **common: Any
    ) -> dict[str, Any]:
        """Build the metadata of such a pass for all of the target's layers, with one `slots` for all."""
        return self._build(self._target_groups, block_tables, slots, **common)

    def _build(
        self,
        attention_groups: list[list[AttentionGroup]],
        block_tables: Sequence[torch.Tensor],  # [num_reqs, num_pages] int32 each, by KV-cache group
        slots: torch.Tensor,  # [num_tokens] int64
        *,
        seq_lens: torch.Tensor,  # [num_reqs] int32
        **common: Any,  # as for vLLM's function
    ) -> dict[str, Any]:
        num_reqs = seq_lens.shape[0]
        return build_attn_metadata(
            attn_groups=attention_groups,
            num_reqs=num_reqs,
            num_tokens=slots.shape[0],
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mappings=[slots] * len(block_tables),  # faster than a tensor, which vLLM only indexes
            kv_cache_config=self._kv_cache_config,
            is_prefilling=self._is_prefilling[:num_reqs],
            **common,
        )
