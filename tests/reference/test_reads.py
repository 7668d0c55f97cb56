"""Worked examples of the sparse reads in reference_reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_reads
from reference import Layer, Trace, chain
from reference_geometry import gaussian
from reference_metrics import attention_metrics
from reference_policies import parameters_of
from reference_selection import Case, Policy
from test_further import FIXTURE, chosen


def one_query(weights: list[float], prompt: int, **others: object) -> Trace:
    """Of one head and one component: the last query attends to the tokens in proportion to the weights."""
    keys = np.log(np.array(weights, float))[None, :, None]
    layer = Layer(np.ones(keys.shape), keys, keys, np.arange(len(weights)), 0, 0, **others)
    return Trace("one query", [layer], prompt, 1.0, 0.0, 4)


def tokens(trace: Trace, policy: str, budget: str, query: int, head: int = 0, layer: int = 0) -> list[int]:
    return np.flatnonzero(chosen(trace, policy, budget).read(layer, np.array([query]))[head, 0]).tolist()


def metrics(trace: Trace, policy: str, budget: str) -> tuple[float, float]:
    """attention_recall and attention_l1 of all heads and layers."""
    measured = attention_metrics(trace, chosen(trace, policy, budget), "continuation")
    return measured["attention_recall", ""].all, measured["attention_l1", ""].all


# -------------------------------------------------------------------------------------------------------- upper bounds

TRACE = one_query([1, 4, 2, 1, 2, 1, 1], 5)


def test_tokens_of_a_budget() -> None:
    """Two of the prompt's five tokens, and all later ones up to the query."""
    assert tokens(TRACE, "oracle-top-k", "2", 6) == [1, 2, 5, 6]
    assert tokens(TRACE, "oracle-top-k", "3", 5) == [1, 2, 4, 5]
    assert tokens(TRACE, "oracle-top-k:sinks=1", "2", 6) == [0, 1, 5, 6]
    # two local tokens of query 5 are 4 and 5, of query 6 none is in the prompt
    assert tokens(TRACE, "oracle-top-k:local=2", "2", 5) == [1, 4, 5]
    assert tokens(TRACE, "oracle-top-k:local=2", "2", 6) == [1, 2, 5, 6]
    assert tokens(TRACE, "oracle-top-k:sinks=1,local=9", "3", 5) == [0, 3, 4, 5]
    # a query of the prompt sees no later token, and always itself
    assert tokens(TRACE, "oracle-top-k", "1", 3) == [1, 3]
    assert tokens(TRACE, "oracle-top-k", "4", 1) == [0, 1]
    assert tokens(TRACE, "oracle-top-k:dense_layers=1", "1", 3) == [0, 1, 2, 3]


def test_metrics_of_reads() -> None:
    # query 5 has 11 parts of attention and reads 4 + 2 + 1, query 6 has 12 and reads 4 + 2 + 1 + 1
    recall = (7 / 11 + 8 / 12) / 2
    assert metrics(TRACE, "oracle-top-k", "2") == pytest.approx((recall, 2 * (1 - recall)))


def test_pages_of_one_token_are_top_k() -> None:
    queries = np.array([2, 7, 11, 12, 15])
    for index in range(4):
        ours = chosen(FIXTURE, "oracle-top-k", "4").read(index, queries)
        quest = chosen(FIXTURE, "quest:page=1,dense_layers=0,least_pages=1", "4").read(index, queries)
        np.testing.assert_array_equal(ours, quest)


def test_no_static_set_has_the_recall_of_top_k() -> None:
    best = metrics(FIXTURE, "oracle-top-k", "4")[0]
    assert best > metrics(FIXTURE, "oracle:heads=query", "4")[0]
    for policy in ("double-sparsity:group_factor=2", "page-means:page=2,least_pages=1", "pq:init_offset=0,sinks=0"):
        assert metrics(FIXTURE, policy, "4")[0] <= best


def test_top_p() -> None:
    trace = one_query([15, 50, 5, 30, 7, 7], 4)
    for share, expected in (("0", [1]), ("0.49", [1]), ("0.51", [1, 3]), ("0.79", [1, 3]), ("0.81", [0, 1, 3])):
        assert tokens(trace, f"oracle-top-p:p={share}", "1", 5) == [*expected, 4, 5]
    assert tokens(trace, "oracle-top-p:p=1", "1", 5) == list(range(6))
    # beside the sink and the local token the shares are 0.625 and 0.375
    assert tokens(trace, "oracle-top-p:p=0.6,sinks=1,local=3", "1", 5) == [0, 1, 3, 4, 5]
    assert tokens(trace, "oracle-top-p:p=0.95,sinks=1,local=3", "1", 5) == [0, 1, 2, 3, 4, 5]
    # the share of token 1 is 1 in the arithmetic of a computer, which does not exceed 1
    assert tokens(one_query([1e-300, 1e20, 1, 1], 3), "oracle-top-p:p=1", "1", 3) == [0, 1, 2, 3]
    equal = one_query([1, 1, 1, 1, 1], 4)
    assert tokens(equal, "oracle-top-p:p=0.3", "1", 4) == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------------------------------------- double sparsity


def test_labels() -> None:
    x = np.array([[0, 0.5, 1.5, 3], [-1, -1, -1, -1], [1, 1.4, 2.6, 4]])
    assert reference_reads.label(x, 2).tolist() == [[0, 0, 2, 3], [-1] * 4, [1, 1, 3, 4]]
    assert reference_reads.label(x, 16) is x


def test_channels() -> None:
    keys = np.array([[[1.0, 0, 3, 1], [1, 4, -3, 1]]])
    queries = np.array([[[9.0, 9, 1, 0], [1, -3, 1, 0]], [[2, 1, 0, 0], [2, 1, 0, 9]]])
    trace = Trace("channels", [Layer(queries, keys, keys, np.arange(2), 0, 0, np.zeros(2))], 2, 1.0, 0.0, 4)

    def sizes(parameters: str) -> list[list[float]]:
        case = Case(trace, parameters_of(Policy.parse(f"double-sparsity:{parameters}")), "1")
        return reference_reads.channel_sizes(case, 0).tolist()

    assert sizes("channels=qk") == [[5, 6, 3, 0], [2, 2, 0, 4.5]]
    assert sizes("channels=q") == [[5, 6, 1, 0], [2, 1, 0, 4.5]]
    assert sizes("channels=k") == [[1, 2, 3, 1]] * 2
    assert sizes("channels=qk,share=kv-head") == [[3.5, 4, 1.5, 2.25]] * 2


def test_products_of_channels() -> None:
    # mean products of the channels: 0.3, 4/3 and 4/3
    keys = [[0.0, 3, 0], [0, 0, 4], [9, 1, 0], [0, 0, 0]]
    q, k = np.array([[[0.1, 1, 1]] * 4]), np.array([keys])
    trace = Trace("channels", [Layer(q, k, k, np.arange(4), 0, 0)], 3, 1.0, 0.0, 4)
    policy = "double-sparsity:group_factor=1,label_bits=16"
    assert tokens(trace, policy, "1", 3) == [1, 3]  # by 3, 4 and 1.9
    assert tokens(trace, "double-sparsity:group_factor=3,label_bits=16", "1", 3) == [0, 3]  # by the second channel
    assert chosen(trace, policy, "1").stored_bytes(0) == 2 * 3 * 3 * 4 + 3 * 6
    assert chosen(FIXTURE, "double-sparsity:group_factor=2", "4").stored_bytes(0) == 768 + 2 * 12 * 2 * (1 + 4)
    of_group = "double-sparsity:group_factor=2,share=kv-head"
    assert chosen(FIXTURE, of_group, "4").stored_bytes(0) == 768 + 2 * 12 * (1 + 4)


# ---------------------------------------------------------------------------------------------------------- page means


def test_means_of_pages() -> None:
    # products 5, -9 | 1, 1 | 0, 2.5 | 0.5: means -2, 1, 1.25 and 0.5
    keys = np.array([5.0, -9, 1, 1, 0, 2.5, 0.5, 0])[None, :, None]
    trace = Trace("pages", [Layer(np.ones(keys.shape), keys, keys, np.arange(8), 0, 0)], 7, 1.0, 0.0, 4)
    policy = "page-means:page=2,least_pages=1"
    assert tokens(trace, policy, "2", 7) == [4, 5, 7]
    assert tokens(trace, policy, "4", 7) == [2, 3, 4, 5, 7]
    assert tokens(trace, policy, "5", 7) == [2, 3, 4, 5, 7]
    assert tokens(trace, "page-means:page=2,least_pages=3", "2", 7) == [2, 3, 4, 5, 6, 7]
    # a query of the prompt reads its own page up to itself, and earlier ones
    assert tokens(trace, policy, "2", 4) == [4]
    assert tokens(trace, policy, "4", 4) == [2, 3, 4]
    assert tokens(trace, policy, "4", 1) == [0, 1]
    assert chosen(trace, policy, "2").stored_bytes(0) == 4 * (2 * 7 + 4)


# ----------------------------------------------------------------------------------------------------------- magic-pig


def test_lifted_keys() -> None:
    lifted = reference_reads.lifted_keys(np.array([[[3.0, 4], [0, 0]], [[0, 2], [0, -3]]]))
    np.testing.assert_allclose(lifted[0], [[0.6, 0.8, 0], [0, 0, 1]])
    np.testing.assert_allclose(lifted[1], [[0, 0.4, 0.84**0.5], [0, -0.6, 0.8]])
    np.testing.assert_allclose(reference_reads.lifted_keys(np.array([[[0.0]], [[-2]]])), [[[0, 1]], [[-1, 0]]])


def test_tokens_of_equal_signatures() -> None:
    keys = np.random.default_rng(0).normal(size=(1, 9, 3))
    trace = Trace("signatures", [Layer(keys[:, ::-1].copy(), keys, keys, np.arange(9), 0, 0)], 8, 1.0, 0.0, 4)
    means = keys[0, :8].mean(axis=0)
    k, q = keys[0, :8] - means, keys[0, 0] - means
    largest = np.linalg.norm(k, axis=1).max()
    expected = set()
    lifted = [np.append(key, math.sqrt(max(0, largest**2 - key @ key))) / largest for key in k]
    for table in range(3):
        normal = np.array([[gaussian(4, 0, table * 2 + bit, i) for i in range(4)] for bit in range(2)])
        for token in range(8):
            expected |= {token} if ((normal @ lifted[token] > 0) == (normal[:, :3] @ q > 0)).all() else set()
    policy = "magic-pig:bits=2,tables=3,seed=4,sinks=0,local=0"
    assert 0 < len(expected) < 8
    assert tokens(trace, policy, "1", 8) == sorted(expected | {8})
    weights = chosen(trace, policy, "1").weight(0, np.array([8]))[0, 0]
    cosine = lifted[2][:3] @ q / np.linalg.norm(q)
    chance = 1 - (1 - (1 - math.acos(cosine) / math.pi) ** 2) ** 3
    assert weights[2] == pytest.approx(1 / (chance + 1e-6), rel=1e-5)
    assert weights[8] == 1
    with_sinks = chosen(trace, policy.replace("sinks=0", "sinks=3"), "1")
    assert (with_sinks.weight(0, np.array([8]))[0, 0, :3] == 1).all()
    assert chosen(trace, policy, "1").stored_bytes(0) == 2 * 8 * 3 * 4 + 8 * 3 * 2 / 8


@pytest.mark.parametrize("parameters", ["tables=2", "tables=6,collisions=2", "tables=9,collisions=3"])
def test_chances_of_signatures(parameters: str) -> None:
    """The share of seeds with which a token is read is its probability, whose inverse is its weight."""
    queries = np.array([14])
    policies = [f"magic-pig:bits=2,sinks=0,local=0,{parameters},seed={seed}" for seed in range(400)]
    selections = [chosen(FIXTURE, policy, "4") for policy in policies]
    read = np.mean([one.read(1, queries)[2, 0, :12] for one in selections], axis=0)
    np.testing.assert_allclose(read, 1 / selections[0].weight(1, queries)[2, 0, :12], atol=0.1)


def test_weights_in_metrics() -> None:
    """Of the equal tokens 0 and 1 the first is read, with the weight 4."""
    trace = one_query([3, 3, 2], 2)
    halved = chosen(trace, "oracle-top-k", "1")
    measured = attention_metrics(trace, halved, "continuation")
    assert measured["attention_l1", ""].all == pytest.approx(2 * 3 / 8)
    halved.weight = lambda index, queries: np.array([[[4, 1, 1]]])
    measured = attention_metrics(trace, halved, "continuation")
    assert measured["attention_recall", ""].all == pytest.approx(5 / 8)
    assert measured["attention_l1", ""].all == pytest.approx(
        12 / 14 - 2 / 14 + 2 / 8
    )  # 12 and 2 of 14, for 3, 3 and 2 of 8


# ------------------------------------------------------------------------------------------------------------------ pq


def test_centres() -> None:
    keys = np.array([0.0, 11, 1, 10]).reshape(1, 1, 4, 1)
    centres, codes = reference_reads.k_means(keys, 2, 10, 0, 0)
    assert sorted(centres.ravel()) == [0.5, 10.5]
    assert centres[0, 0, codes[0, 0], 0].tolist() == [0.5, 10.5, 0.5, 10.5]


def test_codes_are_those_before_the_last_update() -> None:
    keys = np.array([0.0, 3, 10]).reshape(1, 1, 3, 1)
    order = np.argsort(chain(5, 2, 0, 0, np.arange(3)))[:2]
    centres, codes = reference_reads.k_means(keys, 2, 1, 5, 2)
    first = keys.ravel()[order]
    expected = np.abs(keys.reshape(3, 1) - first).argmin(axis=1)
    assert codes.ravel().tolist() == expected.tolist()
    assert centres.ravel().tolist() == [keys.ravel()[expected == centre].mean() for centre in range(2)]


def test_empty_centres() -> None:
    """Equal keys have the first of equal centres; the second one becomes a key by its hash."""
    centres, codes = reference_reads.k_means(np.full((1, 1, 3, 1), 5.0), 2, 1, 0, 0)
    assert codes.tolist() == [[[0, 0, 0]]]
    assert centres.ravel().tolist() == [5, 5]
    equal = np.array([1.0, 1, 1, 1, 8]).reshape(1, 1, 5, 1)
    for seed in range(20):
        order = np.argsort(chain(seed, 0, 0, 0, np.arange(5)))[:2]
        if 4 in order:
            continue
        centres, _ = reference_reads.k_means(equal, 2, 1, seed, 0)
        spare = int(chain(seed, 0, 0, 0, 1, 0) % np.uint64(5))
        assert centres.ravel().tolist() == [2.4, equal[0, 0, spare, 0]]


def test_as_many_centres_as_keys() -> None:
    queries = np.array([7, 12, 15])
    for index in range(4):
        exact = chosen(FIXTURE, "oracle-top-k:sinks=1,local=1", "5").read(index, queries)
        for offset in (0, 1):
            ours = chosen(FIXTURE, f"pq:init_offset={offset},sinks=1,local=1", "5").read(index, queries)
            np.testing.assert_array_equal(ours, exact)


def test_tokens_before_the_offset() -> None:
    read = chosen(FIXTURE, "pq:init_offset=4,sinks=1,local=0,bits=2", "9").read(0, np.array([13]))
    assert (read[:, 0].sum(axis=1) == 1 + 8 + 2).all()
    assert read[:, 0, 0].all()
    assert not read[:, 0, 1:4].any()
    # 8 tokens of 2 parts of 2 bits, and 2 times 4 centres of 2 numbers
    assert chosen(FIXTURE, "pq:init_offset=4,bits=2", "9").stored_bytes(0) == 768 + 2 * (8 * 2 * 2 / 8 + 2 * 4 * 2 * 4)
