"""Worked examples of the policies in reference_2026."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_2026
from reference import Layer, Trace, chain
from reference_policies import decide, parameters_of
from reference_selection import Case, Policy, Verdict
from test_further import FIXTURE, chosen, kept, one_head


def case_of(trace: Trace, policy: str, budget: str) -> Case:
    return Case(trace, parameters_of(Policy.parse(policy)), budget)


def two_query_heads(queries: list, keys: list) -> Trace:
    """Of one component: queries [2,n] and keys [n]."""
    q, k = np.array(queries, float)[:, :, None], np.array(keys, float)[None, :, None]
    return Trace("pair", [Layer(q, k, k, np.arange(k.shape[1]), 0, 0)], k.shape[1], 1.0, 0.0, 4)


# ----------------------------------------------------------------------------------------------------------- attention


def test_redundancy_of_r_kv() -> None:
    # Rows of cosines: (0, 1, 0, -1), (1, 0, 0, -1), zeros, (-1, -1, 0, 0). The last one above 0.5 is cleared: that of
    # key 1, that of key 0; in the last two rows it is column 0.
    alike = reference_2026.redundancy(np.array([[1.0, 0], [2, 0], [0, 1], [-3, 0]]), 0.5)
    means = np.array([0, -1, 0, -2]) / 4
    np.testing.assert_allclose(alike, np.exp(means) / np.exp(means).sum(), rtol=1e-6)
    # of three equal keys the rows are (0, 1, 0), (1, 0, 0) and (1, 0, 0)
    alike = reference_2026.redundancy(np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]]), 0.5)
    means = np.array([2, 1, 0, 0]) / 4
    np.testing.assert_allclose(alike, np.exp(means) / np.exp(means).sum(), rtol=1e-6)


def test_logits_of_r_kv() -> None:
    trace = two_query_heads([[0, 0, 0, 1], [0, 0, 0, -1]], [1, 2, -3, 9])
    weights = reference_2026.window_over(case_of(trace, "r-kv:window=1", "3"), 0, 3, maximum=True)
    expected = np.exp([1, 2, 3])  # the larger logit of the two heads; the window's own key is no part of the sum
    np.testing.assert_allclose(weights[0, 0], expected / expected.sum())


def test_a_window_that_competes() -> None:
    """Where recent tokens of the window are not protected, a query does not see those after it."""
    weights = reference_2026.window_over(case_of(FIXTURE, "r-kv:window=3", "6"), 0, 11)
    assert (weights[:, 0] > 0).sum(axis=1).tolist() == [10] * 4
    assert (weights[:, 2] > 0).sum(axis=1).tolist() == [11] * 4


def test_balance_of_r_kv() -> None:
    keys = np.array([[1.0, 0], [2, 0], [0, 1], [-3, 0], [0, 0]])
    trace = one_head([[0.0, 0]] * 4 + [[3, 1]], keys)
    assert kept(trace, "r-kv:window=1,kernel=1,mix_lambda=1", "3") == [[[0, 1, 4]]]
    assert kept(trace, "r-kv:window=1,kernel=1,mix_lambda=0", "3") == [[[1, 3, 4]]]
    # a kernel of 3 lifts the neighbours of key 1
    assert kept(trace, "r-kv:window=1,kernel=3,mix_lambda=1", "4") == [[[0, 1, 2, 4]]]


def test_parts_of_vase() -> None:
    values = np.array([[0.0, 0], [5, -5], [7, 7], [1, 2], [0, 8], [0, 0], [9, 0]])
    keys = [[0.0, 0]] * 3 + [[60, 0]] + [[0, 0]] * 3
    trace = one_head(np.ones((7, 2)), keys, values)
    # the sink 0, of the ranges 10, 0, 1, 8 and 0 that of token 1, token 3 with all of the attention, and the window
    policy = "vase:window=1,sinks=1,large=0.5,kernel=1"
    assert all(kept(trace, f"{policy},seed={seed}", "4") == [[[0, 1, 3, 6]]] for seed in range(20))
    # a kernel of 3 shares its weight with its neighbours
    sampled = {kept(trace, f"{policy.replace('kernel=1', 'kernel=3')},seed={seed}", "4")[0][0][2] for seed in range(40)}
    assert sampled == {2, 3, 4}
    # without sinks the ranges of tokens 1 and 4; one of the others has hardly any weight
    assert {1, 3, 4, 6} < set(kept(trace, "vase:window=1,sinks=0,large=0.5,kernel=1", "5")[0][0])


def test_samples_are_in_proportion() -> None:
    weights = np.array([0.1, 0.6, 0.3, 0])
    first = [reference_2026.sample_keys(weights, seed, 1, 0).argmax() for seed in range(3000)]
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 3000, weights, atol=0.03)
    assert reference_2026.sample_keys(np.zeros(3), 0, 0, 0).tolist() == [-1e300] * 3


def test_noise_of_keyformer() -> None:
    trace = one_head([[1.0], [2], [0]], [[3.0], [1], [2]])
    noise = np.zeros((3, 3))
    for t, j in np.ndindex(3, 3):
        u = (int(chain(5, 0, 0, t, j)) // 2**11 + 0.5) / 2**53
        noise[t, j] = -math.log(-math.log(u))
    expected = np.zeros(3)
    for t, q in enumerate((1, 2, 0)):
        y = np.exp((q * np.array([3, 1, 2]) + noise[t])[: t + 1] / 1.5)
        expected[: t + 1] += y / y.sum()
    np.testing.assert_allclose(reference_2026.gumbel_attention(trace, 0, 1.5, 5)[0], expected)


def test_gap_of_keyformer() -> None:
    zeros = np.zeros((10, 1))
    trace = one_head(zeros, zeros)  # the earlier a token, the more attention; at a high temperature without noise
    assert kept(trace, "keyformer:recent=0.5,tau=1e9", "6") == [[[0, 1, 2, 7, 8, 9]]]
    assert kept(trace, "keyformer:recent=0.5,tau=1e9,gap=true", "6") == [[[0, 1, 2, 8, 9]]]
    assert kept(trace, "keyformer:recent=0.5,tau=1e9,gap=true", "9") == [[[0, 1, 2, 3, 4, 7, 8, 9]]]


def test_uses() -> None:
    # query 1 and 2 use token 0, query 3 token 1, query 4 token 2
    queries = np.eye(5)[[4, 0, 0, 1, 2]]
    trace = one_head(queries, 10 * np.eye(5))
    used = reference_2026.uses(trace, 0)[0][0]
    assert np.argwhere(used).tolist() == [[1, 0], [2, 0], [3, 1], [4, 2]]
    assert reference_2026.last_use(used[None])[0].tolist() == [2, 3, 4, 3, 4]
    assert kept(trace, "lru", "3") == [[[1, 2, 4]]]  # of 1 and 3 the lower
    assert kept(trace, "lfu", "3") == [[[0, 2, 4]]]  # of 1 and 2 the one that was used later
    assert not reference_2026.uses(one_head(np.eye(3), 10 * np.eye(3)), 0)[
        0
    ].any()  # attention to itself is none either
    zeros = np.zeros((5, 1))  # even attention is no use
    assert kept(one_head(zeros, zeros), "lru", "2") == kept(one_head(zeros, zeros), "lfu", "2") == [[[3, 4]]]


def test_uses_of_a_group() -> None:
    # head 0 attends to token 0 only, head 1 to token 1 only: in the mean both have half, more than a third
    trace = two_query_heads([[0, 0, 30], [0, 0, -30]], [1, -1, 0])
    assert reference_2026.uses(trace, 0)[0][0, 2].tolist() == [True, True, False]


# ----------------------------------------------------------------------------------------------------- keys and values


def test_capacity() -> None:
    """Without RoPE: the mean query is (1, 0), its cosines with the keys 1, 0 and 1."""
    trace = one_head([[9.0, 9], [1, 2], [1, -2], [1, 0]], [[7.0, 7], [3, 0], [0, 2], [5, 0]], inv_freq=np.zeros(1))
    trace.layers[0].v = np.array([[[9.0, 9], [2, 0], [0, 3], [0, 1]]])
    found = reference_2026.capacity(case_of(trace, "cap-kv:sinks=1,tau=2,epsilon=0,future=3", "2"), 0, 1)[0]
    small = math.exp(-2)
    across = 1 + 9 * small + 1
    np.testing.assert_allclose(found, [0, 4 / (1 + 4), 9 * small / across, 1 / across])
    found = reference_2026.capacity(case_of(trace, "cap-kv:sinks=1,tau=2,epsilon=1,future=3", "2"), 0, 1)[0]
    np.testing.assert_allclose(found[1], 4 / (1 + 2 * 4))
    assert kept(trace, "cap-kv:sinks=1,tau=2,epsilon=0", "2") == [[[0, 1]]]


def test_queries_of_cap_kv_turn() -> None:
    query = 1.5 - 0.5j
    turned = 2 * query * np.exp(0.3j * np.arange(6))
    queries = np.stack([turned.real, turned.imag], axis=1)
    trace = one_head(queries, queries, inv_freq=np.array([0.3]), attention_scaling=2.0)
    ahead = np.exp(0.3j * np.array([6, 7, 8])).mean() * query
    cosines = (ahead * turned.conj()).real / np.abs(ahead * turned)
    weights = np.exp(5 * (cosines - cosines.max()))
    gram = np.eye(2) + (queries * (weights[:, None] + 1e-6)).T @ queries
    expected = weights * np.einsum("nd,de,ne->n", queries, np.linalg.inv(gram), queries)
    np.testing.assert_allclose(
        reference_2026.capacity(case_of(trace, "cap-kv:sinks=0,future=3", "2"), 0, 0)[0], expected
    )


def test_pages_of_kvcrush() -> None:
    scores = np.array([5.0, 1, 0, 0, 3, 3, 1, 1, 0, 1])  # sums 6, 0, 6, 2, 1
    distances = np.array([0, 3, 0, 1, 2])
    # pages 0 and 2; of the others in the order 3, 4, 1 the first
    assert reference_2026.crushed(scores, 2, 6, 1, distances).tolist() == [0, 1, 4, 5, 6, 7]
    # page 0 and a half of page 2; then 3 and 4
    assert reference_2026.crushed(scores, 2, 7, 2, distances).tolist() == [0, 1, 4, 6, 7, 8, 9]
    # both whole pages are touched, so that none is left as representative: again by sums
    scores_of_11 = np.array([4.0] * 4 + [3] * 4 + [0] * 3)
    assert reference_2026.crushed(scores_of_11, 4, 10, 1, np.array([0, 1])).tolist() == list(range(10))
    # of four candidates in the order 2, 3, 4, 1 every second
    assert reference_2026.crushed(scores, 2, 6, 2, distances).tolist() == [0, 1, 4, 5, 8, 9]


def test_signatures_of_kvcrush() -> None:
    one_row = np.array([[4.0, 1, 3, 2, 0]])  # the better half is 0 and 2; the last token is in no whole page
    anchors = {"mean": [0, 0], "zeros": [1, 1], "ones": [1, 1], "alternating": [2, 2]}
    for anchor, expected in anchors.items():
        assert reference_2026.signature_distances(one_row, 2, anchor, 0, 0).tolist() == expected
    halves = np.array([[4.0, 3, 2, 1]])  # bits of which half of the pages have a 1: the anchor has zeros
    assert reference_2026.signature_distances(halves, 2, "mean", 0, 0).tolist() == [2, 0]
    two_rows = np.array([[4.0, 1, 3, 2], [1, 4, 3, 2]])  # bits (1,0) (0,1) and (1,1) (0,0), by token and head
    assert reference_2026.signature_distances(two_rows, 2, "mean", 0, 0).tolist() == [1, 1]
    assert reference_2026.signature_distances(two_rows, 2, "alternating", 0, 0).tolist() == [2, 2]
    bits = [int(chain(3, 7, bit)) & 1 for bit in range(2)]
    assert (
        reference_2026.signature_distances(one_row, 2, "random", 3, 7).tolist() == [(bits[0] != 1) + (bits[1] != 0)] * 2
    )


def test_kvcrush_without_representatives() -> None:
    policy = "kvcrush:window=2,page=3,ratio=0"
    assert kept(FIXTURE, policy, "6") == kept(FIXTURE, "chunkkv:window=2,chunk=3,heads=kv", "6")
    counts = [[len(row) for row in layer] for layer in kept(FIXTURE, "kvcrush:window=2,page=3,ratio=0.8", "7")]
    assert counts == [[7, 7]] * 4
    assert kept(FIXTURE, "kvcrush:window=2,page=3,ratio=0.8", "7") != kept(FIXTURE, policy, "7")


def test_threshold_of_dms() -> None:
    keys = [[1.0], [-3], [2.5], [2], [4]]
    trace = one_head(keys, keys)
    assert kept(trace, "dms:base=knorm,threshold=-2.5,recent=1", "2") == [[[0, 2, 3, 4]]]
    assert kept(trace, "dms:base=value-norm,threshold=2.25,recent=0", "2") == [[[1, 2, 4]]]
    assert kept(trace, "dms:base=knorm,threshold=1", "2") == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_trigonometric_scores(interleaved: bool) -> None:
    """Against the form that reads rotated keys: Re(mu conj(k) e^(i (t + delta) omega))."""
    generator = np.random.default_rng(0)
    omega, s = np.array([0.7, 0.02]), 1.5
    queries, keys = (generator.normal(size=(6, 2)) + 1j * generator.normal(size=(6, 2)) for _ in "qk")
    turn = s * np.exp(1j * np.arange(6)[:, None] * omega)

    def components(vectors: np.ndarray) -> np.ndarray:
        both = np.stack([vectors.real, vectors.imag], axis=2 if interleaved else 1)
        return both.reshape(6, 4)

    trace = one_head(components(queries * turn), components(keys * turn), inv_freq=omega, attention_scaling=s)
    trace.interleaved = interleaved
    mean, modulus = queries.mean(axis=0), np.abs(queries).mean(axis=0)
    expected = np.zeros(6)
    for delta in [2**power for power in range(17)]:
        seen = (mean * (keys * turn / s).conj() * np.exp(1j * (6 + delta) * omega)).real
        expected += s**2 * (seen + (modulus - np.abs(mean)) * np.abs(keys)).sum(axis=1) / 17
    np.testing.assert_allclose(reference_2026.trigonometric(trace, 0)[0], expected)


def test_keys_without_a_mean_query() -> None:
    """Queries that cancel out: only lengths of keys count."""
    trace = one_head([[1.0, 0], [-1, 0], [1, 0], [-1, 0]], [[2.0, 0], [0, 3], [1, 0], [0, 9]], inv_freq=np.zeros(1))
    assert kept(trace, "tri-attention:recent=0", "2") == [[[1, 3]]]
    assert kept(trace, "tri-attention:recent=1", "2") == [[[1, 3]]]
    assert kept(trace, "tri-attention", "2") == [[[2, 3]]]  # a recent part as long as the budget


def test_sets_that_layers_share() -> None:
    own = kept(FIXTURE, "tri-attention:recent=2", "6")
    by_head = kept(FIXTURE, "tri-attention:recent=2,share=pooled", "6")
    union = chosen(FIXTURE, "tri-attention:recent=2,share=pooled,over_layers=all-rows", "6")
    assert len({str(layer) for layer in own}) > 1
    assert by_head == [by_head[0]] * 4
    assert by_head[0][0] != by_head[0][1]
    assert len({str(layer) for layer in union.rows}) == 1
    # the union of the best of each query head contains them
    scores = [reference_2026.trigonometric(FIXTURE, layer)[:, :10] for layer in range(4)]
    scores = np.array([(one - one.mean(axis=1)[:, None]) / one.std(axis=1)[:, None] for one in scores])
    assert union.rows[0][0].tolist() == sorted(np.argsort(-scores.max(axis=(0, 1)))[:4].tolist()) + [10, 11]
    grouped = scores.reshape(4, 2, 2, 10).max(axis=2).mean(axis=0)
    assert by_head[0] == [sorted(np.argsort(-one)[:4].tolist()) + [10, 11] for one in grouped]
    assert kept(FIXTURE, "tri-attention:recent=2,agg=mean", "6") != own


def test_scores_of_laprox() -> None:
    keys, values = [[0.0], [0], [0], [0]], [[1.0], [4], [2], [1]]
    trace = one_head([[0.0], [0], [0], [0]], keys, values, n_layers=2)
    trace.layers[0].wo, trace.layers[1].wo = np.array([[3.0], [4]]), np.array([[100.0], [0]])
    np.testing.assert_allclose(reference_2026.projected(trace, 1), [[100, 400, 200, 100]])
    np.testing.assert_allclose(reference_2026.projected(trace, 0), [[5, 20, 10, 5]])
    # shares of the layers are equal: the tokens 1 and 2 of both
    assert kept(trace, "laprox:window=1,kernel=1", "3") == [[[1, 2, 3]], [[1, 2, 3]]]
    trace.layers[1].v = np.array([[[4.0], [4], [4], [1]]])  # 1/7, 4/7, 2/7 against thirds
    assert kept(trace, "laprox:window=1,kernel=1", "2") == [[[1, 3]], [[0, 3]]]


def test_norms_of_attention_columns() -> None:
    """Two queries attend to token 0 by 0.7 and 0, to token 1 by 0.3 and 0.6: the sum is smaller, the norm is larger."""
    keys = [[math.log(0.7), -60], [math.log(0.3), math.log(0.6)], [-60, -60], [-60, -60], [-60, math.log(0.4)]]
    trace = one_head([[0.0, 0]] * 3 + [[1, 0], [0, 1]], keys, np.ones((5, 2)))
    trace.layers[0].wo = np.eye(2)
    assert kept(trace, "laprox:window=2,kernel=1", "3") == [[[0, 3, 4]]]
    assert kept(trace, "snapkv:window=2,pool=none", "3") == [[[1, 3, 4]]]


def repeating(queries: list, keys: list, passes: list[tuple[int, int, int]]) -> Trace:
    """The prompt's keys [n] are logarithms of weights, and so are the keys of the passes; queries are 1 or 0."""
    prompt = np.log([[4.0], [2], [1], [1]])
    trace = one_head([[0.0]] * 4, prompt.tolist(), np.zeros((4, 1)))
    trace.passes = passes
    trace.layers[0].q_passes = np.array(queries, float)[None, :, None]
    trace.layers[0].k_passes = np.log(np.array(keys, float))[None, :, None]
    return trace


def test_attention_of_passes() -> None:
    # One pass of two tokens repeats tokens 1 and 2. Its first query gives every key the same, 1 of 3 with its own; the
    # second weighs tokens 1 and 2 by 2 and 1, and the pass by 1 and 4: 2 of 8 and 1 of 8.
    trace = repeating([0, 1], [1, 4], [(2, 1, 3)])
    repeated = reference_2026.largest_of_passes(trace, 0, lambda first, end: (np.arange(first, end),) * 2)
    np.testing.assert_allclose(repeated, [[0, 1 / 3, 1 / 3, 0]])
    # all tokens take part: 1 of 5, and 4, 2, 1, 1 of 13
    every = reference_2026.largest_of_passes(trace, 0, lambda *_: (np.arange(4),) * 2)
    np.testing.assert_allclose(every, [[4 / 13, 1 / 5, 1 / 5, 1 / 5]])
    # tokens 0, 1 and 2, of which 0 gets no score: 1 of 4, and 2 of 12
    beside = reference_2026.largest_of_passes(trace, 0, lambda *_: (np.arange(3), np.array([1, 2])))
    np.testing.assert_allclose(beside, [[0, 1 / 4, 1 / 4, 0]])


def test_passes_do_not_see_each_other() -> None:
    # The first pass has token 1 and a key of weight 1: 2 of 3. The second has tokens 1 and 2 and its own key, of weight
    # 8: 2 of 11 and 1 of 11.
    trace = repeating([1, 1], [1, 8], [(1, 1, 2), (2, 1, 3)])
    found = reference_2026.largest_of_passes(trace, 0, lambda first, end: (np.arange(first, end),) * 2)
    np.testing.assert_allclose(found, [[0, 2 / 3, 1 / 11, 0]])


def test_sets_of_kvzip() -> None:
    trace = repeating([0, 1], [1, 4], [(2, 1, 3)])
    assert kept(trace, "kvzip:sinks=0", "1") == [[[1]]]  # equal scores: the first
    assert kept(trace, "kvzip:sinks=1", "2") == [[[0, 1]]]
    assert kept(trace, "kvzip:sinks=0", "3") == [[[0, 1, 2]]]  # nothing repeats 0 and 3


def test_counts_of_kvcompose() -> None:
    scores = [np.array([[0.9, 0.1, 0.5]]), np.array([[0.8, 0.7, 0.6]])]
    # of the first layer the larger ones of the layers
    np.testing.assert_allclose(reference_2026.composite_curves(scores), [[0.9, 0.7, 0.6], [0.8, 0.7, 0.6]])
    # two heads, each in its own order
    scores = [np.array([[0.2, 0.6, 0.1], [0.0, 0.1, 0.4]])]
    np.testing.assert_allclose(reference_2026.composite_curves(scores), [[0.5, 0.15, 0.05]])


def test_heads_of_kvcompose() -> None:
    # two KV heads of two query heads, with means 0.6 0.2 0 and 0 0.1 0.4: the mean of both is added to each
    largest = np.array([[0.8, 0.2, 0], [0.4, 0.2, 0], [0, 0.1, 0.4], [0, 0.1, 0.4]])
    keys = np.zeros((2, 3, 1))
    trace = Trace("heads", [Layer(np.zeros((4, 3, 1)), keys, keys, np.arange(3), 0, 0)], 3, 1.0, 0.0, 4)
    expected = [[0.9, 0.35, 0.2], [0.3, 0.25, 0.6]]
    np.testing.assert_allclose(reference_2026.composed(largest, "kv", "mean", trace), expected)


def test_sets_of_kvcompose() -> None:
    """The scores are 4/13, 1/5, 1/5 and 1/5; the mean of the only head doubles them. The second layer attends to all
    tokens equally: 1 of 5 in its first pass token."""
    trace = repeating([0, 1], [1, 4], [(2, 1, 3)])
    assert kept(trace, "kvcompose", "2") == [[[0, 1]]]
    other = repeating([0, 0], [1, 1], [(2, 1, 3)]).layers[0]
    trace = Trace("layers", [other, trace.layers[0]], 4, 1.0, 0.0, 4, passes=trace.passes)
    # curves: the larger of 1/5 and 4/13, and 1/5; in both layers. Of equal ones the first layer's are kept.
    assert kept(trace, "kvcompose", "1") == [[[0]], [[0]]]
    assert kept(trace, "kvcompose", "2") == [[[0, 1, 2]], [[0]]]
    assert kept(trace, "kvcompose:allocate=ranked-global", "1") == [[[0]], [[0]]]


# ----------------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("r-kv:window=2,kernel=3", "r-kv:window=2,kernel=3,mix_lambda=0.9"),
        ("vase:window=2,sinks=1", "vase:window=2,sinks=1,seed=1"),
        ("vase:window=2,sinks=1", "vase:window=2,sinks=1,large=0.7"),
        ("cap-kv:sinks=1,future=3", "cap-kv:sinks=1,future=3,tau=0.1"),
        ("kvcrush:window=2,page=2", "kvcrush:window=2,page=2,ratio=0.9"),
        ("keyformer", "keyformer:seed=1"),
        ("lru", "lfu"),
        ("tri-attention:recent=2", "tri-attention:recent=2,agg=mean"),
    ],
)
def test_following(policy: str, other: str) -> None:
    """The decisions accept their own sets, and reject those of other parameters."""
    ours, theirs = chosen(FIXTURE, policy, "7"), chosen(FIXTURE, other, "7")
    assert all(len(row) == 7 for layer in ours.rows for row in layer)
    followed = decide(FIXTURE, Policy.parse(policy), "7", follow=ours)
    assert all(decision.verdict(ours) == Verdict.EQUAL for decision in followed.decisions)
    followed = decide(FIXTURE, Policy.parse(policy), "7", follow=theirs)
    assert any(decision.verdict(theirs) == Verdict.WRONG for decision in followed.decisions)
