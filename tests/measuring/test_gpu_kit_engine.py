# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu, the engine layer: Eq. 2, goals and problems, models and the stand-in."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
import torch
from short_runs import CELLS
from vllm.v1.attention.ops import triton_unified_attention

from benchmarks.common.policies import POLICIES
from benchmarks.gpu import engine, engine_report, lossless
from benchmarks.gpu.engine_scenarios import why_not
from benchmarks.gpu.eq2 import CellTimes, beside_roofline, paper_rows, speedups
from benchmarks.gpu.models import SHAPES, SMALL_SHAPE, write_model
from benchmarks.gpu.stand_in import accept_synthetically
from vllm_magicdec.planner import profile
from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.performance import Deployment
from vllm_magicdec.planner.shapes import ModelShape

# ---- Eq. 2


def kinds_of(plain: float, draft: float, select: float, gammas: range) -> list[dict]:
    """Steps that take exactly what their parts take; a verification takes a half more per draft."""
    kinds = []
    for v, d in ((v, d) for v in (0, *gammas) for d in (0, *gammas) if 0 in (v, d) or v == d):
        ms = plain + 0.5 * v + (draft * d + select if d else 0)
        kinds.append({"verified": v, "drafted": d, "ms": ms})
    return kinds


def test_eq2_finds_the_times_that_steps_are_made_of():
    times = CellTimes.of(kinds_of(10.0, 2.0, 1.5, range(1, 9)))
    assert (times.plain_ms, times.draft_ms, times.select_ms) == pytest.approx((10.0, 2.0, 1.5))
    assert times.verify_ms == pytest.approx({gamma: 10 + 0.5 * gamma for gamma in range(1, 9)})
    assert times.whole_ms[4] == pytest.approx(times.verify_ms[4] + times.drafting_ms[4])
    assert times.speedup(4, 3.0, selects_every_round=True) == pytest.approx(3.0 * 10 / (4 * 2 + 12 + 1.5))
    assert times.speedup(4, 3.0, selects_every_round=False) == pytest.approx(3.0 * 10 / (4 * 2 + 12))
    # At full acceptance each draft more pays: (gamma + 1) * 10 / (2.5 gamma + 11.5) grows with gamma.
    assert times.best(1.0, selects_every_round=True) == (8, pytest.approx(90 / 31.5))
    assert times.best(0.01, selects_every_round=True)[0] == 1


def test_times_of_a_restless_machine_give_no_speedup():
    kinds = [
        dict(kind, ms=20.0) if (kind["verified"], kind["drafted"]) == (0, 0) else kind
        for kind in kinds_of(10.0, 2.0, 0.0, range(1, 4))
    ]
    assert not CellTimes.of(kinds).is_steady
    result = {
        "status": "ok",
        "shape": "llama-3.1-8b",
        "batch": 16,
        "context": 32000,
        "policy": "streamingllm",
    }
    result |= {"budget": 512, "kinds": kinds, "reason": ""}
    engine_report.add_predictions(result, Deployment(SHAPES["llama-3.1-8b"], HARDWARE["H200"]), [0.8])
    assert not result["is_steady"] and result["speedups"] == []


def test_eq2_on_the_papers_times_gives_the_papers_speedups():
    rows = [row for shape in SHAPES for row in paper_rows(shape)]
    assert len(rows) > 20
    for row in rows:
        gamma = row["gamma"]
        times = CellTimes(
            row["target_ms"], {gamma: row["verify_ms"]}, {gamma: row["draft_ms_total"]}, {gamma: 0.0}
        )
        found = times.speedup(gamma, row["tokens_per_round"], selects_every_round=True)
        # The paper's speedups hold sampling and host work too, which its times do not.
        assert 1 < found / row["speedup"] < 1.07


def test_the_roofline_and_the_paper_stand_beside_their_cell():
    here = Deployment(SHAPES["llama-3.1-8b"], HARDWARE["H200"])
    place = {"batch": 16, "context": 32000, "budget": 512}
    plain, draft = here.plain_step_ms(16, 32000), here.draft_step_ms(16, 32000, 512)
    exact = CellTimes(
        plain,
        {gamma: here.verify_ms(gamma, 16, 32000) for gamma in (1, 2)},
        {gamma: gamma * draft for gamma in (1, 2)},
        {},
    )
    assert beside_roofline(exact, here, **place)["differs"] == []
    slow = CellTimes(1.3 * plain, exact.verify_ms, exact.drafting_ms, {})
    assert beside_roofline(slow, here, **place)["differs"] == ["T_T"]
    given, paper = speedups(exact, here, alphas=[0.8], selects_every_round=True, **place)
    assert given["paper"] is None and given["acceptance_rate"] == pytest.approx(0.8, abs=1e-4)
    assert paper["paper"] == {"table": 2, "gpus": "4xH100", "budget": 256, "speedup": 1.24}
    assert (paper["gamma"], paper["tokens_per_round"]) == (2, 2.36)
    assert not paper["differs"]


def test_steps_that_overlap_are_not_timed():
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=core))
    with pytest.raises(ValueError, match="use async_scheduling=False"):
        profile.measure_cell(llm, 1, 64)


def test_the_clock_waits_for_the_device(monkeypatch):
    finished_at = []

    def synchronize() -> None:
        time.sleep(0.01)
        finished_at.append(time.perf_counter())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    now = profile._when_idle()
    assert finished_at and now >= finished_at[0]


# ---- goals and problems


def goal_cell(**changes: object) -> dict:
    return {
        "status": "ok",
        "shape": "llama-3.1-8b",
        "batch": 24,
        "context": 32768,
        "policy": "streamingllm",
        "budget": 512,
        "plain_ms": 30.0,
        "is_steady": True,
        "drafting_ms": {4: 23.0},
        "verify_ms": {4: 33.0},
        **changes,
    }


def test_the_goals_are_judged_on_their_cell_and_gpu_alone():
    share, ratio = engine_report.judge([goal_cell()], [], "NVIDIA H200")
    assert (share["measured"], ratio["measured"]) == pytest.approx((23 / 4 / 30, 33 / 30))
    assert share["reached"] and ratio["reached"]
    assert not engine_report.judge([goal_cell(drafting_ms={4: 25.0})], [], "NVIDIA H200")[0]["reached"]
    assert not engine_report.judge([goal_cell(verify_ms={4: 35.0})], [], "NVIDIA H200")[1]["reached"]
    for other in ({"batch": 16}, {"budget": 256}, {"policy": "snapkv"}, {"is_steady": False}):
        assert engine_report.judge([goal_cell(**other)], [], "NVIDIA H200") == []
    assert engine_report.judge([goal_cell()], [], "NVIDIA A100-SXM4-80GB") == []
    assert engine_report.judge([goal_cell()], [], "") == []


def test_work_of_the_host_does_not_help_the_goals():
    """The plain step as served is shorter than one that is timed alone."""
    served = {**goal_cell(), "synthetic_acceptance_rate": None, "step_ms": 28.0}
    share, ratio = engine_report.judge([goal_cell()], [served], "NVIDIA H200")
    assert (share["measured"], ratio["measured"]) == pytest.approx((23 / 4 / 28, 1 + 3 / 28))
    assert not share["reached"]


def test_the_speedup_is_judged_where_its_gammas_were_measured():
    cell = goal_cell(drafting_ms={3: 18.0, 4: 23.0, 6: 36.0}, verify_ms={3: 32.0, 4: 33.0, 6: 36.0})
    *_, paper, high = engine_report.judge([cell], [], "NVIDIA H200")
    assert paper["measured"] == pytest.approx(2.8 * 30 / (18 + 32)) and not paper["reached"]
    omega = sum(0.95**place for place in range(7))
    assert high["measured"] == pytest.approx(omega * 30 / (36 + 36)) and not high["reached"]
    cell["drafting_ms"] |= {3: 9.0, 6: 18.0}
    *_, paper, high = engine_report.judge([cell], [], "NVIDIA H200")
    assert paper["reached"] and high["reached"]
    record = {"settings": {"gamma": 4}, "device": "cuda", "times": [], "speed": [], "lossless": []}
    printed = engine_report.make_table({**record, "goals": [paper]})
    assert "gamma 3 and 2.80 tokens per round >= 2.00: 2.049, reached" in printed


def test_attention_backends_are_listed_fastest_verification_first():
    times = []
    for name, slower in (("SLOW_ATTN", 5.0), ("FAST_ATTN", 0.0)):
        kinds = kinds_of(10.0 + slower, 2.0, 0.0, range(1, 5))
        place = {
            "shape": "llama-3.1-8b",
            "batch": 8,
            "context": 4096,
            "budget": 512,
            "policy": "streamingllm",
        }
        used = {"asked_backend": name, "attention_backends": [name], "runner": "v2", "status": "ok"}
        times.append({**place, **used, "kinds": kinds, "reason": ""})
        engine_report.add_predictions(
            times[-1], Deployment(SHAPES["llama-3.1-8b"], HARDWARE["H200"]), [0.8]
        )
    record = {"settings": {"gamma": 4}, "device": "cuda", "goals": [], "speed": [], "lossless": []}
    printed = engine_report.make_table({**record, "times": times})
    assert "T_V(4) / T_T by attention backend" in printed
    assert "FAST_ATTN 12.000 / 10.000 ms = 1.200; SLOW_ATTN 17.000 / 15.000 ms = 1.133" in printed


def test_cells_that_do_not_fit_say_why():
    room = {"max_model_len": 4096, "num_pages": 100, "page_size": 32}
    assert why_not(3, 1056, **room) == ""
    assert why_not(3, 1057, **room) == "3264 tokens of KV cache; the engine has 3200"
    assert why_not(1, 4097, **room) == "4097 tokens per request; the engine takes 4096"


@pytest.mark.parametrize(("accepted", "is_wrong"), [(1950, False), (2400, True), (0, True)])
def test_counters_that_do_not_show_the_synthetic_rate_are_found(accepted, is_wrong):
    # 0.8 + 0.64 + 0.512 = 1.952 accepted drafts per round.
    run = SimpleNamespace(metrics={"vllm:spec_decode_num_drafts": 1000}, accepted=accepted)
    assert (engine.wrong_tokens_per_round(run, 3, 2.952) is not None) == is_wrong


def test_without_a_verified_draft_the_synthetic_rate_was_not_met():
    assert engine.wrong_tokens_per_round(SimpleNamespace(metrics={}, accepted=0), 3, 2.952) is not None


def test_an_engine_that_fails_is_reported(monkeypatch, tmp_path, capsys):
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("engine ended with 1:\nValueError: no such backend\nshutting down")

    monkeypatch.setattr(engines, "run", fail)
    out = tmp_path / "engine.json"
    with pytest.raises(SystemExit) as end:
        engine.main(["--device", "cpu", "--small", "--parts", "times", "--out", str(out)])
    assert end.value.code == 1
    results = json.loads(out.read_text())["times"]
    assert len(results) == len(POLICIES) * len(CELLS)
    assert {result["status"] for result in results} == {"failed"}
    printed = capsys.readouterr().out
    assert "FAILED: small llama, batch 2, context 1024: ValueError: no such backend" in printed


@pytest.mark.parametrize(
    ("tokens", "accepted", "sentence"),
    [
        ([7, 9], 3, "WRONG: greedy output, v1 (float32), snapkv, budget 128"),
        ([7, 8], 4, "LOSSLESS PROVED NOTHING"),
    ],
)
def test_output_that_changes_and_drafts_that_all_stand_end_in_status_1(
    monkeypatch, capsys, tokens, accepted, sentence
):
    def generate(mode: object, prompts: object, sampling: object, **engine: object) -> engines.EngineRun:
        completion = {
            "tokens": tokens if engine else [7, 8],
            "logprobs": [{"7": -0.1, "1": -3.0}, {"8": -0.1, "9": -3.0}],
            "finish_reason": "length",
        }
        metrics = {
            "vllm:spec_decode_num_draft_tokens": 4,
            "vllm:spec_decode_num_accepted_tokens": accepted,
            "vllm:magicdec_draft_failures": 0,
        }
        return engines.EngineRun([[[{"completions": [completion]}]]], metrics, 1, 4, False, False, [], "")

    monkeypatch.setattr(lossless, "_generate", generate)
    with pytest.raises(SystemExit) as end:
        engine.main(["--device", "cpu", "--small", "--parts", "lossless", "--lossless-modes", "v1"])
    assert end.value.code == 1
    assert sentence in capsys.readouterr().out


# ---- bfloat16: every token against the target's own scores

PLAIN = [[(-0.10, -0.10), (-0.52, -0.50)], [(-0.20, -0.20)]]  # (own, best) of one pass over the whole text
DECODED = [[-0.10, -0.49], [-0.20]]  # what decoding had made of the same tokens: 0.03 of rounding


def test_tokens_that_rounding_explains_are_near_ties():
    found = lossless.judge_near_ties(DECODED, PLAIN, [[(-0.10, -0.10), (-0.55, -0.50)], [(-0.20, -0.20)]])
    assert found["near_ties"] == 1
    assert (found["rounding"], found["largest_margin"]) == pytest.approx((0.03, 0.05))


def test_a_token_that_the_target_would_not_have_chosen_is_found_behind_a_near_tie():
    with pytest.raises(AssertionError, match=r"token 0 of request 1 is 0\.0700 behind"):
        lossless.judge_near_ties(DECODED, PLAIN, [[(-0.55, -0.50), (-0.10, -0.10)], [(-0.27, -0.20)]])


def test_where_nothing_is_rounded_no_token_may_be_behind():
    unrounded = [[own for own, _ in scores] for scores in PLAIN]
    equal = [[(-0.10, -0.10), (-0.50, -0.50)], [(-0.20, -0.20)]]
    found = lossless.judge_near_ties(unrounded, PLAIN, equal)
    assert found == {"rounding": 0.0, "near_ties": 0, "largest_margin": 0.0}
    with pytest.raises(AssertionError, match=r"token 1 of request 0 is 0\.0200 behind"):
        lossless.judge_near_ties(unrounded, PLAIN, PLAIN)


def test_rounding_that_would_hide_a_wrong_token_proves_nothing():
    with pytest.raises(AssertionError, match="nothing is proved"):
        lossless.judge_near_ties([[-0.4, -0.5], [-0.2]], PLAIN, PLAIN)


# ---- float32 on a GPU: vLLM's attention is Triton's `tl.dot`

DOT = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

@triton.jit
def dot(a, b, c):
    i = tl.arange(0, 16)
    places = i[:, None] * 16 + i[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))

source = ASTSource(dot, dict.fromkeys("abc", "*fp32"), constexprs={})
print("tf32" in compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_float32_engines_multiply_in_float32(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    seen = {}

    class Process:
        def __init__(self, env, program, cores=()) -> None:
            seen.update(env)

        def run(self, spec: dict, time_limit_s: float) -> None:
            seen["dtype"] = spec["engine"]["dtype"]

        def end(self) -> None:
            pass

    monkeypatch.setattr(engines, "EngineProcess", Process)
    program = tmp_path / "dot.py"
    program.write_text(DOT)
    rounds = {}
    for dtype in ("bfloat16", "float32"):
        seen.clear()
        engines.run([], own_process=True, dtype=dtype)
        assert seen.pop("dtype") == dtype
        env = {**seen, "TRITON_CACHE_DIR": str(tmp_path / "cache")}  # one for both, as on a user's machine
        child = subprocess.run(
            [sys.executable, str(program)], env=env, capture_output=True, text=True, check=True
        )
        rounds[dtype] = child.stdout.strip() == "True"
    assert rounds == {"bfloat16": True, "float32": False}


def test_vllms_attention_leaves_its_precision_to_the_environment():
    source = Path(triton_unified_attention.__file__).read_text()
    assert "tl.dot(" in source and "input_precision" not in source and "allow_tf32" not in source


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu"], "use --device cpu --small"),
        (["--device", "cpu", "--small", "--batch", "4"], "--batch and --context go together"),
        (["--device", "cpu", "--small", "--gamma", "5"], "--gamma must be between 1 and --max-gamma, 3"),
        (["--device", "cpu", "--small", "--acceptance", "80"], "above 0 and at most 1"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        engine.parse(arguments)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


# ---- models and the stand-in


@pytest.mark.parametrize("shape", [*SHAPES.values(), SMALL_SHAPE], ids=lambda shape: shape.name)
def test_models_have_the_shape_they_are_named_after(shape, tmp_path):
    write_model(shape, 40_000, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ModelShape.from_config(config, shape.name) == shape
    assert config["max_position_embeddings"] == 40_000


def test_synthetic_acceptance_is_that_of_its_rates():
    num_reqs, rates = 20_000, torch.tensor([0.9, 0.5])
    generator = torch.Generator().manual_seed(0)
    drafts = torch.arange(2 * num_reqs)
    output = torch.full((num_reqs, 3), -1)
    accept_synthetically(
        output,
        torch.arange(2, 2 * num_reqs + 1, 2),
        drafts,
        drafts + 100_000,
        torch.full((num_reqs, 1), 7),
        None,
        2,
        torch.rand(2 * num_reqs, generator=generator),
        rates,
    )
    drafts = drafts.view(num_reqs, 2)
    first, second = output[:, 0] == drafts[:, 0], output[:, 1] == drafts[:, 1]
    assert first.float().mean() == pytest.approx(0.9, abs=0.01)
    assert second.float().mean() == pytest.approx(0.45, abs=0.015)
    assert torch.equal(output[:, 2] == 7, second), "the bonus token follows the last draft alone"
    assert torch.equal(output[~first, 0], drafts[~first, 0] + 100_000), "what is rejected is replaced"
    assert torch.all(output[~first, 1:] == -1)
    replaced = first & ~second
    assert torch.equal(output[replaced, 1], drafts[replaced, 1] + 100_000)
