# SPDX-License-Identifier: Apache-2.0
"""The recall task: a fact noted early in a long context is asked for at its end.

A fact is a line `# note: amber fox=4821`; the question is the line `# recall: amber fox=`, which the
model continues with the value. Key (two words) and value (four digits) are drawn at random, so nothing but
the context can answer. `TRAIN` keys are seen in training, `HELD_OUT` pairs of the same words never are.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ADJECTIVES = (
    "amber ancient bold brave bright calm clever coral crimson dusty eager early faint fierce gentle "
    "golden grand green happy hidden hollow humble icy jolly keen late light lively lonely loud lucky "
    "mellow misty modest noble pale plain proud quiet rapid rare royal rusty sandy silent silver "
    "simple sleepy"
).split()
NOUNS = (
    "anchor arrow badge basket beacon bell bridge candle canyon castle comet copper desert dragon "
    "eagle ember falcon feather fox garden glacier hammer harbor island jacket kettle ladder lantern "
    "lion maple meadow mirror needle ocean orchid otter panther pepper pilot planet rabbit river "
    "rocket saddle spider tiger violin walnut"
).split()

_PAIRS = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
random.Random(2408).shuffle(_PAIRS)
HELD_OUT = _PAIRS[:256]
TRAIN = _PAIRS[256:]


@dataclass(frozen=True)
class Fact:
    """One key and its value."""

    key: str  # two words
    value: str  # four digits

    @property
    def note(self) -> str:
        """The line that states the fact."""
        return f"# note: {self.key}={self.value}\n"

    @property
    def question(self) -> str:
        """The line that asks for it; the model continues with the value."""
        return f"# recall: {self.key}="


@dataclass(frozen=True)
class Episode:
    """A long prompt that ends in a question, and its answer."""

    prompt: str
    answer: str  # four digits
    distance_tokens: int  # from the asked note to the question


def draw_facts(rng: random.Random, count: int, held_out: bool = False) -> list[Fact]:
    """Facts with distinct keys."""
    pairs = rng.sample(HELD_OUT if held_out else TRAIN, count)
    return [Fact(f"{adjective} {noun}", f"{rng.randrange(10_000):04d}") for adjective, noun in pairs]


def make_episode(
    rng: random.Random,
    count_tokens: Callable[[str], int],
    lines: Sequence[str],
    distance_tokens: int,
    *,
    num_distractors: int = 8,
    held_out: bool = True,
) -> Episode:
    """A document with a fact near its start and other facts between it and the question.

    Args:
        rng: draws the facts and the excerpt.
        count_tokens: the tokenizer's length of a text.
        lines: lines of real text, each with its newline, to fill the distance with.
        distance_tokens: least number of tokens between the fact and the question.
        num_distractors: other facts in between.
        held_out: draw keys that training never used.
    """
    asked, *others = draw_facts(rng, 1 + num_distractors, held_out)
    start = rng.randrange(len(lines))
    body: list[str] = []
    length, taken = 0, 0
    while length < distance_tokens:
        line = lines[(start + taken) % len(lines)]
        body.append(line)
        length += count_tokens(line)
        taken += 1
    for fact in others:
        body.insert(rng.randrange(len(body) + 1), fact.note)
    lead = [lines[(start - 1 - i) % len(lines)] for i in range(4)]
    prompt = "".join([*lead, asked.note, *body, asked.question])
    return Episode(prompt, asked.value, count_tokens("".join(body)))


def chat_messages(episode: Episode) -> list[dict[str, str]]:
    """The episode as a chat: the document and its question in one user message."""
    return [{"role": "user", "content": episode.prompt}]


def is_answered(text: str, episode: Episode) -> bool:
    """Whether a continuation starts with the value."""
    return text.strip().startswith(episode.answer)
