# SPDX-License-Identifier: Apache-2.0
"""The speedup model against MagicDec's tables, manual counts and its own properties."""

import itertools
import json
import math
import struct
from dataclasses import fields, replace
from pathlib import Path

import paper
import pytest
import window_table
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import (
    GIB,
    Costs,
    Deployment,
    acceptance_rate,
    round_ms,
    speedup,
    tokens_per_round,
)
from vllm_magicdec.planner.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
LLAMA = MODELS["llama-3.1-8b"]

gammas = st.integers(1, 16)
alphas = st.floats(0, 1)
batches = st.integers(1, 512)
contexts = st.integers(1, 200_000)
deployments = st.builds(
    Deployment,
    st.sampled_from(list(MODELS.values())),
    st.sampled_from(list(HARDWARE.values())),
    st.sampled_from([1, 2, 4, 8]),
)


# ---- against the paper


def test_equation_3_gives_the_measured_time_per_token_from_the_measured_passes():
    for row in paper.ROWS:
        one_round = round_ms(row.gamma, row.draft_ms_total / row.gamma, row.verify_ms)
        predicted = one_round / row.tokens_per_round
        # Always below: sampling and host work are not in the passes. The largest error is 6.8 %.
        assert 0.932 * row.specdec_ms_per_token < predicted < row.specdec_ms_per_token, row
        equation_2 = speedup(row.target_ms, row.tokens_per_round, one_round)
        assert equation_2 == pytest.approx(row.target_ms / predicted)


def test_fitted_constants_are_the_fit():
    """Repeat the fit that `Costs` describes."""
    unique = {
        (row.target, row.gpus, row.batch, row.context): row for row in paper.ROWS if row.gpus != "8xL40"
    }
    names = ("memory_efficiency", "layer_overhead_us", "token_overhead_us", "all_reduce_step_us")
    start = [0.8, 50.0, 1.0, 3.0]

    def misfit(scales):
        values = dict(zip(names, (s * x for s, x in zip(scales, start, strict=True)), strict=True))
        costs = replace(Costs(), **values)
        return [row.predicted_target_ms(costs) / row.target_ms - 1 for row in unique.values()]

    fit = least_squares(misfit, [1.0] * 4, bounds=(1e-3, 1e3))
    for name, scale, first in zip(names, fit.x, start, strict=True):
        assert getattr(Costs(), name) == pytest.approx(scale * first, rel=0.02), name


@pytest.mark.parametrize(("gpus", "bound"), [("8xA100", 0.12), ("4xH100", 0.10), ("8xL40", 0.14)])
def test_speedups_are_predicted_within(gpus, bound):
    rows = [row for row in paper.ROWS if row.gpus == gpus]
    assert rows
    for row in rows:
        assert row.predicted_speedup() == pytest.approx(row.speedup, rel=bound), row


def test_speculation_starts_to_pay_between_the_same_rows():
    """Check all series of Table 1 (one batch, growing context) whose measured speedup crosses 1."""
    series = itertools.groupby(
        sorted(paper.TABLE_1, key=lambda row: (row.target, row.draft, row.batch, row.context)),
        key=lambda row: (row.target, row.draft, row.batch),
    )
    crossings = {}
    for name, rows in series:
        for before, after in itertools.pairwise(rows):
            if before.speedup < 1 <= after.speedup:
                crossings[name] = before, after
    assert {name: (before.context, after.context) for name, (before, after) in crossings.items()} == {
        ("llama-2-7b-32k", "tinyllama-1.1b", 32): (1024, 4000),
        ("llama-2-7b-32k", "tinyllama-1.1b", 128): (1024, 4000),
        ("llama-3.1-8b", "self", 32): (16000, 32000),
        ("llama-3.1-8b", "self", 128): (8000, 16000),
    }
    for (_, draft, _), (before, after) in crossings.items():
        assert before.predicted_speedup() < 1 <= after.predicted_speedup()
        if draft == "self":
            alpha = acceptance_rate(2, before.tokens_per_round)
            at = least_paying_context(before.deployment(), alpha, 2, before.batch, before.budget)
            assert before.context < at <= after.context


def least_paying_context(deployment, alpha, gamma, batch, budget):
    """Search in steps of 100 tokens."""
    return next(
        context
        for context in range(100, 200_000, 100)
        if deployment.speedup(alpha, gamma, batch, context, budget) >= 1
    )


def test_best_gamma_is_the_paper_s_or_its_neighbour():
    rows = [row for row in paper.DATA["best_gamma"] if row["draft"] == "self"]
    assert len(rows) == 8
    for row in rows:
        deployment = Deployment(MODELS[row["target"]], HARDWARE["A100"], 8)
        gamma = deployment.best({512: 0.82}, 8, row["batch"], row["context"]).gamma
        assert abs(gamma - row["gamma"]) <= 1, row


def test_documentation_has_the_computed_tables():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(paper.documented()) in text, "run: python tests/paper.py"
    for field in fields(Costs):
        assert f"`{field.name}` | {field.default:g} |" in text


def test_documentation_has_the_table_of_windows():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(window_table.documented()) in text, "run: python tests/planner/window_table.py"
    by_share = [window_table.speedups(shape) for shape in window_table.shapes()[:5]]
    for speedups in zip(*by_share, strict=True):
        assert sorted(speedups, reverse=True) == list(speedups)


# ---- against counts by hand


def test_llama_3_1_8b_by_hand():
    assert LLAMA.parameters == 8_030_261_248  # as published
    assert LLAMA.kv_bytes_per_token == 131_072  # 2 (K, V) x 32 layers x 8 heads x 128 x 2 bytes
    # All but the input embedding (128,256 x 4,096) and the norms (65 x 4,096).
    read = 8_030_261_248 - 525_336_576 - 266_240
    assert LLAMA.parameters_read(1) == LLAMA.parameters_read(1000) == read
    assert LLAMA.linear_flops_per_token == 2 * read
    h100 = Deployment(LLAMA, HARDWARE["H100"])
    compute_ms, memory_ms = h100.linear_ms(1)
    assert memory_ms == pytest.approx(2 * read / (3.35e12 * 0.86) * 1e3)
    assert compute_ms == pytest.approx(2 * read / (989e12 * 0.7) * 1e3)
    compute_ms, memory_ms = h100.attention_ms(batch=4, queries=3, context=1000)
    assert memory_ms == pytest.approx(4 * 1000 * 131_072 / (3.35e12 * 0.86) * 1e3)
    assert compute_ms == pytest.approx(4 * 3 * 32 * 4096 * 4 * 1000 / (989e12 * 0.7) * 1e3)
    free_bytes = (80 * 0.92 - 2) * GIB - 2 * 8_030_261_248
    assert h100.kv_capacity_tokens() == int(free_bytes / 131_072)


def test_devices_share_kv_heads_and_copy_them_when_there_are_too_few():
    wide = replace(LLAMA, num_kv_heads=2)
    per_device = [Deployment(wide, HARDWARE["A100"], tp).kv_bytes_per_token for tp in (1, 2, 8)]
    one_head = 2 * 32 * 128 * 2
    assert per_device == [2 * one_head, one_head, one_head]


def test_experts_are_read_as_uniform_routing_hits_them():
    moe = MODELS["qwen3-30b-a3b"]
    assert moe.parameters == pytest.approx(30.5e9, rel=0.01)  # as published
    assert moe.linear_flops_per_token / 2 == pytest.approx(3.3e9 - 151936 * 2048, rel=0.02)
    attention_and_head = moe.num_layers * moe.attention_parameters + moe.vocab_size * moe.hidden_size
    assert moe.parameters_read(1) == pytest.approx(
        attention_and_head + 8 * moe.num_layers * moe.expert_parameters
    )
    assert moe.parameters_read(10_000) == pytest.approx(
        attention_and_head + 128 * moe.num_layers * moe.expert_parameters
    )


def test_shape_of_the_shipped_model_counts_the_weights_in_its_file():
    shape = ModelShape.from_config(json.loads((TINY_LLAMA / "config.json").read_text()))
    with next(TINY_LLAMA.glob("*.safetensors")).open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    assert shape.parameters == sum(math.prod(tensor["shape"]) for tensor in header.values())


LLAMA_CONFIG = dict(model_type="llama", torch_dtype="bfloat16", vocab_size=128256, num_hidden_layers=32)
LLAMA_CONFIG |= dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
)


def test_shape_from_a_configuration():
    assert ModelShape.from_config(LLAMA_CONFIG, "llama-3.1-8b") == LLAMA
    assert ModelShape.from_config({"text_config": LLAMA_CONFIG}, "llama-3.1-8b") == LLAMA
    without_groups = {name: value for name, value in LLAMA_CONFIG.items() if name != "num_key_value_heads"}
    assert ModelShape.from_config(without_groups).num_kv_heads == 32
    mixtral = ModelShape.from_config({**LLAMA_CONFIG, "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (mixtral.num_experts, mixtral.num_active_experts) == (8, 2)
    qwen = {**LLAMA_CONFIG, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert ModelShape.from_config(qwen).intermediate_size == 768


@pytest.mark.parametrize(
    ("change", "weight_bytes"),
    [
        (dict(torch_dtype="float32"), 4),
        (dict(torch_dtype=None, dtype="float16"), 2),
        (dict(quantization_config={"quant_method": "fp8"}), 1),
        (dict(quantization_config={"quant_method": "gptq", "bits": 4}), 0.5),
        (dict(quantization_config={"quant_method": "mxfp4"}), 4.25 / 8),
    ],
)
def test_bytes_per_weight_from_a_configuration(change, weight_bytes):
    assert ModelShape.from_config({**LLAMA_CONFIG, **change}).weight_bytes == weight_bytes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(kv_lora_rank=512), "MLA models"),
        (dict(quantization_config={"quant_method": "new"}), "quantization 'new' is unknown"),
        (dict(num_experts=8), "has no field 'num_experts_per_tok'"),
    ],
)
def test_unsupported_configurations_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelShape.from_config({**LLAMA_CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "num_window_layers", "window"),
    [
        ({}, 0, 0),
        (dict(sliding_window=4096), 32, 4096),  # Mistral's first
        (dict(sliding_window=4096, use_sliding_window=False), 0, 0),  # Qwen2
        (dict(sliding_window=4096, use_sliding_window=True, max_window_layers=28), 4, 4096),
        (dict(attention_chunk_size=8192, model_type="llama4_text"), 24, 8192),
        (dict(sliding_window=1024, model_type="gemma3_text"), 27, 1024),
        (dict(sliding_window=4096, model_type="gemma2"), 16, 4096),
        (dict(sliding_window=4096, sliding_window_pattern=4, model_type="cohere2"), 24, 4096),
        (dict(sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 16), 16, 128),
        (dict(attention_chunk_size=8192, layer_types=["chunked_attention"] * 32), 32, 8192),
    ],
)
def test_windows_from_a_configuration(change, num_window_layers, window):
    shape = ModelShape.from_config({**LLAMA_CONFIG, **change})
    assert (shape.num_window_layers, shape.window) == (num_window_layers, window)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gemma-3-12b", 11.8), ("gemma-3-27b", 27.0), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)],
)
def test_built_in_models_with_windows_have_the_published_parameters(name, billions):
    assert MODELS[name].parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_layers_with_a_window_read_and_keep_no_more_than_that():
    """The fewer layers see the whole context, the less speculation gains."""
    hybrid = replace(LLAMA, num_window_layers=24, window=1024)
    assert hybrid.kv_share(512) == hybrid.kv_share(1024) == 1
    assert hybrid.kv_share(16 * 1024) == pytest.approx(1 / 4 + 3 / 4 / 16)
    whole, part = (Deployment(shape, HARDWARE["H100"]) for shape in (LLAMA, hybrid))
    for context in (1024, 16 * 1024):
        share = hybrid.kv_share(context)
        assert part.attention_ms(8, 1, context)[1] == pytest.approx(
            share * whole.attention_ms(8, 1, context)[1]
        )
        assert part.kv_capacity_tokens(context) == pytest.approx(
            whole.kv_capacity_tokens(context) / share, rel=1e-6
        )
    best = [deployment.best({512: 0.8}, 8, 64, 32_000).speedup for deployment in (whole, part)]
    assert 1 < best[1] < best[0]
    # A draft's budget within the window costs the same in both.
    assert part.draft_step_ms(8, 32_000, 512) == whole.draft_step_ms(8, 32_000, 512)


def test_invalid_deployments_are_refused():
    with pytest.raises(ValueError, match="32 attention heads cannot be divided over 3 devices"):
        Deployment(LLAMA, HARDWARE["A100"], 3)
    alone = replace(HARDWARE["A100"], interconnect_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="has no interconnect"):
        Deployment(LLAMA, alone, 2)
    assert Deployment(MODELS["llama-3.1-70b"], HARDWARE["A100"]).kv_capacity_tokens() == 0


# ---- properties


@given(gammas, alphas, alphas)
def test_omega_grows_with_gamma_and_alpha_up_to_gamma_plus_1(gamma, alpha, other):
    omega = tokens_per_round(gamma, alpha)
    assert 1 <= omega <= gamma + 1
    assert omega >= tokens_per_round(gamma - 1, alpha)
    low, high = sorted((alpha, other))
    assert tokens_per_round(gamma, low) <= tokens_per_round(gamma, high)
    if alpha < 0.999:
        assert omega == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))  # as MagicDec writes it


@given(gammas, alphas)
def test_acceptance_rate_inverts_omega(gamma, alpha):
    assert acceptance_rate(gamma, tokens_per_round(gamma, alpha)) == pytest.approx(alpha, abs=1e-6)


@given(deployments, gammas, alphas, batches, contexts, st.integers(16, 8192))
def test_speedup_is_between_its_bounds(deployment, gamma, alpha, batch, context, budget):
    value = deployment.speedup(alpha, gamma, batch, context, budget)
    assert 0 < value < tokens_per_round(gamma, alpha)  # verification alone costs more than a plain step
    assert deployment.speedup(0.0, gamma, batch, context, budget) < 1
    if context <= budget:
        assert value < 1  # a draft step is a plain step
    assert value <= deployment.speedup(alpha, gamma, batch, context, max(1, budget // 2)) * (1 + 1e-12)


@settings(deadline=None, max_examples=50)
@given(deployments, st.floats(0.05, 0.98), st.integers(1, 8), batches, st.integers(64, 4096))
def test_speculation_pays_from_the_inflection_on_and_not_before(
    deployment, alpha, max_gamma, batch, budget
):
    def pays(context):
        return deployment.best({budget: alpha}, max_gamma, batch, context).speedup >= 1

    at = deployment.inflection_context({budget: alpha}, max_gamma, batch)
    if at is None:
        assert not any(pays(2**power) for power in range(21))
        return
    assert pays(at)
    assert not pays(at - 1)
    assert all(pays(at + step) for step in (1, 10, 1000, 100_000, 10_000_000))
    assert not any(pays(max(1, at // part)) for part in (2, 3, 10, 100))


@settings(deadline=None)
@given(deployments, batches, contexts)
def test_free_query_tokens_add_nothing_to_the_roofline(deployment, batch, context):
    def times_ms(queries):
        return deployment.linear_ms(batch * queries), deployment.attention_ms(batch, queries, context)

    if free := deployment.free_queries(batch, context):
        assert all(compute <= memory * (1 + 1e-12) for compute, memory in times_ms(free))
        if deployment.shape.num_experts == 1:
            assert any(compute > memory for compute, memory in times_ms(free + 1))


# ---- draft weights


def test_quantised_drafts_read_fewer_weights_and_take_memory():
    h100 = Deployment(LLAMA, HARDWARE["H100"])
    own = replace(h100, draft_weight_bytes=0.5)
    layers = LLAMA.parameters_read(1) - LLAMA.vocab_size * LLAMA.hidden_size
    saved_ms = 1e3 * 1.5 * layers / (h100.hardware.memory_bytes_per_s * h100.costs.memory_efficiency)
    difference = h100.draft_step_ms(1, 4096, 512) - own.draft_step_ms(1, 4096, 512)
    assert difference == pytest.approx(saved_ms)
    assert own.verify_ms(4, 1, 4096) == h100.verify_ms(4, 1, 4096)
    fewer = h100.kv_capacity_tokens() - own.kv_capacity_tokens()
    assert fewer == pytest.approx(0.5 * layers / h100.kv_bytes_per_token, abs=2)
    with pytest.raises(ValueError, match="without experts"):
        Deployment(MODELS["qwen3-30b-a3b"], HARDWARE["H100"], draft_weight_bytes=0.5)
