# SPDX-License-Identifier: Apache-2.0
"""Everything that a GPU has to show, in one go: `make bench-gpu OUT=folder`.

A preflight says what the machine lacks. Then come the parts, the most telling first, each a process of its
own; after each the page of results, results.md in the folder, is written anew. The same command again goes
on where it stopped: what is done is not done again, and what had problems comes after what has not run yet.
With `--hours` parts that would not fit are left out, and the page says so.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.machine import device_of
from benchmarks.common.options import make_parser
from benchmarks.gpu import page, parts
from benchmarks.gpu.parts import Part

PATIENCE = 3  # times the planned minutes, before a part is stopped
DEFAULT_OUT = parts.ROOT / "benchmarks" / "runs" / "gpu"


class Kit:
    """The parts of one folder: which ran, and which remain.

    Args:
        folder: of the results.
        device: "cuda" or "cpu".
        small: tiny models.
        model: with real weights, or None.
    """

    def __init__(self, folder: Path, device: str, *, small: bool, model: str | None) -> None:
        self.folder = folder
        self._device = device
        self._small = small
        self._model = model
        self._path = folder / "parts.json"
        self._state: dict[str, Any] = {"device": None, "parts": {}}
        if self._path.exists():
            self._state = json.loads(self._path.read_text())
        self._entries: dict[str, Any] = self._state["parts"]

    def preflight(self) -> bool:
        """Whether the machine has what nothing runs without; says what it lacks.

        Raises:
            SystemExit: the folder has results of another machine.
        """
        part = parts.preflight(self._device, self._model)
        say(f"{part.name}: {part.shows}")
        parts.run(part, self.folder, PATIENCE * 60 * part.minutes)
        print(part.log(self.folder).read_text(), end="", flush=True)
        if not part.result(self.folder).exists():
            return False
        record = json.loads(part.result(self.folder).read_text())
        self._machine = record["machine"]
        here = device_of(self._machine)
        if self._state["device"] not in (None, here):
            raise SystemExit(
                f"{self.folder} has results of {self._state['device']} and this is {here}; take another "
                "folder: make bench-gpu OUT=..."
            )
        self._state["device"] = here
        return bool(record["is_ready"])

    @property
    def parts(self) -> list[Part]:
        if self._small:
            return parts.small_parts(self._device)
        return parts.all_parts(self._machine["gpu_memory_gib"], self._model)

    def run_all(self, deadline: float | None) -> None:
        """Run what remains until `deadline`, by the monotonic clock; None: there is none."""
        chosen = self.parts
        for part in sorted(chosen, key=lambda part: self._status(part) in ("problems", "stopped")):
            if self._status(part) == "done":
                say(f"{part.name}: done before")
                continue
            limit_s = PATIENCE * 60.0 * part.minutes
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s < 60 * part.minutes:
                    self._leave_out(part, left_s / 60)
                    continue
                limit_s = min(limit_s, left_s)
            self._run(part, limit_s)
            page.write(self.folder, chosen, self._entries, self._device)
        page.write(self.folder, chosen, self._entries, self._device)

    def _leave_out(self, part: Part, minutes_left: float) -> None:
        say(f"{part.name}: left out, {part.minutes} minutes are planned and {minutes_left:.0f} left")
        if self._status(part) is None:  # what it ended with before still stands
            self._entries[part.name] = {"status": "left out", "command": part.command(self.folder)}
            self._save()

    @property
    def has_problems(self) -> bool:
        """Whether some part that ran did not end well."""
        return any(entry["status"] in ("problems", "stopped") for entry in self._entries.values())

    def _status(self, part: Part) -> str | None:
        """How the part ended when it last ran; None: it has not, or as another command."""
        entry = self._entries.get(part.name)
        same = entry is not None and entry["command"] == part.command(self.folder)
        return entry["status"] if same and entry["status"] != "left out" else None

    def _run(self, part: Part, limit_s: float) -> None:
        # Should this process be killed, the part has not run.
        self._entries.pop(part.name, None)
        self._save()
        say(f"{part.name}: {part.shows} ({part.minutes} minutes planned)")
        outcome = parts.run(part, self.folder, limit_s)
        self._entries[part.name] = {**asdict(outcome), "command": part.command(self.folder)}
        self._save()
        say(f"{part.name}: {outcome.status} after {outcome.minutes:.1f} minutes, {part.log(self.folder)}")

    def _save(self) -> None:
        self._path.write_text(json.dumps(self._state, indent=1) + "\n")


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the results")
    parser.add_argument("--hours", type=float, help="leave out parts that would take longer than that")
    parser.add_argument("--model", help="real weights for the peer's cells too: a folder, a name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models: does it all run?")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.small:
        parser.error("on a CPU everything is slow: use --device cpu --small")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    # So that whoever ends this process ends the part that runs, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    deadline = None if args.hours is None else time.monotonic() + 3600 * args.hours
    args.out.mkdir(parents=True, exist_ok=True)
    kit = Kit(args.out, args.device, small=args.small, model=args.model)
    if not kit.preflight():
        sys.exit("the kit cannot start; what is MISSING above says what to type")
    kit.run_all(deadline)
    print((args.out / page.NAME).read_text())
    if kit.has_problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
