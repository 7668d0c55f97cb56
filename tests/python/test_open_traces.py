"""Is what Python sees of a trace what lies in the file, without a copy?"""

from __future__ import annotations

import gc
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from program import done, kvreplay

import kvreplay as kv

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def stored(path: Path, name: str) -> np.ndarray:
    with h5py.File(path) as file:
        return file[name][()]


@pytest.mark.parametrize("kind", ["gaussian", "integer", "needle"])
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_are_those_of_the_file(dtype: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.h5"
    done("synth", kind, "-o", path, "--dtype", dtype, "--prompt", "40", "--layers", "2", folder=tmp_path)
    trace = kv.open(path)
    assert trace.dtype == dtype
    for layer in range(2):
        for name in "qkv":
            view = getattr(trace, name)(layer)
            assert view.dtype == TYPES[dtype]
            wanted = stored(path, f"layers/{layer:03}/{name}")
            assert view.shape == wanted.shape
            # h5py knows no bfloat16: it reads the type of FORMAT.md as float32, which holds every bfloat16.
            assert (view.astype(np.float32) == wanted.astype(np.float32)).all()


def test_tensors_are_not_copied_and_cannot_be_written(small: Path) -> None:
    trace = kv.open(small)
    one, other = trace.k(1), trace.k(1)
    assert np.shares_memory(one, other) and not np.shares_memory(one, trace.v(1))
    assert not one.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        one[0, 0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        one.flags.writeable = True


def test_a_tensor_outlives_its_trace(small: Path) -> None:
    keys = kv.open(small).k(2)
    gc.collect()
    assert (keys == stored(small, "layers/002/k")).all()


def archived(path: Path, made: Path) -> None:
    """The same trace, its tensors chunked and compressed."""
    with h5py.File(path) as old, h5py.File(made, "w", libver=("v108", "v110")) as new:
        new.attrs.update(old.attrs)
        for name in ("model", "tokens", "spans"):
            old.copy(name, new)
        for layer in old["layers"]:
            for name in "qkv":
                tensor = old[f"layers/{layer}/{name}"]
                copy = new.create_dataset(f"layers/{layer}/{name}", data=tensor[()], chunks=True, compression="gzip")
                copy.attrs.update(tensor.attrs)


def test_an_archive_reads_as_the_mapped_file_does(small: Path, tmp_path: Path) -> None:
    archived(small, tmp_path / "archive.h5")
    trace, plain = kv.open(tmp_path / "archive.h5"), kv.open(small)
    assert trace.hash == plain.hash
    keys = trace.k(0)
    assert not keys.flags.writeable
    trace.k(1)  # another layer does not take the place of the first
    del trace
    gc.collect()
    assert (keys == plain.k(0)).all()


def test_the_header_is_that_of_the_file(small: Path) -> None:
    trace = kv.open(small)
    facts = (trace.name, trace.layers, trace.query_heads, trace.kv_heads, trace.head_dim, trace.prompt, trace.tokens)
    assert facts == ("small", 3, 6, 2, 16, 150, 162)
    assert trace.path == small and trace.synthetic and trace.model == stored_attribute(small, "model", "name")
    assert trace.text.encode() == stored(small, "tokens/text")
    assert [(name, kind, begin, end) for name, kind, begin, end in trace.spans] == [
        (name.decode(), kind.decode(), begin, end) for name, kind, begin, end in stored(small, "spans")
    ]
    assert "P 150 + G 12" in repr(trace)
    assert {"q", "layers", "spans"} <= set(dir(trace))


def stored_attribute(path: Path, group: str, name: str) -> object:
    with h5py.File(path) as file:
        found = file[group].attrs[name]
    return found.decode() if isinstance(found, bytes) else found


def test_tokens_are_those_of_the_file(small: Path) -> None:
    trace = kv.open(small)
    assert (trace.ids == stored(small, "tokens/ids")).all()
    assert (trace.offsets == stored(small, "tokens/offsets")).all()


def test_positions_of_stored_queries(small: Path, tmp_path: Path) -> None:
    assert len(kv.open(small).query_positions(0)) == 0  # all are there
    done("synth", "gaussian", "-o", "last.h5", "--prompt", "40", "--queries", "last:8", folder=tmp_path)
    trace = kv.open(tmp_path / "last.h5")
    assert (trace.query_positions(1) == stored(tmp_path / "last.h5", "layers/001/q_positions")).all()
    assert trace.q(1).shape[1] == len(trace.query_positions(1))


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there_is_refused(layer: int, small: Path) -> None:
    trace = kv.open(small)
    for ask in (trace.q, trace.layer):
        with pytest.raises(kv.Error, match=rf"layer: expected 0\.\.2, found {layer}"):
            ask(layer)


def damaged(small: Path, folder: Path) -> list[Path]:
    """Files that are no trace, each for a reason of its own."""
    (folder / "text.h5").write_text("no HDF5")
    whole = small.read_bytes()
    (folder / "short.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "shape.h5").write_bytes(whole)
    with h5py.File(folder / "shape.h5", "r+") as file:
        del file["layers/001/v"]
        file["layers/001/v"] = np.zeros((2, 5, 16), np.float32)
    (folder / "newer.h5").write_bytes(whole)
    with h5py.File(folder / "newer.h5", "r+") as file:
        file.attrs["version"] = np.int32(99)
    return [folder / name for name in ("text.h5", "short.h5", "shape.h5", "newer.h5", "missing.h5")]


def test_bad_files_are_refused_as_by_the_program(small: Path, tmp_path: Path) -> None:
    for path in damaged(small, tmp_path):
        answer = kvreplay("info", path, folder=tmp_path)
        with pytest.raises(kv.Error) as refused:
            kv.open(path)
        assert (
            refused.value.exit_code,
            f"kvreplay: {refused.value}\n",
        ) == (answer.code, answer.err), path
        assert answer.err.count("\n") == 1


def test_objects_are_asked_for_by_their_paths(tmp_path: Path) -> None:
    done("synth", "gaussian", "--queries", "last:6", "-o", "last.h5", folder=tmp_path)
    with kv.open(tmp_path / "last.h5") as trace:
        assert "/layers/000/q_positions" in trace and len(trace["/layers/000/q_positions"]) == 6
        for nothing in ("/nonsense", "/tokens", "/layers/000", "/layers/999/k", "/layers/000/k@xxh3"):
            assert nothing not in trace


def test_a_folder_of_a_run_is_opened_with_run(small: Path, tmp_path: Path) -> None:
    done("replay", small, "-p", "knorm", "-b", "0.5", "-o", tmp_path / "run", folder=tmp_path)
    with pytest.raises(kv.Error, match=r"run: a run and not a trace: expected kv\.Run\('.*run'\)"):
        kv.open(tmp_path / "run")
