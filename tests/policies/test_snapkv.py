# SPDX-License-Identifier: Apache-2.0
"""SnapKV's scores against a slow reference written from the paper's formulas, in float64."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import snapkv_scores

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
    st.integers(0, 2**31),
)
def test_scores_equal_the_papers_formula(heads, window, before, garbage, kernel, pooling, seed):
    num_heads, num_kv_heads = heads
    length = window + before
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(num_heads, window, 8))
    keys = rng.normal(size=(num_kv_heads, length + garbage, 8))
    fields = SimpleNamespace(
        draft_kv_refresh=None,
        snapkv_window=window,
        snapkv_recent=0,
        snapkv_kernel=kernel,
        snapkv_pooling=pooling,
    )
    observation = Observation(
        queries=torch.from_numpy(queries).transpose(0, 1).float(),
        keys=torch.from_numpy(keys).float(),
        length=torch.tensor(length),
        scale=8**-0.5,
        soft_cap=0.0,
    )
    scores = SnapKV(fields).score(observation)
    expected = snapkv_scores(queries, keys[:, :length], window, kernel, pooling)
    np.testing.assert_allclose(scores[:, :before].numpy(), expected, rtol=1e-4, atol=1e-6)
