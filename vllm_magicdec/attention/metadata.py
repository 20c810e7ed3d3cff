# SPDX-License-Identifier: Apache-2.0
"""Attention metadata by layer for a draft step's or pass's view.

Views that are block tables use vLLM's own metadata; `switch.py` dispatches on the types in this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.views.base import LayerPageView, PageView, TokenView, View
from vllm_magicdec.views.passes import PassView, TokenPassView


@dataclass(frozen=True)
class TokenMetadata:
    """One layer's part of a `views.base.TokenView`."""

    slots: torch.Tensor  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor  # [num_reqs] int32
    common_len: int | None

    @property
    def num_queries(self) -> int:
        """Query tokens, one per request."""
        return self.lens.shape[0]


@dataclass(frozen=True)
class TokenPassMetadata:
    """One layer's part of a `views.passes.TokenPassView`."""

    slots: torch.Tensor  # [num_running, num_kv_heads, width] int32
    is_seen: torch.Tensor  # [num_running, max_len, width] bool
    table: torch.Tensor  # [num_running, max_len] int64
    cells: torch.Tensor  # [num_queries] int64

    @property
    def num_queries(self) -> int:
        """Query tokens, one or more per request."""
        return self.cells.shape[0]


@dataclass(frozen=True)
class DraftMetadata:
    """vLLM's metadata of a draft step, to distinguish it from the target's."""

    own: Any


@dataclass(frozen=True)
class ObservedMetadata:
    """vLLM's metadata with an observer of the queries."""

    own: Any
    observer: LayerObserver


def draft_metadata(
    view: View | PassView, layer_names: Sequence[str], of_pages: Callable[[PageView], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a view's metadata by layer.

    Args:
        view: view of the step or pass.
        layer_names: attention layers in the view's order.
        of_pages: makes vLLM's metadata of a block table for these layers.
    """
    if isinstance(view, TokenView | TokenPassView):
        return {name: _token_metadata(view, index) for index, name in enumerate(layer_names)}
    if isinstance(view, LayerPageView):
        own = of_pages(view.of_layer(0))
        return {
            name: DraftMetadata(replace(own[name], block_table=view.block_tables[index]))
            for index, name in enumerate(layer_names)
        }
    return of_pages(view)


def _token_metadata(view: TokenView | TokenPassView, layer: int) -> TokenMetadata | TokenPassMetadata:
    slots = view.slots[layer]
    if isinstance(view, TokenView):
        return TokenMetadata(slots, view.lens, view.common_len)
    return TokenPassMetadata(slots, view.is_seen, view.table, view.cells)


def observed_metadata(
    own: Mapping[str, Any],
    layer_names: Sequence[str],
    switched: Sequence[str],
    observer: LayerObserver,
) -> dict[str, Any]:
    """Add an observer of some layers to vLLM's metadata by layer.

    Args:
        own: vLLM's metadata.
        layer_names: layers to observe.
        switched: all layers with a switch, so that they do not treat the metadata as the target's.
        observer: receives the queries.
    """
    metadata = {**own, **{name: DraftMetadata(own[name]) for name in switched}}
    return metadata | {name: ObservedMetadata(own[name], observer) for name in layer_names}
