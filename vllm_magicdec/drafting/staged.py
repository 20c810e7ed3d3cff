# SPDX-License-Identifier: Apache-2.0
"""Draft rounds whose passes check looked-up tokens and so yield several drafts each.

A pass takes a request's last token and some looked-up tokens over the same view, and samples a token after
each of them. The sampled tokens that equal the looked-up ones are drafts, and so is the one after them:
TriForce's staged speculation (arXiv 2404.11912) with lookups as the smallest model. A lookup is a
one-hot proposal, so sampling and comparing is exact rejection sampling: drafts are distributed as with one
token per pass.

With a fixed number of drafts, a round may end when a pass would yield too few drafts for the batch, and a
request may end early when its drafts are unlikely to be accepted. With a controller, the `DraftPlan` sets
these limits, and looked-up tokens may also be verified unchecked: after a request's drafts or alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import DraftLists, DraftPlan, bucket_of
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Evidence, Predicted
from vllm_magicdec.drafting.loops import Drafts, Prepare
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.ports import Target
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.round import Batch, Queries, Round
from vllm_magicdec.views.tensors import on_device

if TYPE_CHECKING:  # imports Numba
    from vllm_magicdec.lookup.lookups import Lookups

logger = init_logger(f"vllm.{__name__}")

# Mean drafts per request below which a pass is skipped, for a fixed number of drafts.
MIN_PASS_GAIN = 0.5
# Chance of acceptance below which a draft and its successors are dropped, for a fixed number of drafts. It
# keeps the tokens per round, but saves half of the passes where half of the drafts are rejected.
MIN_DRAFT_ACCEPTANCE = 0.05


@dataclass
class _RequestDrafts:
    """Drafts of one request in the current round.

    Args:
        target: number of drafts to reach.
        evidence: of each draft; empty if chances are not estimated.
        reached: chance that each draft and all before it are accepted; 1 if chances are not estimated.
    """

    target: int
    tokens: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """Chance that all drafts are accepted."""
        return self.reached[-1] if self.reached else 1.0


@dataclass(frozen=True)
class _Proposed:
    """A request's drafts until their verification is known."""

    history_len: int  # verified tokens before them
    tokens: Sequence[int]
    evidence: Sequence[Evidence]  # of the first tokens; empty if chances are not estimated
    num_checked: int  # first tokens, sampled by passes
    num_kept: int  # first tokens, sent to verification


class StagedDrafts:
    """Drafts rounds in as few passes as lookups allow (a `Loop`). Waits for the device after every pass.

    Args:
        max_drafts: per request and round.
        max_model_len: tokens.
        is_probabilistic: drafts are sampled from the draft's distribution instead of its argmax.
        is_alone: no other rank has to draft the same, so lookup failures need not be fatal.
        min_gain: with a fixed number of drafts, mean drafts per request below which a pass is skipped.
        min_acceptance: with a fixed number of drafts, chance of acceptance below which a draft and its
            successors are dropped.
        max_added: queries that the draft's cache adds to a pass per request, at most.
    """

    def __init__(
        self,
        target: Target,
        lookups: "Lookups",
        counters: LookupCounters,
        *,
        max_num_reqs: int,
        max_drafts: int,
        max_model_len: int,
        is_probabilistic: bool = False,
        is_alone: bool = True,
        min_gain: float = 0.0,
        min_acceptance: float = 0.0,
        max_added: int = 0,
    ) -> None:
        self._target = target
        self._queries_per_request = 1 + max_added
        self._lookups = lookups
        self._lookup_pauses = Pauses("A lookup", "every draft takes a pass of its own")
        lookups.on_failure = self._record_failed_source
        self._looks_up = True  # in this round
        self._has_looked_up = False  # in this round
        self._counters = counters
        self._max_model_len = max_model_len
        self._is_probabilistic = is_probabilistic
        self._is_alone = is_alone
        self._min_gain, self._min_acceptance = min_gain, min_acceptance
        self._max_num_reqs = max_num_reqs
        self._max_drafts = max_drafts
        self._confidence = Confidence()
        self._proposed: dict[str, _Proposed] = {}

    def draft(self, batch: Batch, num_steps: int, prepare: Prepare) -> Drafts:
        """Draft a round; none for requests that cannot use them.

        Args:
            batch: the round's requests, with their histories.
            num_steps: maximum drafts of a request; a `DraftPlan` also sets thresholds and use of lookups.
            prepare: prepares the round's views; called only before passes.
        """
        self._looks_up, self._has_looked_up = self._lookup_pauses.is_over(), False
        drafts = self._draft_round(batch, num_steps, prepare)
        if self._looks_up and self._has_looked_up:
            self._lookup_pauses.note_success()
        return Drafts(drafts, np.array(drafts.num_checked), drafts.num_passes)

    def finish(self, req_id: str, answer: Sequence[int]) -> None:
        """Record a finished request's answer; see `Drafter.finish_request`."""
        self._lookups.finish(req_id, np.array(answer, dtype=np.int32))

    def _draft_round(self, batch: Batch, num_steps: int, prepare: Prepare) -> DraftLists:
        room = (self._max_model_len - batch.context_lens).tolist()
        # Drafts of unfinished prompts or beyond the model's length would be dropped.
        drafting = [
            i for i, is_prefilling in enumerate(batch.is_prefilling) if not is_prefilling and room[i] > 0
        ]
        self._follow(batch, drafting)
        is_adaptive, bucket = isinstance(num_steps, DraftPlan), 0
        if isinstance(num_steps, DraftPlan):
            plan = num_steps
        else:
            plan = DraftPlan(
                num_steps, min_acceptance=self._min_acceptance, min_gain=self._min_gain * len(drafting)
            )
        if plan.looks_first:
            most = [min(self._max_drafts, room[i]) for i in drafting]
            found = self._look_up([batch.req_ids[i] for i in drafting], [()] * len(drafting), most)
            bucket = bucket_of(sum(sum(ahead.reached) for ahead in found) / max(1, len(drafting)))
            plan = plan.for_bucket(bucket)
            likely = [_worth_verifying_unchecked(ahead, 1.0, plan) for ahead in found]
            gain = sum(chance - plan.min_acceptance for ahead in likely for chance in ahead.reached)
            if plan.lookups_alone or gain >= plan.min_expected_accepted:
                return self._draft_by_lookups(batch, drafting, likely, bucket)
        requests = {i: _RequestDrafts(min(int(plan), room[i])) for i in drafting}
        drafts = self._draft_by_passes(batch, requests, plan, prepare(), is_adaptive=is_adaptive)
        drafts.bucket = bucket
        return drafts

    def _draft_by_lookups(
        self, batch: Batch, drafting: Sequence[int], found: Sequence[Continuation], bucket: int
    ) -> DraftLists:
        drafts = DraftLists(([] for _ in batch.req_ids), bucket=bucket)
        for i, ahead in zip(drafting, found, strict=True):
            drafts[i] = list(ahead.tokens)
            self._propose(batch, i, _RequestDrafts(0), ahead.tokens)
        return drafts

    def _draft_by_passes(
        self,
        batch: Batch,
        requests: dict[int, _RequestDrafts],
        plan: DraftPlan,
        round_: Round,
        *,
        is_adaptive: bool,
    ) -> DraftLists:
        latest, num_passes, num_looked_up, num_accepted = batch.tokens.tolist(), 0, 0, 0
        is_weighed = is_adaptive or plan.min_acceptance > 0
        unchecked: dict[int, Sequence[int]] = {}
        while running := _unfinished(requests, plan):
            drafted = [requests[i].tokens for i in running]
            missing = [requests[i].target - len(requests[i].tokens) for i in running]
            # A pass samples the last missing draft itself; no pass follows tokens that stay unchecked.
            found = self._look_up(
                [batch.req_ids[i] for i in running],
                drafted,
                [number if is_adaptive else number - 1 for number in missing],
            )
            pairs = zip(found, missing, strict=True)
            checkable = [self._checkable(ahead, number) for ahead, number in pairs]
            if num_passes and plan.min_gain > 0:
                chances = [requests[i].chance for i in running]
                if is_adaptive:
                    instead = [
                        _worth_verifying_unchecked(ahead, chance, plan)
                        for ahead, chance in zip(found, chances, strict=True)
                    ]
                    gain = _gain(chances, checkable, self._confidence.usual, plan)
                    gain -= self._gain_instead(chances, instead, plan)
                else:  # the price of verification is unknown, so all drafts count alike
                    instead = [Continuation()] * len(running)
                    gain = sum(1.0 + sum(ahead.reached) for ahead in checkable)
                if gain < plan.min_gain:
                    unchecked = {i: o.tokens for i, o in zip(running, instead, strict=True) if o.tokens}
                    break
            queries = Queries(
                requests=np.array(running),
                firsts=np.array([len(own) for own in drafted]),
                lens=np.array([1 + len(ahead.tokens) for ahead in checkable]),
            )
            inputs = [
                token
                for i, own, ahead in zip(running, drafted, checkable, strict=True)
                for token in (own[-1] if own else latest[i], *ahead.tokens)
            ]
            tokens = on_device(inputs, batch.tokens.device).to(torch.int32)
            sampled, probabilities = self._target.run(round_.take(queries, tokens, is_weighed=is_weighed))
            sampled_tokens = sampled.tolist()
            all_probs = None if probabilities is None else probabilities.tolist()
            for i, checked, ahead, start in zip(
                running, checkable, found, queries.starts.tolist(), strict=False
            ):
                num_right = _common_prefix_len(checked.tokens, sampled_tokens[start:])
                new = slice(start, start + num_right + 1)
                self._add(requests[i], sampled_tokens[new], all_probs and all_probs[new], ahead.tokens)
                num_looked_up += len(checked.tokens)
                num_accepted += num_right
            num_passes += 1
        if num_passes:
            self._counters.count_round(num_passes, num_looked_up, num_accepted)
        kept = {i: _worth_verifying(own, plan, self._is_probabilistic) for i, own in requests.items()}
        drafts = [[*kept.get(i, ()), *unchecked.get(i, ())] for i in range(len(latest))]
        for i, own in requests.items():
            if not is_adaptive:  # a plan's number is an upper bound
                self._counters.count(left_out_tokens=own.target - len(own.tokens))
            self._counters.count(cut_tokens=len(own.tokens) - len(kept[i]))
            self._propose(batch, i, own, drafts[i])
        for i, tokens in unchecked.items():
            self._target.note_unchecked(i, len(kept[i]), tokens)
        return DraftLists(drafts, num_passes, [len(kept.get(i, ())) for i in range(len(latest))])

    def _checkable(self, ahead: Continuation, num_missing: int) -> Continuation:
        return ahead.first(num_missing - 1) if self._target.reads_ahead else Continuation()

    def _gain_instead(
        self, chances: Sequence[float], instead: Sequence[Continuation], plan: DraftPlan
    ) -> float:
        """Gain that is given up by running the pass: of tokens verified unchecked in its place."""
        return sum(
            chance * reached - plan.min_acceptance
            for chance, ahead in zip(chances, instead, strict=True)
            # If passes cannot check lookups, tokens behind the first can still be verified after the pass.
            for reached in (ahead if self._target.reads_ahead else ahead.first(1)).reached
        )

    def _propose(self, batch: Batch, index: int, own: _RequestDrafts, drafts: Sequence[int]) -> None:
        """Remember a request's drafts, including sampled ones that are not verified."""
        num_checked = min(len(own.tokens), len(drafts))
        tokens = [*drafts]
        # With argmax drafts the text shows whether a dropped one was right, so it counts as well.
        if len(own.tokens) > len(drafts) and not self._is_probabilistic:
            tokens, num_checked = own.tokens, len(own.tokens)
        self._proposed[batch.req_ids[index]] = _Proposed(
            len(batch.histories[index]), tokens, own.evidence[:num_checked], num_checked, len(drafts)
        )

    def _learn(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """Count accepted drafts and update the estimated chances."""
        for req_id, history in zip(req_ids, histories, strict=True):
            proposed = self._proposed.pop(req_id, None)
            # A shorter history belongs to another request of the same name.
            if proposed is None or len(history) <= proposed.history_len:
                continue
            truth = history.after(proposed.history_len).tolist()
            num_right = _common_prefix_len(proposed.tokens, truth)
            if num_unchecked := len(proposed.tokens) - proposed.num_checked:
                self._counters.count_unchecked(num_unchecked, max(0, num_right - proposed.num_checked))
            num_accepted = min(num_right, proposed.num_kept)
            if len(truth) == num_accepted + 1:  # otherwise more than one round has passed
                self._counters.count(pass_accepted_tokens=min(num_accepted, proposed.num_checked))
            for index, evidence in enumerate(proposed.evidence[: min(num_right + 1, len(truth))]):
                self._confidence.observe(evidence, index < num_right)
        if len(self._proposed) > self._max_num_reqs:  # of finished requests
            self._proposed.clear()

    def _follow(self, batch: Batch, drafting: Sequence[int]) -> None:
        """Process the tokens verified since the last round."""
        req_ids, histories = [batch.req_ids[i] for i in drafting], [batch.histories[i] for i in drafting]
        self._learn(req_ids, histories)
        if self._looks_up:
            try:
                self._lookups.follow(req_ids, histories)
            except Exception:
                self._disable_lookups()

    def _look_up(
        self, req_ids: Sequence[str], drafted: Sequence[Sequence[int]], most: Sequence[int]
    ) -> list[Continuation]:
        """Look up at most `most` tokens after each request's drafts, within the size of a pass."""
        room = self._target.max_num_tokens - self._queries_per_request * len(req_ids)
        found = list[Continuation]()
        for req_id, own, limit in zip(req_ids, drafted, most, strict=True):
            ahead, number = Continuation(), min(limit, room)
            if self._looks_up and number > 0:
                try:
                    ahead = self._lookups.look_up(req_id, own, number, MIN_ACCEPTANCE)
                    self._has_looked_up = True
                except Exception:
                    self._disable_lookups()
            found.append(ahead)
            room -= len(ahead.tokens)
        return found

    def _disable_lookups(self) -> None:
        """Disable lookups for this round; call in the exception handler."""
        self._count_failure()
        if self._lookup_pauses.note_failure():
            self._counters.count(lookup_pauses=1)
        self._looks_up = False
        self._lookups.forget()

    def _record_failed_source(self, name: str) -> None:
        """Record that a source of lookups failed; call in the exception handler."""
        self._count_failure()
        logger.exception(
            "Lookups in %r failed. Nothing is looked up there any more; no request is lost.", name
        )

    def _count_failure(self) -> None:
        if envs.strict() or not self._is_alone:
            raise
        self._counters.count_failure()

    def _add(
        self,
        own: _RequestDrafts,
        tokens: Sequence[int],
        probabilities: Sequence[float] | None,
        looked_up: Sequence[int],
    ) -> None:
        own.tokens += tokens
        if probabilities is None:
            own.reached += [1.0] * len(tokens)
            return
        for token, probability, other in zip_longest(tokens, probabilities, looked_up[: len(tokens)]):
            if other is None:
                predicted = Predicted.NOTHING
            else:
                predicted = Predicted.THE_SAME if other == token else Predicted.ANOTHER
            evidence = Evidence(probability, predicted)
            own.evidence.append(evidence)
            own.reached.append(own.chance * self._confidence.chance(evidence))


def _unfinished(requests: dict[int, _RequestDrafts], plan: DraftPlan) -> list[int]:
    """Return the requests whose next draft is worth verifying."""
    return [
        i
        for i, own in requests.items()
        if len(own.tokens) < own.target and own.chance >= plan.min_acceptance
    ]


def _gain(
    chances: Sequence[float], checkable: Sequence[Continuation], usual: float, plan: DraftPlan
) -> float:
    """Return the expected gain of a pass: a draft per request and one per correct looked-up token.

    Confirmed lookups are assumed accepted if the drafts before them are; the draft after them is accepted
    with the usual chance of an unpredicted draft.
    """
    return sum(
        chance * (usual + sum(ahead.reached)) - plan.min_acceptance * (1 + sum(ahead.reached))
        for chance, ahead in zip(chances, checkable, strict=True)
    )


def _worth_verifying_unchecked(ahead: Continuation, chance: float, plan: DraftPlan) -> Continuation:
    """Return the tokens worth verifying after drafts that are accepted with this chance."""
    return ahead.first(sum(chance * reached >= plan.min_acceptance for reached in ahead.reached))


def _worth_verifying(own: _RequestDrafts, plan: DraftPlan, is_probabilistic: bool) -> list[int]:
    # The rejection sampler corrects for the draft's whole distribution. Dropping a sampled token by its own
    # chance would bias the output, so the tokens before it decide.
    chances = [1.0, *own.reached][: len(own.tokens)] if is_probabilistic else own.reached
    pairs = zip(own.tokens, chances, strict=True)
    return [token for token, chance in pairs if chance >= plan.min_acceptance]


def _common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))
