# SPDX-License-Identifier: Apache-2.0
"""Families, runners and policies: plain decoding's tokens, and full views are accepted.

`make test` runs the cells of `FIXED`, `make test-all` those of `EXTENDED` too, and with
MAGICDEC_TEST_ALL_MODELS=1 every cell of docs/models.md.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import cells
import engines
import pytest
import torch
import transformers
from checkpoints import checkpoint, model_class
from families import FAMILIES, RUNNERS, Family
from greedy import ROUNDING, assert_same_tokens, first_tokens

# Difference of logits computed with sums in another order; their standard deviation is a few units.
MARGIN = 2e-3
BY_NAME = {family.name: family for family in FAMILIES}

# One policy of six families that differ in attention, positions and feed-forward layers.
FIXED = {
    "Llama": "snapkv by token",
    "Qwen3": "verify-topk",
    "Qwen3-MoE": "streamingllm",
    "Gemma 3": "snapkv",
    "gpt-oss": "snapkv by token",
    "DeepSeek-V2": "streamingllm",
}
# One policy of the other families on the V1 runner; on V2 those that differ in attention or inputs.
EXTENDED = {
    ("Qwen2", "V1", "verify-topk"),
    ("Mixtral", "V1", "streamingllm"),
    ("Mistral", "V1", "snapkv by token"),
    ("Gemma 2", "V1", "verify-topk"),
    ("Phi-3", "V1", "snapkv by token"),
    ("OLMo 2", "V1", "snapkv"),
    ("GPT-NeoX", "V1", "verify-topk"),
    ("OPT", "V1", "streamingllm"),
    ("Granite", "V1", "snapkv"),
    ("Cohere 2", "V1", "snapkv by token"),
    ("Qwen2-VL", "V1", "snapkv"),
    ("DeepSeek-V2", "V1", "snapkv"),  # is refused
    ("Gemma 3", "V2", "snapkv by token"),
    ("gpt-oss", "V2", "verify-topk"),
    ("DeepSeek-V2", "V2", "streamingllm"),
    ("Qwen2-VL", "V2", "verify-topk"),
}


def parameters() -> Iterator[Any]:
    """Yield the cells; a family's run in one pytest-xdist worker, which share plain decoding's answers."""
    for family, runner, policy in itertools.product(FAMILIES, RUNNERS, engines.POLICIES):
        is_fixed = runner == "V1" and FIXED.get(family.name) == policy
        is_extended = (family.name, runner, policy) in EXTENDED or "MAGICDEC_TEST_ALL_MODELS" in os.environ
        if is_fixed or is_extended:
            marks = [pytest.mark.xdist_group(f"models: {family.name}")]
            cell = cells.Cell(family, runner, policy)
            yield pytest.param(cell, id=str(cell), marks=marks + [pytest.mark.extended] * (not is_fixed))


@cache
def check_plain_answers(family: Family) -> None:
    """Plain answers are `transformers`', varied, and without near ties: the tests can see differences."""
    model = None if family.is_multimodal else transformers_model(family)
    for prompt, request in zip(cells.prompts(family), cells.plain(family), strict=True):
        (completion,) = request["completions"]
        best = (sorted(step.values())[-2:] for step in completion["logprobs"])
        assert min(first - second for second, first in best) > 20 * ROUNDING, prompt
        tokens = completion["tokens"]
        assert len(set(tokens)) > cells.MAX_TOKENS // 4, prompt
        if model is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            lag = logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            assert lag.max() < MARGIN, f"below transformers' best after {len(prompt)} tokens"


def transformers_model(family: Family) -> torch.nn.Module:
    """Return the model in float32, the reference for plain vLLM."""
    path = checkpoint(family)
    config = transformers.AutoConfig.from_pretrained(path)
    if family.window_excess:
        config.sliding_window += family.window_excess
    # Plain torch, which supports windows, soft caps and sinks.
    attention = {"attn_implementation": "eager"}
    return model_class(family).from_pretrained(path, config=config, dtype=torch.float32, **attention).eval()


@pytest.mark.parametrize("cell", parameters())
def test_tokens_are_plain_decodings_and_full_views_are_accepted(cell):
    family = cell.family
    sentence = family.refusals.get(cell.policy)
    if sentence is not None:
        with pytest.raises(engines.RefusedError) as refused:
            cells.answer(cell)
        assert str(refused.value).startswith(sentence)
        return
    check_plain_answers(family)
    answers = cells.answer(cell)
    for when, got in (("first", answers.within), ("all", answers.every), ("prefix cached", answers.again)):
        assert_true(cell, got, when)
    assert answers.run.draft_failures == 0
    assert answers.run.preemptions == 0
    assert answers.accepted_within == answers.drafted_within > 0, (
        "a view of the whole context drafts what the target decodes"
    )
    if family.is_local:
        assert answers.run.accepted == answers.run.drafted, "the view is longer than every window"
    if family.caches_prefixes:
        for index in answers.within:
            is_long = cells.PROMPT_LENS[index] > engines.PAGE
            assert (answers.every[index]["cached_tokens"] > 0) == is_long
        assert all(request["cached_tokens"] > 0 for request in answers.again.values())


@pytest.mark.extended
def test_mla_without_scaled_rope_is_refused_on_cpus():
    mla = BY_NAME["DeepSeek-V2"]
    unscaled = {name: value for name, value in mla.sizes.items() if name != "rope_parameters"}
    cell = cells.Cell(replace(mla, sizes=unscaled, name="unscaled"), "V1", "streamingllm")
    with pytest.raises(engines.RefusedError, match="rotates queries of MLA models without RoPE scaling"):
        cells.answer(cell)


# Layers with and without a window are then in one group.
IN_ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}


def test_sinks_and_windows_in_one_group_are_refused_on_cpus():
    cell = cells.Cell(replace(BY_NAME["gpt-oss"], engine=IN_ONE_GROUP), "V1", "streamingllm")
    with pytest.raises(engines.RefusedError, match="leave out --disable-hybrid-kv-cache-manager"):
        cells.answer(cell)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "engine", "budget"),
    [
        ("Gemma 3", IN_ONE_GROUP, cells.MODEL_LEN),
        ("Gemma 3", {}, 64),  # below the window, which it cuts
    ],
)
def test_windows_in_one_group_or_beyond_the_budget(name, engine, budget):
    family = BY_NAME[name]
    assert budget == cells.MODEL_LEN or budget < family.sizes["sliding_window"]
    changed = replace(family, engine={**family.engine, **engine})
    answers = cells.answer(cells.Cell(changed, "V1", "streamingllm", budget))
    for got in (answers.within, answers.every):
        assert_true(cells.Cell(family, "V1", "streamingllm", budget), got, "windows")
    assert answers.accepted_within == answers.drafted_within > 0
    assert answers.run.draft_failures == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "policy", "runner"),
    [
        ("Gemma 3", "streamingllm", "V1"),
        ("gpt-oss", "snapkv by token", "V1"),
        ("Qwen2-VL", "streamingllm", "V2"),
    ],
)
def test_passes_with_random_lookups_over_the_whole_context_are_all_accepted(name, policy, runner):
    """With windows, sinks or M-RoPE; tests/engine/ has the other tests of lookups."""
    cell = cells.Cell(BY_NAME[name], runner, policy, cells.MODEL_LEN)
    fields = {**engines.POLICIES[policy], "draft_kv_budget": cells.MODEL_LEN, "draft_lookup": "on"}
    chosen = cells.V2_PROMPTS if runner == "V2" else range(len(cells.PROMPT_LENS))
    sampling = {**cells.SAMPLING, "max_tokens": cells.num_tokens(runner)}
    batch = {"prompts": [cells.prompts(cell.family)[i] for i in chosen], "sampling": sampling}
    run = engines.run(
        [("generate_with_random_lookups", {"batches": [batch], "seed": 0})],
        speculative_config=engines.magicdec(4, **fields),
        v2=runner == "V2",
        **cells.engine(cell.family),
    )
    assert_true(cell, dict(zip(chosen, run.results[0][0], strict=True)), "lookups")
    assert run.v2_runner == (runner == "V2") and run.draft_failures == 0
    assert run.accepted == run.drafted > 0, "a view of the whole context"


def assert_true(cell: cells.Cell, got: dict[int, dict[str, Any]], when: str) -> None:
    plain, length = cells.plain(cell.family), cells.num_tokens(cell.runner)
    expected = [first_tokens(plain[index], length) for index in got]
    assert_same_tokens(expected, list(got.values()), f"{cell}, {when}")
