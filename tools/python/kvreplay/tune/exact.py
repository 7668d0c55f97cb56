"""The best per-layer budget allocation by dynamic programming: exact, since a mean over layers is a sum over layers.

In open loop a layer's value depends on its own tokens alone. So the best choice for the first l layers extends the best
choice for the first l-1 layers at the remaining budget, and no other choice needs to be tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_sizes(values: np.ndarray, sizes: Sequence[int], total: int) -> list[int]:
    """For each layer an index into `sizes` [K]: the sizes sum to `total`, and the sum of the `values` [L,K] is largest.

    Among equal sums the last layers have the earlier sizes of the list. Requires that some choice sums to `total`, for
    example L times one of the sizes.
    """
    most = np.full(total + 1, -np.inf)  # by what the layers so far take
    most[0] = 0.0
    taken = []
    for of_layer in values:
        sums = np.full((len(sizes), total + 1), -np.inf)
        for i, size in enumerate(sizes):
            sums[i, size:] = most[: max(0, total + 1 - size)] + of_layer[i]
        taken.append(sums.argmax(axis=0))
        most = sums.max(axis=0)
    chosen, left = [], total
    for choice in reversed(taken):
        chosen.append(int(choice[left]))
        left -= sizes[chosen[-1]]
    return chosen[::-1]


def best_ranges(values: np.ndarray, most_ranges: int) -> list[int]:
    """For each layer an index of a policy such that the `values` [L,N] sum to the most, with at most `most_ranges`
    ranges of neighbouring layers of one policy. Of equal sums the one with the fewest ranges, then the earlier policies
    in the last layers."""
    layers, policies = values.shape
    ranges = min(most_ranges, layers)
    most = np.full((ranges, policies), -np.inf)  # by further ranges begun, and the policy of the layer before
    most[0] = values[0]
    before = []  # of each later layer: the policy of the one before, [ranges, policies]
    itself = np.where(np.eye(policies, dtype=bool), -np.inf, 0.0)  # a range is of another policy than the one before
    for of_layer in values[1:]:
        others = most[:-1, None] + itself  # [ranges - 1, policies, the policy before]
        begins = others.max(axis=2) > most[1:]
        source = np.tile(np.arange(policies), (ranges, 1))
        source[1:] = np.where(begins, others.argmax(axis=2), source[1:])
        most = np.vstack([most[:1], np.maximum(most[1:], others.max(axis=2))]) + of_layer
        before.append(source)
    begun, policy = divmod(int(most.argmax()), policies)
    chosen = [policy]
    for source in reversed(before):
        earlier = int(source[begun, policy])
        begun -= earlier != policy
        policy = earlier
        chosen.append(policy)
    return chosen[::-1]
