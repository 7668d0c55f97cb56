"""Runs that nothing disturbs, to compare disturbed ones with, and the library that makes calls fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / other) for other in ("cli", "capture")]

import pytest  # noqa: E402
from program import done  # noqa: E402
from subjects import Capture, Merge, Replay, Synth  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-fault", action="store_true", help="each call and each limit, not some of them (minutes)")


@pytest.fixture(scope="session")
def some(request: pytest.FixtureRequest) -> int:
    """Every so many faults of a sweep are tried."""
    return 1 if request.config.getoption("--every-fault", False) else 13


@pytest.fixture(scope="session")
def interposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of interposed.c, to be preloaded."""
    library = tmp_path_factory.mktemp("interposed") / "interposed.so"
    source = Path(__file__).with_name("interposed.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """Of two short traces, done once undisturbed."""
    return Replay.prepared(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="session")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Merge:
    return Merge.prepared(tmp_path_factory.mktemp("merge"))


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory) -> Synth:
    return Synth.prepared(tmp_path_factory.mktemp("synth"))


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory, interposed: Path) -> Capture:
    """Of a tiny model, done once undisturbed."""
    pytest.importorskip("torch", reason="capture needs tools/setup build python")
    pytest.importorskip("transformers", reason="capture needs tools/setup build python")
    return Capture.prepared(tmp_path_factory.mktemp("capture"), interposed)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """fixture.h5 in a folder of its own."""
    done("synth", "fixture", "-o", "fixture.h5", folder=tmp_path)
    return tmp_path / "fixture.h5"
