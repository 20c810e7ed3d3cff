# SPDX-License-Identifier: Apache-2.0
"""A target that samples by a hash of all that a view shows: one wrong entry, and the token is another."""

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from batches import NoSelector, make_batch, make_selections, make_slots
from hypothesis import strategies as st

from vllm_magicdec.lookup.history import History
from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.views import round as round_types
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageBudget, PageViews
from vllm_magicdec.views.round import LayerPageView, Pass, Sampled, TokenView
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import PAD_SLOT
from vllm_magicdec.views.tokens import TokenBudget, TokenViews
from vllm_magicdec.views.windows import ReachedPages, SlidingWindow

CPU = torch.device("cpu")
PAGE, WINDOW, NUM_LAYERS, NUM_KV_HEADS = 4, 6, 2, 2


class Target:
    """Layers by pages, in a window, by pages of each layer, by tokens; `cache` has each group's by slot."""

    def __init__(
        self, cache: list[dict[int, int]], max_num_tokens: int = 10**6, reads_ahead: bool = True
    ) -> None:
        self.cache = cache
        self.reads_ahead = reads_ahead
        self.max_num_tokens = max_num_tokens
        self.pass_lens: list[list[int]] = []
        self.written: list[set[int]] = [set() for _ in cache]
        self.unchecked: dict[int, tuple[int, list[int]]] = {}

    def note_unchecked(self, request, first, tokens):
        assert request not in self.unchecked
        self.unchecked[request] = first, tokens

    def run(self, draft_pass: Pass) -> Sampled:
        tokens, lens = draft_pass.tokens, draft_pass.queries.lens.tolist()
        assert tokens.dtype == torch.int32 and len(tokens) <= self.max_num_tokens
        self.pass_lens.append(lens)
        drawn = self._run(tokens, draft_pass.parts, lens)
        return Sampled(drawn, torch.full((len(drawn),), 0.7) if draft_pass.is_weighed else None)

    def _run(self, tokens, parts, lens):
        seen: list[list] = [[] for _ in tokens]
        for cache, written, part in zip(self.cache, self.written, parts, strict=True):
            slots = part.slots.tolist()
            cache |= dict(zip(slots, tokens.tolist(), strict=True))
            written |= set(slots) - {PAD_SLOT}
            if isinstance(part.view, TokenView):
                for query, lists in enumerate(seen_by_query(part.view)):
                    # In which order a list has its tokens makes no difference to attention.
                    seen[query].append([sorted((slot, cache[slot]) for slot in own) for own in lists])
                continue
            end = 0
            for row, count in enumerate(lens):
                end += count
                for query in range(end - count, end):
                    # Causal among the pass's tokens: the last one sees all of `lens`.
                    view_len = int(part.view.lens[row]) - (end - 1 - query)
                    assert view_len <= part.view.max_len
                    seen[query].append(int(part.positions[query]))
                    for layer in range(NUM_LAYERS if isinstance(part.view, LayerPageView) else 1):
                        table = part.view.of_layer(layer).block_table[row].tolist()
                        entries = [cache[table[p // PAGE] * PAGE + p % PAGE] for p in range(view_len)]
                        seen[query].append(entries[-WINDOW:] if cache is self.cache[1] else entries)
        return torch.tensor([draw(what) for what in seen], dtype=torch.int32)


def seen_by_query(view: TokenView) -> list[list[list[int]]]:
    """The slots that each query token sees, by layer and KV head."""
    if view.mask is None:
        columns = torch.arange(view.slots.shape[-1])
        is_seen, rows = columns < view.lens.unsqueeze(1), range(len(view.lens))
    else:
        table, cells = view.mask.table, view.mask.cells
        assert table.flatten()[cells].tolist() == list(range(len(cells)))
        is_seen, rows = view.mask.is_seen.flatten(0, 1)[cells], cells // table.shape[1]
    return [view.slots[:, row, :, is_seen[query]].flatten(0, 1).tolist() for query, row in enumerate(rows)]


def draw(seen: list) -> int:
    """Sample mostly the next token of a cycle, so that lookups are sometimes right."""
    chance = random.Random(str(seen))
    return chance.randrange(5) if chance.random() < 0.3 else (seen[1][-1] + 1) % 5


@dataclass
class Round:
    """A batch, its views, and a cache with stale slots beyond the contexts."""

    batch: object
    views: list
    num_steps: int
    model_len: int
    tables: list[list[int]]
    cache: list[dict[int, int]]

    @property
    def wanted(self) -> list[int]:
        """Drafts of each request that can be used."""
        lens, prefilling = self.batch.context_lens.tolist(), self.batch.is_prefilling
        most = [min(self.num_steps, self.model_len - n) for n in lens]
        return [0 if skip else n for n, skip in zip(most, prefilling, strict=True)]

    def one_by_one(self) -> list[list[int]]:
        target = Target([dict(cache) for cache in self.cache])
        drafts, tokens, steps = [], self.batch.tokens, steps_of(self)
        for index in range(self.num_steps):
            tokens = target.run(steps.step(index, tokens)).tokens
            drafts.append(tokens.tolist())
        return [list(own)[:n] for own, n in zip(zip(*drafts, strict=True), self.wanted, strict=True)]


@st.composite
def rounds(draw_, max_steps: int = 9, model_len: int = 60):
    num_steps = draw_(st.integers(1, max_steps))
    num_reqs = draw_(st.integers(1, 4))
    rng = random.Random(draw_(st.integers(0, 10**6)))
    num_blocks = -(-model_len // PAGE)
    blocks = list(range(num_reqs * num_blocks))
    rng.shuffle(blocks)
    tables = [blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(num_reqs)]
    lens = [rng.randint(2, model_len - 1) for _ in range(num_reqs)]
    contexts = [[rng.randrange(2) * 3 + position % 3 for position in range(n)] for n in lens]
    # Every entry of the caches that is not a context's is of another time.
    cache = [{slot: 1000 + rng.randrange(9) for slot in range(len(blocks) * PAGE)} for _ in range(4)]
    for context, table in zip(contexts, tables, strict=True):
        for position, token in enumerate(context):
            for own in cache:
                own[table[position // PAGE] * PAGE + position % PAGE] = token
    req_ids = [str(i) for i in range(num_reqs)]
    batch = make_batch(req_ids, torch.tensor(tables, dtype=torch.int32), [len(c) for c in contexts])
    last = [rng.randrange(5) for _ in contexts]
    latest = [rng.randrange(len(context)) for context in contexts]
    batch = replace(
        batch,
        tokens=torch.tensor(last, dtype=torch.int32),
        is_prefilling=[draw_(st.sampled_from([False, False, False, True])) for _ in contexts],
        histories=[
            History(np.array(context[:n], dtype=np.int32), [*context[n:], token])
            for context, n, token in zip(contexts, latest, last, strict=True)
        ],
    )

    def slots() -> DraftSlots:
        return make_slots(PAGE, num_reqs + 1, num_steps, model_len)

    def select(num_heads: int, most: int, ends: list[int]) -> Selections:
        """Entries between the first one, which is a sink, and `ends`."""
        selections = make_selections(NUM_LAYERS, num_heads, num_reqs + 1, most)
        selections.begin_round(req_ids)
        for req_id, context_len, end in zip(req_ids, lens, ends, strict=True):
            count = min(most, max(0, end - 1))
            row = selections.row(req_id)
            for layer, head in itertools.product(range(NUM_LAYERS), range(num_heads)):
                chosen = rng.sample(range(1, end), count) if count else []
                selections.positions[row, layer, head, :count] = torch.tensor(chosen, dtype=torch.int32)
            selections.set([req_id], [context_len], torch.tensor([count]), torch.tensor([end]))
        return selections

    drafted_pages = -(-(num_steps - 1) // PAGE) + 1
    pages = PageBudget(PAGE, 1, drafted_pages + 2, drafted_pages + 2)
    num_selected = rng.randrange(9)
    size = num_steps + num_selected + 1
    tokens = TokenBudget(1, 1, size, size, num_recent=num_steps)
    window_slots = slots()
    views = [
        PageViews(StreamingLLM(None, pages, CPU), slots()),
        PageViews(ReachedPages(SlidingWindow(WINDOW), 30, window_slots), window_slots),
        LayerPageViews(
            select(1, 2, [max(0, n // PAGE - drafted_pages) for n in lens]),
            NoSelector(),
            PageBudget(PAGE, 1, drafted_pages + 3, drafted_pages + 3, 0.0, drafted_pages),
            slots(),
        ),
        TokenViews(
            # Chosen when the contexts were shorter by some tokens.
            select(NUM_KV_HEADS, num_selected, [rng.randint(0, n) for n in lens]),
            NoSelector(),
            tokens,
            slots(),
        ),
    ]
    return Round(batch, views, num_steps, model_len, tables, cache)


def assert_only_lookahead_was_written(drawn: Round, target: Target) -> None:
    own = set()
    for table, context_len, wanted in zip(
        drawn.tables, drawn.batch.context_lens.tolist(), drawn.wanted, strict=True
    ):
        positions = range(context_len, context_len + wanted)
        own |= {table[position // PAGE] * PAGE + position % PAGE for position in positions}
    assert all(written == own for written in target.written)


def steps_of(drawn: Round) -> round_types.Round:
    return round_types.Round([views.prepare(drawn.batch, drawn.num_steps) for views in drawn.views])
