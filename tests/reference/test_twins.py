"""Random twins and skill: worked examples, and the program's twins of every policy that has one."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_metrics
import reference_twins
from reference_policies import select
from reference_selection import Policy

FIXTURE = reference.fixture()
NOTHING = np.array([], int)


# ------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("kept", "fixed", "prompt", "indices", "expected"),
    [
        ([2, 3, 5, 8, 9, 10], [0, 14, 15], 16, (1, 0, 0), [2, 6, 7, 8, 11, 12]),
        # gaps of 0, 2 and 1 come in the order 2, 0, 1: the runs of 2 and 1 become one
        ([1, 2, 5], [0, 7], 8, (2, 0, 0), [2, 3, 4]),
        # nothing to permute: no run; one run that leaves no place; no candidate
        ([], [0, 7], 8, (2, 0, 0), []),
        ([1, 2, 3], [0, 4], 5, (2, 0, 0), [1, 2, 3]),
        ([], [0, 1, 2], 3, (2, 0, 0), []),
    ],
)
def test_a_row(kept: list[int], fixed: list[int], prompt: int, indices: tuple, expected: list[int]) -> None:
    row = np.array(sorted({*kept, *fixed}), int)
    twin = reference_twins.in_another_order(row, np.array(fixed), prompt, indices)
    assert twin.tolist() == sorted({*expected, *fixed})


def test_runs_and_gaps() -> None:
    kept = np.array([0, 1, 1, 0, 0, 1, 0], bool)
    assert [part.tolist() for part in reference_twins.lengths(kept)] == [[2, 1], [1, 2, 1]]
    assert [part.tolist() for part in reference_twins.lengths(~kept)] == [[1, 2, 1], [0, 2, 1, 0]]
    assert [part.tolist() for part in reference_twins.lengths(kept[:0])] == [[], [0]]


def test_every_order_of_runs_and_gaps_is_as_frequent() -> None:
    row = np.array([2, 3, 5, 8, 9, 10])  # runs of 2, 1, 3; gaps of 2, 1, 2, 1: 6 times 6 orders that differ
    found: dict[tuple, int] = {}
    for seed in range(3600):
        key = tuple(reference_twins.in_another_order(row, NOTHING, 12, (seed, 3, 1)).tolist())
        found[key] = found.get(key, 0) + 1
    assert len(found) == 36
    chi_squared = sum((count - 100) ** 2 / 100 for count in found.values())
    assert chi_squared < 66.6  # 0.1 % of fair draws lie above it, with 35 degrees of freedom


def test_layers_that_share_a_set_share_its_twin() -> None:
    chosen = select(FIXTURE, Policy.parse("chunkkv:chunk=3,window=2,reuse=2,heads=kv"), "6")
    twin = reference_twins.random_twin(FIXTURE, chosen, 5)
    assert chosen.source == twin.source == [0, 0, 2, 2]
    for layer, source in enumerate(twin.source):
        for row in range(2):
            hashed = (5, source, row)
            expected = reference_twins.in_another_order(chosen.rows[source][row], chosen.protected[layer], 12, hashed)
            assert twin.rows[layer][row].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_layers_of_different_granularity(seed: int) -> None:
    """The one set of a layer with one has the number 0, whether or not it is repeated for each head."""
    ranges = ("chunkkv:chunk=1,window=2", "snapkv:window=2,kernel=3")
    whole = select(FIXTURE, Policy.parse(f"layers:0-1=({ranges[0]}),2-3=({ranges[1]})"), "6")
    parts = [select(FIXTURE, Policy.parse(text), "6") for text in ranges]
    twin, of_chunks, of_snapkv = (reference_twins.random_twin(FIXTURE, one, seed) for one in (whole, *parts))
    for layer, expected in enumerate([*of_chunks.rows[:2], *of_snapkv.rows[2:]]):
        assert [row.tolist() for row in twin.rows[layer]] == [row.tolist() for row in expected] * (2 // len(expected))


def test_skill() -> None:
    assert reference_twins.skill(0.6, 0.5, 0.7) == pytest.approx(0.5)
    assert reference_twins.skill(0.4, 0.5, 0.7) == pytest.approx(-0.5)
    assert reference_twins.skill(0.5, 0.5, 0.5) is None
    assert reference_twins.skill(0.5, 0.5, 0.5 + 1e-10) is None


@pytest.mark.parametrize("policy", ["snapkv:window=2,kernel=3", "h2o:heads=query", "chunkkv:chunk=3,window=2", "sca"])
def test_the_best_sets_are_those_of_the_oracle_with_the_same_counts(policy: str) -> None:
    chosen = select(FIXTURE, Policy.parse(policy), "6")
    oracle = select(FIXTURE, Policy.parse(f"oracle:counts=({policy})"), "6")
    best = reference_metrics.best_sets(FIXTURE, chosen, "continuation")
    assert [[row.tolist() for row in layer] for layer in best.rows] == [
        [row.tolist() for row in layer] for layer in oracle.rows
    ]
    bound = reference_metrics.recall_of_best_sets(FIXTURE, chosen, "continuation")["attention_recall", "oracle"]
    of_oracle, of_policy = (
        reference_metrics.attention_metrics(FIXTURE, one, "continuation")["attention_recall", ""]
        for one in (oracle, chosen)
    )
    np.testing.assert_allclose(bound.heads, of_oracle.heads, atol=1e-12)
    assert (bound.layers >= of_policy.layers).all()
    assert bound.all > of_policy.all
