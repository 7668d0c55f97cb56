"""Does Parquet hold what results.csv holds?"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from program import done

from kvreplay import parquet
from kvreplay.errors import Error
from kvreplay.results import Run

TYPES = dict.fromkeys(parquet.WHOLE, "int64") | dict.fromkeys(parquet.REAL, "double")
TYPES |= dict.fromkeys(parquet.TRUTH, "bool") | {"seed": "uint64"}


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


@pytest.mark.parametrize("piece", [1 << 12, parquet.PIECE])
def test_every_row_and_type(run: Run, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    monkeypatch.setattr(parquet, "PIECE", piece)
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
        parquet.write_parquet(tmp_path / "results.csv", tmp_path / "out.parquet")
    with pytest.raises(Error, match="cannot be written"):
        run.write_parquet(tmp_path / "nowhere" / "out.parquet")
