# SPDX-License-Identifier: Apache-2.0
"""Parametrised tests with one case in `make test` and all cases in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def extended_except(kept: Any, cases: Iterable[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, all but `kept` marked as extended."""
    cases = list(cases)
    assert kept in cases
    return [case if case == kept else pytest.param(case, marks=pytest.mark.extended) for case in cases]
