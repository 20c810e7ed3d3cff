# SPDX-License-Identifier: Apache-2.0
"""benchmarks/suite.py: its loads, its statistics and its errors."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import engines
import pytest
import suite
import suite_plots
from short_runs import PLOTS, REQUESTS, TOKENS
from transformers import AutoTokenizer


def make_run(method: str, speed: float, **fields) -> dict:
    load = {"method": method, "context": 1000, "concurrency": None, "rate": None}
    made = {"completed": REQUESTS, "total_output_tokens": REQUESTS * TOKENS, "output_throughput": speed}
    latencies = {"median_e2el_ms": 1e3 * TOKENS / speed, "p99_e2el_ms": 2e3 * TOKENS / speed}
    return {**load, **made, **latencies, "median_ttft_ms": 30.0, **fields}


def test_speedup_is_over_the_mean_of_plain_decodings_servers():
    runs = [
        *(make_run("plain", 90.0, concurrency=1), make_run("plain-again", 110.0, concurrency=1)),
        *(make_run("ngram", 150.0, concurrency=1), make_run("ngram", 70.0, rate=2.0)),
    ]
    speedups = suite_plots.speedups(runs)
    assert speedups["ngram"] == {(1000, 1): (150.0, 1.5)}
    assert [speedups[m][1000, 1][1] for m in ("plain", "plain-again")] == pytest.approx([0.9, 1.1])


def test_acceptance_of_runs_is_weighed_by_their_rounds():
    runs = [
        make_run("ngram", 1.0, **{suite_plots.PER_POSITION: [1.0, 0.5], "spec_decode_num_drafts": 10}),
        make_run("ngram", 1.0, **{suite_plots.PER_POSITION: [0.5], "spec_decode_num_drafts": 30}),
        make_run("suffix", 1.0, **{suite_plots.PER_POSITION: [0.0], "spec_decode_num_drafts": 30}),
    ]
    assert suite_plots.pooled_acceptance(runs, "ngram", 1000) == pytest.approx([0.625, 0.125])


def test_requests_are_the_same_every_time_and_share_their_beginnings(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(engines.MODEL)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        suite.write_requests(tokenizer, [100, 400], 3, tmp_path / name, None)
    for context in (100, 400):
        one, two = ((tmp_path / name / f"requests-{context}.jsonl").read_bytes() for name in ("one", "two"))
        assert one == two
    short, long = (
        [json.loads(line)["prompt"] for line in (tmp_path / "one" / f"requests-{n}.jsonl").open()]
        for n in (100, 400)
    )
    assert len(set(long)) == 3
    assert all(text.startswith(beginning) for text, beginning in zip(long, short, strict=True))
    assert all(abs(len(tokenizer.encode(text)) - 400) < 8 for text in long)


def test_methods_with_missing_requirements_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    assert "arctic-inference" in suite.why_skipped("suffix-native", None)
    assert "--draft-model" in suite.why_skipped("magicdec-draft_model-auto", None)
    assert "train-draft" in suite.why_skipped("magicdec-spire-auto", "folder")
    assert suite.why_skipped("draft_model", "folder") is None
    assert suite.why_skipped("magicdec-spire", None, "folder") is None
    assert suite.why_skipped("ngram", None) is None


@pytest.mark.parametrize("failing", ["ngram", "plain"])
def test_a_method_that_fails_is_reported_and_the_others_go_on(monkeypatch, tmp_path, failing):
    @contextmanager
    def serve(_model, *options, environment):
        if any('"ngram"' in option for option in options) or failing == "plain":
            sys.exit("the server did not start")
        yield

    def measure(_args, contenders, _rates):
        (method,) = [contender.method for contender in contenders]
        return [make_run(method, 100.0, concurrency=1), make_run(method, 50.0, rate=2.0)]

    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(suite, "serve", serve)
    monkeypatch.setattr(suite.Contender, "warm_up", lambda _: None)
    methods = ("--methods", "ngram", "plain", "magicdec-snapkv", "--concurrency", "1")
    args, options = suite.parse_arguments(
        [*methods, "--context", "1000", "--out", str(tmp_path / "out"), "--seed", "3"]
    )
    args.model_path = args.model
    assert options == ["--seed", "3"]
    if failing == "plain":
        with pytest.raises(SystemExit, match="did not start"):
            suite.run_suite(args, options)
        return
    record = suite.run_suite(args, options)
    assert record["methods"]["ngram"]["failed"] == "the server did not start"
    assert [run["method"] for run in record["runs"]] == [*["plain"] * 2, *["magicdec-snapkv"] * 2]
    assert record["server_options"][-2:] == ["--seed", "3"]
    suite_plots.draw(record, tmp_path / "out")
    assert all((tmp_path / "out" / name).exists() for name in PLOTS)


def test_a_run_with_unanswered_requests_ends_in_an_error(monkeypatch, tmp_path):
    import vllm.benchmarks.serve

    class QuietServer:
        url = "http://127.0.0.1:1"

        @staticmethod
        def log_tail() -> str:
            return ""

    result = {"completed": 3, "total_output_tokens": 3 * TOKENS}
    monkeypatch.setattr(vllm.benchmarks.serve, "main", lambda options: result)
    load = suite.Load(1000, concurrency=2)
    arguments = (QuietServer(), str(engines.MODEL), load, tmp_path / "requests.jsonl")
    with pytest.raises(SystemExit, match=f"3 of {REQUESTS} requests"):
        suite.run_load(*arguments, REQUESTS, TOKENS, tmp_path / "run")
    assert suite.run_load(*arguments, 3, TOKENS, tmp_path / "again") == result


def test_the_shipped_draft_model_speaks_the_shipped_models_tokens():
    args, _ = suite.parse_arguments(["--model", str(engines.MODEL)])
    target, draft = engines.MODEL, Path(args.draft_model)
    assert (draft / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    sizes = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (target, draft)]
    assert sizes[0] == sizes[1]
    others, _ = suite.parse_arguments(["--model", "another/model"])
    assert others.draft_model is None and others.spire is None
