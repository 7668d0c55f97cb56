"""Is what dynamic programming finds the best of everything that there is?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvreplay.tune.exact import best_ranges, best_sizes


def value(values: np.ndarray, chosen) -> float:
    return sum(values[layer, i] for layer, i in enumerate(chosen))


@pytest.mark.parametrize("seed", range(40))
def test_sizes_against_every_choice(seed):
    generator = np.random.default_rng(seed)
    layers, sizes = int(generator.integers(1, 6)), sorted({4, *generator.integers(1, 17, 4).tolist()})
    shape = (layers, len(sizes))
    values = generator.integers(0, 6, shape) / 4 if seed % 2 else generator.normal(size=shape)  # with ties, and without
    total = 4 * layers
    choices = [one for one in itertools.product(range(len(sizes)), repeat=layers)
               if sum(sizes[i] for i in one) == total]  # fmt: skip
    found = best_sizes(values, sizes, total)
    assert sum(sizes[i] for i in found) == total
    assert value(values, found) == pytest.approx(max(value(values, one) for one in choices), abs=1e-12)


def test_more_for_the_layer_that_gains_by_it():
    values = np.array([[0.1, 0.5, 0.9], [0.8, 0.81, 0.82], [0.3, 0.5, 0.55]])
    assert best_sizes(values, [2, 4, 6], 12) == [2, 0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_ranges_against_every_choice(seed):
    generator = np.random.default_rng(seed)
    layers, policies, most = (int(one) for one in generator.integers((1, 2, 1), (8, 4, 5)))
    values = generator.integers(0, 4, (layers, policies)) / 4 if seed % 2 else generator.normal(size=(layers, policies))

    def ranges(chosen) -> int:
        return 1 + sum(a != b for a, b in itertools.pairwise(chosen))

    choices = [one for one in itertools.product(range(policies), repeat=layers) if ranges(one) <= most]
    best = max(value(values, one) for one in choices)
    found = best_ranges(values, most)
    assert value(values, found) == pytest.approx(best, abs=1e-12)
    equal = [one for one in choices if value(values, one) >= best - 1e-12]
    assert ranges(found) == min(map(ranges, equal))


def test_one_range_where_nothing_is_gained():
    assert best_ranges(np.ones((5, 2)), 3) == [0] * 5
