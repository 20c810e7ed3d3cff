# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plans for token views, made without reading anything from the device."""

import logging

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.flashinfer_attention import (
    FlashInferDecode,
    Geometry,
    make_page_indices,
    make_workspace,
    plan_bytes,
)

logger = logging.getLogger(f"vllm.{__name__}")

# Plans that are kept beside those of CUDA graphs: batch sizes come back. A plan has left its pinned memory
# long before so many others have been made.
MAX_RECENT = 32


class CommonLengthPlans:
    """Plans for views of one length, which the host knows (`views.base.TokenView.common_len`).

    FlashInfer plans on the host, list by list. Full views are all as long as the budget, in every step, so
    one plan serves all layers of all rounds of so many requests, and is kept. CUDA graphs need plans that
    stay as they are.

    Args:
        geometry: of the layers.
        max_num_reqs: most requests of a round.
        max_graph_reqs: most requests of a step in a CUDA graph; 0: there is no graph.
        device: where they are.
    """

    def __init__(
        self, geometry: Geometry, *, max_num_reqs: int, max_graph_reqs: int, device: torch.device
    ) -> None:
        self._geometry = geometry
        self._max_num_reqs = max_num_reqs
        self._workspace = make_workspace(geometry, max_graph_reqs, device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._recent: dict[tuple[int, int], FlashInferDecode | None] = {}  # the latest last
        self._of_graphs: dict[tuple[int, int], FlashInferDecode | None] = {}

    def load_kernels(self) -> None:
        """Make FlashInfer load or compile its kernels now, and run once; raises whatever it raises."""
        geometry, device = self._geometry, self._workspace.device
        indices = make_page_indices(geometry.num_kv_heads, 1, device)
        decode = FlashInferDecode(
            geometry, num_reqs=1, workspace=self._workspace, indices=indices, cuda_graph=False
        )
        decode.plan(torch.ones(1, dtype=torch.int32))
        # Some shapes are refused only by the kernels' launch.
        shape = (1, geometry.num_kv_heads, 1, 2 * geometry.head_size)
        cache = torch.zeros(shape, dtype=geometry.cache_dtype, device=device)
        query = torch.zeros(
            (1, geometry.num_heads, geometry.head_size), dtype=geometry.query_dtype, device=device
        )
        slots = torch.zeros((1, geometry.num_kv_heads, 1), dtype=torch.int32, device=device)
        decode.run(query, KVRows.of(cache, "FLASHINFER"), slots)

    def reserve(self, width: int) -> None:
        """Make room for the row numbers of views of so many columns; before anything is planned."""
        num_lists = self._max_num_reqs * self._geometry.num_kv_heads
        self._indices = make_page_indices(num_lists, width, self._workspace.device)

    @property
    def num_bytes(self) -> int:
        """Device memory, that of plans for CUDA graphs aside, which vLLM measures with the graphs."""
        num_index_bytes = self._indices.numel() * self._indices.element_size()
        num_plan_bytes = MAX_RECENT * plan_bytes(self._geometry, self._max_num_reqs)[1]
        return self._workspace.numel() + num_index_bytes + num_plan_bytes

    def decode(self, num_reqs: int, length: int) -> FlashInferDecode | None:
        """The attention of a draft step, planned, or None where FlashInfer cannot plan it.

        Args:
            num_reqs: of the step.
            length: of every view.
        """
        key = (num_reqs, length)
        if key in self._of_graphs:
            return self._of_graphs[key]
        decode = self._recent.pop(key) if key in self._recent else self._plan(*key, cuda_graph=False)
        self._recent[key] = decode
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        return decode

    def prepare_capture(self, num_reqs: int, length: int) -> None:
        """Make a plan that a CUDA graph over such a step may keep; see `decode` for the arguments."""
        if (num_reqs, length) not in self._of_graphs:
            self._of_graphs[num_reqs, length] = self._plan(num_reqs, length, cuda_graph=True)

    def _plan(self, num_reqs: int, length: int, *, cuda_graph: bool) -> FlashInferDecode | None:
        decode = FlashInferDecode(
            self._geometry,
            num_reqs=num_reqs,
            workspace=self._workspace,
            indices=self._indices,
            cuda_graph=cuda_graph,
        )
        try:
            decode.plan(torch.full((num_reqs,), length, dtype=torch.int32))
        except Exception as error:  # of whatever kind FlashInfer's libraries raise
            logger.warning(
                "Triton reads the token views of %d requests, not FlashInfer, which cannot plan them: %s.",
                num_reqs,
                error,
            )
            return None
        return decode
