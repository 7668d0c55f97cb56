"""Does a run that is killed or asked to stop, at any moment, leave nothing that looks whole, and end as if undisturbed?

tests/faults/kill.py does the same at length.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from kill import duration, kill
from subjects import Subject

STOPS = [signal.SIGINT, signal.SIGTERM]
INTERRUPTED = 130


@pytest.mark.parametrize("name", ["replay", "synth", "capture"])
def test_killed_at_random_moments(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    subject: Subject = request.getfixturevalue(name)
    lasts = duration(subject, tmp_path / "timed")
    for seed in range(2):
        assert len(kill(subject, tmp_path / "trial", lasts, random.Random(seed), 2)) == 2


SIGNS = {"replay": "out/cells", "synth": "out.h5.partial", "capture": "out.h5.partial"}  # of a run that has begun


def stopped(subject: Subject, where: Path, blow: signal.Signals, sign: str) -> bool:
    """Asked to stop once it has begun; whether that came before its end."""
    begun = subject.begun(subject.place(where))
    while not (where / sign).exists() and begun.poll() is None:
        pass
    answer = begun.killed_after(0, blow)
    if answer.code != 0:
        assert answer.code == INTERRUPTED, answer
        assert answer.err.startswith("kvreplay: ") and "interrupted" in answer.err, answer
        assert answer.err.count("\n") == 1 and not list(where.rglob("*.partial")), answer
    subject.finished(where)
    return answer.code != 0


@pytest.mark.parametrize("blow", STOPS, ids=lambda blow: blow.name)
@pytest.mark.parametrize("name", SIGNS)
def test_asked_to_stop(name: str, blow: signal.Signals, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    subject: Subject = request.getfixturevalue(name)
    assert any(stopped(subject, tmp_path / str(trial), blow, SIGNS[name]) for trial in range(10))
