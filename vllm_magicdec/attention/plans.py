# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plans for token views, made without reading anything from the device."""

import torch

from vllm_magicdec.attention.flashinfer_attention import (
    WORKSPACE_BYTES,
    FlashInferDecode,
    Geometry,
    make_page_indices,
)


class CommonLengthPlans:
    """Plans for views of one length, which the host knows (`views.base.TokenView.common_len`).

    FlashInfer plans on the host, from the lengths of the lists. Full views are all as long as the budget,
    in every step, so one plan serves all layers of all rounds until the number of requests changes. CUDA
    graphs need plans that stay as they are: each gets its own.

    Args:
        geometry: of the layers.
        max_num_reqs: most requests of a round.
        device: where they are.
    """

    def __init__(self, geometry: Geometry, *, max_num_reqs: int, device: torch.device) -> None:
        self._geometry = geometry
        self._max_num_reqs = max_num_reqs
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._width = 0  # columns of views that `_indices` has room for
        self._decode: FlashInferDecode | None = None
        self._planned = (0, 0)  # requests and length of `_decode`'s plan
        self._was_planned = torch.cuda.Event() if device.type == "cuda" else None
        self._of_graphs: dict[tuple[int, int], FlashInferDecode] = {}

    def load_kernels(self) -> None:
        """Make FlashInfer load or compile its kernels now; raises whatever it raises."""
        indices = make_page_indices(self._geometry.num_kv_heads, 1, self._workspace.device)
        self._make_decode(1, indices, cuda_graph=False).plan(torch.ones(1, dtype=torch.int32))

    def decode(self, num_reqs: int, length: int, width: int) -> FlashInferDecode:
        """The attention of a draft step, planned.

        Args:
            num_reqs: of the step.
            length: of every view.
            width: columns of the views' buffers, at least `length`.
        """
        captured = self._of_graphs.get((num_reqs, length))
        if captured is not None:
            return captured
        indices = self._make_indices(width)
        if self._decode is None:
            self._decode = self._make_decode(self._max_num_reqs, indices, cuda_graph=False)
            self._planned = (0, 0)
        if self._planned != (num_reqs, length):
            self._plan_again(self._decode, num_reqs, length)
        return self._decode

    def prepare_capture(self, num_reqs: int, length: int, width: int) -> None:
        """Make a plan that a CUDA graph over such a step may keep; see `decode` for the arguments."""
        if (num_reqs, length) not in self._of_graphs:
            decode = self._make_decode(num_reqs, self._make_indices(width), cuda_graph=True)
            decode.plan(torch.full((num_reqs,), length, dtype=torch.int32))
            self._of_graphs[num_reqs, length] = decode

    def _plan_again(self, decode: FlashInferDecode, num_reqs: int, length: int) -> None:
        # A plan waits in pinned memory until the stream gets to it: the one before must have left.
        if self._was_planned is not None:
            self._was_planned.synchronize()
        decode.plan(torch.full((num_reqs,), length, dtype=torch.int32))
        if self._was_planned is not None:
            self._was_planned.record()
        self._planned = num_reqs, length

    def _make_indices(self, width: int) -> torch.Tensor:
        if width > self._width:
            num_lists = self._max_num_reqs * self._geometry.num_kv_heads
            self._indices = make_page_indices(num_lists, width, self._workspace.device)
            self._width = width
            self._decode = None  # it has less room
        return self._indices

    def _make_decode(self, num_reqs: int, indices: torch.Tensor, *, cuda_graph: bool) -> FlashInferDecode:
        return FlashInferDecode(
            self._geometry,
            num_reqs=num_reqs,
            workspace=self._workspace,
            indices=indices,
            cuda_graph=cuda_graph,
        )
