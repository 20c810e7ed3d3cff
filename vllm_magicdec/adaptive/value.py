# SPDX-License-Identifier: Apache-2.0
"""What each choice of drafts brings: the tokens of a round, learned from those accepted."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.step_times import Batch, Rounds, StepTimes


class Choice(NamedTuple):
    """The drafts of the next step."""

    drafts: int  # per request, at most; 0 is plain decoding
    lookups_alone: bool = False  # all drafts are looked up and no draft step is made


PLAIN = Choice(0)
# Verified drafts of a speculative step without any: vLLM samples it in the same way as one with drafts.
NONE_FOUND = 1e-3


class RoundInfo(NamedTuple):
    """How a step's drafts were made, beside the choice."""

    num_passes: int = 0  # draft steps
    is_planned: bool = False  # `Controller.is_planned` of the choice
    bucket: int = 0  # `DraftLists.bucket`


UNPLANNED = RoundInfo()


class Value(Protocol):
    """What choices bring. By default all rounds fall into one bucket, and workers apply what is chosen.

    With lookups, workers may replace a choice round by round; rounds that they do not replace are *pure*.
    """

    budget: int  # K/V entries that each draft step reads per request, at most
    choices: tuple[Choice, ...]  # for regular steps, plain decoding first
    tried: tuple[Choice, ...]  # by trials
    calibrated: tuple[Choice, ...]  # the last one first
    start: Choice  # until times are known

    def observe(
        self, rounds: Collection[tuple[int, int]], choice: Choice, num_reqs: int, info: RoundInfo
    ) -> None:
        """Learn from a step of `num_reqs` requests; see `Controller.observe` for the other arguments."""

    @abstractmethod
    def mean(self, choice: Choice) -> Rounds:
        """Return the mean pure round of a choice."""

    def pure(self, choice: Choice) -> Sequence[Rounds]:
        """Return the mean pure round of a choice in each bucket."""
        return (self.mean(choice),)

    def shares(self) -> Sequence[float]:
        """Return the share of each bucket in all tokens."""
        return (1.0,)

    def seconds_per_token(self, choice: Choice, batch: Batch, times: StepTimes) -> list[float]:
        """Return the usual seconds per token of the batch in each bucket, as workers apply a choice."""
        return [
            sum(
                share * times.seconds_per_token(batch, self.pure(each)[bucket])
                for each, share in self.mix(choice, bucket).items()
            )
            for bucket in range(len(self.shares()))
        ]

    def mix(self, choice: Choice, bucket: int) -> dict[Choice, float]:
        """Return what workers make of a choice in a bucket, with shares of the bucket's tokens."""
        return {choice: 1.0}

    def pause(self, choice: Choice, current: Choice) -> int:
        """Return the least number of steps between trials of a choice, however little these cost."""
        return 0

    def settle(self, current: Choice, batch: Batch, times: StepTimes | None) -> None:
        """Take notice of the current choice and its batch; `times` is None until they are known."""
        return

    def plan(self, choice: Choice, *, is_planned: bool) -> DraftPlan:
        """Return the message to the workers, who do not replace what is planned."""
        return DraftPlan(choice.drafts)


class Acceptance:
    """Decaying acceptance rates by draft position.

    Args:
        max_tokens: maximum drafts per round.
        memory: rounds of single requests after which an observation has lost 63 % of its weight.
    """

    def __init__(self, max_tokens: int, memory: float = 128.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._tried = [0.0] * max_tokens
        self._accepted = [0.0] * max_tokens

    def observe(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Add `count` rounds of single requests in which `accepted` of `drafted` tokens were accepted."""
        decay = self._decay**count
        for position in range(drafted):
            # Drafts after the first rejected one carry no information.
            self._tried[position] = decay * self._tried[position] + count * (position <= accepted)
            self._accepted[position] = decay * self._accepted[position] + count * (position < accepted)

    def rates(self) -> list[float]:
        """Return P(draft i is accepted | all before it were) for each i.

        Positions with few observations are smoothed towards the overall mean, which has a cautious prior.
        """
        overall = (sum(self._accepted) + 3.0) / (sum(self._tried) + 4.0)
        return [
            (accepted + 4.0 * overall) / (tried + 4.0)
            for accepted, tried in zip(self._accepted, self._tried, strict=True)
        ]

    def tokens_per_round(self) -> list[float]:
        """Return Omega(gamma), the expected tokens of a round, for gamma = 0, 1, ... max_tokens."""
        expected, reached = [1.0], 1.0
        for rate in self.rates():
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class AcceptanceValue(Value):
    """Value of a number of drafts, from the acceptance at each position.

    Args:
        lengths: the numbers, ascending.
        budget: as in `Value`; 0: drafting takes no draft steps.
        may_lack: whether requests may have fewer drafts than were asked for.
    """

    def __init__(self, lengths: Sequence[int], budget: int, *, may_lack: bool = False) -> None:
        def up_to(limit: int) -> Choice:
            return max((choice for choice in drafting if choice.drafts <= limit), default=drafting[0])

        self.budget = budget
        self.acceptance = Acceptance(lengths[-1])
        self._found = Acceptance(lengths[-1]) if may_lack else None
        drafting = [Choice(length) for length in lengths if length]
        self.choices = self.tried = (PLAIN, *drafting)
        self.start = up_to(4)
        self.calibrated = (PLAIN, *sorted({up_to(2), up_to(4), drafting[-1]}))

    @override
    def observe(
        self, rounds: Collection[tuple[int, int]], choice: Choice, num_reqs: int, info: RoundInfo
    ) -> None:
        # A large batch has few different outcomes.
        for (verified, accepted), count in Counter(rounds).items():
            if self._found is None:
                self.acceptance.observe(verified, accepted, count)
            else:  # a draft that is lacking is as good as rejected
                self.acceptance.observe(choice.drafts, accepted, count)
                self._found.observe(choice.drafts, verified, count)

    @override
    def mean(self, choice: Choice) -> Rounds:
        if choice == PLAIN:
            return Rounds(1.0)
        tokens, verified = self.acceptance.tokens_per_round()[choice.drafts], float(choice.drafts)
        if self._found is not None:
            verified = max(NONE_FOUND, self._found.tokens_per_round()[choice.drafts] - 1.0)
        return Rounds(tokens, verified, choice.drafts if self.budget else 0, self.budget)
