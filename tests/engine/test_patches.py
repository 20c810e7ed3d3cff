# SPDX-License-Identifier: Apache-2.0
"""The upstream patches apply to vLLM 0.32.0; the plugin then uses its registry and fixes nothing itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest
import vllm
from engines import magicdec
from greedy import GREEDY, assert_same_tokens

from vllm_magicdec.vllm_api.hooks import HOOKS_BESIDE_REGISTRY

pytestmark = pytest.mark.extended

PATCHES = sorted((Path(__file__).parents[2] / "patches" / "vllm-0.32.0").glob("*.patch"))

SHOW_WRAPS = """
import vllm
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.spec_decode.registry import registered_speculative_methods
from vllm_magicdec.vllm_api import hook
print(vllm.__file__)
print([entry.name for entry in registered_speculative_methods()])
print([one.target for one in hook.installed()])
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(parser.parse_args(["--speculative-model", "magicdec-self"]).spec_model)
"""


@pytest.fixture(scope="module")
def patched_tree(tmp_path_factory) -> Path:
    """A copy of the installed package's Python files, patched; the rest is linked."""
    installed = Path(vllm.__file__).parent
    root = tmp_path_factory.mktemp("patched")
    for source in installed.rglob("*"):
        if "__pycache__" in source.parts or source.is_dir():
            continue
        copy = root / "vllm" / source.relative_to(installed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            shutil.copy(source, copy)
        else:
            copy.symlink_to(source)
    for patch in PATCHES:
        subprocess.run(["git", "apply", str(patch)], cwd=root, check=True, capture_output=True)
    return root


def test_the_plugin_wraps_only_what_the_registry_does_not_cover(patched_tree):
    path = os.pathsep.join([str(patched_tree), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", SHOW_WRAPS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    shown = result.stdout.splitlines()[-4:]
    wrapped = [hook.target for hook in HOOKS_BESIDE_REGISTRY]
    assert len(wrapped) == 11
    assert shown == [
        str(patched_tree / "vllm" / "__init__.py"),
        "['magicdec-self', 'magicdec']",
        str(wrapped),
        "magicdec-self",
    ]


def test_attention_on_the_patched_tree_needs_no_fix_by_the_plugin(patched_tree, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(patched_tree))
    patched = patched_tree / "vllm" / "v1" / "attention" / "backends" / "cpu_attn.py"
    assert "_group_sliding_window" not in patched.read_text(), "`cpu_attention.patch` leaves it alone"
    path = str(engines.HERE / "attention" / "plans_by_window.py")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", "-k", "right", path],
        cwd=engines.HERE.parent,
        env=engines.environment(),
        capture_output=True,
        text=True,
        timeout=engines.TIME_LIMIT_S,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
def test_an_engine_on_the_patched_tree_drafts_losslessly(patched_tree, plain, prompts, monkeypatch, v2):
    monkeypatch.setenv("PYTHONPATH", str(patched_tree))
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 600][:4]
    run = engines.generate(
        [prompts[i] for i in chosen],
        GREEDY,
        v2=v2,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        speculative_config=magicdec(3, draft_kv_budget=engines.MODEL_LEN),
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "patched vLLM")
    assert run.accepted == run.drafted > 0
    assert "Replaced vLLM's expand_batch_to_tokens" not in run.log
