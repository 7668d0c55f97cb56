"""Small synthetic traces, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvreplay import _engine
from kvreplay.tune.command import main


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six prompts of 96 tokens, G 16, L 4, by two kinds of attention."""
    folder = tmp_path_factory.mktemp("traces")
    paths = []
    for seed in range(6):
        kind = ("sinks", "gaussian")[seed % 2]
        paths.append(folder / f"{kind}-{seed}.h5")
        words = ["synth", kind, "-o", str(paths[-1]), "--seed", str(seed), "--layers", "4", "--prompt", "96",
                 "--continuation", "16", "--head-dim", "16"]  # fmt: skip
        assert _engine.program(words) == 0
    return paths


@pytest.fixture
def tune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """`kvreplay tune WORDS --json` in a folder of its own: the document."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> dict:
        capsys.readouterr()
        assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Its one line on stderr, where it ends with `code`."""
    monkeypatch.chdir(tmp_path)

    def run(code: int, *words: object) -> str:
        capsys.readouterr()
        assert main([str(one) for one in words]) == code
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1, said.err
        assert not (tmp_path / "best.yaml").exists()
        return said.err.removeprefix("kvreplay: ").rstrip("\n")

    return run
