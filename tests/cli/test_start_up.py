"""Do commands answer wrong arguments before they import large packages?"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from program import done

from kvreplay.run_names import check_names

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
LARGE = {
    "bokeh",
    "dask",
    "datasets",
    "distributed",
    "duckdb",
    "matplotlib",
    "pandas",
    "pyarrow",
    "scipy",
    "torch",
    "transformers",
}
REPLAY = "none.h5 -p snapkv -b 0.1"
MISSING_FILES = {
    "kvreplay-calibrate": ["q-filters none.h5 -o filters"],
    "kvreplay-capture": ["--model none.gguf --prompt x -o t.h5", "--model ./none --prompt x -o t.h5"],
    "kvreplay-check": ["none kept.npz -p snapkv -b 0.1", "trace.h5 none.npz -p snapkv -b 0.1"],
    "kvreplay-compare": ["none --baseline h2o"],
    "kvreplay-example": ["-o none.txt/t.h5"],
    "kvreplay-export": ["none -o table.parquet", "none.h5 -o card.md"],
    "kvreplay-live": ["none --model x", "run --model none.gguf"],
    "kvreplay-plot": ["curve none", "similarity none.h5"],
    "kvreplay-predict": ["none"],
    "kvreplay-python": [f"replay {REPLAY}"],
    "kvreplay-regret": [REPLAY],
    "kvreplay-report": ["none"],
    "kvreplay-sql": ["select none"],
    "kvreplay-sweep": [REPLAY],
    "kvreplay-tune": [REPLAY, f"trace.h5 {REPLAY.partition(' ')[2]} --metric kld --model none.gguf"],
    "kvreplay-why": ["none -p snapkv -t 5"],
}
UNKNOWN_NAMES = {
    "kvreplay-capture --model x --prompts x.jsonl -n 3 -o t.h5": "-o: 3 prompts, one trace each: expected a folder",
    "kvreplay-check trace.h5 trace.npz -p snapvk -b 0.1": "snapvk: unknown policy: did you mean snapkv?",
    "kvreplay-check trace.h5 trace.npz -p snapkv -b 0": "budget 0: out of range: expected 1..2147483647, found 0",
    "kvreplay-plot compare run": "--baseline: no policy to compare with: expected one of snapkv:window=4, found none",
    "kvreplay-compare run": "--baseline: no policy to compare with: expected one of snapkv:window=4, found none",
    "kvreplay-compare run --baseline snapvk": "--baseline: unknown policy snapvk: did you mean snapkv?",
    "kvreplay-compare run --baseline h2o -p snapvk": "-p: unknown policy snapvk: did you mean snapkv?",
    "kvreplay-compare run --baseline h2o -b 0.4": "-b: unknown budget: expected one of 0.5, 6, found 0.4",
    "kvreplay-compare run --baseline h2o --metric recal": "unknown metric recal: did you mean attention_recall?",
    "kvreplay-live run --model x -p snapvk": "-p: unknown policy snapvk: did you mean snapkv?",
    "kvreplay-live run --model x --trace fixtur": "--trace: unknown trace fixtur: did you mean fixture?",
    "kvreplay-plot curve run --metric recal": "--metric: unknown metric recal: did you mean attention_recall?",
    "kvreplay-plot curve run --metric skill": "--metric: unknown metric: expected one of 27 names, such as ",
    "kvreplay-plot curve run -p snapkv:window=99": "-p: unknown policy: expected one of full, h2o, ",
    "kvreplay-plot kept run --trace fixtur": "--trace: unknown trace fixtur: did you mean fixture?",
    "kvreplay-report run -p snapvk": "-p: unknown policy snapvk: did you mean snapkv?",
    "kvreplay-report run --baseline snapvk": "--baseline: unknown policy snapvk: did you mean snapkv?",
    "kvreplay-report run -b 7": "-b: unknown budget: expected one of 0.5, 6, found 7",
    "kvreplay-why trace.h5 -p snapvk -t 5": "snapvk: unknown policy: did you mean snapkv?",
    "kvreplay-why trace.h5 -p snapkv,h2o -t 5": "-p: policies: expected one, found snapkv, h2o",
    "kvreplay-tune trace.h5 -p snapvk -b 0.1": "snapvk: unknown policy: did you mean snapkv?",
    "kvreplay-tune trace.h5 -p snapkv -b 0.1 --metric recal": "recal: unknown metric: did you mean attention_recall?",
    "kvreplay-tune trace.h5 -p snapkv -b 0.1 --metric kld": "--metric: kld is measured in the live model",
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


@pytest.mark.parametrize("script", ["kvreplay-capture", "kvreplay-live"])
def test_bars_of_libraries_can_be_disabled(script: str, folder: Path) -> None:
    """tqdm reads TQDM_DISABLE when it is imported, so options are read before."""
    _, _, modules = rejected(script, "--no-such-option", folder)
    assert "tqdm" not in modules


@pytest.fixture(scope="module")
def replayed(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, a run of two calls: run.json describes the second, with snapkv at 0.5; and `trace.h5`
    and `trace.npz`."""
    folder = tmp_path_factory.mktemp("replayed")
    for policy, budget in (("h2o", "6"), ("snapkv:window=4", "0.5")):
        done("replay", traces / "fixture.h5", "-p", policy, "-b", budget, "-o", "run", folder=folder)
    for name in ("trace.h5", "trace.npz"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("line", UNKNOWN_NAMES)
def test_an_unknown_name_is_reported_before_large_packages_are_imported(line: str, replayed: Path) -> None:
    script, _, words = line.partition(" ")
    code, said, modules = rejected(script, words, replayed)
    assert (code, said.count("\n")) == (2, 1), said
    assert UNKNOWN_NAMES[line] in said
    assert not LARGE & modules


def test_names_of_every_call_into_a_folder_are_known(replayed: Path) -> None:
    asked = ["h2o", "snapkv:window=4", "SnapKV", "oracle"]
    check_names([replayed / "run"], policies=asked, baseline="random", budgets=["6", "0.5"], traces=["fixture"],
                metrics=["recall", "output_error", "kept_tokens"])  # fmt: skip
