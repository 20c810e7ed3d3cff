# SPDX-License-Identifier: Apache-2.0
"""Policies of other packages: found by entry point, refused in one sentence when they are none."""

import example_policy
import pytest

from vllm_magicdec.policies import TokenPolicy, find_policy


@pytest.fixture
def installed(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)


def test_an_entry_point_is_a_policy(installed):
    assert issubclass(find_policy("strided"), TokenPolicy)


def test_what_is_no_policy_is_refused(installed):
    with pytest.raises(ValueError, match="no subclass of PagePolicy or TokenPolicy"):
        find_policy("broken")
    with pytest.raises(ValueError, match="use one of streamingllm, snapkv, verify-topk, broken, strided"):
        find_policy("stridden")
