# SPDX-License-Identifier: Apache-2.0
"""A draft step's view as vLLM's forward context wants it: attention metadata by layer.

vLLM's own metadata goes through where the view is a block table; else the type of ours tells `switch.py`
what to do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.views.base import LayerPageView, PageView, TokenView, View


@dataclass(frozen=True)
class TokenMetadata:
    """One layer's part of a `views.base.TokenView`."""

    slots: torch.Tensor  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor  # [num_reqs] int32
    common_len: int | None


@dataclass(frozen=True)
class DraftMetadata:
    """vLLM's metadata of a draft step, which must not be taken for the target's."""

    own: Any


@dataclass(frozen=True)
class ObservedMetadata:
    """vLLM's metadata, and who wants to see the queries."""

    own: Any
    observer: LayerObserver


def draft_metadata(
    view: View, layer_names: Sequence[str], of_pages: Callable[[PageView], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """A view's metadata by layer.

    Args:
        view: where the step looks.
        layer_names: the attention layers that it is for, in its order.
        of_pages: makes vLLM's own metadata of a block table, for these layers.
    """
    if isinstance(view, TokenView):
        return {
            name: TokenMetadata(view.slots[index], view.lens, view.common_len)
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
    own: Mapping[str, Any],
    layer_names: Sequence[str],
    switched: Sequence[str],
    observer: LayerObserver,
) -> dict[str, Any]:
    """vLLM's metadata by layer, with an observer of some of them.

    Args:
        own: vLLM's.
        layer_names: whom to observe.
        switched: all layers with a switch, which would take the others' metadata for the target's.
        observer: gets the queries.
    """
    metadata = {**own, **{name: DraftMetadata(own[name]) for name in switched}}
    return metadata | {name: ObservedMetadata(own[name], observer) for name in layer_names}
