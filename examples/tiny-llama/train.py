# SPDX-License-Identifier: Apache-2.0
"""Train the model that ships with vllm-magicdec: `python examples/tiny-llama/train.py`.

Data: the sources of CPython's standard library, on every machine, with recall tasks (recall.py) strewn
in. The attention heads start as a rough copying circuit (initial_heads.py). Curriculum: short sequences
with many recall tasks, then longer ones; token positions jump at random places, so that short sequences
already show RoPE the distances of long ones (PoSE, Zhu et al. 2023).
"""

import argparse
import json
import math
import os
import platform
import random
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from initial_heads import plant_heads
from recall import draw_facts, is_answered, make_episode
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 2048
MAX_POSITION = 32_768
BOS, EOS, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HELD_OUT_MODULES = {"textwrap.py", "heapq.py", "shlex.py", "fractions.py", "queue.py", "bisect.py"}
ANSWER_WEIGHT = 4.0  # loss weight of a recalled digit against a token of text


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum; `share` is its part of the training time."""

    share: float
    sequence: int  # tokens
    batch: int  # sequences
    facts_per_1k: float  # notes per 1,000 tokens
    questions_per_1k: float
    drills: float = 0.0  # share of sequences that repeat random tokens
    jumps: bool = True  # whether positions jump


STAGES = (
    Stage(0.12, 128, 8, 60, 90, drills=0.4, jumps=False),
    Stage(0.20, 256, 8, 24, 36, drills=0.1),
    Stage(0.24, 512, 6, 12, 24),
    Stage(0.18, 1024, 4, 8, 14),
    Stage(0.12, 2048, 2, 6, 10),
    Stage(0.14, 4096, 1, 4, 7),
)


def read_library() -> tuple[list[list[str]], list[list[str]]]:
    """Modules of the standard library as lists of lines: (training, held out)."""
    root = Path(sysconfig.get_path("stdlib"))
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "test", "idlelib", "lib2to3", "turtledemo", "ensurepip"):
            continue
        if "test" in relative.parts or "tests" in relative.parts:
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            continue
        # Tables of code points and the like are not Python that anybody writes.
        if len(lines) > 20 and "encodings" not in relative.parts and "pydoc_data" not in relative.parts:
            (held_out if path.name in HELD_OUT_MODULES and len(relative.parts) == 1 else training).append(
                lines
            )
    return training, held_out


def train_tokenizer(documents: list[list[str]], rng: random.Random) -> Tokenizer:
    """Byte-level BPE over the library and recall lines; every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A line break is its own token: a text then tokenises as its lines do one by one.
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    recall = [fact.note + fact.question for _ in range(400) for fact in draw_facts(rng, 50)]
    tokenizer.train_from_iterator(["".join(lines) for lines in documents] + recall, trainer)
    return tokenizer


class Corpus:
    """Tokenised library lines, and sequences made of them with recall tasks strewn in."""

    def __init__(self, documents: list[list[str]], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._documents = [[self.encode(line) for line in lines] for lines in documents]
        self._sizes = [sum(map(len, lines)) for lines in self._documents]
        self.bos, self.eos, self.user, self.assistant = map(
            tokenizer.token_to_id, (BOS, EOS, USER, ASSISTANT)
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def sequence(self, rng: random.Random, stage: Stage) -> tuple[list[int], list[float]]:
        """One training sequence: tokens and loss weights, `stage.sequence + 1` of each."""
        length = stage.sequence + 1
        if rng.random() < stage.drills:
            return self._drill(rng, length)
        num_facts = max(2, round(stage.facts_per_1k * length / 1000 * rng.uniform(0.3, 1.5)))
        facts = draw_facts(rng, min(num_facts, 120))
        fact_rate = stage.facts_per_1k / 1000
        question_rate = stage.questions_per_1k / 1000
        is_chat = rng.random() < 0.25
        tokens, weights = [self.bos], [0.0]
        if is_chat:
            tokens += [self.user, *self.encode("\n")]
        noted: list[int] = []
        waiting = list(range(len(facts)))
        lines = self._lines(rng)
        while len(tokens) < length:
            line = next(lines)
            tokens += line
            chance = len(line)
            if waiting and rng.random() < fact_rate * chance * 1.5:
                index = waiting.pop()
                tokens += self.encode(facts[index].note)
                noted.append(index)
            while noted and rng.random() < question_rate * chance:
                fact = facts[rng.choice(noted)]
                if is_chat and rng.random() < 0.3:
                    tokens += [*self.encode(fact.question + "\n"), self.assistant, *self.encode("\n")]
                    self._ask(tokens, weights, [*self.encode(fact.value), self.eos])
                    tokens += [self.user, *self.encode("\n")]
                else:
                    tokens += self.encode(fact.question)
                    self._ask(tokens, weights, self.encode(fact.value))
                    tokens += self.encode("\n")
                chance *= 0.5
        weights += [1.0] * (len(tokens) - len(weights))
        return tokens[:length], weights[:length]

    def _drill(self, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Random tokens, repeated: only copying predicts them, so the copying circuit forms at once."""
        period = rng.randrange(8, length // 2)
        first_ordinary = self.assistant + 1
        segment = [rng.randrange(first_ordinary, VOCAB_SIZE) for _ in range(period)]
        tokens = [self.bos, *(segment * (length // period + 1))][:length]
        # Nothing predicts the first pass.
        return tokens, [0.0] * (period + 2) + [1.0] * (length - period - 2)

    @staticmethod
    def _ask(tokens: list[int], weights: list[float], answer: list[int]) -> None:
        """Append an answer whose tokens weigh more."""
        weights += [1.0] * (len(tokens) - len(weights))
        tokens += answer
        weights += [ANSWER_WEIGHT] * len(answer)

    def _lines(self, rng: random.Random):
        """Lines of random excerpts, endlessly; a module's end is marked."""
        while True:
            document = rng.choices(self._documents, weights=self._sizes)[0]
            yield from document[rng.randrange(len(document)) :]
            yield [self.eos, self.bos]


def random_positions(rng: random.Random, length: int) -> list[int]:
    """Ascending positions below MAX_POSITION with up to three jumps."""
    jumps = rng.choice((0, 0, 1, 2, 3))
    room = int((MAX_POSITION - length) * rng.random() ** 2)
    offsets = sorted(rng.randrange(room + 1) for _ in range(jumps))
    places = sorted(rng.randrange(1, length) for _ in range(jumps))
    positions, offset, passed = [], 0, 0
    for index in range(length):
        while passed < jumps and index == places[passed]:
            offset = offsets[passed]
            passed += 1
        positions.append(index + offset)
    return positions


Model = LlamaForCausalLM | MinistralForCausalLM


def make_model(num_layers: int, hidden_size: int, window: int | None = None) -> Model:
    """A Llama with grouped-query attention; 4.7 million parameters with 6 layers of 256.

    With a window every second layer, the first among them, sees so many latest tokens only (Ministral is a
    Llama otherwise).
    """
    shape = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION,
        rope_theta=10_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        attn_implementation="sdpa",
    )
    if window is None:
        return LlamaForCausalLM(LlamaConfig(**shape))
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    return MinistralForCausalLM(MinistralConfig(**shape, sliding_window=window, layer_types=kinds))


def sequence_loss(model: Model, tokens: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor):
    """Weighted mean cross-entropy. `tokens`, `weights` [batch, length + 1]; `positions` [batch, length]."""
    inputs = tokens[:, :-1]
    # Without a mask, transformers takes a jump in positions for the start of another sequence.
    mask = torch.ones_like(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(inputs, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        logits = model.lm_head(hidden)
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def validation_loss(model: Model, corpus: Corpus, documents: list[list[str]]) -> float:
    """Mean cross-entropy per token over held-out modules, windows of 1,024 tokens, no recall tasks."""
    total, count = 0.0, 0
    for lines in documents:
        tokens = [corpus.bos, *(t for line in lines for t in corpus.encode(line))]
        for start in range(0, min(len(tokens), 8192) - 1, 1024):
            window = torch.tensor([tokens[start : start + 1025]])
            ones = torch.ones(window.shape)
            positions = torch.arange(window.shape[1] - 1)[None]
            total += sequence_loss(model, window, ones, positions).item() * (window.shape[1] - 1)
            count += window.shape[1] - 1
    return total / count


@torch.no_grad()
def recall_accuracy(
    model: Model, corpus: Corpus, lines: list[str], distance: int, count: int, seed: int
) -> float:
    """Share of held-out questions whose four digits greedy decoding gets right."""
    rng = random.Random(seed)
    right = 0
    for _ in range(count):
        episode = make_episode(rng, lambda text: len(corpus.encode(text)), lines, distance)
        answer = corpus.encode(episode.answer)
        tokens = [corpus.bos, *corpus.encode(episode.prompt)]
        # Greedy decoding is right exactly when every answer token is the argmax after its predecessors.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=torch.tensor([tokens + answer]), use_cache=False)[0]
            best = model.lm_head(hidden[:, len(tokens) - 1 : -1]).argmax(-1)[0].tolist()
        right += is_answered(corpus._tokenizer.decode(best), episode)
    return right / count


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model in bfloat16 with its tokenizer and chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_POSITION,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    with tempfile.TemporaryDirectory(dir=out) as directory:
        wrapped.save_pretrained(directory)
        copy.to(torch.bfloat16).save_pretrained(directory)
        config = Path(directory) / "config.json"
        # vLLM has no class by Ministral's name; its Llama knows layers with a window.
        config.write_text(config.read_text().replace("MinistralForCausalLM", "LlamaForCausalLM"))
        for file in Path(directory).iterdir():  # readers never see half a file
            file.replace(out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="training time, evaluation apart")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=100, help="recall questions per distance")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--window", type=int, help="tokens that every second layer sees; default: all")
    parser.add_argument(
        "--tokenizer", type=Path, help="a model's folder: take its tokenizer, so as to draft for that model"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    training, held_out = read_library()
    if args.tokenizer is None:
        tokenizer = train_tokenizer(training, rng)
    else:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    corpus = Corpus(training, tokenizer)
    held_out_lines = [line for lines in held_out for line in lines]
    model = make_model(args.layers, args.hidden, args.window)
    plant_heads(model, args.seed)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {sum(corpus._sizes):,} tokens of text"
    )

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    shape = {"layers": args.layers, "hidden": args.hidden, "window": args.window}
    log: dict = {"seed": args.seed, "minutes": args.minutes, **shape, "stages": [], "loss": []}
    args.out.mkdir(parents=True, exist_ok=True)
    started, step, seen = time.time(), 0, 0
    total_seconds = args.minutes * 60
    boundary = 0.0
    for stage in STAGES:
        boundary += stage.share
        recent: list[float] = []
        while (done := (time.time() - started) / total_seconds) < boundary:
            warm = min(1.0, (step + 1) / 200)
            rate = (
                args.learning_rate * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            drawn = [corpus.sequence(rng, stage) for _ in range(stage.batch)]
            tokens = torch.tensor([t for t, _ in drawn])
            weights = torch.tensor([w for _, w in drawn])
            positions = torch.tensor(
                [
                    random_positions(rng, stage.sequence) if stage.jumps else list(range(stage.sequence))
                    for _ in drawn
                ]
            )
            loss = sequence_loss(model, tokens, weights, positions)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent.append(loss.item())
            step += 1
            seen += tokens.numel()
            if step % 100 == 0:
                mean = sum(recent[-100:]) / len(recent[-100:])
                log["loss"].append([seen, round(mean, 4)])
                print(
                    f"{(time.time() - started) / 60:5.1f} min  step {step}  {seen / 1e6:.2f} M tokens  "
                    f"sequence {stage.sequence}  loss {mean:.3f}",
                    flush=True,
                )
            if step % 500 == 0:
                model.eval()
                short = recall_accuracy(model, corpus, held_out_lines, stage.sequence // 2, 20, step)
                model.train()
                print(f"      recall at {stage.sequence // 2}: {short:.2f}", flush=True)
                export(model, tokenizer, args.out)
        model.eval()
        entry = {
            "sequence": stage.sequence,
            "tokens_seen": seen,
            "minutes": round((time.time() - started) / 60, 1),
            "validation_loss": round(validation_loss(model, corpus, held_out), 4),
        }
        model.train()
        log["stages"].append(entry)
        print(entry, flush=True)
        export(model, tokenizer, args.out)

    model.eval()
    log["recall"] = {
        str(distance): recall_accuracy(model, corpus, held_out_lines, distance, args.questions, 1)
        for distance in (500, 1000, 2000, 4000, 8000)
    }
    log["tokens_seen"] = seen
    log["machine"] = f"{os.cpu_count()} CPU cores"
    log["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(log["recall"])
    (args.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
