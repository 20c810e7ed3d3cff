# SPDX-License-Identifier: Apache-2.0
"""benchmarks/trees.py: the best trees, what texts make of them, and what they cost. No engine."""

import heapq
import random
import sys
from collections import Counter
from types import SimpleNamespace

import engines
import numpy as np
import pytest
import texts
import torch

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import draft_ranks
import tree_costs
import trees
from kv_heavy import TINY_LLAMA
from token_trees import SequoiaTrees, TokenTree, likeliest_tree, replay, rounds_of
from transformers import DynamicCache

from vllm_magicdec.lookup.context_index import ContextIndex
from vllm_magicdec.planner.hardware import find_hardware
from vllm_magicdec.planner.models import find_model
from vllm_magicdec.planner.performance import Deployment, tokens_per_round

VECTORS = [(0.8, 0.1, 0.05), (0.4, 0.3, 0.25), (0.5, 0.0, 0.3), (0.9,), (1.0, 0.0)]


def all_trees(num_ranks, size):
    """Every tree of so many nodes, grown node by node."""
    grown = {frozenset()}
    for _ in range(size):
        grown = {
            tree | {(*parent, rank)}
            for tree in grown
            for parent in (*tree, ())
            for rank in range(1, num_ranks + 1)
            if (*parent, rank) not in tree
        }
    return grown


@pytest.mark.parametrize("acceptance", VECTORS)
def test_no_tree_is_better_than_the_programmes(acceptance):
    best = SequoiaTrees(acceptance, max_size=5, max_depth=5)
    for size in range(1, 6):
        every = [TokenTree(nodes) for nodes in all_trees(len(acceptance), size)]
        for depth in range(1, 6):
            allowed = [tree.expected_tokens(acceptance) for tree in every if tree.depth <= depth]
            # A size that the depth does not allow, as 5 in a chain of 3, leaves positions unused.
            if allowed:
                assert best.expected_tokens(size, depth) == pytest.approx(max(allowed))
            tree = best.tree(size, depth)
            assert tree.size <= size and tree.depth <= depth
            assert all(node[:-1] in {(), *tree.nodes} for node in tree.nodes)
            assert tree.expected_tokens(acceptance) == pytest.approx(best.expected_tokens(size, depth))


def test_a_large_tree_has_the_likeliest_paths():
    # With no bound on the depth the best tree is made by taking the likeliest node again and again.
    acceptance = (0.7, 0.15, 0.06, 0.03)
    reachable, total = [(-p, (k,)) for k, p in enumerate(acceptance)], 1.0
    heapq.heapify(reachable)
    best = SequoiaTrees(acceptance, max_size=32, max_depth=32)
    for size in range(1, 33):
        chance, node = heapq.heappop(reachable)
        total -= chance
        for k, p in enumerate(acceptance):
            heapq.heappush(reachable, (chance * p, (*node, k)))
        assert best.expected_tokens(size, 32) == pytest.approx(total)


def test_known_sums():
    assert SequoiaTrees((0.8,), 8, 8).expected_tokens(6, 8) == pytest.approx(tokens_per_round(6, 0.8))
    assert SequoiaTrees((0.8,), 8, 8).tree(6, 8) == TokenTree.chain(6)
    assert SequoiaTrees((0.5, 0.3, 0.1), 8, 1).expected_tokens(2, 1) == pytest.approx(1.8)
    assert SequoiaTrees((0.5, 0.3), 8, 2).expected_tokens(0, 2) == 1


def test_a_draft_pass_reads_the_nodes_with_children():
    tree = TokenTree(frozenset({(1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1)}))
    assert (tree.size, tree.depth, tree.widths) == (7, 3, [1, 2, 1])
    assert TokenTree.chain(4).widths == [1, 1, 1, 1]
    assert TokenTree(frozenset()).widths == []


def test_a_round_ends_where_the_target_leaves_the_tree():
    tree = TokenTree(frozenset({(1,), (2,), (1, 1), (2, 1)}))
    assert [tree.accepted(ranks) for ranks in ([1, 1, 1], [2, 1, 1], [1, 2, 1], [3, 1, 1], [0, 1, 1])] == [
        *(2, 2, 1, 0, 0)
    ]
    # Rounds of 3, 1, and 2 tokens; the places inside them count for nothing.
    text = [[1, 1], [9, 9], [9, 9], [3, 1], [2, 4], [9, 9]]
    assert list(rounds_of(text, tree, follow=True)) == [(0, 3), (3, 1), (4, 2)]
    assert replay([text], tree, follow=True) == 2
    assert replay([text, [[1, 1]]], tree, follow=True) == pytest.approx(9 / 4)
    # One round at every place: of 3, 1, 1, 1, 2 and 1.
    assert replay([text], tree, follow=False) == pytest.approx(9 / 6)


def test_independent_ranks_bring_what_sequoia_expects():
    rng, acceptance = random.Random(0), (0.6, 0.25, 0.1)
    rows = [rng.choices((1, 2, 3, 0), (*acceptance, 0.05), k=6) for _ in range(40_000)]
    tree = SequoiaTrees(acceptance, 8, 6).tree(8, 6)
    tokens = 1 + sum(map(tree.accepted, rows)) / len(rows)
    assert tokens == pytest.approx(tree.expected_tokens(acceptance), rel=0.02)
    text = [np.array(rows)]
    assert trees.acceptance_vector(text)[:3] == pytest.approx(acceptance, abs=0.01)
    paths = trees.paths_of(text)
    assert likeliest_tree(paths, 8, 6).expected_tokens(acceptance) == pytest.approx(
        tree.expected_tokens(acceptance), rel=0.01
    )
    for shares in trees.by_depth(text).values():
        assert all(share is None or share[0] == pytest.approx(0.6, abs=0.05) for share in shares)


def test_likeliest_paths_keep_their_ancestors():
    reached = Counter({(1,): 9, (1, 1): 5, (2,): 4, (1, 1, 1): 5, (2, 1): 4})
    assert likeliest_tree(reached, 3, 3) == TokenTree.chain(3)
    assert likeliest_tree(reached, 3, 2).nodes == {(1,), (1, 1), (2,)}


@pytest.fixture(scope="module")
def generated():
    model, _ = trees.load_model(TINY_LLAMA)
    cache = DynamicCache()
    prompt = list(texts.library_tokens()[5000:5400])
    return model, draft_ranks.generate(model, prompt, 24, cache), cache


def test_a_draft_that_sees_everything_expects_what_the_target_says(generated):
    model, tokens, cache = generated
    ranks = draft_ranks.draft_ranks(model, tokens, cache, 400, sinks=4, window=396, depth=8)
    assert ranks.shape == (16, 8)
    assert (ranks[0] == 1).all()  # later rounds do not see some of the prompt


@torch.inference_mode()
def test_ranks_are_those_of_a_pass_that_is_masked(generated):
    model, tokens, cache = generated
    sinks, window, depth = 4, 28, 8
    ranks = draft_ranks.draft_ranks(model, tokens, cache, 400, sinks=sinks, window=window, depth=depth)
    assert (ranks != 1).any()
    for row in range(0, len(ranks), 5):
        start = 400 + row
        sees = torch.ones(start + depth, start + depth).tril().bool()
        sees[start:, sinks : start - window] = False
        mask = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))
        logits = model(
            input_ids=torch.tensor([tokens[: start + depth]]), attention_mask=mask[None, None]
        ).logits[0, start:]
        order = logits.argsort(-1, descending=True).tolist()
        following = tokens[start + 1 : start + depth + 1]
        assert [o.index(token) + 1 for o, token in zip(order, following, strict=True)] == ranks[
            row
        ].tolist()


def test_places_of_a_document_are_as_if_it_had_ended_there(generated, monkeypatch):
    model = generated[0]
    document = list(texts.library_tokens()[:400])
    monkeypatch.setattr(trees, "excerpts", lambda *_: [document])
    settings = SimpleNamespace(requests=1, places=3, tokens=5, depth=4, sinks=4, window=28)
    within, after = trees.collect(model, None, None, 400, settings)
    assert (within.follow, after.follow) == (False, True)
    assert after.drafted[0].shape == after.looked_up[0].shape == (5, 4)
    assert within.drafted[0].shape == within.looked_up[0].shape == (3, 4)
    for row, last in enumerate((399, 399 - trees.SPACING, 399 - 2 * trees.SPACING)):
        cache = DynamicCache()
        tokens = draft_ranks.generate(model, document[: last + 1], 5, cache)
        alone = draft_ranks.draft_ranks(model, tokens, cache, last, sinks=4, window=28, depth=4)
        assert alone[0].tolist() == within.drafted[0][row].tolist()
        looked_up = draft_ranks.lookup_ranks(tokens, last + 1)[:4]
        assert looked_up.tolist() == within.looked_up[0][row].tolist()


def slow_lookup(text):
    """What followed the latest tokens before, the best first."""
    found = {}
    for place in range(len(text) - 1):
        length = 0
        while length < min(place + 1, 32) and text[place - length] == text[-1 - length]:
            length += 1
        if length:
            longest, number, _ = found.get(text[place + 1], (0, 0, 0))
            if length >= longest:
                found[text[place + 1]] = (length, number + 1 if length == longest else 1, place)
    return sorted(found, key=found.get, reverse=True)


@pytest.mark.parametrize("kinds", [2, 5, 40])
def test_lookups_rank_what_followed_before(kinds):
    rng = random.Random(kinds)
    tokens = [rng.randrange(kinds) for _ in range(300)]
    tokens += tokens[40:140] + [rng.randrange(kinds) for _ in range(20)]
    for first in (1, 2, 200):
        ranks = draft_ranks.lookup_ranks(tokens, first)
        assert len(ranks) == len(tokens) - first
        for place in range(max(first, 3), len(tokens)):
            order = slow_lookup(tokens[:place])
            expected = order.index(tokens[place]) + 1 if tokens[place] in order else 0
            assert ranks[place - first] == expected


def test_the_first_of_them_is_what_the_plugin_looks_up():
    tokens = list(texts.library_tokens(3000))
    ranks, index = draft_ranks.lookup_ranks(tokens, 2000), ContextIndex()
    index.extend(np.array(tokens[:2000], dtype=np.int32))
    for place in range(2000, len(tokens)):
        found = index.look_up(np.array([], dtype=np.int32), 1).tokens
        assert (found == [tokens[place]]) == (ranks[place - 2000] == 1)
        index.extend(np.array([tokens[place]], dtype=np.int32))


def test_lookups_are_the_same_wherever_a_round_begins():
    assert draft_ranks.by_round(np.arange(6), 3).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_staged_passes():
    # Three drafts by the first pass, whose lookup has two right, then one by each: 4 of 4 in 2 passes.
    assert trees.staged_passes([1, 1, 1, 1, 1], [1, 1, 2, 1, 1], 4) == 2
    # Lookups that are always right: 8 drafts a pass.
    assert trees.staged_passes([1] * 16, [1] * 16, 16) == 2
    assert trees.staged_passes([1] * 16, [0] * 16, 16) == 16
    # The second draft is wrong: what is known is 2 drafts in 1 pass, so 8 take 4.
    assert trees.staged_passes([1, 2, 1, 1, 1, 1, 1, 1], [1] * 8, 8) == 4


def test_a_chain_costs_what_the_planner_says():
    deployment = Deployment(find_model("llama-3.1-8b"), find_hardware("H200"))
    cell = tree_costs.Cell(tree_costs.PlannedCosts("H200", deployment, 512), 8, 16000)
    speedup = cell.speedup(TokenTree.chain(4), tokens_per_round(4, 0.8))
    assert speedup == pytest.approx(deployment.speedup(0.8, 4, 8, 16000, 512))


class LinearTimes:
    """Steps of a machine that is as simple as Eq. 2."""

    def predict(self, step):
        queries = step.verified + 1
        drafting = step.drafted * (1 + 0.1 * step.num_reqs)
        return 1e-3 * (drafting + step.num_reqs * queries + 0.001 * step.context_tokens * queries)


def test_measured_costs_are_differences_of_steps():
    costs = tree_costs.MeasuredCosts("measured", LinearTimes(), budget=256)
    assert costs.plain_ms(4, 1000) == pytest.approx(8)
    assert costs.verify_ms(4, 1000, 3) == pytest.approx(8 * 4)
    assert costs.draft_ms(4, 1000, 1) == costs.draft_ms(4, 1000, 2) == pytest.approx(1.4)
    # Three positions more than two, over the 256 tokens that a draft pass sees.
    assert costs.draft_ms(4, 1000, 5) == pytest.approx(1.4 + 3 * (4 + 0.001 * 4 * 256))
    cell = tree_costs.Cell(costs, 4, 1000)
    tree = TokenTree(frozenset({(1,), (2,), (1, 1), (2, 1)}))
    assert cell.round_ms(tree) == pytest.approx(1.4 + 1.4 + 8 * 5)
    assert cell.speedup(tree, 2.5) == pytest.approx(2.5 * 8 / 42.8)


def test_a_cell_has_the_fastest_of_each_kind():
    rng = np.random.default_rng(0)
    drafted = [rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=(60, 6)) for _ in range(4)]
    looked_up = [rng.choice([0, 1, 2], p=[0.5, 0.4, 0.1], size=(60, 6)) for _ in range(4)]
    rounds = trees.Rounds.replayed(trees.Texts("all", 1000, True, drafted, looked_up), 6)
    cell = tree_costs.Cell(tree_costs.MeasuredCosts("measured", LinearTimes(), 256), 4, 1000)
    compared = trees.compare(cell, rounds)
    best = {name: SimpleNamespace(**each) for name, each in compared["best"].items()}
    tokens = {n: replay(drafted, TokenTree.chain(n), follow=True) for n in range(1, 7)}
    speedups = {n: tokens[n] * 8 / (n * 1.4 + 8 * (n + 1)) for n in tokens}
    assert best["chain"].speedup == pytest.approx(max(speedups.values()))
    assert best["tree"].speedup >= best["tree, as many drafts"].speedup
    assert best["tree, as many drafts"].drafts == best["chain"].drafts
    assert compared["rounds"] == "after documents"
    assert compared["of_size"][4]["chain"]["tokens"] == pytest.approx(tokens[4])
    assert all(best[name].passes == 0 for name in ("lookup chain", "lookup tree"))


def test_expected_tokens_are_products_along_the_paths():
    tree = TokenTree(frozenset({(1,), (1, 2), (2,)}))
    assert tree.expected_tokens((0.6, 0.3)) == pytest.approx(1 + 0.6 + 0.6 * 0.3 + 0.3)


def test_what_a_worse_draft_would_bring():
    rounds = trees.Rounds.supposed([0.9, 0.06, 0.02], 0.8, 12)
    assert rounds.chains[TokenTree.chain(6)] == pytest.approx(tokens_per_round(6, 0.8))
    tree = TokenTree(frozenset({(1,), (2,), (1, 1)}))
    # The second candidates get 60 % of what the first ones leave, as measured.
    assert tree.expected_tokens((0.8, 0.12, 0.04)) == pytest.approx(1 + 0.8 + 0.64 + 0.12)
    best = max(tokens for tree, tokens in rounds.trees.items() if tree.size == 12)
    assert best == pytest.approx(SequoiaTrees((0.8, 0.12, 0.04), 12, 12).expected_tokens(12, 12))
    cell = tree_costs.Cell(tree_costs.MeasuredCosts("measured", LinearTimes(), 256), 4, 1000)
    assert trees.compare(cell, rounds)["best"].keys() == {"chain", "tree", "tree, as many drafts"}
