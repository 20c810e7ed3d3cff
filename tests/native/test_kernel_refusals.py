# SPDX-License-Identifier: Apache-2.0
"""What the native kernel does not read is left to others or refused, and says why."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import attend_pages, kernel_of, shared_batch, variants

from vllm_magicdec.attention.metadata import TokenMetadata
from vllm_magicdec.attention.native_attention import native_of, takes_view
from vllm_magicdec.native.library import VARIANTS, Kernel, UnreadableError
from vllm_magicdec.views.round import TokenMask


@pytest.mark.parametrize("most", [1, 32, 33])
def test_passes_of_more_tokens_are_left_to_torch(most):
    mask = TokenMask(
        is_seen=torch.ones(2, most, 64, dtype=torch.bool),
        table=torch.arange(2 * most).view(2, most),
        cells=torch.arange(2 * most),
    )
    slots, lens = torch.zeros(2, 1, 64, dtype=torch.int32), torch.full((2,), 64, dtype=torch.int32)
    metadata = TokenMetadata(slots, lens, mask=mask)
    assert takes_view(metadata) == (most <= 32)


def test_layers_without_one_forward_are_left_alone():
    assert native_of(SimpleNamespace(forward_mha=None)) is None


@pytest.mark.parametrize("size", [None, 4])
def test_an_outdated_library_is_refused(monkeypatch, size):
    functions = {} if size is None else {"magicdec_call_end": lambda: size}
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**functions))
    with pytest.raises(OSError, match="is outdated; run"):
        Kernel(VARIANTS[0])


@variants
def test_unsupported_shapes_are_refused(variant):
    kernel = kernel_of(variant)
    query, cache, where = shared_batch(torch.float32, query_len=33)
    with pytest.raises(UnreadableError, match="at most 32 query tokens"):
        attend_pages(kernel, query, cache, torch.empty_like(query), **where)
    few = shared_batch(torch.float32)
    with pytest.raises(UnreadableError, match="contiguous elements"):
        attend_pages(kernel, few[0].mT.contiguous().mT, few[1], torch.empty_like(few[0]), **few[2])
    with pytest.raises(UnreadableError, match="contiguous elements"):
        kernel.over(few[1].mT.contiguous().mT, "vec")
    with pytest.raises(UnreadableError, match=r"queries are \[15, 8, 48\], .* has heads of 64"):
        attend_pages(kernel, few[0][..., :48], few[1], few[0][..., :48], **few[2])
    with pytest.raises(UnreadableError, match=r"the output is \[15, 4, 64\]"):
        attend_pages(kernel, few[0], few[1], few[0][:, :4], **few[2])
    with pytest.raises(UnreadableError, match="float64"):
        attend_pages(kernel, query.double(), cache.double(), query.double(), **where)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.bfloat16(), cache, query.bfloat16(), **where)
    fp8 = cache.to(torch.float8_e4m3fn)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.double(), fp8, query.double(), **where)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.bfloat16(), fp8, torch.empty_like(query), **where)
    with pytest.raises(UnreadableError, match="not neon"):
        attend_pages(kernel, query, cache, query, **{**where, "layout": "neon"})
    where["layout"] = "amx"
    of_amx = (
        "bfloat16 and fp8, not torch.float32" if variant.name == "amx" else "own kernel for AMX was not"
    )
    with pytest.raises(UnreadableError, match=of_amx):
        attend_pages(kernel, query, cache, query, **where)
    if variant.name == "amx":
        with pytest.raises(UnreadableError, match="queries are"):
            attend_pages(kernel, query, fp8, query, **where)
        with pytest.raises(UnreadableError, match="multiple of 32"):
            few = shared_batch(torch.bfloat16, head_size=48)
            attend_pages(kernel, few[0], few[1], few[0], **{**few[2], "layout": "amx"})
    where["layout"] = "vec"
    with pytest.raises(UnreadableError, match="multiple of 16"):
        attend_pages(kernel, query[..., :24], cache[..., :48].contiguous(), query[..., :24], **where)
