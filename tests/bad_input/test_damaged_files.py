"""Damaged files are rejected with exit code 3. `validate --untrusted` says how HDF5 ended at those that it cannot read.

`damaged/` holds files that were made with h5py in the oldest format, variable-length strings among their contents, and
got a few other bytes: HDF5 1.10.8 reads behind a chunk of one, and asks for some GiB at the other. 1.14.5 stands both.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from mutate_files import behind_new_superblock  # noqa: E402

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()
DAMAGED = sorted((Path(__file__).parent / "damaged").glob("*.h5"))
OLD = "superblock version: expected 2 or 3, found 0"


def unpacked(name: str) -> bytes:
    """A damaged file that is kept small."""
    return gzip.decompress((Path(__file__).parent / f"damaged/{name}.h5.gz").read_bytes())


def kvreplay(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where the commands in Python are
    environment = {**os.environ, "PATH": path}
    options = {"capture_output": True, "text": True, "errors": "backslashreplace", "timeout": 60}
    return subprocess.run([PROGRAM, *words], cwd=folder, env=environment, **options)


@pytest.fixture(scope="module")
def newer() -> bool:
    """Whether the library is newer than 1.10, and refuses more by itself."""
    return "HDF5 1.10" not in kvreplay("doctor", folder=Path()).stdout


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run over one trace."""
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).returncode == 0
    assert kvreplay("replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=tmp_path).returncode == 0
    return tmp_path


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_cells_of_the_oldest_format_are_refused(damaged: Path, run_folder: Path) -> None:
    shutil.copy(damaged, run_folder / "out/cells/a.h5")
    refused = kvreplay("replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=run_folder)
    assert refused.returncode == 3
    assert refused.stderr.endswith(f"out/cells/a.h5: {OLD}\n") and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("deep", [[], ["--deep"]], ids=["", "deep"])
@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_a_child_process_reads_what_is_not_trusted(damaged: Path, deep: list[str], tmp_path: Path) -> None:
    """Behind a new superblock the library reads the oldest format; sound files beside it are read as well."""
    data = behind_new_superblock(damaged.read_bytes())
    (tmp_path / "damaged.h5").write_bytes(data)
    assert kvreplay("synth", "fixture", "-o", "sound.h5", folder=tmp_path).returncode == 0
    words = ["validate", "--untrusted", *deep]
    found = kvreplay(*words, "damaged.h5", "sound.h5", folder=tmp_path)
    assert found.returncode == 1 and found.stderr == "", found
    assert found.stdout.startswith("damaged.h5: invalid\n  damaged.h5")
    assert "\nsound.h5: valid" in found.stdout
    trusted = kvreplay("validate", *deep, "sound.h5", "--json", folder=tmp_path)
    assert kvreplay(*words, "sound.h5", "--json", folder=tmp_path).stdout == trusted.stdout


def test_what_a_child_cannot_do_is_said(tmp_path: Path) -> None:
    assert kvreplay("validate", "--untrusted", "none.h5", folder=tmp_path).returncode == 3
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).returncode == 0
    script = f"ulimit -u 1 2>/dev/null; exec {PROGRAM} validate --untrusted a.h5"
    if os.geteuid() != 0:  # root has as many processes as it likes
        refused = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert refused.returncode == 5 and "a.h5: no child process" in refused.stderr


def test_a_part_whose_cells_hdf5_cannot_copy(tmp_path: Path) -> None:
    """Every object can be looked up, and H5Ocopy of HDF5 1.10.8 crashes."""
    (tmp_path / "old/parts").mkdir(parents=True)
    (tmp_path / "old/parts/trace.h5").write_bytes(unpacked("part_that_crashes_copies"))
    joined = kvreplay("merge", "out", "old", folder=tmp_path)
    assert joined.returncode in (0, 3), joined


def test_spans_whose_members_end_behind_them(tmp_path: Path, newer: bool) -> None:
    (tmp_path / "damaged.h5").write_bytes(unpacked("archive_whose_spans_overlap_their_end"))
    refused = kvreplay("info", "damaged.h5", folder=tmp_path)
    assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
    said = "cannot be opened: member type extends outside" if newer else "size of member "
    assert f"damaged.h5:/spans: {said}" in refused.stderr


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_as_a_trace_it_is_refused_before(damaged: Path, tmp_path: Path) -> None:
    refused = kvreplay("info", damaged, folder=tmp_path)
    assert refused.returncode == 3
    problem, remedy = refused.stderr.split("; ")
    assert problem.endswith(f"{damaged}: superblock version: expected 2 or 3, found 0")
    assert remedy == f"run kvreplay convert {damaged} -o NEW.h5\n"


@pytest.mark.parametrize("name", [*(path.name for path in DAMAGED), "part_that_crashes_copies.h5.gz"])
def test_conversion_survives_it(name: str, tmp_path: Path) -> None:
    """Only a child process reads it, and nothing is left of the new file."""
    data = (DAMAGED[0].parent / name).read_bytes()
    (tmp_path / "old.h5").write_bytes(gzip.decompress(data) if name.endswith(".gz") else data)
    refused = kvreplay("convert", "old.h5", "-o", "new.h5", folder=tmp_path)
    assert refused.returncode == 3 and "kvreplay: old.h5" in refused.stderr, refused
    assert [path.name for path in tmp_path.iterdir()] == ["old.h5"]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda path: path.stem)
def test_damaged_selections_are_refused_by_plots_and_reports(damaged: Path, run_folder: Path) -> None:
    shutil.copy(damaged, run_folder / "out/cells/a.h5")
    for words in (["plot", "heatmap", "out", "-o", "heatmap.png"], ["report", "out"]):
        refused = kvreplay(*words, folder=run_folder)
        assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
        assert "out/cells/a.h5" in refused.stderr


@pytest.mark.parametrize(
    ("elsewhere", "found"),
    [
        (lambda file: file.update({"cells/more": h5py.SoftLink("/traces")}), "link: .* found a soft link"),
        (lambda file: file.update({"cells/more": h5py.ExternalLink("b.h5", "/")}), "link: .* found an external link"),
        (
            lambda file: file.create_dataset("cells/more", (4,), "i4", external="/etc/passwd"),
            "layout: expected stored in this file, found other files",
        ),
        (
            lambda file: file.create_virtual_dataset("cells/more", h5py.VirtualLayout((4,), "i4")),
            "layout: expected stored in this file, found other files",
        ),
    ],
    ids=["soft link", "external link", "external storage", "virtual"],
)
def test_selections_that_lead_elsewhere(elsewhere: Callable[[h5py.File], object], found: str, run_folder: Path) -> None:
    with h5py.File(run_folder / "out/cells/a.h5", "r+") as file:
        elsewhere(file)
    refused = kvreplay("plot", "heatmap", "out", "-o", "heatmap.png", folder=run_folder)
    assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
    assert re.search(f"out/cells/a.h5:/cells/more: {found}$", refused.stderr.strip()), refused


@pytest.mark.parametrize(
    "storage",
    [{}, {"chunks": (2,)}, {"chunks": (2,), "compression": "gzip"}, "compact"],
    ids=["contiguous", "chunked", "deflated", "compact"],
)
def test_texts_of_any_length_that_nobody_reads(storage: dict[str, object] | str, tmp_path: Path) -> None:
    """Elements have another size in memory than in the file."""
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).returncode == 0
    kind, words = h5py.string_dtype(), ["one", "two", "three"]
    with h5py.File(tmp_path / "a.h5", "r+", libver=("v108", "v110")) as file:
        file.attrs.create("remark", words, dtype=kind)
        if isinstance(storage, dict):
            file.create_dataset("remarks", data=words, dtype=kind, **storage)
        else:
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((3,))
            made = h5py.h5d.create(file.id, b"remarks", h5py.h5t.py_create(kind, logical=True), space, dcpl=creation)
            h5py.Dataset(made)[:] = words
        file["links"] = [file["tokens"].ref] * 3
    sound = kvreplay("validate", "a.h5", folder=tmp_path)
    assert sound.returncode == 0, sound


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&- 2>&-", "<&- 2>&-", "<&-"])
@pytest.mark.parametrize("words", ["info", "validate --untrusted", "convert -o b.h5"])
def test_a_refusal_finds_its_way_whatever_is_closed(words: str, closed: str, tmp_path: Path) -> None:
    shutil.copy(DAMAGED[0], tmp_path / "a.h5")
    answer = subprocess.run(["bash", "-c", f'"{PROGRAM}" {words} a.h5 {closed}'], cwd=tmp_path, timeout=30)
    assert answer.returncode == (1 if "validate" in words else 3)


def test_a_trace_that_shrinks_while_it_is_replayed(tmp_path: Path) -> None:
    """At any moment: while it is opened and planned, and while layers are in use."""
    shape = "--layers 4 --query-heads 8 --kv-heads 2 --head-dim 64 --prompt 6000 --continuation 16".split()
    assert kvreplay("synth", "gaussian", "-o", "whole.h5", *shape, folder=tmp_path).returncode == 0
    whole = (tmp_path / "whole.h5").stat().st_size
    changed = f"a.h5: changed while it was read: expected {whole} bytes, found {whole // 2} bytes"
    words = "replay a.h5 -p h2o -b 0.1 -o".split()
    shutil.copy(tmp_path / "whole.h5", tmp_path / "a.h5")
    begun = time.monotonic()
    assert kvreplay(*words, "undisturbed", folder=tmp_path).returncode == 0
    duration = time.monotonic() - begun
    refusals = []
    for share in (0.0, 0.25, 0.5, 0.75):
        shutil.copy(tmp_path / "whole.h5", tmp_path / "a.h5")
        with subprocess.Popen(
            [PROGRAM, *words, "out"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as run:
            while not (tmp_path / "out").exists():
                time.sleep(0.005)
            time.sleep(share * duration)
            os.truncate(tmp_path / "a.h5", whole // 2)
            said = run.stderr.read()
        if run.returncode == 0:  # it had read all that it needs
            shutil.copy(tmp_path / "whole.h5", tmp_path / "a.h5")
            assert kvreplay("diff", "undisturbed", "out", folder=tmp_path).returncode == 0
        else:
            # 3: refused before anything began, 6: its cells failed.
            assert run.returncode in (3, 6), f"{run.returncode}: {said}"
            assert not list((tmp_path / "out").rglob("cells/*.h5"))
            refusals.append(said)
        shutil.rmtree(tmp_path / "out")
    assert any(changed in said for said in refusals), refusals
