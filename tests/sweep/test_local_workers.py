"""What happens to workers that die while they start, killed or out of memory?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvreplay.errors import Error, Refusal
from kvreplay.sweep import executors
from kvreplay.sweep.executors import Wanted, cluster
from kvreplay.sweep.work import Allowance, run_program

WANTED = Wanted("local", 1, 0, Allowance(1, 0), ())


def dying(first: Path) -> str:
    """Code of a worker that dies unless another has died before."""
    return f"import os\ntry:\n    os.mkdir({str(first)!r})\nexcept FileExistsError:\n    pass\nelse:\n    os._exit(1)\n"


def test_they_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "DEAF", dying(tmp_path / "died"))
    with cluster(WANTED, tmp_path) as client:
        assert client.submit(abs, -1).result(timeout=60) == 1
    assert (tmp_path / "died").is_dir()


def test_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "DEAF", "import os\nos._exit(1)\n")
    with pytest.raises(Error, match="--workers: workers failed to start: expected 1 processes") as refused:
        with cluster(WANTED, tmp_path):
            pass
    assert refused.value.exit_code == Refusal.RESOURCES


def test_programs_have_the_usual_memory_allocation(tmp_path: Path) -> None:
    """Dask sets the variable for its workers; free memory that returns to the system at once costs 4 % of the time."""
    variable = "MALLOC_TRIM_THRESHOLD_"
    with cluster(WANTED, tmp_path) as client:
        assert client.submit(os.environ.get, variable).result(timeout=60)
        words = ["sh", "-c", f"echo ${{{variable}-unset}} >&2; exit 1"]
        assert client.submit(run_program, words, "/", bool).result(timeout=60) == (1, "unset")


def test_the_process_that_imports_for_the_workers_ignores_ctrl_c() -> None:
    code = (
        "from multiprocessing import forkserver\nimport signal\nfrom kvreplay.sweep import executors\n"
        "from kvreplay.sweep.work import Allowance\n"
        "executors.begin_imports(executors.Wanted('local', 1, 0, Allowance(1, 0), ()))\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())\n"
    )
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ignored = int(re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    assert ignored >> (signal.SIGINT - 1) & 1
