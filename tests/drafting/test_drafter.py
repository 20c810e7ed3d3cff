# SPDX-License-Identifier: Apache-2.0
"""What becomes of a round whose drafting fails; tests/engine/ has failures in real engines."""

import os
from dataclasses import replace
from types import SimpleNamespace

import engines
import numpy as np
import pytest
import torch
from batches import make_batch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_magicdec.drafting import drafter
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.loops import Drafts
from vllm_magicdec.drafting.pauses import FAILURES_BEFORE_A_PAUSE, FIRST_PAUSE
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.drafting.staged import StagedDrafts
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.history import History
from vllm_magicdec.plugin import register
from vllm_magicdec.views.round import Sampled
from vllm_magicdec.views.windows import SlidingWindow

register()

GAMMA, PAGE = 3, 32


class Target:
    is_broken = False
    num_tries = 0

    max_num_tokens, reads_ahead = 64, True

    def run(self, draft_pass):
        self.num_tries += draft_pass.queries.first_sampled == 0
        if self.is_broken:
            raise RuntimeError("broken on purpose")
        return Sampled(torch.full_like(draft_pass.tokens, 7), torch.ones(len(draft_pass.tokens)))

    def observe(self, layer_names, indices, window, observer): ...


def components_of(made: drafter.Drafter) -> dict[str, float]:
    found = {name.partition(":")[2]: number for name, number in made.counts._added.items()}
    return {component: number for component, number in found.items() if component}


@pytest.fixture
def make_drafter(monkeypatch):
    monkeypatch.delenv("VLLM_MAGICDEC_STRICT", raising=False)

    def make(target: Target, tensor_parallel_size: int = 1, **fields) -> drafter.Drafter:
        own = {"num_speculative_tokens": GAMMA, "draft_kv_budget": 128, "native_attention": False}
        sizes = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": PAGE}
        spec = {"method": METHOD, **own, **fields}
        args = EngineArgs(str(engines.MODEL), speculative_config=spec, skip_tokenizer_init=True, **sizes)
        config = args.create_engine_config()
        config.parallel_config.tensor_parallel_size = tensor_parallel_size
        cache = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [LayerGroup(("full",), 0, cache, None), LayerGroup(("near",), 0, cache, SlidingWindow(40))]
        return drafter.Drafter(
            target, config, groups, SimpleNamespace(num_blocks=64), torch.device("cpu"), Cache()
        )

    return make


def draft(made: drafter.Drafter) -> list[int] | None:
    """The drafts of a round of one request; None: there are none."""
    batch = make_batch(["a"], torch.arange(64, dtype=torch.int32).unsqueeze(0), [500])
    drafts = made.draft(GAMMA, lambda: batch)
    return None if drafts is None else drafts.tokens[0].tolist()


def test_a_failing_draft_is_paused_and_resumes(make_drafter):
    target = Target()
    made = make_drafter(target)
    assert draft(made) == [7] * GAMMA

    target.is_broken = True
    for _ in range(100):
        assert draft(made) is None
    num_failures = FAILURES_BEFORE_A_PAUSE + 1
    assert target.num_tries == 1 + num_failures
    assert made.counts._added == {
        "draft_failures": num_failures,
        "draft_pauses": 2,
        "paused_rounds": 100 - num_failures,
        "failures:draft_step": num_failures,
    }
    target.is_broken = False
    drafted = [draft(made) is not None for _ in range(200)]
    assert drafted[-1] and drafted == sorted(drafted)


def test_unfinished_prompts_take_no_pass(make_drafter, monkeypatch):
    target = Target()
    made = make_drafter(target)
    prepared = []
    for views in made._views:
        prepare = views.prepare

        def note(batch, *others, prepare=prepare):
            prepared.append(batch.req_ids)
            return prepare(batch, *others)

        monkeypatch.setattr(views, "prepare", note)
    batch = make_batch(["a", "b"], torch.arange(128, dtype=torch.int32).view(2, 64), [500, 500])
    for is_prefilling, passes in (([True, True], 0), ([True, False], 1), ([False, False], 1)):
        target.num_tries = 0
        part = replace(batch, is_prefilling=is_prefilling)
        drafts = made.draft(GAMMA, lambda part=part: part)
        assert target.num_tries == passes
        assert [*map(list, drafts.tokens)] == [[7] * GAMMA * passes] * 2
    # Policies note in every round who is new and who was preempted.
    assert prepared == [["a", "b"]] * 3 * len(made._views)


def test_finished_requests_reach_lookups_and_failures_are_counted(make_drafter):
    made, told = make_drafter(Target()), []
    made.finish_request("a", [1, 2])  # without lookups nobody asks
    made._loop = StagedDrafts.__new__(StagedDrafts)
    made._loop.finish = lambda *ended: told.append(ended)
    made.finish_request("a", [1, 2])
    assert told == [("a", [1, 2])]
    made._loop.finish = None
    made.finish_request("a", [1, 2])
    assert components_of(made) == {"lookup": 1} and not made.counts._added["draft_failures"]


def test_unfinished_prompts_do_not_end_a_pause(make_drafter):
    target = Target()
    made = make_drafter(target)
    target.is_broken = True
    batch = make_batch(["a"], torch.arange(64, dtype=torch.int32).unsqueeze(0), [500])
    part = replace(batch, is_prefilling=[True])
    for _ in range(FAILURES_BEFORE_A_PAUSE):
        draft(made)
    for _ in range(3 * FIRST_PAUSE):
        made.draft(GAMMA, lambda: part)
    assert draft(made) is None
    assert made.counts._added["draft_pauses"] == 2, "one failure more, and a longer pause"


def test_cache_failures_during_a_pause_do_not_extend_it(make_drafter):
    made = make_drafter(Target())

    def begin_round(batch):
        raise RuntimeError("broken on purpose")

    made._cache = SimpleNamespace(is_own=True, begin_round=begin_round)
    for _ in range(100):
        assert draft(made) is None
    assert made.counts._added["draft_pauses"] == 2
    assert components_of(made) == {"own_cache": 100}


def test_unreadable_histories_cost_only_speed(make_drafter):
    made = make_drafter(Target(), draft_lookup="on")
    batch = make_batch(["a"], torch.arange(64, dtype=torch.int32).unsqueeze(0), [13])

    def read_histories(batch):
        raise IndexError("broken on purpose")

    assert made.draft(GAMMA, lambda: batch, read_histories) is None
    assert components_of(made) == {"histories": 1}
    history = History(np.array([1, 2, *[7] * 10, 1], dtype=np.int32), [2])
    assert made.draft(GAMMA, lambda: batch, lambda batch: [history]).tokens == [[7] * GAMMA]
    assert made._target.num_tries == 1, "the lookup was right"


def test_a_tensor_parallel_rank_ends_with_a_failure(make_drafter, monkeypatch):
    """Other ranks may wait in a collective, and vLLM reports exceptions of the first rank only."""
    target = Target()
    made = make_drafter(target, tensor_parallel_size=2)
    target.is_broken = True

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        assert status == 1
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        draft(made)


@pytest.mark.parametrize("num_passes", [0, 1])
def test_own_cache_records_only_tokens_sampled_by_passes(num_passes):
    """The cache lacks accepted lookups like tokens of plain steps; without a pass it catches up."""
    ended, caught_up = [], []
    own = drafter.Drafter.__new__(drafter.Drafter)
    own._cache = SimpleNamespace(
        catch_up=lambda batch, num_steps: caught_up.append((num_steps, len(ended))),
        end_round=lambda batch, num_written: ended.append(num_written.tolist()),
    )
    made = Drafts([[1, 2, 3], [], [4]], np.array([2 if num_passes else 0, 0, 0]), num_passes)
    own._loop = SimpleNamespace(draft=lambda *args: made)
    batch = SimpleNamespace(req_ids=["a", "b", "c"], is_prefilling=[False] * 3)
    assert own._draft_round(batch, 4) is made
    assert ended == [[2 if num_passes else 0, 0, 0]]
    assert caught_up == ([] if num_passes else [(0, 0)])
