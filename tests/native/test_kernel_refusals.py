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
    float32 = shared_batch(torch.float32)

    def refuse(match, given=float32, *, query=None, cache=None, output=None, **changes):
        own_query, own_cache, where = given
        query = own_query if query is None else query
        cache = own_cache if cache is None else cache
        with pytest.raises(UnreadableError, match=match):
            attend_pages(kernel, query, cache, query if output is None else output, **{**where, **changes})

    query, cache, _ = float32
    fp8 = cache.to(torch.float8_e4m3fn)
    refuse("at most 32 query tokens", shared_batch(torch.float32, query_len=33))
    refuse("contiguous elements", query=query.mT.contiguous().mT, output=torch.empty_like(query))
    with pytest.raises(UnreadableError, match="contiguous elements"):
        kernel.over(cache.mT.contiguous().mT, "vec")
    refuse(r"queries are \[15, 8, 48\], .* has heads of 64", query=query[..., :48])
    refuse(r"the output is \[15, 4, 64\]", output=query[:, :4])
    refuse("float64", query=query.double(), cache=cache.double())
    refuse("queries are", query=query.bfloat16())
    refuse("queries are", query=query.double(), cache=fp8)
    refuse("queries are", query=query.bfloat16(), cache=fp8, output=torch.empty_like(query))
    refuse("not neon", layout="neon")
    refuse("multiple of 16", query=query[..., :24], cache=cache[..., :48].contiguous())
    if variant.name == "amx":
        refuse("bfloat16 and fp8, not torch.float32", layout="amx")
        refuse("queries are", cache=fp8, layout="amx")
        refuse("multiple of 32", shared_batch(torch.bfloat16, head_size=48), layout="amx")
    else:
        refuse("own kernel for AMX was not", layout="amx")
