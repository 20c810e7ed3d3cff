# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention where layers of a group differ in their window; run for every library of kernels."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import dense_attention
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

PAGE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 4, 2, 32
WINDOW = 512
TOLERANCE = 2e-5
IS_PATCHED = not hasattr(CPUAttentionMetadataBuilder, "_group_sliding_window")
needs_patch = pytest.mark.skipif(not IS_PATCHED, reason="needs the third patch of `patches/`")
# Lengths of query and context of each request: threads share the keys of one with a single token.
DECODE = [(1, 2000)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86 or not current_platform.is_cpu():
        pytest.skip("needs vLLM's kernels for x86 CPUs")
    current_platform.import_kernels()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one thread does all of a request
    yield
    torch.set_num_threads(num_threads)


class Layers:
    """Attention layers of one KV cache group as vLLM makes them, their caches, and a batch.

    `requests` are lengths of query and context. If `late`, the builder hears of all layers but the first
    one when it has been made, as in vLLM's drafts.
    """

    def __init__(self, windows, requests, *, has_sinks=True, late=False):
        names = [str(index) for index in range(len(windows))]
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            parallel_config=None,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.sinks = 2 * torch.randn(NUM_HEADS) if has_sinks else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_attn, "get_current_vllm_config", lambda: self.config)
            self.layers = [self._layer(name, window) for name, window in zip(names, windows, strict=True)]
        self.windows = windows
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        known = names[:1] if late else names
        builder = CPUAttentionMetadataBuilder(spec, known, self.config, torch.device("cpu"))
        known += names[len(known) :]
        for layer in self.layers:
            layer.isa = self.layers[0].isa

        query_lens, self.lens = (
            torch.tensor(lens, dtype=torch.int32) for lens in zip(*requests, strict=True)
        )
        self.starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
        pages = -(-self.lens // PAGE)
        tables = torch.zeros(len(requests), int(pages.max()), dtype=torch.int32)
        order = torch.randperm(int(pages.sum())).int()
        for table, own in zip(tables, order.split(pages.tolist()), strict=True):
            table[: len(own)] = own
        places = [torch.arange(length) for length in self.lens]
        self._slots = [t[p // PAGE].long() * PAGE + p % PAGE for t, p in zip(tables, places, strict=True)]
        self._num_pages = len(order)
        most = dict(max_query_len=int(query_lens.max()), max_seq_len=int(self.lens.max()))
        numbers = dict(num_reqs=len(requests), num_actual_tokens=int(self.starts[-1]))
        where = dict(query_start_loc=self.starts, seq_lens=self.lens, block_table_tensor=tables)
        batch = SimpleNamespace(slot_mapping=None, causal=True, **most, **numbers, **where)
        self._metadata = builder.build(0, batch)

    def _layer(self, name, window):
        layer = Attention.__new__(Attention)
        nn.Module.__init__(layer)
        layer.num_heads, layer._k_scale_float, layer._v_scale_float = NUM_HEADS, 1.0, 1.0
        layer.impl = CPUAttentionBackendImpl(
            NUM_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, NUM_KV_HEADS, None, window, "auto", sinks=self.sinks
        )
        self.config.compilation_config.static_forward_context[name] = layer
        return layer

    def error(self, index: int) -> float:
        """The largest one of a layer's output, for random queries, keys and values."""
        query, keys, values, output = self._forward(index)
        window, ends, right = self.windows[index], self.lens.cumsum(0).tolist(), []
        for request, (end, length) in enumerate(zip(ends, self.lens.tolist(), strict=True)):
            own = query[self.starts[request] : self.starts[request + 1]]
            k, v = (
                rows[end - length : end].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
                for rows in (keys, values)
            )
            distance = torch.arange(length)[-len(own) :, None] - torch.arange(length)
            is_seen = (distance >= 0) & (distance < (window or length))
            right.append(dense_attention(own, k, v, is_seen, scale=HEAD_SIZE**-0.5, sinks=self.sinks)[0])
        return (output - torch.cat(right)).abs().max().nan_to_num(torch.inf).item()

    def error_after_other_work(self, index: int, other: int) -> float:
        """When another layer has left large values in the memory of both threads."""
        for _ in range(4):
            self._forward(other, value_scale=1e4)
        return self.error(index)

    def _forward(self, index: int, value_scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        layer, num_tokens = self.layers[index], int(self.lens.sum())
        query = torch.randn(int(self.starts[-1]), NUM_HEADS, HEAD_SIZE)
        keys = torch.randn(num_tokens, NUM_KV_HEADS, HEAD_SIZE)
        values = value_scale * torch.randn(num_tokens, NUM_KV_HEADS, HEAD_SIZE)
        cache = torch.zeros(self._num_pages, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE)
        layer.impl.do_kv_cache_update(layer, keys, values, cache, torch.cat(self._slots))
        output = torch.full_like(query, torch.nan)
        layer.impl.forward(layer, query, None, None, cache, self._metadata, output)
        return query, keys, values, output


@pytest.mark.skipif(IS_PATCHED, reason="patched")
def test_vllm_itself_is_wrong_with_a_window_and_sinks_under_a_shared_plan():
    """If this fails, vLLM has fixed it: its patch and the refusal can go."""
    layers = Layers([WINDOW, None], DECODE)
    assert layers.error_after_other_work(1, 1) < TOLERANCE
    assert any(layers.error_after_other_work(0, 1) > 1 for _ in range(10))


@pytest.mark.parametrize(("has_sinks", "splits"), [(False, True), (True, False)])
def test_layers_are_right_without_sinks_or_split_keys(monkeypatch, has_sinks, splits):
    """The plugin does not refuse them."""
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", str(int(splits)))
    layers = Layers([WINDOW, None, 96], DECODE, has_sinks=has_sinks)
    for index in range(3):
        assert max(layers.error_after_other_work(index, 1) for _ in range(3)) < TOLERANCE


@needs_patch
@pytest.mark.parametrize("late", [False, True], ids=["all layers known", "layers added later"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
def test_layers_with_and_without_a_window_are_right_with_plans_of_their_own(has_sinks, late):
    layers = Layers([WINDOW, None, 96], DECODE, has_sinks=has_sinks, late=late)
    for index in range(3):
        assert max(layers.error_after_other_work(index, 1) for _ in range(3)) < TOLERANCE


@needs_patch
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_batch_is_right_with_plans_by_window(data):
    lens = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4), label="contexts")
    requests = [
        (data.draw(st.one_of(st.just(1), st.integers(1, length)), label="query"), length) for length in lens
    ]
    windows = data.draw(
        st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=3), label="windows"
    )
    torch.manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    layers = Layers(windows, requests, has_sinks=data.draw(st.booleans(), label="sinks"))
    for index in range(len(windows)):
        assert layers.error_after_other_work(index, 0) < TOLERANCE
