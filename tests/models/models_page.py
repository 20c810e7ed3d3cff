# SPDX-License-Identifier: Apache-2.0
"""docs/models.md, generated from `families.py` by `make docs-models`; `test_matrix.py` tests its claims."""

from pathlib import Path

from engines import POLICIES
from families import FAMILIES, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_HEAD = """# Models

Model families and policies tested with vLLM 0.32.0's CPU build on both of its model runners.
`make docs-models` generates this page from `tests/models/families.py`. Tests have a tiny float32 model of
each family with random weights and the family's peculiar settings, windows shorter than the prompts, and
prompts of 7 to 640 tokens in chunks of 256. `make test` tests one policy with six families, `make test-all`
one with each family on the V1 runner and with four on V2, and
`MAGICDEC_TEST_ALL_MODELS=1 make test-all ARGS=tests/models/test_matrix.py` every cell.

**yes**: every token equals plain decoding's, with a cold and a warm prefix cache, and with views of a part
of the context and of the whole context. With a view of the whole context every draft is accepted, so
positions, slots and attention of drafts are the target's in every group of its KV cache. Plain decoding
itself equals `transformers`. **no**: the engine is refused at start-up with the message below.

The tiny models are text-only classes (Gemma 3 without its vision tower) with float32 weights (gpt-oss is
served in MXFP4) and without adapters; LoRA is tested on a small Llama. Larger relatives such as
DeepSeek-V3, Kimi, Qwen2.5-VL and Qwen3-VL share the tested code, but were not run.

"""
_LOCAL = "With a window in every layer there is nothing to select: all policies draft alike."
_MULTIMODAL = "Plain decoding of images and video was not compared with `transformers`."
_NO_PREFIXES = "vLLM's CPU build neither caches its prefixes nor chunks its prompts."


def page() -> str:
    notes: list[str] = []
    head = ["model", "in the small one", *POLICIES]
    rows = [[_name(family, notes), family.peculiar, *_cells(family, notes)] for family in FAMILIES]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return f"{_HEAD}{table}\n" + (f"\n{listed}\n" if listed else "")


def _name(family: Family, notes: list[str]) -> str:
    own = {
        _NO_PREFIXES: not family.caches_prefixes,
        _LOCAL: family.is_local,
        _MULTIMODAL: family.is_multimodal,
    }
    return " ".join([family.name, *(_mark(note, notes) for note, applies in own.items() if applies)])


def _cells(family: Family, notes: list[str]) -> list[str]:
    sentences = map(family.refusals.get, POLICIES)
    return ["yes" if sentence is None else f"no {_mark(sentence, notes)}" for sentence in sentences]


def _mark(note: str, notes: list[str]) -> str:
    """Return the number of a note in parentheses, adding the note if it is new."""
    if note not in notes:
        notes.append(note)
    return f"({notes.index(note) + 1})"


if __name__ == "__main__":
    PAGE.write_text(page())
