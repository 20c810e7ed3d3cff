# SPDX-License-Identifier: Apache-2.0
"""The KV cache's memory in huge pages."""

import pytest
import torch
from huge_memory import bytes_in_huge_pages

from vllm_magicdec.native import huge_pages

needs_huge_pages = pytest.mark.skipif(
    not huge_pages.on_demand(), reason="this machine gives huge pages to all, or to none"
)


@needs_huge_pages
def test_all_memory_behind_a_view_lies_in_huge_pages_and_is_zero():
    memory = torch.zeros(64 * 2**20, dtype=torch.int8)
    assert bytes_in_huge_pages(memory) == 0
    assert huge_pages.move_to_huge_pages(memory.view(torch.bfloat16).view(8, -1)[3])
    assert bytes_in_huge_pages(memory) >= 60 * 2**20  # but for what is left at both ends
    assert not memory.any()
    memory[-1] = 1
    assert memory.sum() == 1


@needs_huge_pages
def test_memory_that_fills_none_stays_where_it_is():
    memory = torch.zeros(2**19, dtype=torch.int8)
    assert not huge_pages.move_to_huge_pages(memory)
    assert not memory.any()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("always madvise [never]", False),
        ("[always] madvise never", False),
        ("always [madvise] never", True),
    ],
)
def test_who_gets_huge_pages_anyway_or_never_is_not_moved(tmp_path, monkeypatch, setting, expected):
    (tmp_path / "enabled").write_text(setting + "\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages.on_demand() is expected


def test_a_system_without_them_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path / "nowhere")
    assert not huge_pages.on_demand()
