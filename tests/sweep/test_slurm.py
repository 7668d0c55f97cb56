"""Does a sweep run as jobs of Slurm? `tests/run slurm` starts a cluster of one node around these tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from trial_sweeps import NAMES, Sweeps, assert_equal, table, wait_for


def there_is_slurm() -> bool:
    if shutil.which("sinfo") is None:
        return False
    return subprocess.run(["sinfo", "--noheader"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not there_is_slurm(), reason="Slurm is not available: tests/run slurm starts one")


def test_workers_are_jobs(sweeps: Sweeps, single: Path) -> None:
    """One of them is cancelled in the middle of a task: another job takes its place."""
    sweeps.fault_once("t1", "scancel $SLURM_JOB_ID; sleep 60")
    words = ["--executor", "slurm", "--workers", 2, "--threads", 1, "--memory", "256MiB", "--slurm", "time=10"]
    answer = sweeps.run(*words)
    assert answer.code == 0, answer
    assert_equal(sweeps.output, single)
    rows = table(sweeps.output)
    assert list(rows) == NAMES and rows["t1"]["attempts"] == "2"
    assert not (sweeps.output / "slurm").exists()
    wait_for(lambda: not subprocess.check_output(["squeue", "--noheader"]))  # no job outlives the sweep


def test_without_dask(sweeps: Sweeps, single: Path) -> None:
    """An array of shards, and a job that merges them."""
    script = sweeps.folder / "sweep.sh"
    words = ["--emit", "slurm", "--workers", 3, "--threads", 1, "--memory", "256MiB", "--slurm", "time=10"]
    script.write_text(sweeps.run(*words).out)
    comment = next(line for line in script.read_text().split("\n") if line.startswith("#   job=$("))
    submit = comment.removeprefix("#   ").replace("THIS_FILE", str(script))
    subprocess.run(["bash", "-ec", submit], cwd=sweeps.folder, check=True, capture_output=True)
    wait_for(lambda: not subprocess.check_output(["squeue", "--noheader"]))
    logs = [path.read_text() for path in sweeps.folder.glob("slurm-*.out")]
    assert (sweeps.output / "results.csv").exists(), logs
    assert_equal(sweeps.output, single)
    assert len(list(sweeps.output.glob("shards/*/run.json"))) == 3
