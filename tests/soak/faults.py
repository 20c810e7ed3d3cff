# SPDX-License-Identifier: Apache-2.0
"""Faults that come and go in a running server; see `tests/fault_plugin`."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

SHORT_MINUTES = 20  # shorter runs are not judged by what takes time
POLL_S = 0.2
COUNTED_S = 10.0
PATIENCE_S = 120.0  # for a fault that has not happened yet
# Shares of a run: start of the first fault, duration of all faults, failure of the controller.
FIRST, MIDDLE, CONTROLLER = 0.2, 0.5, 0.92
DRAFT_PAUSES, LOOKUP_PAUSES = "draft_pauses_total", "lookup_pauses_total"
# By name: the setting, and the plugin's counters of its failures and of the pauses after three in a row.
# In short runs each failure happens once: a pause would outlast the next fault's window. The faults force
# `auto` to draft by passes, which rarely pay off here.
FAULTS: dict[str, tuple[str, Sequence[str]]] = {
    "batch": ("batch:last={last},drafts=4", ("failures_total:batch", DRAFT_PAUSES)),
    "selection": ("selection:last={last},drafts=4", ("failures_total:selection", DRAFT_PAUSES)),
    "third_step": ("third_step:last={last},drafts=4", ("failures_total:draft_step", DRAFT_PAUSES)),
    "summaries": ("summaries:drafts=4", ()),
    "slow": ("slow:drafts=4", ()),
    "nan": ("nan:drafts=4", ()),
    "lookup": ("lookup:last={last},drafts=4", ("failures_total:lookup", LOOKUP_PAUSES)),
    "controller": ("controller:last=0", ("failures_total:controller",)),  # decoding is plain from then on
}


@dataclass(frozen=True)
class Window:
    """Time window of a fault, in seconds since the run began."""

    name: str
    begin_s: float
    end_s: float
    happened: bool
    uncounted: list[str]  # counters of this fault that did not increase


@dataclass
class Faults:
    """Switches faults on and off in `file`, which the server reads; a slow one makes the run longer."""

    file: Path
    log: Path
    metrics: Callable[[], dict[str, float]]
    now_s: Callable[[], float]
    minutes: float
    windows: list[Window] = field(default_factory=list)

    async def run(self) -> None:
        """Inject each fault in a window, counted in sleeps, which no pause of the machine shortens."""
        *names, last = FAULTS
        every_s = MIDDLE * 60 * self.minutes / len(names)
        await asyncio.sleep(FIRST * 60 * self.minutes)
        for name in names:
            await self._inject(name, 0.3 * every_s)
            await asyncio.sleep(0.7 * every_s)
        await asyncio.sleep((CONTROLLER - FIRST - MIDDLE) * 60 * self.minutes)
        await self._inject(last, (1 - CONTROLLER) * 60 * self.minutes)

    async def _inject(self, name: str, window_s: float) -> None:
        setting, counters = FAULTS[name]
        begin_s, before = self.now_s(), await self._counted(counters)
        seen = len(self.log.read_text(errors="replace"))
        self._switch(setting.format(last=0 if self.minutes < SHORT_MINUTES else 4))
        for poll in count():
            happened = f"The fault {name} happens" in self.log.read_text(errors="replace")[seen:]
            if poll * POLL_S >= window_s + (0 if happened else PATIENCE_S):
                break
            await asyncio.sleep(POLL_S)
        self._switch("")
        end_s, uncounted = self.now_s(), []
        for _ in range(round(COUNTED_S / POLL_S)):  # counters come with a step's output, after the log
            now = await self._counted(counters)
            uncounted = [name for name in now if now[name] <= before[name]]
            if not uncounted:
                break
            await asyncio.sleep(POLL_S)
        self.windows.append(Window(name, round(begin_s, 1), round(end_s, 1), happened, uncounted))

    async def _counted(self, counters: Sequence[str]) -> dict[str, float]:
        metrics = await asyncio.to_thread(self.metrics)
        chosen = counters[:1] if self.minutes < SHORT_MINUTES else counters
        return {name: metrics.get(f"vllm:magicdec_{name}", 0.0) for name in chosen}

    def _switch(self, setting: str) -> None:
        """Replace the file atomically: the server may miss a second change within one clock tick."""
        new = self.file.with_suffix(".new")
        new.write_text(setting)
        new.replace(self.file)
