# SPDX-License-Identifier: Apache-2.0
"""SnapKV's scores against a slow reference written from the paper's formulas, in float64."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import snapkv_scores

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies import Observation
from vllm_magicdec.policies.snapkv import SnapKV


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(4, 1), (4, 2), (4, 4)]),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(0, 30),
    st.sampled_from([1, 3, 7]),
    st.sampled_from(["max", "avg"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_scores_equal_the_papers_formula(
    heads, window, before, garbage, kernel, pooling, dtype, has_sinks, seed
):
    num_heads, num_kv_heads = heads
    length = window + before
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(num_heads, window, 8))
    keys = rng.normal(size=(num_kv_heads, length + garbage, 8))
    sinks = 3 * rng.normal(size=num_heads) if has_sinks else None
    queries, keys = (torch.from_numpy(values).to(dtype) for values in (queries, keys))
    fields = SimpleNamespace(draft_kv_refresh=None, snapkv_window=window, snapkv_recent=0)
    fields.snapkv_kernel, fields.snapkv_pooling = kernel, pooling
    observation = Observation(
        queries=queries.transpose(0, 1),
        cache=KVRows.of(torch.cat([keys, keys], dim=-1).unsqueeze(0), "TRITON_ATTN"),  # one page
        blocks=torch.tensor([0]),
        page_size=keys.shape[1],
        length=torch.tensor(length),
        num_seen=seed % (before + 1),
        softmax=Softmax(8**-0.5, sinks=torch.from_numpy(sinks) if has_sinks else None),
    )
    scores = SnapKV(fields).score(observation)
    expected = snapkv_scores(
        queries.double().numpy(), keys[:, :length].double().numpy(), window, kernel, pooling, sinks
    )
    # Logits are rounded to the cache's dtype: 2**-9 of up to 8 or so.
    rtol = 1e-4 if dtype == torch.float32 else 0.04
    np.testing.assert_allclose(scores[:, :before].numpy(), expected, rtol=rtol, atol=1e-6)
