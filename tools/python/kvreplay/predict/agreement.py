"""The agreement of two lists of numbers on the order of policies, and the number of prompts that it requires.

Numbers are damages: larger is worse. Of n policies there are n (n - 1) / 2 pairs.
"""

from __future__ import annotations

import math

import numpy as np

from kvreplay.compare.statistics import intervals_of_rows

DRAWS = 400  # sets of prompts for each number of prompts


def spearman(offline: np.ndarray, live: np.ndarray) -> float:
    """Pearson's correlation of the ranks, ties at their mean rank (Spearman 1904); NaN if one list is constant."""
    a, b = ranks(offline), ranks(live)
    return cosine(a - a.mean(), b - b.mean())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors; NaN if one is 0."""
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm > 0 else math.nan


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def pair_differences(values: np.ndarray) -> np.ndarray:
    """For each pair of policies [n (n-1) / 2], the first value minus the second."""
    first, second = np.triu_indices(values.shape[-1], 1)
    return values[..., first] - values[..., second]


def order_signs(values: np.ndarray) -> np.ndarray:
    """For each pair of policies, whether the first is worse (1), equal (0) or better (-1)."""
    return np.sign(pair_differences(values))


def kendall(offline: np.ndarray, live: np.ndarray) -> float:
    """Kendall's tau-b (1945); NaN if one list is constant."""
    return cosine(order_signs(offline), order_signs(live))


def in_order(offline: np.ndarray, live: np.ndarray) -> float:
    """The share of the pairs that differ live whose order is the same offline; an offline tie counts one half."""
    a, b = order_signs(offline), order_signs(live)
    decided = b != 0
    return float((1 + a[decided] * b[decided]).mean() / 2) if decided.any() else math.nan


def resolved(live: np.ndarray) -> np.ndarray:
    """For each pair of policies [n (n-1) / 2], whether the 95 % interval of its mean difference excludes 0."""
    difference = pair_differences(live)
    low, high = intervals_of_rows(difference)
    return (low > 0) | (high < 0)


def prompts_needed(offline: np.ndarray, live: np.ndarray, share: float, seed: int) -> tuple[int | None, float]:
    """The least number of prompts with which the offline means order a pair of policies as the live means over all
    prompts do, with probability `share` over pairs and sets of prompts; None: all n are too few. Also returns the
    probability at this number, or at n.

    `offline` and `live` [prompts, policies]. Sets are drawn with replacement. Only resolved pairs count: those of a
    live difference with an interval that excludes 0. NaN if there is none.
    """
    generator = np.random.default_rng(seed)
    truth = order_signs(live.mean(axis=0))
    decided = resolved(live)
    if not decided.any():
        return None, math.nan
    reached = math.nan
    for count in range(1, len(offline) + 1):
        drawn = generator.integers(0, len(offline), (DRAWS, count))
        signs = order_signs(offline[drawn].mean(axis=1))[:, decided]
        reached = float((1 + signs * truth[decided]).mean() / 2)
        if reached >= share:
            return count, reached
    return None, reached
