# SPDX-License-Identifier: Apache-2.0
"""`auto`, windows and limits of requests with vLLM's own methods: greedy output equals plain decoding's."""

import engines
import pytest
from draft_engines import TINY_DRAFT, V2_ENGINE, V2_TOKENS, WHOLE_LEN, few, on_v2
from engines import SPEC_METRIC, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens
from small_heads import write_eagle3, write_mtp

pytestmark = pytest.mark.extended

MAX_DRAFTS = 5
HEADS = {"eagle3": write_eagle3, "mtp": write_mtp}
WINDOW = {"draft_kv_budget": 96, "draft_kv_sink": 1}  # three pages
WINDOW_LINE = "a draft step reads at most 96 tokens (1 sink + 2 window pages of 32) of the draft's KV cache"
# vLLM 0.32 cannot start another engine in a process that has looked up n-grams; the core is in it.
OWN_PROCESS = {"own_process": True, "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
# The longest request and little else, so that requests are preempted.
SCHEDULE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 80}


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    written = {}

    def engine(method: str, **fields: object) -> dict:
        if method in HEADS and method not in written:
            written[method] = HEADS[method](tmp_path_factory.mktemp(method))
        own = {
            "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
            "draft_model": {"model": str(TINY_DRAFT)},
            "eagle3": {"model": written.get("eagle3")},
            "mtp": {},  # the target has the module
        }
        auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": MAX_DRAFTS}
        spec = {"method": method, **own[method], **auto, **fields}
        target = {"model": written["mtp"]} if method == "mtp" else {}
        return {**target, "speculative_config": spec}

    return engine


@pytest.fixture(scope="module")
def repetitive() -> tuple[list[list[int]], list[dict]]:
    """Prompts that plain decoding goes on repeating, as the heads of small_heads.py draft, and answers."""
    prompts = [[token] * length for token, length in ((66, 300), (353, 200), (588, 250))]
    return prompts, engines.generate(prompts, GREEDY, max_num_seqs=4).results[0][0]


def limited(batch: dict) -> dict:
    """Return the batch with a limit of drafts for two of three requests."""
    limits = ({}, limit_of(0), limit_of(2)) * len(batch["prompts"])
    sampling = [{**batch["sampling"], **limit} for limit in limits[: len(batch["prompts"])]]
    return {**batch, "sampling": sampling}


def limit_of(drafts: int) -> dict:
    return {"extra_args": {"max_num_speculative_tokens": drafts}}


def assert_unchanged(run: engines.EngineRun, expected: list[dict], what: str) -> None:
    (result,) = run.results
    for batch in result["batches"]:
        assert_same_tokens(expected, batch, what)
    assert set(result["planned"]) == set(range(MAX_DRAFTS + 1))
    assert {0, 1, 2, MAX_DRAFTS} <= {int(number) for number in result["gammas"]}
    assert run.accepted < run.drafted


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3", "mtp"])
def test_greedy_output_is_unchanged_by_any_number_of_drafts(prompts, plain, engine_of, method):
    chosen = range(0, len(prompts), 2)
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch, limited(batch)], "seed": 1})],
        max_model_len=WHOLE_LEN,
        **SCHEDULE,
        **OWN_PROCESS,
        **engine_of(method, **(WINDOW if method != "ngram" else {})),
    )
    assert not run.v2_runner and run.preemptions > 0 and run.accepted > 0
    assert (WINDOW_LINE in run.log) == (method != "ngram")
    assert_unchanged(run, [plain[i] for i in chosen], method)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_greedy_output_is_unchanged_on_the_v2_runner(prompts, plain, repetitive, engine_of, method):
    batch, expected = on_v2(prompts, plain)
    more, answers = repetitive
    batch["prompts"] += more
    expected += [first_tokens(answer, V2_TOKENS) for answer in answers]
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch, limited(batch)], "seed": 1})],
        **V2_ENGINE,
        **engine_of(method, **WINDOW),
    )
    assert run.v2_runner and run.accepted > 0 and WINDOW_LINE in run.log
    assert_unchanged(run, expected, f"V2 runner, {method}")


@pytest.mark.parametrize("v2", [False, True])
def test_a_draft_reads_no_more_than_its_window(prompts, plain, v2):
    """The target itself drafts as plain decoding does if the window holds the context, else not."""
    batch, expected = few(prompts, plain, number=4, least=200, below=600, tokens=24)
    spec = {"method": "draft_model", "model": str(engines.MODEL), "num_speculative_tokens": 4}
    shares = {}
    for budget in (640, 96):
        run = engines.run(
            [("generate", {"batches": [batch]})],
            **{**V2_ENGINE, "v2": v2},
            speculative_config={**spec, "draft_kv_budget": budget},
        )
        assert_same_tokens(expected, run.results[0][0], f"window of {budget}")
        assert f"a draft step reads at most {budget} tokens" in run.log
        shares[budget] = run.accepted / run.drafted
    assert shares[96] < 0.8 < 0.95 < shares[640]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_the_controller_drafts_and_reports(prompts, plain, repetitive, engine_of, method):
    more, answers = repetitive
    run = engines.generate([*prompts, *more], GREEDY, max_num_seqs=8, **engine_of(method), **OWN_PROCESS)
    assert_same_tokens([*plain, *answers], run.results[0][0], f"auto, {method}")
    assert run.accepted > 0
    assert run.metrics["vllm:magicdec_achieved_speedup"] > 0
    assert "choose 0 to 5 drafts for every step" in run.log


@pytest.mark.parametrize("number", [4, "auto"])
def test_requests_limit_their_own_drafts(prompts, plain, number):
    chosen = range(0, len(prompts), 2)
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    none = {**batch, "sampling": {**GREEDY, **limit_of(0)}}
    spec = magicdec(number, draft_kv_budget=128)
    steps = [("generate_and_count", {"batches": [one]}) for one in (none, limited(batch))]
    run = engines.run(steps, max_num_seqs=8, speculative_config=spec)
    off, some = run.results
    expected = [plain[i] for i in chosen]
    off_count, some_count = (run["counted"][SPEC_METRIC + "draft_tokens"] for run in (off, some))
    assert off_count == 0 < some_count
    for result in run.results:
        assert_same_tokens(expected, result["batches"][0], f"limits, {number}")


def test_a_limit_that_is_none_is_refused_for_the_request_alone(prompts):
    params = {**GREEDY, **limit_of(-1)}
    with pytest.raises(RuntimeError, match="vllm_xargs: max_num_speculative_tokens=-1 is no number"):
        engines.generate(prompts[:1], params, speculative_config=magicdec(4))
