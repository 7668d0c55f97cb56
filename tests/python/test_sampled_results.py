"""Estimates from samples of eval queries, in Python and in what reads a run."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from program import WITH_PYTHON, done, kvreplay

import kvreplay as kv

OPTIONS = {"controls": "none", "metrics": "attention_recall"}
WORDS = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def written(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results from 6 of the 12 eval queries."""
    folder = tmp_path_factory.mktemp("sampled")
    done("replay", small, "-p", "snapkv,h2o", "-b", "40", *WORDS, "--sample", "queries=6", "-o", "out", folder=folder)
    return folder / "out"


def test_a_run_in_memory_has_the_rows_of_the_folder(small: Path, written: Path) -> None:
    run = kv.replay(small, ["snapkv", "h2o"], 40, sample="queries=6", **OPTIONS)
    stored = kv.Run(written)
    pd.testing.assert_frame_equal(run.results, stored.results)
    assert (run.folder / "results.csv").read_bytes() == (written / "results.csv").read_bytes()
    for one in (run, stored):
        assert one.trace("small").sample == "6 of 12 eval queries"
        rows = one.overall.set_index(["policy", "metric"])
        assert set(rows["sample"]) == {"6 of 12 eval queries"}
        assert (rows.xs("attention_recall", level="metric")["half_width"] > 0).all()
        assert rows.xs("jaccard_adjacent", level="metric")["half_width"].isna().all()
        assert "ESTIMATE from 6 of 12 eval queries" in one.table() and " ± " in one.table()


def sampled_units(seed: int, name: str) -> tuple[int, ...]:
    """Eval queries of 44, in pairs. They attend equally to all tokens: (6 + i) / (21 + i) is the recall at i."""
    numbers = np.random.default_rng(seed).standard_normal((1, 1, 64, 8)).astype(np.float32)
    trace = kv.from_arrays(np.zeros_like(numbers), numbers, numbers, prompt=20, name=name)
    run = kv.replay(trace, "local", 5, sample="queries=8", **OPTIONS)
    with h5py.File(run.folder / "cells" / f"{name}.h5") as file:
        [cell] = file["by_query"].values()
        recall = cell["numbers"][0]
    units = np.rint((21 * recall - 6) / (1 - recall)).astype(int)
    np.testing.assert_allclose(recall, (6 + units) / (21 + units), rtol=1e-6)
    return tuple(units)


def test_pairs_are_of_one_stratum_of_the_ring() -> None:
    """docs/sampling.md: two of each of four parts of the ring, which is cut at some place."""
    units = np.array(sampled_units(0, "one"))
    places = np.where(units % 2 == 0, units // 2, 43 - units // 2)
    of_cuts = (places - np.arange(44)[:, None]) % 44 // 11
    assert (of_cuts == [0, 0, 1, 1, 2, 2, 3, 3]).all(axis=1).any(), units


def test_samples_differ_between_traces_and_not_between_runs() -> None:
    assert sampled_units(0, "one") == sampled_units(0, "two") != sampled_units(1, "one")


def test_all_kinds_of_samples_are_named(tmp_path: Path) -> None:
    shape = ["--layers", "4", "--query-heads", "8", "--kv-heads", "4", "--head-dim", "8", "--prompt", "90"]
    done("synth", "gaussian", "-o", "t.h5", *shape, folder=tmp_path)
    words = ["-p", "snapkv", "-b", "0.1", *WORDS, "--sample", "layers=2,heads=2"]
    done("replay", "t.h5", *words, "-o", "out", folder=tmp_path)
    run = kv.Run(tmp_path / "out")
    [sample] = set(run.results["sample"])
    assert sample == run.trace("t").sample == "2 of 4 layers, 2 of 4 KV heads"


def test_exact_runs_have_no_columns_of_samples(small: Path) -> None:
    run = kv.replay(small, "snapkv", 40, **OPTIONS)
    assert not {"sample", "half_width"} & set(run.results.columns)
    assert run.trace("small").sample == ""


def test_tables_of_types_have_the_half_width(written: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    kv.Run(written).write_parquet(tmp_path / "results.parquet")
    half_widths = parquet.read_table(tmp_path / "results.parquet")["half_width"].to_pandas()
    expected = pd.read_csv(written / "results.csv")["half_width"]
    np.testing.assert_array_equal(half_widths, expected)


def test_comparisons_and_pages_say_that_values_are_estimates(written: Path, tmp_path: Path) -> None:
    compared = kvreplay("compare", written, "--baseline", "snapkv", folder=tmp_path, env=WITH_PYTHON)
    assert compared.code == 0 and "estimates from samples: 6 of 12 eval queries of small" in compared.err
    answer = kvreplay("report", written, "-o", "page.html", folder=tmp_path, env=WITH_PYTHON)
    assert answer.code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    row = kv.Run(written).overall.query("policy == 'h2o' and metric == 'attention_recall'").iloc[0]
    assert "ESTIMATE from 6 of 12 eval queries" in page
    assert f"{row['value']:.3f} ± {row['half_width']:.3f}" in page
