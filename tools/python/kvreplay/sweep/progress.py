"""The progress of a sweep in one line, which is overwritten."""

from __future__ import annotations

from kvreplay.sweep.schedule import Schedule


def duration(seconds: float) -> str:
    """Two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Line:
    """A progress line on stderr with the finished cells and tasks, updated at most once a second. `when` = auto shows
    it on terminals only."""

    def __init__(self, when: str, unit: str) -> None:
        from tqdm import tqdm  # capture disables bars of libraries before tqdm is imported

        hidden = {"auto": None, "always": False, "never": True}[when]  # None: tqdm looks for a terminal
        self._bar = tqdm(unit=f" {unit}", disable=hidden, leave=False, mininterval=1, miniters=0, delay=1e-9)

    def show(self, schedule: Schedule) -> None:
        if self._bar.disable:
            return
        done, running, failed = (schedule.of_state(name) for name in ("done", "running", "failed"))
        places = (
            f"{len(running)} running on {len(schedule.workers)} workers" if schedule.workers else "waiting for workers"
        )
        pieces = [f"{len(done)} of {len(schedule.records)} tasks", places]
        if failed:
            pieces.append(f"{len(failed)} failed")
        self._bar.set_description_str(", ".join(pieces), refresh=False)
        self._bar.total = sum(record.cells for record in schedule.records.values() if record.state != "failed")
        self._bar.update(sum(record.cells for record in done) - self._bar.n)

    def clear(self) -> None:
        self._bar.close()
