# SPDX-License-Identifier: Apache-2.0
"""MagicDec's Eq. 2 on measured step times, beside the roofline and the paper's own rows.

Times are milliseconds: T_T of a plain step, T_D of a draft step, T_V(gamma) of a verification, T_select of
what a round of drafting takes before its first draft step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_magicdec.planner.hardware import HARDWARE, measure_this_machine
from vllm_magicdec.planner.performance import (
    Costs,
    Deployment,
    acceptance_rate,
    round_ms,
    speedup,
    tokens_per_round,
)
from vllm_magicdec.planner.shapes import ModelShape

PAPER_FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "magicdec_tables.json"
PAPER_NAMES = {
    "llama-2-7b": ("llama-2-7b", "llama-2-7b-32k"),
    "llama-3.1-8b": ("llama-3.1-8b",),
}
MAX_DIFFERENCE = 0.25  # between the roofline and a measurement, as a share; above it a cell is flagged


@dataclass(frozen=True)
class CellTimes:
    """The times of one cell, by number of drafts where they depend on it."""

    plain_ms: float  # T_T
    verify_ms: Mapping[int, float]  # T_V(gamma)
    drafting_ms: Mapping[int, float]  # gamma T_D + T_select
    whole_ms: Mapping[int, float]  # steps that verify gamma drafts and make gamma: all of a round at once

    @classmethod
    def of(cls, kinds: Iterable[Mapping[str, Any]]) -> "CellTimes":
        """From the kinds of steps of `engine_scenarios.step_times`."""
        ms = {(kind["verified"], kind["drafted"]): kind["ms"] for kind in kinds}
        gammas = sorted(drafted for verified, drafted in ms if verified == 0 and drafted)
        return cls(
            plain_ms=ms[0, 0],
            verify_ms={gamma: ms[gamma, 0] for gamma in gammas},
            drafting_ms={gamma: ms[0, gamma] - ms[0, 0] for gamma in gammas},
            whole_ms={gamma: ms[gamma, gamma] for gamma in gammas},
        )

    @property
    def draft_ms(self) -> float:
        """T_D: the slope of the drafting times."""
        return self._line[0]

    @property
    def select_ms(self) -> float:
        """T_select: what the drafting times are before the first draft step. Noise may push it below 0."""
        return self._line[1]

    @property
    def is_steady(self) -> bool:
        """Whether Eq. 2 says anything: on a busy machine differences of times may be negative."""
        return self.draft_ms > 0 and all(ms > 0 for ms in self.drafting_ms.values())

    @property
    def _line(self) -> tuple[float, float]:
        gammas, times = list(self.drafting_ms), list(self.drafting_ms.values())
        if len(gammas) == 1:
            return times[0] / gammas[0], 0.0
        slope, intercept = np.polyfit(gammas, times, 1)
        return float(slope), float(intercept)

    def speedup(self, gamma: int, omega: float, *, selects_every_round: bool) -> float:
        """Eq. 2 at `omega` tokens per round."""
        extra_ms = self.select_ms if selects_every_round else 0.0
        return speedup(
            self.plain_ms, omega, round_ms(gamma, self.draft_ms, self.verify_ms[gamma], extra_ms)
        )

    def best(self, alpha: float, *, selects_every_round: bool) -> tuple[int, float]:
        """The best gamma at an acceptance rate, and its speedup."""
        speedups = {
            gamma: self.speedup(
                gamma, tokens_per_round(gamma, alpha), selects_every_round=selects_every_round
            )
            for gamma in self.verify_ms
        }
        return max(speedups.items(), key=lambda pair: pair[1])


def this_deployment(shape: ModelShape, gpu: str) -> Deployment:
    """The shape on this machine: by its data sheet if `gpu` names a known device, else measured."""
    words = gpu.replace("-", " ").split()
    # A PCIe board of the same name is another device.
    known = [device for name, device in HARDWARE.items() if name in words and "PCIe" not in words]
    if known:
        return Deployment(shape, known[0])
    costs = replace(Costs(), memory_efficiency=1.0, compute_efficiency=1.0)  # what is measured is reached
    return Deployment(shape, measure_this_machine(), costs=costs)


def differs(measured: float, predicted: float) -> bool:
    """Whether the roofline is off by more than `MAX_DIFFERENCE`."""
    return abs(measured / predicted - 1) > MAX_DIFFERENCE


def beside_roofline(
    times: CellTimes, deployment: Deployment, batch: int, context: int, budget: int
) -> dict[str, Any]:
    """The roofline's times of a cell, and which of the measured ones differ from them."""
    predicted = {
        "T_T": deployment.plain_step_ms(batch, context),
        "T_D": deployment.draft_step_ms(batch, context, budget),
        **{f"T_V({gamma})": deployment.verify_ms(gamma, batch, context) for gamma in times.verify_ms},
    }
    measured = {"T_T": times.plain_ms, "T_D": times.draft_ms}
    measured |= {f"T_V({gamma})": ms for gamma, ms in times.verify_ms.items()}
    return {
        "roofline_ms": predicted,
        "differs": [name for name, ms in predicted.items() if differs(measured[name], ms)],
    }


def speedups(
    times: CellTimes,
    deployment: Deployment,
    *,
    batch: int,
    context: int,
    budget: int,
    alphas: Iterable[float],
    selects_every_round: bool,
) -> list[dict[str, Any]]:
    """Eq. 2 at the best gamma of every given acceptance rate, and at what the paper's rows had."""
    wanted: list[tuple[int, float, Mapping[str, Any] | None]] = []
    for alpha in alphas:
        gamma, _ = times.best(alpha, selects_every_round=selects_every_round)
        wanted.append((gamma, tokens_per_round(gamma, alpha), None))
    for row in paper_rows(deployment.shape.name, batch, context):
        if row["gamma"] in times.verify_ms:
            wanted.append((row["gamma"], row["tokens_per_round"], row))
    results = []
    for gamma, omega, row in wanted:
        alpha = acceptance_rate(gamma, omega)
        measured = times.speedup(gamma, omega, selects_every_round=selects_every_round)
        predicted = deployment.speedup(alpha, gamma, batch, context, budget)
        names = ("table", "gpus", "budget", "speedup")
        results.append(
            {
                "acceptance_rate": round(alpha, 4),
                "gamma": gamma,
                "tokens_per_round": omega,
                "speedup": measured,
                "roofline": predicted,
                "differs": differs(measured, predicted),
                "paper": None if row is None else {name: row[name] for name in names},
            }
        )
    return results


def paper_rows(shape: str, batch: int | None = None, context: int | None = None) -> list[dict[str, Any]]:
    """Self-speculation in the paper's Tables 1 and 2, of a shape or of one of its cells."""
    rows = json.loads(PAPER_FILE.read_text())["rows"]
    return [
        row
        for row in rows
        if row["draft"] == "self"
        and row["target"] in PAPER_NAMES.get(shape, ())
        and batch in (None, row["batch"])
        and context in (None, row["context"])
    ]
