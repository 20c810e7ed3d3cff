# SPDX-License-Identifier: Apache-2.0
"""Policies of other packages: found by entry point, refused in one sentence when they are none."""

import example_policy
import pytest

from vllm_magicdec.policies import TokenPolicy, VerificationPolicy, find_policy


@pytest.fixture
def installed(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)


def test_an_entry_point_is_a_policy(installed):
    assert issubclass(find_policy("strided"), TokenPolicy)
    assert issubclass(find_policy("first-key"), VerificationPolicy)


def test_other_classes_are_refused_as_policies(installed):
    with pytest.raises(ValueError, match="no subclass of PagePolicy, TokenPolicy or VerificationPolicy"):
        find_policy("broken")
    with pytest.raises(
        ValueError, match="use one of streamingllm, snapkv, verify-topk, broken, first-key, strided"
    ):
        find_policy("stridden")
