# SPDX-License-Identifier: Apache-2.0
"""The draft loop: view -> forward -> sample, gamma times, by the target or by a draft model.

The target drafts over its own KV cache: drafted tokens write their K/V into the request's own lookahead
slots. Verification recomputes and overwrites every one of them, so nothing approximate survives in the
cache. A draft model's cache is brought up to date with what was verified before each round.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.adaptive.metrics import Counts, DraftFailures, LookupCounters
from vllm_magicdec.attention.native_attention import use_native_attention
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.attention.switch import install_switches
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.sizing import make_views, max_graph_reqs, parse_budget
from vllm_magicdec.drafting.staged import LEAST_ACCEPTANCE, LEAST_GAIN, PassRunner, StagedDrafts
from vllm_magicdec.drafting.wide_passes import WidePasses, WidePassRunner
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.device_lookups import DeviceLookups, Texts
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.base import Batch, DraftStep, View, Views, has_kernels
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageViews
from vllm_magicdec.views.passes import RoundSteps
from vllm_magicdec.views.windows import Reach

logger = init_logger(f"vllm.{__name__}")


class Runner(Protocol):
    """What drafting needs from a vLLM model runner; implemented by the adapters in `vllm_api/`."""

    def draft_step(self, tokens: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """Run the target over the step's views and sample, as `draft_sample_method` says.

        Args:
            tokens: [num_reqs] int32, the query tokens.
            step: where they look and where their K/V goes, by `Drafter.groups`.

        Returns:
            [num_reqs] int32 or int64, the next tokens; valid until the next step.
        """
        ...

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens before `Batch.observable_lens` of some requests.

        Args:
            layer_names: of the layers to observe.
            indices: places in the batch that is being drafted for.
            window: tokens per request; none has fewer.
            observer: gets the queries of all requests, one after the other.
        """
        ...


class OwnCache(Protocol):
    """A KV cache that a draft does not share with the target: it lacks what was verified until it is told.

    Called in the order of its methods: all in a round that drafts, the first two where drafts would be
    dropped, the first in a pause of drafting. Of a round whose requests could not be read it hears nothing:
    what it misses then costs acceptance.
    """

    def begin_round(self, batch: Batch) -> None:
        """Learn what the target's step took, and what was accepted of it."""
        ...

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """Bring the cache up to date with what was verified, or have the round's first pass do it.

        Args:
            batch: the round's requests.
            num_steps: drafts of each; 0: no pass follows.
        """
        ...

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """Learn what was drafted of each request by passes; none where none has run.

        Args:
            batch: the round's requests.
            drafts: [num_reqs, num_steps] int64, or lists.
        """
        ...


class Drafter:
    """Drafts gamma tokens per request; one per worker, shared by both model runners.

    Args:
        runner: makes the passes.
        vllm_config: the engine's configuration; its speculative config is ours.
        groups: the draft's attention layers; steps have a part for each group.
        kv_cache_config: of the KV cache that they share.
        device: where the draft runs.
        pass_runner: makes the passes of `draft_lookup`; None: the runner has none.
        wide_pass_runner: makes those of lookups on the device; None: the runner has none.
        own_cache: of a draft that is not the target; None: the target's verification writes all that its
            own drafts read.
    """

    def __init__(
        self,
        runner: Runner,
        vllm_config: VllmConfig,
        groups: Sequence[LayerGroup],
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        pass_runner: PassRunner | None = None,
        wide_pass_runner: WidePassRunner | None = None,
        own_cache: OwnCache | None = None,
    ) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        self._runner = runner
        self._own_cache = own_cache
        self._spec = spec
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.draft_tokens = torch.zeros(
            (max_num_reqs, spec.num_speculative_tokens), dtype=torch.int64, device=device
        )
        self.groups = groups
        if device.type == "cpu" and spec.native_attention:
            every = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
            use_native_attention(vllm_config, every)
        self._views: list[Views] = []
        for group in groups:
            views = make_views(
                vllm_config,
                group,
                num_blocks=kv_cache_config.num_blocks,
                device=device,
                observe=partial(runner.observe, group.layer_names),
                switch_attention=partial(
                    install_switches,
                    vllm_config,
                    group.layer_names,
                    device,
                    max_graph_reqs=max_graph_reqs(vllm_config),
                ),
            )
            self._views.append(views)
        self._log(vllm_config)
        self.counts = Counts()
        """Of this rank; tensor-parallel ranks draft alike, and vLLM takes the first one's output."""
        self._failures = DraftFailures(self.counts)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._staged: StagedDrafts | None = None
        self.draft_lists: list[list[int]] | None = None
        """The latest round's drafts of each request, where they differ in number; not in `draft_tokens`."""
        self._wide: WidePasses | None = None
        self.takes_passes = spec.draft_lookup == "on"
        """Whether the round is drafted by passes of several tokens, and not step by step."""
        if spec.draft_lookup == "on":
            self._open_lookups(vllm_config, pass_runner, wide_pass_runner)
        self._pauses = Pauses("Drafting", "steps go on without useful drafts")
        self._stage = ""  # of the round, for the metrics

    def _open_lookups(
        self,
        vllm_config: VllmConfig,
        pass_runner: PassRunner | None,
        wide_pass_runner: WidePassRunner | None,
    ) -> None:
        spec, model = self._spec, vllm_config.model_config
        max_num_reqs, vocab_size = len(self.draft_tokens), model.get_vocab_size()
        counters, is_alone = LookupCounters(self.counts), self._num_ranks == 1
        # Runners without such passes are refused when the engine is configured.
        if spec.looks_up_on_device:
            assert wide_pass_runner is not None
            device = self.draft_tokens.device
            lookups = DeviceLookups(
                max_num_reqs, model.max_model_len, vocab_size, device, has_kernels=has_kernels(device)
            )
            self._wide = WidePasses(
                wide_pass_runner,
                lookups,
                counters,
                lengths=spec.round_lengths,
                max_model_len=model.max_model_len,
                is_alone=is_alone,
                num_others=int(self._own_cache is not None),
            )
            return
        assert pass_runner is not None
        # With it comes Numba.
        from vllm_magicdec.lookup.open_sources import open_lookups

        self._staged = StagedDrafts(
            pass_runner,
            open_lookups(spec.draft_lookup_sources, max_num_reqs, vocab_size, spec.num_speculative_tokens),
            counters,
            max_num_reqs=max_num_reqs,
            max_drafts=spec.num_speculative_tokens,
            max_model_len=model.max_model_len,
            are_drawn=spec.draft_sample_method == "probabilistic",
            is_alone=is_alone,
            # The V2 runner verifies as many tokens of every request, whether they were drafted or not.
            min_gain=0.0 if vllm_config.use_v2_model_runner else LEAST_GAIN,
            min_acceptance=0.0 if vllm_config.use_v2_model_runner else LEAST_ACCEPTANCE,
        )

    def _log(self, vllm_config: VllmConfig) -> None:
        policy = self._spec.policy
        limits = self._spec.limits(vllm_config, self.groups[0].cache.block_size)
        granularity = policy.granularity(self._spec, limits.device_type)
        budget = parse_budget(self._spec, limits)
        near = Counter[Reach]()
        memory = Counter[str]()
        for group, views in zip(self.groups, self._views, strict=True):
            memory.update(views.memory_bytes)
            if group.reach is not None:
                near[group.reach] += len(group.layer_names)
        near_layers = "".join(
            f"; of {reach}, in {number} layers, no more than that in whole pages"
            for reach, number in near.items()
        )
        extra = ", ".join(f"{n / 2**20:.1f} MiB for {what}" for what, n in memory.items() if n)
        logger.info_once(
            "%s drafts %s%d tokens a round with policy %s%s; each draft step reads at most %s of a "
            "request's KV cache%s. %s%s.",
            self._spec.name,
            "up to " if self._spec.adaptive else "",
            self._spec.num_speculative_tokens,
            self._spec.draft_kv_policy,
            f" by {granularity}" if granularity else "",
            budget,
            near_layers,
            f"{self._spec.model} drafts, over a KV cache of its own"
            if self._spec.has_draft_model
            else "No weights were added",
            f"; {extra}" if extra else "",
        )
        if all(group.reach is not None for group in self.groups):
            logger.warning_once(
                "%s: no layer of this model sees the whole context, so a policy has nothing to choose: the "
                "draft reads the latest tokens within the budget.",
                METHOD,
            )

    @property
    def switched_layers(self) -> Sequence[str]:
        """Layers whose queries and attention a policy may have taken over (`install_switches`)."""
        return [name for group in self.groups if group.reach is None for name in group.layer_names]

    @property
    def has_layer_pages(self) -> bool:
        """Whether some layers have block tables of their own."""
        return any(isinstance(views, LayerPageViews) for views in self._views)

    @property
    def has_pages(self) -> bool:
        """Whether some layers are read by a view's block table."""
        return any(isinstance(views, PageViews | LayerPageViews) for views in self._views)

    @property
    def common_lens(self) -> Sequence[int | None]:
        """See `views.base.Views`. Views by token all have the same, others none."""
        return max((views.common_lens for views in self._views), key=len)

    def capture_view(self, index: int, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """See `views.base.Views`; `index`: of the group."""
        views = self._views[index]
        return views.capture_view(num_reqs, lens, common_len if common_len in views.common_lens else None)

    def num_latest(self, num_steps: int) -> int:
        """Tokens right before a round's first draft that the round's views of all layers show, at least."""
        return min(
            views.num_latest(num_steps) if isinstance(views, PageViews) else 0 for views in self._views
        )

    def warm_up_lookups(self, texts: Texts) -> None:
        """See `WidePasses.warm_up`; to be called where lookups search on the device."""
        assert self._wide is not None
        self._wide.warm_up(texts)

    def draft(
        self,
        num_reqs: int,
        num_steps: int,
        read_batch: Callable[[], Batch],
        read_histories: Callable[[Batch], Sequence[History]] | None = None,
    ) -> bool:
        """Fill `draft_tokens[:num_reqs, :num_steps]`, or `draft_lists` where there are lookups.

        Args:
            num_reqs: of the round.
            num_steps: drafts of each, perhaps a `DraftPlan`.
            read_batch: the round's requests; it may fail as drafting may.
            read_histories: where there are lookups, their tokens; None: the batch has them.

        Returns:
            False if drafting failed, or pauses because it failed before (`pauses.py`). That is counted, and
            the drafts are token 0 for every request: the caller must let the target verify them as drawn
            from a one-hot draft, or none. Lists are empty then.

        Under tensor parallelism a failure ends the process.
        """
        drafts = self.draft_tokens[:num_reqs, :num_steps]
        self.draft_lists = None if self._staged is None else [[] for _ in range(num_reqs)]
        is_paused = not self._pauses.is_over()
        try:
            if not is_paused or self._own_cache is not None:  # whose pages go on to be written in a pause
                batch = self._begin_round(read_batch)
            if is_paused:
                self._failures.count(paused_rounds=1)
            else:
                if self._staged is not None and read_histories is not None:
                    self._stage = "histories"
                    batch = replace(batch, histories=read_histories(batch))
                self._stage = "selection"  # then the steps: see `_prepare`
                if self._fill(drafts, batch, num_steps):
                    self._pauses.note_success()
                return True
        except Exception:
            self._take_failed_round(self._stage)
            self.draft_lists = self.draft_lists and [[] for _ in range(num_reqs)]
        drafts.zero_()
        return False

    def _begin_round(self, read_batch: Callable[[], Batch]) -> Batch:
        """See `draft`."""
        self._stage = "batch"
        batch = read_batch()
        if self._own_cache is not None:
            self._stage = "own_cache"
            self._own_cache.begin_round(batch)
        return batch

    def follow_plain_step(self, follow: Callable[[], None]) -> None:
        """Have a draft follow a step of the target that is no round; it may fail as `draft` may.

        Args:
            follow: brings its cache up to date.
        """
        try:
            follow()
        except Exception:
            self._take_failed_round("own_cache")

    def finish_request(self, req_id: str, answer: Sequence[int]) -> None:
        """A request has ended, between two rounds; for lookups on the host. It may fail as they may.

        Args:
            req_id: as in batches.
            answer: all tokens that were verified after its prompt.
        """
        try:
            if self._staged is not None:
                self._staged.finish(req_id, answer)
        except Exception:
            self.take_failure("lookup")

    def take_failure(self, what: str) -> None:
        """Of something that costs speed alone; to be called where the exception is handled.

        Raises it again in strict mode, and under tensor parallelism ends the process: other ranks would go
        on, and wait for this one in a collective.
        """
        if self._num_ranks > 1:
            self._end_worker()
        if envs.strict():
            raise
        self._failures.by_stage.count(what)

    def _take_failed_round(self, stage: str) -> None:
        """See `take_failure`."""
        self.take_failure(stage)
        self._failures.count(draft_failures=1)
        # What fails in a pause as well was not tried again, and is no reason for a longer one.
        if not self._pauses.is_on and self._pauses.note_failure():
            self._failures.count(draft_pauses=1)

    def _fill(self, drafts: torch.Tensor, batch: Batch, num_steps: int) -> bool:
        """`drafts` [num_reqs, num_steps] int64, written where there are no lists.

        Returns:
            Whether there was a pass: without one, nothing shows that drafting works.
        """
        is_due = num_steps > 0 and not all(batch.is_prefilling)  # else what is drafted is dropped
        if self._own_cache is not None and not is_due:
            self._own_cache.catch_up(batch, 0)
            drafts.zero_()
            return False
        made = self._make(drafts, batch, num_steps)
        has_read = is_due and not (isinstance(made, DraftLists) and not made.num_passes)
        if self._own_cache is not None:
            if not has_read:  # all drafts were looked up, so nobody has asked for it
                self._own_cache.catch_up(batch, 0)
            self._own_cache.end_round(batch, made.checked if isinstance(made, DraftLists) else made)
        return has_read

    def _make(
        self, drafts: torch.Tensor, batch: Batch, num_steps: int
    ) -> torch.Tensor | Sequence[Sequence[int]]:
        """See `_fill`; returns the drafts that passes have drawn, as far as the host can say, or lists."""
        if self._staged is not None:
            self.draft_lists = self._staged.draft(batch, num_steps, lambda: self._prepare(batch, num_steps))
            return self.draft_lists
        num_passes = 0 if self._wide is None else self._wide.begin_round(batch, num_steps)
        self.takes_passes = num_passes > 0
        rounds = self._prepare(batch, num_steps)
        if self._wide is not None:
            num_passes = self._wide.draft(drafts, batch, rounds, num_passes)
        if num_passes:
            return drafts[:, :num_passes]
        if all(batch.is_prefilling):  # what is drafted of a prompt's part is dropped
            return drafts.zero_()
        tokens = batch.tokens
        for parts in zip(*rounds, strict=True):
            step = DraftStep(parts)
            tokens = self._runner.draft_step(tokens.to(torch.int32), step)
            drafts[:, step.index] = tokens
        if self._wide is not None:
            self._wide.count_steps(num_steps)
        return drafts

    def _prepare(self, batch: Batch, num_steps: int) -> list[RoundSteps]:
        """The round's steps by group of layers."""
        if self._own_cache is not None:
            self._own_cache.catch_up(batch, num_steps)
        steps = [
            views.prepare(batch.of_group(group.kv_cache_group), num_steps)
            for group, views in zip(self.groups, self._views, strict=True)
        ]
        self._stage = "draft_step"
        return steps

    def _end_worker(self) -> NoReturn:
        """Other ranks may be waiting for this one in a collective, for good.

        vLLM hears of exceptions of the first rank alone, but ends the engine when any worker is gone. This
        one goes at once, because closing its communicators in order would wait for the others as well.
        """
        logger.exception("Drafting failed on one of %d tensor-parallel ranks; it ends.", self._num_ranks)
        os._exit(1)
