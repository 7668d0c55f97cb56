"""Is skill (recall - twin) / (oracle - twin), of a policy and its own twin?"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from write_run import write_run

from kvreplay.results import Run


def recalls(*pairs: tuple[float, float]) -> dict[str, list[float]]:
    """Recall, and that of the best set, of each trace."""
    own, oracle = zip(*pairs, strict=True)
    return {"attention_recall": list(own), "attention_recall:oracle": list(oracle)}


def skill(run: Path) -> pd.Series:
    """Skill over layers and heads, by label and trace."""
    rows = Run(run).overall
    return rows[rows["metric"] == "skill"].set_index(["label", "trace"])["value"]


def test_numbers_by_hand(tmp_path):
    values = {
        "half": recalls((0.75, 1.0), (0.5, 0.75)),
        "random-twin:of=half,seed=0": recalls((0.5, 1.0), (0.25, 0.75)),
        "best:a=1": recalls((0.75, 0.75), (0.25, 0.25 + 5e-10)),
        "random-twin:of=(best:a=1),seed=0": recalls((0.5, 0.75), (0.25, 0.25 + 5e-10)),
        "worse": recalls((0.25, 1.0), (0.5, 1.0)),
        "random-twin:of=(worse),seed=0": recalls((0.5, 1.0), (0.5, 1.0)),
        "without": recalls((0.5, 1.0), (0.5, 1.0)),
        "random": recalls((0.1, 1.0), (0.1, 1.0)),
    }
    folder = write_run(tmp_path / "run", values, ["x", "y"])
    assert skill(folder).loc["half"].to_dict() == {"x": 0.5, "y": 0.5}
    assert skill(folder).loc[("best", "x")] == 1
    assert pd.isna(skill(folder).loc[("best", "y")])  # no set of these counts differs from the twin in recall
    assert skill(folder).loc["worse"].to_dict() == {"x": -0.5, "y": 0}
    assert set(skill(folder).index.get_level_values("label")) == {"half", "best", "worse"}

    run = Run(folder)
    assert run.fails_twin == {(trace, f"small/{trace}/worse/0.1") for trace in ("x", "y")}
    assert (run.better_of("skill"), run.unit_of("skill")) == ("higher", "ratio")
    pd.testing.assert_frame_equal(run.overall, Run(folder).results.query("layer == 'all'").reset_index(drop=True))
    some = run.rows(lambda rows: (rows["metric"] == "skill") & (rows["trace"] == "x") & (rows["layer"] == "all"))
    assert some.set_index("label")["value"].to_dict() == {"half": 0.5, "best": 1, "worse": -0.5}
    assert not (run.rows(lambda rows: rows["metric"] == "attention_recall")["metric"] == "skill").any()


def test_layers_have_their_own_skill(tmp_path):
    folder = write_run(tmp_path / "run", {
        "a": recalls((0.75, 1.0)), "random-twin:of=(a),seed=0": recalls((0.5, 1.0))}, ["x"])  # fmt: skip
    table = pd.read_csv(folder / "results.csv", dtype=str, keep_default_na=False)
    of_layer = table["layer"] == "0"
    for policy, variant, value in (("a", "", "0.5"), ("a", "oracle", "0.75"), ("random-twin", "", "0")):
        table.loc[of_layer & (table["policy"] == policy) & (table["variant"] == variant), "value"] = value
    one_head = table[of_layer].assign(head="1")
    pd.concat([table, one_head]).to_csv(folder / "results.csv", index=False)
    found = Run(folder).results
    found = found[found["metric"] == "skill"]
    assert dict(zip(found["layer"], found["value"], strict=True)) == {"0": pytest.approx(2 / 3), "all": 0.5}


@pytest.mark.parametrize("labels", [{}, {"b:chunk=10,heads=kv": "b", "b:chunk=20,heads=kv": "b:chunk=20"}])
def test_a_policy_has_the_twin_of_its_own_parameters(tmp_path, labels):
    values = {
        "b:chunk=10,heads=kv": recalls((0.5, 1.0)), "random-twin:of=(b),seed=0": recalls((0.0, 1.0)),
        "b:chunk=20,heads=kv": recalls((0.6, 1.0)), "random-twin:of=(b:chunk=20),seed=0": recalls((0.2, 1.0)),
        "c:counts=(b:chunk=20),seed=5": recalls((0.7, 1.0)),
        "random-twin:of=(c:counts=(b:chunk=20),seed=5),seed=0": recalls((0.4, 1.0)),
    }  # fmt: skip
    run = write_run(tmp_path / "run", values, ["x"], labels=labels)
    found = skill(run).droplevel("trace").round(12).to_dict()
    assert found == {"b:chunk=10": 0.5, "b:chunk=20": 0.5, "c": 0.5}


def test_a_variant_without_a_twin_does_not_take_the_twin_of_another(tmp_path):
    """Of `b` and `b:online=true` only `b` has a twin. What tells whose it is are the labels of run.json."""
    plain, online = "b:chunk=10,online=false", "b:chunk=10,online=true"
    values = {plain: recalls((0.5, 1.0)), online: recalls((0.6, 1.0)), "random-twin:of=(b),seed=0": recalls((0, 1.0))}
    run = write_run(tmp_path / "told", values, ["x"], labels={plain: "b", online: "b:online=true"})
    assert skill(run).droplevel("trace").to_dict() == {"b:online=false": 0.5}
    run = write_run(tmp_path / "half-told", values, ["x"], labels={online: "b:online=true"})
    assert skill(run).droplevel("trace").to_dict() == {"b:online=false": 0.5}
    assert skill(write_run(tmp_path / "untold", values, ["x"])).empty


def test_the_twin_is_of_the_same_budget_and_of_several_the_mean_counts(tmp_path):
    values = {"a": recalls((0.5, 1.0)), "random-twin:of=(a),seed=0": recalls((0.0, 1.0)),
              "random-twin:of=(a),seed=7": recalls((0.25, 1.0))}  # fmt: skip
    run = write_run(tmp_path / "run", values, ["x"], budgets=("0.1", "0.2"))
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    of_twin = (table["policy"] == "random-twin") & (table["budget"] == "0.2") & (table["variant"] == "")
    table.loc[of_twin & (table["params"] == "of=(a),seed=0"), "value"] = "0.25"
    table.to_csv(run / "results.csv", index=False)
    rows = Run(run).overall.query("metric == 'skill'")
    assert dict(zip(rows["budget"], rows["value"], strict=True)) == {"0.1": 3 / 7, "0.2": pytest.approx(1 / 3)}


def test_a_twin_that_failed_leaves_no_skill(tmp_path):
    values = {"a": recalls((0.5, 1.0)), "random-twin:of=(a),seed=0": recalls((0.0, 1.0))}
    run = write_run(tmp_path / "run", values, ["x"])
    about = (run / "run.json").read_text()
    failed = '"cells": [{"trace": "x", "cell": "small/x/random-twin:of=(a),seed=0/0.1", "state": "failed"}]'
    (run / "run.json").write_text(about.replace('"open_loop"', failed + ', "open_loop"'))
    assert skill(run).empty and Run(run).fails_twin == set()
