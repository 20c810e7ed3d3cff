# SPDX-License-Identifier: Apache-2.0
"""Parametrised tests of which `make test` runs some cases, and `make test-all` every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def extended_except(kept: Any, cases: Iterable[Any]) -> list[Any]:
    """Arguments of `pytest.mark.parametrize`: every case but `kept` is marked as extended."""
    cases = list(cases)
    assert kept in cases
    return [case if case == kept else pytest.param(case, marks=pytest.mark.extended) for case in cases]
