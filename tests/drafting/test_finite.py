# SPDX-License-Identifier: Apache-2.0
"""Whatever the draft's logits are, a distribution comes of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.drafting.finite import make_finite

INF, NAN = float("inf"), float("nan")
rows = st.lists(
    st.one_of(st.floats(width=16), st.sampled_from([INF, -INF, NAN, 65504.0])), min_size=2, max_size=8
)


@settings(max_examples=300, deadline=None)
@given(
    rows, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([0.01, 1.0, 2.0])
)
def test_probabilities_are_numbers(row, dtype, temperature):
    logits = make_finite(torch.tensor([[*row, 1.0]], dtype=dtype))
    probs = (logits.float() / temperature).softmax(dim=-1)
    assert probs.isfinite().all() and probs.sum().item() == pytest.approx(1.0)
    assert (probs[0, :-1][torch.tensor(row) == -INF] == 0).all(), "what had no chance has none"


def test_logits_that_are_in_order_stay():
    logits = torch.tensor([[1.5, -3.0, -INF, 80.0]])
    assert torch.equal(make_finite(logits.clone()), logits)
