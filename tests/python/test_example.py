"""The example trace is a valid part of the shipped trace, cut in the source folder or carried by a wheel."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from program import WITH_PYTHON, done, kvreplay

import kvreplay as kv
from kvreplay import example_trace

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    answer = kvreplay("example", "-o", "new/t.h5", folder=folder, env=WITH_PYTHON)
    command = "kvreplay replay new/t.h5 -p snapkv,h2o,chunkkv -b 0.1 -o out"
    assert (answer.code, answer.out, answer.err) == (0, f"trace    new/t.h5\nnext     {command}\n", ""), answer
    done(*command.split()[1:], folder=folder)
    return folder / "new/t.h5"


def test_it_is_a_valid_trace_of_at_most_ten_megabytes(trace: Path) -> None:
    assert trace.stat().st_size <= 10 * MEGABYTE
    said = done("validate", "--deep", trace, folder=trace.parent)
    assert "30 of 30 tensors match their hashes, RoPE checked in 10 layers" in said
    spans = [line.split()[1] for line in done("info", trace, folder=trace.parent).splitlines() if line[:4] == "span"]
    assert spans == ["context", "needle", "question", "answer"]


def test_its_layers_are_every_third_of_the_shipped_trace(trace: Path) -> None:
    with h5py.File(trace) as part, h5py.File(example_trace.SHIPPED) as whole:
        kept = list(part["model/layer_index"])
        assert kept == list(range(0, 30, 3))
        for place, layer in enumerate(kept):
            for name in ("q", "k", "v"):
                ours, theirs = part[f"layers/{place:03d}/{name}"], whole[f"layers/{layer:03d}/{name}"]
                assert ours.id.get_type() == theirs.id.get_type()
                np.testing.assert_array_equal(ours[()], theirs[()])
        np.testing.assert_array_equal(part["model/rope/inv_freq"][()], whole["model/rope/inv_freq"][kept])


def test_a_wheel_carries_it(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_trace, "SHIPPED", tmp_path / "no source folder")
    monkeypatch.setattr(example_trace, "PACKED", trace)
    assert example_trace.main(["-o", str(tmp_path / "t.h5")]) == 0
    assert (tmp_path / "t.h5").read_bytes() == trace.read_bytes()


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "t.h5").write_text("mine")
    answer = kvreplay("example", "-o", "t.h5", folder=tmp_path, env=WITH_PYTHON)
    synth = kvreplay("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    assert (answer.code, answer.err) == (synth.code, synth.err)
    assert (tmp_path / "t.h5").read_text() == "mine"
    assert kvreplay("example", "-o", "t.h5", "--force", folder=tmp_path, env=WITH_PYTHON).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]


def test_python_writes_the_same_file(trace: Path, tmp_path: Path) -> None:
    path = kv.example(tmp_path / "new/t.h5")
    assert path == tmp_path / "new/t.h5"
    assert done("diff", path, trace, folder=tmp_path) == "equal\n"
    with pytest.raises(kv.Error) as refused:
        kv.example(path)
    assert refused.value.exit_code == 3
    assert kv.example(path, force=True) == path
