# SPDX-License-Identifier: Apache-2.0
"""Faults that come and go in a server that runs, by `VLLM_MAGICDEC_FAULT` (`vllm_magicdec/faults.py`)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .clock import sleep_until

# What each is, how often it happens, and how many drafts `auto` lets every round make for it: by itself it
# soon finds that passes do not pay where prompts are short and lookups are right, least of all such as are
# slow or NaN. Of a datastore that is cut and made whole again, the file says nothing else.
# Drafting is tried again soon after so many failures, so that the next fault finds it at work: in a run of
# minutes it is a single one, for a pause of many rounds would outlast a window on a slow machine.
FAULTS = {
    "batch": "batch:last={last},drafts=4",
    "selection": "selection:last={last},drafts=4",
    "third_step": "third_step:last={last},drafts=4",
    "summaries": "summaries:drafts=4",
    "slow": "slow:drafts=4",
    "nan": "nan:drafts=4",
    "lookup": "lookup:last={last},drafts=4",
    "datastore": ":drafts=4",
    "controller": "controller:last=0",
}
# What counts them in the plugin's metrics; the others break nothing that could be counted.
COUNTED = {
    "batch": "failures:batch",
    "selection": "failures:selection",
    "third_step": "failures:draft_step",
    "lookup": "failures:lookup",
    "datastore": "failures:lookup",
    "controller": "failures:controller",
}
# What counts their pauses, which three failures in a row make: in runs of `SHORT_MINUTES` and more.
PAUSED = {
    "batch": "draft_pauses",
    "selection": "draft_pauses",
    "third_step": "draft_pauses",
    "lookup": "lookup_pauses",
    "datastore": "lookup_pauses",
}
_LAST_OF_ALL = "controller"  # decoding is plain from then on
SHORT_MINUTES = 20  # a run of fewer
FIRST_SHARE = 0.2  # of a run, after which the first one comes
_HAPPENS = "The fault {} happens, on purpose"
_COUNTED_S = 10.0  # until what has happened is counted
_PATIENCE = 6  # windows, for a fault that has not happened yet
_LOOKUP_FAILED = "A lookup in "


@dataclass(frozen=True)
class Window:
    """When a fault was on, in seconds since the run began."""

    name: str
    begin_s: float
    end_s: float
    happened: bool
    failures: dict[str, float]
    """What the plugin counted meanwhile, by what failed."""


@dataclass(frozen=True)
class Plan:
    """When faults come, in seconds since the run began."""

    begin_s: float
    """Of the first one."""
    window_s: float
    """For which one is on, at least; longer where it has not happened yet."""
    gap_s: float
    """Between two."""
    latest_s: float
    """At which the last but one is off, whatever has happened."""
    controller_s: float
    """From which decoding is plain; before that, it is quiet."""
    end_s: float

    @classmethod
    def of(cls, minutes: float) -> "Plan":
        """Of all faults."""
        seconds = 60 * minutes
        every = 0.5 * seconds / (len(FAULTS) - 1)
        begin_s = FIRST_SHARE * seconds
        return cls(begin_s, 0.3 * every, 0.7 * every, 0.85 * seconds, 0.92 * seconds, seconds)


class Conductor:
    """Switches faults on and off.

    Args:
        file: that the server reads the fault from.
        log: of the server, which says when a fault happens first.
        store: a datastore of the server, to be cut; None: it has none.
        read_failures: the plugin's counters of failures at present.
        minutes: of the run.
    """

    def __init__(
        self,
        file: Path,
        log: Path,
        store: Path | None,
        read_failures: Callable[[], dict[str, float]],
        minutes: float,
    ) -> None:
        self._file = file
        self._log = log
        self._store = store
        self._read_failures = read_failures
        self._last = 0 if minutes < SHORT_MINUTES else 4
        self._plan = Plan.of(minutes)
        self.windows: list[Window] = []

    async def conduct(self, now_s: Callable[[], float]) -> None:
        """Every fault in a window of its own, the controller's last.

        Args:
            now_s: seconds since the run began; see `Clock`.
        """
        plan = self._plan
        await sleep_until(plan.begin_s, now_s)
        has_store = self._store is not None
        names = [name for name in FAULTS if name != _LAST_OF_ALL and (has_store or name != "datastore")]
        for place, name in enumerate(names, 1):
            of_others = (len(names) - place) * (plan.window_s + plan.gap_s)
            latest_s = min(now_s() + _PATIENCE * plan.window_s, plan.latest_s - of_others)
            await self._have(name, now_s, now_s() + plan.window_s, latest_s)
            await sleep_until(now_s() + plan.gap_s, now_s)
        await sleep_until(plan.controller_s, now_s)
        await self._have(_LAST_OF_ALL, now_s, plan.end_s, plan.end_s)

    async def _have(self, name: str, now_s: Callable[[], float], until_s: float, latest_s: float) -> None:
        """A fault on until a time, or until it has happened, or the latest time."""
        began_s, seen = now_s(), len(self._log.read_text(errors="replace"))
        before = await asyncio.to_thread(self._read_failures)
        self._switch_on(name)
        while now_s() < until_s or (not self._has_happened(name, seen) and now_s() < latest_s):
            await asyncio.sleep(0.2)
        self._switch_off(name)
        ended_s = now_s()
        happened = self._has_happened(name, seen)
        counted = await self._failures_since(before)
        # Counters travel with the output of a step, whose line in the log is earlier.
        while happened and COUNTED.get(name, "") not in {"", *counted} and now_s() < ended_s + _COUNTED_S:
            await asyncio.sleep(0.2)
            counted = await self._failures_since(before)
        self.windows.append(Window(name, began_s, ended_s, happened, counted))

    async def _failures_since(self, before: dict[str, float]) -> dict[str, float]:
        """Those that were counted, by what failed."""
        after = await asyncio.to_thread(self._read_failures)
        grown = {what: after[what] - before.get(what, 0) for what in after}
        return {what: number for what, number in grown.items() if number}

    def _switch_on(self, name: str) -> None:
        if name == "datastore":
            assert self._store is not None
            tokens = self._store / "tokens.npy"
            self._kept = tokens.read_bytes()
            with tokens.open("r+b") as file:
                file.truncate(len(self._kept) // 2)
        self._write(FAULTS[name].format(last=self._last))

    def _switch_off(self, name: str) -> None:
        if name == "datastore":
            assert self._store is not None
            with (self._store / "tokens.npy").open("r+b") as file:  # the same file, which is mapped
                file.write(self._kept)
        self._write("")

    def _write(self, text: str) -> None:
        """At once: a server that read a file still empty would not see it change again in the same tick."""
        new = self._file.with_suffix(".new")
        new.write_text(text)
        new.replace(self._file)

    def _has_happened(self, name: str, seen: int) -> bool:
        """Whether the log says so after its first `seen` characters."""
        said = self._log.read_text(errors="replace")[seen:]
        return (_LOOKUP_FAILED if name == "datastore" else _HAPPENS.format(name)) in said
