"""Traces that plain h5py writes with its defaults: what is accepted, what `convert` rewrites, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from program import PROGRAM, done, kvreplay, start

from kvreplay.trace import Trace

SPAN = np.dtype([("name", h5py.string_dtype()), ("kind", h5py.string_dtype()), ("begin", "i8"), ("end", "i8")])
WIDER = {np.dtype(np.int32): np.int64, np.dtype(np.float64): np.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """original.h5, whose frequencies are numbers of a float32, and exported.h5, the same trace by h5py's defaults."""
    folder = tmp_path_factory.mktemp("converted")
    done("synth", "fixture", "-o", "original.h5", folder=folder)
    with h5py.File(folder / "original.h5", "r+") as file:
        file["model/rope/inv_freq"][...] = np.float32(file["model/rope/inv_freq"][...])
    export(folder / "original.h5", folder / "exported.h5")
    return folder


def export(original: Path, exported: Path) -> None:
    """Every string of variable length, integers of 64 bits, frequencies of 32, the oldest superblock."""

    def write(old: h5py.Group, new: h5py.Group) -> None:
        for name, value in old.attrs.items():
            new.attrs[name] = value.decode() if isinstance(value, bytes) else value
        for name, item in old.items():
            if isinstance(item, h5py.Group):
                write(item, new.create_group(name))
            elif name == "text":
                new[name] = item[()].decode()
            elif name == "spans":
                rows = [(row["name"].decode(), row["kind"].decode(), row["begin"], row["end"]) for row in item[()]]
                new[name] = np.array(rows, SPAN)
            else:
                new[name] = item[()].astype(WIDER.get(item.dtype, item.dtype))
                if "xxh3" in item.attrs:
                    new[name].attrs["xxh3"] = item.attrs["xxh3"].decode()

    with h5py.File(original) as old, h5py.File(exported, "w") as new:
        write(old, new)
        new["remarks"] = ["of no", "concern"]


def test_what_h5py_writes_is_converted_and_gives_the_same_numbers(folder: Path) -> None:
    answer = kvreplay("validate", "exported.h5", folder=folder)
    line = "superblock version: expected 2 or 3, found 0; run kvreplay convert exported.h5 -o NEW.h5"
    assert (answer.code, answer.out) == (1, f"exported.h5: invalid\n  exported.h5: {line}\n")
    assert kvreplay("replay", "exported.h5", "-p", "h2o", "-b", "6", folder=folder).err.endswith(f"{line}\n")

    (folder / "new").mkdir()
    assert done("convert", "exported.h5", "-o", "new/original.h5", folder=folder).startswith("new/original.h5  ")
    valid = done("validate", "--deep", "new/original.h5", folder=folder)
    assert "12 of 12 tensors match their hashes" in valid
    assert done("diff", "original.h5", "new/original.h5", folder=folder) == "equal\n"
    for trace, run in (("original.h5", "a"), ("new/original.h5", "b")):
        done("replay", trace, "-p", "h2o,snapkv:window=2,kernel=3", "-b", "6,9", "-o", run, folder=folder)
    assert done("diff", "a", "b", folder=folder) == "equal\n"
    with Trace(folder / "original.h5") as old, Trace(folder / "new/original.h5") as new:
        assert (new.text, new.spans) == (old.text, old.spans)
        for path in ("/tokens/ids", "/tokens/offsets", "/model/rope/inv_freq"):
            assert new[path].dtype == old[path].dtype and np.array_equal(new[path], old[path])
    with h5py.File(folder / "new/original.h5") as file:
        assert list(file["remarks"]) == [b"of no", b"concern"]


def test_wider_integers_and_narrower_floats_are_accepted_and_hashed_alike(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "original.h5", tmp_path / "wide.h5")
    with h5py.File(tmp_path / "wide.h5", "r+", libver=("v108", "v110")) as file:
        for path in ("tokens/ids", "tokens/offsets", "model/sliding_window", "model/layer_index", "model/rope/inv_freq",
                     "model/rope/attention_scaling"):  # fmt: skip
            values = file[path][()]
            del file[path]
            file[path] = values.astype(WIDER[values.dtype])
    done("validate", "wide.h5", folder=tmp_path)
    [wide] = json.loads(done("info", "--json", "--no-estimate", "wide.h5", folder=tmp_path))
    [original] = json.loads(done("info", "--json", "--no-estimate", "original.h5", folder=folder))
    assert wide["hash"] == original["hash"]
    with Trace(tmp_path / "wide.h5") as trace:
        assert trace["/tokens/ids"].dtype == np.int32 and trace["/model/rope/inv_freq"].dtype == np.float64


def test_strings_of_variable_length_are_reported_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "original.h5", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+", libver=("v108", "v110")) as file:
        file.attrs["producer"] = "an exporter"
        file["layers/000/k"].attrs["xxh3"] = "0" * 32
        del file["model"].attrs["dtype"], file["tokens/ids"]
    answer = kvreplay("validate", "a.h5", folder=tmp_path)
    found = "strings: expected strings of fixed length, found 2 of variable length, the first at /@producer"
    assert answer.out == f"a.h5: invalid\n  a.h5: {found}; run kvreplay convert a.h5 -o NEW.h5\n"

    refused = kvreplay("convert", "a.h5", "-o", "b.h5", folder=tmp_path)
    assert refused.code == 3 and [line.split(": ")[:3] for line in refused.err.splitlines()] == [
        ["kvreplay", "a.h5:/model@dtype", "missing attribute"],
        ["kvreplay", "a.h5:/tokens/ids", "missing"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def test_all_violations_are_listed_with_their_remedies(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "original.h5", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+", libver=("v108", "v110")) as file:
        del file.attrs["complete"], file["model"].attrs["softmax_scale"], file["layers/002"]
        file["model"].attrs["n_layers"] = 4.0
        for path, change in {
            "tokens/ids": lambda ids: ids.astype("i2"),
            "layers/001/v": lambda v: v[:, :, :3],
            "layers/003/q": np.float64,
        }.items():
            values = file[path][()]
            del file[path]
            file[path] = change(values)
        k = file["layers/000/k"][()]
        del file["layers/000/k"]
        file.create_dataset("layers/000/k", k.shape, k.dtype, chunks=(1, 16, 4))[0] = k[0]
    answer = kvreplay("validate", "--json", "a.h5", folder=tmp_path)
    [verdict] = json.loads(answer.out)
    assert answer.code == 1 and [problem.removeprefix("a.h5:") for problem in verdict["problems"]] == [
        "/@complete: missing attribute: expected integer, found none; "
        "write 1 (1 only after everything else was flushed)",
        "/model@n_layers: type: expected integer, found float64; write an integer (L)",
        "/model@softmax_scale: missing attribute: expected float, found none; "
        "write a float (z = softmax_scale * <q,k>)",
        "/tokens/ids: type: expected int32 or int64, found int16; "
        "write int32 [T] (token numbers, prompt and continuation)",
        "/layers/000/k: chunks: expected 2 written, found 1; write all of its elements",
        "/layers/001/v: shape: expected [2, 16, 4], found [2, 16, 3]; "
        "write float16, bfloat16 or float32 [Hkv, T, dv] (values, not repeated to query heads)",
        "/layers/002: missing: expected a group, found none; write the group and its members (traces/FORMAT.md)",
        "/layers/003/q: type: expected float16, bfloat16 or float32, found float64; "
        "write float16, bfloat16 or float32 [Hq, Tq, d] (queries after RoPE and QK norm)",
    ]


def test_convert_replaces_only_by_force(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "exported.h5", tmp_path / "a.h5")
    refused = kvreplay("convert", "a.h5", "-o", "a.h5", folder=tmp_path)
    assert (refused.code, refused.err.split(": ")[1:3]) == (3, ["a.h5", "exists"])
    assert (tmp_path / "a.h5").read_bytes() == (folder / "exported.h5").read_bytes()
    done("convert", "a.h5", "-o", "a.h5", "--force", folder=tmp_path)
    done("validate", "--deep", "a.h5", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def unwritten(file: h5py.File) -> None:
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", (2, 16, 4), "f2")


def chunk_missing(file: h5py.File) -> None:
    unwritten(file)
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", (2, 16, 4), "f2", chunks=(1, 16, 4))[0] = 1


def elsewhere(file: h5py.File) -> None:
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", (2, 16, 4), "f2", external="/etc/passwd")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (unwritten, "/layers/000/k: storage: expected 256 bytes, found none allocated"),
        (chunk_missing, "/layers/000/k: chunks: expected 2 written, found 1"),
        (elsewhere, "/layers/000/k: layout: expected stored in this file, found external files"),
        (lambda file: file.update({"again": file["model"]}), "/model: link: expected a group with one hard link"),
    ],
)
def test_convert_refuses(damage: Callable[[h5py.File], None], said: str, folder: Path, tmp_path: Path) -> None:
    """What would become zeros, or someone else's bytes."""
    shutil.copy(folder / "exported.h5", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        damage(file)
    refused = kvreplay("convert", "a.h5", "-o", "b.h5", folder=tmp_path)
    assert refused.code == 3 and refused.err.startswith(f"kvreplay: a.h5:{said}"), refused
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def big(folder: Path) -> None:
    """big.h5: an old superblock, and 64 MiB of an array that no trace has."""
    with h5py.File(folder / "big.h5", "w") as file:
        file.create_dataset("numbers", data=np.arange(1 << 24, dtype=np.int32), chunks=(1 << 10,), compression="gzip")


def test_convert_finds_the_disk_full(tmp_path: Path) -> None:
    big(tmp_path)
    limited = f"ulimit -f 8192; exec {PROGRAM} convert big.h5 -o new.h5"
    refused = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (5, "kvreplay: new.h5.partial: disk full\n")
    assert [path.name for path in tmp_path.iterdir()] == ["big.h5"]


def test_convert_can_be_interrupted(tmp_path: Path) -> None:
    big(tmp_path)
    process = start("convert", "big.h5", "-o", "new.h5", folder=tmp_path)
    while not (tmp_path / "new.h5.partial").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "kvreplay: big.h5: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["big.h5"]


def test_convert_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no trace")
    assert kvreplay("convert", "text.h5", folder=tmp_path).code == 2
    for name in ("text.h5", "missing.h5", "."):
        refused = kvreplay("convert", name, "-o", "b.h5", folder=tmp_path)
        assert refused.code == 3 and refused.err.startswith(f"kvreplay: {name}: "), refused
    assert [path.name for path in tmp_path.iterdir()] == ["text.h5"]
