"""Small synthetic traces, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvreplay import _engine  # noqa: E402
from kvreplay.bounds.command import main  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three traces of P 8, G 3, L 2, Hq 4, Hkv 2, d 4: every set of their tokens can be tried."""
    folder = tmp_path_factory.mktemp("tiny")
    paths = []
    for seed, kind in enumerate(("gaussian", "sinks", "gaussian")):
        paths.append(folder / f"{kind}-{seed}.h5")
        shape = "--layers 2 --query-heads 4 --kv-heads 2 --head-dim 4 --prompt 8 --continuation 3 --dtype float32"
        assert _engine.program(["synth", kind, "-o", str(paths[-1]), "--seed", str(seed), *shape.split()]) == 0
    return paths


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `kvreplay regret WORDS` prints; where it ends with another `code`, its one line on stderr."""

    def run(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(one) for one in words]) == code
        heard = capsys.readouterr()
        if code == 0:
            return heard.out
        assert heard.out == "" and heard.err.count("\n") == 1, heard.err
        return heard.err.removeprefix("kvreplay: ").rstrip("\n")

    return run
