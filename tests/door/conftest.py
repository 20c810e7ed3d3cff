# SPDX-License-Identifier: Apache-2.0
"""A model and a draft for it: their configurations, without weights."""

import pytest
from small_models import write_llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory) -> str:
    return write_llama(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
