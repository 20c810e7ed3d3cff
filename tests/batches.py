# SPDX-License-Identifier: Apache-2.0
"""Batches that are about to draft."""

import torch

from vllm_magicdec.views.base import Batch


def make_batch(req_ids, block_table, context_lens) -> Batch:
    lens = torch.tensor(context_lens)
    num_reqs = len(context_lens)
    return Batch(
        req_ids=req_ids,
        tokens=torch.zeros(num_reqs, dtype=torch.int32),
        block_table=block_table,
        context_lens=lens,
        observable_lens=lens,
        known_lens=context_lens,
        is_prefilling=[False] * num_reqs,
        is_first=[False] * num_reqs,
    )
