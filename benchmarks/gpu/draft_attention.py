# SPDX-License-Identifier: Apache-2.0
"""The kernels of draft attention, made ready for a view of a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.problem import Layer, View
from vllm_magicdec.attention import Implementation, KVRows, attend
from vllm_magicdec.attention.flashinfer_attention import (
    FlashInferDecode,
    Geometry,
    make_page_indices,
    make_workspace,
)

WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends, for its own pages


@dataclass(frozen=True)
class Prepared:
    """A kernel made ready for a view."""

    run: Callable[[], torch.Tensor]  # returns [batch, num_heads, head_size]
    plan: Callable[[], None] | None = None  # again; None: it needs no plan


def page_flashinfer(layer: Layer, view: View) -> Prepared:
    """FlashInfer over the cache's own pages, all KV heads at once: full context and page views."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    assert view.pages is not None
    batch, num_pages = view.pages.shape
    geometry = _geometry(layer)
    device = layer.query.device
    indptr = torch.arange(batch + 1, dtype=torch.int32) * num_pages
    indices = view.pages.flatten()
    last_page_len = view.lens.cpu() - (num_pages - 1) * layer.page_size
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=geometry.use_tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr, device=device),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last_page_len, device=device),
    )
    planned = geometry.plan_arguments() | dict(
        num_qo_heads=layer.heads.num_heads,
        num_kv_heads=layer.heads.num_kv_heads,
        page_size=layer.page_size,
    )

    def plan() -> None:
        wrapper.plan(indptr, indices, last_page_len, **planned)

    plan()
    return Prepared(lambda: wrapper.run(layer.query, layer.halves), plan)


def token_flashinfer(layer: Layer, view: View) -> Prepared:
    """The library's adapter, the writing of a layer's row numbers included: what a layer costs."""
    decode, rows, slots = _planned(layer, view)
    lens_cpu = view.lens.cpu()
    return Prepared(lambda: decode.run(layer.query, rows, slots), lambda: decode.plan(lens_cpu))


def token_flashinfer_rows_written(layer: Layer, view: View) -> Prepared:
    """FlashInfer's part of that alone."""
    decode, rows, slots = _planned(layer, view)
    decode.run(layer.query, rows, slots)
    return Prepared(lambda: decode.run_again(layer.query, rows))


def token_triton(layer: Layer, view: View) -> Prepared:
    return _attend(layer, view, "triton")


def token_torch(layer: Layer, view: View) -> Prepared:
    return _attend(layer, view, "torch")


KERNELS: dict[str, Callable[[Layer, View], Prepared]] = {
    "page flashinfer": page_flashinfer,
    "token flashinfer": token_flashinfer,
    "token flashinfer, rows written": token_flashinfer_rows_written,
    "token triton": token_triton,
    "token torch": token_torch,
}
FULL = "full flashinfer"  # the baseline: `page_flashinfer` over all pages


def _geometry(layer: Layer) -> Geometry:
    heads, dtype = layer.heads, layer.query.dtype
    return Geometry(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        query_dtype=dtype,
        cache_dtype=dtype,
        scale=heads.head_size**-0.5,
    )


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)


def _rows(layer: Layer) -> KVRows:
    return KVRows.of(layer.kv_cache, "FLASHINFER")


def _planned(layer: Layer, view: View) -> tuple[FlashInferDecode, KVRows, torch.Tensor]:
    assert view.slots is not None
    batch, num_kv_heads, budget = view.slots.shape
    device = layer.query.device
    geometry = _geometry(layer)
    decode = FlashInferDecode(
        geometry,
        num_reqs=batch,
        workspace=make_workspace(geometry, batch, device),
        indices=make_page_indices(batch * num_kv_heads, budget, device),
    )
    decode.plan(view.lens.cpu())
    return decode, _rows(layer), view.slots


def _attend(layer: Layer, view: View, implementation: Implementation) -> Prepared:
    assert view.slots is not None
    rows, slots, scale = _rows(layer), view.slots, _geometry(layer).scale
    return Prepared(
        lambda: attend(layer.query, rows, slots, view.lens, scale=scale, implementation=implementation)
    )


def runs_on(kernel: str, device: torch.device) -> str:
    """What really computes: on a CPU, not what a kernel is named after."""
    if device.type == "cuda":
        return "cuda"
    if "flashinfer" in kernel:
        return "cpu: torch reads what FlashInfer is told to read"
    return "cpu: Triton's interpreter" if "triton" in kernel else "cpu: torch"
