"""Are the statistics over traces what SciPy, enumeration and a hand say?"""

from __future__ import annotations

from math import comb

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvreplay.compare import statistics
from kvreplay.compare.statistics import cluster_sums, holm, joined, mean_intervals, paired, sign_flip_p


def column(values: list[float], cluster: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Cluster sums and counts of one column of values; each value its own cluster if nothing is said."""
    places = np.arange(len(values)) if cluster is None else np.array(cluster)
    return cluster_sums(np.array(values, dtype=float)[:, None], places)


def test_sums_of_clusters_leave_undefined_values_out():
    sums, counts = cluster_sums(np.array([[1, np.nan], [2, 5], [4, np.nan]]), np.array([1, 0, 1]))
    np.testing.assert_array_equal(sums, [[2, 5], [5, 0]])
    np.testing.assert_array_equal(counts, [[1, 1], [2, 0]])


def test_sign_flips_by_hand():
    """Three differences 1, 2, 4: of the eight sums only +7 and -7 are as far from 0 as 7."""
    assert sign_flip_p(*column([1, 2, 4]), seed=0) == [2 / 8]
    assert sign_flip_p(*column([-1, 2, 4]), seed=0) == [4 / 8]  # ±7 and ±5 reach 5
    assert sign_flip_p(*column([3, 3]), seed=0) == [1 / 2]
    assert sign_flip_p(*column([0, 0, 0]), seed=0) == [1]
    assert sign_flip_p(*column([2, -2]), seed=0) == [1]
    assert sign_flip_p(*column([5]), seed=0) == [1]
    assert np.isnan(sign_flip_p(*column([np.nan]), seed=0)).all()


def test_traces_of_one_prompt_flip_together():
    """1, 2 of one prompt and 4 of another: sums ±3 ±4, so 7 is reached by two of four."""
    assert sign_flip_p(*column([1, 2, 4], [0, 0, 1]), seed=0) == [2 / 4]


def test_sums_that_only_rounding_tells_apart_are_equal():
    """Signs ±0.1 ±0.2 ±0.3: 0.1 + 0.2 - 0.3 and its opposite are 0 as 0.3 - 0.1 - 0.2 is; all eight reach 0."""
    assert sign_flip_p(*column([0.1, 0.2, -0.3]), seed=0) == [1]


@pytest.mark.parametrize("clustered", [False, True])
def test_exact_sign_flips_are_those_of_scipy(clustered):
    random = np.random.default_rng(1)
    values = random.normal(0.3, 1, 11)
    cluster = random.integers(0, 6, 11) if clustered else np.arange(11)
    cluster = np.unique(cluster, return_inverse=True)[1]
    sums = pd.Series(values).groupby(cluster).sum().to_numpy()
    found = sign_flip_p(*column(list(values), list(cluster)), seed=0)
    theirs = stats.permutation_test((sums,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert found == pytest.approx(theirs.pvalue, rel=1e-12)


def test_many_clusters_are_counted_at_random_near_the_exact_share():
    """20 differences of 1, five of them negative: |sum| = 10 is reached by the tails of a binomial distribution."""
    exact = 2 * sum(comb(20, n) for n in range(0, 6)) / 2**20
    values = [1.0] * 15 + [-1.0] * 5
    found = sign_flip_p(*column(values), seed=3)[0]
    deviation = (exact * (1 - exact) / statistics.DRAWS) ** 0.5
    assert abs(found - exact) < 4 * deviation
    assert found == sign_flip_p(*column(values), seed=3)[0] != sign_flip_p(*column(values), seed=4)[0]


def test_a_random_p_is_never_zero():
    found = sign_flip_p(*column([1.0] * 40), seed=0)
    assert found == pytest.approx(1 / (statistics.DRAWS + 1), rel=1e-12)


def test_undefined_values_of_one_column_do_not_change_another():
    values = np.random.default_rng(2).normal(0.2, 1, (9, 2))
    values[3:5, 1] = np.nan
    sums, counts = cluster_sums(values, np.arange(9))
    both = sign_flip_p(sums, counts, seed=0)
    assert both[0] == sign_flip_p(*column(list(values[:, 0])), seed=0)
    rest = values[[0, 1, 2, 5, 6, 7, 8], 1]
    assert both[1] == sign_flip_p(*column(list(rest)), seed=0)
    intervals = mean_intervals(sums, counts)
    np.testing.assert_array_equal(intervals[:, 1:], mean_intervals(*column(list(rest))))


def test_the_interval_of_one_value_a_cluster_is_that_of_a_t_test():
    values = np.random.default_rng(5).normal(0.1, 1, 7)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(mean_intervals(*column(list(values)))[:, 0], theirs, rtol=1e-12)


def test_the_interval_of_unequal_clusters_by_hand():
    """Sums 4, 2, 8, -0.5 of 2, 1, 1, 2 values: mean 13.5/6 = 2.25, deviations -0.5, -0.25, 5.75, -5."""
    sums, counts = column([1.0, 3.0, 2.0, 8.0, -1.0, 0.5], [0, 0, 1, 2, 3, 3])
    half_width = stats.t.ppf(0.975, 3) * np.sqrt(4 / 3 * (0.25 + 0.0625 + 33.0625 + 25)) / 6
    low, high = mean_intervals(sums, counts)[:, 0]
    assert (low, high) == (pytest.approx(2.25 - half_width), pytest.approx(2.25 + half_width))


@pytest.mark.parametrize("clusters", [3, 10, 30])
def test_the_interval_contains_the_mean_in_95_percent_of_experiments(clusters):
    """Clusters of 1 to 3 normal values that share a part: 4,000 experiments, one a column."""
    random = np.random.default_rng(clusters)
    cluster = np.repeat(np.arange(clusters), 1 + np.arange(clusters) % 3)
    values = random.normal(size=(len(cluster), 4000)) + random.normal(size=(clusters, 4000))[cluster]
    low, high = mean_intervals(*cluster_sums(values, cluster))
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(0.95, abs=0.02)


def test_prompts_widen_the_interval_where_their_traces_agree():
    values = list(np.repeat(np.random.default_rng(7).normal(size=12), 5))
    alone = np.diff(mean_intervals(*column(values))[:, 0])
    together = np.diff(mean_intervals(*column(values, list(np.repeat(np.arange(12), 5))))[:, 0])
    assert together > 1.8 * alone  # sqrt(5) in the limit


def test_one_cluster_has_no_interval():
    assert np.isnan(mean_intervals(*column([1, 2], [0, 0]))).all()


def test_holm_by_hand():
    """0.01*4; 0.02*3; max(0.06, 0.03*2); max(0.06, 0.5)."""
    np.testing.assert_allclose(holm(np.array([0.5, 0.01, 0.03, 0.02])), [0.5, 0.04, 0.06, 0.06], rtol=1e-15)
    np.testing.assert_array_equal(holm(np.array([0.6, 0.7])), [1, 1])
    np.testing.assert_allclose(holm(np.array([0.03, np.nan, 0.02])), [0.04, np.nan, 0.04], rtol=1e-15)


def test_holm_refuses_a_hypothesis_where_the_step_down_procedure_does():
    random = np.random.default_rng(8)
    for _ in range(20):
        p = random.uniform(0, 0.05, 9) ** 1.5
        order, refused = np.argsort(p), np.zeros(9, dtype=bool)
        for i, place in enumerate(order):
            if p[place] > 0.05 / (9 - i):
                break
            refused[place] = True
        np.testing.assert_array_equal(holm(p) <= 0.05, refused)


def test_traces_that_share_a_name_or_a_prompt_are_joined_through_others():
    names, prompts = ["a", "b", "a", "c", "d"], ["1", "2", "3", "3", None]
    np.testing.assert_array_equal(joined(names, prompts), [0, 1, 0, 0, 2])
    np.testing.assert_array_equal(joined(["a", "b", "b"], ["x", "y", "x"]), [0, 0, 0])
    np.testing.assert_array_equal(joined(["a", "b"], [None, None]), [0, 1])


def rows(values: dict[str, list[float]], metric: str = "m") -> pd.DataFrame:
    return pd.DataFrame([
        {"trace": f"t{i}", "name": metric, "budget": "0.1", "label": label, "value": value}
        for label, column in values.items() for i, value in enumerate(column)
    ])  # fmt: skip


def test_a_table_by_hand():
    table = rows({"base": [1, 2, 3, np.nan], "a": [2, 2, 7, 9], "b": [0, 1, np.nan, 5]})
    cluster = pd.Series(range(4), index=[f"t{i}" for i in range(4)])
    found = paired(table, cluster, "base", {"m": "higher"}, seed=0).set_index("label")
    assert list(found.index) == ["base", "a", "b"]
    assert list(found["traces"]) == [3, 3, 2]
    assert list(found["mean"]) == [2, 11 / 3, 0.5]  # of a and b over the traces that base has too
    assert list(found["pairs"]) == [0, 3, 2]
    assert found.loc["a", "difference"] == 5 / 3 and found.loc["b", "difference"] == -1
    assert found.loc["a", "p"] == 4 / 8  # 1, 0, 4: |±1 ±4| reaches 5 twice in four, the sign of 0 is free
    assert found.loc["b", "p"] == 1 / 2
    assert found.loc["a", "p_holm"] == found.loc["b", "p_holm"] == 1
    assert list(found.loc["a", ["wins", "ties", "losses"]]) == [2, 1, 0]
    assert list(found.loc["b", ["wins", "ties", "losses"]]) == [0, 0, 2]
    assert found.loc["base", ["difference", "p", "wins"]].isna().all()


def test_wins_follow_the_direction_of_the_metric():
    table = rows({"base": [1, 2, 3], "a": [2, 2.5, 3]})
    cluster = pd.Series([0, 1, 2], index=["t0", "t1", "t2"])
    for better, wanted in (("higher", [2, 1, 0]), ("lower", [0, 1, 2])):
        assert list(paired(table, cluster, "base", {"m": better}, 0).loc[1, ["wins", "ties", "losses"]]) == wanted
    for unknown in ({"m": "neither"}, {}):
        assert paired(table, cluster, "base", unknown, 0).loc[1, ["wins", "ties", "losses"]].isna().all()


def test_a_thousand_traces_of_many_comparisons_are_soon_compared():
    random = np.random.default_rng(9)
    values = random.normal(size=(1000, 60))
    sums, counts = cluster_sums(values, np.arange(1000) // 2)
    assert np.isfinite(mean_intervals(sums, counts)).all()
    p = sign_flip_p(sums, counts, 0)
    generator = np.random.default_rng(0)
    theirs = stats.permutation_test((sums[:, 0],), np.sum, permutation_type="samples", n_resamples=1999, rng=generator)
    assert p[0] == pytest.approx(theirs.pvalue, abs=0.05)
