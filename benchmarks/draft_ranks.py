# SPDX-License-Identifier: Apache-2.0
"""For trees.py: which of the draft's candidates the target's greedy tokens are.

Simulated with `transformers`, for an engine drafts one chain only. The draft is the target over its first
tokens and its latest ones, as `streamingllm` has it, but by token instead of by page. From every place of a
text that the target has generated it goes on along the target's tokens: so what it says at depth d is what
it would say in any tree whose nodes down there stood, over K/V that it has written itself.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

STARTS_AT_ONCE = 32  # rounds that are drafted in one batch


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], num_tokens: int, cache: DynamicCache) -> list[int]:
    """The prompt with `num_tokens` of the target's greedy ones.

    Args:
        model: of `transformers`.
        prompt: token ids.
        num_tokens: to generate.
        cache: K/V of less than the prompt; gets those of all tokens but the last.
    """
    tokens = list(prompt)
    new = torch.tensor([tokens[cache.get_seq_length() :]])
    for _ in range(num_tokens):
        logits = model(input_ids=new, past_key_values=cache, logits_to_keep=1).logits
        new = logits[:, -1:].argmax(-1)
        tokens.append(int(new))
    return tokens


@torch.inference_mode()
def draft_ranks(
    model: Any,
    tokens: Sequence[int],
    cache: DynamicCache,
    first: int,
    *,
    sinks: int,
    window: int,
    depth: int,
) -> np.ndarray:
    """The rank of every token among what the draft expects, 1 being the likeliest.

    Args:
        model: of `transformers`, a Llama.
        tokens: as `generate` returned them.
        cache: with their K/V.
        first: place of the first token after which a round begins.
        sinks: first tokens that the draft sees.
        window: latest verified tokens that it sees; `first` is at least `sinks + window`.
        depth: tokens of a round.

    Returns:
        [num_starts, depth] int64; at [i, d] that of token first + i + 1 + d in the round after `first + i`.
    """
    # The round's first pass reads the last verified token, whose K/V the target has not written.
    starts = range(first, len(tokens) - depth)
    found = []
    for begin in range(0, len(starts), STARTS_AT_ONCE):
        batch = starts[begin : begin + STARTS_AT_ONCE]
        view = torch.tensor([[*range(sinks), *range(start - window, start)] for start in batch])
        seen = DynamicCache()
        for index, layer in enumerate(cache.layers):
            # [batch, KV heads, tokens of the view, head size]
            seen.update(*(kv[0, :, view].transpose(0, 1) for kv in (layer.keys, layer.values)), index)
        places = torch.tensor([[*range(start, start + depth)] for start in batch])
        read = torch.tensor(tokens)[places]
        logits = model(input_ids=read, position_ids=places, past_key_values=seen).logits
        right = torch.tensor(tokens)[places + 1].unsqueeze(-1)
        found.append((logits > logits.gather(-1, right)).sum(-1) + 1)
    return torch.cat(found).numpy()


def lookup_ranks(tokens: Sequence[int], first: int) -> np.ndarray:
    """The rank of every token among those that followed earlier occurrences of the tokens before it.

    Longer matches come first, then more frequent ones, then later ones: the first is what
    `vllm_magicdec.lookup` finds.

    Args:
        tokens: of a text.
        first: place of the first token to look up.

    Returns:
        [len(tokens) - first] int64; 0 where a token is none of them.
    """
    # Here, because it imports llvmlite (see vllm_api/cpu_llvmlite.py).
    from vllm_magicdec.lookup.context_index import MAX_MATCH, MIN_MATCH

    text = np.asarray(tokens)
    # [place] tokens up to there that equal the latest ones; of every place that is followed by another.
    lengths = np.zeros(len(text), dtype=np.int64)
    ranks = []
    for place in range(max(1, first - MAX_MATCH), len(text)):
        last = place - 1
        lengths[1:last] = lengths[: max(last - 1, 0)] + 1
        lengths[:1] = 1
        lengths[:last][text[:last] != text[last]] = 0
        lengths[last] = 0
        if place < first:
            continue
        (matches,) = np.nonzero(lengths[:last] >= MIN_MATCH)
        best: dict[int, tuple[int, int, int]] = {}  # by the token that follows: length, number, place
        for match in matches.tolist():
            length, token = min(int(lengths[match]), MAX_MATCH), int(text[match + 1])
            longest, number, _ = best.get(token, (0, 0, 0))
            if length >= longest:
                best[token] = (length, number + 1 if length == longest else 1, match)
        order = sorted(best, key=best.__getitem__, reverse=True)
        ranks.append(order.index(text[place]) + 1 if text[place] in best else 0)
    return np.array(ranks)


def by_round(ranks: np.ndarray, depth: int) -> np.ndarray:
    """Ranks that do not depend on where a round began, as `draft_ranks` returns them."""
    return np.lib.stride_tricks.sliding_window_view(ranks, depth)
