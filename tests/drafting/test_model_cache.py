# SPDX-License-Identifier: Apache-2.0
"""A draft model's cache in a simulated engine; engine/test_own_caches.py has real ones."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from batches import make_slots
from policies.test_host_sync import no_host_reads
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.model_cache import ModelCache
from vllm_magicdec.views.round import Batch, PageView, Part, Pass, Queries, TargetStep
from vllm_magicdec.views.tensors import PAD_SLOT

PAGE, MODEL_LEN, NUM_ROWS, MAX_DRAFTS = 4, 96, 3, 4
PAGES_OF_ROW = MODEL_LEN // PAGE
SPEC = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=32, dtype=torch.float32)
CPU = torch.device("cpu")


@dataclass
class Request:
    name: str
    row: int
    prompt_len: int
    tokens: list[int]  # the prompt, verified tokens, and the latest one, which is not computed yet
    computed: int = 0  # number of tokens whose K/V the target has
    prefill_len: int = 0
    drafts: list[int] = field(default_factory=list)  # of the latest round
    unknown: int = 0  # drafts that the previous step rejected, unknown to the host

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prefill_len


class ImaginedEngine:
    """A simulated runner with a draft model; its cache maps slots to token and position.

    The host knows a step's result, as on the V1 runner, or bounds of it, as on V2; if `is_async`, not even
    the result of the step before. `lookup` says which rounds begin with a wide pass.
    """

    def __init__(
        self,
        seed: int,
        *,
        is_v1: bool = False,
        is_async: bool = False,
        max_num_tokens: int = 24,
        lookup: str = "off",
    ) -> None:
        self._rng = random.Random(seed)
        self._is_v1, self._is_async = is_v1, is_async
        self._all_token_ids = torch.zeros(NUM_ROWS, MODEL_LEN, dtype=torch.int32)
        self._table = 1 + torch.arange(NUM_ROWS * PAGES_OF_ROW, dtype=torch.int32).view(NUM_ROWS, -1)
        self._cache: dict[int, tuple[int, int]] = {}
        self.read_tokens = self.num_catch_ups = self.most_lacking = self.read_in_view = self.num_skipped = 0
        self._draft_slots = make_slots(PAGE, NUM_ROWS, MAX_DRAFTS, MODEL_LEN)
        self._max_num_tokens = max_num_tokens
        sizes = {"max_num_reqs": NUM_ROWS, "max_num_tokens": max_num_tokens, "max_model_len": MODEL_LEN}
        groups = [LayerGroup(("draft",), 0, SPEC, None)]
        self.draft = ModelCache(self, groups, knows_accepted=is_v1, **sizes)
        self._lookup = lookup
        self.requests = [self._arriving(row) for row in range(NUM_ROWS)]

    def _arriving(self, row: int) -> Request:
        self._lose_pages(row)
        length = self._rng.randint(1, 30)
        tokens = [self._rng.randrange(1000) for _ in range(length)]
        self._all_token_ids[row, :length] = torch.tensor(tokens)
        name = f"{row} {self._rng.random()}"
        return Request(name, row, length, tokens, prefill_len=length)

    def _lose_pages(self, row: int, first: int = 0) -> None:
        pages = self._table[row, first:].tolist()
        self._cache = {slot: held for slot, held in self._cache.items() if slot // PAGE not in pages}

    def _slot(self, request: Request, position: int) -> int:
        return int(self._table[request.row, position // PAGE]) * PAGE + position % PAGE

    def token_ids(self, indices, positions):
        return self._all_token_ids[self._rows[indices], positions]

    def read(self, draft_pass: Pass) -> None:
        """A pass over whole contexts, or over the view, that writes the last tokens of each request."""
        (part,), queries = draft_pass.parts, draft_pass.queries
        assert len(draft_pass.tokens) <= self._max_num_tokens
        self._write(draft_pass.tokens, part.positions, part.slots)
        is_over_view = part.view.max_len == MODEL_LEN
        if is_over_view:
            self.read_in_view += len(part.slots)
        else:
            self.read_tokens += len(part.slots)
        starts, slots = queries.starts.tolist(), part.slots.tolist()
        for index, end in enumerate(part.view.lens.tolist()):
            assert end <= part.view.max_len
            own = slots[starts[index] : starts[index + 1]]
            pages = part.view.block_table[index].tolist()
            seen = [pages[entry // PAGE] * PAGE + entry % PAGE for entry in range(end)]
            if is_over_view:  # also those that are not written are held
                last = seen[end - len(own) :]
                assert all(slot in (PAD_SLOT, entry) for slot, entry in zip(own, last, strict=True))
                assert all(slot in self._cache for slot in last)
                continue
            real = [slot for slot in own if slot != PAD_SLOT]  # the others are padding
            if real:
                end -= len(own) - len(real)
                assert seen[end - len(real) : end] == real
                assert [self._cache[slot][1] for slot in seen[:end]] == list(range(end))

    def _write(self, tokens, positions, slots) -> None:
        for token, position, slot in zip(tokens.tolist(), positions.tolist(), slots.tolist(), strict=True):
            if slot != PAD_SLOT:
                self._cache[slot] = (token, position)

    def _held(self, request: Request, end: int) -> bool:
        return all(
            self._cache.get(self._slot(request, position)) == (request.tokens[position], position)
            for position in range(end)
        )

    def _assert_whole_pages(self, requests: list[Request]) -> None:
        """Complete pages may be in the prefix cache."""
        for request in requests:
            assert self._held(request, request.computed // PAGE * PAGE), request

    def _assert_held(self, requests: list[Request]) -> None:
        for request in requests:
            assert self._held(request, request.computed), request

    def step(self, num_steps: int, batch_size: int = NUM_ROWS) -> None:
        """The target's step of some requests, then a round of so many drafts."""
        batch = self._rng.sample(self.requests, batch_size)
        befores, heard, taken, given, rejected = [], [], [], [], []
        for request in batch:
            befores.append(request.computed)
            heard.append(len(request.tokens))
            if request.is_prefilling:
                number = self._rng.randint(1, request.prefill_len - request.computed)
                given.append(0)
                request.computed += number
                if request.computed == len(request.tokens):
                    self._sample(request)
                rejected.append(0)
            else:
                drafts = request.drafts[: self._rng.randint(0, len(request.drafts))]
                accepted = self._rng.randint(0, len(drafts))
                number = 1 + len(drafts)
                given.append(len(drafts))
                for token in drafts[:accepted]:
                    self._append(request, token)
                self._sample(request)
                request.computed += 1 + accepted
                rejected.append(len(drafts) - accepted)
            taken.append(number)
            request.drafts = []
        self._draft(batch, *map(np.array, (befores, heard, taken, given, rejected)), num_steps)
        for request, unheard in zip(batch, rejected, strict=True):
            request.unknown = unheard if self._is_async else 0
        for request in batch:
            if len(request.tokens) > MODEL_LEN - 12:
                self.requests[request.row] = self._arriving(request.row)
            elif self._rng.random() < 0.05:  # preempted: what is cached are whole pages
                request.computed = min(request.computed, len(request.tokens) - 1) // PAGE * PAGE
                request.prefill_len, request.drafts, request.unknown = len(request.tokens), [], 0
                self._lose_pages(request.row, request.computed // PAGE)

    def _append(self, request: Request, token: int) -> None:
        self._all_token_ids[request.row, len(request.tokens)] = token
        request.tokens.append(token)

    def _sample(self, request: Request) -> None:
        self._append(request, self._rng.randrange(1000))

    def _draft(self, requests, befores, heard, taken, given, rejected, num_steps) -> None:
        rows = self._rows = torch.tensor([request.row for request in requests])
        prefill_lens = np.array([request.prefill_len for request in requests])
        lens = torch.from_numpy(befores + taken - rejected)
        if self._is_v1:
            known, num_tokens, num_unsure = lens.numpy(), taken - rejected, np.zeros_like(given)
            has_prompt = heard > befores + 1
        else:  # as if all drafts had been accepted
            known = befores + np.array([request.unknown for request in requests]) + taken
            num_tokens, num_unsure, has_prompt = taken, given, befores < prefill_lens
        names = [request.name for request in requests]
        may_skip = self._is_v1 and num_steps == 0 and not has_prompt.any() and (taken == 1).all()
        if may_skip and self.draft.skip_plain_step(names, lens.tolist()):
            self._assert_whole_pages(requests)
            self.num_skipped += 1
            return
        batch = Batch(
            req_ids=names,
            tokens=torch.tensor([request.tokens[-1] for request in requests], dtype=torch.int32),
            block_tables=[self._table[rows]],
            context_lens=lens,
            observable_lens=lens,
            known_lens=known,
            is_prefilling=known < prefill_lens,
            is_first=known == prefill_lens,
            step=TargetStep(
                ends=known,
                num_tokens=num_tokens,
                num_unsure=num_unsure,
                has_prompt=has_prompt,
                seq_lens=torch.from_numpy(befores + taken),
                query_starts=torch.from_numpy(np.concatenate([[0], taken.cumsum()])),
            ),
        )
        self.draft.begin_round(batch)
        assert (self.draft._lacking[self.draft._rows] <= known).all()
        if num_steps == 0 or all(batch.is_prefilling):
            self.draft.catch_up(batch, 0)
            self._assert_whole_pages(requests)
            self.most_lacking = max(self.most_lacking, int(self.draft._lacking[self.draft._rows].max()))
            return
        takes_some = self._lookup == "wide" or (self._lookup == "sometimes" and self._rng.random() < 0.5)
        self.draft.catch_up(batch, num_steps, num_latest=MAX_DRAFTS + 1, is_wide=takes_some)
        self._draft_slots.prepare(batch, num_steps)
        # Lookups may fail after the cache has left tokens to the passes.
        if takes_some and (self._lookup == "wide" or self._rng.random() < 0.8):
            drafts = self._draft_by_wide_passes(requests, batch, num_steps)
        else:
            drafts = self._draft_by_steps(requests, batch, num_steps)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            request.drafts = [] if request.is_prefilling else own

    def _draft_by_wide_passes(self, requests, batch, num_steps) -> torch.Tensor:
        """The K/V of as many drafts as there were passes is right, that of later ones is not."""
        view = PageView(batch.context_lens.int() + num_steps, batch.block_table, MODEL_LEN)
        queries = Queries.uniform(len(requests), 0, num_steps)
        self.draft.extend(Pass(batch.tokens, queries, [Part(None, None, view)]))
        self._assert_held(requests)
        num_passes = self._rng.randint(1, num_steps)
        drafts = torch.tensor([[self._rng.randrange(1000) for _ in range(num_steps)] for _ in requests])
        read = torch.cat([batch.tokens.long().unsqueeze(1), drafts[:, :-1]], dim=1)
        read[:, num_passes:] = 1000 + read[:, num_passes:]
        for index in range(num_steps):
            step = self._draft_slots.step(index, len(requests), None)
            self._write(read[:, index], step.positions, step.slots)
        self.draft.end_round(batch, np.full(len(requests), num_passes))
        return drafts

    def _draft_by_steps(self, requests, batch, num_steps) -> torch.Tensor:
        tokens, drafted, lens = batch.tokens, [], batch.context_lens
        for index in range(num_steps):
            view = PageView(lens.int() + index + 1, batch.block_table, MODEL_LEN)
            parts = [self._draft_slots.step(index, len(requests), view)]
            whole_step = self.draft.extend(Pass(tokens, Queries.uniform(len(requests), index), parts))
            own = whole_step.tokens
            self.num_catch_ups += len(own) > len(tokens)
            assert len(own) in (len(tokens), 2 * len(tokens)) and torch.equal(
                own[len(own) // len(tokens) - 1 :: len(own) // len(tokens)], tokens
            )
            self._write(own, whole_step.positions, whole_step.parts[0].slots)
            self._assert_held(requests)
            tokens = torch.tensor([self._rng.randrange(1000) for _ in requests], dtype=torch.int32)
            drafted.append(tokens)
        drafts = torch.stack(drafted, dim=1).long()
        self.draft.end_round(batch, np.full(len(requests), num_steps))
        return drafts


@pytest.mark.parametrize("lookup", ["off", "sometimes", "wide"])
@pytest.mark.parametrize("runner", [{"is_v1": True}, {}, {"is_async": True}], ids=["V1", "V2", "V2 async"])
@pytest.mark.parametrize("seed", range(3))
def test_every_verified_token_is_cached_before_a_view_shows_it(seed, runner, lookup):
    """Through chunks, rejections, plain steps, steps without some requests, preemption and new requests."""
    engine = ImaginedEngine(seed, lookup=lookup, **runner)
    rng = random.Random(seed)
    for _ in range(60):
        # Often 0, so that plain steps follow on one another.
        engine.step(rng.choice([0, 0, 0, 1, 2, MAX_DRAFTS]), batch_size=rng.choice([1, NUM_ROWS, NUM_ROWS]))
    assert engine.most_lacking > 1  # tokens of plain steps wait
    assert (engine.num_skipped > 0) == (runner == {"is_v1": True})
    assert (engine.num_catch_ups > 0) == (lookup != "wide")
    assert (engine.read_in_view > 0) == (lookup != "off")


def test_passes_are_no_larger_than_those_of_the_target():
    engine = ImaginedEngine(1, is_async=False, max_num_tokens=5)
    rng = random.Random(1)
    for _ in range(40):
        engine.step(rng.choice([0, MAX_DRAFTS]))
    assert engine.read_tokens > 0 and engine.num_catch_ups == 0  # 6 tokens of 3 requests do not fit


@pytest.mark.parametrize("lookup", ["off", "sometimes"])
def test_a_round_reads_nothing_on_the_host(lookup):
    """Also where it catches up with prompts, plain steps or wide passes."""
    engine = ImaginedEngine(2, is_async=True, lookup=lookup)
    rng = random.Random(2)
    rounds = 0
    engine.read = lambda draft_pass: None
    for name in ("begin_round", "catch_up", "extend"):
        method = getattr(engine.draft, name)

        def without_reads(*args, method=method, **options):
            nonlocal rounds
            rounds += 1
            with no_host_reads(CPU):
                return method(*args, **options)

        setattr(engine.draft, name, without_reads)
    engine._held = lambda *args: True
    for _ in range(30):
        engine.step(rng.choice([0, 1, MAX_DRAFTS]))
    assert rounds > 90
