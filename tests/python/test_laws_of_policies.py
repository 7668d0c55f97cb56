"""Does `kv.check` pass what obeys the laws, and name each law that is broken?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import kvreplay as kv
from kvreplay.laws import check_sets
from kvreplay.results import Selection

# What differs for `kv.check`: sets that change, budgets of layers, stores, schedules, what is read. The laws themselves
# hold for every registered policy: tests/laws.
OF_EACH_KIND = [
    "cam",
    "cam-one-shot",
    "chunkkv",
    "critical-kv:wo=none",
    "dynamickv",
    "full",
    "h2o-online",
    "duo-attention",
    "hybrid",
    "kivi",
    "minicache",
    "pyramid-infer",
    "quest",
    "random",
    "sca",
    "streaming-llm",
    "think",
]


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_registered_policies_obey(name: str) -> None:
    kv.check(name)


def test_finch_has_no_room_where_the_question_takes_all() -> None:
    with pytest.raises(
        kv.Error, match='breaks the law "every trace is replayed": found finch: the 10 tokens of the question fill'
    ):
        kv.check("finch")


class Thirds(kv.Policy):
    "every third token first, in counts that differ"

    heads = "query"
    sinks = 2
    recent = 0.25

    def score(self, view):
        return np.tile(-(np.arange(view.tokens) % 3), (view.query_heads, 1))

    def allocate(self, division, scores):
        counts = np.zeros((division.layers, len(scores[0])), dtype=int)
        counts[::2] = division.budget
        return counts


@pytest.mark.parametrize(
    "policy",
    [
        Thirds,
        Thirds(),
        "snapkv:window=4,select=chunks,chunk=5",
        kv.policy(lambda view: view.key_norms(), name="norms"),
        kv.policy(lambda view: view.keys().sum(axis=-1), name="blocks", schedule="every(16)"),
        kv.policy(lambda view: view.value_norms(), name="first", select=lambda row: [0]),
    ],
)
def test_some_policies_in_python_obey(policy: object) -> None:
    kv.check(policy)


def broken(policy: object) -> str:
    with pytest.raises(kv.Error) as refused:
        kv.check(policy)
    assert refused.value.exit_code == 1 and "\n" not in str(refused.value)
    return str(refused.value)


def test_one_that_raises() -> None:
    line = broken(kv.policy(lambda view: view.key_norms() / (1 // (view.prompt // 50 - 1)), name="fragile"))
    assert line.startswith('fragile: grouped at 0.2: breaks the law "every trace is replayed": found ')
    assert f"{__file__}:" in line and "score raised ZeroDivisionError" in line


def test_one_that_overspends() -> None:
    def allocate(division, scores):
        return [[division.budget + 1] * len(scores[0])] * division.layers

    line = broken(kv.policy(lambda view: view.key_norms(), name="greedy", allocate=allocate))
    assert '"every trace is replayed"' in line and "overspends its budget" in line


def test_one_that_draws_lots() -> None:
    draw = np.random.default_rng(1)
    line = broken(kv.policy(lambda view: draw.random((view.kv_heads, view.tokens)), name="lots"))
    assert line.startswith("lots: ") and 'breaks the law "again the same": expected equal sets' in line


def test_one_that_depends_on_threads() -> None:
    asked: Counter[tuple[int, int, int]] = Counter()

    @kv.policy(name="fickle")
    def fickle(view):
        place = (view.prompt, view.layer, view.query_heads)
        asked[place] += 1
        return view.key_norms() * (1 if asked[place] < 3 else -1)  # the third run is that on two threads

    assert 'breaks the law "the same on two threads"' in broken(fickle)


SET = Selection(
    layers=np.array([0, 2]),
    numbers=np.array([0, 2]),
    offsets=np.array([0, 2, 4, 4, 4, 6, 8]),  # two rows a layer; layer 1 is left as it is
    positions=np.array([0, 3, 1, 2, 0, 3, 2, 3]),
    granted=np.full((3, 2), 2),
    sinks=np.zeros((3, 2), int),
    recent=np.zeros((3, 2), int),
    jaccard={},
    boundary=4,
)


def test_sets_that_obey() -> None:
    check_sets("one", "somewhere", SET, 2)
    check_sets("one", "somewhere", SET, None)


@pytest.mark.parametrize(
    ("positions", "budget", "words"),
    [
        ([0, 4, 1, 2, 0, 3, 2, 3], 2, 'row 0: breaks the law "positions are those of the prompt": expected 0..3'),
        ([0, 3, 1, 2, -1, 3, 2, 3], 2, 'row 4: breaks the law "positions are those of the prompt": expected 0..3'),
        ([0, 3, 2, 1, 0, 3, 2, 3], 2, 'row 1: breaks the law "positions ascend"'),
        ([0, 3, 1, 2, 0, 3, 3, 3], 2, 'row 5: breaks the law "positions ascend"'),
        (SET.positions, 1, 'breaks the law "the budget is kept": expected at most 4 slots, found 8'),
        (SET.positions, 4, 'breaks the law "a full budget keeps everything": expected 16 slots, found 8'),
    ],
)
def test_sets_that_break_a_law(positions: object, budget: int, words: str) -> None:
    with pytest.raises(kv.Error) as refused:
        check_sets("one", "somewhere", replace(SET, positions=np.asarray(positions)), budget)
    assert str(refused.value).startswith("one: somewhere") and words in str(refused.value)
    assert refused.value.exit_code == 1
