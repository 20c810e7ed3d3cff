# SPDX-License-Identifier: Apache-2.0
"""`auto` and limits of requests with vLLM's own methods: greedy output equals plain decoding's."""

import json

import engines
import pytest
import torch
from draft_engines import V2_ENGINE, WHOLE_LEN, on_v2
from engines import SPEC_METRIC, magicdec
from greedy import GREEDY, assert_same_tokens
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.extended

MAX_DRAFTS = 5
TINY_DRAFT = engines.HERE.parent / "benchmarks" / "tiny-draft"
LIMITS = (None, 0, 2)  # of requests, in turn
# vLLM 0.32 cannot start another engine in a process that has looked up n-grams; the core is in it.
OWN_PROCESS = {"own_process": True, "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
# The longest request and little else, so that requests are preempted.
SCHEDULE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 80}


@pytest.fixture(scope="module")
def eagle3_head(tmp_path_factory) -> str:
    """An EAGLE-3 head that passes on the target's activations, so that some of its drafts are accepted."""
    folder = tmp_path_factory.mktemp("eagle3")
    config = json.loads((engines.MODEL / "config.json").read_text())
    target = load_file(engines.MODEL / "model.safetensors")
    hidden, size = config["hidden_size"], config["head_dim"]
    inner, vocab_size = config["intermediate_size"], config["vocab_size"]
    queries, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (kv, 2 * hidden),
        "self_attn.v_proj": (kv, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"midlayer.{name}.weight": 0.01 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["norm.weight"] = target["model.norm.weight"].float()
    weights["lm_head.weight"] = target["model.embed_tokens.weight"].float().clone()
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1)
    save_file(weights, folder / "model.safetensors")
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "dtype": "float32"}
    head |= {"draft_vocab_size": vocab_size, "tie_word_embeddings": False}
    head |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    (folder / "config.json").write_text(json.dumps({**config, **head}))
    return str(folder)


def fields_of(method: str, eagle3_head: str) -> dict:
    own = {
        "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"model": str(TINY_DRAFT)},
        "eagle3": {"model": eagle3_head},
    }
    auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": MAX_DRAFTS}
    return {"method": method, **own[method], **auto}


def limited(batch: dict) -> dict:
    """Return the batch with a limit of drafts for two of three requests."""
    sampling = [
        batch["sampling"] if limit is None else {**batch["sampling"], "extra_args": limit_of(limit)}
        for limit in (LIMITS[index % len(LIMITS)] for index in range(len(batch["prompts"])))
    ]
    return {**batch, "sampling": sampling}


def limit_of(drafts: object) -> dict:
    return {"max_num_speculative_tokens": drafts}


def assert_unchanged(run: engines.EngineRun, expected: list[dict], what: str) -> None:
    (result,) = run.results
    for batch in result["batches"]:
        assert_same_tokens(expected, batch, what)
    assert set(result["planned"]) == set(range(MAX_DRAFTS + 1))
    assert {0, 1, 2, MAX_DRAFTS} <= {int(number) for number in result["gammas"]}
    assert run.accepted < run.drafted


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_greedy_output_is_unchanged_by_any_number_of_drafts(prompts, plain, eagle3_head, method):
    chosen = range(0, len(prompts), 2)
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch, limited(batch)], "seed": 1})],
        max_model_len=WHOLE_LEN,
        **SCHEDULE,
        **OWN_PROCESS,
        speculative_config=fields_of(method, eagle3_head),
    )
    assert not run.v2_runner and run.preemptions > 0 and run.accepted > 0
    assert_unchanged(run, [plain[i] for i in chosen], method)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_greedy_output_is_unchanged_on_the_v2_runner(prompts, plain, eagle3_head, method):
    batch, expected = on_v2(prompts, plain)
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch, limited(batch)], "seed": 1})],
        **V2_ENGINE,
        speculative_config=fields_of(method, eagle3_head),
    )
    assert run.v2_runner
    assert run.accepted > 0 or method == "eagle3"  # of the head's few drafts
    assert_unchanged(run, expected, f"V2 runner, {method}")


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_the_controller_drafts_and_reports(prompts, plain, eagle3_head, method):
    run = engines.generate(
        prompts, GREEDY, max_num_seqs=8, speculative_config=fields_of(method, eagle3_head), **OWN_PROCESS
    )
    assert_same_tokens(plain, run.results[0][0], f"auto, {method}")
    assert run.accepted > 0
    assert run.metrics["vllm:magicdec_achieved_speedup"] > 0
    assert "choose 0 to 5 drafts for every step" in run.log


@pytest.mark.parametrize("number", [4, "auto"])
def test_requests_limit_their_own_drafts(prompts, plain, number):
    """All requests take no drafts; then two of three have a limit."""
    chosen = range(0, len(prompts), 2)
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    none = {**batch, "sampling": {**GREEDY, "extra_args": limit_of(0)}}
    spec = magicdec(number, draft_kv_budget=128)
    run = engines.run(
        [
            ("generate_and_count", {"batches": [none]}),
            ("generate_and_count", {"batches": [limited(batch)]}),
        ],
        max_num_seqs=8,
        speculative_config=spec,
    )
    off, some = run.results
    expected = [plain[i] for i in chosen]
    off_count, some_count = (run["counted"][SPEC_METRIC + "draft_tokens"] for run in (off, some))
    assert off_count == 0 < some_count
    for result in run.results:
        assert_same_tokens(expected, result["batches"][0], f"limits, {number}")


def test_a_limit_that_is_none_is_refused_for_the_request_alone(prompts):
    params = {**GREEDY, "extra_args": limit_of(-1)}
    with pytest.raises(RuntimeError, match="vllm_xargs: max_num_speculative_tokens=-1 is no number"):
        engines.generate(prompts[:1], params, speculative_config=magicdec(4))
