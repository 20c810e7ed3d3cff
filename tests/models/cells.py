# SPDX-License-Identifier: Apache-2.0
"""The cells of the matrix: a family on a runner with a policy and a budget, and how one is run."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import engines
import torchvision_for_tests
from checkpoints import checkpoint
from engines import POLICIES, magicdec
from families import FAMILIES, IMAGE_PAD, RUNNERS, VIDEO_PAD, VISION_END, VISION_START, VOCAB_SIZE, Family
from greedy import GREEDY

MODEL_LEN = 704  # tokens
CHUNK = 256  # tokens of a step, so that longer prompts are cut
MAX_NUM_SEQS = 4
MAX_TOKENS = 24
GAMMA = 3
PROMPT_LENS = (7, 40, 96, 150, 270, 640)
FILM_LEN = 96  # the prompt of that many tokens has a film, where a family sees
# Triton's interpreter, in which the V2 runner runs on a CPU, is slow by the step and by the request.
V2_PROMPTS = (0, 2, 4, 5)
V2_MAX_TOKENS = 12
# Enough that none is preempted, with several KV cache groups, too.
NUM_BLOCKS = 400

# Views show all of the shorter prompts and half of the longest, where `verify-topk` has pages to choose.
BUDGET = 320  # tokens

SAMPLING = {**GREEDY, "max_tokens": MAX_TOKENS, "detokenize": False}

Prompt = list[int] | dict[str, Any]


def num_tokens(runner: str) -> int:
    """What every request generates."""
    return V2_MAX_TOKENS if runner == "V2" else MAX_TOKENS


class Cell(NamedTuple):
    """What is run at once."""

    family: Family
    runner: str
    policy: str
    budget: int  # tokens

    def __str__(self) -> str:
        return f"{self.family.name}, {self.runner}, {self.policy}, {self.budget} tokens"


def cells() -> Iterator[Cell]:
    """Every family on both runners with every policy."""
    for family in FAMILIES:
        for runner in RUNNERS:
            for policy in POLICIES:
                yield Cell(family, runner, policy, BUDGET)


@cache
def prompts(family: Family) -> list[Prompt]:
    """Of `PROMPT_LENS` tokens in the same order; those of a family that sees have pictures or a film."""
    rng = random.Random(family.name)
    made: list[Prompt] = []
    for length in PROMPT_LENS:
        tokens = [rng.randrange(8, VOCAB_SIZE - 8) for _ in range(length)]
        made.append(_with_pictures(tokens, rng) if family.sees else tokens)
    return made


def _with_pictures(tokens: list[int], rng: random.Random) -> Prompt:
    """Some tokens give way to pictures of as many: one of a picture's tokens is 28 x 28 pixels, and one of
    a film's is that in two frames."""
    if len(tokens) < 40:
        return tokens
    if len(tokens) == FILM_LEN:
        at = rng.randrange(len(tokens) - 26)
        tokens[at : at + 26] = [VISION_START, VIDEO_PAD, VISION_END]
        film = {"width": 28 * 4, "height": 28 * 3, "frames": 4, "seed": rng.randrange(2**16)}
        return {"tokens": tokens, "video": [film]}
    num_pictures = 1 if len(tokens) < 200 else 2
    share = len(tokens) // num_pictures
    pictures: list[dict[str, int]] = []
    for place in reversed(range(num_pictures)):  # so that what is still to come keeps its place
        wide, high = (rng.randint(2, 6) for _ in range(2))
        taken = wide * high + 2
        at = place * share + rng.randrange(share - taken + 1)
        tokens[at : at + taken] = [VISION_START, IMAGE_PAD, VISION_END]
        pictures.insert(0, {"width": 28 * wide, "height": 28 * high, "seed": rng.randrange(2**16)})
    return {"tokens": tokens, "image": pictures}


def fits(length: int, budget: int) -> bool:
    """Whether a view of `budget` tokens holds all of a request to its end, drafts included."""
    return length + MAX_TOKENS + GAMMA <= budget


class Answers(NamedTuple):
    """What a speculative engine did; all by the place in `prompts`."""

    within: dict[int, dict[str, Any]]  # requests that a view holds wholly, first time
    drafted_within: int
    accepted_within: int
    every: dict[int, dict[str, Any]]  # afterwards, so that the ones before are in the prefix cache
    again: dict[int, dict[str, Any]]  # those of `every` that `within` lacks, once more
    drafted: int  # in all three
    accepted: int
    run: engines.EngineRun


def answer(cell: Cell) -> Answers:
    """Run one cell.

    Raises:
        engines.RefusedError: with the sentence in which the engine's start ended.
    """
    family, runner, policy, budget = cell
    v2 = runner == "V2"
    chosen = V2_PROMPTS if v2 else range(len(PROMPT_LENS))
    fitting = [i for i in chosen if fits(PROMPT_LENS[i], budget)]
    other = [i for i in chosen if i not in fitting]
    parts = [fitting, list(chosen), other] if other else [fitting, list(chosen)]
    sampling = {**SAMPLING, "max_tokens": num_tokens(runner)}
    run = engines.run(
        [
            (
                "generate_and_count_drafts",
                {"batches": [{"prompts": [prompts(family)[i] for i in part], "sampling": sampling}]},
            )
            for part in parts
        ],
        v2=v2,
        speculative_config=magicdec(GAMMA, draft_kv_budget=budget, **POLICIES[policy]),
        **engine(family),
    )
    assert run.v2_runner == v2
    results = [
        dict(zip(part, got["batches"][0], strict=True))
        for part, got in zip(parts, run.results, strict=True)
    ]
    return Answers(
        within=results[0],
        drafted_within=run.results[0]["drafted"],
        accepted_within=run.results[0]["accepted"],
        every=results[1],
        again=results[2] if other else {},
        drafted=sum(got["drafted"] for got in run.results),
        accepted=sum(got["accepted"] for got in run.results),
        run=run,
    )


@cache
def plain(family: Family) -> list[dict[str, Any]]:
    """Plain greedy decoding of `prompts` on the V1 runner."""
    batch = {"prompts": prompts(family), "sampling": SAMPLING}
    return engines.run([("generate", {"batches": [batch]})], **engine(family)).results[0][0]


def engine(family: Family) -> dict[str, Any]:
    """Arguments of every engine that runs it."""
    return {
        "model": str(checkpoint(family)),
        "skip_tokenizer_init": True,
        "max_model_len": MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": CHUNK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "env": torchvision_for_tests.environment() if family.sees else None,
        **family.engine,
    }
