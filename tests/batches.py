# SPDX-License-Identifier: Apache-2.0
"""Minimal batches and engines for tests of views and drafting."""

from collections.abc import Iterator

import torch

from vllm_magicdec.policies.base import Engine, Limits
from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.slots import DraftSlots

CPU = torch.device("cpu")


def make_batch(req_ids, block_table, context_lens) -> Batch:
    lens = torch.tensor(context_lens)
    num_reqs = len(context_lens)
    return Batch(
        req_ids=req_ids,
        tokens=torch.zeros(num_reqs, dtype=torch.int32),
        block_tables=[block_table],
        context_lens=lens,
        observable_lens=lens,
        known_lens=context_lens,
        is_prefilling=[False] * num_reqs,
        is_first=[False] * num_reqs,
    )


def make_engine(
    page_size: int,
    model_len: int,
    num_steps: int,
    num_blocks: int,
    max_num_reqs: int,
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    group: int = 1,
    head_size: int = 8,
    device: torch.device = CPU,
    observe=None,
    switch_attention=lambda recorder=None, *, layer_pages=False: (),
) -> Engine:
    return Engine(
        limits=Limits(page_size, model_len, num_steps, device.type),
        num_layers=num_layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        query_dtype=torch.float32,
        cache_dtype=torch.float32,
        num_blocks=num_blocks,
        max_num_reqs=max_num_reqs,
        max_batched_tokens=4096,
        device=device,
        observe=observe,
        switch_attention=switch_attention,
    )


class NoSelector:
    memory_bytes = {}

    def update(self, batch: Batch, num_steps: int) -> None:
        pass


def steps_of_view(round_view, num_steps: int) -> Iterator:
    """The steps of a round in the layers of one view, each valid until the next one."""
    return map(round_view.step, range(num_steps))


def make_slots(page_size, max_num_reqs, max_num_steps, max_model_len, device=CPU) -> DraftSlots:
    sizes = {"max_num_reqs": max_num_reqs, "max_num_steps": max_num_steps, "max_model_len": max_model_len}
    return DraftSlots(page_size=page_size, device=device, **sizes)


def make_selections(num_layers, num_heads, max_num_reqs, max_selected, device=CPU) -> Selections:
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "max_num_reqs": max_num_reqs}
    return Selections(max_selected=max_selected, device=device, **sizes)
