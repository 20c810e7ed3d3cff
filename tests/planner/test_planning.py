# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan`: its table, files and errors."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_magicdec.planner.console import main
from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Costs, Deployment

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"


def plan(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_json_has_what_the_model_predicts(tmp_path):
    file = tmp_path / "plan.json"
    grid = ("--batch", 32, 8, "--context", 4000, 32000)
    choices = ("--budget", 256, 512, "--acceptance", 0.7, 0.8, "--max-gamma", 5)
    assert plan("--model", "llama-3.1-8b", "--gpu", "H100", "--tp", 4, *grid, *choices, "--json", file) == 0
    written = json.loads(file.read_text())
    deployment = Deployment(MODELS["llama-3.1-8b"], HARDWARE["H100"], 4)
    alphas = {256: 0.7, 512: 0.8}
    assert written["model"] == asdict(deployment.shape)
    assert written["hardware"] == asdict(deployment.hardware)
    assert written["costs"] == asdict(Costs())
    assert written["acceptance"] == {"256": 0.7, "512": 0.8}
    assert written["kv_capacity_tokens"] == deployment.kv_capacity_tokens()
    assert written["inflection_contexts"] == {
        str(batch): deployment.inflection_context(alphas, 5, batch) for batch in (8, 32)
    }
    cells = [(cell["batch"], cell["context"]) for cell in written["cells"]]
    assert cells == [(8, 4000), (8, 32000), (32, 4000), (32, 32000)]
    for cell in written["cells"]:
        at = cell["batch"], cell["context"]
        best = deployment.best(alphas, 5, *at)
        assert (cell["gamma"], cell["budget"], cell["speedup"]) == (best.gamma, best.budget, best.speedup)
        assert cell["plain_step_ms"] == deployment.plain_step_ms(*at)
        assert cell["draft_step_ms"] == deployment.draft_step_ms(*at, best.budget)
        assert cell["verify_ms"] == deployment.verify_ms(best.gamma, *at)
        assert cell["free_queries"] == deployment.free_queries(*at)


def test_table_marks_cells_beyond_capacity_and_inflections(capsys):
    pytest.importorskip("rich")
    command = ("--model", "llama-2-7b", "--gpu", "a100", "--batch", 1, 64, "--context", 4096, 16384)
    assert plan(*command) == 0
    printed = capsys.readouterr().out
    deployment = Deployment(MODELS["llama-2-7b"], HARDWARE["A100"])
    capacity = deployment.kv_capacity_tokens()
    assert 64 * 4096 > capacity > 16384  # the case is one where batch 64 fits at neither context
    assert f"K/V capacity: {capacity:,} tokens; cells with * are beyond it." in printed
    marked = re.findall(r"│ +(\d+) │ +([\d,]+) \* │", printed)
    assert marked == [("64", "4,096"), ("64", "16,384")]
    at = deployment.inflection_context({512: 0.8}, 8, 64)
    assert f"S_inflection at batch 64: pays from {at:,} tokens of context." in printed
    assert HARDWARE["A100"].source in printed


def planned(tmp_path, *arguments: object) -> dict:
    file = tmp_path / "plan.json"
    assert plan(*arguments, "--batch", 1, "--context", 4096, "--json", file) == 0
    return json.loads(file.read_text())


def test_model_from_a_directory_or_file_with_given_bytes(tmp_path):
    pytest.importorskip("rich")
    for model in (TINY_LLAMA, TINY_LLAMA / "config.json"):
        given = ("--gpu", "L40", "--kv-bytes", 1, "--weight-bytes", 0.5)
        shape = planned(tmp_path, "--model", model, *given)["model"]
        assert (shape["name"], shape["num_layers"]) == ("tiny-llama", 6)
        assert (shape["weight_bytes"], shape["kv_bytes"]) == (0.5, 1)


def test_this_machine_is_measured_with_efficiencies_of_1(tmp_path, capsys):
    pytest.importorskip("rich")
    written = planned(tmp_path, "--model", TINY_LLAMA, "--gpu", "this")
    assert written["hardware"]["source"] == "measured here"
    assert written["costs"]["memory_efficiency"] == written["costs"]["compute_efficiency"] == 1
    assert "measured here" in capsys.readouterr().out


def test_measured_costs_replace_the_defaults(tmp_path):
    costs = {"attention_memory_efficiency": 0.25, "layer_overhead_us": 400}
    written = planned(tmp_path, "--model", TINY_LLAMA, "--gpu", "L40", "--costs", json.dumps(costs))
    assert written["costs"] == asdict(Costs()) | costs


MODEL = ("--model", "llama-3.1-8b")
GPU = ("--gpu", "H200")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llama-3.1-8", *GPU), "there is no model 'llama-3.1-8'; did you mean 'llama-3.1-8b'?"),
        (("--model", "zzz", *GPU), "there is no model 'zzz'; use one of llama-2-7b,"),
        ((*MODEL, "--gpu", "h20"), "there is no GPU 'h20'; did you mean 'H200'?"),
        ((*MODEL, *GPU, "--tp", 3), "32 attention heads cannot be divided over 3 devices; use a divisor"),
        ((*MODEL, *GPU, "--budget", 256, 512), "2 budgets need 2 acceptance rates and there are 1"),
        ((*MODEL, *GPU, "--budget", 512, 512, "--acceptance", 0.7, 0.8), "budget 512 is given twice"),
        ((*MODEL, *GPU, "--json", "/nowhere/plan.json"), "cannot write /nowhere/plan.json"),
        (("--model", str(ROOT / "tests"), *GPU), "there is no config.json in"),
        (("--model", str(ROOT / "README.md"), *GPU), "README.md: it is not JSON"),
        (
            (*MODEL, *GPU, "--png=plan.png"),
            "'magicdec plan --png' was removed; draw the numbers that --json",
        ),
        ((*MODEL, *GPU, "--ideal"), "'magicdec plan --ideal' was removed; replace constants with --costs"),
        ((*MODEL, *GPU, "--draft", "llama-3.2-1"), "no model 'llama-3.2-1'; did you mean 'llama-3.2-1b'?"),
        (
            (*MODEL, *GPU, "--draft", TINY_LLAMA, "--tp", 8),
            "the draft's 4 attention heads cannot be divided",
        ),
        ((*MODEL, *GPU, "--acceptance-length", 3), "--acceptance-length needs --gamma"),
        ((*MODEL, *GPU, "--gamma", 4, "--acceptance-length", 6), "give an --acceptance-length from 1 to 5"),
        (
            (*MODEL, *GPU, "--gamma", 4, "--acceptance-length", 3, "--acceptance", 0.8),
            "--acceptance and --acceptance-length exclude each other; use one of them",
        ),
    ],
)
def test_invalid_options_end_in_one_sentence(arguments, sentence, capsys):
    assert main(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert sentence in captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--acceptance", 1.2), "'1.2' is not a probability between 0 and 1"),
        (("--acceptance", "nan"), "'nan' is not a probability between 0 and 1"),
        (("--batch", 0), "'0' is not a whole number above 0"),
        (("--context", "4k"), "'4k' is not a whole number above 0"),
        (("--kv-bytes", "two"), "'two' is not a number"),
        (("--weight-bytes", 0), "'0' is not a number of bytes"),
        *(
            (("--costs", costs), f"'{costs}' is not a JSON object of numbers above 0 named")
            for costs in ("{", '{"speed": 1}', '{"memory_efficiency": 0}', '{"memory_efficiency": "1"}')
        ),
    ],
)
def test_invalid_values_are_refused_while_parsing(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        plan(*MODEL, *GPU, *arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert plan(*MODEL, *GPU) == 2
    assert capsys.readouterr().err == "error: this needs rich; try: pip install 'vllm-magicdec[bench]'\n"


def test_needs_neither_vllm_nor_torch():
    code = (
        "import sys; from vllm_magicdec.planner.console import main; "
        "status = main(['plan', '--model', 'llama-2-7b', '--gpu', 'H200', '--batch', '1']); "
        "sys.exit(status or ', '.join({'vllm', 'torch'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
