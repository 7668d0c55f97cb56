"""What the program wrote of a cell, held against the reference: its sets and its numbers. A difference is an
AssertionError that says where."""

from __future__ import annotations

import dataclasses

import h5py
import numpy as np
import pandas as pd
import reference
import reference_metrics
from reference import Trace
from reference_selection import Selection, Verdict, row_count


def stored_selection(
    trace: Trace, ours: Selection, cell: h5py.Group, budget: str, where: str
) -> tuple[Selection, dict[str, np.ndarray]]:
    """The cell's sets in the terms of ours, and all its datasets."""
    attributes = dict(cell.attrs)
    datasets = {name: cell[name][:] for name in cell}
    heads = attributes["heads"]
    heads = heads.decode() if isinstance(heads, bytes) else heads
    assert heads == ours.heads, f"{where}: granularity {heads}, expected {ours.heads}"
    assert int(attributes["budget_tokens"]) in (
        reference.budget_tokens(budget, trace.prompt),
        min(trace.prompt, reference.budget_tokens(budget, trace.prompt)),
    ), where
    offsets, positions = datasets["offsets"], datasets["positions"]
    n_rows = row_count(trace, ours.heads)
    assert offsets.shape == (len(trace.layers) * n_rows + 1,), where
    assert offsets[0] == 0, where
    assert offsets[-1] == len(positions), where
    evicted_at = datasets.get("evicted_at")
    stored = [
        [positions[offsets[layer * n_rows + row] : offsets[layer * n_rows + row + 1]] for row in range(n_rows)]
        for layer in range(len(trace.layers))
    ]
    for layer, rows in enumerate(stored):
        for head, row in enumerate(rows):
            assert (np.diff(row) > 0).all(), f"{where}: layer {layer} head {head} is not ascending"
            assert layer in trace.treated or len(row) == 0, f"{where}: layer {layer} is not treated but has rows"
    rows = [stored[layer] for layer in trace.treated]
    if attributes.get("sets") in ("all", b"all"):
        assert all(len(row) == trace.prompt for layer in ours.rows for row in layer), where
        assert len(positions) == 0, where
        rows = ours.rows
    if evicted_at is not None:
        evicted_at = evicted_at[trace.treated]
    if ours.evicted_at is not None:
        assert evicted_at is not None, f"{where}: no evicted_at"
    return dataclasses.replace(ours, rows=rows, evicted_at=evicted_at), datasets


def compare_selections(
    trace: Trace, ours: Selection, theirs: Selection, datasets: dict[str, np.ndarray], where: str
) -> list[Verdict]:
    """What each decision of ours is to theirs, none of them wrong; layers reuse whose sets they say, and overlap so."""
    verdicts = []
    for decision in ours.decisions:
        verdicts.append(decision.verdict(theirs))
        found = "; ".join(str(theirs.rows[layer][row].tolist()) for layer, row in decision.places)
        assert verdicts[-1] != Verdict.WRONG, f"{where}: {decision.where}, found {found}"
    for layer, source in enumerate(ours.source):
        for row, kept in enumerate(theirs.rows[layer]):
            assert kept.tolist() == theirs.rows[source][row].tolist(), f"{where}: layer {layer} head {row}: reuse"
    sources = np.full(len(trace.layers), -1)
    sources[trace.treated] = np.array(trace.treated)[ours.source]
    assert datasets["layer_source"].tolist() == sources.tolist(), where
    for variant in ("first", "mean", "union"):
        expected = reference_metrics.jaccard_matrix(trace, theirs, variant)
        np.testing.assert_allclose(datasets[f"jaccard_{variant}"], expected, rtol=0, atol=1e-12, err_msg=where)
    return verdicts


def expected_rows(trace: Trace, measured: dict[tuple[str, str], reference_metrics.Values]) -> dict[tuple, float | None]:
    """Keyed as in results.csv: layer, head, metric, variant."""
    rows: dict[tuple, float | None] = {}
    for (metric, variant), values in measured.items():
        rows["all", "all", metric, variant] = values.all
        for index, layer in enumerate(trace.treated):
            number = str(trace.layers[layer].number)
            if values.layers is not None:
                rows[number, "all", metric, variant] = values.layers[index]
            if values.heads is not None:
                for head, value in enumerate(values.heads[index]):
                    rows[number, str(head), metric, variant] = value
    return rows


def compare_rows(
    where: str,
    expected: dict[tuple, float | None],
    frame: pd.DataFrame,
    tolerance: float = 1e-6,
    of_sums: float = 0.0,
) -> None:
    """Each expected row is there, none without a reference, and all values are equal: bytes exactly, others to the
    tolerance, relative above 1, those of outputs and of logits, which are sums in float32 that may nearly cancel, to
    their own where it is greater."""
    keys = list(zip(frame["layer"], frame["head"], frame["metric"], frame["variant"], strict=True))
    assert len(set(keys)) == len(keys), f"{where}: a row appears twice"
    missing = expected.keys() - set(keys)
    unknown = set(keys) - expected.keys()
    assert not missing, f"{where}: {len(missing)} rows are missing, the first is {min(missing)}"
    assert not unknown, f"{where}: {len(unknown)} rows without a reference, the first is {min(unknown)}"
    wanted = np.array([np.nan if expected[key] is None else expected[key] for key in keys], float)
    found = frame["value"].to_numpy(float)
    exact = np.array([key[2] == "kv_bytes" for key in keys])
    sums = np.array([key[2].startswith("output_") or key[3] == "logits" for key in keys])
    one_query = sums & np.array([key[3] == "worst" for key in keys])  # no mean takes its rounding away
    relative = np.where(one_query, max(of_sums, 4 * tolerance), np.where(sums, max(of_sums, tolerance), tolerance))
    allowed = np.where(exact, 1e-12 * wanted, relative * np.maximum(1, np.abs(wanted)))
    wrong = ~((np.abs(found - wanted) <= allowed) | (np.isnan(found) & np.isnan(wanted)))
    lines = [f"{key}: {f!r}, expected {w!r}" for key, f, w, bad in zip(keys, found, wanted, wrong, strict=True) if bad]
    assert not lines, (
        f"{where}: {len(lines)} of {len(keys)} values differ (layer, head, metric, variant)\n" + "\n".join(lines[:12])
    )


def compare_metrics(
    trace: Trace,
    theirs: Selection,
    choice: str,
    rows: pd.DataFrame,
    where: str,
    all_queries: bool = False,
    of_sums: float = 0.0,
) -> None:
    """Every number of a cell, `rows` of results.csv, against what the reference makes of the cell's own sets."""
    measured = reference_metrics.measure(trace, theirs, choice, all_queries)
    # moved keys and queries are rotated in float32: an angle of some hundred radians is known to 1e-5 at best
    compare_rows(where, expected_rows(trace, measured), rows, 1e-5 if theirs.moved else 1e-6, of_sums)
    one = rows.iloc[0]
    assert abs(float(one["kept_tokens"]) - reference_metrics.counts(theirs).mean()) <= 1e-9, where
    assert int(one["n_queries"]) == len(reference.eval_queries(trace, choice)), where
