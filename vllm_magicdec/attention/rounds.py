# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plans for the steps of a draft round, shared by all layers."""

import torch

from vllm_magicdec.attention.flashinfer_attention import (
    WORKSPACE_BYTES,
    FlashInferDecode,
    Geometry,
    make_page_indices,
)
from vllm_magicdec.view import TokenView


class PlannedRounds:
    """Plans all steps of a round when the first layer of its first step asks for one.

    A plan depends on the lengths of the views and needs them on the host, while a round's lengths are born
    on the device. Reading them is the one host synchronisation of a round. All steps are planned right
    after it, so what `plan` copies to the device finds an empty stream, and nothing waits inside the draft
    loop. The device is idle meanwhile: with tensor cores FlashInfer 0.7 walks over all lists in Python.

    Every step has a wrapper of its own: `plan` leaves its result in pinned memory, to be copied when the
    stream gets there, and planning the next step with the same wrapper would overwrite it before that.
    The next round's synchronisation comes after all of these copies.

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
        self._decodes: list[FlashInferDecode] = []  # by step
        self._planned_lens: torch.Tensor | None = None  # `TokenView.round_lens` of the last planned round

    def load_kernels(self) -> None:
        """Make FlashInfer load or compile its kernels now; raises whatever it raises."""
        num_lists = self._geometry.num_kv_heads
        indices = make_page_indices(num_lists, 1, self._workspace.device)
        self._make_decode(num_reqs=1, indices=indices).plan(torch.ones(1, dtype=torch.int32))

    def decode(self, view: TokenView) -> FlashInferDecode:
        """The attention of the view's step, planned."""
        if view.round_lens is not self._planned_lens:
            self._plan(view)
        return self._decodes[view.step]

    def _plan(self, view: TokenView) -> None:
        if not self._decodes:
            num_lists = self._max_num_reqs * self._geometry.num_kv_heads
            self._indices = make_page_indices(num_lists, view.slots.shape[-1], self._workspace.device)
        round_lens_cpu = view.round_lens.cpu()  # waits for the device
        while len(self._decodes) < len(round_lens_cpu):
            self._decodes.append(self._make_decode(num_reqs=self._max_num_reqs, indices=self._indices))
        for step, lens_cpu in enumerate(round_lens_cpu):
            self._decodes[step].plan(lens_cpu)
        self._planned_lens = view.round_lens

    def _make_decode(self, *, num_reqs: int, indices: torch.Tensor) -> FlashInferDecode:
        # Draft attention runs between CUDA graphs, not in them, with whatever number of requests there is.
        return FlashInferDecode(
            self._geometry,
            num_reqs=num_reqs,
            workspace=self._workspace,
            indices=indices,
            cuda_graph=False,
        )
