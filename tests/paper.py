# SPDX-License-Identifier: Apache-2.0
"""MagicDec's measured times and the model's predictions; prints the table of docs/performance.md."""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_magicdec.planner.hardware import HARDWARE
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Costs, Deployment, round_ms, speedup

DATA = json.loads((Path(__file__).parent / "data" / "magicdec_tables.json").read_text())


@dataclass(frozen=True)
class Measured:
    table: int
    target: str
    draft: str
    gpus: str
    budget: int
    gamma: int
    context: int
    batch: int
    draft_ms_total: float  # gamma T_D
    verify_ms: float
    tokens_per_round: float
    target_ms: float
    specdec_ms_per_token: float
    speedup: float

    def deployment(self, costs: Costs | None = None, *, of_draft: bool = False) -> Deployment:
        count, _, gpu = self.gpus.partition("x")
        name = self.draft if of_draft and self.draft != "self" else self.target
        return Deployment(MODELS[name], HARDWARE[gpu], int(count), costs or Costs())

    def predicted_target_ms(self, costs: Costs | None = None) -> float:
        return self.deployment(costs).plain_step_ms(self.batch, self.context)

    def predicted_draft_ms(self) -> float:
        draft = self.deployment(of_draft=True)
        return self.gamma * draft.draft_step_ms(self.batch, self.context, self.budget)

    def predicted_verify_ms(self) -> float:
        return self.deployment().verify_ms(self.gamma, self.batch, self.context)

    def predicted_speedup(self) -> float:
        """Predict from the data sheet and the measured tokens per round."""
        draft_ms = self.predicted_draft_ms() / self.gamma
        one_round_ms = round_ms(self.gamma, draft_ms, self.predicted_verify_ms(), Costs().round_overhead_ms)
        return speedup(self.predicted_target_ms(), self.tokens_per_round, one_round_ms)


ROWS = [Measured(**row) for row in DATA["rows"]]
TABLE_1 = [row for row in ROWS if row.table == 1]


def errors(rows: Iterable[Measured], predicted: Callable, measured: Callable) -> list[float]:
    return [predicted(row) / measured(row) - 1 for row in rows]


def documented() -> list[str]:
    """Return the computed lines of docs/performance.md."""
    lines = [
        "| model | devices | batch | context | gamma | T_T ms (paper, plan) | speedup (paper, plan) | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if row.draft == "self" and row.gpus != "8xL40":
            predicted = row.predicted_speedup()
            lines.append(
                f"| {row.target} | {row.gpus} | {row.batch} | {row.context:,} | {row.gamma} "
                f"| {row.target_ms:.2f}, {row.predicted_target_ms():.2f} "
                f"| {row.speedup:.2f}, {predicted:.2f} | {predicted / row.speedup - 1:+.0%} |"
            )
    lines += ["", "Errors of all rows, mean and largest, TinyLlama as the draft included:", ""]
    for gpus in ("8xA100", "4xH100", "8xL40"):
        rows = [row for row in ROWS if row.gpus == gpus]
        quantities = {
            "T_T": errors(rows, Measured.predicted_target_ms, lambda row: row.target_ms),
            "T_D": errors(rows, Measured.predicted_draft_ms, lambda row: row.draft_ms_total),
            "T_V": errors(rows, Measured.predicted_verify_ms, lambda row: row.verify_ms),
            "speedup": errors(rows, Measured.predicted_speedup, lambda row: row.speedup),
        }
        parts = [
            f"{name} {statistics.fmean(map(abs, values)):.1%}, {max(values, key=abs):+.1%}"
            for name, values in quantities.items()
        ]
        lines.append(f"- {gpus} ({len(rows)} rows): {'; '.join(parts)}.")
    return lines


if __name__ == "__main__":
    print("\n".join(documented()))
