# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious reference implementations, one request at a time."""

import math
from collections.abc import Iterable

import numpy as np
import torch

from vllm_magicdec.attention.softmax import Softmax


def budget_in_pages(
    *,
    budget: float,
    min_budget: int,
    sink: int,
    num_steps: int,
    page_size: int,
    context_len: int,
    model_len: int,
) -> int:
    """Return the pages a request may see: at least sinks and what `num_steps` neighbours can touch."""
    model_pages = math.ceil(model_len / page_size)
    touched = max(
        (start + num_steps - 1) // page_size - start // page_size + 1 for start in range(page_size)
    )
    needed = math.ceil(sink / page_size) + touched
    if budget >= 1:
        return min(max(math.ceil(budget / page_size), needed), model_pages)
    min_pages = max(math.ceil(min_budget / page_size), needed)
    max_pages = math.ceil(budget * model_pages)
    target = math.ceil(context_len * budget / page_size)
    return min(max(min(target, max_pages), min_pages), model_pages)


def visible_positions(
    *,
    context_len: int,
    step: int,
    num_steps: int,
    page_size: int,
    sink: int,
    num_pages: int,
    model_len: int,
) -> list[int]:
    """Return the positions that a StreamingLLM step sees; the last drafted token ends the window."""
    position = min(context_len + step, model_len - 1)
    last_page = min(context_len + num_steps - 1, model_len - 1) // page_size
    pages = list(range(last_page + 1))
    if len(pages) > num_pages:
        sinks = min(math.ceil(sink / page_size), num_pages)
        pages = pages[:sinks] + pages[len(pages) - (num_pages - sinks) :]
    return [p for page in pages for p in range(page * page_size, (page + 1) * page_size) if p <= position]


def slot_of(position: int, blocks: list[int], page_size: int) -> int:
    return blocks[position // page_size] * page_size + position % page_size


def slots_of_pages(pages: Iterable[int], last: int, blocks: list[int], page_size: int) -> set[int]:
    """Return the cache slots of positions up to `last` in these pages of a request."""
    positions = (p for page in pages for p in range(page * page_size, (page + 1) * page_size))
    return {slot_of(p, blocks, page_size) for p in positions if p <= last}


def dense_attention(
    query, keys, values, is_seen, *, scale, value_scale=1.0, soft_cap=0.0, sinks=None
) -> tuple[torch.Tensor, float]:
    """Attend in float64, and return also the largest result there were if no two values cancelled.

    `query`, `keys`, `values` [n, num_heads, head_size]; `is_seen` broadcasts to [num_heads, queries, keys].
    """
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], dim=-1)
    weights = logits.softmax(-1)[..., : len(keys)]
    values = values.double() * value_scale
    result = torch.einsum("hqk,khd->qhd", weights, values)
    return result, torch.einsum("hqk,khd->qhd", weights, values.abs()).amax().item()


def page_scores(softmax: Softmax, queries, least, greatest) -> torch.Tensor:
    """Softmax over the bounds of pages' logits, summed over queries and heads, [num_pages] float64.

    `queries` [n, num_heads, size]; the pages' keys `least`, `greatest` [num_kv_heads, num_pages, size].
    """
    num_kv_heads, num_pages, _ = least.shape
    query = queries.double().unflatten(1, (num_kv_heads, -1)).unsqueeze(3)
    bounds = torch.maximum(query * least.unsqueeze(1), query * greatest.unsqueeze(1)).sum(-1)
    logits = bounds * softmax.scale
    if softmax.soft_cap:
        logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
    if softmax.sinks is not None:
        sinks = softmax.sinks.cpu().double().view(num_kv_heads, -1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    return logits.softmax(-1)[..., :num_pages].sum((0, 1, 2))


def token_positions(
    *,
    chosen: list[int],
    chosen_until: int,
    context_len: int,
    step: int,
    sink: int,
    budget: int,
    model_len: int,
) -> list[int]:
    """Return the positions of a token view: chosen ones, sinks, and as many of the recent as fit."""
    last = min(context_len + step, model_len - 1)
    sinks = [p for p in range(sink) if p <= last]
    recent = [p for p in range(last + 1) if p not in sinks and p >= chosen_until]
    room = budget - len(chosen) - len(sinks)
    return [*chosen, *sinks, *recent[-room:]]


def snapkv_scores(
    queries: np.ndarray,
    keys: np.ndarray,
    window: int,
    kernel: int,
    pooling: str,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return SnapKV's scores, [num_kv_heads, num_tokens - window] float64.

    `queries` are [num_heads, window, size] and `keys` [num_kv_heads, num_tokens, size]; `sinks` [num_heads]
    are logits that only count in the denominator.
    """
    num_heads, num_kv_heads, num_tokens = len(queries), len(keys), keys.shape[1]
    scores = np.zeros((num_kv_heads, num_tokens))
    for head in range(num_heads):
        own = keys[head * num_kv_heads // num_heads]
        for index in range(window):
            visible = num_tokens - window + index + 1
            logits = own[:visible] @ queries[head, index] / math.sqrt(queries.shape[-1])
            weights = np.exp(logits)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            scores[head * num_kv_heads // num_heads, :visible] += weights / total
    scores = scores[:, :-window]
    padded = np.pad(scores, ((0, 0), (kernel // 2, kernel // 2)))
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1)
    return neighbours.max(-1) if pooling == "max" else neighbours.mean(-1)


def likeliest_continuation(
    context: list[int], ahead: list[int], most: int, *, min_match: int, max_match: int, max_longest: int
) -> tuple[int, list[int], list[float]]:
    """Continue `context + ahead` by the longest earlier matches of its last tokens in `context`.

    Of matches of `max_match` tokens only the latest `max_longest` count. The most frequent next token, of
    ties the one seen last, is taken, and matches that continue differently are dropped. A match at the
    context's end continues with `ahead` and the tokens taken.

    Returns:
        The length of the match, the tokens, and for each token the share of matches that continue with it.
    """
    whole = [*context, *ahead]
    lengths = {}  # by position of the last matched token, the latest first
    for position in reversed(range(len(context) - 1)):
        length, max_length = 0, min(max_match, position + 1, len(whole))
        while length < max_length and context[position - length] == whole[-1 - length]:
            length += 1
        lengths[position] = length
    longest = max(lengths.values(), default=0)
    if longest < min_match:
        return 0, [], []
    positions = [position for position, length in lengths.items() if length == longest]
    if longest == max_match:
        positions = positions[:max_longest]
    tokens, shares = [], []
    for step in range(most):
        nexts = [whole[position + 1 + step] for position in positions]
        token = max(nexts, key=nexts.count)  # the first of equals
        tokens.append(token)
        shares.append(nexts.count(token) / len(nexts))
        positions = [
            position for position, following in zip(positions, nexts, strict=True) if following == token
        ]
        whole.append(token)
    return longest, tokens, shares


def likeliest_in_documents(
    documents: list[list[int]], latest: list[int], most: int, *, min_match: int, max_match: int
) -> tuple[int, list[int], list[float]]:
    """Continue `latest` by the longest matches of its last tokens in documents.

    Like `likeliest_continuation`, but matches at the end of a document are ignored, the lowest of ties is
    taken, and a match whose document ends supports no token.
    """
    endings = {}  # length of the match and the tokens after it, by document and position
    for number, document in enumerate(documents):
        for end in range(1, len(document)):
            length = 0
            while (
                length < min(max_match, end, len(latest))
                and document[end - 1 - length] == latest[-1 - length]
            ):
                length += 1
            endings[number, end] = length, document[end:]
    longest = max((length for length, _ in endings.values()), default=0)
    if longest < min_match:
        return 0, [], []
    following = [rest for length, rest in endings.values() if length == longest]
    tokens, shares = [], []
    for step in range(most):
        nexts = [rest[step] for rest in following if len(rest) > step]
        if not nexts:
            break
        tokens.append(min(nexts, key=lambda token: (-nexts.count(token), token)))
        shares.append(nexts.count(tokens[-1]) / len(following))
        following = [rest for rest in following if rest[step : step + 1] == tokens[-1:]]
    return longest, tokens, shares
