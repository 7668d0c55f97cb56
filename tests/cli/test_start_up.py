"""Do commands answer wrong arguments before they import large packages?"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
LARGE = {"bokeh", "dask", "distributed", "matplotlib", "pandas", "pyarrow", "scipy", "torch", "transformers"}
REPLAY = "none.h5 -p snapkv -b 0.1"
MISSING_FILES = {
    "kvreplay-capture": ["--model none.gguf --prompt x -o t.h5", "--model ./none --prompt x -o t.h5"],
    "kvreplay-compare": ["none --baseline h2o"],
    "kvreplay-example": ["-o none.txt/t.h5"],
    "kvreplay-export": ["none -o table.parquet"],
    "kvreplay-live": ["none --model x", "run --model none.gguf"],
    "kvreplay-plot": ["curve none", "similarity none.h5"],
    "kvreplay-predict": ["none"],
    "kvreplay-python": [f"replay {REPLAY}"],
    "kvreplay-regret": [REPLAY],
    "kvreplay-report": ["none"],
    "kvreplay-sweep": [REPLAY],
    "kvreplay-tune": [REPLAY, f"trace.h5 {REPLAY.partition(' ')[2]} --metric kld --model none.gguf"],
}
REJECTED = """
import sys
from {module} import main
sys.argv = {words!r}
code = main()
print(*sys.modules)
sys.exit(code)
"""


def rejected(script: str, words: str, folder: Path) -> tuple[int, str, set[str]]:
    """Exit code, stderr and imported modules of a command that must not succeed."""
    module, function = SCRIPTS[script].split(":")
    assert function == "main"
    code = REJECTED.format(module=module, words=[script, *words.split()])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, set(done.stdout.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `run`, which looks like a finished run, and `trace.h5` and `none.txt`, empty files."""
    (tmp_path / "run" / "cells").mkdir(parents=True)
    for name in ("run/results.csv", "run/run.json", "trace.h5", "none.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("script", "words"), [(script, words) for script in SCRIPTS for words in MISSING_FILES.get(script, ["no example"])]
)
def test_a_missing_file_is_reported_before_large_packages_are_imported(script: str, words: str, folder: Path) -> None:
    code, said, modules = rejected(script, words, folder)
    assert (code, said.count("\n")) == (3, 1), said
    assert "none" in said
    assert not LARGE & modules


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_option_is_reported_before_large_packages_are_imported(script: str, folder: Path) -> None:
    code, said, modules = rejected(script, "--no-such-option", folder)
    assert (code, said.count("\n")) == (2, 1), said
    assert "unknown option" in said
    assert not LARGE & modules
