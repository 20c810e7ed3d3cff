# SPDX-License-Identifier: Apache-2.0
"""Cells of the matrix (a family on a runner with a policy and a budget), and how to run one."""

import random
from functools import cache
from typing import Any, NamedTuple

import engines
import torchvision_for_tests
from checkpoints import checkpoint
from engines import POLICIES, magicdec
from families import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, VOCAB_SIZE, Family
from greedy import GREEDY

MODEL_LEN = 704  # tokens
CHUNK = 256  # tokens per step; longer prompts are chunked
MAX_NUM_SEQS = 4
MAX_TOKENS = 24
GAMMA = 3
PROMPT_LENS = (7, 40, 96, 150, 270, 640)
VIDEO_PROMPT_LEN = 96  # for multimodal families, the prompt of this length has a video
# On a CPU the V2 runner uses Triton's interpreter, which is slow per step and per request.
V2_PROMPTS = (0, 2, 4, 5)
V2_MAX_TOKENS = 12
# Enough for no preemption, even with several KV cache groups.
NUM_BLOCKS = 400

# Views hold the shorter prompts and half of the longest, so that `verify-topk` has pages to choose from.
BUDGET = 320  # tokens

SAMPLING = {**GREEDY, "max_tokens": MAX_TOKENS, "detokenize": False}

Prompt = list[int] | dict[str, Any]


def num_tokens(runner: str) -> int:
    return V2_MAX_TOKENS if runner == "V2" else MAX_TOKENS


class Cell(NamedTuple):
    family: Family
    runner: str
    policy: str
    budget: int = BUDGET

    def __str__(self) -> str:
        return f"{self.family.name}, {self.runner}, {self.policy}, {self.budget} tokens"


@cache
def prompts(family: Family) -> list[Prompt]:
    """Return prompts of `PROMPT_LENS` tokens; multimodal families get pictures or a video in them."""
    rng = random.Random(family.name)
    result: list[Prompt] = []
    for length in PROMPT_LENS:
        tokens = [rng.randrange(8, VOCAB_SIZE - 8) for _ in range(length)]
        result.append(_with_pictures(tokens, rng) if family.is_multimodal else tokens)
    return result


def _with_pictures(tokens: list[int], rng: random.Random) -> Prompt:
    """Replace tokens by pictures (28 x 28 pixels per token) or a video (the same in two frames)."""
    if len(tokens) < 40:
        return tokens
    if len(tokens) == VIDEO_PROMPT_LEN:
        at = rng.randrange(len(tokens) - 26)
        tokens[at : at + 26] = [VISION_START, VIDEO_PAD, VISION_END]
        video = {"width": 28 * 4, "height": 28 * 3, "frames": 4, "seed": rng.randrange(2**16)}
        return {"tokens": tokens, "video": [video]}
    num_pictures = 1 if len(tokens) < 200 else 2
    share = len(tokens) // num_pictures
    pictures: list[dict[str, int]] = []
    for index in reversed(range(num_pictures)):  # from the end, so that earlier positions stay valid
        wide, high = (rng.randint(2, 6) for _ in range(2))
        taken = wide * high + 2
        at = index * share + rng.randrange(share - taken + 1)
        tokens[at : at + taken] = [VISION_START, IMAGE_PAD, VISION_END]
        pictures.insert(0, {"width": 28 * wide, "height": 28 * high, "seed": rng.randrange(2**16)})
    return {"tokens": tokens, "image": pictures}


class Answers(NamedTuple):
    """Results of a speculative engine; dictionaries are by index in `prompts`."""

    within: dict[int, dict[str, Any]]  # first batch: requests that fit into a view
    drafted_within: int
    accepted_within: int
    every: dict[int, dict[str, Any]]  # second batch: all requests; earlier ones are in the prefix cache
    again: dict[int, dict[str, Any]]  # third batch: the requests that do not fit into a view, once more
    run: engines.EngineRun


def answer(cell: Cell) -> Answers:
    """Run one cell; raises `engines.RefusedError` if the engine's configuration is refused."""
    family, runner, policy, budget = cell
    v2 = runner == "V2"
    chosen = V2_PROMPTS if v2 else range(len(PROMPT_LENS))
    # Their views hold the whole request, drafts included.
    fitting = [i for i in chosen if PROMPT_LENS[i] + MAX_TOKENS + GAMMA <= budget]
    other = [i for i in chosen if i not in fitting]
    parts = [fitting, list(chosen), *([other] if other else [])]
    sampling = {**SAMPLING, "max_tokens": num_tokens(runner)}
    batches = [{"prompts": [prompts(family)[i] for i in part], "sampling": sampling} for part in parts]
    run = engines.run(
        [("generate_and_count", {"batches": [batch]}) for batch in batches],
        v2=v2,
        speculative_config=magicdec(GAMMA, draft_kv_budget=budget, **POLICIES[policy]),
        **engine(family),
    )
    assert run.v2_runner == v2
    within, every, *again = (
        dict(zip(part, got["batches"][0], strict=True))
        for part, got in zip(parts, run.results, strict=True)
    )
    counted = run.results[0]["counted"]
    counts = (counted[engines.SPEC_METRIC + name] for name in ("draft_tokens", "accepted_tokens"))
    return Answers(within, *counts, every, again[0] if again else {}, run)


@cache
def plain(family: Family) -> list[dict[str, Any]]:
    """Plain greedy decoding of `prompts` on the V1 runner."""
    batch = {"prompts": prompts(family), "sampling": SAMPLING}
    return engines.run([("generate", {"batches": [batch]})], **engine(family)).results[0][0]


def engine(family: Family) -> dict[str, Any]:
    return {
        "model": str(checkpoint(family)),
        "skip_tokenizer_init": True,
        "max_model_len": MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": CHUNK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "env": torchvision_for_tests.environment() if family.is_multimodal else None,
        **family.engine,
    }
