# SPDX-License-Identifier: Apache-2.0
"""docs/models.md agrees with the matrix."""

import models_page
from engines import POLICIES
from families import FAMILIES, RUNNERS


def test_the_page_is_up_to_date():
    assert models_page.PAGE.read_text() == models_page.page(), "run make docs-models"


def test_every_family_and_policy_is_on_the_page():
    rows = [line for line in models_page.page().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(FAMILIES)
    for family, row in zip(FAMILIES, rows, strict=True):
        name, _, *cells = row.strip("| ").split(" | ")
        assert name.startswith(family.name)
        works = [all(family.refusal(runner, policy) is None for runner in RUNNERS) for policy in POLICIES]
        assert [cell == "yes" for cell in cells] == works
