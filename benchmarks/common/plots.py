# SPDX-License-Identifier: Apache-2.0
"""Write plots to files."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage


def norm_of(speedups: Sequence[float]) -> TwoSlopeNorm:
    """Return a colour scale of speedups with 1 in the middle, wider than the noise."""
    return TwoSlopeNorm(1, min(0.5, *speedups), max(2.0, *speedups))


def draw_heat_map(
    axes: Axes,
    speedups: Sequence[Sequence[float]],
    norm: TwoSlopeNorm,
    *,
    rows: Sequence[int],
    contexts: Sequence[int],
    labels: Sequence[Sequence[str]],
) -> AxesImage:
    """Draw speedups by row and context, with a label in each cell."""
    image = axes.imshow(speedups, cmap="RdYlGn", norm=norm, aspect="auto")
    for row, line in enumerate(speedups):
        for column, ratio in enumerate(line):
            color = "white" if abs(norm(ratio) - 0.5) > 0.4 else "black"
            axes.text(column, row, labels[row][column], ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    return image


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")
