"""Are the keys and values that a store gives back those of the reference, and do they stand where queries find them?"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import kvreplay as kv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

import random_traces  # noqa: E402
import reference  # noqa: E402
import reference_metrics  # noqa: E402
import reference_policies  # noqa: E402
from reference_selection import Policy, Selection  # noqa: E402
from write_trace import write_trace  # noqa: E402

from kvreplay.results import StoredLayer  # noqa: E402

CHANGED = [
    "kivi:bits=4,group=8,residual=16",
    "kivi:group=5,residual=7",
    "cam:merge=2,sinks=2",
    "cam-one-shot:merge=2,recent=2",
    "cam-one-shot:merge=3,mode=sampled,seed=5",
    "think:window=4,ratio=0.5,recent=3",
    "minicache:gap=0.5,t=0.3",
]
MOVED = [
    "streaming-llm:positions=cache",
    "finch:blocks=16,question_tokens=4,heads=kv",
    "finch:blocks=8,question_tokens=4,order=relevance",
    "sca:share=1,positions=cache",
]
EXACT = [
    "snapkv:window=2,kernel=3",
    "h2o:heads=query",
    "h2o-online",
    "quest:page=4,dense_layers=1,least_pages=2",
    "full",
]
BUDGET = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """L 4, Hq 6, Hkv 2, d 16, P 67, G 9."""
    path = tmp_path_factory.mktemp("stored") / "stored.h5"
    write_trace(path, random_traces.normal(11, 4, 6, 2, 16, 67, 76, rope=True, dtype="float16"))
    return path


@pytest.fixture(scope="module")
def trace(path: Path) -> reference.Trace:
    return reference.read_trace(path)


@pytest.fixture(scope="module")
def run(path: Path) -> kv.Run:
    return kv.replay(path, [*CHANGED, *MOVED, *EXACT], BUDGET, metrics="kv_bytes", progress=False)


@pytest.fixture(scope="module")
def by_query_head(path: Path) -> kv.Run:
    return kv.replay(path, "h2o:heads=query,store=cache", BUDGET, progress=False)


def selected(trace: reference.Trace, policy: str) -> Selection:
    return reference_policies.select(trace, Policy.parse(policy), str(BUDGET))


def kept_bytes(run: kv.Run, policy: str, layer: int) -> float:
    cell = run._cell(policy, str(BUDGET), "")
    rows = run.rows(lambda one: (one["metric"] == "kv_bytes") & (one["layer"] == str(layer)) & (one["variant"] == ""))
    return rows[rows["cell"] == cell["cell"]]["value"].item()


def assert_rows(found: StoredLayer, expected: list[np.ndarray]) -> None:
    assert len(found.positions) == len(expected)
    for mine, theirs in zip(found.positions, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("policy", CHANGED)
def test_changed_keys_and_values_are_those_of_the_reference(policy: str, run: kv.Run, trace: reference.Trace) -> None:
    stored, expected = run.stored(policy, BUDGET), selected(trace, policy)
    changes = 0.0
    for layer in range(4):
        found = stored.layer(layer)
        keys, values = expected.stored(layer)
        assert found.keys.dtype == found.values.dtype == np.float32
        assert found.keys.shape == found.values.shape == (2, 76, 16)
        np.testing.assert_allclose(found.keys, keys, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.values, values, rtol=1e-5, atol=1e-6)
        changes += abs(keys - trace.layers[layer].k).sum() + abs(values - trace.layers[layer].v).sum()
        assert_rows(found, expected.rows[layer])
        assert all((stands == kept).all() for stands, kept in zip(found.stands_at, found.positions, strict=True))
        if expected.stored_bytes is not None:
            assert found.bytes == expected.stored_bytes(layer)
        assert found.bytes == kept_bytes(run, policy, layer)
    assert changes > 1  # a store that does nothing passes no test


@pytest.mark.parametrize("policy", EXACT)
def test_an_exact_store_gives_back_what_was_captured(policy: str, run: kv.Run, path: Path) -> None:
    opened, stored = kv.open(path), run.stored(policy, BUDGET)
    selection = run.selection(policy, BUDGET)
    rows = np.split(selection.positions, selection.offsets[1:-1])
    heads = len(rows) // 4
    for layer in range(4):
        found = stored.layer(layer)
        assert (found.keys == opened.k(layer)).all() and (found.values == opened.v(layer)).all()
        assert_rows(found, rows[layer * heads : (layer + 1) * heads])
        if not policy.startswith("quest"):
            assert found.bytes == 2 * 2 * 16 * sum(map(len, found.positions)) * (2 if heads == 1 else 1)
        assert found.bytes == kept_bytes(run, policy, layer)


def in_slot_order(expected: Selection, layer: int) -> list[np.ndarray]:
    return expected.order[layer] if expected.order is not None else expected.rows[layer]


@pytest.mark.parametrize("policy", [*MOVED, "h2o:heads=query,store=cache"])
def test_moved_keys_stand_at_their_slots(
    policy: str, run: kv.Run, by_query_head: kv.Run, trace: reference.Trace
) -> None:
    expected = selected(trace, policy.replace(",store=cache", ""))
    stored = (by_query_head if "store=cache" in policy else run).stored(policy, BUDGET)
    moves = 0
    for layer in range(4):
        found = stored.layer(layer)
        rows = in_slot_order(expected, layer)
        assert_rows(found, rows)
        heads = 6 if "heads=query" in policy else 2
        assert found.keys.shape == (heads, 76, 16)
        np.testing.assert_array_equal(found.values, trace.layers[layer].v.astype(np.float32))
        for head in range(heads):
            kept = rows[head * len(rows) // heads]
            keys = trace.layers[layer].k[head * 2 // heads].copy()
            slots = 67 - len(kept) + np.arange(len(kept))  # the last ends where the continuation begins
            keys[kept] = reference.rotate(trace, layer, keys[kept], slots - kept)
            np.testing.assert_allclose(found.keys[head], keys, atol=1e-6)
            np.testing.assert_array_equal(found.stands_at[head * len(rows) // heads], slots)
            moves += int((slots != kept).sum())
    assert moves >= 4 * 2 * 4  # of streaming-llm the four sinks of each layer and head


@pytest.mark.parametrize("policy", MOVED)
def test_queries_where_they_were_find_the_logits_of_slots(policy: str, run: kv.Run, trace: reference.Trace) -> None:
    """The reference moves each query to its own slot instead."""
    expected, stored = selected(trace, policy), run.stored(policy, BUDGET)
    queries = np.arange(67, 76)
    for layer in range(4):
        found = stored.layer(layer)
        wanted = reference_metrics.changed_logits(trace, expected, layer, queries)
        asked = trace.layers[layer].q[:, queries]
        logits = trace.scale * asked @ np.repeat(found.keys.astype(float), 3, axis=0).transpose(0, 2, 1)
        for head in range(6):
            kept = found.positions[head // 3 if len(found.positions) > 1 else 0]
            np.testing.assert_allclose(logits[head][:, kept], wanted[head][:, kept], atol=1e-5)
            for g in range(9):
                own = np.arange(67, 67 + g + 1)
                np.testing.assert_allclose(logits[head, g, own], wanted[head, g, own], atol=1e-5)


def test_a_store_written_in_python(path: Path) -> None:
    class Halved(kv.Policy):
        """values by half"""

        def score(self, view: object) -> np.ndarray:
            return view.key_norms()

        def store(self, view: object, kept: np.ndarray) -> tuple:
            return view.keys(), np.where(kept[..., None], view.values() / 2, view.values()), 12.5

    run = kv.replay(path, Halved, BUDGET, metrics="kv_bytes", progress=False)
    found, opened = run.stored("Halved", BUDGET).layer(2), kv.open(path)
    values = opened.v(2).astype(np.float32)
    for head, kept in enumerate(found.positions):
        values[head, kept] /= 2
    assert (found.values == values).all() and (found.keys == opened.k(2)).all() and found.bytes == 12.5

    class Halved(kv.Policy):
        """another policy of that name"""

        def score(self, view: object) -> np.ndarray:
            return -view.key_norms()

    with pytest.raises(kv.Error, match="policy Halved has changed since the run"):
        run.stored("Halved", BUDGET)


def test_the_trace_may_be_in_memory(path: Path, trace: reference.Trace) -> None:
    opened = kv.open(path)
    arrays = [[getattr(opened, name)(layer) for layer in range(4)] for name in "qkv"]
    rope = kv.Rope(trace.layers[0].inv_freq)
    made = kv.from_arrays(*arrays, prompt=67, rope=rope, softmax_scale=trace.scale)
    policies = ["cam-one-shot:merge=2,recent=2", "streaming-llm:positions=cache"]
    run = kv.replay(made, policies, BUDGET, progress=False)
    for policy in policies:
        other = kv.replay(path, policy, BUDGET, progress=False)
        mine, theirs = run.stored(policy, BUDGET, made).layer(1), other.stored(policy, BUDGET).layer(1)
        assert (mine.keys == theirs.keys).all() and (mine.values == theirs.values).all()
    with pytest.raises(kv.Error, match="trace arrays was in memory"):
        run.stored("cam-one-shot", BUDGET)


def test_what_cannot_be_asked_is_refused(run: kv.Run, path: Path, traces: Path, small: Path) -> None:
    with pytest.raises(kv.Error, match="no such cell"):
        run.stored("snapkv", 11)
    with pytest.raises(kv.Error, match="no such cell"):
        run.stored("snapkv", BUDGET, kv.open(small))
    other = path.parent / "other" / "stored.h5"
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(small.read_bytes())
    with pytest.raises(kv.Error, match="not the trace of .*stored.h5"):
        run.stored("snapkv", BUDGET, kv.open(other))
    for layer in (-1, 4):
        with pytest.raises(kv.Error, match=f"layer: expected a treated layer: 0, 1, 2, 3, found {layer}"):
            run.stored("snapkv", BUDGET).layer(layer)
    sliding = kv.replay(traces / "sliding.h5", "local", BUDGET, metrics="kv_bytes", progress=False)
    with pytest.raises(kv.Error, match="layer: expected a treated layer: 0, 2, found 1"):
        sliding.stored("local", BUDGET).layer(1)
