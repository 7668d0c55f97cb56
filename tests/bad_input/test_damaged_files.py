"""Files that crash HDF5, keep it busy or make it ask for all memory are refused, with exit code 3.

`damaged/` holds files that were made with h5py in the oldest format, variable-length strings among their contents, and
got a few other bytes: HDF5 1.10.8 crashes on one when their objects are walked, and asks for some GiB at the other.
1.14.5 stands both.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()
DAMAGED = sorted((Path(__file__).parent / "damaged").glob("*.h5"))


def kvreplay(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run over one trace."""
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).returncode == 0
    assert kvreplay("replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=tmp_path).returncode == 0
    return tmp_path


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_a_part_that_hdf5_cannot_survive_is_refused(damaged: Path, run_folder: Path) -> None:
    shutil.copy(damaged, run_folder / "out/parts/a.h5")
    refused = kvreplay("replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=run_folder)
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    survives = "HDF5 1.10" not in kvreplay("doctor", folder=run_folder).stdout
    found = "format: expected kvpart" if survives else "damaged: expected an HDF5 file that the library can walk"
    assert f"out/parts/a.h5: {found}, found " in refused.stderr


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_as_a_trace_it_is_refused_before(damaged: Path, tmp_path: Path) -> None:
    refused = kvreplay("info", damaged, folder=tmp_path)
    assert refused.returncode == 3
    assert refused.stderr.endswith(f"{damaged}: superblock version: expected 2 or 3, found 0\n")


def test_a_trace_that_shrinks_while_it_is_replayed(tmp_path: Path) -> None:
    """At any moment: while it is opened and planned, and while layers are in use."""
    shape = "--layers 4 --query-heads 8 --kv-heads 2 --head-dim 64 --prompt 6000 --continuation 16".split()
    assert kvreplay("synth", "gaussian", "-o", "whole.h5", *shape, folder=tmp_path).returncode == 0
    whole = (tmp_path / "whole.h5").stat().st_size
    changed = f"a.h5: changed while it was read: expected {whole} bytes, found {whole // 2} bytes"
    refusals = []
    for seconds in (0.0, 0.2, 0.4, 0.6):
        shutil.copy(tmp_path / "whole.h5", tmp_path / "a.h5")
        words = [PROGRAM, "replay", "a.h5", "-p", "h2o", "-b", "0.1", "-o", "out"]
        with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            while not (tmp_path / "out").exists():
                time.sleep(0.005)
            time.sleep(seconds)
            os.truncate(tmp_path / "a.h5", whole // 2)
            said = run.stderr.read()
        # 3: refused before anything began, 6: its cells failed.
        assert run.returncode in (3, 6), f"{run.returncode}: {said}"
        assert not list((tmp_path / "out").rglob("parts/*.h5"))
        refusals.append(said)
        shutil.rmtree(tmp_path / "out")
    assert any(changed in said for said in refusals), refusals
