"""Traces that the tests of the Python package share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))

from program import done  # noqa: E402

SHAPE = "--layers 3 --query-heads 6 --kv-heads 2 --head-dim 16 --prompt 150 --continuation 12".split()


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.h5 (L 3, P 150, G 12, Hq 6, Hkv 2, d 16), fixture.h5 (L 4, P 12) and sliding.h5, where layer
    1 has a window of 20."""
    folder = tmp_path_factory.mktemp("traces")
    done("synth", "gaussian", "-o", "small.h5", *SHAPE, "--dtype", "float32", folder=folder)
    done("synth", "fixture", "-o", "fixture.h5", folder=folder)
    done("synth", "gaussian", "-o", "sliding.h5", *SHAPE, "--sliding-window", "0,20,0", folder=folder)
    return folder


@pytest.fixture(scope="session")
def small(traces: Path) -> Path:
    return traces / "small.h5"
