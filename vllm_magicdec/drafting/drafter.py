# SPDX-License-Identifier: Apache-2.0
"""A round: draft gamma tokens over the views, with the target or a draft model.

When the target drafts, its draft tokens write K/V into the request's lookahead slots. The target's own K/V
overwrites it before a step of the target reads it, and no view's length reaches the K/V of a rejected token
before a draft has overwritten it. The KV cache of a draft model catches up with the verified tokens before
each round.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.attention.native_attention import use_native_attention
from vllm_magicdec.attention.switch import install_switches
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.loops import Drafts, Loop, Stepwise
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.ports import Cache, Target
from vllm_magicdec.drafting.sizing import make_views, max_graph_reqs, parse_budget
from vllm_magicdec.drafting.staged import MIN_DRAFT_ACCEPTANCE, MIN_PASS_GAIN, StagedDrafts
from vllm_magicdec.drafting.wide_passes import WidePasses, WideTarget
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.device_lookups import DeviceLookups
from vllm_magicdec.lookup.history import History, Texts
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageViews
from vllm_magicdec.views.round import Batch, Round, RoundView, View, Views
from vllm_magicdec.views.tensors import has_kernels
from vllm_magicdec.views.windows import Reach

logger = init_logger(f"vllm.{__name__}")


class Drafter:
    """Drafts gamma tokens per request; one per worker, shared by both model runners.

    Args:
        groups: the draft's attention layers; a pass has a part for each group.
    """

    def __init__(
        self,
        target: Target,
        vllm_config: VllmConfig,
        groups: Sequence[LayerGroup],
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        cache: Cache,
    ) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        self._target = target
        self._cache = cache
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
                observe=partial(target.observe, group.layer_names),
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
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._loop = self._make_loop(vllm_config)
        self._pauses = Pauses("Drafting", "steps go on without useful drafts")
        self._stage = ""  # of the current round, for the failure metrics

    def _make_loop(self, vllm_config: VllmConfig) -> Loop:
        spec, model = self._spec, vllm_config.model_config
        steps = Stepwise(self._target, self.draft_tokens)
        if spec.draft_lookup != "on":
            return steps
        max_num_reqs, vocab_size = len(self.draft_tokens), model.get_vocab_size()
        counters, is_alone = LookupCounters(self.counts), self._num_ranks == 1
        if spec.looks_up_on_device:
            device = self.draft_tokens.device
            lookups = DeviceLookups(
                max_num_reqs, model.max_model_len, vocab_size, device, has_kernels=has_kernels(device)
            )
            return WidePasses(
                cast(WideTarget, self._target),  # the engine's configuration refuses other runners
                lookups,
                counters,
                steps,
                lengths=spec.round_lengths,
                max_model_len=model.max_model_len,
                is_alone=is_alone,
                extra_passes=int(self._cache.is_own),
            )
        # This imports Numba.
        from vllm_magicdec.lookup.lookups import open_lookups

        # The V2 runner verifies the same number of tokens of every request, drafted or not.
        is_v2 = vllm_config.use_v2_model_runner
        return StagedDrafts(
            self._target,
            open_lookups(spec.draft_lookup_sources, max_num_reqs, vocab_size, spec.num_speculative_tokens),
            counters,
            max_num_reqs=max_num_reqs,
            max_drafts=spec.num_speculative_tokens,
            max_model_len=model.max_model_len,
            is_probabilistic=spec.draft_sample_method == "probabilistic",
            is_alone=is_alone,
            min_gain=0.0 if is_v2 else MIN_PASS_GAIN,
            min_acceptance=0.0 if is_v2 else MIN_DRAFT_ACCEPTANCE,
            max_added=self._cache.max_added,
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
            self._describe_weights(),
            f"; {extra}" if extra else "",
        )
        if all(group.reach is not None for group in self.groups):
            logger.warning_once(
                "%s: no layer of this model attends to the whole context; the draft reads the latest "
                "tokens within the budget, and draft_kv_policy has no effect.",
                METHOD,
            )

    def _describe_weights(self) -> str:
        if self._spec.has_draft_model:
            return f"The draft model {self._spec.model} has its own KV cache"
        if self._spec.draft_weights != "target":
            return f"It reads {self._spec.draft_weights} copies of the target's linear layers"
        return "No weights were added"

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

    def warm_up_lookups(self, texts: Texts) -> None:
        """Compile the lookups on the device; see `WidePasses.warm_up`."""
        assert isinstance(self._loop, WidePasses)
        self._loop.warm_up(texts)

    def draft(
        self,
        num_steps: int,
        read_batch: Callable[[], Batch],
        read_histories: Callable[[Batch], Sequence[History]] | None = None,
    ) -> Drafts | None:
        """Draft for all requests of a round. Under tensor parallelism a failure ends the process.

        Args:
            num_steps: drafts of each request, possibly a `DraftPlan`.
            read_batch: returns the round's requests; may fail like drafting.
            read_histories: returns their tokens for lookups; None if the batch has them.

        Returns:
            The drafts, valid until the next round. None if drafting failed or is paused after failures
            (`pauses.py`): the caller has nothing to verify.
        """
        is_paused = not self._pauses.is_over()
        if is_paused:
            self.counts.add("paused_rounds")
            if not self._cache.is_own:  # it follows the target even in a pause
                return None
        try:
            self._stage = "batch"
            batch = read_batch()
            self._stage = "own_cache"
            self._cache.begin_round(batch)
            if is_paused:
                return None
            if isinstance(self._loop, StagedDrafts) and read_histories is not None:
                self._stage = "histories"
                batch = replace(batch, histories=read_histories(batch))
            self._stage = "selection"  # until `_prepare` returns
            drafts = self._draft_round(batch, num_steps)
        except Exception:
            self._record_failed_round(self._stage)
            return None
        if drafts.num_passes:
            self._pauses.note_success()
        return drafts

    def _draft_round(self, batch: Batch, gamma: int) -> Drafts:
        """Run one round of MagicDec (arXiv 2408.11049) between two steps of vLLM.

        1. Accept: vLLM's rejection sampler has done it, and `batch` has the accepted tokens.
        2. Draft: the loop takes gamma passes over the views, a small part of the KV cache.
        3. Verify: vLLM's next step runs the target over all drafts and the whole KV cache.
        """
        num_reqs, cache = len(batch.req_ids), self._cache
        if gamma == 0 or all(batch.is_prefilling):  # drafts of unfinished prompts are dropped
            cache.catch_up(batch, 0)
            if gamma:  # policies note who is new and who was preempted
                self._prepare_views(batch, gamma)
            nothing = np.zeros(num_reqs, dtype=np.int64)
            return Drafts(DraftLists([] for _ in range(num_reqs)), nothing, num_passes=0)
        drafts = self._loop.draft(batch, gamma, partial(self._prepare, batch, gamma))
        if not drafts.num_passes:  # `_prepare` was not called
            cache.catch_up(batch, 0)
        cache.end_round(batch, drafts.num_written)
        return drafts

    def _prepare(self, batch: Batch, num_steps: int, *, is_wide: bool = False) -> Round:
        num_latest = min(
            views.num_latest(num_steps) if isinstance(views, PageViews) else 0 for views in self._views
        )
        self._cache.catch_up(batch, num_steps, num_latest=num_latest, is_wide=is_wide)
        views = self._prepare_views(batch, num_steps)
        self._stage = "draft_step"
        return Round(views, self._cache.extend)

    def _prepare_views(self, batch: Batch, num_steps: int) -> list[RoundView]:
        return [
            views.prepare(replace(batch, kv_cache_group=group.kv_cache_group), num_steps)
            for group, views in zip(self.groups, self._views, strict=True)
        ]

    def follow_plain_step(self, follow: Callable[[], bool]) -> bool:
        """Call `follow`, in which the draft's cache follows a step without drafts; False if it failed."""
        try:
            return follow()
        except Exception:
            self._record_failed_round("own_cache")
            return False

    def finish_request(self, req_id: str, answer: Sequence[int]) -> None:
        """Between rounds, pass a finished request and all verified tokens after its prompt to lookups."""
        try:
            if isinstance(self._loop, StagedDrafts):
                self._loop.finish(req_id, answer)
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
        self.counts.count_failure(component)

    def _record_failed_round(self, stage: str) -> None:
        self.record_failure(stage)
        self.counts.add("draft_failures")
        # A failure during a pause is no failed retry, so it does not extend the pause.
        if not self._pauses.is_on and self._pauses.note_failure():
            self.counts.add("draft_pauses")

    def _end_worker(self) -> NoReturn:
        """End the process at once, so that vLLM ends the engine.

        vLLM reports exceptions of the first rank only but notices a lost worker. An orderly exit would wait
        for the other ranks to close communicators.
        """
        logger.exception(
            "Drafting failed on one of %d tensor-parallel ranks; this worker exits.", self._num_ranks
        )
        os._exit(1)
