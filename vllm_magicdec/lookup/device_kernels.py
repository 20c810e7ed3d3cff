# SPDX-License-Identifier: Apache-2.0
"""`device_lookups.DeviceLookups.fill` on a GPU: a Triton kernel that scans, and one that writes."""

import torch
import triton
import triton.language as tl

from vllm_magicdec.lookup.device_lookups import Texts

BLOCK = 1024  # places of a text that one program compares
# They differ from round to round; Triton would compile again for 1 and for those that 16 divides.
VARYING = ["num_blocks", "num_steps"]


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # [max_num_reqs, max_model_len] int32
    rows,  # [num_reqs] int
    lens,  # [num_reqs] int64
    given,  # [num_reqs, num_steps] int32
    made,  # [num_reqs] int64
    scores,  # [num_reqs, max_blocks] int64, written: 0, or length * SCALE + place
    token_stride,
    given_stride,
    score_stride,
    SCALE: tl.constexpr,
    MATCH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The best place of a block of one request's text."""
    req = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    length = tl.load(lens + req)
    end = length + tl.load(made + req)
    text = token_ids + tl.load(rows + req).to(tl.int64) * token_stride
    ahead = given + req * given_stride
    place = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE).to(tl.int64)
    is_same = place < length - 1
    matched = tl.zeros([BLOCK_SIZE], dtype=tl.int64)
    for back in tl.static_range(0, MATCH):
        wanted_at = end - 1 - back
        is_ahead = wanted_at >= length
        drafted = tl.load(ahead + (wanted_at - length + 1), mask=is_ahead, other=-1)
        verified = tl.load(text + wanted_at, mask=(wanted_at >= 0) & (wanted_at < length), other=-1)
        wanted = tl.where(is_ahead, drafted, verified)
        is_same = is_same & (place >= back)
        token = tl.load(text + place - back, mask=is_same, other=-2)
        is_same = is_same & (token == wanted)
        matched += is_same.to(tl.int64)
    score = tl.where(matched > 0, matched * SCALE + place, 0)
    tl.store(scores + req * score_stride + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=VARYING)
def _write_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    rows,
    lens,
    given,  # written after what was drafted
    made,
    scores,
    is_found,  # [num_reqs] bool, written
    token_stride,
    given_stride,
    score_stride,
    num_blocks,
    num_steps,
    vocab_size,
    SCALE: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
):
    """How one request's text goes on."""
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + req)
    drafts = tl.load(made + req)
    end = length + drafts
    text = token_ids + tl.load(rows + req).to(tl.int64) * token_stride
    ahead = given + req * given_stride
    blocks = tl.arange(0, BLOCKS_PADDED)
    score = tl.max(tl.load(scores + req * score_stride + blocks, mask=blocks < num_blocks, other=0), axis=0)
    follows = score % SCALE + 1
    column = tl.arange(0, STEPS_PADDED).to(tl.int64)
    is_written = (column > drafts) & (column < num_steps)
    # A text that repeats its end goes on with what was found before.
    period = tl.maximum(end - follows, 1)
    source = follows + (tl.maximum(column - drafts - 1, 0) % period)
    is_read = is_written & (column * 0 + score > 0)
    drafted = tl.load(ahead + (source - length + 1), mask=is_read & (source >= length), other=-1)
    verified = tl.load(text + source, mask=is_read & (source < length), other=-1)
    token = tl.where(source >= length, drafted, verified)
    token = tl.where((token >= 0) & (token < vocab_size), token, 0)
    tl.store(ahead + column, token, mask=is_written)
    tl.store(is_found + req, score > 0)


class Scan:
    """Both kernels, with room for what the first one finds.

    Args:
        max_num_reqs: requests in a batch.
        max_model_len: tokens of a text.
        device: a GPU.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self._scale = triton.next_power_of_2(max_model_len + 1)
        self._max_blocks = triton.cdiv(max_model_len, BLOCK)
        shape = (max_num_reqs, self._max_blocks)
        self._scores = torch.zeros(shape, dtype=torch.int64, device=device)

    def fill(
        self, given: torch.Tensor, made: torch.Tensor, texts: Texts, max_match: int, vocab_size: int
    ) -> torch.Tensor:
        """See `device_lookups.DeviceLookups.fill`."""
        num_reqs, num_steps = given.shape
        num_blocks = min(triton.cdiv(texts.most, BLOCK), self._max_blocks)
        is_found = torch.empty(num_reqs, dtype=torch.bool, device=given.device)
        of_texts = (texts.token_ids, texts.rows, texts.lens, given, made, self._scores)
        strides = (texts.token_ids.stride(0), given.stride(0), self._scores.stride(0))
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
