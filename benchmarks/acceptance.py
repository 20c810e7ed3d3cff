# SPDX-License-Identifier: Apache-2.0
"""Acceptance length by draft weights, policy and budget: `python benchmarks/acceptance.py --help`.

There are two workloads: documents, which a base model continues and a chat model is asked about, and
recall questions about one fact thousands of tokens back (tiny-llama/recall.py). Every engine drafts
`--gamma` tokens; acceptance by position comes from vLLM's counters, and the acceptance length at a smaller
gamma is 1 + the sum of the rates up to it. Standard errors are over requests; differences from
streamingllm are over the same requests. An engine serves all policies and budgets of its weights, one
after the other, because reading the documents takes longest. The oracle is no policy: its drafts attend to
the `budget` tokens of the whole context to which each query attends most, per layer and KV head; layers
with a window keep all of their tokens, which policies cut to the budget.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.documents import encode, excerpts, questions_about, read_text
from common.engines import PAGE, engine, engine_settings, set_environment
from common.options import add_documents, add_out, make_parser, settings_of
from common.policies import POLICIES
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

sys.path.insert(0, str(TINY_LLAMA))
from recall import Episode, is_answered, make_episode

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
    recall: Counts | None  # None: nothing was asked
    answers: int  # asked
    right: int  # answered correctly, by the target
    weights: str = "target"
    temperature: float = 0.0


def install_oracle(worker: Any, budget: int) -> None:
    """Make draft attention keep only the tokens with the highest weights."""
    from vllm_magicdec.attention import switch, torch_attention

    def attend(query: Any, rows: Any, slots: Any, lens: Any, softmax: Any, *_: Any, **__: Any) -> Any:
        num_reqs, num_heads, size = query.shape
        keys, values = rows.gather(slots)
        grouped = query.view(num_reqs, rows.num_kv_heads, -1, size).float()
        logits = grouped @ keys.float().transpose(2, 3) * softmax.scale
        is_past_end = torch.arange(slots.shape[-1]) >= lens.unsqueeze(1)
        weights = logits.masked_fill_(is_past_end[:, None, None], float("-inf")).softmax(-1)
        best = weights.sum(2, keepdim=True).topk(min(budget, weights.shape[-1]), -1).indices
        kept = torch.zeros_like(weights[:, :, :1]).scatter_(-1, best, 1.0)
        weights = weights * kept
        attended = (weights / weights.sum(-1, keepdim=True)) @ values.float()
        return attended.view(num_reqs, num_heads, size).to(query.dtype)

    torch_attention.attend = attend
    switch.takes_view = lambda metadata: False  # of the plugin's kernel


def set_view(spec: Any, fields: Mapping[str, Any]) -> None:
    """Set the fields of a view in a speculative configuration."""
    for name, value in fields.items():
        setattr(spec, name, value)


def draft_over(worker: Any, fields: Mapping[str, Any]) -> None:
    """Let the worker of an engine on a CPU draft over another view."""
    runner = worker.model_runner
    set_view(runner.drafter.speculative_config, fields)
    runner.drafter.initialize_attn_backend(runner.kv_cache_config)


def viewed_tokens(vllm_config: Any, policy: str, budget: int) -> int:
    """Return the maximum of tokens that a draft step reads; some policies round up to whole pages."""
    if policy == ORACLE:
        return budget
    spec = vllm_config.speculative_config
    return spec.policy.parse_budget(spec, spec.limits(vllm_config, PAGE), budget).max_tokens


def view_of(policy: str, budget: int, model_len: int) -> dict[str, Any]:
    """Return the fields of a view."""
    size = model_len if policy == ORACLE else budget
    return {"draft_kv_granularity": None, **CONTENDERS[policy], "draft_kv_budget": size}


def measure(weights: str, cells: Sequence[tuple[str, int]], args: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of an engine over views, by policy and budget; several need a CPU."""
    model_len = args.context + args.tokens + 256
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": args.gamma,
        "draft_weights": weights,
        "draft_sample_method": args.draft_sample_method,
        **view_of(*cells[0], model_len),
    }
    settings = engine_settings(args.model, args.dtype, batch=args.requests, model_len=model_len)
    with engine(settings, spec) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = excerpts(tokenizer, args.ask or args.requests, args.context, args.documents)
        if args.ask:
            prompts = questions_about(tokenizer, prompts, args.requests)
        episodes = make_episodes(tokenizer, args)
        for index, (policy, budget) in enumerate(cells):
            if index:
                fields = view_of(policy, budget, model_len)
                set_view(llm.llm_engine.vllm_config.speculative_config, fields)
                llm.collective_rpc(draft_over, args=(fields,))
            if policy == ORACLE:
                llm.collective_rpc(install_oracle, args=(budget,))
            view = viewed_tokens(llm.llm_engine.vllm_config, policy, budget)
            for temperature in args.temperatures:
                documents, _ = generate(llm, prompts, args.tokens, temperature)
                recall, right = answer(llm, episodes) if episodes else (None, 0)
                yield Result(
                    *(policy, budget, view, documents, recall, len(episodes), right),
                    weights=weights,
                    temperature=temperature,
                )


def make_episodes(tokenizer: Any, args: argparse.Namespace) -> list[Episode]:
    """Draw the recall questions."""
    lines = read_text(args.documents).splitlines(keepends=True)
    rng = random.Random(0)
    return [
        make_episode(rng, lambda text: len(encode(tokenizer, text)), lines, distance)
        for distance in itertools.islice(itertools.cycle(args.distances), args.questions)
    ]


def answer(llm: Any, episodes: Sequence[Episode]) -> tuple[Counts, int]:
    """Answer the questions greedily; return the counters and the number of right answers."""
    tokenizer = llm.get_tokenizer()
    prompts = [[tokenizer.bos_token_id, *encode(tokenizer, episode.prompt)] for episode in episodes]
    recall, texts = generate(llm, prompts, ANSWER_TOKENS + 1)
    return recall, sum(is_answered(text, episode) for text, episode in zip(texts, episodes, strict=True))


def generate(
    llm: Any, prompts: list[list[int]], num_tokens: int, temperature: float = 0.0
) -> tuple[Counts, list[str]]:
    """Run the requests as one batch; return the counters and the texts."""
    from vllm import SamplingParams

    before = read_counters(llm)
    stamp = time.monotonic_ns()
    ids = [f"{index}-{stamp}" for index in range(len(prompts))]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=index)
        llm.llm_engine.add_request(ids[index], {"prompt_token_ids": prompt}, params)
    outputs: dict[str, list[Any]] = {name: [] for name in ids}  # the first is the prompt's
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            outputs[output.request_id].append(output.outputs[0])
    counts = Counts(
        rounds=[len(own) - 1 for own in outputs.values()],
        accepted=[len(own[-1].token_ids) - len(own) for own in outputs.values()],
        accepted_by_position=[b - a for a, b in zip(before, read_counters(llm), strict=True)],
    )
    return counts, [own[-1].text for own in outputs.values()]


def read_counters(llm: Any) -> list[int]:
    """Return the accepted drafts by position since the engine started."""
    (metric,) = (m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    return list(metric.values)


def results_of(record: Mapping[str, Any]) -> list[Result]:
    workloads = ("documents", "recall")
    return [
        Result(**{**result, **{name: Counts(**result[name]) for name in workloads if result[name]}})
        for result in record["results"]
    ]


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of policies and budgets of one record, or of several models' records."""
    measured = {name_of_model(record): results_of(record) for record in records}
    gamma = records[0]["settings"]["gamma"]
    if any((r.weights, r.temperature) != ("target", 0) for own in measured.values() for r in own):
        return weights_table_of(measured, gamma)
    gammas = sorted({1, 2, 4, gamma})
    title = "acceptance length, by workload and drafted tokens (gamma); ± standard error"
    documents = (f"documents, {number}" for number in gammas)
    numbers = ("budget", *documents, f"minus {BASELINE}", f"recall, {ANSWER_TOKENS}")
    table = make_table(title, numbers, ["policy", "model"])
    for model, results in measured.items():
        for result in results:
            lengths = [f"{result.documents.acceptance_length(n):.2f}" for n in gammas]
            lengths[-1] += f" ± {standard_error(result.documents.deviations):.2f}"
            recall = f"{result.recall.acceptance_length(ANSWER_TOKENS):.2f}" if result.recall else ""
            row = (*lengths, difference_from_baseline(result, results, gammas[-1]), recall)
            budget = str(result.budget) + (f" ({result.view})" if result.view != result.budget else "")
            table.add_row(result.policy, model, budget, *row)
    return table


def weights_table_of(measured: Mapping[str, Sequence[Result]], gamma: int) -> Table:
    """Return a table with a column per draft weights and temperature."""
    found = dict.fromkeys((r.temperature, r.weights) for own in measured.values() for r in own)
    kinds = sorted(found, key=lambda kind: kind[0])  # weights stay in their order
    title = f"acceptance length, {gamma} drafts; ± standard error"
    columns = [f"{weights}{f', T = {t:g}' if t else ''}" for t, weights in kinds]
    table = make_table(title, ["budget", *columns], ["model", "policy"])
    for model, results in measured.items():
        for policy, budget in dict.fromkeys((r.policy, r.budget) for r in results):
            lengths = {
                (r.temperature, r.weights): f"{r.documents.acceptance_length(gamma):.2f} ± "
                f"{standard_error(r.documents.deviations):.2f}"
                for r in results
                if (r.policy, r.budget) == (policy, budget)
            }
            cells = (lengths.get(kind, "") for kind in kinds)
            table.add_row(model, policy, str(budget), *cells)
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


def main() -> None:
    parser = make_parser(__doc__)
    names = list(CONTENDERS)
    parser.add_argument("--model", default=str(TINY_LLAMA), help="its folder or a name of `make models`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", nargs="+", default=names, choices=names)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--weights", nargs="+", default=["target"], help="values of draft_weights")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--draft-sample-method",
        default="greedy",
        choices=("greedy", "probabilistic"),
        help="how drafts are chosen at temperatures above 0 (default: %(default)s, vLLM's)",
    )
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--context", type=int, default=6000, help="tokens of a document's excerpt")
    parser.add_argument("--distances", type=int, nargs="+", default=[4000, 5000], help="of the asked fact")
    parser.add_argument("--requests", type=int, default=8, help="documents, or questions about them")
    parser.add_argument("--ask", type=int, default=0, help="documents to ask about; 0: continue documents")
    parser.add_argument("--questions", type=int, default=16, help="of the recall task")
    parser.add_argument("--tokens", type=int, default=96, help="generated per request")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    # Views are exchanged by functions sent to the worker.
    set_environment(kv_cache_gib=2, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    record = make_record("acceptance", settings=settings_of(args, "model", "policies", "budgets"))
    record["settings"]["model"] = Path(args.model).resolve().name
    record["results"] = []
    cells = [
        (policy, budget)
        for policy, budget in itertools.product(args.policies, args.budgets)
        if budget >= MIN_BUDGET.get(policy, 0)
    ]
    # The oracle's attention stays, so it comes last. CUDA graphs keep their views.
    cells.sort(key=lambda cell: cell[0] == ORACLE)
    engines = [[cell] for cell in cells] if torch.cuda.is_available() else [cells]
    with model_folder(args.model) as args.model:
        for weights, views in itertools.product(args.weights, engines):
            for result in measure(weights, views, args):
                record["results"].append(asdict(result))
                write(record, args.out)
                console.print(
                    f"{weights}, {result.policy}, {result.budget}, T = {result.temperature:g}: "
                    f"{result.documents.acceptance_length(args.gamma):.2f}"
                )
    console.print(table_of([record]))


if __name__ == "__main__":
    main()
