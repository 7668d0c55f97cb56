"""Traces that the tests of the program share."""

from __future__ import annotations

from pathlib import Path

import pytest
from program import done


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fixture.h5 (L 4, P 12, G 4) and long.h5 (L 12, P 512, G 64)."""
    folder = tmp_path_factory.mktemp("traces")
    done("synth", "fixture", "-o", "fixture.h5", folder=folder)
    shape = ["--layers", "12", "--prompt", "512", "--continuation", "64", "--head-dim", "32"]
    done("synth", "sinks", "-o", "long.h5", *shape, folder=folder)
    return folder
