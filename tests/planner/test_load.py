# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan --load`: against Little's law, a simulation of the same engine, and counts by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_magicdec.planner import traces
from vllm_magicdec.planner.console import main
from vllm_magicdec.planner.engine_times import PredictedTimes
from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.load import Replica, plan_load
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Deployment, tokens_per_round
from vllm_magicdec.planner.simulation import PLAIN, Limits, Speculation, simulate
from vllm_magicdec.planner.traces import Lengths

ROOT = Path(__file__).resolve().parents[2]
LLAMA = Deployment(MODELS["llama-3.1-8b"], HARDWARE["H200"])
ALPHAS = {512: 0.8}


def test_by_hand():
    plain, drafted = plan_load(LLAMA, ALPHAS, (3, 3), 20.0, [16000], 200, max_num_seqs=32, utilization=0.5)
    prompt_ms = LLAMA.prompt_ms(16000)
    most = 1e3 / (prompt_ms + 200 * LLAMA.plain_step_ms(32, 16100) / 32)
    assert (plain.method, plain.most_in_flight, plain.gamma) == ("plain", 32, 0)
    assert plain.most_per_s == pytest.approx(most)
    assert plain.replicas == plain.devices == math.ceil(20 / (most * 0.5))
    token_ms = LLAMA.round_ms(3, 32, 16100, 512) / tokens_per_round(3, 0.8)
    assert drafted.most_per_s == pytest.approx(1e3 / (prompt_ms + 200 * token_ms / 32))
    assert (drafted.gamma, drafted.budget) == (3, 512)


@pytest.mark.parametrize("load", [1.0, 7.0, 130.0])
def test_little_s_law_and_the_load(load):
    for row in plan_load(LLAMA, ALPHAS, (1, 8), load, [1000, 8000, 64000], 300):
        assert row.in_flight == pytest.approx(load * row.e2e_ms / 1e3)
        assert row.in_flight / row.replicas <= row.most_in_flight
        assert row.replicas * row.most_per_s * 0.8 >= load * (1 - 1e-9)
        assert (row.replicas - 1) * row.most_per_s * 0.8 < load
        assert row.tpot_ms < row.e2e_ms / 300  # which has its own prompt


def test_the_time_per_token_leaves_out_the_prompt_before_the_first():
    (alone, _) = plan_load(LLAMA, ALPHAS, (1, 1), 0.01, [32000], 4, max_num_seqs=1)
    assert alone.tpot_ms == pytest.approx(LLAMA.plain_step_ms(1, 32002))
    assert alone.e2e_ms == pytest.approx(LLAMA.prompt_ms(32000) + 4 * alone.tpot_ms)
    limits = {"max_num_seqs": 1, "max_tpot_ms": 1.01 * alone.tpot_ms}
    assert plan_load(LLAMA, ALPHAS, (1, 1), 0.01, [32000], 4, **limits)[0].fits


def test_a_prompt_by_hand():
    """No logits but of its last token, which are not counted; windows cut what layers see."""
    shape, costs = LLAMA.shape, LLAMA.costs
    body = shape.num_layers * (shape.attention_parameters + shape.expert_parameters)
    (compute, _) = LLAMA.linear_ms(8000, 8000)
    per_s = LLAMA.hardware.flops * costs.compute_efficiency
    assert compute == pytest.approx(2 * body * 8000 / per_s * 1e3)
    near = replace(LLAMA, shape=replace(shape, num_window_layers=16, window=1000))
    full, cut = (one.prompt_attention_ms(8000, 8000 * 8001 / 2) for one in (LLAMA, near))
    assert cut / full == pytest.approx(0.5 + 0.5 * 1000 / 4000.5)


def test_drafts_save_replicas_where_a_step_is_bound_by_k_v():
    short = plan_load(LLAMA, ALPHAS, (1, 8), 500.0, [100], 1000)
    assert short[0].replicas <= short[1].replicas
    longer = plan_load(LLAMA, ALPHAS, (1, 8), 100.0, [16000], 8000)
    assert longer[1].replicas < 0.8 * longer[0].replicas


def test_a_limit_of_time_per_token_takes_more_replicas():
    (free, _), (bound, _) = (
        plan_load(LLAMA, ALPHAS, (1, 4), 50.0, [4000], 500, max_tpot_ms=limit) for limit in (math.inf, 10.0)
    )
    assert free.tpot_ms > 10 >= bound.tpot_ms
    assert free.replicas < bound.replicas


def test_what_fits_nowhere_says_so(capsys):
    tight = replace(LLAMA, hardware=replace(HARDWARE["H200"], memory_gib=20.0))
    rows = plan_load(tight, ALPHAS, (1, 4), 5.0, [60000], 100)
    assert [row.fits for row in rows] == [False, False]


@pytest.mark.parametrize("speculation", [PLAIN, Speculation.of(3, 0.8)])
def test_a_simulation_of_the_same_engine_serves_as_much(speculation):
    """All at once, so that the engine is always full: its throughput is `most_per_s`."""
    deployment = replace(LLAMA, hardware=HARDWARE["H100"])
    replica = Replica(deployment, 4000, 400, *((3, 512, 0.8) if speculation.drafts else ()))
    arrivals = traces.poisson(math.inf, 800, Lengths("4000"), Lengths("400"), seed=1)
    limits = Limits(10**9, max_num_seqs=40, max_num_batched_tokens=8192)
    outcome = simulate(arrivals, PredictedTimes(deployment, 512), limits, speculation, seed=1)
    served = len(arrivals) / max(request.end_s for request in outcome.finished)
    assert served == pytest.approx(1e3 / replica.busy_ms(40), rel=0.08)


def test_command(tmp_path, capsys):
    pytest.importorskip("rich")
    file = tmp_path / "load.json"
    command = ("--model", "llama-3.1-8b", "--gpu", "H200", "--load", "20", "--context", "8000", "32000")
    assert main(["plan", *command, "--output", "300", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [(row["prompt"], row["method"]) for row in written["needs"]] == [
        (8000, "plain"),
        (8000, "magicdec"),
        (32000, "plain"),
        (32000, "magicdec"),
    ]
    printed = capsys.readouterr().out
    assert "20 requests per second: llama-3.1-8b on 1 x H200" in printed
    assert "Acceptance rate assumed: 0.8 at a budget of 512. Answers of 300 tokens." in printed


def test_command_says_what_fits_nowhere(tmp_path, capsys):
    pytest.importorskip("rich")
    command = ("--model", "llama-3.1-70b", "--gpu", "L40", "--load", "1", "--context", "1000")
    file = tmp_path / "load.json"
    assert main(["plan", *command, "--json", str(file)]) == 0
    assert "none fits" in capsys.readouterr().out
    assert "NaN" not in file.read_text()
    assert json.loads(file.read_text())["needs"][0]["ttft_ms"] is None


@pytest.mark.parametrize("option", [("--load", "0"), ("--utilization", "1.5"), ("--max-tpot", "x")])
def test_values_that_cannot_be_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "llama-3.1-8b", "--gpu", "H200", *option])
    assert option[1] in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--output", "100"), ("--max-tpot", "9"), ("--max-num-seqs", "8")])
def test_options_of_a_load_want_one(option, capsys):
    assert main(["plan", "--model", "llama-3.1-8b", "--gpu", "H200", *option]) == 2
    assert f"{option[0]} is of a load; say --load REQUESTS_PER_S, too" in capsys.readouterr().err


def test_documentation_has_what_is_computed():
    rows = plan_load(LLAMA, ALPHAS, (1, 8), 20.0, [8000, 32000], 500)
    plain, drafted, plain_long, drafted_long = (row.devices for row in rows)
    sentence = (
        f"{plain} GPUs plainly and {drafted} with drafts for prompts of 8,000 tokens, {plain_long} and "
        f"{drafted_long} for 32,000"
    )
    assert sentence in (ROOT / "docs" / "performance.md").read_text()
