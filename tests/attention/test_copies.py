# SPDX-License-Identifier: Apache-2.0
"""Copies of chosen tokens, round after round: keys and values of what was chosen, wherever it lies.

And attention that reads them is what it is without.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import KeepsWhatIsThere, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.copies import CACHE_TO_COPIES, CopiedPages
from vllm_magicdec.attention.metadata import draft_metadata
from vllm_magicdec.attention.native_attention import NativeAttention
from vllm_magicdec.attention.rows import FP8_DTYPES, read_dtype
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.native.library import best_variant, load
from vllm_magicdec.views.base import DraftSlots
from vllm_magicdec.views.copies import CopiedTokens, TokenCopies, pages_of_copy
from vllm_magicdec.views.passes import Queries
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.tokens import TokenBudget, TokenViews

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_SIZE, PAGE, CONTEXT, NUM_STEPS = 2, 2, 2, 32, 32, 200, 3
PAGES_EACH = -(-(CONTEXT + 8) // PAGE)
SINKS = 4
BUDGET = TokenBudget(sink=SINKS, window=8, min_tokens=100, max_tokens=100)
END = CONTEXT - BUDGET.window  # of what is chosen from


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Torch writes no chosen fp8 numbers, and vLLM keeps such caches as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


class World:
    """Requests, caches that hold their K/V, and views with copies; pages that nobody has hold NaN.

    Args:
        num_reqs: of a round, at most; there are two requests more.
        room: for so many copies.
        isa: the caches' layout, by vLLM's name.
        dtype: what they hold.
        seed: of all that is random.
    """

    def __init__(self, num_reqs: int, *, room: int, isa: str, dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        names = [f"request {index}" for index in range(num_reqs + 2)]
        self.num_pages = 2 * len(names) * PAGES_EACH
        shape = (self.num_pages, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE)
        self.layers = [
            SimpleNamespace(
                attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"),
                isa=isa,
                kv_cache_dtype="fp8" if dtype in FP8_DTYPES else "auto",
                kv_cache=bits(torch.full(shape, torch.nan).to(dtype)),
                impl=SimpleNamespace(
                    forward=None,
                    attn_type=AttentionType.DECODER,
                    alibi_slopes=None,
                    num_heads=GROUP * NUM_KV_HEADS,
                ),
            )
            for _ in range(NUM_LAYERS)
        ]
        of_truth = (NUM_LAYERS, 2, NUM_KV_HEADS, PAGES_EACH * PAGE, HEAD_SIZE)
        self.truth = {name: torch.randn(of_truth, generator=self.generator).to(dtype) for name in names}
        self.pages: dict[str, torch.Tensor] = {}
        self.chosen: dict[str, torch.Tensor] = {}  # [num_layers, num_kv_heads, n], best first
        self.selections = Selections(
            num_layers=NUM_LAYERS,
            num_heads=NUM_KV_HEADS,
            max_num_reqs=num_reqs,
            max_selected=BUDGET.max_selected,
            device=CPU,
        )
        self.spec = SimpleNamespace(
            num_kv_heads=NUM_KV_HEADS,
            block_size=PAGE,
            head_size=HEAD_SIZE,
            dtype=self.layers[0].kv_cache.dtype,
            kv_quant_mode=get_kv_quant_mode(self.layers[0].kv_cache_dtype),
        )
        each = pages_of_copy(self.selections, SINKS, PAGE)
        pages = CopiedPages(
            self.layers,
            NUM_LAYERS,
            self.spec,
            dtype,
            num_blocks=room * each * CACHE_TO_COPIES,
            each=each,
            max_num_reqs=num_reqs,
            device=CPU,
        )
        slots = DraftSlots(
            page_size=PAGE,
            max_num_reqs=num_reqs,
            max_num_steps=NUM_STEPS,
            max_model_len=CONTEXT + 8,
            device=CPU,
        )
        copies = TokenCopies(self.selections, SINKS, pages)
        self.views = TokenViews(self.selections, KeepsWhatIsThere(), BUDGET, slots, (), copies)

    def rows(self, layer: int, pages: torch.Tensor) -> KVRows:
        return KVRows.of(pages, "CPU_ATTN", self.layers[layer].isa, self.dtype)

    def move(self, req_id: str) -> None:
        """To other pages, as after a preemption; on the old ones somebody else writes."""
        taken = {page for own in self.pages.values() for page in own.tolist()}
        order = torch.randperm(self.num_pages, generator=self.generator).tolist()
        new = torch.tensor([page for page in order if page not in taken][:PAGES_EACH])
        nothing = bits(torch.full((1,), torch.nan).to(self.dtype))
        for index, layer in enumerate(self.layers):
            if req_id in self.pages:
                layer.kv_cache[self.pages[req_id]] = nothing
            whole = torch.empty(PAGES_EACH, *layer.kv_cache.shape[1:], dtype=self.dtype)
            self.rows(index, whole).fill(*self.truth[req_id][index])
            layer.kv_cache[new] = bits(whole)
        self.pages[req_id] = new

    def choose(self, req_id: str) -> None:
        count = BUDGET.max_selected
        heads = range(NUM_LAYERS * NUM_KV_HEADS)
        orders = [torch.randperm(END - SINKS, generator=self.generator)[:count] + SINKS for _ in heads]
        chosen = torch.stack(orders).view(NUM_LAYERS, NUM_KV_HEADS, count)
        self.selections.positions[self.selections.row(req_id)] = chosen.int()
        self.selections.set([req_id], [CONTEXT], torch.tensor([count]), torch.tensor([END]))
        self.chosen[req_id] = chosen

    def prepare(self, req_ids: list[str], again=(), moved=()):
        """A round's steps; some requests choose `again`, or have `moved`."""
        self.selections.begin_round(req_ids)
        for req_id in req_ids:
            if req_id in moved or req_id not in self.pages:
                self.move(req_id)
            if req_id in again or self.selections.version(req_id) is None:
                self.choose(req_id)
        table = torch.stack([self.pages[req_id] for req_id in req_ids]).int()
        return self.views.prepare(make_batch(req_ids, table, [CONTEXT] * len(req_ids)), NUM_STEPS)

    def check(self, req_ids: list[str], copied: CopiedTokens | None) -> int:
        """That copies are what was chosen; returns how many requests have one."""
        counts = [0] * len(req_ids) if copied is None else copied.counts.tolist()
        for index, (req_id, count) in enumerate(zip(req_ids, counts, strict=True)):
            for layer in range(NUM_LAYERS) if count else ():
                of_layer = copied.of_layer(layer)
                slots = int(of_layer.firsts[index]) * PAGE + torch.arange(count)
                read = self.rows(layer, of_layer.pages).gather(slots.expand(NUM_KV_HEADS, -1))
                best = self.chosen[req_id][layer, :, : count - SINKS]
                best = torch.cat([torch.arange(SINKS).expand(NUM_KV_HEADS, -1), best], dim=-1)
                truth = self.truth[req_id][layer].to(read_dtype(self.dtype))
                for half, whole in zip(read, truth, strict=True):
                    own = whole.gather(1, best.unsqueeze(-1).expand(-1, -1, HEAD_SIZE))
                    torch.testing.assert_close(half, own, rtol=0, atol=0)
        return sum(map(bool, counts))

    def attend(self, view, num_queries: int) -> torch.Tensor:
        """What the kernel makes of it in all layers; the same queries each time."""
        query_dtype = torch.float32 if self.dtype in FP8_DTYPES else self.dtype
        query = torch.randn(
            num_queries, GROUP * NUM_KV_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(1)
        ).to(query_dtype)
        outputs = []
        names = [str(index) for index in range(NUM_LAYERS)]
        for layer, metadata in zip(self.layers, draft_metadata(view, names, None).values(), strict=True):
            output = torch.full_like(query, torch.nan)
            native = NativeAttention(layer, self.spec, load(best_variant()))
            native.attend_view(query, layer.kv_cache, metadata, Softmax(0.5), 1.0, output)
            outputs.append(output)
        return torch.stack(outputs)

    def check_attention(self, view, num_queries: int) -> None:
        expected = self.attend(replace(view, copied=None), num_queries)
        torch.testing.assert_close(self.attend(view, num_queries), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec16", torch.float8_e4m3fn), ("amx", torch.bfloat16)],
)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 4), st.integers(0, 2**31))
def test_copies_are_of_what_was_chosen_last(isa, dtype, data, num_reqs, room, seed):
    world = World(num_reqs, room=room, isa=isa, dtype=dtype, seed=seed)
    some = st.lists(st.sampled_from(list(world.truth)), min_size=1, max_size=num_reqs, unique=True)
    for _ in range(data.draw(st.integers(1, 6))):
        present = data.draw(some)
        step = next(iter(world.prepare(present, data.draw(some), data.draw(some))))
        assert world.check(present, step.view.copied) == min(len(present), room)


@pytest.mark.skipif(best_variant() is None, reason="needs the compiled kernel")
@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_attention_is_the_same_with_copies_and_without(data, num_reqs, room, seed):
    world = World(num_reqs, room=room, isa="vec", dtype=torch.float32, seed=seed)
    present = list(world.truth)[:num_reqs]
    steps = world.prepare(present)
    running = data.draw(st.lists(st.sampled_from(range(num_reqs)), min_size=1, unique=True).map(sorted))
    firsts = [data.draw(st.integers(0, NUM_STEPS - 1)) for _ in running]
    lens = [data.draw(st.integers(1, NUM_STEPS - first)) for first in firsts]
    queries = Queries(*map(np.array, (running, firsts, lens)))
    world.check_attention(steps.take(queries).view, sum(lens))
    for step in steps:
        assert step.view.copied is not None
        world.check_attention(step.view, num_reqs)


def test_what_could_not_be_copied_is_copied_in_the_next_round(monkeypatch):
    world = World(1, room=1, isa="vec", dtype=torch.float32, seed=0)
    write = CopiedPages.write

    def fail_in_between(self, first, slots):
        write(self, first, slots.flip(-1))
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(CopiedPages, "write", fail_in_between)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                world.prepare(["request 0"])
    step = next(iter(world.prepare(["request 0"])))
    assert world.check(["request 0"], step.view.copied) == 1


def test_a_request_that_comes_back_shorter_is_read_where_it_is():
    world = World(1, room=1, isa="vec", dtype=torch.float32, seed=0)
    assert next(iter(world.prepare(["request 0"]))).view.copied is not None
    table = world.pages["request 0"].unsqueeze(0).int()
    steps = world.views.prepare(make_batch(["request 0"], table, [END - 1]), 1, 1)
    assert next(iter(steps)).view.copied is None
