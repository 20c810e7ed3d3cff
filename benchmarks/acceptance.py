# SPDX-License-Identifier: Apache-2.0
"""Acceptance length by policy and budget: `python benchmarks/acceptance.py --help`.

There are two greedy workloads: continuing long documents, and answering recall questions about one fact
thousands of tokens back (tiny-llama/recall.py). Every engine drafts `--gamma` tokens; acceptance by
position comes from vLLM's counters, and the acceptance length at a smaller gamma is 1 + the sum of the
rates up to it. Requests run one after the other, so that the standard error over documents can be
computed; differences from streamingllm are over the same documents. The oracle is no policy: its drafts
attend to the `budget` tokens of the whole context to which each query attends most, per layer and KV
head; layers with a window keep all of their tokens, which policies cut to the budget.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.documents import encode, excerpts, read_text
from common.engines import PAGE, engine, engine_settings, set_environment
from common.options import add_documents, add_out, make_parser, settings_of
from common.plots import plt, save
from common.policies import POLICIES
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

sys.path.insert(0, str(TINY_LLAMA))
from recall import is_answered, make_episode

ORACLE = "oracle"
CONTENDERS = {**POLICIES, ORACLE: POLICIES["snapkv-token"]}
BASELINE = "streamingllm"
MIN_BUDGET = {"snapkv": 128, "verify-topk": 192}  # leaves at least one page of 32 tokens to choose
ANSWER_TOKENS = 4  # digits; the first comes out of the prefill, a line break follows


@dataclass(frozen=True)
class Counts:
    """vLLM's counters of one workload."""

    rounds: list[int]  # by request
    accepted: list[int]  # by request, drafts at all positions
    accepted_by_position: list[int]  # of all requests

    @property
    def rates(self) -> list[float]:
        """Share of rounds in which the draft at each position was accepted."""
        return [accepted / sum(self.rounds) for accepted in self.accepted_by_position]

    def acceptance_length(self, gamma: int) -> float:
        """Tokens per round with `gamma` drafts."""
        return 1 + sum(self.rates[:gamma])

    @property
    def deviations(self) -> list[float]:
        """Contribution of each request to the error of the acceptance length (linearised ratio)."""
        rate = sum(self.accepted) / sum(self.rounds)
        return [(a - rate * r) / sum(self.rounds) for a, r in zip(self.accepted, self.rounds, strict=True)]


def standard_error(deviations: Sequence[float]) -> float:
    """Return the standard error of an acceptance length, or of a difference of two, over requests."""
    count = len(deviations)
    return math.sqrt(count / (count - 1) * sum(d * d for d in deviations)) if count > 1 else math.nan


@dataclass(frozen=True)
class Result:
    """One policy at one budget."""

    policy: str
    budget: int
    view: int  # most tokens that a draft step read: the budget, rounded up to whole pages by some policies
    documents: Counts
    recall: Counts
    answers: int  # asked
    right: int  # answered correctly, by the target


def install_oracle(worker: Any, budget: int) -> None:
    """Make draft attention keep only the tokens with the highest weights."""
    import torch

    from vllm_magicdec.attention import switch

    def attend(query: Any, rows: Any, slots: Any, lens: Any, *, scale: float, **_: Any) -> Any:
        num_reqs, num_heads, size = query.shape
        keys, values = rows.gather(slots)
        grouped = query.view(num_reqs, rows.num_kv_heads, -1, size).float()
        logits = grouped @ keys.float().transpose(2, 3) * scale
        is_past_end = torch.arange(slots.shape[-1]) >= lens.unsqueeze(1)
        weights = logits.masked_fill_(is_past_end[:, None, None], float("-inf")).softmax(-1)
        best = weights.sum(2, keepdim=True).topk(min(budget, weights.shape[-1]), -1).indices
        kept = torch.zeros_like(weights[:, :, :1]).scatter_(-1, best, 1.0)
        weights = weights * kept
        attended = (weights / weights.sum(-1, keepdim=True)) @ values.float()
        return attended.view(num_reqs, num_heads, size).to(query.dtype)

    switch.attend = attend


def viewed_tokens(vllm_config: Any, policy: str, budget: int) -> int:
    """Return the maximum of tokens that a draft step reads; some policies round up to whole pages."""
    if policy == ORACLE:
        return budget
    from vllm_magicdec.policies import find_policy

    spec = vllm_config.speculative_config
    return (
        find_policy(spec.draft_kv_policy)
        .parse_budget(spec, spec.limits(vllm_config, PAGE), budget)
        .max_tokens
    )


def measure(policy: str, budget: int, args: argparse.Namespace) -> Result:
    """Run one engine, in a separate process."""
    is_oracle = policy == ORACLE
    model_len = args.context + args.tokens + 2 * PAGE
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": args.gamma,
        "draft_kv_budget": model_len if is_oracle else budget,
        **CONTENDERS[policy],
    }
    with engine(engine_settings(args.model, "float32", batch=1, model_len=model_len), spec) as llm:
        if is_oracle:
            llm.collective_rpc(install_oracle, args=(budget,))
        tokenizer = llm.get_tokenizer()
        prompts = excerpts(tokenizer, args.requests, args.context, args.documents)
        documents, _ = generate(llm, prompts, args.tokens)
        lines = read_text(args.documents).splitlines(keepends=True)
        rng = random.Random(0)
        episodes = [
            make_episode(rng, lambda text: len(encode(tokenizer, text)), lines, distance)
            for distance in itertools.islice(itertools.cycle(args.distances), args.questions)
        ]
        prompts = [[tokenizer.bos_token_id, *encode(tokenizer, episode.prompt)] for episode in episodes]
        recall, texts = generate(llm, prompts, ANSWER_TOKENS + 1)
        right = sum(is_answered(text, episode) for text, episode in zip(texts, episodes, strict=True))
        view = viewed_tokens(llm.llm_engine.vllm_config, policy, budget)
    return Result(policy, budget, view, documents, recall, len(episodes), right)


def generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> tuple[Counts, list[str]]:
    """Run the requests one after the other; return the counters and the texts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    counters, texts = [read_counters(llm)], []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        counters.append(read_counters(llm))
        texts.append(output.outputs[0].text)
    steps = list(itertools.pairwise(counters))
    counts = Counts(
        rounds=[after[0] - before[0] for before, after in steps],
        accepted=[sum(after[1:]) - sum(before[1:]) for before, after in steps],
        accepted_by_position=[b - a for a, b in zip(counters[0], counters[-1], strict=True)][1:],
    )
    return counts, texts


def read_counters(llm: Any) -> list[int]:
    """Return the number of rounds, then accepted drafts by position, since the engine started."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return [
        metrics["vllm:spec_decode_num_drafts"].value,
        *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    ]


def results_of(record: Mapping[str, Any]) -> list[Result]:
    workloads = ("documents", "recall")
    return [
        Result(**{**result, **{name: Counts(**result[name]) for name in workloads}})
        for result in record["results"]
    ]


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of policies and budgets of one record, or of several models' records."""
    measured = {name_of_model(record): results_of(record) for record in records}
    gammas = sorted({1, 2, 4, records[0]["settings"]["gamma"]})
    title = "acceptance length, by workload and drafted tokens (gamma); ± standard error"
    documents = (f"documents, {number}" for number in gammas)
    numbers = ("budget", *documents, f"minus {BASELINE}", f"recall, {ANSWER_TOKENS}")
    names = ["policy", "model"] if len(records) > 1 else ["policy"]
    table = make_table(title, numbers, names)
    by_cell = {model: {(r.policy, r.budget): r for r in results} for model, results in measured.items()}
    first, *others = by_cell.values()
    for cell in first:
        if not all(cell in other for other in others):
            continue
        for model, results in measured.items():
            result = by_cell[model][cell]
            lengths = [f"{result.documents.acceptance_length(n):.2f}" for n in gammas]
            lengths[-1] += f" ± {standard_error(result.documents.deviations):.2f}"
            recall = f"{result.recall.acceptance_length(ANSWER_TOKENS):.2f}"
            row = (*lengths, difference_from_baseline(result, results, gammas[-1]), recall)
            budget = str(result.budget) + (f" ({result.view})" if result.view != result.budget else "")
            table.add_row(*(result.policy, model)[: len(names)], budget, *row)
    return table


def name_of_model(record: Mapping[str, Any]) -> str:
    """Return the name of the model's folder; old records lack it."""
    return Path(record["settings"].get("model", TINY_LLAMA)).name


def difference_from_baseline(result: Result, results: list[Result], gamma: int) -> str:
    """Return the acceptance length on documents minus the baseline's, with its standard error."""
    others = [other for other in results if (other.policy, other.budget) == (BASELINE, result.budget)]
    if result.policy == BASELINE or not others:
        return ""
    own, other = result.documents, others[0].documents
    pairs = zip(own.deviations, other.deviations, strict=True)
    error = standard_error([mine - its for mine, its in pairs])
    return f"{own.acceptance_length(gamma) - other.acceptance_length(gamma):+.2f} ± {error:.2f}"


def draw(results: list[Result], gamma: int, path: Path) -> None:
    """Draw acceptance length by budget, and acceptance by position at the middle budget."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5))
    budgets = sorted({result.budget for result in results})
    for policy in dict.fromkeys(result.policy for result in results):
        own = sorted((r for r in results if r.policy == policy), key=lambda r: r.budget)
        style = {"marker": "o", "linestyle": ":" if policy == ORACLE else "-", "label": policy}
        own_budgets = [r.budget for r in own]
        lengths = [r.documents.acceptance_length(gamma) for r in own]
        errors = [standard_error(r.documents.deviations) for r in own]
        left.errorbar(own_budgets, lengths, errors, capsize=3, elinewidth=0.8, **style)
        middle.plot(own_budgets, [r.recall.acceptance_length(ANSWER_TOKENS) for r in own], **style)
        chosen = next(r for r in own if r.budget == budgets[len(budgets) // 2])
        right.plot(range(1, gamma + 1), chosen.documents.rates, **style)
    for axes, title in (
        (left, f"documents, gamma {gamma}, ± standard error"),
        (middle, f"recall answers, first {ANSWER_TOKENS} drafts"),
    ):
        axes.set(title=title, xlabel="budget (tokens)", ylabel="acceptance length (tokens per round)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(b) for b in budgets])
    right.set(
        title=f"documents, budget {budgets[len(budgets) // 2]}",
        xlabel="drafted position",
        ylabel="accepted (share of rounds)",
        ylim=(0, 1),
    )
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = make_parser(__doc__)
    names = list(CONTENDERS)
    parser.add_argument("--model", default=str(TINY_LLAMA), help="its folder or a name of `make models`")
    parser.add_argument("--policies", nargs="+", default=names, choices=names)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--context", type=int, default=6000, help="tokens of a document's excerpt")
    parser.add_argument("--distances", type=int, nargs="+", default=[4000, 5000], help="of the asked fact")
    parser.add_argument("--requests", type=int, default=8, help="documents")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="generated per document")
    add_documents(parser)
    add_out(parser, "; the plot goes beside it")
    args = parser.parse_args()
    # The oracle is a function sent to the worker.
    set_environment(kv_cache_gib=1, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    record = make_record("acceptance", settings=settings_of(args, "model", "policies", "budgets"))
    record["settings"]["model"] = Path(args.model).resolve().name
    results = []
    with model_folder(args.model) as args.model:
        for policy, budget in itertools.product(args.policies, args.budgets):
            if budget < MIN_BUDGET.get(policy, 0):
                continue
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                results.append(pool.submit(measure, policy, budget, args).result())
            console.print(f"{policy}, budget {budget}: done")
    record["results"] = [asdict(result) for result in results]
    console.print(table_of([record]))
    write(record, args.out)
    if args.out:
        draw(results, args.gamma, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
