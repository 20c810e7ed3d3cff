# SPDX-License-Identifier: Apache-2.0
"""docs/models.md agrees with the matrix."""

import models_page


def test_the_page_is_up_to_date():
    assert models_page.PAGE.read_text() == models_page.page(), "run make docs-models"
