# SPDX-License-Identifier: Apache-2.0
"""`magicdec simulate`, and the step times it goes by."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from imagined_engine import BUDGET, Engine

from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.planner.console import UserError, main
from vllm_magicdec.planner.engine_times import (
    PredictedTimes,
    ProfiledTimes,
    PromptTimes,
    TimedChunk,
    Work,
    pairs_of,
)
from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Deployment
from vllm_magicdec.planner.simulate import percentile

pytest.importorskip("simpy")
pytest.importorskip("rich")

PER_PASS, PER_TOKEN, PER_PAIR = 2e-3, 5e-5, 1e-8
SLOWER = 1.25  # to be read by an engine that drafts
NOTHING = Work(0, 0, 0.0, 0, 0.0, 0, 0, 0)


def prompt_seconds(tokens, before):
    return PER_PASS + PER_TOKEN * tokens + PER_PAIR * pairs_of(tokens, before)


@pytest.fixture
def profile(tmp_path) -> Path:
    """As `magicdec profile` would write it on the imagined machine."""
    engine, times = Engine(), StepTimes()
    for num_reqs in (1, 4, 8):
        for context in (256, 2048):
            for verified in (0, 2, 4):
                for drafted in (0, 2, 4):
                    step = Step(num_reqs, num_reqs * context, verified, drafted, BUDGET if drafted else 0)
                    times.add(TimedStep(step, engine.seconds(step)))
    times.fit()
    chunks = [
        (256, 0, 4, BUDGET),
        (2048, 0, 0, 0),
        (2048, 0, 4, BUDGET),
        (2048, 2048, 2, 64),
        (500, 4096, 0, 0),
    ]
    rows = [
        {
            "prompt_tokens": tokens,
            "context_tokens": before,
            "drafts": drafts,
            "budget": budget,
            "seconds": SLOWER * prompt_seconds(tokens, before)
            + drafts * times.pass_seconds(1, tokens + before, budget),
        }
        for tokens, before, drafts, budget in chunks
    ]
    plain = [
        {"prompt_tokens": n, "context_tokens": before, "seconds": prompt_seconds(n, before)}
        for n, before, _, _ in chunks
    ]
    path = tmp_path / "profile.json"
    times.save(path, {"prompts": plain, "drafting_prompts": rows})
    return path


# ---- step times


def test_pairs_are_counted():
    for tokens, before in ((1, 0), (4, 0), (3, 7)):
        assert pairs_of(tokens, before) == sum(before + place + 1 for place in range(tokens))


def test_prompts_are_fitted():
    fitted = PromptTimes.of(
        [
            TimedChunk(prompt_tokens=tokens, context_tokens=before, seconds=prompt_seconds(tokens, before))
            for tokens, before in [(100, 0), (1000, 0), (1000, 3000)]
        ]
    )
    assert (fitted.per_pass, fitted.per_token, fitted.per_pair) == pytest.approx(
        (PER_PASS, PER_TOKEN, PER_PAIR), rel=1e-3
    )
    assert fitted.seconds(700, pairs_of(700, 100)) == pytest.approx(prompt_seconds(700, 100), rel=1e-3)


ROUND = NOTHING._replace(
    decoding=4, context_tokens=4 * 2048, verified=4, drafting=4, drafts=4, drafting_tokens=4 * 2048
)
PROMPT = NOTHING._replace(prompt_tokens=512, prompt_pairs=pairs_of(512, 0))


@pytest.mark.parametrize("verified", [0, 4])
def test_a_profile_s_rounds(profile, verified):
    times = ProfiledTimes.load(profile)
    assert times.budget == BUDGET
    step = Step(4, 4 * 2048, verified, 4, BUDGET)
    assert times.seconds(ROUND._replace(verified=verified)) == pytest.approx(
        Engine().seconds(step), rel=0.1
    )


def test_a_profile_s_prompts(profile):
    times, plain = ProfiledTimes.load(profile), prompt_seconds(512, 0)
    assert times.seconds(PROMPT) == pytest.approx(plain, rel=0.02)
    beside = ROUND._replace(drafting=0, drafts=0, drafting_tokens=0, verified=0)
    both = beside._replace(prompt_tokens=512, prompt_pairs=pairs_of(512, 0))
    assert times.seconds(both) - times.seconds(beside) == pytest.approx(plain - PER_PASS, rel=0.02)
    # An engine that drafts is slower to read them. Behind a piece that is not the last it drafts nothing.
    piece = PROMPT._replace(drafts=4)
    assert times.seconds(piece) == pytest.approx(SLOWER * plain, rel=0.02)
    both = ROUND._replace(prompt_tokens=512, prompt_pairs=pairs_of(512, 0))
    assert times.seconds(both) - times.seconds(ROUND) == pytest.approx(SLOWER * plain - PER_PASS, rel=0.02)


@pytest.mark.parametrize("ending", [1, 2])
def test_a_profile_s_drafts_behind_prompts(profile, ending):
    times = ProfiledTimes.load(profile)

    def passes(num_reqs, context):
        return 4 * times.steps.pass_seconds(num_reqs, context, BUDGET) if num_reqs else 0.0

    for others, other_tokens in ((NOTHING._replace(drafts=4), 0), (ROUND, 4 * 2048)):
        piece = others._replace(prompt_tokens=512, prompt_pairs=pairs_of(512, 0))
        drafting, tokens = others.decoding + ending, other_tokens + ending * 512
        last = piece._replace(drafting=drafting, drafting_tokens=tokens)
        more = passes(drafting, tokens) - passes(others.decoding, other_tokens)
        assert more > 0
        assert times.seconds(last) - times.seconds(piece) == pytest.approx(more)


def test_predicted_steps_are_those_of_the_plan():
    deployment = Deployment(MODELS["llama-3.1-8b"], HARDWARE["H100"], draft=MODELS["llama-3.2-1b"])
    times = PredictedTimes(deployment, 512)
    plain = NOTHING._replace(decoding=8, context_tokens=8 * 4000)
    assert times.seconds(plain) == pytest.approx(deployment.plain_step_ms(8, 4000) / 1e3)
    a_round = plain._replace(verified=3.0, drafting=8, drafts=3, drafting_tokens=8 * 4000)
    assert times.seconds(a_round) == pytest.approx(deployment.round_ms(3, 8, 4000, 512) / 1e3)
    prompt = NOTHING._replace(prompt_tokens=1000, prompt_pairs=pairs_of(1000, 0))
    both = deployment.prompt_ms(1000) + deployment.drafting.prompt_ms(1000)
    drafted = prompt._replace(drafts=3)
    assert times.seconds(drafted) == pytest.approx(both / 1e3)
    # Plain decoding has no draft model that would read it.
    assert times.seconds(prompt) == pytest.approx(deployment.prompt_ms(1000) / 1e3)


# ---- the command


def run(tmp_path, *arguments):
    file = tmp_path / "out.json"
    assert main(["simulate", *map(str, arguments), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_a_trace_with_a_profile(profile, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.1 * n, "prompt_tokens": 300 + n, "output_tokens": 20} for n in range(30)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    written = run(
        tmp_path,
        "--trace",
        trace,
        "--profile",
        profile,
        "--kv-tokens",
        50_000,
        "--standing",
        "0.9,0.8,0.7,0.6",
    )
    plain, magicdec = written["runs"]
    assert (plain["method"], magicdec["method"]) == ("plain", "magicdec")
    assert plain["requests"] == magicdec["requests"] == 30
    assert plain["acceptance_length"] == 1
    assert magicdec["acceptance_length"] == pytest.approx(4.0, abs=0.3)
    for one in written["runs"]:
        assert one["output_throughput"] * one["duration_s"] == pytest.approx(600)
        assert one["p50_ttft_ms"] <= one["p90_ttft_ms"] <= one["p99_ttft_ms"]
        assert one["p50_e2e_ms"] >= one["p50_ttft_ms"]
    assert "4 drafts per round, 4.00 tokens" in capsys.readouterr().out


def test_rates_with_a_roofline(tmp_path):
    load = (
        "--rate",
        5,
        "inf",
        "--requests",
        60,
        "--prompt",
        "uniform:500:1500",
        "--output",
        "lognormal:60:0.5",
    )
    engines = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "H200",
        "--replicas",
        3,
        "--gamma",
        3,
        "--acceptance",
        0.7,
    )
    written = run(tmp_path, *load, *engines)
    assert [(one["load"], one["method"]) for one in written["runs"]] == [
        ("5 per second", "plain"),
        ("5 per second", "magicdec"),
        ("inf per second", "plain"),
        ("inf per second", "magicdec"),
    ]
    assert written["replicas"] == 3
    assert (
        written["kv_tokens"]
        == [Deployment(MODELS["llama-3.1-8b"], HARDWARE["H200"]).kv_capacity_tokens()] * 2
    )
    again = run(tmp_path, *load, *engines)
    for one, other in zip(written["runs"], again["runs"], strict=True):
        same = {name: value for name, value in one.items() if name not in ("wall_s", "events_per_s")}
        assert same == {name: other[name] for name in same}


def test_percentiles_are_numpy_s():
    values = sorted(np.random.default_rng(1).random(37).tolist())
    for percent in (0, 3, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "say --profile FILE, or --model and --gpu"),
        (("--model", "llama-3.1-8b", "--gpu", "H200"), "say either --trace FILE or --rate REQUESTS_PER_S"),
        (
            ("--profile", "nothing.json"),
            "a profile does not say how much K/V memory there is; say --kv-tokens",
        ),
        (
            ("--profile", "nothing.json", "--kv-tokens", "9", "--model", "llama-3.1-8b"),
            "leave out --model and --gpu",
        ),
        (("--profile", "nothing.json", "--kv-tokens", "9"), "nothing.json is not a profile written by"),
        (
            ("--model", "llama-3.1-8b", "--gpu", "H200", "--rate", "1", "--kv-tokens", "500"),
            "does not fit into K/V memory for 500",
        ),
        (
            ("--model", "llama-3.1-8b", "--gpu", "H200", "--rate", "1", "--acceptance", "2"),
            "--acceptance 2 is not a probability between 0 and 1",
        ),
        (
            (
                "--model",
                "llama-3.1-8b",
                "--gpu",
                "H200",
                "--rate",
                "1",
                "--requests",
                "1",
                "--json",
                "/no/x",
            ),
            "cannot write /no/x",
        ),
    ],
)
def test_what_cannot_work_ends_in_one_sentence(arguments, sentence, capsys):
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error


def test_an_older_profile_and_another_budget(profile, tmp_path):
    with pytest.raises(UserError, match="has no draft steps of a budget of 100"):
        ProfiledTimes.load(profile, 100)
    profile.write_text(
        json.dumps(
            {n: rows for n, rows in json.loads(profile.read_text()).items() if n != "drafting_prompts"}
        )
    )
    with pytest.raises(
        UserError, match="has no times of prompts with and without drafts; measure it again"
    ):
        ProfiledTimes.load(profile)


DAMAGES = {
    "prompt_tokens": (0, -5, 0.5, 1e400, 10**200, None, "4", True),
    "context_tokens": (-1, 0.5, math.nan),
    "drafts": (-3, 0.5, "4"),
    "budget": (-5, math.inf),
    "seconds": (0.0, -1.0, math.nan, math.inf, 1e308, "1", None, []),
    "else": (1,),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["prompts", "drafting_prompts"])
def test_prompts_that_cannot_have_been_measured(profile, name):
    content = json.loads(profile.read_text())
    rows = content[name]
    damaged = [{**rows[0], field: value} for field, values in DAMAGES.items() for value in values]
    damaged += [{n: value for n, value in rows[0].items() if n != "seconds"}, None, 3, [], "row"]
    for wrong in (None, [], {}, 3, "rows", rows[0], *([*rows, row] for row in damaged)):
        profile.write_text(json.dumps({**content, name: wrong}))
        with pytest.raises(
            UserError, match="has no times of prompts with and without drafts; measure it again"
        ):
            ProfiledTimes.load(profile)


@pytest.mark.parametrize(
    "option",
    [
        ("--rate", "0"),
        ("--rate", "x"),
        ("--standing", "0.5,0.6"),
        ("--prompt", "many"),
        ("--frontend-ms", "-1"),
        ("--frontend-ms", "nan"),
        ("--frontend-ms", "inf"),
        ("--frontend-ms", "soon"),
    ],
)
def test_values_that_cannot_be_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", *option])
    assert option[1] in capsys.readouterr().err


def test_simpy_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "simpy", None)
    assert main(["simulate", "--model", "llama-3.1-8b", "--gpu", "H200", "--rate", "1"]) == 2
    assert "this needs simpy; try: pip install 'vllm-magicdec[bench]'" in capsys.readouterr().err


def test_a_front_end_is_added_to_first_tokens(tmp_path):
    common = ("--model", "llama-3.1-8b", "--gpu", "H200", "--rate", 0.1, "--requests", 5)
    without, with_it = (run(tmp_path, *common, *more)["runs"] for more in ((), ("--frontend-ms", "25")))
    for one, other in zip(without, with_it, strict=True):
        assert other["p50_ttft_ms"] == pytest.approx(one["p50_ttft_ms"] + 25)
        assert other["p50_tpot_ms"] == pytest.approx(one["p50_tpot_ms"])


def test_what_is_not_known_is_null(tmp_path):
    """An answer of one token has no time per token after it."""
    written = run(
        tmp_path, "--model", "llama-3.1-8b", "--gpu", "H200", "--rate", 5, "--requests", 3, "--output", 1
    )
    assert [one["p50_tpot_ms"] for one in written["runs"]] == [None, None]
    assert "NaN" not in (tmp_path / "out.json").read_text()
