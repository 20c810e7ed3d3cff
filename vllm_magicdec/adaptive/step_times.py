# SPDX-License-Identifier: Apache-2.0
"""A model of an engine's step times, fitted to measured steps.

One engine step verifies the drafts of the previous step (none: plain decoding) and drafts for the next one.
Its time is modelled as a sum of non-negative costs, those of MagicDec's Eq. 2 (arXiv 2408.11049):

    T(n, C, verified, drafted, budget) = T_V(verified, n, C) + drafted * T_D(n, min(C, n * budget))

for n requests that together hold C tokens in the KV cache. The coefficients, in seconds, are fitted to
relative errors, because a wrong choice costs as large a share of the time at short contexts.

Shared or hot machines vary in pace, and steps are measured at different times. So measurements are
normalized to the machine's usual pace. Steps of about the same size form a bucket.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from math import ceil, exp, log, log2
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from vllm_magicdec import files
from vllm_magicdec.errors import quoted

# Latest measurements kept per bucket, whose median is fitted.
_KEPT_PER_BUCKET = 64
# Limits for profiles, so that all that follows stays within floating point.
_MAX_PROFILE_BYTES = 2**26
_MAX_NUMBER, _MIN_SECONDS, _MAX_SECONDS = 2**40, 1e-7, 1e5
_MEANS = ("verified", "drafted")  # fields that are averages over requests
# Measurements that the fit counts for against a bucket's own error, and the weight of an adjacent bucket.
_FIT_WEIGHT, _NEIGHBOR_WEIGHT = 8, 0.7
# Measurements after which a bucket indicates the machine's pace.
_MIN_FOR_PACE = 8
# Weight of one step's pace, decay towards the usual pace, and the largest error that one step counts for.
_PACE_GAIN, _PACE_DECAY, _MAX_PACE_ERROR = 0.15, 0.01, 0.3
# Buckets span contexts and batch sizes within a factor of sqrt(2).
_BUCKETS_PER_DOUBLING = 2


class Step(NamedTuple):
    """Work of an engine step, the same for all its requests."""

    num_reqs: int
    context_tokens: int  # K/V entries that the target reads for all requests
    verified: float  # mean drafts per request that the target verified; 0 in a plain decode step
    drafted: float  # draft steps for the next step
    budget: int = 0  # K/V entries that each draft step reads per request, at most; 0 without draft steps


class Rounds(NamedTuple):
    """Rounds of one kind, as means per request."""

    tokens: float  # sampled by the target: the accepted drafts and one more
    verified: float = 0.0  # as in `Step`
    drafted: float = 0.0
    budget: int = 0


class Batch(NamedTuple):
    """Size of a step."""

    num_reqs: int
    context_tokens: int  # K/V entries of all requests

    def step(self, verified: Rounds, drafted: Rounds) -> Step:
        """Return the step that verifies the drafts of some rounds and makes those of others."""
        return Step(*self, verified.verified, drafted.drafted, drafted.budget)


# The part of a step that does not depend on its size: (verified, drafted, budget).
_Work = tuple[float, float, int]


class TimedStep(NamedTuple):
    """A measured step."""

    step: Step
    seconds: float


def _features(step: Step) -> list[float]:
    """Return the factors of the coefficients."""
    n, context = step.num_reqs, step.context_tokens
    queries = 0 if step.verified == 0 else step.verified + 1
    verifying = float(step.verified > 0)
    read_by_draft = min(context, n * step.budget)
    return [
        1.0,  # a pass: launches, host work, weights
        n,  # sampling and host work per request
        context,  # reading the KV cache
        verifying,
        n * queries,  # dense layers and sampling of verified positions
        context * verifying,  # verification kernels that differ from decode kernels
        context * queries,  # attention of every verified position
        step.drafted,  # a draft pass: the same, over the budget
        step.drafted * n,
        step.drafted * read_by_draft,
    ]


class StepTimes:
    """Predicts step times from measured ones."""

    def __init__(self, measured: Iterable[TimedStep] = ()) -> None:
        self.description: Mapping[str, Any] = {}  # of a profile: model and machine
        # By bucket: the latest times, their `verified` means, and the medians of both as one step.
        self._measured: dict[Step, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_PER_BUCKET))
        self._verified: dict[Step, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_PER_BUCKET))
        self._medians: dict[Step, TimedStep] = {}
        self._errors: dict[Step, float] = {}  # log(median / fit)
        # By work: the measured buckets, and expected errors of any bucket.
        self._buckets_by_work: dict[_Work, list[Step]] = defaultdict(list)
        self._expected_errors: dict[_Work, dict[Step, float]] = defaultdict(dict)
        self._coefficients: list[float] | None = None
        self._log_pace = 0.0
        for timed in measured:
            self.add(timed)
        if self._measured:
            self.fit()

    def __len__(self) -> int:
        return len(self._measured)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets of the measured draft steps, ascending."""
        return tuple(sorted({bucket.budget for bucket in self._measured if bucket.drafted}))

    def add(self, timed: TimedStep) -> None:
        """Add a measured step; `predict` uses it after the next `fit`."""
        bucket = _bucket_of(timed.step)
        measured = self._measured[bucket]
        if not measured:
            self._buckets_by_work[_work(bucket)].append(bucket)
        elif len(measured) >= _MIN_FOR_PACE and self._coefficients is not None:
            error = log(timed.seconds / self._fitted(timed.step)) - self._errors[bucket] - self._log_pace
            self._log_pace += _PACE_GAIN * max(-_MAX_PACE_ERROR, min(_MAX_PACE_ERROR, error))
            self._log_pace *= 1.0 - _PACE_DECAY
        measured.append(timed.seconds / self.pace)
        self._verified[bucket].append(timed.step.verified)
        step = timed.step._replace(verified=median(self._verified[bucket]))
        self._medians[bucket] = TimedStep(step, median(measured))
        if self._coefficients is not None:
            self._update_error(bucket)

    @property
    def pace(self) -> float:
        """Ratio of current step times to the usual ones, which `predict` returns."""
        return exp(self._log_pace)

    def count(self, step: Step) -> int:
        """Return the number of measurements in this step's bucket."""
        return len(self._measured.get(_bucket_of(step), ()))

    def fit(self) -> None:
        """Fit the coefficients to the median of each bucket (non-negative least squares)."""
        medians = self._medians.values()
        features = np.array([_features(timed.step) for timed in medians])
        seconds = np.array([timed.seconds for timed in medians])
        rows = features / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens and passes differ by orders of magnitude
        solution, _ = nnls(rows / scale, np.ones(len(medians)))
        self._coefficients = (solution / scale).tolist()
        for bucket in self._medians:
            self._update_error(bucket)

    def _update_error(self, bucket: Step) -> None:
        timed = self._medians[bucket]
        self._errors[bucket] = log(timed.seconds / self._fitted(timed.step))
        self._expected_errors[_work(bucket)].clear()

    def predict(self, step: Step) -> float:
        """Return a step's usual seconds: the fit, corrected by its errors on steps with the same work."""
        return self._fitted(step) * exp(self._expected_error(_bucket_of(step)))

    def seconds_per_token(self, batch: Batch, rounds: Rounds) -> float:
        """Return the usual seconds per token of the whole batch in such rounds."""
        return self.predict(batch.step(rounds, rounds)) / (batch.num_reqs * rounds.tokens)

    def _expected_error(self, bucket: Step) -> float:
        """Return the mean log error of buckets with the same work, weighted by proximity in size."""
        expected = self._expected_errors[_work(bucket)]
        if bucket not in expected:
            weights = float(_FIT_WEIGHT)  # a few measurements may be hiccups of the machine
            errors = 0.0
            for other in self._buckets_by_work.get(_work(bucket), ()):
                distance = abs(bucket.num_reqs - other.num_reqs)
                distance += abs(bucket.context_tokens - other.context_tokens)
                weight = len(self._measured[other]) * _NEIGHBOR_WEIGHT**distance
                weights += weight
                errors += weight * self._errors[other]
            expected[bucket] = errors / weights
        return expected[bucket]

    def marginal_seconds(self, batch: Batch, budget: int) -> tuple[float, float]:
        """Return the seconds of one more verified position of a request, and of one more draft step."""
        work = (1, 0, 0), (2, 0, 0), (1, 1, budget), (1, 2, budget)
        one, two, once, twice = (self._fitted(Step(*batch, *each)) for each in work)
        return (two - one) / batch.num_reqs, twice - once

    def _fitted(self, step: Step) -> float:
        assert self._coefficients is not None, "fit() comes first"
        return max(sum(map(mul, self._coefficients, _features(step))), 1e-9)

    def save(self, path: Path, description: dict[str, object]) -> None:
        """Write a profile in JSON; `description` names model and machine."""
        rows = [
            {**timed.step._asdict(), "seconds": timed.seconds, "count": len(self._measured[bucket])}
            for bucket, timed in self._medians.items()
        ]
        path.write_text(json.dumps({**description, "steps": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "StepTimes":
        """Read a profile; raise ValueError if the file is not a valid one."""
        try:
            profile = _dictionary(json.loads(files.read(path, _MAX_PROFILE_BYTES)))
            measured = [timed for row in profile["steps"] for timed in _timed_steps(_dictionary(row))]
            if not measured:
                raise ValueError("it has no steps")
            times = cls(measured)
        except KeyError as error:
            raise _not_a_profile(path, f"it has no {error}") from None
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise _not_a_profile(path, files.reason(error)) from None
        times.description = {name: value for name, value in profile.items() if name != "steps"}
        return times


def _not_a_profile(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a profile written by 'magicdec profile' ({why})")


def _dictionary(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{quoted(value)} is no object with fields")
    return value


def _timed_steps(row: dict[str, Any]) -> list[TimedStep]:
    """Return a step of a profile, repeated so that its median keeps its weight.

    Raises:
        KeyError, ValueError: a field is missing, unknown or out of range.
    """
    if unknown := row.keys() - {*Step._fields, "seconds", "count"}:
        raise ValueError(f"it has an unknown field {quoted(min(unknown))}")
    given = [name for name in Step._fields if name in row or name not in Step._field_defaults]
    step = {name: _number(name, row[name], 0, _MAX_NUMBER, is_whole=name not in _MEANS) for name in given}
    seconds = _number("seconds", row["seconds"], _MIN_SECONDS, _MAX_SECONDS)
    count = _number("count", row.get("count", 1), 1, _MAX_NUMBER, is_whole=True)
    return [TimedStep(Step(**step), seconds)] * min(count, _KEPT_PER_BUCKET)


def _number(name: str, value: Any, low: float, high: float, *, is_whole: bool = False) -> Any:
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        required = "whole number" if is_whole else "number"
        raise ValueError(f"{name}={quoted(value)} is no {required} from {low:g} to {high:g}")
    return value


def _bucket_of(step: Step) -> Step:
    return Step(
        num_reqs=_log_size(step.num_reqs),
        context_tokens=_log_size(step.context_tokens),
        verified=ceil(step.verified),
        drafted=ceil(step.drafted),
        budget=step.budget,
    )


def _work(step: Step) -> _Work:
    return step.verified, step.drafted, step.budget


def _log_size(count: int) -> int:
    return round(_BUCKETS_PER_DOUBLING * log2(max(count, 1)))
