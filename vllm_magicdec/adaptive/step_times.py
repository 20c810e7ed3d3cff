# SPDX-License-Identifier: Apache-2.0
"""How long an engine's steps take, learnt from steps that it made.

One engine step verifies the drafts of the step before (none: plain decoding) and drafts for the next.
Its time is modelled as a sum of non-negative costs, those of MagicDec's Eq. 2 (arXiv 2408.11049):

    T(n, C, verified, drafted, budget) = T_V(verified, n, C) + drafted * T_D(n, min(C, n * budget))

for n requests that together hold C tokens in the KV cache. Coefficients are seconds. They are fitted to
relative errors, so that the short contexts, where a wrong choice costs as large a share, count as much.

A machine that others use, or that gets hot, is slower at one time than at another. Kinds of steps are not
measured at the same time, so a measurement is kept as what it would have been at the machine's usual pace.
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

# The latest measurements of a kind of step, whose median counts.
_KEPT_PER_KIND = 64
# What a profile may say, and no measurement will: what follows stays within floating point.
_MAX_PROFILE_BYTES = 2**26
_MOST, _LEAST_SECONDS, _MOST_SECONDS = 2**40, 1e-7, 1e5
_MEANS = ("verified", "drafted")  # over a step's requests
# Measurements after which a kind of step is trusted as much as the fit, and what one of the next smaller or
# larger kind counts for.
_DOUBT, _KINSHIP = 8, 0.7
# Measurements after which a kind of step tells the machine's pace.
_KNOWN = 8
# What one step moves the pace, which else goes back to the usual; and what one hiccup counts for at most.
_PACE_GAIN, _PACE_LOSS, _MAX_PACE_ERROR = 0.15, 0.01, 0.3
# A step's neighbours for a local correction: contexts and batches within a factor of sqrt(2).
_BUCKETS_PER_DOUBLING = 2


class Step(NamedTuple):
    """What an engine step did, for every request of it alike."""

    num_reqs: int
    context_tokens: int
    """K/V entries that the target reads: over all requests."""
    verified: float
    """Drafts of each request that the target verified, on average; 0 is a plain decode step."""
    drafted: float
    """Draft steps made for the next step."""
    budget: int = 0
    """K/V entries that each draft step reads per request, at most; 0 where none is made."""


# What a step does, whatever its size: (verified, drafted, budget).
Work = tuple[float, float, int]


class TimedStep(NamedTuple):
    """A step and how long it took."""

    step: Step
    seconds: float


def _features(step: Step) -> list[float]:
    """What each coefficient is multiplied with."""
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
        context * verifying,  # kernels that verify in another way than they decode
        context * queries,  # attention of every verified position
        step.drafted,  # a draft pass: the same, over the budget
        step.drafted * n,
        step.drafted * read_by_draft,
    ]


class StepTimes:
    """Predicts step times from measured ones."""

    def __init__(self) -> None:
        self.description: Mapping[str, Any] = {}
        """Of a profile, what was measured, on what."""
        # By kinds of steps: their latest times, and the median of these at the latest step's size.
        self._measured: dict[Step, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_PER_KIND))
        self._verified: dict[Step, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_PER_KIND))
        self._middles: dict[Step, TimedStep] = {}
        self._errors: dict[Step, float] = {}  # of the fit, logarithms
        # By the work of a step: the kinds that were measured, and what is expected of any.
        self._relatives: dict[Work, list[Step]] = defaultdict(list)
        self._expected_errors: dict[Work, dict[Step, float]] = defaultdict(dict)
        self._coefficients: list[float] | None = None
        self._log_pace = 0.0

    def __len__(self) -> int:
        """Kinds of steps that were measured."""
        return len(self._measured)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets with which draft steps were measured, ascending."""
        return tuple(sorted({kind.budget for kind in self._measured if kind.drafted}))

    def add(self, timed: TimedStep) -> None:
        """Take a measured step in; `predict` uses it after the next `fit`."""
        kind = _kind(timed.step)
        measured = self._measured[kind]
        if not measured:
            self._relatives[_work(kind)].append(kind)
        elif len(measured) >= _KNOWN and self._coefficients is not None:
            self._follow_pace(log(timed.seconds / self._fitted(timed.step)) - self._errors[kind])
        measured.append(timed.seconds / self.pace)
        self._verified[kind].append(timed.step.verified)
        step = timed.step._replace(verified=median(self._verified[kind]))
        self._middles[kind] = TimedStep(step, median(measured))
        if self._coefficients is not None:
            self._judge(kind)

    def _follow_pace(self, log_pace: float) -> None:
        error = log_pace - self._log_pace
        self._log_pace += _PACE_GAIN * max(-_MAX_PACE_ERROR, min(_MAX_PACE_ERROR, error))
        self._log_pace *= 1.0 - _PACE_LOSS

    @property
    def pace(self) -> float:
        """How much longer steps take at present than usually; `predict` is of the usual."""
        return exp(self._log_pace)

    def count(self, step: Step) -> int:
        """Measured steps like this one."""
        kind = _kind(step)
        return len(self._measured[kind]) if kind in self._measured else 0

    def fit(self) -> None:
        """Fit the coefficients to the median of each kind of step (non-negative least squares)."""
        middles = self._middles.values()
        features = np.array([_features(timed.step) for timed in middles])
        seconds = np.array([timed.seconds for timed in middles])
        rows = features / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens and passes differ by orders of magnitude
        solution, _ = nnls(rows / scale, np.ones(len(middles)))
        self._coefficients = (solution / scale).tolist()
        for kind in self._middles:
            self._judge(kind)

    def _judge(self, kind: Step) -> None:
        """Note how the fit errs on a kind of step."""
        middle = self._middles[kind]
        self._errors[kind] = log(middle.seconds / self._fitted(middle.step))
        self._expected_errors[_work(kind)].clear()

    def predict(self, step: Step) -> float:
        """Usual seconds of a step: the fit, corrected by how it errs on steps that do the same work."""
        return self._fitted(step) * exp(self._expected_error(_kind(step)))

    def _expected_error(self, kind: Step) -> float:
        """Logarithm; the mean of measured steps with the same work; those nearest in size count most."""
        expected = self._expected_errors[_work(kind)]
        if kind not in expected:
            weights = float(_DOUBT)  # a few measurements may be hiccups of the machine
            errors = 0.0
            for other in self._relatives.get(_work(kind), ()):
                weight = len(self._measured[other]) * _KINSHIP ** _distance(kind, other)
                weights += weight
                errors += weight * self._errors[other]
            expected[kind] = errors / weights
        return expected[kind]

    def position_seconds(self, num_reqs: int, context_tokens: int) -> float:
        """Seconds that one more verified position of one request of such a batch takes."""
        more, fewer = (self._fitted(Step(num_reqs, context_tokens, verified, 0)) for verified in (2, 1))
        return (more - fewer) / num_reqs

    def pass_seconds(self, num_reqs: int, context_tokens: int, budget: int) -> float:
        """Seconds that one more draft of all requests of such a batch takes, before it is verified."""
        more, fewer = (self._fitted(Step(num_reqs, context_tokens, 1, n, budget)) for n in (2, 1))
        return more - fewer

    def _fitted(self, step: Step) -> float:
        assert self._coefficients is not None, "fit() comes first"
        return max(sum(map(mul, self._coefficients, _features(step))), 1e-9)

    def save(self, path: Path, description: dict[str, object]) -> None:
        """Write a profile.

        Args:
            path: a JSON file.
            description: what was measured, on what.
        """
        rows = [
            {**timed.step._asdict(), "seconds": timed.seconds, "count": len(self._measured[kind])}
            for kind, timed in self._middles.items()
        ]
        path.write_text(json.dumps({**description, "steps": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "StepTimes":
        """Read a profile.

        Raises:
            ValueError: it is none.
        """
        times = cls()
        try:
            profile = _dictionary(json.loads(files.read(path, _MAX_PROFILE_BYTES)))
            times.description = {name: value for name, value in profile.items() if name != "steps"}
            for row in profile["steps"]:
                timed, count = _timed_step(_dictionary(row))
                for _ in range(count):  # a median is trusted as much as it was
                    times.add(timed)
            if not times:
                raise ValueError("it has no steps")
            times.fit()
        except KeyError as error:
            raise _no_profile(path, f"it has no {error}") from None
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise _no_profile(path, files.reason(error)) from None
        return times

    @classmethod
    def of(cls, measured: Iterable[TimedStep]) -> "StepTimes":
        """Fitted to these steps."""
        times = cls()
        for timed in measured:
            times.add(timed)
        times.fit()
        return times


def _no_profile(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a profile written by 'magicdec profile' ({why})")


def _dictionary(given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{quoted(given)} is no object with fields")
    return given


def _timed_step(row: dict[str, Any]) -> tuple[TimedStep, int]:
    """A step of a profile, and how often to count it.

    Raises:
        KeyError, ValueError: a field is missing, unknown or impossible.
    """
    if unknown := row.keys() - {*Step._fields, "seconds", "count"}:
        raise ValueError(f"it has an unknown field {quoted(min(unknown))}")
    given = [name for name in Step._fields if name in row or name not in Step._field_defaults]
    step = {name: _number(name, row[name], 0, _MOST, is_whole=name not in _MEANS) for name in given}
    seconds = _number("seconds", row["seconds"], _LEAST_SECONDS, _MOST_SECONDS)
    count = _number("count", row.get("count", 1), 1, _MOST, is_whole=True)
    return TimedStep(Step(**step), seconds), min(count, _KEPT_PER_KIND)


def _number(name: str, value: Any, least: float, most: float, *, is_whole: bool = False) -> Any:
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        what = "whole number" if is_whole else "number"
        raise ValueError(f"{name}={quoted(value)} is no {what} from {least:g} to {most:g}")
    return value


def _kind(step: Step) -> Step:
    """Steps of about the same size are one kind."""
    return Step(
        num_reqs=_bucket(step.num_reqs),
        context_tokens=_bucket(step.context_tokens),
        verified=ceil(step.verified),
        drafted=ceil(step.drafted),
        budget=step.budget,
    )


def _work(step: Step) -> Work:
    return step.verified, step.drafted, step.budget


def _distance(kind: Step, other: Step) -> int:
    """Between their sizes."""
    return abs(kind.num_reqs - other.num_reqs) + abs(kind.context_tokens - other.context_tokens)


def _bucket(count: int) -> int:
    return round(_BUCKETS_PER_DOUBLING * log2(max(count, 1)))
