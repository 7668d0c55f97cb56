"""Do exported tables hold what results.csv holds, and selections.h5 what the files of cells hold?"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from program import WITH_PYTHON, done, kvreplay

from kvreplay import export
from kvreplay.errors import Error
from kvreplay.results import Run
from kvreplay.trace import Trace
from kvreplay.trace_card import facts

TYPES = dict.fromkeys(export.WHOLE, "int64") | dict.fromkeys(export.REAL, "double")
TYPES |= dict.fromkeys(export.TRUTH, "bool") | {"seed": "uint64"}


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    done("replay", small, "-p", "snapkv", "-b", "0.2", "--seed", str(2**64 - 1), "--detail", "head", "-o", "out",
         folder=folder)  # fmt: skip
    return Run(folder / "out")


def read(text: str, kind: str) -> object:
    if kind == "string":
        return text
    if text == "":
        return None
    return text == "true" if kind == "bool" else float(text) if kind == "double" else int(text)


def exported(run: Run, path: Path) -> Path:
    answer = kvreplay("export", run.folder, "-o", path, folder=path.parent, env=WITH_PYTHON)
    assert (answer.code, answer.out, answer.err) == (0, f"{path}\n", ""), answer
    return path


@pytest.mark.parametrize("piece", [1 << 12, export.PIECE])
def test_every_row_and_type(run: Run, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    monkeypatch.setattr(export, "PIECE", piece)
    run.write_parquet(tmp_path / "results.parquet")
    table = stored.read_table(tmp_path / "results.parquet")
    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert table.column_names == header
    kinds = [str(table.schema.field(name).type) for name in header]
    assert dict(zip(header, kinds, strict=True)) == {name: TYPES.get(name, "string") for name in header}
    expected = [[read(text, kind) for text, kind in zip(row, kinds, strict=True)] for row in rows]
    assert [list(row.values()) for row in table.to_pylist()] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["results.parquet"]


def test_without_pyarrow(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Error, match=r"Parquet: not installed: expected pip install pyarrow") as refused:
        run.write_parquet(tmp_path / "results.parquet")
    assert refused.value.exit_code == 4


def test_a_damaged_table(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    (tmp_path / "results.csv").write_text("trace,value\na,1\nb,two\n")
    with pytest.raises(Error, match=r"results\.csv: unreadable"):
        export.write_table(tmp_path / "results.csv", tmp_path / "out.parquet")
    with pytest.raises(Error, match="cannot be written"):
        run.write_parquet(tmp_path / "nowhere" / "out.parquet")


def test_arrow_and_parquet_hold_the_same_table(run: Run, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="tables with types need pyarrow")
    from pyarrow import parquet

    with pa.ipc.open_file(exported(run, tmp_path / "results.arrow")) as file:
        table = file.read_all()
    assert table.num_rows > 100 and table.equals(parquet.read_table(exported(run, tmp_path / "results.parquet")))


def test_csv_is_the_table_of_the_run(run: Run, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "all.csv").read_bytes() == (run.folder / "results.csv").read_bytes()


def objects(file: h5py.File) -> dict[str, object]:
    """By name, of traces and cells: attributes, and values of datasets."""
    found: dict[str, object] = {}
    for kind in ("traces", "cells"):
        file[kind].visititems(lambda name, item, kind=kind: found.update({f"{kind}/{name}": item}))
    return found


def test_selections_are_those_of_format_1(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        done("synth", "sinks", "-o", f"{name}.h5", "--seed", str(seed), "--prompt", "40", folder=tmp_path)
    words = ["-p", "h2o:recent=4,h2o-online", "-b", "9", "--save", "scores", "-o", "out"]
    done("replay", "one.h5", "two.h5", *words, folder=tmp_path)
    run = Run(tmp_path / "out")
    with h5py.File(exported(run, tmp_path / "selections.h5")) as file:
        assert (file.attrs["format"], file.attrs["version"]) == (b"kvselections", 1)
        joined = objects(file)
        apart = objects(run.cells_file("one")) | objects(run.cells_file("two"))
        assert joined.keys() == apart.keys() and any("evicted_at" in name for name in joined)
        for name, item in joined.items():
            assert item.attrs.keys() == apart[name].attrs.keys()
            if isinstance(item, h5py.Dataset):
                assert item.dtype == apart[name].dtype
                np.testing.assert_array_equal(item[()], apart[name][()])


def test_what_cannot_be_exported_is_refused(run: Run, small: Path, tmp_path: Path) -> None:
    for words, code, said in (
        (
            [run.folder, "-o", "out.xlsx"],
            2,
            "-o: unknown file format: expected a name ending in .parquet, .arrow, .csv, .h5 or .md",
        ),
        ([run.folder, "-o", "nowhere/out.h5"], 3, "nowhere/out.h5: cannot be written"),
        ([tmp_path, "-o", "out.h5"], 3, "not a finished run"),
        ([small, "-o", "out.csv"], 2, "-o: unknown file format: expected a name ending in .parquet, .arrow or .md"),
        ([run.folder, small, "-o", "out.md"], 2, "RUN: inputs: expected one run, or traces (.h5), found 2"),
        ([run.folder, "-o", run.folder], 3, "exists: expected the name of a new folder, found a folder"),
    ):
        answer = kvreplay("export", *words, folder=tmp_path, env=WITH_PYTHON)
        assert answer.code == code and said in answer.err and answer.err.count("\n") == 1, answer
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_of_a_run_is_loaded_by_its_owner(run: Run, small: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = exported(run, tmp_path / "published")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "results.parquet", "traces.parquet"]

    def loaded(*words: str, **files: str) -> list[dict]:
        return list(datasets.load_dataset(*words, **files, split="train", cache_dir=str(tmp_path / "cache")))

    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = loaded(str(folder), "results")
    assert [(row["cell"], row["metric"], row["value"]) for row in found] == [
        (row["cell"], row["metric"], read(row["value"], "double")) for row in rows
    ]
    [of_trace] = loaded(str(folder), "traces")
    trace = Trace(small)
    assert of_trace == facts(trace, with_text=True)
    assert (of_trace["prompt_tokens"], of_trace["layer_index"], of_trace["ids"]) == (150, [0, 1, 2], trace.ids.tolist())

    answer = kvreplay("export", small, "--no-text", "-o", "t.arrow", "-q", folder=tmp_path, env=WITH_PYTHON)
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert loaded("arrow", data_files=str(tmp_path / "t.arrow")) == [facts(trace, with_text=False)]


def test_the_card_names_model_revision_prompts_and_licence(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "traces" / "smollm2-135m-needle.h5"
    words = [shipped, "-o", "card.md", "--licence", "apache-2.0"]
    assert kvreplay("export", *words, folder=tmp_path, env=WITH_PYTHON).code == 0
    card = (tmp_path / "card.md").read_text(encoding="utf-8")
    weights = Trace(shipped)["/model@source_hash"]
    assert card.startswith('---\nlicense: "apache-2.0"\ntags: [kv-cache, attention]\n---\n')
    assert f"| SmolLM2-135M-Instruct | {weights} | LlamaForCausalLM | bfloat16 |" in card
    assert "needle [257, 276), question [465, 474)" in card
    assert "    Notes for whoever keeps the station at Gull Sound this winter\n" in card
    assert card.endswith("## Licence\n\napache-2.0\n")
    assert kvreplay("export", shipped, "--no-text", "-o", "bare.md", folder=tmp_path, env=WITH_PYTHON).code == 0
    bare = (tmp_path / "bare.md").read_text(encoding="utf-8")
    assert "Gull Sound" not in bare and "The text is not included." in bare and "Not stated: model" in bare
