# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan --draft`: costs of a draft model against SPIRe's numbers and manual counts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_magicdec.planner.console import main
from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import GIB, Costs, Deployment, acceptance_rate
from vllm_magicdec.planner.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
H100 = HARDWARE["H100"]
LLAMA = MODELS["llama-3.1-8b"]
SMALL = MODELS["llama-3.2-1b"]


# ---- against SPIRe (arXiv 2504.06419)


def test_body_parameters_of_spire():
    """The paper's numbers leave out two norms per layer."""
    target = MODELS["spire-67m"]
    assert target.parameters - target.hidden_size == 67_117_056
    assert target.spire_draft().parameters - target.hidden_size == 16_779_264


def test_command_plans_a_spire_draft_at_an_acceptance_length(tmp_path):
    file = tmp_path / "plan.json"
    model = ("--model", "spire-67m", "--draft", "spire", "--weight-bytes", "1", "--kv-bytes", "1")
    cell = ("--batch", "64", "--context", "512", "--budget", "65")
    rounds = ("--gamma", "4", "--acceptance-length", "3.401")
    assert main(["plan", *model, "--gpu", "H100", *cell, *rounds, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    shape = replace(MODELS["spire-67m"], weight_bytes=1.0, kv_bytes=1.0)
    deployment = Deployment(shape, H100, draft=shape.spire_draft())
    alpha = acceptance_rate(4, 3.401)
    assert written["cells"][0]["speedup"] == deployment.speedup(alpha, 4, 64, 512, 65)
    assert written["cells"][0]["gamma"] == 4
    assert written["draft"]["is_spire"]


# ---- counts by hand


def test_a_draft_pass_costs_the_draft_alone():
    deployment = Deployment(LLAMA, H100, 4, draft=SMALL)
    alone = Deployment(SMALL, H100, 4)
    assert deployment.draft_step_ms(8, 32000, 512) == alone.forward_ms(8, 1, 512)
    assert deployment.draft_step_ms(8, 100, 512) == alone.forward_ms(8, 1, 100)
    assert deployment.plain_step_ms(8, 32000) == Deployment(LLAMA, H100, 4).plain_step_ms(8, 32000)
    assert deployment.catch_up_ms(4, 8) == 0


def test_a_spire_pass_projects_to_keys_and_values_twice():
    plain = replace(LLAMA, num_layers=8)
    spire = LLAMA.spire_draft()
    assert (spire.num_layers, spire.hidden_size) == (8, 4096)
    again = 2 * 8 * 2 * 4096 * 8 * 128  # 2 FLOP, layers, K and V, hidden size, heads
    assert spire.linear_flops_per_token == plain.linear_flops_per_token + again
    assert spire.parameters_read(1) == plain.parameters_read(1)


def test_a_spire_draft_catches_up_in_one_call():
    costs = Costs(1.0, 1.0, layer_overhead_us=10.0, token_overhead_us=0.5)
    deployment = Deployment(LLAMA, H100, 1, costs, LLAMA.spire_draft())
    parameters = 8 * 2 * 4096 * 8 * 128
    reading_ms = parameters * 2 / 3.35e12 * 1e3
    assert deployment.catch_up_ms(4, 2) == pytest.approx(reading_ms + 0.010 + 8 * 0.5e-3 * 10)
    computing_ms = 2 * parameters * 5 * 400 / 989e12 * 1e3
    assert deployment.catch_up_ms(4, 400) == pytest.approx(computing_ms + 0.010 + 8 * 0.5e-3 * 2000)


def test_memory_holds_both_models_and_all_pages_of_both():
    deployment = Deployment(LLAMA, H100, 2, draft=SMALL)
    usable = (80 * 0.92 - 2) * GIB
    weights = (LLAMA.parameters + SMALL.parameters) * 2 / 2
    per_token = (32 * 2 * 4 * 128 + 16 * 2 * 4 * 64) * 2  # layers, K and V, heads of a device, size, bytes
    assert deployment.kv_capacity_tokens() == int((usable - weights) / per_token)


def test_a_spire_draft_is_known_by_its_configuration():
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    draft = {**config, "architectures": ["MagicDecSpireForCausalLM"], "num_hidden_layers": 2}
    target = ModelShape.from_config(config)
    assert not target.is_spire
    assert ModelShape.from_config(draft, name="x") == replace(target.spire_draft(), name="x")
