# SPDX-License-Identifier: Apache-2.0
"""The KV cache's memory in huge pages."""

import pytest
import torch
from huge_memory import share_in_huge_pages

from vllm_magicdec.attention import native_attention
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
    memory = torch.zeros(huge_pages._size() // 4, dtype=torch.int8)
    assert not huge_pages.move_to_huge_pages(memory)
    assert share_in_huge_pages(memory) == 0 and not memory.any()


@pytest.mark.parametrize("moves", [True, False])
def test_a_layer_is_bound_whether_its_memory_moves_or_not(monkeypatch, moves):
    monkeypatch.setattr(huge_pages, "move_to_huge_pages", lambda memory: moves)
    bound, memory = [], torch.zeros(4)
    native_attention._bind_in_huge_pages(bound.append, memory)
    assert len(bound) == 1 and bound[0] is memory


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("always madvise [never]", False),
        ("[always] madvise never", False),
        ("always [madvise] never", True),
    ],
)
def test_memory_moves_only_with_huge_pages_on_request(tmp_path, monkeypatch, setting, expected):
    (tmp_path / "enabled").write_text(setting + "\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages.on_demand() is expected


@pytest.mark.parametrize("known", [[], ["enabled"]])
def test_a_system_with_unknown_page_size_has_no_huge_pages(tmp_path, monkeypatch, known):
    for name in known:
        (tmp_path / name).write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert not huge_pages.on_demand()
