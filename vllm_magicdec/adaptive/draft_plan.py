# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers about the next drafts, and what they tell it."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

# Between kinds of rounds: accepted tokens that looked-up drafts promise for each request of the batch, in
# the mean. What the draft makes of a round goes with what lookups find for it.
KIND_BORDERS = (1.0, 3.0, 8.0)
NUM_KINDS = len(KIND_BORDERS) + 1


def kind_of(promised: float) -> int:
    """The kind of a round in which lookups promise so many accepted tokens of each request."""
    return bisect_right(KIND_BORDERS, promised)


class DraftPlan(int):
    """The number of drafts of a step, with what else there is to know for drafting.

    `SchedulerOutput.num_spec_tokens_to_schedule` is the one thing that both of vLLM's model runners hand
    from the scheduler to the drafter as it is. vLLM computes with it as a number of drafts; so this is one,
    and the rest travels on it.
    """

    least_chance: float
    """That a draft must have to stand, to be worth verifying."""
    least_gain: float
    """Accepted tokens that one more draft of all requests must promise, to be worth its step; drafts, where
    their number is fixed."""
    least_promise: float
    """Accepted tokens, each draft less `least_chance` for its verification, that looked-up drafts of all
    requests must promise, to be verified instead of others."""
    by_kind: Sequence["DraftPlan"]
    """The plan of each kind of rounds; none: this one."""
    lookups_alone: bool
    """All drafts are looked up and no draft step is made."""

    def __new__(
        cls,
        drafts: int,
        least_chance: float = 0.0,
        least_gain: float = 0.0,
        least_promise: float = inf,
        by_kind: Sequence["DraftPlan"] = (),
        lookups_alone: bool = False,
    ) -> "DraftPlan":
        """So many drafts per request."""
        plan = super().__new__(cls, drafts)
        plan.least_chance, plan.least_gain, plan.least_promise = least_chance, least_gain, least_promise
        plan.by_kind, plan.lookups_alone = by_kind, lookups_alone
        return plan

    @property
    def looks_first(self) -> bool:
        """Whether it is to be known what lookups alone promise."""
        return bool(self.lookups_alone or self.least_promise < inf or self.by_kind)

    def of_kind(self, kind: int) -> "DraftPlan":
        """The plan of such a round."""
        return self.by_kind[kind] if self.by_kind else self

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]
        """Pickled on its way to the workers."""
        prices = self.least_chance, self.least_gain, self.least_promise
        return int(self), *prices, self.by_kind, self.lookups_alone

    def __repr__(self) -> str:
        return f"DraftPlan({int(self)}, lookups_alone={self.lookups_alone})"


class DraftLists(list[list[int]]):
    """A round's drafts by request, on their way from a worker to the scheduler."""

    num_passes: int
    """Draft steps that made them; 0: they were looked up."""
    num_read: Sequence[int]
    """By request, the first drafts that passes drew; those after them were looked up."""
    kind: int
    """Of the round, by what lookups alone promised; 0 where nobody asked."""

    def __init__(
        self,
        drafts: Iterable[list[int]] = (),
        num_passes: int = 0,
        num_read: Sequence[int] | None = None,
        *,
        kind: int = 0,
    ) -> None:
        """Without `num_read` passes drew all of them, if there was one."""
        super().__init__(drafts)
        self.num_passes, self.kind = num_passes, kind
        self.num_read = [len(own) if num_passes else 0 for own in self] if num_read is None else num_read

    @property
    def read(self) -> list[list[int]]:
        """By request, the drafts that passes drew."""
        return [own[:number] for own, number in zip(self, self.num_read, strict=True)]
