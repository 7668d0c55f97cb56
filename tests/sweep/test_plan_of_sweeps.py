"""What is planned, refused and printed before anything runs; and the plan of 80,000 cells by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trial_sweeps import CELLS, NAMES

from kvreplay.sweep.command import main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from sweep_plan import Costs, makespan  # noqa: E402


def said(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """Stdout where the exit code is 0, else the one line on stderr."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    heard = capsys.readouterr()
    assert (heard.err == "") if code == 0 else (heard.out == "" and heard.err.count("\n") == 1), heard
    return heard.out if code == 0 else heard.err.removeprefix("kvreplay: ").rstrip("\n")


def test_dry_run(capsys, operands: list[str], tmp_path: Path) -> None:
    lines = said(capsys, 0, *operands, "-o", tmp_path / "out", "--dry-run", "--workers", 2).splitlines()
    assert lines[0].split() == ["task", "cells", "time", "memory", "results"]
    assert [line.split()[:2] for line in lines[1:6]] == [*([name, str(CELLS)] for name in NAMES), ["all", "40"]]
    assert lines[6].startswith("4 tasks on 2 workers, each as fast as this machine: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, line",
    [
        (["--executor", "pbs"], "--executor: unknown value: expected local, dask:ADDRESS or slurm, found pbs"),
        (["--workers", "0"], "--workers: out of range: expected 1 or more, found 0"),
        (["--gpus", "many"], "--gpus: not a number: expected a whole number, or auto, found many"),
        (
            ["--slurm", "no/name=1"],
            "--slurm: not a directive: expected KEY=VALUE, with a long option name of sbatch, found no/name=1",
        ),
        (
            ["--memory", "much"],
            "sweep: argument --memory: expected a number of bytes, as 4096, 512M or 1.5G, found 'much' (see kvreplay "
            "sweep --help)",
        ),
        (["--executor", "slurm"], "--memory: required with --executor slurm: expected memory per task, as 8GiB"),
        (["--force"], "--force: a sweep cannot overwrite results: expected another folder"),
        (["--resume"], "--resume: unknown option: expected the command without it, which keeps finished tasks"),
        (["--protect", "sinks=4,recant=9"], "--protect: unknown parameter: expected one of sinks, recent, found"),
        (["-p", "snapvk"], "snapvk: unknown policy: did you mean snapkv?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused(capsys, operands: list[str], tmp_path: Path, words: list[str], line: str) -> None:
    assert said(capsys, 2, *operands, "-o", tmp_path / "out", *words).startswith(line)
    assert not (tmp_path / "out").exists()


def test_nobody_answers(capsys, operands: list[str], tmp_path: Path) -> None:
    words = ["-o", tmp_path / "out", "--executor", "dask:tcp://127.0.0.1:9"]
    assert "--executor: no scheduler at this address: expected dask:ADDRESS" in said(capsys, 4, *operands, *words)


def test_the_script_for_slurm(capsys, operands: list[str], tmp_path: Path) -> None:
    words = ["--emit", "slurm", "--workers", 8, "--threads", 4, "--memory", "1GiB", "--slurm", "partition=cpu"]
    script = said(capsys, 0, *operands, "-o", tmp_path / "a folder", *words)
    number, folder = '"$SLURM_ARRAY_TASK_ID"', f"'{tmp_path}/a folder'"
    for line in (
        "#SBATCH --array=1-8",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=1536M",
        "#SBATCH --partition=cpu",
        f"  --shard {number}/8 -o {folder}/shards/{number} \\",
        "  --threads 4 --memory 1073741824 --progress never",
    ):
        assert f"{line}\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", ["distributed", "psutil"])  # capture requires psutil, too
def test_it_is_named_what_is_missing(operands: list[str], tmp_path: Path, name: str) -> None:
    """Without Dask the options are still explained."""
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no', name={name!r})")
    run = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvreplay.sweep.command import main; sys.exit(main())"
    )
    help_text = subprocess.run([sys.executable, "-c", run, "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0 and "--executor" in help_text.stdout
    words = [*operands, "-o", str(tmp_path / "out"), "--workers", "1"]
    answer = subprocess.run([sys.executable, "-c", run, *words], capture_output=True, text=True)
    assert answer.returncode == 4, answer
    assert answer.stderr == f"kvreplay: sweep: {name} is not installed; run pip install 'kvreplay[sweep]'\n"


def test_the_simulated_plan_by_hand() -> None:
    """Two workers from second 1: 3 and 2 s, then 2 s on the one that is free at 3.5; each costs half a second more."""
    costs = Costs(start=1.0, overhead=0.5)
    assert makespan(np.array([3.0, 2.0, 2.0]), 2, costs) == 6.0
    assert makespan(np.array([3.0, 2.0, 2.0]), 1, costs) == 1.0 + 7.0 + 1.5
    # With a client that needs a second for each, the third worker begins two seconds after the first.
    each = Costs(hand_out=1.0, batch=1.0)
    assert makespan(np.array([1.0, 1.0, 1.0]), 3, each) == 3.0
    assert makespan(np.array([1.0, 1.0, 1.0]), 3, replace(each, merge=0.5, copy=0.25)) == 4.75
    # Three tasks in one call end at 1, 3 and 3.5. The client is busy until 3, and hands out the last two in one call.
    assert makespan(np.array([1.0, 1.0, 1.0, 1.0, 1.0]), 3, Costs(hand_out=2.0, batch=0.5)) == 3.0 + 2.0 + 1.0
    # The merge reads three traces that are done at once, two of them after the end.
    assert makespan(np.array([1.0, 1.0, 1.0]), 3, Costs(arrival=0.5, merge=0.25)) == 1.0 + 3 * 0.5 + 3 * 0.25
    # Two groups of a trace, then what joins them.
    assert makespan(np.array([4.0]), 2, Costs(group=0.5, join=0.25)) == 3.25
