"""Are the bounds the best of all sets there are? Every set of eight tokens is tried, with attention made in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import kvreplay as kv
from kvreplay.regret_terms import ROUNDING, TERMS

P = 8
SETS = np.array(list(itertools.product([False, True], repeat=P)))  # bool [2^P, P]
Family = Callable[[np.ndarray, int, int, int, int], bool]  # (set, chunk, slots, sinks, recent)


def read(path: Path) -> np.ndarray:
    """Attention of each query after the prompt to all tokens: float64 [L,Hq,G,T]."""
    trace = kv.open(path)
    with h5py.File(path) as file:
        scale = float(file["model"].attrs["softmax_scale"])
    queries = np.arange(trace.prompt, trace.tokens)
    layers = []
    for layer in range(trace.layers):
        q, k = trace.q(layer).astype(float)[:, queries], trace.k(layer).astype(float)
        z = scale * np.einsum("htd,hjd->htj", q, np.repeat(k, len(q) // len(k), axis=0))
        z[:, np.arange(trace.tokens) > queries[:, None]] = -np.inf
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        layers.append(e / e.sum(axis=-1, keepdims=True))
    return np.stack(layers)


def chunks_of(kept: np.ndarray, chunk: int, sinks: int, recent: int) -> list[np.ndarray]:
    middle = kept[sinks : P - recent]
    return [middle[begin : begin + chunk] for begin in range(0, len(middle), chunk)]


def by_rule(kept: np.ndarray, sinks: int, recent: int) -> bool:
    return bool(kept[:sinks].all() and kept[P - recent :].all())


def any_set(kept: np.ndarray, chunk: int, slots: int, sinks: int, recent: int) -> bool:
    return True


def with_a_part(kept: np.ndarray, chunk: int, slots: int, sinks: int, recent: int) -> bool:
    """Whole chunks, and of one more the first tokens."""
    parts = [one for one in chunks_of(kept, chunk, sinks, recent) if one.any() and not one.all()]
    return by_rule(kept, sinks, recent) and all(one[: one.sum()].all() for one in parts) and len(parts) <= 1


def with_tokens(kept: np.ndarray, chunk: int, slots: int, sinks: int, recent: int) -> bool:
    """As many whole chunks as have room, and any tokens."""
    whole = sum(bool(one.all()) for one in chunks_of(kept, chunk, sinks, recent))
    return by_rule(kept, sinks, recent) and whole >= slots // chunk


CASES: list[tuple[str, int, Family]] = [
    ("random", 1, any_set),
    ("streaming-llm:sinks=2", 1, any_set),
    ("local", 1, any_set),
    ("snapkv:window=2,kernel=3", 1, any_set),
    ("h2o:heads=query", 1, any_set),
    ("h2o:overlap=true", 1, any_set),
    ("pyramid-kv:window=2,beta=3", 1, any_set),
    ("dynamickv:window=2,heads=query", 1, any_set),
    ("pyramid-infer:sinks=1,r=0.3", 1, any_set),
    ("sca:recent=1", 1, any_set),
    ("oracle:scope=global", 1, any_set),
    ("chunkkv:chunk=3,window=2", 3, with_a_part),
    ("chunkkv:chunk=2,window=1,heads=kv,chunk_score=mean", 2, with_a_part),
    ("chunkkv:chunk=3,window=1,heads=query,fill=none", 3, with_a_part),
    ("chunkkv:chunk=3,window=2,heads=kv,window_mode=replace", 3, with_a_part),
    ("chunkkv:chunk=2,window=2,reuse=2", 2, with_a_part),
    ("chunkkv:chunk=2,window=1,heads=kv,fill=tokens", 2, with_tokens),
    ("chunkkv:chunk=3,window=1,fill=tokens", 3, with_tokens),
    ("random:sinks=1,window=1,select=chunks,chunk=2", 2, with_a_part),
    ("random:sinks=1,select=chunks,chunk=3,fill=tokens", 3, with_tokens),
    ("h2o:recent=1,select=chunks,chunk=3,allocate=pyramid", 3, with_a_part),
]


def best_by_count(worth: np.ndarray, allowed: Callable[[np.ndarray], bool] = lambda kept: True) -> np.ndarray:
    """Of a row, the most that an allowed set of 0 ... P tokens is worth, all of them tried."""
    best = np.full(P + 1, -np.inf)
    for kept in SETS:
        if allowed(kept):
            best[kept.sum()] = max(best[kept.sum()], worth[kept].sum())
    return best


def best_of_rows(tables: list[np.ndarray], slots: int) -> float:
    """The most that rows are worth together, whatever the counts that sum to `slots`, all of them tried."""
    most = np.full(slots + 1, -np.inf)
    most[0] = 0.0
    for table in tables:
        most = np.array([max(most[total - count] + table[count] for count in range(min(P, total) + 1))
                         for total in range(slots + 1)])  # fmt: skip
    return float(most[slots])


@pytest.mark.parametrize("policy, chunk, family", CASES, ids=[case[0] for case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_bounds_are_the_best_of_all_sets(policy: str, chunk: int, family: Family, tiny: list[Path]):
    budgets = ["2", "3", "5", "6"]
    found = kv.regret(tiny, policy, budgets).set_index(["trace", "budget"])
    assert len(found) == len(tiny) * len(budgets)
    run = kv.replay(tiny, policy, budgets, metrics="attention_recall")
    for path, budget in itertools.product(tiny, budgets):
        attention = read(path)
        layers, heads, queries = attention.shape[:3]
        selection = run.selection(policy, budget, path.stem)
        kept = selection.mask()
        group = heads // kept.shape[1]
        worth = attention[..., :P].sum(axis=2).reshape(layers, -1, group, P).sum(axis=2)  # [L,rows,P]
        always = attention[..., P:].sum()
        counts = kept.sum(axis=2)

        def allowed(layer: int, head: int) -> Callable[[np.ndarray], bool]:
            sinks, recent = int(selection.sinks[layer, head]), int(selection.recent[layer, head])  # noqa: B023
            slots = int(counts[layer, head]) - sinks - recent  # noqa: B023
            return lambda one: family(one, chunk, slots, sinks, recent)

        places = list(itertools.product(range(layers), range(kept.shape[1])))
        free = {place: best_by_count(worth[place]) for place in places}
        ways = [
            sum(worth[place][kept[place]].sum() for place in places),
            sum(best_by_count(worth[place], allowed(*place))[counts[place]] for place in places),
            sum(free[place][counts[place]] for place in places),
            sum(best_of_rows([free[place] for place in places if place[0] == layer], counts[layer].sum())
                for layer in range(layers)),
            best_of_rows(list(free.values()), counts.sum()),
        ]  # fmt: skip
        expected = (np.array(ways) + always) / (layers * heads * queries)
        for place in places:
            assert allowed(*place)(kept[place]), "the policy's own set has its structure"
        row = found.loc[path.stem, budget]
        assert row["recall"] == pytest.approx(expected[0], abs=ROUNDING)
        assert row["bound"] == pytest.approx(expected[4], abs=ROUNDING)
        assert list(row[list(TERMS)]) == pytest.approx(np.diff(expected), abs=ROUNDING)
        assert min(row[list(TERMS)]) >= -ROUNDING


@pytest.mark.filterwarnings("ignore")
def test_each_term_is_there_for_some_policy(tiny: list[Path]):
    """What is 0 everywhere would say nothing."""
    found = kv.regret(tiny, [case[0] for case in CASES], [3, 5])
    assert (found[list(TERMS)].max() > 0.01).all()
    whole = found[~found["policy"].str.contains("chunk")]
    assert (whole["structure"].abs() <= ROUNDING).all()
