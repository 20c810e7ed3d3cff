# SPDX-License-Identifier: Apache-2.0
"""Compare the acceptance length of a trained draft with others: `python benchmarks/spire.py --help`.

The four drafts for the shipped model are a small, separately trained model over its full cache and over
sinks and a window; the target itself over sinks and a window; and SPIRe. Each drafts `--gamma` tokens.
Texts are held-out modules of the standard library, the documents of a folder, and recall questions
(examples/tiny-llama/recall.py). The target continues each text greedily and at temperature 1, and rounds
start every few of its tokens:

- greedy: drafts are the most likely tokens, accepted while the target would choose the same;
- temperature 1: drafts are sampled from q, and the *expected* acceptance of the sampled path is computed,
  with the last factor summed over the vocabulary: the sum over j of sum(min(p_j, q_j)) times the product
  over i < j of min(1, p_i / q_i).

The acceptance length is one more. Only the texts and the paths are random.
"""

import argparse
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol

import torch
from common.documents import encode, excerpts
from common.options import add_out, make_parser
from common.record import make_record, write
from common.tables import console, make_table
from common.trained_drafts import DraftState, load
from kv_heavy import TINY_LLAMA
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_magicdec.spire.model import SpireDraft
from vllm_magicdec.spire.target import Target

sys.path.insert(0, str(TINY_LLAMA))
from recall import make_episode
from train import read_library

BENCHMARKS = Path(__file__).resolve().parent
CONTEXTS = (256, 1000, 4000, 7000)


class Draft(Protocol):
    """A draft that continues prefixes of a text whose tokens are all known."""

    def read(self, text: "Text") -> None:
        """Read the whole text."""

    def start(self, num_verified: int) -> Callable[[int], Tensor]:
        """Start a round after `num_verified` tokens, which increase from call to call.

        Returns:
            A function from a token to the logits of the next, `[vocab_size]`.
        """


class LlamaDraft:
    """A Llama over its own cache: all of it, or sinks and a window."""

    def __init__(self, model: Any, sinks: int | None, window: int, is_target: bool = False) -> None:
        self._model, self._sinks, self._window, self._is_target = model, sinks, window, is_target
        self._cache: list[tuple[Tensor, Tensor]] = []

    def read(self, text: "Text") -> None:
        cache = text.cache
        if not self._is_target:
            cache = DynamicCache(config=self._model.config)
            self._model.model(text.tokens[None], past_key_values=cache)
        self._cache = [(layer.keys, layer.values) for layer in cache.layers]

    def start(self, num_verified: int) -> Callable[[int], Tensor]:
        drafted: list[int] = []

        def step(token: int) -> Tensor:
            # The window moves with every draft and always contains the drafted tokens.
            at = num_verified + len(drafted)
            if self._sinks is None:
                seen = torch.arange(num_verified)
            else:
                positions = torch.arange(num_verified)
                seen = positions[(positions < self._sinks) | (positions > at - self._window)]
            cache = DynamicCache(config=self._model.config)
            for index, (keys, values) in enumerate(self._cache):
                cache.update(keys[:, :, seen], values[:, :, seen], index)
                for own in own_entries[index]:
                    cache.update(*own, index)
            logits = self._model(
                torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[at]])
            ).logits
            for index, layer in enumerate(cache.layers):
                own_entries[index].append((layer.keys[:, :, -1:], layer.values[:, :, -1:]))
            drafted.append(token)
            return logits[0, -1]

        own_entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._cache]
        return step


class TrainedDraft:
    """A SPIRe draft."""

    def __init__(self, draft: SpireDraft) -> None:
        self._draft = draft

    def read(self, text: "Text") -> None:
        self._state, self._activations = DraftState(self._draft, len(text.tokens) + 1), text.activations

    def start(self, num_verified: int) -> Callable[[int], Tensor]:
        self._state.verify(self._activations[self._state.num_verified : num_verified])
        return self._state.step


@dataclass(frozen=True)
class Text:
    """A context and the target's continuation."""

    tokens: Tensor  # [context + written]
    context: int
    cache: Any  # the target's cache of all tokens
    activations: Tensor  # [context + written, layers, hidden_size]


def write_texts(target: Target, prompt: list[int], count: int, layers: tuple[int, ...]) -> list[Text]:
    """Continue a prompt with the target, greedily and at temperature 1."""
    read = DynamicCache(config=target.config)
    read_activations, read_logits = target.run(torch.tensor([prompt]), layers, read)
    texts = []
    for sampled in (False, True):
        cache = DynamicCache(config=target.config)
        for index, layer in enumerate(read.layers):
            cache.update(layer.keys, layer.values, index)
        tokens, activations, logits = list(prompt), [read_activations[0]], read_logits[0, -1]
        for _ in range(count):
            token = torch.multinomial(logits.softmax(-1), 1) if sampled else logits.argmax(-1, keepdim=True)
            tokens.append(int(token))
            more, logits = target.run(token[None], layers, cache)
            activations.append(more[0])
            logits = logits[0, -1]
        texts.append(Text(torch.tensor(tokens), len(prompt), cache, torch.cat(activations)))
    return texts


def greedy_accepted(step: Callable[[int], Tensor], text: Text, start: int, gamma: int) -> int:
    """Return the number of a round's drafts that equal the target's tokens."""
    for count in range(gamma):
        at = start + count
        if int(step(int(text.tokens[at])).argmax()) != int(text.tokens[at + 1]):
            return count
    return gamma


def expected_accepted(
    target: Target, step: Callable[[int], Tensor], text: Text, start: int, gamma: int
) -> float:
    """Return the expected acceptance of one sampled path."""
    token = int(text.tokens[start])
    path, qs = [token], []
    for _ in range(gamma):
        q = step(path[-1]).float().softmax(-1)
        qs.append(q)
        path.append(int(torch.multinomial(q, 1)))
    cache = DynamicCache(config=target.config)
    for index, layer in enumerate(text.cache.layers):
        cache.update(layer.keys[:, :, :start], layer.values[:, :, :start], index)
    ps = target.model(torch.tensor([path[:-1]]), past_key_values=cache).logits[0].float().softmax(-1)
    expected, reached = 0.0, 1.0
    for p, q, sampled in zip(ps, qs, path[1:], strict=True):
        expected += reached * float(torch.minimum(p, q).sum())
        reached *= min(1.0, float(p[sampled] / q[sampled]))
    return expected


def prompts_of(workload: str, context: int, args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Return prompts as token ids, with the token that begins a prompt."""
    begin = [tokenizer.bos_token_id]
    rng = random.Random(args.seed)
    if workload == "recall":
        lines = [line for document in read_library()[1] for line in document]
        return [
            begin
            + encode(
                tokenizer,
                make_episode(
                    rng, lambda text: len(encode(tokenizer, text)), lines, max(64, context - 150)
                ).prompt,
            )
            for _ in range(args.texts)
        ]
    if workload == "speeches":
        return [begin + each for each in excerpts(tokenizer, args.texts, context - 1, args.speeches)]
    text = "".join(line for document in read_library()[1] for line in document)
    tokens = encode(tokenizer, text)
    starts = [rng.randrange(len(tokens) - context) for _ in range(args.texts)]
    return [begin + tokens[start : start + context - 1] for start in starts]


@torch.no_grad()
def measure(
    workload: str,
    context: int,
    args: argparse.Namespace,
    target: Target,
    drafts: dict[str, Draft],
    layers: Any,
) -> list[dict[str, Any]]:
    """Measure one workload at one context; return an entry per draft."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    lengths: dict[str, dict[str, list[float]]] = {
        name: {"greedy": [], "temperature 1": []} for name in drafts
    }
    # The answer to a recall question has five tokens, so a round starts at each.
    written, stride = (5, 1) if workload == "recall" else (args.tokens, args.stride)
    for prompt in prompts_of(workload, context, args, tokenizer):
        texts = write_texts(target, prompt, written + args.gamma + 1, layers)
        for sampled, text in zip((False, True), texts, strict=True):
            for name, draft in drafts.items():
                draft.read(text)
                of_text = []
                # The first round's input is the first token that the target wrote.
                for start in range(text.context, text.context + written, stride):
                    step = draft.start(start)
                    if sampled:
                        torch.manual_seed(args.seed + start)
                        of_text.append(1 + expected_accepted(target, step, text, start, args.gamma))
                    else:
                        of_text.append(1 + greedy_accepted(step, text, start, args.gamma))
                lengths[name]["temperature 1" if sampled else "greedy"].append(mean(of_text))
    return [
        {
            "draft": name,
            "workload": workload,
            "context": context,
            **{
                kind: {
                    "acceptance_length": round(mean(values), 3),
                    "standard_error": round(stdev(values) / len(values) ** 0.5, 3),
                }
                for kind, values in kinds.items()
            },
        }
        for name, kinds in lengths.items()
    ]


def _shown(result: Mapping[str, Any]) -> str:
    return " / ".join(f"{result[kind]['acceptance_length']:.2f}" for kind in ("greedy", "temperature 1"))


def table_of(record: Mapping[str, Any]) -> Table:
    """Return a table with a row per workload and draft and a column per context."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in record["results"]:
        rows.setdefault((result["workload"], result["draft"]), []).append(_shown(result))
    contexts = dict.fromkeys(result["context"] for result in record["results"])
    columns = [f"{context:,} tokens" for context in contexts]
    table = make_table("acceptance length, greedy / temperature 1", columns, ["workload", "draft"])
    for names, lengths in rows.items():
        table.add_row(*names, *lengths)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--spire", type=Path, nargs="+", default=[BENCHMARKS / "tiny-spire"])
    parser.add_argument("--only-spire", action="store_true", help="leave the other drafts out")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--texts", type=int, default=12, help="per workload and context")
    parser.add_argument("--tokens", type=int, default=60, help="of each text in which rounds start")
    parser.add_argument("--stride", type=int, default=5, help="tokens between starts")
    parser.add_argument("--speeches", type=Path, help="folder of .txt files: one more workload")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    target = Target(str(TINY_LLAMA), torch.float32, torch.device("cpu"))
    trained = {path.resolve().name: load(path) for path in args.spire}
    settings = next(iter(trained.values())).settings
    drafts: dict[str, Draft] = {}
    if not args.only_spire:
        small = AutoModelForCausalLM.from_pretrained(BENCHMARKS / "tiny-draft", dtype=torch.float32).eval()
        drafts |= {
            "tiny-draft, full context": LlamaDraft(small, None, 0),
            "tiny-draft, sinks and window": LlamaDraft(small, settings.sinks, settings.window),
            "magicdec-self, sinks and window": LlamaDraft(
                target.model, settings.sinks, settings.window, is_target=True
            ),
        }
    drafts |= {f"SPIRe: {name}": TrainedDraft(draft) for name, draft in trained.items()}
    record = make_record(
        "spire",
        settings={
            "gamma": args.gamma,
            "sinks": settings.sinks,
            "window": settings.window,
            "spire": {name: asdict(draft.settings) for name, draft in trained.items()},
            "texts": args.texts,
            "tokens": args.tokens,
            "stride": args.stride,
            "seed": args.seed,
            "dtype": "float32",
        },
        results=[],
    )
    for workload in ("documents", "recall", *(["speeches"] if args.speeches else [])):
        for context in args.contexts:
            results = measure(workload, context, args, target, drafts, settings.aux_layers)
            record["results"] += results
            for each in results:
                console.print(f"{workload} {context} {each['draft']}: {_shown(each)}")
    console.print(table_of(record))
    write(record, args.out)


if __name__ == "__main__":
    main()
