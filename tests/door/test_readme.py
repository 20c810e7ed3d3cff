# SPDX-License-Identifier: Apache-2.0
"""What a reader meets first: a short README, links that lead somewhere, every field and metric explained.

Links within docs/ are checked by `mkdocs build --strict` (`make lint`).
"""

import re
from pathlib import Path

import pytest

from vllm_magicdec.adaptive import metrics
from vllm_magicdec.adaptive.controller import Choice, Forecast
from vllm_magicdec.config import documented_fields

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
def test_relative_links_lead_to_files(page):
    path = ROOT / page
    targets = {target.partition("#")[0] for target in LINK.findall(path.read_text())}
    relative = {target for target in targets if target and "://" not in target}
    assert relative
    missing = [target for target in sorted(relative) if not (path.parent / target).exists()]
    assert not missing


def test_every_field_is_explained():
    rows = set(re.findall(r"^\| `(\w+)` \|", USAGE, re.MULTILINE))
    assert not set(documented_fields()) - rows


@pytest.fixture
def written(monkeypatch) -> set[str]:
    """Names of the samples that the plugin writes."""
    names: set[str] = set()
    monkeypatch.setattr(metrics._MetricsFile, "write", lambda self, _, sample, *rest: names.add(sample))
    metrics.DraftFailures(None).count("selection")
    metrics.LookupCounters(None)
    gauges = metrics.SpeculationGauges(None, budget=512)
    gauges.set(Forecast(Choice(4, 512), speedup=2.0, draft_share=0.1), achieved_speedup=1.9, num_switches=1)
    return names


def test_every_metric_is_explained_and_no_other(written):
    assert len(written) == 19
    assert set(METRIC.findall(USAGE)) == written


def test_metrics_are_written_in_one_module():
    """So that the test above sees all of them."""
    named = [path for path in (ROOT / "vllm_magicdec").rglob("*.py") if "vllm:magicdec" in path.read_text()]
    assert named == [Path(metrics.__file__)]
