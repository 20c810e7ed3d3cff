# SPDX-License-Identifier: Apache-2.0
"""The KV cache's memory in huge pages."""

import mmap

import pytest
import torch
from huge_memory import share_in_huge_pages

from vllm_magicdec.native import huge_pages

needs_huge_pages = pytest.mark.skipif(
    not huge_pages.on_demand(), reason="this machine gives huge pages to all, or to none"
)


@needs_huge_pages
def test_all_memory_behind_a_view_lies_in_huge_pages_and_is_zero():
    memory = torch.zeros(16 * huge_pages._size(), dtype=torch.int8)
    assert huge_pages.move_to_huge_pages(memory.view(torch.bfloat16).view(8, -1)[3])
    assert share_in_huge_pages(memory) > 0.85  # but for what is left at both ends
    assert not memory.any()
    memory[-1] = 1
    assert memory.sum() == 1


@needs_huge_pages
def test_memory_that_fills_none_stays_where_it_is():
    # A mapping of its own: memory of the heap may lie in what an earlier test moved.
    memory = torch.frombuffer(mmap.mmap(-1, huge_pages._size() // 4), dtype=torch.int8)
    assert not huge_pages.move_to_huge_pages(memory)
    assert share_in_huge_pages(memory) == 0 and not memory.any()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"enabled": "always madvise [never]", "hpage_pmd_size": "2097152"}, False),
        ({"enabled": "[always] madvise never", "hpage_pmd_size": "2097152"}, False),
        ({"enabled": "always [madvise] never", "hpage_pmd_size": "2097152"}, True),
        ({"enabled": "always [madvise] never"}, False),
        ({}, False),
    ],
)
def test_memory_moves_only_with_huge_pages_on_request(tmp_path, monkeypatch, settings, expected):
    for name, content in settings.items():
        (tmp_path / name).write_text(content + "\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages.on_demand() is expected
