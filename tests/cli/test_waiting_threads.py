"""Threads that wait for one another sleep, unless the user's environment says otherwise: docs/threads.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from program import PROGRAM

CLI = Path(__file__).parents[2] / "tools" / "cli"
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ENGINE = "import os; before = dict(os.environ); import kvreplay.engine; assert before == dict(os.environ)"
LAYER = "from kvreplay import _engine"


@pytest.mark.parametrize(
    "command",
    [[str(PROGRAM), "doctor"], [sys.executable, "-c", ENGINE], [sys.executable, "-c", LAYER]],
    ids=["program", "kvreplay.engine", "kvreplay._engine"],
)
@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [
        ({}, "PASSIVE", 0),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", 30_000_000_000),
        ({"GOMP_SPINCOUNT": "1234"}, "PASSIVE", 1234),
        ({"KMP_BLOCKTIME": "200"}, "PASSIVE", 300_000),
    ],
    ids=["unset", "active", "spins", "libomp's"],
)
def test_the_policy_in_force(command: list[str], given: dict[str, str], policy: str, spins: int) -> None:
    """As libgomp says it. It calls its default PASSIVE too, and spins 300,000 times."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = re.findall(r"(OMP_WAIT_POLICY|GOMP_SPINCOUNT) = '(\w+)'", run.stderr)
    assert said == [("OMP_WAIT_POLICY", policy), ("GOMP_SPINCOUNT", str(spins))]


@pytest.mark.parametrize(("given", "milliseconds"), [({}, "0ms"), ({"KMP_BLOCKTIME": "100"}, "100ms")])
def test_how_long_threads_of_clangs_runtime_spin(given: dict[str, str], milliseconds: str, tmp_path: Path) -> None:
    """libomp reads the environment when OpenMP is first used, which may be after restore_environment. Its default is
    200 milliseconds."""
    (tmp_path / "main.cpp").write_text(
        '#include <omp.h>\n#include "sleeping_threads.h"\n'
        "int main() { kvreplay::restore_environment(); return omp_get_max_threads() > 0 ? 0 : 1; }\n"
    )
    sources = [tmp_path / "main.cpp", CLI / "sleeping_threads.cpp"]
    command = ["clang++-19", "-std=c++20", "-fopenmp", "-I", CLI, *sources, "-o", tmp_path / "program"]
    subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    run = subprocess.run([tmp_path / "program"], env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"KMP_BLOCKTIME *= *'(\w+)", run.stderr) == [milliseconds]


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_a_program_that_kvreplay_becomes_has_the_environment_of_the_user(given: dict[str, str], tmp_path: Path) -> None:
    companion = tmp_path / "kvreplay-environment"
    companion.write_text('#!/bin/sh\necho "$OMP_WAIT_POLICY"\n')
    companion.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    run = subprocess.run([PROGRAM, "environment"], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == given.get("OMP_WAIT_POLICY", "") + "\n"
