"""Policies keep the tokens that kvpress' presses keep: `tests/run kvpress`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvreplay as kv
import numpy as np
import pytest
from cases import CASES, LEAST_OVERLAP, NOT_COMPARED, RATIOS, SKETCH, TOKENS, Case, presses_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "reference"))
import reference_geometry  # noqa: E402

MODEL = ROOT / "build" / "model" / "smollm2-135m-instruct.gguf"
ROWS: list[str] = []


def write_tables(folder: Path, layers: int, heads: int, width: int) -> None:
    """The random matrices of leverage scores, and directions and head scores that nobody measured."""
    np.save(folder / "sketch.npy", reference_geometry.gaussian(0, *np.indices((layers, heads, width, SKETCH))))
    random = np.random.default_rng(0)
    np.save(folder / "filters.npy", random.normal(size=(layers, heads, width)).astype(np.float32))
    np.save(folder / "roles.npy", random.random((layers, heads), np.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trace, and what the presses keep of its tokens."""
    folder = tmp_path_factory.mktemp("kvpress")
    words = f"--model {MODEL} --dtype float32 --prompts {ROOT}/traces/demo.jsonl --max-tokens {TOKENS} --with-wo"
    subprocess.run([sys.executable, "-m", "kvreplay.capture.command", *words.split(), "-o", folder / "trace.h5"], check=True)
    with kv.open(folder / "trace.h5") as trace:
        assert trace.prompt == TOKENS
        write_tables(folder, trace.layers, trace.kv_heads, trace.head_dim)
    python = ROOT / "build" / "kvpress" / "bin" / "python"
    subprocess.run(
        [python, Path(__file__).with_name("presses.py"), MODEL, folder], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    return folder


@pytest.fixture(scope="module")
def kept(folder: Path) -> Iterator[np.lib.npyio.NpzFile]:
    with np.load(folder / "kept.npz") as arrays:
        yield arrays


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what docs/conventions.md shows."""
    yield
    with request.getfixturevalue("capsys").disabled():
        print(...)


def replayed(folder: Path, case: Case, ratio: float, theirs: np.ndarray) -> np.ndarray:
    """bool [layers, KV heads, tokens]; the budget is what the press keeps on average."""
    ...
