"""Small traces, one replay of them all, a cluster, and a program that can be made to fail."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))

pytest.importorskip("distributed", reason="sweeps need tools/setup build python")

from program import done  # noqa: E402
from trial_sweeps import ASKED, NAMES, Cluster, Sweeps, end  # noqa: E402


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four: L 4, P 128, G 16."""
    folder = tmp_path_factory.mktemp("traces")
    shape = ["--layers", "4", "--prompt", "128", "--continuation", "16", "--head-dim", "16"]
    for seed, name in enumerate(NAMES):
        done("synth", "sinks", "-o", f"{name}.h5", "--seed", str(seed), *shape, folder=folder)
    return folder


@pytest.fixture(scope="session")
def operands(traces: Path) -> list[str]:
    return [*(str(traces / f"{name}.h5") for name in NAMES), *ASKED]


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, operands: list[str]) -> Path:
    """What one replay leaves."""
    folder = tmp_path_factory.mktemp("single")
    done("replay", *operands, "-o", "run", folder=folder)
    return folder / "run"


@pytest.fixture
def sweeps(tmp_path: Path, operands: list[str]) -> Iterator[Sweeps]:
    made = Sweeps(tmp_path, operands)
    yield made
    for path in Path("/proc").glob("[0-9]*/cmdline"):  # nothing of a sweep outlives it; a failed test ends it here
        try:
            if str(made.output).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers."""
    made = Cluster.started(tmp_path_factory.mktemp("cluster"))
    for _ in range(2):
        made.worker()
    yield made
    for process in made.processes:
        end(process)
