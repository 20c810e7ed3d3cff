# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `device_lookups.DeviceLookups.fill`: one scans the texts, one writes the tokens."""

import torch
import triton
import triton.language as tl

from vllm_magicdec.lookup.history import Texts

BLOCK = 1024  # positions that one program compares
# Triton must not specialize on these, which change from round to round.
VARYING = ["num_blocks", "num_steps"]


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # [max_num_reqs, max_model_len] int32
    rows,  # [num_reqs] int
    lens,  # [num_reqs] int64
    drafts,  # [num_reqs, num_steps] int32
    num_drafted,  # [num_reqs] int64
    scores,  # [num_reqs, max_blocks] int64, written: 0, or length * SCALE + position
    token_stride,
    draft_stride,
    score_stride,
    SCALE: tl.constexpr,
    MATCH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Find the best match of one request in a block of positions."""
    req = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    length = tl.load(lens + req)
    end = length + tl.load(num_drafted + req)
    text = token_ids + tl.load(rows + req).to(tl.int64) * token_stride
    ahead = drafts + req * draft_stride
    position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE).to(tl.int64)
    is_same = position < length - 1
    matched = tl.zeros([BLOCK_SIZE], dtype=tl.int64)
    for back in tl.static_range(0, MATCH):
        target_at = end - 1 - back
        is_ahead = target_at >= length
        drafted = tl.load(ahead + (target_at - length + 1), mask=is_ahead, other=-1)
        verified = tl.load(text + target_at, mask=(target_at >= 0) & (target_at < length), other=-1)
        target = tl.where(is_ahead, drafted, verified)
        is_same = is_same & (position >= back)
        token = tl.load(text + position - back, mask=is_same, other=-2)
        is_same = is_same & (token == target)
        matched += is_same.to(tl.int64)
    score = tl.where(matched > 0, matched * SCALE + position, 0)
    tl.store(scores + req * score_stride + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=VARYING)
def _write_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    rows,
    lens,
    drafts,  # written after the first `num_drafted`
    num_drafted,
    scores,
    is_found,  # [num_reqs] bool, written
    token_stride,
    draft_stride,
    score_stride,
    num_blocks,
    num_steps,
    vocab_size,
    SCALE: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
):
    """Write the continuation of one request."""
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + req)
    num_own = tl.load(num_drafted + req)
    end = length + num_own
    text = token_ids + tl.load(rows + req).to(tl.int64) * token_stride
    ahead = drafts + req * draft_stride
    blocks = tl.arange(0, BLOCKS_PADDED)
    score = tl.max(tl.load(scores + req * score_stride + blocks, mask=blocks < num_blocks, other=0), axis=0)
    follows = score % SCALE + 1
    column = tl.arange(0, STEPS_PADDED).to(tl.int64)
    is_written = (column > num_own) & (column < num_steps)
    # A continuation that reaches the end of the text repeats itself.
    period = tl.maximum(end - follows, 1)
    source = follows + (tl.maximum(column - num_own - 1, 0) % period)
    is_loaded = is_written & (column * 0 + score > 0)
    drafted = tl.load(ahead + (source - length + 1), mask=is_loaded & (source >= length), other=-1)
    verified = tl.load(text + source, mask=is_loaded & (source < length), other=-1)
    token = tl.where(source >= length, drafted, verified)
    token = tl.where((token >= 0) & (token < vocab_size), token, 0)
    tl.store(ahead + column, token, mask=is_written)
    tl.store(is_found + req, score > 0)


class Scan:
    """Both kernels and their buffer; see `device_lookups.DeviceLookups`."""

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self._scale = triton.next_power_of_2(max_model_len + 1)
        self._max_blocks = triton.cdiv(max_model_len, BLOCK)
        shape = (max_num_reqs, self._max_blocks)
        self._scores = torch.zeros(shape, dtype=torch.int64, device=device)

    def fill(
        self, drafts: torch.Tensor, num_drafted: torch.Tensor, texts: Texts, max_match: int, vocab_size: int
    ) -> torch.Tensor:
        """Implement `device_lookups.DeviceLookups.fill`."""
        num_reqs, num_steps = drafts.shape
        num_blocks = min(triton.cdiv(texts.max_len, BLOCK), self._max_blocks)
        is_found = torch.empty(num_reqs, dtype=torch.bool, device=drafts.device)
        of_texts = (texts.token_ids, texts.rows, texts.lens, drafts, num_drafted, self._scores)
        strides = (texts.token_ids.stride(0), drafts.stride(0), self._scores.stride(0))
        _scan_kernel[(num_reqs, num_blocks)](
            *of_texts, *strides, SCALE=self._scale, MATCH=max_match, BLOCK_SIZE=BLOCK
        )
        _write_kernel[(num_reqs,)](
            *of_texts,
            is_found,
            *strides,
            num_blocks,
            num_steps,
            vocab_size,
            SCALE=self._scale,
            BLOCKS_PADDED=triton.next_power_of_2(self._max_blocks),
            STEPS_PADDED=triton.next_power_of_2(num_steps),
        )
        return is_found
