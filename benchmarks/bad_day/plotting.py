# SPDX-License-Identifier: Apache-2.0
"""A record of `soak.py` as a plot over time."""

from pathlib import Path
from typing import Any

from common.machine import device_of
from common.plots import plt, save


def draw(record: dict[str, Any], path: Path) -> None:
    """Memory of each process, the KV cache and requests, and the times at which faults were on."""
    traffic = record["traffic"]
    samples = traffic["samples"]
    minutes = [sample["at_s"] / 60 for sample in samples]
    figure, axes = plt.subplots(3, 1, figsize=(10, 9), sharex=True, layout="constrained")
    for name in sorted({name for sample in samples for name in sample["rss_mb"]}):
        memory = [sample["rss_mb"].get(name, float("nan")) for sample in samples]
        axes[0].plot(
            minutes, [one - memory[0] for one in memory], label=f"{name}, from {memory[0]:,.0f} MB"
        )
    axes[0].set_ylabel("memory since the start (resident), MB")
    axes[0].legend(loc="upper left", fontsize=8)
    axes[1].plot(minutes, [sample["running"] for sample in samples], label="running")
    axes[1].plot(minutes, [sample["waiting"] for sample in samples], label="waiting")
    axes[1].plot(
        minutes, [24 * sample["kv_usage"] for sample in samples], label="KV cache in use, 24 = all", lw=0.8
    )
    axes[1].set_ylabel("requests")
    axes[1].legend(loc="upper left", fontsize=8)
    axes[2].plot(minutes, [sample["answered"] for sample in samples], label="requests ended")
    axes[2].plot(minutes, [sample["preemptions"] for sample in samples], label="preemptions")
    axes[2].set_ylabel("since the start")
    axes[2].set_xlabel("minutes")
    axes[2].legend(loc="upper left", fontsize=8)
    for index, window in enumerate(traffic["faults"]):
        for axis in axes:
            axis.axvspan(window["begin_s"] / 60, window["end_s"] / 60, color="tab:red", alpha=0.12, lw=0)
        middle = (window["begin_s"] + window["end_s"]) / 120
        axes[0].annotate(
            window["name"],
            (middle, 1.01 + 0.06 * (index % 2)),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=7,
        )
    figure.suptitle(
        f"{traffic['answers']['sent']:,} requests on {device_of(record['machine'])}; red: faults"
    )
    save(figure, path)
