"""The scripts of tools/ and tests/run answer --help before they install or build anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path.relative_to(ROOT)
    for path in (*sorted((ROOT / "tools").iterdir()), ROOT / "tests" / "run")
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")
]


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) > 5


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["build", "--help"]], ids=" ".join)
def test_help_is_the_head_of_the_script(tmp_path: Path, script: Path, words: list[str]) -> None:
    copy = tmp_path / script
    copy.parent.mkdir()
    shutil.copy(ROOT / script, copy)
    answer = subprocess.run([copy, *words], capture_output=True, text=True)
    head = (ROOT / script).read_text().split("\nset -euo pipefail\n")[0].splitlines()[1:]
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in head]
    assert str(script) in answer.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [copy]


def test_the_demo_has_no_arguments(tmp_path: Path) -> None:
    answer = subprocess.run([ROOT / "tools/demo", "nonsense"], capture_output=True, text=True, cwd=tmp_path)
    said = 'demo: expected no argument, found "nonsense"; see tools/demo --help\n'
    assert (answer.returncode, answer.stderr) == (2, said)
