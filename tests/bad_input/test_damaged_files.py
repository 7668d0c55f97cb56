"""Files that crash HDF5, keep it busy or make it ask for all memory are refused, with exit code 3.

`damaged/` holds files that were made with h5py in the oldest format, variable-length strings among their contents, and
got a few other bytes: HDF5 1.10.8 reads behind a chunk of one, and asks for some GiB at the other. 1.14.5 stands both.
"""

import gzip
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

import kvreplay as kv
from kvreplay._engine import walk_in_child

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()
DAMAGED = sorted((Path(__file__).parent / "damaged").glob("*.h5"))
FOUND = {
    "exhausts_memory": ": damaged: expected an HDF5 file that the library can walk, found ",
    "crashes_hdf5": ":/c: size: expected 2621640 bytes, found 200 bytes",
}
FOUND_BY_NEWER = ":/c: cannot be read: "


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
def test_a_part_that_hdf5_cannot_survive_is_refused(damaged: Path, run_folder: Path, newer: bool) -> None:
    shutil.copy(damaged, run_folder / "out/parts/a.h5")
    refused = kvreplay("replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=run_folder)
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    assert f"out/parts/a.h5{FOUND_BY_NEWER if newer else FOUND[damaged.stem]}" in refused.stderr


def test_a_part_whose_cells_hdf5_cannot_copy(tmp_path: Path) -> None:
    """Every object can be looked up, and H5Ocopy of HDF5 1.10.8 crashes."""
    part = unpacked("part_that_crashes_copies")
    assert kvreplay("synth", "fixture", "-o", "trace.h5", folder=tmp_path).returncode == 0
    (tmp_path / "out/parts").mkdir(parents=True)
    (tmp_path / "out/parts/trace.h5").write_bytes(part)
    words = "replay trace.h5 -p h2o -b 6 --metrics attention_recall -o out".split()
    went_on = kvreplay(*words, folder=tmp_path)
    assert went_on.returncode in (0, 3), went_on


@pytest.mark.parametrize(
    ("name", "said", "by_newer"),
    [
        (
            "selections_of_sizeless_elements",
            "type: expected elements of at least a byte, found of none",
            "cannot be opened: invalid datatype size",
        ),
        (
            "selections_of_odd_integers",
            "type: expected integers or floats of 8 to 64 bits, found numbers of other bits",
            "cannot be opened: precision is zero",
        ),
    ],
)
def test_selections_of_types_that_nobody_writes(
    name: str, said: str, by_newer: str, tmp_path: Path, newer: bool
) -> None:
    (tmp_path / "damaged.h5").write_bytes(unpacked(name))
    refused = kvreplay("diff", "damaged.h5", "damaged.h5", folder=tmp_path)
    assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
    assert refused.stderr.endswith(f": {by_newer if newer else said}\n")


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
def test_selections_that_hdf5_cannot_survive_are_refused_by_plots_and_reports(damaged: Path, run_folder: Path) -> None:
    shutil.copy(damaged, run_folder / "out/selections.h5")
    for words in (["plot", "heatmap", "out", "-o", "heatmap.png"], ["report", "out"]):
        refused = kvreplay(*words, folder=run_folder)
        assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
        assert f"out/selections.h5{FOUND[damaged.stem]}" in refused.stderr


@pytest.mark.parametrize(
    ("options", "stored", "found"),
    [
        ({"compression": "gzip"}, zlib.compress(bytes(40)), "size: expected 80 bytes, found 40 bytes"),
        ({"compression": "gzip"}, zlib.compress(bytes(120)), "size: expected 80 bytes, found 81 bytes"),
        ({"compression": "gzip", "shuffle": True}, b"nothing deflated", "size: expected 80 bytes, found 0 bytes"),
        ({"shuffle": True}, bytes(40), "size: expected 80 bytes, found 40 bytes"),
    ],
    ids=["deflated", "longer", "no deflate", "shuffled"],
)
def test_chunks_that_are_shorter_than_their_elements(
    options: dict[str, object], stored: bytes, found: str, run_folder: Path
) -> None:
    """HDF5 (1.10.8, 1.14.4, 2.0.0) reads on behind them."""
    with h5py.File(run_folder / "out/selections.h5", "r+") as file:
        file.create_dataset("cells/sparse", (40, 10), "i8", chunks=(5, 10), **options)
        more = file.create_dataset("cells/more", (4, 10), "i8", chunks=(1, 10), **options)
        more[:3] = 7
    walk_in_child(run_folder / "out/selections.h5")
    with h5py.File(run_folder / "out/selections.h5", "r+") as file:
        file["cells/more"].id.write_direct_chunk((1, 0), stored)
    for words in (["plot", "heatmap", "out", "-o", "heatmap.png"], ["diff", "out/selections.h5", "out/selections.h5"]):
        refused = kvreplay(*words, folder=run_folder)
        assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
        assert refused.stderr.endswith(f"out/selections.h5:/cells/more: {found}\n"), refused


@pytest.mark.parametrize(
    ("elsewhere", "found"),
    [
        (lambda file: file.update({"cells/more": h5py.SoftLink("/traces")}), "link: .* found a soft link"),
        (lambda file: file.update({"cells/more": h5py.ExternalLink("b.h5", "/")}), "link: .* found a link out of it"),
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
    with h5py.File(run_folder / "out/selections.h5", "r+") as file:
        elsewhere(file)
    refused = kvreplay("plot", "heatmap", "out", "-o", "heatmap.png", folder=run_folder)
    assert refused.returncode == 3 and refused.stderr.count("\n") == 1, refused
    assert re.search(f"out/selections.h5:/cells/more: {found}$", refused.stderr.strip()), refused


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
def test_a_refusal_finds_its_way_whatever_is_closed(closed: str, tmp_path: Path) -> None:
    shutil.copy(DAMAGED[0], tmp_path / "a.h5")
    command = f'"{PROGRAM}" diff a.h5 a.h5 {closed}'
    with h5py.File(tmp_path / "a.h5", "w", libver=("v108", "v110")) as file:
        more = file.create_dataset("more", (4, 10), "i8", chunks=(1, 10), compression="gzip")
        more.id.write_direct_chunk((1, 0), b"nothing deflated")
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=30, capture_output=True).returncode == 3


def test_names_that_are_longer_than_a_line_and_no_text(tmp_path: Path) -> None:
    """In the program, and in Python, whose errors are texts."""
    with h5py.File(tmp_path / "a.h5", "w", libver=("v108", "v110")) as file:
        name = b"\xff" + b"n" * 5000
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((10,))
        creation.set_deflate(1)
        kind, space = h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((10,))
        h5py.h5d.create(file.id, name, kind, space, dcpl=creation).write_direct_chunk((0,), b"nothing deflated")
    refused = kvreplay("diff", "a.h5", "a.h5", folder=tmp_path)
    assert refused.returncode == 3 and refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("n: size: expected 40 bytes, found 0 bytes\n")
    with pytest.raises(kv.Error, match="n: size: expected 40 bytes, found 0 bytes$") as error:
        kv.Trace(tmp_path / "a.h5")
    assert error.value.exit_code == 3


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
            assert not list((tmp_path / "out").rglob("parts/*.h5"))
            refusals.append(said)
        shutil.rmtree(tmp_path / "out")
    assert any(changed in said for said in refusals), refusals


def test_what_the_child_cannot_open_is_not_walked(run_folder: Path) -> None:
    """Another HDF5 than the engine's may open it: here the child has no descriptor left."""
    path = run_folder / "out/selections.h5"
    with h5py.File(path, "r+") as file:
        file["cells/more"] = h5py.SoftLink("/traces")
    script = """
import os, resource, sys
from kvreplay.errors import Error
from kvreplay.hdf5_file import open_to_read
from kvreplay._engine import walk_in_child
import h5py.h5p, kvreplay.trace
taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(walk_in_child(sys.argv[1]))
try:
    open_to_read(sys.argv[1])
except Error as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, cwd=run_folder)
    assert done.stdout.startswith("False\n") and "a soft link" in done.stdout, done


def test_a_file_is_walked_again_when_it_has_changed(tmp_path: Path) -> None:
    def pages_of_children() -> int:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt

    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["numbers"] = range(1000)
    whole = path.read_bytes()
    time.sleep(2.1)  # what has just changed is not remembered
    before = pages_of_children()
    walk_in_child(path)
    walked_once = pages_of_children()
    walk_in_child(path)
    assert before < walked_once == pages_of_children()
    damaged = bytearray(whole)
    damaged[whole.index(b"TREE") : whole.index(b"TREE") + 4] = b"LEAF"
    path.write_bytes(damaged)
    with pytest.raises(kv.Error, match="cannot be"):
        walk_in_child(path)
