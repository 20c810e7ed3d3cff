# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels that summarise and score pages, against the definition in float64."""

from types import SimpleNamespace

import pytest
import test_verify_topk
import torch
import triton_tools
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import page_scores
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.rows import FP8_DTYPES, read_dtype
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies import verify_topk

NUM_LAYERS = 2
SHARED_BYTES = 99 * 2**10  # of a program, on GPUs of the consumer line
KERNELS = ("summarise", "score_pages")


def check(
    seed: int,
    context_lens: list[int],
    num_kv_heads: int,
    group: int,
    num_queries: int,
    head_size: int,
    page_size: int,
    soft_cap: float,
    pairs_at_once: int,
    dtype: torch.dtype,
    fp8: torch.dtype | None,
    are_summaries_fp8: bool,
    sinks: list[bool],
    device: str = "cpu",
) -> None:
    """Every layer's summaries and scores, in caches of their own."""
    from vllm_magicdec.policies import verify_topk_kernels

    rng = torch.Generator().manual_seed(seed)
    num_reqs = len(context_lens)
    lens = torch.tensor(context_lens)
    num_pages = -(-max(context_lens) // page_size)
    block_table = torch.randperm(num_reqs * num_pages + 3, generator=rng)[: num_reqs * num_pages]
    block_table = block_table.view(num_reqs, num_pages).to(torch.int32)

    shape = (num_reqs * num_pages + 3, num_kv_heads, page_size, 2 * head_size)
    cache_dtype = fp8 or dtype
    caches = {
        layer: (
            KVRows.of(torch.randn(shape, generator=rng).to(cache_dtype).to(device), "FLASH_ATTN"),
            Softmax(
                (1 + layer) * head_size**-0.5,
                soft_cap,
                # Of any size beside the logits: a head may look at nothing but its sink.
                8 * torch.randn(num_kv_heads * group, generator=rng).to(dtype).to(device)
                if sinks[layer]
                else None,
            ),
        )
        for layer in range(NUM_LAYERS)
    }
    shape = (NUM_LAYERS, num_reqs + 1, num_queries, num_kv_heads * group, head_size)
    queries = torch.randn(shape, generator=rng).to(dtype).to(device)
    # Stored in any order.
    rows = torch.randperm((num_reqs + 1) * num_queries, generator=rng).view(num_reqs + 1, num_queries)
    stored = torch.empty_like(queries.flatten(1, 2))
    stored[:, rows.to(device)] = queries
    num_rejected = torch.randint(0, num_queries, (num_reqs,), generator=rng)
    positions = torch.zeros((num_reqs + 1, num_queries), dtype=torch.int64)
    positions[:num_reqs] = (lens + num_rejected).unsqueeze(1) + torch.arange(-num_queries, 0)

    shape = (NUM_LAYERS, num_reqs * num_pages + 3, num_kv_heads, head_size)
    summary_dtype = torch.float8_e4m3fn if are_summaries_fp8 else read_dtype(cache_dtype)
    min_keys, max_keys = (torch.zeros(shape, dtype=summary_dtype, device=device) for _ in range(2))
    summaries = SimpleNamespace(min_keys=min_keys, max_keys=max_keys)
    table = verify_topk_kernels.LayerTable(caches)
    assert table.holds(caches)
    num_verified = lens.unsqueeze(1) - torch.arange(num_pages) * page_size
    is_seen = num_verified > 0
    verify_topk_kernels.summarise(
        table, summaries, block_table[is_seen].long().to(device), num_verified[is_seen].to(device)
    )
    # A byte per logit, in whole splits.
    pair_bytes = num_kv_heads * num_queries * group * (num_pages + verify_topk_kernels.MAX_SPLIT_PAGES)
    verify_topk_kernels.SCRATCH_BYTES = pairs_at_once * pair_bytes
    found = verify_topk_kernels.score_pages(
        table,
        summaries,
        SimpleNamespace(queries=stored, rows=rows.to(device), positions=positions.to(device)),
        SimpleNamespace(context_lens=lens.to(device), block_table=block_table.to(device)),
        num_pages,
    ).cpu()
    for layer in range(NUM_LAYERS):
        for request, context_len in enumerate(context_lens):
            blocks = block_table[request, : -(-context_len // page_size)].long()
            ends = ends_of_pages(caches[layer][0], blocks, context_len)
            stored = [keys[layer].cpu()[blocks].double().transpose(0, 1) for keys in (min_keys, max_keys)]
            for exact, rounded in zip(ends, stored, strict=True):
                # fp8 has 3 bits of mantissa; its smallest numbers are multiples of 2^-9.
                error = dict(rtol=2**-4, atol=2**-10) if are_summaries_fp8 else dict(rtol=0, atol=0)
                torch.testing.assert_close(rounded, exact, **error)
            accepted = queries[layer, request, : num_queries - int(num_rejected[request])]
            expected = page_scores(caches[layer][1], accepted.cpu(), *stored)
            scores = found[layer, request]
            assert (scores[len(expected) :] == 0).all()
            # Half a step of 1/8 in the logit.
            torch.testing.assert_close(scores[: len(expected)].double(), expected, atol=2e-5, rtol=0.065)


def ends_of_pages(rows: KVRows, blocks: torch.Tensor, context_len: int) -> list[torch.Tensor]:
    """Least and greatest keys of a request's pages, [num_kv_heads, num_pages, head_size] float64."""
    keys = rows.keys.by_token.float().cpu()[blocks].double()
    keys = keys.transpose(0, 1).flatten(1, 2)[:, :context_len]  # [num_kv_heads, context_len, head_size]
    by_page = keys.split(rows.page_size, 1)
    return [torch.stack([end(page, 1) for page in by_page], 1) for end in (torch.amin, torch.amax)]


cases = given(
    seed=st.integers(0, 2**31),
    context_lens=st.lists(st.integers(1, 600), min_size=1, max_size=2),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 4, 20]),
    num_queries=st.integers(1, 5),
    head_size=st.sampled_from([16, 80]),
    page_size=st.sampled_from([1, 12, 16]),
    soft_cap=st.sampled_from([0.0, 3.0]),
    pairs_at_once=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    fp8=st.sampled_from([None, *FP8_DTYPES]),
    are_summaries_fp8=st.booleans(),
    sinks=st.lists(st.booleans(), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
)


@settings(max_examples=20, deadline=None)
@cases
def check_cases(**case: object) -> None:
    check(**case)


def check_far_heads() -> None:
    """Where one head's keys are those of all blocks, the third head's lie more than 2^31 elements away."""
    from vllm_magicdec.policies import verify_topk_kernels

    head_size, keys_head = 16, 2**30 + 64
    storage = torch.empty(2 * keys_head + head_size, dtype=torch.float16)  # memory only where it is written
    keys = storage.as_strided((1, 3, 1, head_size), (head_size, keys_head, head_size, 1))
    for head in range(3):
        keys[0, head] = head + 1
    offsets = torch.zeros(1, dtype=torch.int64)
    min_keys, max_keys = torch.zeros((2, 1, 1, 3, head_size), dtype=torch.float16)
    summaries = SimpleNamespace(min_keys=min_keys, max_keys=max_keys)
    verify_topk_kernels.summarise(
        SimpleNamespace(keys=keys, offsets=offsets), summaries, offsets, offsets + 1
    )
    assert torch.equal(min_keys[0, 0], keys[0, :, 0]) and torch.equal(max_keys, min_keys)


class CountedOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_round(num_layers: int) -> int:
    """Torch's operators in choosing pages, those of the interpreter's kernels included."""
    test_verify_topk.NUM_LAYERS = num_layers
    scene = test_verify_topk.Scene(1, [300, 77], 16)
    for _ in range(2):  # requests of the first round are new
        scene.verify([0, 0])
        with CountedOperators() as counted:
            scene.steps()
    return counted.count


def main() -> None:
    check_cases()
    check_far_heads()
    # The policy's own tests, by the kernels.
    from vllm_magicdec.policies import verify_topk_kernels

    calls = triton_tools.noted_calls(verify_topk_kernels, KERNELS)
    verify_topk.has_kernels = lambda device: True
    verify_topk_kernels.SCRATCH_BYTES = 128 * 2**20
    test_verify_topk.test_summaries_bound_every_logit_and_follow_a_page_to_its_next_owner()
    test_verify_topk.test_summaries_include_tokens_of_steps_without_drafts()
    assert set(calls) == set(KERNELS)
    calls.clear()
    assert operators_of_a_round(2) == operators_of_a_round(7)
    assert calls.count("score_pages") == 4, "one for all layers in each round"


def test_pages_in_the_interpreter():
    triton_tools.run_interpreted(__file__)


TYPES = dict(min_keys="*bf16", max_keys="*bf16", logits="*u8", peaks="*fp32", sums="*fp32", factors="*fp32")
TYPES |= dict(context_lens="*i64", positions="*i64", sinks="*fp32", scores="*fp32", scales="*fp32")
COMPILED = [
    *(
        (
            "_summarise_kernel",
            dict(keys=f"*{keys}", offsets="*i64", blocks="*i64", num_verified="*i64"),
            dict(HEAD_SIZE=128, PAGE_SIZE=16, HEAD_PADDED=128, PAGE_PADDED=16, LIMIT=448.0),
        )
        for keys in ("bf16", "fp8e4nv", "fp8e5")
    ),
    *(
        (
            "_logits_kernel",
            dict(min_keys=f"*{keys}", max_keys=f"*{keys}", queries="*bf16")
            | dict(query_rows="*i64", block_table="*i32"),
            dict(NUM_QUERIES=17, NUM_ROWS=68, BLOCK_ROWS=16, HEAD_SIZE=size, HEAD_PADDED=size, SPLIT=split)
            | dict(GROUP=4, PAGE_SIZE=16, STEPS=8),
        )
        for keys in ("bf16", "fp8e4nv")
        for size, split in ((128, 128), (256, 64))
    ),
    (
        "_factors_kernel",
        {},
        dict(NUM_QUERIES=5, NUM_ROWS=20, GROUP=4, BLOCK_ROWS=16, SPLITS_PADDED=64, SINKS=True),
    ),
    ("_scores_kernel", {}, dict(ALL_ROWS=160, PAGE_SIZE=16, BLOCK_ROWS=64, SPLIT=128, STEPS=8)),
]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("kernel", "pointers", "constants"), COMPILED)
def test_kernels_compile_and_fit_in_shared_memory(kernel, pointers, constants):
    pytest.importorskip("triton")
    from vllm_magicdec.policies import verify_topk_kernels

    function = getattr(verify_topk_kernels, kernel)
    types = {name: type_ for name, type_ in TYPES.items() if name in function.arg_names} | pointers
    for capability in (89, 90):
        compiled = triton_tools.compile_for(capability, function, types, constants)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.gpu
@settings(max_examples=20, deadline=None)
@cases
def test_pages_compiled(**case: object) -> None:
    check(**case, device="cuda")


if __name__ == "__main__":
    main()
