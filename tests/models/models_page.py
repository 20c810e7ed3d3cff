# SPDX-License-Identifier: Apache-2.0
"""docs/models.md: what `families.py` expects, as `test_matrix.py` proves it.

`make docs-models` writes it anew.
"""

from pathlib import Path

from engines import POLICIES
from families import FAMILIES, RUNNERS, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_HEAD = """# Models

What was run with which policy, on vLLM 0.32.0's CPU build, on both of its model runners.
`make docs-models` writes this page from `tests/models/families.py`, and `make test-all` proves every
cell: a tiny model of each family with random weights and the family's peculiar settings, windows shorter
than the prompts, prompts of 7 to 640 tokens in chunks of 256, float32. `make test` proves one cell of
six families.

**yes**: every token is plain decoding's, from a cold and from a warm prefix cache, with a view of part of
the context and with one of all of it. With a view of all of it every draft is accepted, which shows that
positions, slots and attention of drafts are the target's, in every group of its KV cache. What plain
decoding answers is what `transformers` computes. **no**: the engine ends at its start with the sentence
below.

The small models are of the text classes (Gemma 3 without its vision tower), with weights in float32 (not
in MXFP4, as gpt-oss is served) and without adapters; LoRA was tried on a small Llama. Larger relatives of
them, as DeepSeek-V3, Kimi, Qwen2.5-VL and Qwen3-VL, share the code that was run, and were not run.

"""
_LOCAL = "With a window in every layer there is nothing to choose: all policies draft alike."
_SEES = "What plain decoding answers to images and video was not compared with `transformers`."
_NO_PREFIXES = "vLLM's CPU build neither caches its prefixes nor cuts its prompts."


def page() -> str:
    """In Markdown."""
    notes: list[str] = []
    head = ["model", "in the small one", *POLICIES]
    rows = [[_name(family, notes), family.peculiar, *_cells(family, notes)] for family in FAMILIES]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return f"{_HEAD}{table}\n" + (f"\n{listed}\n" if listed else "")


def _name(family: Family, notes: list[str]) -> str:
    marks = []
    if not family.caches_prefixes:
        marks.append(_mark(_NO_PREFIXES, notes))
    if family.is_local:
        marks.append(_mark(_LOCAL, notes))
    if family.sees:
        marks.append(_mark(_SEES, notes))
    return " ".join([family.name, *marks])


def _cells(family: Family, notes: list[str]) -> list[str]:
    return [_cell([family.refusal(runner, policy) for runner in RUNNERS], notes) for policy in POLICIES]


def _cell(refusals: list[str | None], notes: list[str]) -> str:
    """Of one policy, the refusals by runner."""
    sentences = list(dict.fromkeys(sentence for sentence in refusals if sentence is not None))
    if not sentences:
        return "yes"
    works = [runner for runner, sentence in zip(RUNNERS, refusals, strict=True) if sentence is None]
    return " ".join(
        [f"{' and '.join(works)} only" if works else "no", *(_mark(s, notes) for s in sentences)]
    )


def _mark(note: str, notes: list[str]) -> str:
    """The number of a note, in parentheses; a new one is added."""
    if note not in notes:
        notes.append(note)
    return f"({notes.index(note) + 1})"


if __name__ == "__main__":
    PAGE.write_text(page())
