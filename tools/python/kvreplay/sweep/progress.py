"""How far a sweep is, in one line that is written over."""

from __future__ import annotations

import sys
import time

from kvreplay.sweep.schedule import Schedule


def duration(seconds: float) -> str:
    """Two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def state(schedule: Schedule, unit: str) -> str:
    """Tasks and cells done, cells a second, and how long that takes at this pace."""
    done, failed, running = (schedule.of_state(name) for name in ("done", "failed", "running"))
    all_cells = sum(record.cells for record in schedule.records.values())
    cells = sum(record.cells for record in done)
    left = all_cells - cells - sum(record.cells for record in failed)
    pace = cells / max(time.monotonic() - schedule.begun, 1e-9)
    pieces = [f"{len(done)} of {len(schedule.records)} tasks", f"{cells} of {all_cells} {unit}"]
    pieces.append(f"{len(running)} running on {len(schedule.workers)} workers" if schedule.workers else "no worker yet")
    if failed:
        pieces.append(f"{len(failed)} failed")
    if cells:
        pieces += [f"{pace:.3g} {unit}/s", f"{duration(left / pace)} left"]
    return ", ".join(pieces)


class Line:
    """Shows it, on a terminal or where it is asked for; every second."""

    def __init__(self, when: str, unit: str) -> None:
        stream = sys.stderr
        self.shown = when == "always" or (when == "auto" and stream.isatty())
        self._unit, self._stream = unit, stream
        self._last, self._width = 0.0, 0

    def show(self, schedule: Schedule) -> None:
        if not self.shown or time.monotonic() - self._last < 1:
            return
        self._last = time.monotonic()
        line = state(schedule, self._unit)
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(line)

    def clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width, end="\r", file=self._stream, flush=True)
            self._width = 0
