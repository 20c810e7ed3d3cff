# SPDX-License-Identifier: Apache-2.0
"""`auto` in real engines: its choices of draft lengths change no output."""

import json
import re
import subprocess
import sys

import engines
import pytest
from greedy import GREEDY, assert_same_tokens, first_tokens

pytestmark = pytest.mark.extended

TINY_DRAFT = engines.HERE.parent / "benchmarks" / "tiny-draft"


def auto(**fields: object) -> dict[str, object]:
    return {"method": "magicdec-self", "num_speculative_tokens": "auto", **fields}


def test_output_is_unchanged_when_the_length_changes_every_step_without_async_scheduling(prompts, plain):
    batch = {"prompts": prompts, "sampling": GREEDY}
    steps = [("generate_with_random_choices", {"batches": [batch], "seed": seed}) for seed in range(2)]
    run = engines.run(
        steps,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        async_scheduling=False,
        speculative_config=auto(draft_kv_budget=256, draft_lookup="off"),
    )
    assert not run.async_scheduling
    assert {length for result in run.results for length in result["lengths"]} == set(range(9))
    for seed, result in enumerate(run.results):
        assert_same_tokens(plain, result["batches"][0], f"random choices, {seed}")
        assert result["plain_steps"] > 5
        assert result["sampled_as_speculative"] == result["speculative_steps"], "the others were plain"
    assert run.draft_failures == 0
    assert 0 < run.accepted < run.drafted


def test_output_is_unchanged_when_the_length_changes_on_the_v2_runner(prompts, plain):
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 600][:6]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 40}}
    run = engines.run(
        [
            ("generate_with_random_choices", {"batches": [batch], "seed": 0}),
            ("record_graphs", {"sizes": [2, 4]}),
            ("generate_with_random_choices", {"batches": [batch], "seed": 1}),
            ("count_replays", {}),
        ],
        v2=True,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=257,
        speculative_config=auto(
            max_num_speculative_tokens=4,
            draft_kv_budget=128,
            native_attention=False,  # recorded graphs do not see it
        ),
    )
    assert run.v2_runner
    eager, _, replayed, replays = run.results
    expected = [first_tokens(plain[i], 40) for i in chosen]
    assert {length for result in (eager, replayed) for length in result["lengths"]} == {0, 1, 2, 3, 4}
    for result, way in ((eager, "eager"), (replayed, "replayed")):
        assert_same_tokens(expected, result["batches"][0], f"random choices, V2 runner, {way}")
    assert all(count > 0 for count in replays.values())
    assert run.accepted > 0


@pytest.fixture(scope="module")
def auto_run(prompts):
    batch = {"prompts": prompts, "sampling": GREEDY}
    return engines.run(
        [("generate", {"batches": [batch]})],
        own_process=True,
        max_num_seqs=16,
        speculative_config=auto(),
    )


def test_the_controller_chooses_and_reports_its_choices(auto_run, plain):
    assert_same_tokens(plain, auto_run.results[0][0], "auto")
    assert auto_run.draft_failures == 0
    assert auto_run.drafted > 0, "the first steps try some drafts"
    assert "will try several choices" in auto_run.log
    assert "choose 0 to 16 drafts for every step" in auto_run.log
    metrics = auto_run.metrics
    assert 0 <= metrics["vllm:magicdec_num_speculative_tokens"] <= 16
    assert metrics["vllm:magicdec_draft_kv_budget"] == 512
    assert 0 <= metrics["vllm:magicdec_draft_share"] < 1
    assert metrics["vllm:magicdec_predicted_speedup"] > 0
    assert metrics["vllm:magicdec_achieved_speedup"] > 0
    assert metrics["vllm:magicdec_switches"] >= 0


def test_the_dashboard_uses_existing_metrics(auto_run):
    dashboard = json.loads((engines.MODEL.parent / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"vllm:[a-z_]+", text)}
    assert {re.sub("_(total|bucket)$", "", name) for name in named} <= set(auto_run.metrics)


@pytest.mark.parametrize(
    "draft", [{}, {"method": "magicdec", "model": str(TINY_DRAFT)}], ids=["the target", "a draft model"]
)
def test_the_machine_is_profiled(tmp_path, draft):
    speculation = {"draft_kv_budget": 128, "max_num_speculative_tokens": 2, **draft}
    profile = tmp_path / "profile.json"
    engine = {"dtype": "float32", "block_size": engines.PAGE, "enforce_eager": True}
    command = [
        *("profile", "--model", str(engines.MODEL), "--batch", "1", "2", "--context", "100", "300"),
        *("--engine", json.dumps({**engine, "max_num_batched_tokens": 256})),
        *("--speculative-config", json.dumps(speculation)),
        *("--out", str(profile)),
    ]
    child = subprocess.run(
        [sys.executable, "-m", "vllm_magicdec", *command],
        env=engines.environment(),
        capture_output=True,
        text=True,
        timeout=engines.TIME_LIMIT_S,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    steps = json.loads(profile.read_text())["steps"]
    assert {(step["num_reqs"], step["drafted"]) for step in steps} == {
        (num_reqs, drafted) for num_reqs in (1, 2) for drafted in range(3)
    }
    assert all(step["seconds"] > 0 for step in steps)
