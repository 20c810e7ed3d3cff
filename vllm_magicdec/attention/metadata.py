# SPDX-License-Identifier: Apache-2.0
"""Attention metadata by layer for the view of a draft's pass.

Views that are block tables use vLLM's own metadata; `switch.py` dispatches on the types in this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.views.round import LayerPageView, PageView, TokenMask, TokenView, View


@dataclass(frozen=True)
class TokenMetadata:
    """One layer's part of a `views.round.TokenView`."""

    slots: torch.Tensor  # [num_reqs, num_kv_heads, width] int32
    lens: torch.Tensor  # [num_reqs] int32
    common_len: int | None = None
    mask: TokenMask | None = None

    @property
    def num_queries(self) -> int:
        """Query tokens of all requests."""
        return self.lens.shape[0] if self.mask is None else self.mask.cells.shape[0]


@dataclass(frozen=True)
class DraftMetadata:
    """vLLM's metadata of a draft's pass, to distinguish it from the target's."""

    own: Any


@dataclass(frozen=True)
class ObservedMetadata:
    """vLLM's metadata with an observer of the queries."""

    own: Any
    observer: LayerObserver


def draft_metadata(
    view: View, layer_names: Sequence[str], of_pages: Callable[[PageView], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a view's metadata by layer, in its order; `of_pages` makes vLLM's of a block table for all."""
    if isinstance(view, TokenView):
        return {
            name: TokenMetadata(view.slots[index], view.lens, view.common_len, view.mask)
            for index, name in enumerate(layer_names)
        }
    if isinstance(view, LayerPageView):
        own = of_pages(view.of_layer(0))
        return {
            name: DraftMetadata(replace(own[name], block_table=view.block_tables[index]))
            for index, name in enumerate(layer_names)
        }
    return of_pages(view)


def observed_metadata(
    own: Mapping[str, Any], layer_names: Sequence[str], switched: Sequence[str], observer: LayerObserver
) -> dict[str, Any]:
    """Add an observer of some layers to vLLM's metadata by layer.

    Args:
        layer_names: layers to observe.
        switched: all layers with a switch, so that they do not treat the metadata as the target's.
    """
    metadata = {**own, **{name: DraftMetadata(own[name]) for name in switched}}
    return metadata | {name: ObservedMetadata(own[name], observer) for name in layer_names}
