"""`kvreplay predict`: correlations by definition, a metric that says everything, and one that says nothing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from kvreplay.errors import Error
from kvreplay.predict.agreement import in_order, kendall, prompts_needed, ranks, resolved, spearman
from kvreplay.predict.command import main
from kvreplay.predict.prediction import Measured, Prediction, over_layers, without_part
from kvreplay.predict.presentation import Presentation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks"))

from layer_weights import left_out_weights, with_weights  # noqa: E402

PROMPTS, POLICIES = 24, 12


def test_agreements_are_scipys() -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        a, b = generator.integers(0, 6, (2, 9)).astype(float)
        assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, nan_ok=True)
        assert kendall(a, b) == pytest.approx(scipy.stats.kendalltau(a, b).statistic, nan_ok=True)
        assert ranks(a).tolist() == scipy.stats.rankdata(a).tolist()


def test_pairs_in_order_by_hand() -> None:
    live = np.array([1.0, 2, 3, 3])
    # Five pairs differ live: (0,1) right, (0,2) right, (0,3) tie, (1,2) wrong, (1,3) wrong.
    assert in_order(np.array([1.0, 3, 2, 1]), live) == pytest.approx((1 + 1 + 0.5 + 0 + 0) / 5)
    assert math.isnan(in_order(np.array([1.0, 2]), np.array([1.0, 1])))


def test_no_order_no_correlation() -> None:
    assert math.isnan(spearman(np.ones(4), np.arange(4.0))) and math.isnan(kendall(np.arange(4.0), np.ones(4)))


def test_prompts_needed() -> None:
    """Policies a standard deviation of the noise apart: one prompt orders few pairs, many order nearly all."""
    generator = np.random.default_rng(2)
    live = np.arange(6.0) + 0.001 * generator.normal(size=(40, 6))
    assert prompts_needed(live, live, 0.95, 0) == (1, 1.0)
    noisy = live + 1.0 * generator.normal(size=live.shape)
    count, reached = prompts_needed(noisy, live, 0.95, 0)
    assert count is not None and 2 < count < 40 and reached >= 0.95
    count, reached = prompts_needed(generator.normal(size=live.shape), live, 0.95, 0)
    assert count is None and reached < 0.95


def test_only_resolved_pairs_count() -> None:
    """Two of three policies are equal but for noise: no offline metric could have them in order, and none has to."""
    generator = np.random.default_rng(3)
    live = np.array([0.0, 0.0, 1.0]) + 0.01 * generator.normal(size=(20, 3))
    live[:, 1] = live[::-1, 0]  # equal means
    assert resolved(live).tolist() == [False, True, True]
    offline = np.array([0.0, 0.0, 1.0]) + 0.0 * live
    assert prompts_needed(offline, live, 0.95, 0) == (1, 1.0)
    count, reached = prompts_needed(live[:, :2], live[:, :2], 0.95, 0)
    assert count is None and math.isnan(reached)


def prediction(seed: int) -> Prediction:
    """`exact` has the order of kld, `noise` none, `half` something between; two budgets, three kinds of prompts."""
    generator = np.random.default_rng(seed)
    quality = generator.normal(size=POLICIES)
    rows = []
    for prompt in range(PROMPTS):
        for budget, size in (("0.1", 2.0), ("0.3", 1.0)):
            for policy in range(POLICIES):
                kld = size * math.exp(quality[policy] + 0.3 * generator.normal())
                rows.append({
                    "prompt": prompt, "kind": f"kind{prompt % 3}", "budget": budget, "label": f"p{policy}",
                    "share": float(budget), "kld": kld, "exact": math.sqrt(kld), "noise": generator.normal(),
                    "half": math.log(kld) + 1.5 * generator.normal(), "output_error": size * generator.normal(),
                })  # fmt: skip
    return Prediction(pd.DataFrame(rows), ["exact", "half", "noise", "output_error"], ["kld"], 0, [])


def test_headline() -> None:
    lines = prediction(3).headline.set_index("offline")
    assert lines.loc["exact", ["spearman", "kendall", "in_order"]].tolist() == [1, 1, 1]
    assert lines.loc["noise", "spearman_low"] < 0 < lines.loc["noise", "spearman_high"]
    assert (
        0 < lines.loc["half", "spearman_low"] < lines.loc["half", "spearman"] < lines.loc["half", "spearman_high"] < 1
    )
    assert (lines["prompts"] == PROMPTS).all()


def test_noise_is_resolved_about_as_often_as_a_95_percent_interval_says() -> None:
    resolved = 0
    for seed in range(40):
        line = prediction(seed).headline.set_index("offline").loc["noise"]
        resolved += not line["spearman_low"] < 0 < line["spearman_high"]
    assert resolved <= 6  # expected: 2 or 3 of 40; more than 6 once in 50 times


def test_budgets_alone_make_a_correlation() -> None:
    """output_error here is noise times a size that falls with the budget: over budgets it seems to say something."""
    found = prediction(4)
    within = found.headline.set_index("offline")["spearman"]["noise"]
    assert abs(within) < 0.15
    over = found.over_budgets.set_index("offline")["spearman"]
    assert over["exact"] == pytest.approx(1) and over["half"] > found.headline.set_index("offline")["spearman"]["half"]


def test_tables_and_sentence() -> None:
    found = prediction(5)
    shown = Presentation(found, "kld")
    assert shown.best == "exact"
    assert "exact orders the policies most like kld: rank correlation 1.00" in shown.sentence()
    assert "better than output_error" in shown.sentence()
    difference, low, high = found.better_than("exact", "output_error")
    assert low > 0.5 and low < difference < high
    assert found.flipped("exact").empty
    kinds = found.left_out_kinds()
    assert kinds["kind"].tolist() == ["kind0", "kind1", "kind2"] and set(kinds["chosen"]) == {"exact"}
    assert found.needed("exact")["needed"].notna().all()
    document = json.loads(json.dumps(shown.document(), allow_nan=False))
    assert document["headline"][0]["offline"] == "exact" and document["prompts"] == PROMPTS
    text = shown.text()
    for piece in ("prompts   24 of 3 kinds", "held-out kind", "prompts to order 95 % of pairs", "across budgets"):
        assert piece in text
    assert len(shown.figure().axes) == 2


def measured(policies: int, **metrics: np.ndarray) -> Measured:
    """One prompt at one budget; metrics of which more is worse."""
    facts = {"prompt": 0, "kind": "a", "budget": "0.1", "budget_tokens": 10, "boundary": 100}
    labels = [f"p{i}" for i in range(policies)]
    cells = pd.DataFrame({**facts, "decisions": "after-prefill", "label": labels, **metrics})
    return Measured(cells, sorted({*metrics} - {"kld"}), ["kld"], dict.fromkeys(metrics, 1.0))


def test_one_prompt_resolves_nothing() -> None:
    kld = np.arange(5.0)
    found = Prediction.from_measured(measured(5, kld=kld, output_error=-kld, exact=kld, sinks=np.ones(5)))
    assert found.notes == ["omitted, because all policies have the same value: sinks"]
    shown = Presentation(found, "kld")
    assert shown.sentence().endswith("100 % of pairs in order; not resolved, since one prompt has no interval.")
    assert "nan" not in shown.text() and "sinks" not in shown.text()
    json.dumps(shown.document(), allow_nan=False)


def test_what_a_prediction_needs() -> None:
    kld = np.arange(4.0)
    with pytest.raises(Error, match="too few policies .*: expected 5 or more .*, found 4"):
        Prediction.from_measured(measured(4, kld=kld, exact=kld))
    found = Prediction.from_measured(measured(5, kld=np.ones(5), exact=np.arange(5.0)))
    with pytest.raises(Error, match="no order of the policies by kld"):
        Presentation(found, "kld").text()


def test_runs_without_live_results_are_refused_before_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cells").mkdir()
    for name in ("results.csv", "run.json"):
        (tmp_path / name).touch()  # reading it would be another error
    assert main([str(tmp_path)]) == 3
    expected = "nothing to predict: expected a run measured by kvreplay live RUN, found no live.csv"
    assert capsys.readouterr().err == f"kvreplay: {tmp_path}: {expected}\n"


def test_weights_of_layers_are_learnt_on_other_kinds() -> None:
    """Only the middle third says anything, so it takes all the weight; and a kind of which the other thirds are true
    has no say in its own weights."""
    found = prediction(7)
    noise = np.random.default_rng(0).normal(size=(2, len(found.cells)))
    thirds = {"m:lower-third": noise[0], "m:middle-third": found.cells["kld"], "m:upper-third": noise[1]}
    cells = found.cells.assign(**thirds)
    of_thirds = Prediction(cells, list(thirds), ["kld"], 0, [])
    weighted = left_out_weights(of_thirds, with_weights(of_thirds, "m"))
    assert [tuple(one) for one in weighted["weights"]] == [(0, 1, 0)] * 3
    assert weighted["spearman"].tolist() == weighted["best"].tolist() == [1, 1, 1]
    assert (weighted["equal"] < 0.9).all() and weighted["prompts"].sum() == PROMPTS
    other = cells["kind"] == "kind1"
    swapped = cells.assign(**{"m:middle-third": cells["m:middle-third"].where(~other, noise[0]),
                              "m:lower-third": cells["m:lower-third"].where(~other, cells["kld"])})  # fmt: skip
    of_thirds = Prediction(swapped, list(thirds), ["kld"], 0, [])
    weighted = left_out_weights(of_thirds, with_weights(of_thirds, "m")).set_index("kind")
    assert tuple(weighted.loc["kind1", "weights"]) == (0, 1, 0)
    assert abs(weighted.loc["kind1", "spearman"]) < 0.3 and weighted.loc["kind1", "best"] == 1


def test_flipped_pairs_are_listed() -> None:
    """An offline metric that is wrong about two policies, always."""
    found = prediction(6)
    cells = found.cells.assign(exact=found.cells["exact"] + 100 * (found.cells["label"] == "p0"))
    best = cells.groupby("label")["kld"].mean().idxmin()
    flipped = Prediction(
        cells.assign(exact=cells["exact"] + 1000 * (cells["label"] == best)), found.offline, ["kld"], 0, []
    )
    pairs = flipped.flipped("exact")
    assert len(pairs) and set(pairs["better live"][pairs["better live"] == best]) == {best}


def test_parts_of_layers() -> None:
    """Five treated layers 0, 2, 4, 6, 8: the upper half is the last two; thirds end at 1 and 3."""
    rows = pd.DataFrame({
        "trace_hash": "h", "cell": "c", "name": "m", "layer": ["0", "2", "4", "6", "8", "all"],
        "value": [1.0, 2, 4, 8, 16, 6.2],
    })  # fmt: skip
    parts = pd.concat(over_layers(rows, ["trace_hash", "cell"])).set_index("name")["value"]
    assert parts["m:lower-half"] == pytest.approx(7 / 3) and parts["m:upper-half"] == 12
    assert [parts[f"m:{part}-third"] for part in ("lower", "middle", "upper")] == [1, 3, 12]
    assert without_part("output_error:pooled:upper-half") == "output_error:pooled" and without_part("m:p99") == "m:p99"
