# SPDX-License-Identifier: Apache-2.0
"""Preparing a round never waits for the device: no value of a tensor is read on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.policies.observing import Selector
from vllm_magicdec.policies.snapkv import SnapKV
from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.policies.verify_topk import PageScores, PageSummaries, Verification, VerificationViews
from vllm_magicdec.views.base import DraftSlots
from vllm_magicdec.views.pages import PageBudget, PageViews
from vllm_magicdec.views.tokens import Selections, TokenBudget, TokenViews

NUM_REQS, NUM_STEPS, NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 3, 4, 2, 2, 8
PAGE, MODEL_LEN, NUM_BLOCKS = 16, 1024, 192
CONTEXT_LENS = [900, 130, 40]
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@contextmanager
def no_host_reads(device: torch.device) -> Iterator[None]:
    """Refuse whatever would wait for the device: by CUDA's own check, on a CPU by patching."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor's value is read on the host")

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(torch, "nonzero", refuse)
        yield


def draft_slots(device: torch.device) -> DraftSlots:
    return DraftSlots(
        page_size=PAGE,
        max_num_reqs=NUM_REQS,
        max_num_steps=NUM_STEPS,
        max_model_len=MODEL_LEN,
        device=device,
    )


def page_rounds(device: torch.device) -> Callable[[object], None]:
    budget = PageBudget(page_size=PAGE, sink_pages=1, min_pages=8, max_pages=8)
    views = PageViews(
        [StreamingLLM(MagicDecSpeculativeConfig(method="magicdec-self"), budget, device)],
        draft_slots(device),
        page_size=PAGE,
        max_num_reqs=NUM_REQS,
        max_num_steps=NUM_STEPS,
        device=device,
    )
    return lambda batch: list(views.prepare(batch, NUM_STEPS))


def token_rounds(device: torch.device) -> Callable[[object], None]:
    budget = TokenBudget(sink=4, window=32, min_tokens=128, max_tokens=128, context_fraction=0.0)
    selections = Selections(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        max_num_reqs=NUM_REQS,
        max_selected=budget.max_selected,
        device=device,
    )
    selector = Selector(
        SnapKV(MagicDecSpeculativeConfig(method="magicdec-self")),
        [budget],
        selections,
        page_size=PAGE,
        max_batched_tokens=4096,
    )
    views = TokenViews(
        selections,
        [budget],
        draft_slots(device),
        page_size=PAGE,
        max_num_reqs=NUM_REQS,
        max_num_steps=NUM_STEPS,
    )

    def observe(indices: list[int], window: int, observer: Callable[..., None]) -> None:
        queries = torch.randn(len(indices) * window, NUM_KV_HEADS, HEAD_SIZE, device=device)
        cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE, device=device)
        for layer in range(NUM_LAYERS):
            observer(layer, queries, KVRows.of(cache, "FLASH_ATTN"), 1.0, 0.0)

    def prepare(batch: object) -> None:
        selector.update(SimpleNamespace(observe=observe), batch)
        list(views.prepare(batch, NUM_STEPS))

    return prepare


def verification_rounds(device: torch.device) -> Callable[[object], None]:
    verification = Verification(
        num_layers=NUM_LAYERS, max_num_reqs=NUM_REQS, num_queries=NUM_STEPS + 1, device=device
    )
    summaries = PageSummaries(
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
        device=device,
    )
    views = VerificationViews(
        [PageBudget(page_size=PAGE, sink_pages=1, min_pages=10, max_pages=10)],
        PageScores(verification, summaries, PAGE),
        draft_slots(device),
        num_layers=NUM_LAYERS,
        refresh=1,
        max_num_reqs=NUM_REQS,
        max_num_steps=NUM_STEPS,
        device=device,
    )
    starts = torch.arange(NUM_REQS + 1, dtype=torch.int32, device=device) * (NUM_STEPS + 1)
    lens = torch.tensor(CONTEXT_LENS, dtype=torch.int32, device=device)
    metadata = SimpleNamespace(query_start_loc=starts, seq_lens=lens)
    queries = torch.randn(NUM_REQS * (NUM_STEPS + 1), NUM_KV_HEADS, HEAD_SIZE, device=device)
    cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE, device=device)

    def prepare(batch: object) -> None:
        for layer in range(NUM_LAYERS):
            verification.record(layer, queries, metadata, KVRows.of(cache, "FLASH_ATTN"), 1.0, 0.0)
        list(views.prepare(batch, NUM_STEPS))

    return prepare


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make_rounds", [page_rounds, token_rounds, verification_rounds])
def test_a_round_of_decoding_requests_reads_nothing_on_the_host(make_rounds, device):
    device = torch.device(device)
    prepare = make_rounds(device)
    pages = MODEL_LEN // PAGE
    block_table = torch.arange(NUM_REQS * pages, dtype=torch.int32, device=device).view(NUM_REQS, -1)
    batch = make_batch(["a", "b", "c"], block_table, CONTEXT_LENS)
    lens = batch.context_lens.to(device)
    batch = replace(batch, context_lens=lens, observable_lens=lens)
    prepare(batch)  # requests that are new may be looked at more closely
    with no_host_reads(device):
        prepare(batch)


def test_the_check_notices_a_read():
    with pytest.raises(AssertionError, match="on the host"), no_host_reads(torch.device("cpu")):
        int(torch.ones(1)[0])
