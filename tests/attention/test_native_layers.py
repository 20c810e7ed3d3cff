# SPDX-License-Identifier: Apache-2.0
"""The kernel for CPUs in the place of a layer's attention: what of the layer it takes along."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import views_over_a_cache
from views_over_a_cache import CPU, Case
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_magicdec.attention.metadata import TokenMetadata
from vllm_magicdec.attention.native_attention import NativeAttention
from vllm_magicdec.attention.switch import Switch
from vllm_magicdec.native.library import UnreadableError, best_variant, load
from vllm_magicdec.policies import Observation
from vllm_magicdec.views.round import TokenMask

pytestmark = pytest.mark.skipif(best_variant() is None, reason="needs the compiled kernel")
PAGE, HEADS, KV_HEADS, HEAD_SIZE, CONTEXT = 32, 4, 2, 64, 90
# By vLLM's names.
DTYPES = dict.fromkeys(("fp8", "fp8_e4m3"), torch.float8_e4m3fn)
DTYPES |= {"auto": torch.float32, "fp8_e5m2": torch.float8_e5m2}
KEY_SCALE, VALUE_SCALE = 0.7, 1.3


def whole_context(name: str) -> Case:
    torch.manual_seed(0)
    num_slots = -(-CONTEXT // PAGE) * PAGE
    halves = (torch.randn(num_slots, KV_HEADS, HEAD_SIZE).to(DTYPES[name]) for _ in range(2))
    return Case(
        *halves,
        page_size=PAGE,
        query=torch.randn(1, HEADS, HEAD_SIZE),
        slots=torch.arange(CONTEXT, dtype=torch.int32).expand(1, KV_HEADS, -1),
        lens=torch.tensor([CONTEXT], dtype=torch.int32),
        scale=0.2,
        soft_cap=5.0,
        # A layer has scales whatever its cache is.
        key_scale=1.0 if name == "auto" else KEY_SCALE,
        value_scale=1.0 if name == "auto" else VALUE_SCALE,
    )


def cache_of(case: Case) -> torch.Tensor:
    """In vLLM's layout `vec`; an fp8 cache is one of bytes."""
    halves = (case.keys, case.values)
    stored = [half if half.dtype == torch.float32 else half.view(torch.uint8) for half in halves]
    keys, values = (half.unflatten(0, (-1, PAGE)).transpose(1, 2) for half in stored)
    both = torch.stack([keys.transpose(2, 3).reshape(values.shape), values], dim=2)
    return both.view(len(both), KV_HEADS, PAGE, 2 * HEAD_SIZE)


def layer_of(case: Case, name: str, implementation: type = CPUAttentionBackendImpl) -> SimpleNamespace:
    """A layer of vLLM's on CPUs, with the kernel before its own attention."""
    impl = object.__new__(implementation)
    vars(impl).update(attn_type=AttentionType.DECODER, alibi_slopes=None, sliding_window=-1)
    layer = views_over_a_cache.layer_of(
        case, cache_of(case), "CPU_ATTN", impl=impl, name=name, reads_scales_by_head=False
    )
    layer.isa, layer._k_scale_float, layer._v_scale_float = "vec", KEY_SCALE, VALUE_SCALE
    NativeAttention(layer, layer.get_kv_cache_spec(None), load(best_variant()))
    return layer


def metadata_of(case: Case) -> SimpleNamespace:
    num_pages = len(case.keys) // PAGE
    table = torch.arange(num_pages, dtype=torch.int32).unsqueeze(0)
    where = dict(query_start_loc=torch.tensor([0, 1], dtype=torch.int32), block_table=table)
    numbers = dict(max_query_len=1, num_actual_tokens=1, seq_lens=case.lens)
    return SimpleNamespace(causal=True, **where, **numbers)


def attended(layer: SimpleNamespace, case: Case, metadata: object) -> torch.Tensor:
    output = torch.full_like(case.query.flatten(1), torch.nan)
    layer.impl.forward(layer, case.query, None, None, cache_of(case), metadata, output)
    return output.view_as(case.query)


@pytest.mark.parametrize("name", DTYPES)
def test_verification_uses_the_layers_scales(name):
    case = whole_context(name)
    case.check(attended(layer_of(case, name), case, metadata_of(case)))


def test_a_layer_reads_the_cache_that_it_is_given():
    """Whichever it was given before; and what lies beyond the step's tokens is left as it is."""
    case = whole_context("auto")
    layer, metadata = layer_of(case, "auto"), metadata_of(case)
    beyond = torch.full((3, HEADS, HEAD_SIZE), torch.nan)
    query, output = torch.cat([case.query, beyond]), torch.full((4, HEADS, HEAD_SIZE), 7.0)
    first = cache_of(case)
    for cache in (first, torch.zeros_like(first), first.clone()):
        layer.impl.forward(layer, query, None, None, cache, metadata, output)
        if cache.any():
            case.check(output[:1])
        else:
            assert not output[:1].any()
    assert (output[1:] == 7.0).all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("takes_passes", [False, True])
def test_drafts_over_token_views_use_the_layers_scales(name, takes_passes):
    case = whole_context(name)
    chosen = torch.stack([torch.randperm(CONTEXT)[:40] for _ in range(KV_HEADS)]).int()
    case = replace(case, slots=chosen.unsqueeze(0), lens=torch.tensor([40], dtype=torch.int32))
    layer = layer_of(case, name)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    Switch(0, layer, config, CPU, None)
    metadata = TokenMetadata(case.slots, case.lens, common_len=None)
    if takes_passes:
        first = torch.zeros(1, 1, dtype=torch.int64)
        mask = TokenMask(torch.ones(1, 1, 40, dtype=torch.bool), first, first[0])
        metadata = TokenMetadata(case.slots, case.lens, mask=mask)
    case.check(attended(layer, case, metadata))


@pytest.mark.parametrize("name", DTYPES)
def test_policies_are_given_the_kernels_weights(name):
    case = whole_context(name)
    layer = layer_of(case, name)
    layer.impl.sinks = torch.randn(HEADS)
    seen = []
    recorder = SimpleNamespace(record=lambda *args: seen.append(args))
    Switch(0, layer, SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32)), CPU, recorder)
    metadata = metadata_of(case)
    pages = metadata.block_table[0]
    attended(layer, case, metadata)
    [(_, queries, _, _, rows, softmax)] = seen
    observation = Observation(
        queries, rows, pages, PAGE, length=case.lens[0].long(), num_seen=0, softmax=softmax
    )
    own = observation.weights()
    assert rows.weigh is not None and own.shape == (KV_HEADS, len(pages) * PAGE)
    by_torch = replace(observation, cache=replace(rows, weigh=None), queries=queries.float()).weights()
    # In bfloat16, as torch multiplies with an fp8 cache's keys.
    tolerance = 1e-5 if name == "auto" else 2e-2
    torch.testing.assert_close(own, by_torch, rtol=tolerance, atol=tolerance)


def test_attention_of_another_plugin_is_left_alone():
    class Theirs(CPUAttentionBackendImpl):
        def forward(self, *args, **kwargs):
            raise AssertionError("is not called")

    with pytest.raises(UnreadableError, match=r"another plugin brings its own for CPUs, .*Theirs"):
        layer_of(whole_context("auto"), "auto", Theirs)
