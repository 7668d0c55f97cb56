from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from cases import MODEL, TOKENS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def captured() -> Callable[..., None]:
    """captured(trace, *words): the first TOKENS tokens of a document, by `kvreplay capture WORDS`."""

    def capture(trace: Path, *words: str) -> None:
        words = (*f"--dtype float32 --prompts {ROOT}/traces/demo.jsonl --max-tokens {TOKENS}".split(), *words)
        program = [sys.executable, "-m", "kvreplay.capture.command", "--model", MODEL]
        subprocess.run([*program, *words, "-o", trace], check=True)

    return capture


@pytest.fixture(scope="session")
def in_kvpress() -> Callable[..., None]:
    """in_kvpress(script, words...): runs a script of this folder in kvpress' environment."""

    def run(script: str, *words: object) -> None:
        python = ROOT / "build" / "kvpress" / "bin" / "python"
        subprocess.run([python, HERE / script, *map(str, words)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})

    return run


@pytest.fixture(scope="session")
def by_kvpress(in_kvpress: Callable[..., None]) -> Callable[[str, Path, str], dict[str, np.ndarray]]:
    """by_kvpress(script, folder, name): the arrays that a script writes from the traces and tables of the folder."""

    def run(script: str, folder: Path, name: str) -> dict[str, np.ndarray]:
        in_kvpress(script, MODEL, folder)
        with np.load(folder / name) as arrays:
            return dict(arrays)

    return run
