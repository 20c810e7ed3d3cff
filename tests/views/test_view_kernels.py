# SPDX-License-Identifier: Apache-2.0
"""The kernels that prepare rounds on a GPU pass the tests of what they replace, in the interpreter."""

from collections.abc import Callable

import pytest
import test_layer_pages
import test_pages
import test_tokens
import triton_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.views import layer_pages, pages, tokens


def test_rounds_by_kernels_are_those_of_the_reference():
    triton_tools.run_interpreted(__file__)


def rerun(test: Callable[..., None], *strategies: st.SearchStrategy) -> None:
    settings(max_examples=40, deadline=None)(given(*strategies)(test.hypothesis.inner_test))()


def main() -> None:
    from vllm_magicdec.views import kernels

    names = ("write_page_round", "write_token_round")
    calls = triton_tools.noted_calls(kernels, names)
    for module in (pages, tokens, layer_pages):
        module.has_kernels = lambda device: True
    seeds, of_tokens = st.integers(0, 2**31), test_tokens.rounds()
    rerun(test_pages.test_every_step_sees_sinks_and_window_and_writes_to_its_own_slot, test_pages.rounds())
    rerun(
        test_tokens.test_every_step_sees_selection_sinks_and_recent_tokens_also_in_a_pass,
        *(of_tokens, seeds, st.data()),
    )
    rerun(
        test_layer_pages.test_every_step_sees_selected_sink_and_recent_pages,
        *(test_layer_pages.rounds(), seeds),
    )
    assert set(calls) == set(names)


POINTERS = dict(context_lens="*i64", block_table="*i32", positions="*i64", slots="*i64", lens="*i32")
OF_SELECTIONS = {"rows": "*i64", "selected": "*i32", "num_selected": "*i64", "ends": "*i64"}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("kernel", "pointers", "constants"),
    [
        (
            "_page_round_kernel",
            dict(OF_SELECTIONS, selected="*i64", num_pages="*i64", view_tables="*i32"),
            dict(SELECTS=False, PAGE_SIZE=16, STEPS_PADDED=8, PAGES_PADDED=64),
        ),
        (
            "_page_round_kernel",
            dict(OF_SELECTIONS, num_pages="*i64", view_tables="*i32"),
            dict(SELECTS=True, PAGE_SIZE=16, STEPS_PADDED=8, PAGES_PADDED=64),
        ),
        (
            "_token_round_kernel",
            dict(OF_SELECTIONS, tokens="*i64", query_columns="*i64", query_slots="*i32", view_slots="*i32"),
            dict(NUM_KV_HEADS=8, PAGE_SIZE=16, STEPS_PADDED=8, BLOCK=128),
        ),
    ],
)
def test_round_kernels_compile_for_hopper_without_one(kernel, pointers, constants):
    pytest.importorskip("triton")
    from vllm_magicdec.views import kernels

    triton_tools.check_compiles_for_hopper(getattr(kernels, kernel), {**POINTERS, **pointers}, constants)


@pytest.mark.parametrize("view", ["page", "token"])
def test_no_number_of_drafts_compiles_a_kernel_again(view):
    pytest.importorskip("triton")
    from vllm_magicdec.views import kernels

    kernel = getattr(kernels, f"_{view}_round_kernel")
    compiled = {tuple(triton_tools.specialization(kernel, num_steps=number)) for number in (1, 4, 16)}
    assert len(compiled) == 1


if __name__ == "__main__":
    main()
