"""Paired statistics over traces: each policy against a baseline, on the same trace at the same budget.

Traces of one prompt, by several models or with several continuations, are not independent. They form one **cluster**:
all traces of one prompt. Two traces have the same prompt when their names are equal (capture names a
trace after its prompt, so two models on one file of prompts, in two runs, give equal names) or when the token ids of
their prompts are equal (the hash of run.json: one model, several continuations). Where names carry more than the
prompt, a regular expression selects the part of a name that identifies the prompt.

With D_c the sum of the differences over the traces of cluster c, n_c their number, k clusters:

- mean difference: sum D_c / sum n_c, every trace counts once;
- interval: Student's t with the clusters as samples, as everywhere in kvreplay (analysis/mean_interval.h). The interval
  of a policy's own mean is the same with values instead of differences;
- p: if policy and baseline were exchangeable on each prompt, the signs of the D_c would be arbitrary, all alike likely.
  p is the share of sign patterns with |sum ±D_c| >= |sum D_c| (Fisher 1935, section 21): of all 2^k of them up to
  EXACT clusters, else (reached + 1) / (DRAWS + 1) of DRAWS random ones (Davison and Hinkley 1997, section 4.2);
- Holm's correction over all comparisons of one table (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence, Set

import numpy as np
import pandas as pd

EXACT = 16  # clusters up to which every sign pattern is counted: 2^15, since a pattern and its opposite reach alike
DRAWS = 99_999
DRAWN_AT_ONCE = 10_000  # sign patterns in memory
ROUNDING = 1e-12  # sums this near to the observed one, relative to the sum of |D_c|, reach it


def cluster_sums(values: np.ndarray, cluster: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of the defined `values` [n,c] of each cluster: two float [k,c]; `cluster` int [n], 0 to k-1."""
    defined = ~np.isnan(values)
    sums = np.zeros((cluster.max(initial=-1) + 1, values.shape[1]))
    counts = np.zeros_like(sums)
    np.add.at(sums, cluster, np.where(defined, values, 0.0))
    np.add.at(counts, cluster, defined)
    return sums, counts


def same_clusters(counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Masks (clusters [k], columns [c]) of the columns of `counts` that have values in the same clusters."""
    patterns, pattern_of = np.unique(counts > 0, axis=1, return_inverse=True)
    for i, clusters in enumerate(patterns.T):
        yield clusters, pattern_of.ravel() == i


def mean_intervals(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """95 % intervals of sum / count by Student's t, float [2,c], for the sums and counts of clusters, [k,c]: NaN for a
    column of fewer than two clusters. Source: analysis/mean_interval.h."""
    half_width = np.full(sums.shape[1], np.nan)
    several = (counts > 0).sum(axis=0) > 1
    if several.any():
        from kvreplay import _engine  # not needed for a single trace

        half_width[several] = list(map(_engine.half_width, sums.T[several], counts.T[several]))
    total = counts.sum(axis=0)
    mean = sums.sum(axis=0) / np.where(total > 0, total, np.nan)
    return np.array([mean - half_width, mean + half_width])


def intervals_of_rows(values: np.ndarray) -> np.ndarray:
    """The same of the means of `values` [n,c], each row a separate cluster."""
    return mean_intervals(*cluster_sums(values, np.arange(len(values))))


def sign_patterns(k: int, seed: int) -> Iterator[np.ndarray]:
    """+1 and -1, float [m,k], in pieces: all that begin with + up to EXACT clusters, else DRAWS random ones."""
    if k <= EXACT:
        bits = np.arange(2 ** (k - 1))[:, None] >> np.arange(k)[None, :] & 1
        yield np.roll(1.0 - 2.0 * bits, 1, axis=1)
        return
    generator = np.random.default_rng(seed)
    for begin in range(0, DRAWS, DRAWN_AT_ONCE):
        yield 2.0 * generator.integers(0, 2, (min(DRAWN_AT_ONCE, DRAWS - begin), k), dtype=np.int8) - 1.0


def sign_flip_p(sums: np.ndarray, counts: np.ndarray, seed: int) -> np.ndarray:
    """Two-sided p of the hypothesis that the signs of `sums` [k,c] are arbitrary: float [c], NaN without a cluster."""
    found = np.full(sums.shape[1], np.nan)
    for clusters, columns in same_clusters(counts):
        k = int(clusters.sum())
        if k == 0:
            continue
        mine = sums[np.ix_(clusters, columns)]
        bar = np.abs(mine.sum(axis=0)) - ROUNDING * np.abs(mine).sum(axis=0)
        reached, tried = np.zeros(mine.shape[1]), 0
        for signs in sign_patterns(k, seed):
            reached += (np.abs(signs @ mine) >= bar).sum(axis=0)
            tried += len(signs)
        found[columns] = reached / tried if k <= EXACT else (reached + 1) / (tried + 1)
    return found


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down adjusted p of m hypotheses, float [m]: the i-th smallest times m - i, i from 0, never falling,
    at most 1. Undefined p remain undefined and do not count as hypotheses."""
    found = np.full(p.shape, np.nan)
    order = np.argsort(p, kind="stable")[: int((~np.isnan(p)).sum())]
    m = len(order)
    found[order] = np.minimum(np.maximum.accumulate(p[order] * (m - np.arange(m))), 1.0)
    return found


def joined(*names: Sequence[Hashable]) -> np.ndarray:
    """Groups of items that share a name in any of several lists of names, int [n] from 0 in order of appearance.

    None and the empty string are no names. Sharing is transitive.
    """
    group = pd.Series(range(len(names[0])), dtype=int)
    before = None
    while not group.equals(before):
        before = group
        for one in names:
            named = pd.Series([name or None for name in one], dtype=object)
            group = group.groupby(named).transform("min").fillna(group).astype(int)
    return pd.factorize(group)[0]


def differences(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """The rows of other policies with `difference`, their value less the baseline's of the same trace and budget.

    `rows`: trace (identity), name (NAME[:VARIANT]), budget, label, value, one row each; undefined differences are
    left out.
    """
    key = ["trace", "name", "budget"]
    own = rows[rows["label"] == baseline].set_index(key)["value"]
    others = rows[rows["label"] != baseline].set_index(key)
    found = others.assign(difference=others["value"] - own.reindex(others.index)).reset_index()
    return found.dropna(subset="difference")


def paired(
    rows: pd.DataFrame,
    cluster: pd.Series,
    baseline: str,
    better: dict[str, str],
    seed: int,
    unequal_memory: Set[tuple[str, str]] = frozenset(),
) -> pd.DataFrame:
    """One line a metric, budget and policy, in the order of `rows`; the baseline's own has no difference.

    `rows` as in `differences`; `cluster`: int by trace; `better` says by name higher, lower or neither: without a
    direction none wins. `traces`, `prompts` and `mean` of a policy are of the traces that it shares with the baseline,
    those of the baseline of all its traces. `low` and `high` are the interval of the mean, `difference_low` and
    `difference_high` that of the difference. Wins, ties and losses count traces; a tie is an exactly equal value. Lines
    of `unequal_memory`, (budget, label), show their difference, and have no p and no wins, ties and losses: they are no
    comparisons.
    """
    key = ["name", "budget", "label"]
    found = rows[key].drop_duplicates().reset_index(drop=True)
    lines = pd.MultiIndex.from_frame(found)
    traces = rows["trace"].drop_duplicates()
    place = cluster.loc[traces].to_numpy()

    def matrix(table: pd.DataFrame, column: str) -> np.ndarray:
        """[traces, lines]"""
        return table.pivot(index="trace", columns=key, values=column).reindex(traces, columns=lines).to_numpy(float)

    def mean(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        total = counts.sum(axis=0)
        return sums.sum(axis=0) / np.where(total > 0, total, np.nan)

    difference = matrix(differences(rows, baseline), "difference")
    is_baseline = (found["label"] == baseline).to_numpy()
    shared = np.where(is_baseline | ~np.isnan(difference), matrix(rows, "value"), np.nan)
    sums, counts = cluster_sums(shared, place)
    found["traces"], found["prompts"] = counts.sum(axis=0).astype(int), (counts > 0).sum(axis=0)
    found["mean"] = mean(sums, counts)
    found["low"], found["high"] = mean_intervals(sums, counts)

    sums, counts = cluster_sums(difference, place)
    found["pairs"], found["paired_prompts"] = counts.sum(axis=0).astype(int), (counts > 0).sum(axis=0)
    found["difference"] = mean(sums, counts)
    found["difference_low"], found["difference_high"] = mean_intervals(sums, counts)
    unequal = np.array([pair in unequal_memory for pair in zip(found["budget"], found["label"], strict=True)])
    found["p"] = np.where(unequal, np.nan, sign_flip_p(sums, counts, seed))
    found["p_holm"] = holm(found["p"].to_numpy())
    direction = found["name"].map(better).map({"higher": 1.0, "lower": -1.0}).to_numpy(float)
    gain = difference * direction  # NaN without a direction
    for column, counted in (("wins", gain > 0), ("ties", gain == 0), ("losses", gain < 0)):
        count = pd.Series(counted.sum(axis=0), dtype="Int64")
        found[column] = count.mask(np.isnan(direction) | unequal | (found["pairs"] == 0).to_numpy())
    return found
