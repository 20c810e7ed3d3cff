# SPDX-License-Identifier: Apache-2.0
"""The draft loop: view, forward pass, sample, gamma times, with the target or a draft model.

When the target drafts, its draft tokens write K/V into the request's lookahead slots; verification
overwrites all of them, so no approximate K/V remains. The KV cache of a draft model catches up with the
verified tokens before each round.
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
from vllm_magicdec.drafting.staged import MIN_DRAFT_ACCEPTANCE, MIN_PASS_GAIN, PassRunner, StagedDrafts
from vllm_magicdec.drafting.wide_passes import WidePasses, WidePassRunner
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.device_lookups import DeviceLookups
from vllm_magicdec.lookup.history import History
from vllm_magicdec.lookup.texts import Texts
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageViews
from vllm_magicdec.views.round import Batch, Round, View, Views
from vllm_magicdec.views.tensors import has_kernels
from vllm_magicdec.views.windows import Reach

logger = init_logger(f"vllm.{__name__}")


class Runner(PassRunner, Protocol):
    """Interface of a vLLM model runner that drafting needs; the adapters in `vllm_api/` implement it."""

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens before `Batch.observable_lens` of some requests.

        Args:
            layer_names: layers to observe.
            indices: indices of the requests in the batch.
            window: tokens per request, all of which must exist.
            observer: receives the queries of all requests, one after the other.
        """
        ...


class OwnCache(Protocol):
    """Separate KV cache of a draft model, which has to catch up with verified tokens.

    - A round that drafts calls all methods in this order.
    - A round whose drafts would be dropped calls the first two.
    - A paused round calls the first.

    If reading the batch fails, none is called; this costs acceptance only.
    """

    def begin_round(self, batch: Batch) -> None:
        """Record the tokens of the target's step and their acceptance."""
        ...

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """Write the K/V of verified tokens, or schedule it for the round's first pass.

        Args:
            batch: the round's requests.
            num_steps: drafts of each; 0 if no pass follows.
        """
        ...

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """Record the drafts sampled by passes.

        Args:
            batch: the round's requests.
            drafts: [num_reqs, num_steps] int64, or lists by request; empty lists if no pass has run.
        """
        ...


class Drafter:
    """Drafts gamma tokens per request; one per worker, shared by both model runners.

    Args:
        runner: runs draft steps.
        vllm_config: the engine's configuration, with a `MagicDecSpeculativeConfig`.
        groups: the draft's attention layers; a step has a part for each group.
        kv_cache_config: layout of the KV cache that the groups share.
        device: the draft's device.
        wide_pass_runner: runs passes that check lookups made on the device; None if unsupported.
        own_cache: the draft model's KV cache; None if the target drafts.
    """

    def __init__(
        self,
        runner: Runner,
        vllm_config: VllmConfig,
        groups: Sequence[LayerGroup],
        kv_cache_config: KVCacheConfig,
        device: torch.device,
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
            layer_names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
            use_native_attention(vllm_config, layer_names)
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
        """Counts of this rank; vLLM uses the output of the first tensor-parallel rank."""
        self._failures = DraftFailures(self.counts)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._staged: StagedDrafts | None = None
        self.draft_lists: list[list[int]] | None = None
        """With lookups on the host, the latest round's drafts by request, instead of `draft_tokens`."""
        self._wide: WidePasses | None = None
        self.takes_passes = spec.draft_lookup == "on"
        """Whether passes of several tokens draft the round, instead of steps."""
        if self.takes_passes:
            self._open_lookups(vllm_config, wide_pass_runner)
        self._pauses = Pauses("Drafting", "steps go on without useful drafts")
        self._stage = ""  # of the current round, for the failure metrics

    def _open_lookups(self, vllm_config: VllmConfig, wide_pass_runner: WidePassRunner | None) -> None:
        spec, model = self._spec, vllm_config.model_config
        max_num_reqs, vocab_size = len(self.draft_tokens), model.get_vocab_size()
        counters, is_alone = LookupCounters(self.counts), self._num_ranks == 1
        # The engine's configuration refuses runners without such passes.
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
                extra_passes=int(self._own_cache is not None),
            )
            return
        # This imports Numba.
        from vllm_magicdec.lookup.open_sources import open_lookups

        self._staged = StagedDrafts(
            self._runner,
            open_lookups(spec.draft_lookup_sources, max_num_reqs, vocab_size, spec.num_speculative_tokens),
            counters,
            max_num_reqs=max_num_reqs,
            max_drafts=spec.num_speculative_tokens,
            max_model_len=model.max_model_len,
            is_probabilistic=spec.draft_sample_method == "probabilistic",
            is_alone=is_alone,
            # The V2 runner verifies the same number of tokens of every request, drafted or not.
            min_gain=0.0 if vllm_config.use_v2_model_runner else MIN_PASS_GAIN,
            min_acceptance=0.0 if vllm_config.use_v2_model_runner else MIN_DRAFT_ACCEPTANCE,
        )

    def _log(self, vllm_config: VllmConfig) -> None:
        policy = self._spec.policy
        limits = self._spec.limits(vllm_config, self.groups[0].cache.block_size)
        granularity = policy.granularity(self._spec, limits.device_type)
        budget = parse_budget(self._spec, limits)
        near, memory = Counter[Reach](), Counter[str]()
        for group, views in zip(self.groups, self._views, strict=True):
            memory.update(views.memory_bytes)
            if group.reach is not None:
                near[group.reach] += len(group.layer_names)
        near_layers = "".join(
            f"; {number} layers read only {reach}, in whole pages" for reach, number in near.items()
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
            str(budget),
            near_layers,
            f"The draft model {self._spec.model} has its own KV cache"
            if self._spec.has_draft_model
            else "No weights were added",
            f"; {extra}" if extra else "",
        )
        if all(group.reach is not None for group in self.groups):
            logger.warning_once(
                "%s: no layer of this model attends to the whole context; the draft reads the latest "
                "tokens within the budget, and draft_kv_policy has no effect.",
                METHOD,
            )

    @property
    def switched_layers(self) -> Sequence[str]:
        """Layers whose queries and attention a policy may replace (`install_switches`)."""
        return [name for group in self.groups if group.reach is None for name in group.layer_names]

    @property
    def has_layer_pages(self) -> bool:
        """Whether some layers have separate block tables."""
        return any(isinstance(views, LayerPageViews) for views in self._views)

    @property
    def has_pages(self) -> bool:
        """Whether some layers read a view's block table."""
        return any(isinstance(views, PageViews | LayerPageViews) for views in self._views)

    @property
    def common_lens(self) -> Sequence[int | None]:
        """The longest `Views.common_lens` of all groups; views by page have no common length."""
        return max((views.common_lens for views in self._views), key=len)

    def capture_view(self, index: int, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """Call `Views.capture_view` of the group at `index`."""
        views = self._views[index]
        return views.capture_view(num_reqs, lens, common_len if common_len in views.common_lens else None)

    def num_latest(self, num_steps: int) -> int:
        """Return the number of latest context tokens that every layer's view contains."""
        return min(
            views.num_latest(num_steps) if isinstance(views, PageViews) else 0 for views in self._views
        )

    def warm_up_lookups(self, texts: Texts) -> None:
        """Compile the lookups on the device; see `WidePasses.warm_up`."""
        assert self._wide is not None
        self._wide.warm_up(texts)

    def draft(
        self,
        num_reqs: int,
        num_steps: int,
        read_batch: Callable[[], Batch],
        read_histories: Callable[[Batch], Sequence[History]] | None = None,
    ) -> bool:
        """Fill `draft_tokens[:num_reqs, :num_steps]`, or `draft_lists` with lookups on the host.

        Under tensor parallelism a failure ends the process.

        Args:
            num_reqs: requests of the round.
            num_steps: drafts of each request, possibly a `DraftPlan`.
            read_batch: returns the round's requests; may fail like drafting.
            read_histories: returns their tokens for lookups; None if the batch has them.

        Returns:
            False if drafting failed or is paused after failures (`pauses.py`). Then `draft_tokens` is 0,
            which the caller must drop or verify as one-hot drafts, and `draft_lists` holds empty lists.
        """
        drafts = self.draft_tokens[:num_reqs, :num_steps]
        self.draft_lists = None if self._staged is None else [[] for _ in range(num_reqs)]
        is_paused = not self._pauses.is_over()
        try:
            if not is_paused or self._own_cache is not None:  # it follows the target even in a pause
                batch = self._begin_round(read_batch)
            if is_paused:
                self._failures.count(paused_rounds=1)
            else:
                if self._staged is not None and read_histories is not None:
                    self._stage = "histories"
                    batch = replace(batch, histories=read_histories(batch))
                self._stage = "selection"  # until `_prepare` returns
                if self._draft_round(drafts, batch, num_steps):
                    self._pauses.note_success()
                return True
        except Exception:
            self._record_failed_round(self._stage)
            self.draft_lists = self.draft_lists and [[] for _ in range(num_reqs)]
        drafts.zero_()
        return False

    def _begin_round(self, read_batch: Callable[[], Batch]) -> Batch:
        self._stage = "batch"
        batch = read_batch()
        if self._own_cache is not None:
            self._stage = "own_cache"
            self._own_cache.begin_round(batch)
        return batch

    def follow_plain_step(self, follow: Callable[[], None]) -> None:
        """Update the draft's cache after a step of the target without drafts.

        Args:
            follow: updates the cache; may fail like `draft`.
        """
        try:
            follow()
        except Exception:
            self._record_failed_round("own_cache")

    def finish_request(self, req_id: str, answer: Sequence[int]) -> None:
        """Pass a finished request to lookups on the host, between rounds.

        Args:
            req_id: as in batches.
            answer: all verified tokens after the prompt.
        """
        try:
            if self._staged is not None:
                self._staged.finish(req_id, answer)
        except Exception:
            self.record_failure("lookup")

    def record_failure(self, component: str) -> None:
        """Count a failure that costs only speed; call in the exception handler.

        Strict mode raises the exception again. Under tensor parallelism the process ends, because the other
        ranks would wait for this one in a collective.
        """
        if self._num_ranks > 1:
            self._end_worker()
        if envs.strict():
            raise
        self._failures.by_stage.count(component)

    def _record_failed_round(self, stage: str) -> None:
        self.record_failure(stage)
        self._failures.count(draft_failures=1)
        # A failure during a pause is no failed retry, so it does not extend the pause.
        if not self._pauses.is_on and self._pauses.note_failure():
            self._failures.count(draft_pauses=1)

    def _draft_round(self, drafts: torch.Tensor, batch: Batch, num_steps: int) -> bool:
        """Draft into `drafts` [num_reqs, num_steps] int64, or into `draft_lists`.

        Returns:
            Whether a pass ran; only then the round counts as a success of drafting.
        """
        is_useful = num_steps > 0 and not all(batch.is_prefilling)
        if self._own_cache is not None and not is_useful:
            self._own_cache.catch_up(batch, 0)
            drafts.zero_()
            return False
        made = self._run_passes(drafts, batch, num_steps)
        has_passes = is_useful and not (isinstance(made, DraftLists) and not made.num_passes)
        if self._own_cache is not None:
            if not has_passes:  # `_prepare` was not called
                self._own_cache.catch_up(batch, 0)
            self._own_cache.end_round(batch, made.checked if isinstance(made, DraftLists) else made)
        return has_passes

    def _run_passes(
        self, drafts: torch.Tensor, batch: Batch, num_steps: int
    ) -> torch.Tensor | Sequence[Sequence[int]]:
        """Draft; return the drafts whose inputs' K/V was written (see `OwnCache.end_round`), or lists."""
        if self._staged is not None:
            self.draft_lists = self._staged.draft(batch, num_steps, lambda: self._prepare(batch, num_steps))
            return self.draft_lists
        num_passes = 0 if self._wide is None else self._wide.begin_round(batch, num_steps)
        self.takes_passes = num_passes > 0
        round_ = self._prepare(batch, num_steps)
        if self._wide is not None:
            num_passes = self._wide.draft(drafts, batch, round_, num_passes)
        if num_passes:
            return drafts[:, :num_passes]
        if all(batch.is_prefilling):  # drafts of unfinished prompts are dropped
            return drafts.zero_()
        tokens = batch.tokens
        sampled = []
        for index in range(num_steps):
            tokens = self._runner.run(round_.step(index, tokens)).tokens
            sampled.append(tokens)
        drafts.copy_(torch.stack(sampled, dim=1))
        if self._wide is not None:
            self._wide.count_steps(num_steps)
        return drafts

    def _prepare(self, batch: Batch, num_steps: int) -> Round:
        """Prepare the round's views."""
        if self._own_cache is not None:
            self._own_cache.catch_up(batch, num_steps)
        views = [
            views.prepare(batch.of_group(group.kv_cache_group), num_steps)
            for group, views in zip(self.groups, self._views, strict=True)
        ]
        self._stage = "draft_step"
        return Round(views)

    def _end_worker(self) -> NoReturn:
        """End the process at once, so that vLLM ends the engine.

        vLLM reports exceptions of the first rank only but notices a lost worker. An orderly exit would wait
        for the other ranks to close communicators.
        """
        logger.exception(
            "Drafting failed on one of %d tensor-parallel ranks; this worker exits.", self._num_ranks
        )
        os._exit(1)
