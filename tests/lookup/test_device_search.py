# SPDX-License-Identifier: Apache-2.0
"""Lookups on the device against a naive search."""

import os
import random

import pytest
import torch
import triton_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.lookup.device_lookups import MAX_MATCH, DeviceLookups
from vllm_magicdec.lookup.history import Texts

CPU, MODEL_LEN, VOCAB = torch.device("cpu"), 70, 5
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def continuation(text: list[int], drafted: list[int], most: int) -> list[int] | None:
    """Search by the definition: the longest match that a verified token follows, at a tie the latest."""
    whole, best, follows = text + drafted, 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, MAX_MATCH) and whole[end - 1 - length] == whole[-1 - length]:
            length += 1
        if length and length >= best:
            best, follows = length, end
    if not best:
        return None
    for _ in range(most):  # the continuation may reach into itself
        whole.append(whole[follows])
        follows += 1
    return [token if token < VOCAB else 0 for token in whole[len(whole) - most :]]


@st.composite
def batches(draw):
    """Texts in rows of any order, the drafts of each, and the number of drafts per round."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    num_reqs, num_steps = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    # One token, few, or so many that few occur twice; some are not in the vocabulary.
    letters = draw(st.sampled_from([1, 2, VOCAB, VOCAB + 1, 1000]))
    texts = [[rng.randrange(letters) for _ in range(rng.randint(1, MODEL_LEN))] for _ in range(num_reqs)]
    drafted = [[rng.randrange(letters) for _ in range(rng.randrange(num_steps))] for _ in texts]
    return rng, texts, drafted, num_steps


@settings(max_examples=300, deadline=None)
@given(batches())
def test_continuations_follow_the_longest_match(batch):
    rng, texts, drafted, num_steps = batch
    rows = rng.sample(range(6), len(texts))
    # Rows hold other tokens after their text.
    token_ids = torch.randint(0, 3, (6, MODEL_LEN), dtype=torch.int32)
    drafts = torch.full((len(texts), num_steps), 77, dtype=torch.int32)
    for index, (row, text, own) in enumerate(zip(rows, texts, drafted, strict=True)):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        drafts[index, : 1 + len(own)] = torch.tensor([text[-1], *own], dtype=torch.int32)
    num_drafted = torch.tensor([len(own) for own in drafted])
    lens = torch.tensor([len(text) for text in texts])
    most = min(MODEL_LEN, max(map(len, texts)) + rng.randrange(9))
    lookups = DeviceLookups(4, MODEL_LEN, VOCAB, CPU, has_kernels=IS_INTERPRETED)
    is_found = lookups.fill(
        drafts, num_drafted, Texts(token_ids, torch.tensor(rows, dtype=torch.int32), lens, most)
    )
    for index, (text, own) in enumerate(zip(texts, drafted, strict=True)):
        expected = continuation(text, own, num_steps - 1 - len(own))
        assert bool(is_found[index]) == (expected is not None)
        nothing = [0] * (num_steps - 1 - len(own))
        assert drafts[index].tolist() == [text[-1], *own, *(nothing if expected is None else expected)]


def test_the_kernels_find_what_torch_does():
    triton_tools.run_interpreted(__file__)


def test_the_kernels_compile_for_a_gpu():
    kernels = pytest.importorskip("vllm_magicdec.lookup.device_kernels")
    texts = {"token_ids": "*i32", "rows": "*i32", "lens": "*i64", "drafts": "*i32", "num_drafted": "*i64"}
    scanned = {"scores": "*i64"}
    constants = {"SCALE": 1 << 18, "MATCH": MAX_MATCH, "BLOCK_SIZE": kernels.BLOCK}
    triton_tools.check_compiles_for_hopper(kernels._scan_kernel, texts | scanned, constants)
    constants = {"SCALE": 1 << 18, "BLOCKS_PADDED": 128, "STEPS_PADDED": 8}
    triton_tools.check_compiles_for_hopper(
        kernels._write_kernel, texts | scanned | {"is_found": "*i1"}, constants
    )


def main() -> None:
    from vllm_magicdec.lookup import device_kernels

    device_kernels.BLOCK = 16  # so that texts have several
    calls = []
    fill = device_kernels.Scan.fill
    device_kernels.Scan.fill = lambda *args: calls.append(args) or fill(*args)
    inner = test_continuations_follow_the_longest_match.hypothesis.inner_test
    settings(max_examples=60, deadline=None)(given(batches())(inner))()
    assert calls


if __name__ == "__main__":
    main()
