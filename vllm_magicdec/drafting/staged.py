# SPDX-License-Identifier: Apache-2.0
"""A round whose passes draft several tokens each, where lookups foresee what the draft will draw.

A pass takes a request's last token and some looked-up ones over the same view, and so draws a token after
each of them. Those that the looked-up tokens turn out to be are drafts, and the one after them is one more:
TriForce's stages (arXiv 2404.11912), with a lookup for the smallest model. These drafts are those that one
pass per token makes, whatever the lookups say. A looked-up token is proposed with certainty, so drawing and
comparing is rejection sampling: where drafts are sampled, each is drawn from the draft's own distribution.

A round of a fixed number of drafts may end when a pass would gain too few for the batch, and a request's
part in it when its drafts are too unlikely to stand: some then have fewer. Where a controller says what
drafting is worth, a round ends when the drafts are too unlikely to stand, and those that are not worth
verifying are left out. Looked-up tokens that are worth verifying may then follow a request's last draft
unread, or make the whole round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import DraftLists, DraftPlan, bucket_of
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Evidence, Foreseen
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.base import Batch, on_device
from vllm_magicdec.views.passes import DraftPass, Queries, RoundSteps

if TYPE_CHECKING:  # Numba comes with them
    from vllm_magicdec.lookup.lookups import Lookups

logger = init_logger(f"vllm.{__name__}")

# With a fixed number of drafts, a pass is left out that makes fewer drafts of a request in the mean. With 1
# it does as much as a pass of one token, which the user's number of drafts says is worth it.
LEAST_GAIN = 0.5
# With a fixed number of drafts, the chance of acceptance below which a draft is left out, with those after
# it. So low that the user's number still brings about as many tokens: where half of the drafts are
# rejected, half of the passes are spared.
LEAST_ACCEPTANCE = 0.05


class PassRunner(Protocol):
    """What staged drafts need from a vLLM model runner beside `drafting.drafter.Runner`."""

    @property
    def max_pass_tokens(self) -> int:
        """Query tokens of a pass, at most; no fewer than requests in a batch."""
        ...

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass may take looked-up tokens after a request's last one; else they stay unread."""
        ...

    def draft_pass(
        self, tokens: torch.Tensor, draft_pass: DraftPass
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target over the pass's views and draw the token after each of its own.

        Args:
            tokens: [num_tokens] int32, the query tokens.
            draft_pass: where they look and where their K/V goes, by `Drafter.groups`.

        Returns:
            [num_tokens] int32 or int64, drawn as `draft_sample_method` says, and [num_tokens] float32, the
            probability of each; None where the pass does not ask for it.
        """
        ...

    def note_unread(self, request: int, first: int, tokens: Sequence[int]) -> None:
        """The last drafts of a request were looked up: proposed with certainty, and drawn by no pass.

        Args:
            request: its place in the batch.
            first: place of the first of them among its drafts.
            tokens: they.
        """
        ...


@dataclass
class _Making:
    """A request's drafts of the round."""

    wanted: int
    tokens: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    """What is known of each; none where nothing is weighed."""
    reached: list[float] = field(default_factory=list)
    """The chance that each draft stands, with all before it; 1 where nothing is weighed."""

    @property
    def chance(self) -> float:
        """That all stand."""
        return self.reached[-1] if self.reached else 1.0


@dataclass(frozen=True)
class _Proposed:
    """A request's latest drafts, until it is known what became of them."""

    history_len: int  # tokens that had been verified
    tokens: Sequence[int]
    evidence: Sequence[Evidence]  # what is known of the first ones; none: nothing is weighed
    num_read: int  # by the draft; others follow
    num_kept: int  # that are to be verified


class StagedDrafts:
    """Drafts of a round in as few passes as the lookups allow. Waits for the device after every pass.

    Args:
        runner: makes the passes.
        lookups: of this worker's requests.
        counters: are shown in the metrics.
        max_num_reqs: requests in a batch.
        max_drafts: of a request's round, whoever makes them.
        max_model_len: tokens.
        are_drawn: drafts are drawn from the draft's distribution, not its likeliest tokens.
        is_alone: no other rank has to draft the same, so this one may go on without lookups that fail.
        min_gain: drafts of each request, in the mean, that a pass of a fixed number of drafts has to
            promise; else it is left out.
        min_acceptance: that a draft of a fixed number must have to stand; else it is left out, with those
            after it.
    """

    def __init__(
        self,
        runner: PassRunner,
        lookups: "Lookups",
        counters: LookupCounters,
        *,
        max_num_reqs: int,
        max_drafts: int,
        max_model_len: int,
        are_drawn: bool = False,
        is_alone: bool = True,
        min_gain: float = 0.0,
        min_acceptance: float = 0.0,
    ) -> None:
        self._runner = runner
        self._lookups = lookups
        self._lookup_pauses = Pauses("A lookup", "every draft takes a pass of its own")
        self._source_pauses = {
            name: Pauses(f"A lookup in {name!r}", "nothing is looked up there")
            for name in lookups.source_names
        }
        self._looks_up = True  # in this round
        self._has_looked_up = False  # in this round
        self._counters = counters
        self._max_model_len = max_model_len
        self._are_drawn = are_drawn
        self._is_alone = is_alone
        self._min_gain, self._min_acceptance = min_gain, min_acceptance
        self._max_num_reqs = max_num_reqs
        self._max_drafts = max_drafts
        self._confidence = Confidence()
        self._proposed: dict[str, _Proposed] = {}

    def draft(
        self, batch: Batch, num_steps: int, prepare: Callable[[], Sequence[RoundSteps]]
    ) -> DraftLists:
        """The drafts of each request; none where they would not be used.

        Args:
            batch: the round's requests, with their histories.
            num_steps: most drafts; a `DraftPlan` says what they are worth, and whether to look them up.
            prepare: makes the round's steps by group of layers; called where some are taken.
        """
        self._looks_up, self._has_looked_up = self._lookup_pauses.is_over(), False
        resting = [name for name, pauses in self._source_pauses.items() if not pauses.is_over()]
        self._lookups.begin_round(resting, lambda name: self._take_failure(self._source_pauses[name]))
        drafts = self._draft_round(batch, num_steps, prepare)
        if self._looks_up and self._has_looked_up:
            self._lookup_pauses.note_success()
        for name in self._lookups.answered:
            self._source_pauses[name].note_success()
        return drafts

    def finish(self, req_id: str, answer: Sequence[int]) -> None:
        """See `Drafter.finish_request`."""
        self._lookups.finish(req_id, np.array(answer, dtype=np.int32))

    def _draft_round(
        self, batch: Batch, num_steps: int, prepare: Callable[[], Sequence[RoundSteps]]
    ) -> DraftLists:
        """See `draft`."""
        room = (self._max_model_len - batch.context_lens).tolist()
        # What a request drafts before its prompt is whole, or beyond the model's length, is dropped.
        drafting = [
            i for i, is_prefilling in enumerate(batch.is_prefilling) if not is_prefilling and room[i] > 0
        ]
        self._follow(batch, drafting)
        # A plan says itself what drafts have to promise.
        fixed = DraftPlan(
            num_steps, min_acceptance=self._min_acceptance, min_gain=self._min_gain * len(drafting)
        )
        plan = num_steps if isinstance(num_steps, DraftPlan) else fixed
        is_priced, bucket = plan is num_steps, 0
        if plan.looks_first:
            most = [min(self._max_drafts, room[i]) for i in drafting]
            found = self._look_up([batch.req_ids[i] for i in drafting], [()] * len(drafting), most)
            bucket = bucket_of(sum(sum(ahead.reached) for ahead in found) / max(1, len(drafting)))
            plan = plan.for_bucket(bucket)
            likely = [_worth_unread(ahead, 1.0, plan) for ahead in found]
            promise = sum(chance - plan.min_acceptance for ahead in likely for chance in ahead.reached)
            if plan.lookups_alone or promise >= plan.min_expected_accepted:
                return self._leave_unread(batch, drafting, likely, bucket)
        making = {i: _Making(min(int(plan), room[i])) for i in drafting}
        drafts = self._draft(batch, making, plan, prepare(), is_priced=is_priced)
        drafts.bucket = bucket
        return drafts

    def _leave_unread(
        self, batch: Batch, drafting: Sequence[int], found: Sequence[Continuation], bucket: int
    ) -> DraftLists:
        """The round's drafts are those that were looked up."""
        drafts = DraftLists(([] for _ in batch.req_ids), bucket=bucket)
        for i, ahead in zip(drafting, found, strict=True):
            drafts[i] = list(ahead.tokens)
            self._propose(batch, i, _Making(0), ahead.tokens)
        return drafts

    def _draft(
        self,
        batch: Batch,
        making: dict[int, _Making],
        plan: DraftPlan,
        rounds: Sequence[RoundSteps],
        *,
        is_priced: bool,
    ) -> DraftLists:
        """In as few passes as it takes; unless it is priced, a plan is of a fixed number."""
        latest, num_passes, num_looked_up, num_accepted = batch.tokens.tolist(), 0, 0, 0
        is_weighed = is_priced or plan.min_acceptance > 0
        unread: dict[int, Sequence[int]] = {}
        while running := _worth_going_on(making, plan):
            drafted = [making[i].tokens for i in running]
            lacking = [making[i].wanted - len(making[i].tokens) for i in running]
            # What a pass reads is followed by one draft of its own, what is verified unread by none.
            found = self._look_up(
                [batch.req_ids[i] for i in running],
                drafted,
                [number if is_priced else number - 1 for number in lacking],
            )
            read = [self._readable(ahead, number) for ahead, number in zip(found, lacking, strict=True)]
            if num_passes and plan.min_gain > 0:
                chances = [making[i].chance for i in running]
                if is_priced:
                    instead = [
                        _worth_unread(ahead, chance, plan)
                        for ahead, chance in zip(found, chances, strict=True)
                    ]
                    gain = _gain(chances, read, self._confidence.usual, plan)
                    gain -= self._promise_instead(chances, instead, plan)
                else:  # nothing says what verifying one more costs: drafts count, whatever their chance
                    instead = [Continuation()] * len(running)
                    gain = sum(1.0 + sum(ahead.reached) for ahead in read)
                if gain < plan.min_gain:
                    pairs = zip(running, instead, strict=True)
                    unread = {i: ahead.tokens for i, ahead in pairs if ahead.tokens}
                    break
            queries = Queries(
                requests=np.array(running),
                firsts=np.array([len(own) for own in drafted]),
                lens=np.array([1 + len(ahead.tokens) for ahead in read]),
            )
            given = [
                token
                for i, own, ahead in zip(running, drafted, read, strict=True)
                for token in (own[-1] if own else latest[i], *ahead.tokens)
            ]
            drawn, probabilities = self._runner.draft_pass(
                on_device(given, batch.tokens.device).to(torch.int32),
                DraftPass(queries, [steps.take(queries) for steps in rounds], is_weighed),
            )
            drawn_tokens = drawn.tolist()
            given_probabilities = None if probabilities is None else probabilities.tolist()
            for i, given_ahead, ahead, start in zip(
                running, read, found, queries.starts.tolist(), strict=False
            ):
                num_right = _num_equal(given_ahead.tokens, drawn_tokens[start:])
                new = slice(start, start + num_right + 1)
                probs = given_probabilities and given_probabilities[new]
                self._add(making[i], drawn_tokens[new], probs, ahead.tokens)
                num_looked_up += len(given_ahead.tokens)
                num_accepted += num_right
            num_passes += 1
        if num_passes:
            self._counters.count_round(num_passes, num_looked_up, num_accepted)
        kept = {i: _worth_verifying(own, plan, self._are_drawn) for i, own in making.items()}
        drafts = [[*kept.get(i, ()), *unread.get(i, ())] for i in range(len(latest))]
        for i, own in making.items():
            if not is_priced:  # else nobody asked for so many
                self._counters.count(left_out_tokens=own.wanted - len(own.tokens))
            self._counters.count(cut_tokens=len(own.tokens) - len(kept[i]))
            self._propose(batch, i, own, drafts[i])
        for i, tokens in unread.items():
            self._runner.note_unread(i, len(kept[i]), tokens)
        return DraftLists(drafts, num_passes, [len(kept.get(i, ())) for i in range(len(latest))])

    def _readable(self, ahead: Continuation, lacking: int) -> Continuation:
        """What a pass may read of it for a request that still lacks so many drafts."""
        return ahead.first(lacking - 1) if self._runner.reads_ahead else Continuation()

    def _promise_instead(
        self, chances: Sequence[float], instead: Sequence[Continuation], plan: DraftPlan
    ) -> float:
        """Of tokens that would be verified in place of a pass, and that it would draw otherwise."""
        return sum(
            chance * reached - plan.min_acceptance
            for chance, ahead in zip(chances, instead, strict=True)
            # After a pass that reads nothing ahead, all but the first may be verified as well.
            for reached in (ahead if self._runner.reads_ahead else ahead.first(1)).reached
        )

    def _propose(self, batch: Batch, index: int, own: _Making, drafts: Sequence[int]) -> None:
        """Remember a request's drafts, also those of its passes that are not to be verified."""
        num_read = min(len(own.tokens), len(drafts))
        tokens = [*drafts]
        # Of a draft that was left out the text tells whether it would have stood, if it was the likeliest
        # token; and nothing, if it was drawn.
        if len(own.tokens) > len(drafts) and not self._are_drawn:
            tokens, num_read = own.tokens, len(own.tokens)
        self._proposed[batch.req_ids[index]] = _Proposed(
            len(batch.histories[index]), tokens, own.evidence[:num_read], num_read, len(drafts)
        )

    def _learn(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """What became of the drafts."""
        for req_id, history in zip(req_ids, histories, strict=True):
            made = self._proposed.pop(req_id, None)
            if made is None or len(history) <= made.history_len:  # another request of that name
                continue
            truth = history.after(made.history_len).tolist()
            num_right = _num_equal(made.tokens, truth)
            if num_unread := len(made.tokens) - made.num_read:
                self._counters.count_unchecked(num_unread, max(0, num_right - made.num_read))
            num_stood = min(num_right, made.num_kept)
            if len(truth) == num_stood + 1:  # what verifying them adds; else more rounds have passed
                self._counters.count(pass_accepted_tokens=min(num_stood, made.num_read))
            for place, evidence in enumerate(made.evidence[: min(num_right + 1, len(truth))]):
                self._confidence.observe(evidence, place < num_right)
        if len(self._proposed) > self._max_num_reqs:  # of requests that have ended
            self._proposed.clear()

    def _follow(self, batch: Batch, drafting: Sequence[int]) -> None:
        """Learn what was verified since the last round."""
        req_ids, histories = [batch.req_ids[i] for i in drafting], [batch.histories[i] for i in drafting]
        self._learn(req_ids, histories)
        if self._looks_up:
            try:
                self._lookups.follow(req_ids, histories)
            except Exception:
                self._go_on_without_lookups()

    def _look_up(
        self,
        req_ids: Sequence[str],
        drafted: Sequence[Sequence[int]],
        most: Sequence[int],  # tokens of each request
    ) -> list[Continuation]:
        """What may follow each request's drafts, of all no more than a pass has room for."""
        room, found = self._runner.max_pass_tokens - len(req_ids), list[Continuation]()
        for req_id, own, wanted in zip(req_ids, drafted, most, strict=True):
            ahead, number = Continuation(), min(wanted, room)
            if self._looks_up and number > 0:
                try:
                    ahead = self._lookups.look_up(req_id, own, number, MIN_ACCEPTANCE)
                    self._has_looked_up = True
                except Exception:
                    self._go_on_without_lookups()
            found.append(ahead)
            room -= len(ahead.tokens)
        return found

    def _go_on_without_lookups(self) -> None:
        """For this round, as what has failed is no source; to be called where the exception is handled."""
        self._take_failure(self._lookup_pauses)
        self._looks_up = False
        self._lookups.forget()

    def _take_failure(self, pauses: Pauses) -> None:
        """Of all lookups, or of a source; to be called where the exception is handled."""
        if envs.strict() or not self._is_alone:
            raise
        self._counters.count_failure()
        if pauses.note_failure():
            self._counters.count(lookup_pauses=1)

    def _add(
        self,
        own: _Making,
        tokens: Sequence[int],
        probabilities: Sequence[float] | None,
        looked_up: Sequence[int],  # for their places, as many as there are
    ) -> None:
        own.tokens += tokens
        if probabilities is None:
            own.reached += [1.0] * len(tokens)
            return
        for token, probability, foreseen in zip_longest(tokens, probabilities, looked_up[: len(tokens)]):
            evidence = Evidence(probability, _foreseen(token, foreseen))
            own.evidence.append(evidence)
            own.reached.append(own.chance * self._confidence.chance(evidence))


def _foreseen(token: int, looked_up: int | None) -> Foreseen:
    """By the token that was looked up for its place, if there is one."""
    if looked_up is None:
        return Foreseen.NOTHING
    return Foreseen.THE_SAME if looked_up == token else Foreseen.ANOTHER


def _worth_going_on(making: dict[int, _Making], plan: DraftPlan) -> list[int]:
    """The requests whose next draft is worth being verified."""
    return [
        i for i, own in making.items() if len(own.tokens) < own.wanted and own.chance >= plan.min_acceptance
    ]


def _gain(chances: Sequence[float], read: Sequence[Continuation], usual: float, plan: DraftPlan) -> float:
    """What a pass promises: of each request a draft, and another for each token read that is right.

    Those that both foresee are taken to stand where the drafts before them do; the one after them, which
    the pass alone draws, stands with the usual chance of one that nothing foresees.
    """
    return sum(
        chance * (usual + sum(ahead.reached)) - plan.min_acceptance * (1 + sum(ahead.reached))
        for chance, ahead in zip(chances, read, strict=True)
    )


def _worth_unread(ahead: Continuation, chance: float, plan: DraftPlan) -> Continuation:
    """What of it is worth verifying after drafts that all stand with this chance."""
    return ahead.first(sum(chance * reached >= plan.min_acceptance for reached in ahead.reached))


def _worth_verifying(own: _Making, plan: DraftPlan, are_drawn: bool) -> list[int]:
    # The rejection sampler mends what is drawn from a whole distribution: leaving a token out because it is
    # the one that it is would change the output's. So those before it decide.
    chances = [1.0, *own.reached][: len(own.tokens)] if are_drawn else own.reached
    pairs = zip(own.tokens, chances, strict=True)
    return [token for token, chance in pairs if chance >= plan.min_acceptance]


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens in which both begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
