# SPDX-License-Identifier: Apache-2.0
"""SnapKV's selections in engines against a slow float64 reference written from the paper's formulas."""

import engines
import numpy as np
import pytest
import texts
import torch
from engines import PAGE, magicdec
from reference import snapkv_scores
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytestmark = pytest.mark.extended

WINDOW, KERNEL, SINK, BUDGET = 32, 7, 16, 160
NUM_SELECTED = BUDGET - WINDOW - SINK
# As published: no recent tokens beside the window.
SNAPKV = {"draft_kv_policy": "snapkv", "snapkv_window": WINDOW, "snapkv_recent": 0}
SPEC = magicdec(3, draft_kv_budget=BUDGET, **SNAPKV)
# The engine scores in float32: scores closer than this, relative to the last one taken, are ties.
TIE = 1e-4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts shorter than the window, within the budget, and beyond it."""
    text = texts.library_tokens()
    return [list(text[1000 * i : 1000 * i + n]) for i, n in enumerate((20, 150, 161, 300, 777, 1500))]


def attention_inputs(model: LlamaForCausalLM, tokens: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries [num_heads, num_tokens, size] and keys [num_kv_heads, ...] after RoPE, layer by layer."""
    found = []

    def record(module, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        shape = (*hidden.shape[:-1], -1, module.head_dim)
        q = module.q_proj(hidden).view(shape).transpose(1, 2)
        k = module.k_proj(hidden).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        found.append((q[0].numpy(), k[0].numpy()))

    hooks = [
        layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


# Entries are tokens, or pages of 32 of which the first holds the sinks and the last two are recent.
GRANULARITIES = {"token": (1, SINK, WINDOW, NUM_SELECTED), "page": (PAGE, 1, 2, 2)}


def scores_of_entries(granularity: str, scores: np.ndarray) -> np.ndarray:
    """[heads that choose, entries] from the paper's scores [num_kv_heads, num_tokens before the window]."""
    unit, sinks, _, _ = GRANULARITIES[granularity]
    if granularity == "page":
        pages = -(-scores.shape[1] // unit)
        padded = np.pad(scores, ((0, 0), (0, pages * unit - scores.shape[1])))
        scores = padded.reshape(len(scores), pages, unit).sum((0, 2))[None]
    scores[:, :sinks] = -1
    return scores


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("engine", [{}, {"max_num_batched_tokens": 64}], ids=["whole prompts", "chunks"])
def test_the_engines_selection_is_the_references(prompts, engine, granularity):
    unit, sinks, recent, num_selected = GRANULARITIES[granularity]
    spec = {**SPEC, "draft_kv_granularity": granularity, "draft_kv_sink": SINK, "snapkv_kernel": KERNEL}
    # Twice: the second time every prompt is in the prefix cache, and its queries are not computed.
    steps = [("selections", {"prompts": prompts})] * 2
    run = engines.run(steps, max_num_seqs=8, speculative_config=spec, **engine)
    reference = LlamaForCausalLM.from_pretrained(engines.MODEL, dtype=torch.float64)
    num_compared = 0
    for prompt, *selections in zip(prompts, *run.results, strict=True):
        drafted = 3 if granularity == "page" else 0  # their pages are recent ones
        end = max(0, -(-(len(prompt) + drafted) // unit) - recent)
        eligible = max(0, end - sinks)
        layers = attention_inputs(reference, prompt) if eligible > num_selected else []
        for selection in selections:
            assert selection["end"] == end
            positions = np.array(selection["positions"])  # [layers, heads, selected]
            assert positions.shape[-1] == min(eligible, num_selected)
            if eligible <= num_selected:
                assert (np.sort(positions) == np.arange(sinks, sinks + eligible)).all()
                continue
            for layer, (queries, keys) in enumerate(layers):
                scores = snapkv_scores(queries[:, -WINDOW:], keys, WINDOW, KERNEL, "max")
                for head, own in enumerate(scores_of_entries(granularity, scores)[:, :end]):
                    last = np.sort(own)[-num_selected]
                    expected = set(np.argsort(-own, kind="stable")[:num_selected].tolist())
                    for position in expected.symmetric_difference(positions[layer, head].tolist()):
                        assert abs(own[position] - last) <= TIE * last, (layer, head, position)
                    num_compared += 1
    assert num_compared >= 2 * 4 * 2  # runs x long prompts x layers, at least


def test_refreshing_selects_again(prompts):
    spec = {**SPEC, "draft_kv_granularity": "token", "draft_kv_refresh": 8}
    steps = [("selections", {"prompts": [prompts[-1]], "max_tokens": 40})]
    run = engines.run(steps, max_num_seqs=2, speculative_config=spec)
    (selection,) = run.results[0]
    assert selection["end"] >= len(prompts[-1]) - WINDOW + 24
