# SPDX-License-Identifier: Apache-2.0
"""Messages between scheduler and workers: the plan for the next drafts, and the drafts."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

# Rounds fall into buckets by the mean number of looked-up drafts per request that are expected to be
# accepted: the acceptance of the draft's own tokens is correlated with it.
BUCKET_BOUNDS = (1.0, 3.0, 8.0)
NUM_BUCKETS = len(BUCKET_BOUNDS) + 1


def bucket_of(expected_accepted: float) -> int:
    """Return the bucket of a round with this many expected accepted lookups per request."""
    return bisect_right(BUCKET_BOUNDS, expected_accepted)


class DraftPlan(int):
    """The number of drafts per request of a step, with thresholds for drafting.

    `SchedulerOutput.num_spec_tokens_to_schedule` is the only field that both of vLLM's model runners pass
    unchanged from the scheduler to the drafter. vLLM computes with it as an integer, so the plan is one.
    """

    # Less likely drafts are not verified.
    min_acceptance: float
    # A further draft step needs as many expected accepted tokens of all requests; expected drafts, if the
    # number of drafts is fixed.
    min_gain: float
    # Lookups replace draft steps if as many of them, over all requests, are expected to be accepted, less
    # `min_acceptance` for each.
    min_expected_accepted: float
    by_bucket: Sequence["DraftPlan"]  # if empty, this plan applies to all buckets
    lookups_alone: bool  # all drafts are looked up and no draft step is made

    def __new__(
        cls,
        drafts: int,
        min_acceptance: float = 0.0,
        min_gain: float = 0.0,
        min_expected_accepted: float = inf,
        by_bucket: Sequence["DraftPlan"] = (),
        lookups_alone: bool = False,
    ) -> "DraftPlan":
        """Create an immutable plan."""
        plan = super().__new__(cls, drafts)
        plan.min_acceptance, plan.min_gain = min_acceptance, min_gain
        plan.min_expected_accepted = min_expected_accepted
        plan.by_bucket, plan.lookups_alone = by_bucket, lookups_alone
        return plan

    @property
    def looks_first(self) -> bool:
        """Whether lookups must be evaluated before the first draft step."""
        return bool(self.lookups_alone or self.min_expected_accepted < inf or self.by_bucket)

    def for_bucket(self, bucket: int) -> "DraftPlan":
        """Return the plan of rounds in this bucket."""
        return self.by_bucket[bucket] if self.by_bucket else self

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]
        thresholds = self.min_acceptance, self.min_gain, self.min_expected_accepted
        return int(self), *thresholds, self.by_bucket, self.lookups_alone

    def __repr__(self) -> str:
        return f"DraftPlan({int(self)}, lookups_alone={self.lookups_alone})"


class DraftLists(list[list[int]]):
    """A round's drafts by request, on their way from a worker to the scheduler.

    Args:
        num_passes: draft steps that were made; 0 if all drafts were looked up.
        num_checked: by request, how many of the first drafts the draft steps sampled; the others were
            looked up and not checked. None: none of them.
        bucket: `bucket_of` the round; 0 if lookups were not evaluated first.
    """

    def __init__(
        self,
        drafts: Iterable[list[int]] = (),
        num_passes: int = 0,
        num_checked: Sequence[int] | None = None,
        *,
        bucket: int = 0,
    ) -> None:
        super().__init__(drafts)
        self.num_passes, self.bucket = num_passes, bucket
        self.num_checked = [0] * len(self) if num_checked is None else num_checked
