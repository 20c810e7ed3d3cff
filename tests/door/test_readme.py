# SPDX-License-Identifier: Apache-2.0
"""README, links, fields and metrics in the pages; `mkdocs build --strict` checks links within docs/."""

import re
from pathlib import Path

import pytest

from vllm_magicdec.adaptive import metrics
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.config.fields import documented_fields

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"]
USAGE = (ROOT / "docs" / "usage.md").read_text()

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
METRIC = re.compile(r"vllm:magicdec_[a-z_]*[a-z]\b")


def test_readme_is_short_and_has_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    for command in ("make demo", "make test"):
        assert re.search(rf"^{command}\b", readme, re.MULTILINE), command


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page):
    path = ROOT / page
    targets = {target.partition("#")[0] for target in LINK.findall(path.read_text())}
    relative = {target for target in targets if target and "://" not in target}
    assert relative
    missing = [target for target in sorted(relative) if not (path.parent / target).exists()]
    assert not missing


def test_every_field_is_documented():
    rows = set(re.findall(r"^\| `(\w+)` \|", USAGE, re.MULTILINE))
    assert not set(documented_fields()) - rows


def test_exactly_the_exported_metrics_are_documented():
    fields = {"method": "magicdec-self", "draft_lookup": "on", "num_speculative_tokens": "auto"}
    counters, gauges = metrics.shown_metrics(MagicDecSpeculativeConfig(**fields))
    shown = {f"vllm:magicdec_{name}_total" for name in (*counters, "failures")}
    shown |= {f"vllm:magicdec_{name}" for name in gauges}
    assert len(shown) == 23
    assert set(METRIC.findall(USAGE)) == shown
