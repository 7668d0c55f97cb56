"""Do queries see what a run contains?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from program import done

from kvreplay.results import Run
from kvreplay.sql import answer, main

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def run(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    paths = traces / "small.h5", traces / "sliding.h5"
    done(
        "replay",
        *paths,
        "-p",
        "snapkv,chunkkv,quest:least_pages=1",
        "-b",
        "0.2",
        "--save",
        "attention",
        "-o",
        "out",
        folder=folder,
    )
    return Run(folder / "out")


def test_results_have_types_and_every_row(run: Run) -> None:
    [row] = answer(run, "select count(*) as rows, sum(budget_tokens) as whole, bool_and(open_loop) as open from results"
                   ).to_dict("records")  # fmt: skip
    lines = (run.folder / "results.csv").read_text().splitlines()
    assert row["rows"] == len(lines) - 1
    assert row["open"] is True
    kinds = answer(run, "select typeof(value), typeof(seed), typeof(layer) from results limit 1")
    assert kinds.values.tolist() == [["DOUBLE", "UBIGINT", "VARCHAR"]]


def test_kept_tokens_are_those_of_the_selections(run: Run) -> None:
    rows = answer(run, "select label, trace, layer, head, list(position order by position) as positions from kept "
                  "join cells using (trace, cell) group by all order by all")  # fmt: skip
    for label, trace in {(row.label, row.trace) for row in rows.itertuples()}:
        selection = run.selection(label, "0.2", trace)
        mask = selection.mask()
        own = rows[(rows["label"] == label) & (rows["trace"] == trace)]
        assert sorted(set(own["layer"])) == selection.numbers.tolist()
        for row in own.itertuples():
            index = selection.numbers.tolist().index(row.layer)
            assert list(row.positions) == np.flatnonzero(mask[index, row.head]).tolist()
        assert len(own) == mask.shape[0] * mask.shape[1]
    assert {"snapkv", "chunkkv"} <= set(rows["label"])


def test_attention_above_epsilon(run: Run) -> None:
    found = answer(run, "select * from attention", epsilon=0.02)
    assert (found["attention"] >= 0.02).all()
    for trace in ("small", "sliding"):
        facts = run.trace(trace)
        for head in (None, 0, 5):
            rows = found[(found["trace"] == trace) & (found["head"].isna() if head is None else found["head"] == head)]
            count = sum(int((run.eval_attention(trace, layer, head) >= 0.02).sum()) for layer in facts.treated)
            assert len(rows) == count
    assert not len(answer(run, "select * from attention where trace = 'sliding' and layer = 1", epsilon=0.0))


def test_tokens_and_spans(run: Run) -> None:
    assert answer(
        run, "select trace, count(*), count_if(in_prompt) from tokens group by 1 order by 1"
    ).values.tolist() == [
        ["sliding", 162, 150],
        ["small", 162, 150],
    ]
    assert list(answer(run, "from spans").columns) == ["trace", "name", "kind", "first_token", "end_token"]


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    query = "select distinct label, budget from cells where label = 'snapkv'"
    assert main([query, str(run.folder), "--data", str(tmp_path / "rows.csv")]) == 0
    assert capsys.readouterr().out == "label   budget\nsnapkv  0.2\n"
    assert (tmp_path / "rows.csv").read_text() == "label,budget\nsnapkv,0.2\n"
    assert main([query, str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"label": "snapkv", "budget": "0.2"}]
    for wrong, cause in (("select valu from results", '"value"'), ("selec", "syntax error")):
        assert main([wrong, str(run.folder)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvreplay: QUERY: rejected: expected a query of DuckDB") and err.count("\n") == 1
        assert cause in err


def test_without_duckdb(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert main(["from cells", str(run.folder)]) == 4
    assert capsys.readouterr().err == "kvreplay: sql: duckdb is not installed; run pip install 'kvreplay[sql]'\n"
