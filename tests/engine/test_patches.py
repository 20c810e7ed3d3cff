# SPDX-License-Identifier: Apache-2.0
"""The patches apply to the tested vLLM; the plugin then uses its registry and fixes nothing itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest
import vllm
from draft_engines import TINY_SPIRE, V2_ENGINE, drafting_with, few, on_v2
from engines import magicdec
from greedy import assert_same_tokens

from vllm_magicdec.vllm_api.hooks import HOOKS_BESIDE_REGISTRY

pytestmark = pytest.mark.extended

VERSION = vllm.__version__.partition("+")[0]
PATCHES = sorted((Path(__file__).parents[2] / "patches" / f"vllm-{VERSION}").glob("*.patch"))

SHOW_WRAPS = """
import vllm
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.spec_decode.registry import find_by_fields
from vllm_magicdec import hooking
print(vllm.__file__)
print([find_by_fields({"method": name}) is not None for name in ("magicdec-self", "magicdec", "eagle")])
print([one.target for one in hooking.installed()])
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(parser.parse_args(["--speculative-model", "magicdec-self"]).spec_model)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """The folder of a vLLM whose Python files are patched copies; the rest is linked."""
    assert PATCHES, f"none for vLLM {VERSION}"
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


@pytest.fixture
def patched_tree(patched, monkeypatch) -> Path:
    """The patched vLLM, which new processes import."""
    monkeypatch.setenv("PYTHONPATH", str(patched), prepend=os.pathsep)
    return patched


def test_the_plugin_wraps_only_what_the_registry_does_not_cover(patched_tree):
    result = subprocess.run([sys.executable, "-c", SHOW_WRAPS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    shown = result.stdout.splitlines()[-4:]
    module, wrapped = patched_tree / "vllm" / "__init__.py", [hook.target for hook in HOOKS_BESIDE_REGISTRY]
    assert shown == [str(module), "[True, True, False]", str(wrapped), "magicdec-self"]


def test_attention_on_the_patched_tree_is_right(patched_tree):
    module = patched_tree / "vllm" / "v1" / "attention" / "backends" / "cpu_attn.py"
    assert "_group_sliding_window" not in module.read_text(), "`refuse_if_inexact` accepts it"
    engines.run_tests("plans_by_window.py", "-k", "right")


def test_an_engine_on_the_patched_tree_drafts_losslessly(patched_tree, plain, prompts):
    batch, expected = few(prompts, plain, number=4, below=600)
    run = engines.generate(
        **batch,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        speculative_config=magicdec(3, draft_kv_budget=engines.MODEL_LEN),
    )
    assert_same_tokens(expected, run.results[0][0], "patched vLLM")
    assert run.accepted == run.drafted > 0
    assert "Replaced vLLM's expand_batch_to_tokens" not in run.log


def test_a_spire_draft_on_the_patched_tree_and_the_v2_runner(patched_tree, plain, prompts):
    batch, expected = on_v2(prompts, plain)
    run = engines.generate(**batch, **V2_ENGINE, speculative_config=drafting_with(TINY_SPIRE))
    assert run.v2_runner
    assert_same_tokens(expected, run.results[0][0], "patched vLLM, SPIRe")
    assert run.draft_failures == 0 and 0 < run.accepted < run.drafted
