# SPDX-License-Identifier: Apache-2.0
"""What tiny-spire is trained on: `python benchmarks/tiny-spire/make_data.py --out data.jsonl`.

JSON lines: long documents of CPython's standard library, less the modules that the shipped model held out,
with recall tasks strewn in as its training did (examples/tiny-llama: train.py, recall.py); some are chats.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny-llama"))
from recall import draw_facts
from train import ASSISTANT, EOS, USER, read_library

CHARACTERS = 14_000  # of a document, about 4,000 tokens
NOTES, QUESTIONS = 5, 9  # per 1,000 tokens, at most
CHARACTERS_PER_TOKEN = 3.5
CHATS = 0.2  # share of documents


def lines_from(rng: random.Random, documents: list[list[str]], sizes: list[int]) -> Iterator[str]:
    """Lines of random excerpts, endlessly."""
    while True:
        document = rng.choices(documents, weights=sizes)[0]
        yield from document[rng.randrange(len(document)) :]


def make_document(rng: random.Random, lines: Iterator[str]) -> str:
    """Lines with notes, and questions that ask for them."""
    is_chat = rng.random() < CHATS
    density = rng.uniform(0.0, 1.0)
    note_rate = NOTES * density / 1000 / CHARACTERS_PER_TOKEN
    question_rate = QUESTIONS * density / 1000 / CHARACTERS_PER_TOKEN
    waiting = draw_facts(rng, 60)
    noted = []
    parts = [f"{USER}\n"] if is_chat else []
    size = 0
    while size < CHARACTERS:
        line = next(lines)
        parts.append(line)
        size += len(line)
        if waiting and rng.random() < note_rate * len(line):
            noted.append(waiting.pop())
            parts.append(noted[-1].note)
        while noted and rng.random() < question_rate * len(line):
            fact = rng.choice(noted)
            if is_chat and rng.random() < 0.5:
                parts.append(f"{fact.question}\n{ASSISTANT}\n{fact.value}{EOS}{USER}\n")
            else:
                parts.append(f"{fact.question}{fact.value}\n")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--documents", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    documents, _ = read_library()
    lines = lines_from(rng, documents, [sum(map(len, document)) for document in documents])
    with args.out.open("w", encoding="utf-8") as file:
        for _ in range(args.documents):
            file.write(json.dumps({"text": make_document(rng, lines)}) + "\n")


if __name__ == "__main__":
    main()
