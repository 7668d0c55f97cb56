"""Worked examples of the policies that the further section of the rules describes in a line each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import reference
import reference_attention
import reference_geometry
import reference_heads
import reference_metrics
import reference_stores
from reference import Layer, Trace
from reference_policies import decide, parameters_of, select
from reference_selection import Case, Policy, Selection, Verdict

FIXTURE = reference.fixture()


def chosen(trace: Trace, policy: str, budget: str) -> Selection:
    return select(trace, Policy.parse(policy), budget)


def kept(trace: Trace, policy: str, budget: str) -> list[list[list[int]]]:
    return [[row.tolist() for row in layer] for layer in chosen(trace, policy, budget).rows]


def one_head(q: object, k: object, v: object | None = None, n_layers: int = 1, **rope: object) -> Trace:
    """A trace of one head whose tokens are all its prompt, the same in each layer."""
    q, k = (np.array(x, float)[None] for x in (q, k))
    v = k if v is None else np.array(v, float)[None]
    layers = [Layer(q, k, v, np.arange(q.shape[1]), 0, index, **rope) for index in range(n_layers)]
    return Trace("one head", layers, k.shape[1], 1.0, 0.0, 4)


# ------------------------------------------------------------------------------------------------------ random numbers


def test_normal_numbers() -> None:
    numbers = reference_geometry.gaussian(3, 1, 2, *np.indices((100, 100)))
    assert abs(numbers.mean()) < 0.04
    assert abs(numbers.std() - 1) < 0.03
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.35
    first = [(int(reference.chain(3, 1, 2, 0, 0, last)) // 2**11 + 0.5) / 2**53 for last in (0, 1)]
    assert numbers[0, 0] == pytest.approx(math.sqrt(-2 * math.log(first[0])) * math.cos(2 * math.pi * first[1]))


# ----------------------------------------------------------------------------------------------------- keys and values


def test_layers_that_keep_all_keys() -> None:
    counts = [[len(row) for row in layer] for layer in kept(FIXTURE, "knorm:skip_layers=(1)", "6")]
    assert counts == [[4, 4], [12, 12], [4, 4], [4, 4]]
    assert kept(FIXTURE, "knorm:skip_layers=(1)", "6")[0] == kept(FIXTURE, "knorm", "4")[0]


def test_blocks_of_keydiff() -> None:
    assert kept(FIXTURE, "keydiff:schedule=every(12)", "6") == kept(FIXTURE, "keydiff", "6")
    keys = [[1, 0], [1, 0.1], [0, 1], [1, 0], [1, 0], [-1, 0]]
    # after the first block of 3 the odd one out is 2, then the tie of 0, 3 and 4 evicts the highest
    assert kept(one_head(keys, keys), "keydiff:schedule=every(3)", "2") == [[[2, 5]]]
    evicted_at = chosen(one_head(keys, keys), "keydiff:schedule=every(3)", "2").evicted_at
    assert sorted(evicted_at[0, 0].tolist()) == [-1, -1, 2, 5, 5, 5]


def test_spread_on_the_scale_of_the_next_partition() -> None:
    tokens, following = np.array([[2.0, 5, 7], [0, 0, 7]]), np.array([[0.0, 0, 7], [2, 5, 7], [1, 1, 7]])
    # in units of what follows: (1, 1, 0) and (0, 0, 0), whose deviations are 1/sqrt(3) and 0
    weights = reference_geometry.spread(tokens, following)
    assert weights[0] / weights[1] == pytest.approx(math.exp(1 / math.sqrt(3)))
    assert weights.sum() == pytest.approx(1)


def test_few_tokens_for_partitions() -> None:
    assert kept(FIXTURE, "lagkv:sinks=2,lag=6", "5") == [[[0, 1, 9, 10, 11]] * 2] * 4
    assert kept(FIXTURE, "lagkv:sinks=0,lag=6", "5") != [[[7, 8, 9, 10, 11]] * 2] * 4


def test_directions_of_queries() -> None:
    queries = np.outer([3.0, -1, 2, 5], [0.6, 0, -0.8])
    np.testing.assert_allclose(reference_geometry.main_directions(one_head(queries, queries), 0), [[0.6, 0, -0.8]])
    np.testing.assert_allclose(reference_geometry.main_directions(one_head(-queries, queries), 0), [[-0.6, 0, 0.8]])


@pytest.mark.parametrize("sketch", [0, 3])
def test_leverage_by_singular_values(sketch: int) -> None:
    case = Case(FIXTURE, parameters_of(Policy.parse(f"leverage:sketch={sketch},ridge=0.5,seed=4")), "6")
    expected = []
    for head in range(2):
        keys = FIXTURE.layers[1].k[head, :12]
        complex_keys = (keys[:, :2] + 1j * keys[:, 2:]) * np.exp(-1j * np.arange(12)[:, None] * [1, 0.1])
        x = np.concatenate([complex_keys.real, complex_keys.imag], axis=1)
        x = x - x.mean(axis=0)
        if sketch:
            columns = range(sketch)
            phi = [[reference_geometry.gaussian(4, 1, head, c, s) for s in columns] for c in range(4)]
            x = x @ np.array(phi) / math.sqrt(sketch)
        left, values, _ = np.linalg.svd(x, full_matrices=False)
        expected.append((left**2 * (values**2 / (values**2 + 0.5))).sum(axis=1))
    expected = np.array(expected)
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(reference_geometry.leverages(case, 1), expected, atol=1e-10)


def test_attention_in_blocks() -> None:
    whole = np.arange(12)
    for size in (1, 5, 256):
        paid = reference_geometry.attention_in_blocks(FIXTURE, 0, whole, size)
        np.testing.assert_allclose(paid.sum(axis=1), 12)
    np.testing.assert_allclose(reference_geometry.attention_in_blocks(FIXTURE, 0, whole, 1), 1)
    layer = FIXTURE.layers[0]
    weights = [np.exp(layer.q[h, t] @ layer.k[0, 5:10].T) for h in (0, 1) for t in range(5, 10)]
    expected = sum(w / w.sum() for w in weights) / 2
    np.testing.assert_allclose(reference_geometry.attention_in_blocks(FIXTURE, 0, whole, 5)[0, 5:10], expected)
    np.testing.assert_allclose(reference_geometry.attention_in_blocks(FIXTURE, 0, whole[5:], 5)[0, :5], expected)


def test_protected_tokens_are_no_part_of_compactor() -> None:
    policy, expected = "compactor:sinks=2,recent=1,block=4", kept(FIXTURE, "compactor:sinks=2,recent=1,block=4", "6")
    for token, changes in ((0, False), (11, False), (5, True)):
        trace = reference.fixture()
        for layer in trace.layers:
            layer.q[:, token], layer.k[:, token], layer.v[:, token] = 2, -2, 3
        assert (kept(trace, policy, "6") != expected) == changes
    assert kept(FIXTURE, "compactor:sinks=8,recent=4", "10") == [[[*range(8), 10, 11]] * 2] * 4
    assert kept(FIXTURE, "compactor:sinks=8,recent=6", "7") == [[[*range(7)]] * 2] * 4


# ----------------------------------------------------------------------------------------------------------- attention


def test_tova_at_every_token() -> None:
    online = chosen(FIXTURE, "tova:schedule=online", "6")
    gone = online.evicted_at[:, 0]
    for t in range(6, 16):
        assert ((gone == t).sum(axis=1) == 1).all()
    layer, there = FIXTURE.layers[2], np.arange(7)
    weights = [np.exp(0.5 * layer.k[h // 2, there] @ layer.q[h, 6]) for h in range(4)]
    lowest = np.mean([w / w.sum() for w in weights], axis=0).argmin()
    assert np.flatnonzero(gone[2] == 6).tolist() == [lowest]
    safe = chosen(FIXTURE, "tova:schedule=online,protect_last=true", "6").evicted_at[:, 0]
    assert (safe[:, :16] != np.arange(16)).all()


def test_ties_of_counts_go_to_the_greater_sum() -> None:
    # 2 and 3 are attended to more than evenly by both queries, 3 the more; 0 and 1 by none
    keys = [[0.0], [0], [1], [2], [0], [0]]
    trace = one_head(np.ones((6, 1)), keys)
    assert kept(trace, "scissorhands:history=2,recent=2", "3") == [[[3, 4, 5]]]
    assert kept(trace, "scissorhands:history=2,recent=2", "4") == [[[2, 3, 4, 5]]]
    keys = np.zeros((6, 1))  # nobody is above the even share
    assert kept(one_head(keys, keys), "scissorhands:history=3,recent=1", "3") == [[[0, 1, 5]]]


def test_expected_queries() -> None:
    """Without RoPE: the mean query's logits, and half the variance of the logits."""
    queries, keys = [[9.0, 9], [2, 1], [4, 1]], [[0.0, 0], [1, 0], [0, 2]]
    trace = one_head(queries, keys, inv_freq=np.zeros(1))
    case = Case(trace, parameters_of(Policy.parse("expected-attention:sinks=1,future=5")), "2")
    # mean (3, 1), variance 1 along the first channel: z = 3 + 1/2 and 2
    expected = [0, math.exp(3.5), math.exp(2)]
    weights = reference_attention.expected_weights(case, 0, case.number("sinks"))
    np.testing.assert_allclose(weights[0], np.array(expected) / sum(expected))


def test_expected_queries_turn() -> None:
    """Queries that are equal before RoPE: the mean over future positions of where RoPE brings them."""
    query, positions = 1.5 - 0.5j, np.arange(6)
    turned = 2 * query * np.exp(0.3j * positions)  # attention_scaling is 2
    queries = np.stack([turned.real, turned.imag], axis=1)
    trace = one_head(queries, queries, inv_freq=np.array([0.3]), attention_scaling=2.0)
    case = Case(trace, parameters_of(Policy.parse("expected-attention:sinks=0,future=3")), "2")
    ahead = 2 * query * np.exp(0.3j * np.array([6, 7, 8])).mean()
    z = (ahead * turned.conj()).real
    weights = reference_attention.expected_weights(case, 0, case.number("sinks"))
    np.testing.assert_allclose(weights[0], np.exp(z) / np.exp(z).sum())


def test_chance_of_nacl() -> None:
    by_score = "nacl:question_tokens=2,random=0.0,question=last"
    assert kept(FIXTURE, by_score, "6") == kept(FIXTURE, "snapkv:window=2,pool=none", "6")
    by_chance = "nacl:question_tokens=2,random=0.5,seed={},question=last"
    sets = [kept(FIXTURE, by_chance.format(seed), "6") for seed in range(40)]
    best = kept(FIXTURE, by_score, "4")
    assert all(set(best[0][0]) <= set(one[0][0]) for one in sets)
    others = [position for one in sets for position in set(one[0][0]) - set(best[0][0])]
    assert len(others) == 80
    assert len(set(others)) == 8  # each of the others comes at some time
    cold = kept(FIXTURE, by_chance.format(3) + ",temperature=1e-6", "6")
    assert cold == kept(FIXTURE, by_score, "6")


def test_stages_of_critical_kv() -> None:
    whole = "critical-kv:wo=none,base=(snapkv:window=2,kernel=3),first={}"
    base = "snapkv:window=2,kernel=3"
    assert kept(FIXTURE, whole.format("1.0"), "6") == kept(FIXTURE, base, "6")
    assert kept(FIXTURE, whole.format("0.5"), "6") != kept(FIXTURE, base, "6")
    identity = reference.fixture()
    for layer in identity.layers:
        layer.wo = np.concatenate([np.eye(4)] * 4, axis=1)
    of_trace = whole.format("0.5").replace("wo=none", "wo=trace")
    assert kept(identity, of_trace, "6") == kept(FIXTURE, whole.format("0.5"), "6")
    values = FIXTURE.layers[0].v[:, :12]
    identity.layers[0].wo[0, :8] = 3  # the sum of a value's numbers, thrice, in place of its first number
    lengths = reference_attention.output_norms(identity, 0, "trace")
    np.testing.assert_allclose(lengths[0], np.abs(values[0, :, 1:]).sum(axis=1) + 3 * np.abs(values[0].sum(axis=1)))
    np.testing.assert_allclose(lengths[1], np.abs(values[1]).sum(axis=1))


@pytest.mark.parametrize(("base", "length"), [("snapkv:window=2,pool=none", 1.075), ("h2o:recent=2", 1.4)])
def test_the_constant_of_critical_kv_is_added_to_means(base: str, length: float) -> None:
    # Tokens 1 and 2 have little attention. Added to sums the constant would count for less, and token 1 would win.
    values = [[0.0], [1], [length], [0], [1], [1]]
    trace = one_head(np.ones((6, 1)), [[0.0], [-9], [-9.3], [0], [0], [0]], values)
    assert kept(trace, f"critical-kv:wo=none,base=({base})", "3") == [[[2, 4, 5]]]


# ----------------------------------------------------------------------------------------------------- heads and layers


def test_even_shares(tmp_path: Path) -> None:
    snapkv = kept(FIXTURE, "snapkv:window=2,kernel=3", "6")
    assert kept(FIXTURE, "ada-kv:window=2,kernel=3,alpha=1", "6") == snapkv
    np.save(tmp_path / "even.npy", np.full((4, 4), 1 / 16))
    assert kept(FIXTURE, f"head-kv:window=2,kernel=3,table={tmp_path}/even.npy", "6") == snapkv


def test_shares_by_importance(tmp_path: Path) -> None:
    importance = np.zeros((4, 4))
    importance[1, :2], importance[3, 2] = 0.25, 0.5
    np.save(tmp_path / "table.npy", importance)
    # b = 4, beta = 2: every head 2, and the other 16 of all 32 slots as 0.25 is to 0.25, the group means
    counts = [
        [len(row) - 2 for row in layer]
        for layer in kept(FIXTURE, f"head-kv:window=2,beta=2,table={tmp_path}/table.npy", "6")
    ]
    assert counts == [[2, 2], [10, 2], [2, 2], [2, 10]]


def test_lazy_layers() -> None:
    zeros = np.zeros((10, 1))  # every query attends evenly
    even = one_head(zeros, zeros)
    policy = "simlayerkv:sinks=1,recent=3,threshold={}"
    assert kept(even, policy.format(0.39), "5") == [[[0, 7, 8, 9]]]
    assert kept(even, policy.format(0.41), "5") == [[list(range(10))]]
    # the query before it sees 9 tokens, of them 3: on average 0.3667
    assert kept(even, policy.format(0.36) + ",rows=2", "5") == [[[0, 7, 8, 9]]]
    assert kept(even, policy.format(0.37) + ",rows=2", "5") == [[list(range(10))]]


def test_heads_that_retrieve(tmp_path: Path) -> None:
    trace = reference.fixture()
    case = Case(trace, parameters_of(Policy.parse("duo-attention")), "6")
    positions = np.arange(16)
    turns = np.exp(0.005j * positions)
    towards, away = np.stack([turns.real, turns.imag], 1), -np.stack([turns.real, turns.imag], 1)
    nothing = np.zeros((16, 2))
    q = np.stack([5 * towards, 5 * towards, 5 * away, nothing])
    k = np.stack([towards, towards])
    trace.layers = [Layer(q, k, k, positions, 0, 0, np.array([0.005]))]
    near, far = reference_heads.early_attention(case, 0)
    even = 501 / 1000
    assert near < even < far
    weights = np.exp(-0.5 * 5 * np.cos(0.005 * (499 - np.arange(500))))
    area = sum((500 - i) * w for i, w in enumerate(weights)) / weights.sum() / 500
    assert far == pytest.approx((area + even) / 2)
    policy = "duo-attention:sinks=1,recent=2{}"
    assert kept(trace, policy.format(""), "6") == [[[0, 10, 11], list(range(12))]]
    np.save(tmp_path / "gates.npy", np.array([[0.9, 0.1]]))
    assert kept(trace, policy.format(f",table={tmp_path}/gates.npy"), "6") == [[list(range(12)), [0, 10, 11]]]


# -------------------------------------------------------------------------------------------------------------- stores


def test_channels_of_think() -> None:
    # queries times keys, squared: 4, 4, 1 and 0; half of the channels go, of the equal ones none
    queries, keys = [[9.0, 9, 9, 9], [2, 1, -1, 0]], [[1.0, 2, 1, 5], [-1, 2, 1, 5]]
    trace = one_head(queries, keys)
    changed = chosen(trace, "think:window=1,ratio=0.5,recent=1", "2")
    assert changed.stored(0)[0].tolist() == [[[1, 2, 0, 0], [-1, 2, 1, 5]]]
    assert changed.stored_bytes(0) == 4 * (6 + 8)
    changed = chosen(trace, "think:window=1,ratio=0.75,recent=0", "2")
    assert changed.stored(0)[0].tolist() == [[[1, 0, 0, 0], [-1, 0, 0, 0]]]
    assert chosen(trace, "think:ratio=0.24", "2").stored(0)[0].tolist() == [keys]


def test_values_of_cam() -> None:
    keys, values = [[0.0]] * 4, [[1.0], [10], [100], [1000]]  # even attention: each value is merged
    trace = one_head(np.ones((4, 1)), keys, values)
    changed = chosen(trace, "cam:sinks=0,merge=2", "2")
    states = changed.evolving(0, np.arange(5))[0, :, :, 0]
    assert states.tolist() == [[1, 10, 100, 1000]] * 3 + [[1, 10.5, 100.5, 1000], [1, 10.5, 105.75, 1005.25]]
    sampled = chosen(trace, "cam:sinks=0,merge=2,mode=sampled,attention=cumulative", "2")
    np.testing.assert_array_equal(sampled.evolving(0, np.array([3, 4]))[0, :, :, 0], states[3:])


def test_probabilities_of_cam() -> None:
    """After the third query the first token is evicted: weights 1, 2 and 5, of which the next one and both count."""
    weights = np.log([1.0, 2, 5])
    trace = one_head(np.ones((3, 1)), weights[:, None], [[8.0], [0], [0]])
    for given, values in (
        ("merge=1", [8, 4, 0]),
        ("merge=1,mean=later", [8, 8 * 2 / 7, 0]),
        ("merge=2", [8, 4 * 2 / 7, 4 * 2 / 7]),
    ):
        changed = chosen(trace, f"cam:sinks=0,{given}", "2")
        np.testing.assert_allclose(changed.evolving(0, np.array([3]))[0, 0, :, 0], values)


def test_values_of_cam_one_shot() -> None:
    keys = [[0.0], [0], [0], [0], [0]]  # even attention: sums 1/1 + 1/2 + ... + 1/5, and so on
    values = [[1.0], [10], [100], [1000], [10000]]
    trace = one_head(np.ones((5, 1)), keys, values)
    paid = np.array([sum(1 / t for t in range(first, 6)) for first in range(1, 6)])
    np.testing.assert_allclose(reference.cumulative_attention(trace, 0)[0], paid)
    changed = chosen(trace, "cam-one-shot:recent=2,merge=2", "3")
    assert changed.rows[0][0].tolist() == [0, 3, 4]
    share = {token: min(1, paid[token] / paid[3:].mean()) for token in (1, 2)}
    more = (share[1] * 10 + share[2] * 100) / 2
    np.testing.assert_allclose(changed.stored(0)[1][0, [0, 3, 4], 0], [1, 1000 + more, 10000 + more])
    assert changed.stored(0)[0].tolist() == [keys]


def test_values_of_merged_similar() -> None:
    """Token 0 is most like token 3: cosine 0.8, weight 0.8 3/4. Token 1 is most like token 2: 1 and 1/2."""
    keys, values = [[3.0, 4], [2, 0], [1, 0], [0, 1]], [[3.0, 0], [0, 2], [2, 0], [0, 1]]
    trace = one_head(np.ones((4, 2)), keys, values)
    for given, merged in (
        ("", [[4 / 3, 2 / 3], [1.8 / 1.6, 1 / 1.6]]),
        (",similarity_threshold=0.9", [[4 / 3, 2 / 3], [0, 1]]),
        (",merge_fraction=0.5", [[4 / 3, 2 / 3], [0, 1]]),
    ):
        changed = chosen(trace, f"local:store=merged-similar{given}", "2")
        np.testing.assert_allclose(changed.stored(0)[1][0, 2:], merged, rtol=1e-6)
        assert changed.stored(0)[0].tolist() == [keys]


def test_keys_and_values_of_merged_tokens() -> None:
    """Token 0 is most like token 3, with cosine 0.8; token 1 most like token 2, with 1. The mean is 0.9."""
    keys, values = [[3.0, 4], [2, 0], [1, 0], [0, 1]], [[3.0, 0], [0, 2], [2, 0], [0, 1]]
    trace = one_head(np.ones((4, 2)), keys, values)
    merged_keys, merged_values = chosen(trace, "local:store=merged-tokens", "2").stored(0)
    np.testing.assert_allclose(merged_keys[0], [*keys[:2], [1.5, 0], [0, 1]])
    np.testing.assert_allclose(merged_values[0], [*values[:2], [1, 1], [0, 1]])
    keys[1] = [1.5, 2]  # now like token 0: both have token 3, with 0.8
    trace = one_head(np.ones((4, 2)), keys, values)
    merged_keys, merged_values = chosen(trace, "local:store=merged-tokens", "2").stored(0)
    np.testing.assert_allclose(merged_keys[0, 2:], [[1, 0], [0.8 * 4.5 / 3, (1 + 0.8 * 6) / 3]])
    np.testing.assert_allclose(merged_values[0, 2:], [[2, 0], [0.8 * 3 / 3, (1 + 0.8 * 2) / 3]])


def test_directions_of_minicache() -> None:
    trace = one_head(np.ones((4, 2)), np.ones((4, 2)), n_layers=4)
    for index, keys in ((2, [[2.0, 0], [1, 0], [1, 0], [3, 0]]), (3, [[0.0, 5], [1, 0], [1, 1], [-1, 1]])):
        trace.layers[index].k = np.array([keys])
    changed = chosen(trace, "minicache:gap=0.5,t=0.25", "2")  # 90, 0, 45 and 135 degrees: the first and the last stay
    turned = math.radians(45 / 4)
    deeper = [[0, 5], [1, 0], [math.sqrt(2) * math.cos(turned), math.sqrt(2) * math.sin(turned)], [-1, 1]]
    np.testing.assert_allclose(changed.stored(3)[0][0], deeper, atol=1e-12)
    np.testing.assert_allclose(changed.stored(2)[0][0, 2], [math.cos(turned), math.sin(turned)])
    np.testing.assert_allclose(changed.stored(2)[1], trace.layers[2].v)  # equal values stay what they are
    assert changed.stored(1)[0] is trace.layers[1].k
    changed = chosen(trace, "minicache:distance=code,gap=0.25,t=1", "2")  # only the largest angle stays
    np.testing.assert_allclose(changed.stored(2)[0][0], [[0, 2], [1, 0], [0.5**0.5, 0.5**0.5], [3, 0]], atol=1e-12)
    every = chosen(FIXTURE, "minicache:gap=1.0", "2")  # of 4 numbers a layer keeps a length and half a direction
    assert [every.stored_bytes(index) for index in range(4)] == [768, 768, 576, 576]


def test_pages_of_one_token() -> None:
    selection = chosen(FIXTURE, "quest:page=1,dense_layers=1,least_pages=1", "3")
    queries = np.array([5, 11, 14])
    layer = FIXTURE.layers[1]
    read = selection.read(1, queries)
    for head, e in np.ndindex(4, 3):
        t = queries[e]
        products = (layer.k[head // 2, :12] @ layer.q[head, t])[: t + 1]  # of pages that have begun
        best = np.lexsort((np.arange(len(products)), -products))[:3]
        visible = set(best.tolist()) | set(range(12, t + 1)) | {int(t)}
        assert set(np.flatnonzero(read[head, e])) == visible
    assert (selection.read(0, queries) == (np.arange(16) <= queries[:, None])).all()


def test_bounds_of_pages() -> None:
    keys = [[1.0, -1], [-1, 1], [0.5, 0.5], [0.9, 0.9]]
    trace = one_head([[0.0, 0]] * 3 + [[1, 1]], keys)
    # bounds 1 + 1 and 0.9 + 0.9, though no product of the first page is above 0
    read = chosen(trace, "quest:page=2,dense_layers=0,least_pages=1", "2").read(0, np.array([3]))
    assert np.flatnonzero(read[0, 0]).tolist() == [0, 1, 3]


# ----------------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("tova:schedule=online", "tova:schedule=online,protect_last=true"),
        ("keydiff:schedule=every(5)", "keydiff:schedule=every(4)"),
        ("nacl:question_tokens=2,random=0.5", "nacl:question_tokens=2,random=0.5,seed=1"),
        ("critical-kv:wo=none,first=0.5", "critical-kv:wo=none,first=0.9"),
        ("ada-kv:window=2,kernel=3", "ada-kv:window=2,kernel=3,alpha=1"),
        ("scissorhands:history=4,recent=2", "scissorhands:history=6,recent=2"),
        ("lagkv:sinks=2,lag=3", "lagkv:sinks=2,lag=2"),
        ("expected-attention:future=4", "expected-attention:future=4,covariance=false"),
    ],
)
def test_following(policy: str, other: str) -> None:
    ours, theirs = chosen(FIXTURE, policy, "7"), chosen(FIXTURE, other, "7")
    followed = decide(FIXTURE, Policy.parse(policy), "7", follow=ours)
    assert followed.decisions
    assert all(decision.verdict(ours) == Verdict.EQUAL for decision in followed.decisions)
    followed = decide(FIXTURE, Policy.parse(policy), "7", follow=theirs)
    assert any(decision.verdict(theirs) == Verdict.WRONG for decision in followed.decisions)


def test_losses_of_evicted_and_changed_values() -> None:
    changed = chosen(FIXTURE, "cam-one-shot:recent=3", "6")
    loss = reference_metrics.kv_l1_loss(FIXTURE, changed)["kv_l1_loss", "value"]
    values = FIXTURE.layers[0].v[:, :12]
    there = changed.stored(0)[1][:, :12].copy()
    for head, row in enumerate(changed.rows[0]):
        there[head, np.setdiff1d(np.arange(12), row)] = 0
    assert loss.layers[0] == pytest.approx(np.abs(values - there).sum() / np.abs(values).sum())


def test_angles() -> None:
    assert reference_stores.angle(np.array([1.0, 0]), np.array([0.0, 2])) == pytest.approx(math.pi / 2)
    half = reference_stores.between(np.array([3.0, 0]), np.array([0.0, 2]), 0.5)
    np.testing.assert_allclose(half, [0.5**0.5, 0.5**0.5])
