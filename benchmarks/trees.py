# SPDX-License-Identifier: Apache-2.0
"""What a tree of drafts would bring over a chain, before anybody builds one.

1. Acceptance by rank. The shipped model goes on greedily with long documents; its draft, the same model
   over the first and the latest tokens, ranks its candidates at every place and every depth of a round.
   Lookups rank what followed earlier occurrences of the latest tokens.
2. The best tree of every size and depth, by Sequoia's dynamic programme for the acceptance by rank.
3. The tokens per round of chains and trees, not as the programme expects them but as the same texts had
   them, round after round.
4. What rounds take: step times of the KV-heavy copy, measured in an engine here, and of Llama-3.1-8B on an
   H200, predicted (`magicdec plan`). Attention that lets a tree's nodes see their ancestors alone, which
   vLLM does not have, is free, and so is the choice of candidates. So this is what a tree gains at most.

All trees are static, as Sequoia's are, and all rounds of a cell have the same one. Beside them, what makes
a chain cheaper without a tree: staged passes, each of which reads tokens that a lookup proposes and keeps
those that the draft would have drawn. How many passes a round takes is known up to its first rejected
draft; the rest is supposed to take as many for each draft.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from common.documents import describe_documents, excerpts
from common.engines import set_environment
from common.options import add_documents, add_out, make_parser, served_dtype, settings_of
from common.record import make_record
from common.tables import console, make_table
from draft_ranks import by_round, draft_ranks, generate, lookup_ranks
from kv_heavy import TINY_LLAMA
from rich.table import Table
from token_trees import Node, SequoiaTrees, TokenTree, likeliest_tree, replay, rounds_of
from tree_costs import MEASURED_DRAFTS, Cell, Costs, MeasuredCosts, PlannedCosts, measure

from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.planner.hardware import find_hardware
from vllm_magicdec.planner.models import find_model
from vllm_magicdec.planner.performance import Deployment

NUM_RANKS = 8  # candidates that a tree may have for one token
SHOWN_RANKS, SHOWN_DEPTHS = 3, 8  # in the JSON file
LOOKED_UP = 7  # tokens that a staged pass reads beside its own, at most
SIZES = (4, 8, 16)  # at which trees are compared with chains, beside the best ones
PLANNED_MODEL, PLANNED_DEVICE = "llama-3.1-8b", "H200"
PLANNED_BATCHES = (1, 8, 24, 48)  # as many contexts of 16,000 tokens fit into its memory
TEXTS = "all"  # documents of all kinds together
ROUNDS = {False: "within documents", True: "after documents"}  # by whether they follow each other
SUPPOSED_FIRST = 0.8  # MagicDec's acceptance, of larger models on text that repeats itself less
SUPPOSED = f"supposed {SUPPOSED_FIRST:.0%}"
MAX_SIZE = MEASURED_DRAFTS[-1]  # drafts of a tree
SPACING = 16  # tokens from one place within a document to the next


@dataclass(frozen=True)
class Texts:
    """Where rounds were tried, by documents of one kind and one length. Ranks as in draft_ranks.py, of each
    document [num_starts, depth]."""

    documents: str
    context: int
    follow: bool  # in what the target has written, one after the other; else at places of the document
    drafted: list[np.ndarray]
    looked_up: list[np.ndarray]

    @classmethod
    def together(cls, parts: Sequence["Texts"]) -> "Texts":
        """Of documents of all kinds."""
        drafted = [ranks for part in parts for ranks in part.drafted]
        looked_up = [ranks for part in parts for ranks in part.looked_up]
        return cls(TEXTS, parts[0].context, parts[0].follow, drafted, looked_up)


@dataclass(frozen=True)
class Round:
    """One way to make rounds in a cell, and what it brings."""

    drafts: int
    passes: float
    tokens: float  # per round
    speedup: float  # over plain decoding


# ---- acceptance by rank


def collect(
    model: Any, tokenizer: Any, documents: Path | None, context: int, args: argparse.Namespace
) -> tuple[Texts, Texts]:
    """Rank what the target says at places of documents, and in what it writes after them."""
    from transformers import DynamicCache

    within, after = [], []
    for document in excerpts(tokenizer, args.requests, context, documents):
        cache = DynamicCache()

        def ranks(prompt: list[int], num_tokens: int, cache: Any = cache) -> list[np.ndarray]:
            """After the last token of the prompt, and after those that follow."""
            tokens, last = generate(model, prompt, num_tokens, cache), len(prompt) - 1
            view = {"sinks": args.sinks, "window": args.window, "depth": args.depth}
            drafted = draft_ranks(model, tokens, cache, last, **view)
            return [drafted, by_round(lookup_ranks(tokens, last + 1), args.depth)]

        after.append(ranks(document, args.tokens + args.depth - 1))
        found = []
        for place in range(context - 1, context - 1 - args.places * SPACING, -SPACING):
            cache.crop(place - cache.get_seq_length())
            found.append(ranks(document[: place + 1], args.depth))
        within.append([np.concatenate(same) for same in zip(*found, strict=True)])
    name = describe_documents(documents)
    console.print(f"acceptance at {context} tokens of {name}: measured")
    drafted, looked_up = zip(*within, strict=True)
    places = Texts(name, context, False, list(drafted), list(looked_up))
    drafted, looked_up = zip(*after, strict=True)
    return places, Texts(name, context, True, list(drafted), list(looked_up))


def collect_all(args: argparse.Namespace) -> list[Texts]:
    """Of every length: documents of all kinds together, and of each kind."""
    model, tokenizer = load_model(TINY_LLAMA)
    kinds = [None, args.documents] if args.documents else [None]
    all_texts = []
    for context in args.context:
        parts = [collect(model, tokenizer, documents, context, args) for documents in kinds]
        for same in zip(*parts, strict=True):
            all_texts += [Texts.together(same), *same]
    return all_texts


def acceptance_vector(texts: Sequence[np.ndarray]) -> list[float]:
    """p_1, p_2, ...: how often the target's token is the candidate of that rank, at any depth."""
    ranks = np.concatenate(texts)
    return [float((ranks == rank).mean()) for rank in range(1, NUM_RANKS + 1)]


def by_depth(texts: Sequence[np.ndarray]) -> dict[str, list[list[float] | None]]:
    """The same at each depth, by what stood before: anything, first candidates alone, or others too.

    Sequoia supposes that all of them are alike. None: nothing was there.
    """
    ranks = np.concatenate(texts)
    firsts = np.cumprod(ranks == 1, axis=1)[:, :-1]  # up to each depth
    only_firsts = np.hstack([np.ones((len(ranks), 1)), firsts]).astype(bool)
    kinds = {
        "any before": np.ones_like(only_firsts),
        "first ranks before": only_firsts,
        "other ranks before": ~only_firsts,
    }
    return {
        name: [
            [float((there == rank).mean()) for rank in range(1, SHOWN_RANKS + 1)] if there.size else None
            for there in (
                ranks[kept[:, depth], depth] for depth in range(min(SHOWN_DEPTHS, ranks.shape[1]))
            )
        ]
        for name, kept in kinds.items()
    }


def paths_of(texts: Sequence[np.ndarray]) -> Counter[Node]:
    """How often the target's tokens went along each path of ranks."""
    rows = [tuple(row) for text in texts for row in text.tolist()]
    paths = (row[:depth] for row in rows for depth in range(1, len(row) + 1))
    return Counter(path for path in paths if all(1 <= rank <= NUM_RANKS for rank in path))


def check_assumption(ranks: Sequence[np.ndarray], size: int, depth: int, follow: bool) -> dict[str, float]:
    """Tokens per round of one size of chain and tree, as Sequoia expects them and as they were.

    The last is that of trees which suppose nothing, each made from one half of the documents for the other.
    """
    acceptance = acceptance_vector(ranks)
    chain = TokenTree.chain(min(size, depth))
    tree = SequoiaTrees(acceptance, size, depth).tree(size, depth)
    halves = (ranks[::2], ranks[1::2])
    likeliest = [likeliest_tree(paths_of(half), size, depth) for half in halves]
    crossed = zip(halves, likeliest[::-1], strict=True)
    return {
        "drafts": size,
        "chain expected": chain.expected_tokens(acceptance),
        "chain": replay(ranks, chain, follow=follow),
        "tree expected": tree.expected_tokens(acceptance),
        "tree": replay(ranks, tree, follow=follow),
        "likeliest paths": float(np.mean([replay(half, tree, follow=follow) for half, tree in crossed])),
    }


def describe(texts: Texts, depth: int) -> dict[str, Any]:
    """For the record."""
    return {
        "documents": texts.documents,
        "context": texts.context,
        "rounds": ROUNDS[texts.follow],
        "num_documents": len(texts.drafted),
        **{
            source: {
                "acceptance": acceptance_vector(ranks),
                "by_depth": by_depth(ranks),
                "tokens_per_round": [check_assumption(ranks, size, depth, texts.follow) for size in SIZES],
            }
            for source, ranks in (("draft", texts.drafted), ("lookup", texts.looked_up))
        },
    }


# ---- rounds


def staged_passes(drafted: Sequence[int], looked_up: Sequence[int], drafts: int) -> float:
    """Passes of a round that drafts a chain, each pass reading what a lookup proposes.

    Args:
        drafted: ranks of the target's tokens among the draft's candidates, by depth.
        looked_up: among what the lookup found.
        drafts: of the round.
    """
    right = TokenTree.chain(drafts).accepted(drafted)  # there the draft's tokens are the target's
    made = passes = 0
    while made < drafts and made <= right:
        passes += 1
        proposed = looked_up[made : min(right, made + LOOKED_UP)]
        made += TokenTree.chain(LOOKED_UP).accepted(proposed) + 1
    return passes * drafts / min(made, drafts)


def replay_staged(texts: Texts, drafts: int) -> tuple[float, float]:
    """Tokens and passes per round of a chain with staged passes."""
    rounds = [
        (tokens, staged_passes(drafted[place].tolist(), looked_up[place].tolist(), drafts))
        for drafted, looked_up in zip(texts.drafted, texts.looked_up, strict=True)
        for place, tokens in rounds_of(drafted, TokenTree.chain(drafts), follow=texts.follow)
    ]
    tokens, passes = np.mean(rounds, axis=0).tolist()
    return tokens, passes


@dataclass(frozen=True)
class Rounds:
    """Every chain and tree for the texts of one context, with its tokens per round."""

    name: str
    chains: dict[TokenTree, float]
    trees: dict[TokenTree, float]
    lookup_chains: dict[TokenTree, float]
    lookup_trees: dict[TokenTree, float]
    staged: dict[int, tuple[float, float]]  # by drafts of a chain: tokens, passes

    @classmethod
    def replayed(cls, texts: Texts, max_depth: int) -> "Rounds":
        """As the texts had them."""
        drafted, looked_up = (
            trees_for(acceptance_vector(ranks), max_depth) for ranks in (texts.drafted, texts.looked_up)
        )
        return cls(
            ROUNDS[texts.follow],
            tokens_of(chains_to(max_depth), texts.drafted, texts.follow),
            tokens_of(drafted, texts.drafted, texts.follow),
            tokens_of(chains_to(max_depth), texts.looked_up, texts.follow),
            tokens_of(looked_up, texts.looked_up, texts.follow),
            {chain.size: replay_staged(texts, chain.size) for chain in chains_to(max_depth)},
        )

    @classmethod
    def supposed(cls, acceptance: Sequence[float], first: float, max_depth: int) -> "Rounds":
        """As Sequoia expects them of a draft whose first candidates stand less often.

        Args:
            acceptance: measured; what the first candidates leave is divided among the others as here.
            first: p_1.
            max_depth: of a chain or a tree.
        """
        share = (1 - first) / (1 - acceptance[0]) if acceptance[0] < 1 else 0.0
        vector = [first, *(share * chance for chance in acceptance[1:])]
        chains, trees = (
            {tree: tree.expected_tokens(vector) for tree in kind}
            for kind in (chains_to(max_depth), trees_for(vector, max_depth))
        )
        return cls(SUPPOSED, chains, trees, {}, {}, {})


def chains_to(max_depth: int) -> list[TokenTree]:
    """Of every length."""
    return [TokenTree.chain(length) for length in range(1, max_depth + 1)]


def trees_for(acceptance: Sequence[float], max_depth: int) -> set[TokenTree]:
    """The best tree of every size and depth, and chains, which are trees too."""
    trees = SequoiaTrees(acceptance, MAX_SIZE, max_depth)
    best = {trees.tree(s, d) for s in range(1, MAX_SIZE + 1) for d in range(1, max_depth + 1)}
    return best | set(chains_to(max_depth))


def tokens_of(
    trees: Iterable[TokenTree], texts: Sequence[np.ndarray], follow: bool
) -> dict[TokenTree, float]:
    """Tokens per round."""
    rows = [text.tolist() for text in texts]
    return {tree: replay(rows, tree, follow=follow) for tree in trees}


def fastest(rounds: Iterable[Round], size: int | None = None) -> Round:
    """Of all, or of those with so many drafts."""
    return max((r for r in rounds if size in (None, r.drafts)), key=lambda r: r.speedup)


def compare(cell: Cell, rounds: Rounds) -> dict[str, Any]:
    """What a chain, a tree and their rivals bring in a cell."""

    def made(tree: TokenTree, tokens: float) -> Round:
        return Round(tree.size, tree.depth, tokens, cell.speedup(tree, tokens))

    def found(tree: TokenTree, tokens: float) -> Round:
        return Round(tree.size, 0, tokens, tokens * cell.plain_ms / cell.verify_ms(tree.size))

    chains = [made(*item) for item in rounds.chains.items()]
    trees = [made(*item) for item in rounds.trees.items()]
    staged = [
        Round(
            drafts,
            passes,
            tokens,
            tokens * cell.plain_ms / (passes * cell.draft_ms(LOOKED_UP + 1) + cell.verify_ms(drafts)),
        )
        for drafts, (tokens, passes) in rounds.staged.items()
    ]
    looked_up = {
        "lookup chain": [found(*item) for item in rounds.lookup_chains.items()],
        "lookup tree": [found(*item) for item in rounds.lookup_trees.items()],
    }
    best = {
        "chain": fastest(chains),
        "tree": fastest(trees),
        "tree, as many drafts": fastest(trees, fastest(chains).drafts),
        **{name: fastest(each) for name, each in {"staged chain": staged, **looked_up}.items() if each},
    }
    return {
        "rounds": rounds.name,
        "costs": cell.costs.name,
        "batch": cell.batch,
        "context": cell.context,
        "plain_ms": cell.plain_ms,
        "draft_ms": {width: cell.draft_ms(width) for width in (1, 2, 4, 8)},
        "verify_ms": {drafts: cell.verify_ms(drafts) for drafts in MEASURED_DRAFTS},
        "best": {name: asdict(each) for name, each in best.items()},
        "of_size": {
            size: {
                "chain": asdict(fastest(chains, size)),
                "tree": asdict(fastest(trees, size)),
            }
            for size in SIZES
            if size <= max(chain.drafts for chain in chains)
        },
    }


# ---- the record


def table_of(record: Mapping[str, Any]) -> Table:
    """The best chain and the best trees of every cell, by how rounds were tried."""
    cells: dict[tuple[str, int, int], dict[str, dict[str, Round]]] = defaultdict(dict)
    for cell in sorted(record["cells"], key=lambda cell: (cell["context"], cell["batch"])):
        best = {name: Round(**each) for name, each in cell["best"].items()}
        cells[cell["costs"], cell["batch"], cell["context"]][cell["rounds"]] = best
    measured = list(ROUNDS.values())
    numbers = ["batch", "context"]
    for kind in (*measured, SUPPOSED):
        numbers += [f"{kind}: chain", "tree of as many", "best tree"]
        numbers += ["staged chain"] if kind in measured else []
    title = "speedup over plain (drafts; of trees: drafts in passes)"
    table = make_table(title, numbers, ["costs"])
    names = list(dict.fromkeys(cell["costs"] for cell in record["cells"]))
    for (costs, batch, context), by_kind in sorted(cells.items(), key=lambda item: names.index(item[0][0])):
        row = []
        for kind in (*measured, SUPPOSED):
            best = by_kind[kind]
            chain, tree, same = best["chain"], best["tree"], best["tree, as many drafts"]
            row += [f"{chain.speedup:.2f} ({chain.drafts})", f"{same.speedup:.2f} (in {same.passes})"]
            row += [f"{tree.speedup:.2f} ({tree.drafts} in {tree.passes})"]
            row += [f"{best['staged chain'].speedup:.2f}"] if kind in measured else []
        table.add_row(costs, str(batch), f"{context:,}", *row)
    return table


def load_model(folder: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that the draft sees")
    parser.add_argument("--window", type=int, default=252, help="latest tokens that it sees")
    parser.add_argument("--requests", type=int, default=8, help="documents of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="written after each document")
    parser.add_argument("--places", type=int, default=24, help="within each document where rounds begin")
    parser.add_argument(
        "--depth", type=int, default=16, help="drafts of a chain and levels of a tree, at most"
    )
    parser.add_argument(
        "--profile", type=Path, help="step times: a result of this script, instead of measuring"
    )
    parser.add_argument(
        "--most-tokens", type=int, default=64_000, help="of a batch whose step times are measured"
    )
    parser.add_argument(
        "--dtype", default=served_dtype(), help="of the model that is measured; %(default)s on this machine"
    )
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    least = args.sinks + args.window + args.places * SPACING
    if min(args.context) < least:
        parser.error(f"{args.places} places and a view need {least} tokens of --context; raise it")
    # The scheduler, which holds the times, must be within reach.
    set_environment(kv_cache_gib=1, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    record = make_record("trees", settings=settings_of(args, "profile"))

    # In a process of its own: lookups import llvmlite (see vllm_api/cpu_llvmlite.py).
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        all_texts = pool.submit(collect_all, args).result()
    record["acceptance"] = [describe(texts, args.depth) for texts in all_texts]

    budget = args.sinks + args.window
    times = (
        StepTimes.load(args.profile)
        if args.profile
        else measure(args.batch, args.context, budget, args.most_tokens, args.dtype)
    )
    shape, device = find_model(PLANNED_MODEL), find_hardware(PLANNED_DEVICE)
    here = MeasuredCosts("measured here", times, budget)
    there = PlannedCosts(f"{shape.name}, {PLANNED_DEVICE}", Deployment(shape, device), budget)
    cells: list[tuple[Costs, int]] = [
        *((here, batch) for batch in args.batch),
        *((there, batch) for batch in PLANNED_BATCHES),
    ]
    record["cells"] = []
    for texts in (texts for texts in all_texts if texts.documents == TEXTS):
        kinds_of_rounds = [Rounds.replayed(texts, args.depth)]
        if not texts.follow:
            vector = acceptance_vector(texts.drafted)
            kinds_of_rounds.append(Rounds.supposed(vector, SUPPOSED_FIRST, args.depth))
        record["cells"] += [
            compare(Cell(costs, batch, texts.context), rounds)
            for rounds in kinds_of_rounds
            for costs, batch in cells
        ]
    console.print(table_of(record))
    if args.out:  # a profile too, with the measured steps
        times.save(args.out, record)
        console.print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
