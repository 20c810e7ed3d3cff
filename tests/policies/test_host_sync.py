# SPDX-License-Identifier: Apache-2.0
"""Preparing a round never waits for the device: no value of a tensor is read on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import make_batch, make_engine, steps_of_view

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.policies import find_policy
from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.tensors import on_device

NUM_REQS, NUM_STEPS, NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 3, 4, 2, 2, 8
PAGE, MODEL_LEN, NUM_BLOCKS = 16, 1024, 192
CONTEXT_LENS = [900, 130, 40]
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
COPIES = ("__getitem__", "__setitem__")  # by a list of places, which CUDA copies to the device, waiting

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


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

    def refuse_lists(method: Callable[..., object]) -> Callable[..., object]:
        def use(tensor: torch.Tensor, key: object, *value: object) -> object:
            for part in key if isinstance(key, tuple) else (key,):
                assert not isinstance(part, list | np.ndarray), "places of a list are copied to the device"
            return method(tensor, key, *value)

        return use

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        for name in COPIES:
            patch.setattr(torch.Tensor, name, refuse_lists(getattr(torch.Tensor, name)))
        patch.setattr(torch, "nonzero", refuse)
        yield


class Target:
    """As much of the target as policies look at: its queries, when they are observed or recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorder = None
        cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE, device=device)
        self._rows = KVRows.of(cache, "FLASH_ATTN")
        self._seq_lens = torch.tensor(CONTEXT_LENS, dtype=torch.int32, device=device)

    def _queries(self, count: int) -> torch.Tensor:
        return torch.randn(count, NUM_KV_HEADS, HEAD_SIZE, device=self._device)

    def observe(self, indices: list[int], window: int, observer: Callable[..., None]) -> None:
        queries = self._queries(len(indices) * window)
        for layer in range(NUM_LAYERS):
            observer(layer, queries, self._rows, Softmax(1.0))

    def switch_attention(self, recorder=None, *, layer_pages=False) -> tuple:
        self._recorder = recorder
        return ()

    def verify(self) -> None:
        if self._recorder is None:
            return
        starts = torch.arange(NUM_REQS + 1, dtype=torch.int32, device=self._device) * (NUM_STEPS + 1)
        metadata = SimpleNamespace(query_start_loc=starts, seq_lens=self._seq_lens)
        queries = self._queries(NUM_REQS * (NUM_STEPS + 1))
        for layer in range(NUM_LAYERS):
            self._recorder.record(layer, queries, Scales(), metadata, self._rows, Softmax(1.0))


def make_rounds(policy: str, granularity: str | None, device: torch.device) -> Callable[[Batch], None]:
    target = Target(device)
    shape = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE}
    hooks = {"observe": target.observe, "switch_attention": target.switch_attention}
    engine = make_engine(PAGE, MODEL_LEN, NUM_STEPS, NUM_BLOCKS, NUM_REQS, device=device, **shape, **hooks)
    # On a CPU too, as where reading waits for the device.
    engine = replace(engine, limits=replace(engine.limits, device_type="cuda"))
    fields = MagicDecSpeculativeConfig(
        method="magicdec-self", draft_kv_policy=policy, draft_kv_granularity=granularity
    )
    policy_class = find_policy(policy)
    views = policy_class.make_views(fields, engine, policy_class.parse_budget(fields, engine.limits, 160))

    def prepare(batch: Batch) -> None:
        target.verify()
        list(steps_of_view(views.prepare(batch, NUM_STEPS), NUM_STEPS))

    return prepare


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ending", [0, 1, NUM_REQS])
@pytest.mark.parametrize(
    ("policy", "granularity"),
    [("streamingllm", None), ("snapkv", "page"), ("snapkv", "token"), ("verify-topk", "page")],
)
def test_a_round_does_not_synchronise_also_where_prompts_end(policy, granularity, num_ending, device):
    """Everybody's step would wait for one request's selection."""
    device = torch.device(device)
    prepare = make_rounds(policy, granularity, device)
    block_table = torch.arange(NUM_REQS * MODEL_LEN // PAGE, dtype=torch.int32, device=device)
    batch = make_batch(["a", "b", "c"], block_table.view(NUM_REQS, -1), CONTEXT_LENS)
    lens = batch.context_lens.to(device)
    batch = replace(batch, context_lens=lens, observable_lens=lens)
    prepare(batch)
    new = [f"new {index}" for index in range(num_ending)]
    with no_host_reads(device):
        is_first = [index < num_ending for index in range(NUM_REQS)]
        prepare(replace(batch, req_ids=[*new, *batch.req_ids[num_ending:]], is_first=is_first))


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_are_copied_to_the_device_without_waiting(device):
    device, numbers = torch.device(device), np.arange(3, dtype=np.int32)
    with no_host_reads(device):
        copies = on_device(numbers, device), on_device(numbers.tolist(), device)
    numbers[:] = 0
    assert all(copy.device.type == device.type and copy.tolist() == [0, 1, 2] for copy in copies)


def test_the_check_detects_a_synchronisation():
    with pytest.raises(AssertionError, match="on the host"), no_host_reads(torch.device("cpu")):
        int(torch.ones(1)[0])
    with pytest.raises(AssertionError, match="places of a list"), no_host_reads(torch.device("cpu")):
        torch.ones(2)[[0, 1]]
