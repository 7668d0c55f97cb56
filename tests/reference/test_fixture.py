"""The printed results of the small fixture, the worked examples of the rules, and laws that hold for any trace."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from reference import Layer, Policy, Trace, select

BUDGET = "6"
FIXTURE = reference.fixture()
WINDOW = "window=2,kernel=3"
CHUNKS = "window=2,chunk=3"


def numbers(text: str) -> list[int]:
    """'0,1,9-11' as positions."""
    result = []
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        result += range(int(first), int(last or first) + 1)
    return result


def kept(policy: str, budget: str = BUDGET) -> list[list[list[int]]]:
    """By layer and row."""
    return [[row.tolist() for row in layer] for layer in select(FIXTURE, Policy.parse(policy), budget).rows]


def printed(text: str, also: str = "") -> list[list[list[int]]]:
    """'row ; row | row ; row': layers by |, rows by ;, each row with the positions `also`."""
    extra = numbers(also) if also else []
    return [[numbers(row) + extra for row in layer.split(";")] for layer in text.split("|")]


SETS = [
    (
        "random:seed=0",
        "0,1,2,4,9,11 ; 1,2,5,6,9,11 | 1,4,5,6,10,11 ; 1,4,6,9,10,11 |"
        "1,2,3,5,8,10 ; 1,3,5,6,7,8 | 0,4,5,7,8,9 ; 0,3,4,7,9,10",
        "",
    ),
    ("local", "6-11 ; 6-11 | 6-11 ; 6-11 | 6-11 ; 6-11 | 6-11 ; 6-11", ""),
    ("streaming-llm", "0-3 ; 0-3 | 0-3 ; 0-3 | 0-3 ; 0-3 | 0-3 ; 0-3", "10,11"),
    ("h2o:recent=3", "0,1,3 ; 0,1,2 | 0,2,3 ; 0,2,4 | 0,1,2 ; 0,1,4 | 0,1,2 ; 0,1,4", "9-11"),
    (f"snapkv:{WINDOW}", "1-4 ; 0-3 | 4-7 ; 0,2-4 | 0-3 ; 3,5-7 | 0-3 ; 3-6", "10,11"),
    (f"snapkv:{WINDOW},pool=avg", "1-4 ; 0-3 | 4-7 ; 1-4 | 0-3 ; 3-6 | 0,1,3,6 ; 4-7", "10,11"),
    (f"snapkv:{WINDOW},heads=layer", "0,2-4 | 4-7 | 0-3 | 0,1,3,4", "10,11"),
    (f"chunkkv:{CHUNKS}", "0-3 | 3-6 | 0-3 | 0,6-8", "10,11"),
    (
        f"chunkkv:{CHUNKS},heads=kv",
        "0,3-5 ; 0-2,6 | 3,6-8 ; 0,3-5 | 0-3 ; 3-6 | 0-2,6 ; 3,6-8",
        "10,11",
    ),
    (f"chunkkv:{CHUNKS},reuse=2", "0-3 | 0-3 | 0-3 | 0-3", "10,11"),
    (f"chunkkv:{CHUNKS},fill=none", "0-2 | 3-5 | 0-2 | 6-8", "10,11"),
    (f"chunkkv:{CHUNKS},window_mode=replace", "0-3,10,11 | 3-6,10,11 | 0-3,10,11 | 0-2,6,10,11", ""),
    (
        "oracle",
        "1,4,5,6,9,10 ; 1,2,8-11 | 0,3,5,6,9,10 ; 1-3,6,10,11 | 0-2,7,9,11 ; 1,3,4,7,10,11 | 0,1,4-7 ; 0,4-7,9",
        "",
    ),
]


@pytest.mark.parametrize(("policy", "rows", "also"), SETS, ids=[policy for policy, _, _ in SETS])
def test_sets(policy: str, rows: str, also: str) -> None:
    assert kept(policy) == printed(rows, also)


def test_sets_of_query_heads() -> None:
    assert kept("h2o:recent=3,heads=query")[:1] == printed("0,2,3 ; 0,1,4 ; 0,1,5 ; 0,1,2", "9-11")
    expected = printed("1-4 ; 0,2-4 ; 0-3 ; 0-2,5 | 4-7 ; 4-7 ; 0,2-4 ; 0,2-4", "10,11")
    assert kept(f"snapkv:{WINDOW},heads=query")[:2] == expected


def test_values() -> None:
    layer = FIXTURE.layers[0]
    assert layer.q[0, 0].tolist() == [-1.625, 1.625, -2, -0.875]
    assert layer.k[0, 0].tolist() == [-1.5, 0.875, 0.375, 0.5]
    assert layer.v[0, 0].tolist() == [-1.625, -0.125, -1.875, 0.5]


@pytest.mark.parametrize(
    ("observed", "first", "second"),
    [
        (
            reference.window_attention(FIXTURE, 0, 2),
            ".18462 .18637 .21759 .58411 .10947 .07977 .08842 .18324 .11215 .04395 .06936 .14094",
            ".06928 .48041 .30911 .13414 .16135 .08522 .27323 .18004 .03988 .15361 .08969 .02403",
        ),
        (
            reference.cumulative_attention(FIXTURE, 0),
            "2.52213 2.23071 1.659 1.66404 1.02091 .81745 .62258 .50735 .68243 .06309 .06936 .14094",
            "2.52929 2.95605 1.76544 .81999 .75711 1.37593 .48477 .40594 .53907 .25268 .08969 .02403",
        ),
    ],
    ids=["window_attention", "cumulative_attention"],
)
def test_observables(observed: np.ndarray, first: str, second: str) -> None:
    expected = np.array([first.split(), second.split()], float)
    np.testing.assert_allclose(reference.aggregate(observed, "kv", "mean", 2), expected, rtol=0, atol=5.1e-6)


METRICS = {  # layer 0 and all, for snapkv, h2o, oracle
    ("attention_recall", ""): (".562262 .588619", ".634377 .578642", ".740876 .736435"),
    ("attention_recall", "prompt"): (".486902 .528193", ".569956 .520773", ".701581 .686235"),
    ("attention_cosine", ""): (".674799 .727204", ".770348 .717358", ".891439 .895166"),
    ("attention_l1", ""): (".875476 .822763", ".731246 .842717", ".518249 .527131"),
    ("output_cosine", ""): (".747440 .728013", ".709455 .688565", ".811166 .870264"),
    ("output_error", ""): (".962650 .843977", ".943806 .947893", ".635880 .575229"),
    ("kv_l1_loss", ""): (".476373 .494725", ".493614 .495119", ".522350 .483697"),
}


@pytest.mark.parametrize("policy", [f"snapkv:{WINDOW}", "h2o:recent=3", "oracle"])
@pytest.mark.parametrize("metric", METRICS, ids=":".join)
def test_metrics(policy: str, metric: tuple[str, str]) -> None:
    column = {"s": 0, "h": 1, "o": 2}[policy[0]]
    values = reference.measure(FIXTURE, select(FIXTURE, Policy.parse(policy), BUDGET), "continuation")[metric]
    expected = [float(number) for number in METRICS[metric][column].split()]
    np.testing.assert_allclose([values.layers[0], values.all], expected, rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(
    ("policy", "key", "value"),
    [(f"snapkv:{WINDOW}", 0.492021, 0.496619), ("h2o:recent=3", 0.479997, 0.510900), ("oracle", 0.463976, 0.505078)],
)
def test_loss_of_keys_and_values(policy: str, key: float, value: float) -> None:
    losses = reference.kv_l1_loss(FIXTURE, select(FIXTURE, Policy.parse(policy), BUDGET))
    measured = [losses["kv_l1_loss", "key"].all, losses["kv_l1_loss", "value"].all]
    np.testing.assert_allclose(measured, [key, value], rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("first", [0.1429, 0, 1]),
        ("mean", [0.3714, 0.0714, 0.8]),
        ("union", [0.5, 0.75, 0.75]),
        ("first+protected", [0.3333, 0.2, 1]),
    ],
)
def test_jaccard(variant: str, expected: list[float]) -> None:
    selection = select(FIXTURE, Policy.parse(f"snapkv:{WINDOW}"), BUDGET)
    matrix = reference.jaccard_matrix(FIXTURE, selection, variant)
    np.testing.assert_allclose(np.diagonal(matrix, offset=1), expected, rtol=0, atol=5.1e-5)
    assert (matrix == matrix.T).all()
    assert (np.diagonal(matrix) == 1).all()
    adjacent = reference.jaccard_adjacent(FIXTURE, selection)["jaccard_adjacent", variant]
    assert adjacent.all == pytest.approx(np.mean(expected), abs=5.1e-5)


def test_redundancy() -> None:
    for tensor, first, mean in (("k", 0.561688, 0.550137), ("v", 0.508931, 0.485122)):
        values = reference.redundancy(FIXTURE, tensor)
        np.testing.assert_allclose([values[0].mean(), values.mean()], [first, mean], rtol=0, atol=5.1e-7)
    by_token = ".659 .5648 .6421 .6919 .7951 .2217 .7878 .7951 .3866 .3738 .4356 .3866"
    np.testing.assert_allclose(
        reference.redundancy(FIXTURE, "k")[0], np.array(by_token.split(), float), rtol=0, atol=5.1e-5
    )


# ------------------------------------------------------------------------------------------------- worked examples


def test_hashes() -> None:
    assert int(reference.chain(0)) == 0xE220A8397B1DCDAF
    assert int(reference.chain(1, 0, 0, 0, 0)) == 0x348C3D1AF8BEC8E5


@pytest.mark.parametrize(
    ("total", "weights", "low", "high", "expected"),
    [
        (16, [117, 79, 41, 3], 0, 10, [8, 5, 3, 0]),
        (16, [20, 6, 4, 2], 0, 8, [8, 4, 3, 1]),
        (10, [1, 1, 1], 0, 99, [4, 3, 3]),
        (7, [0, 0, 5], 1, 99, [1, 1, 5]),
        (9, [0, 0, 0], 0, 99, [3, 3, 3]),
        (99, [1, 2], 0, 10, [10, 10]),
    ],
)
def test_apportion(total: int, weights: list[int], low: int, high: int, expected: list[int]) -> None:
    n = len(weights)
    assert reference.apportion(total, weights, [low] * n, [high] * n) == expected


@pytest.mark.parametrize(
    ("literal", "prompt", "expected"),
    [("0.1", 12, 1), ("0.1", 15, 2), ("0.1", 14, 1), ("0.01", 12, 1), ("50%", 13, 7), ("1.0", 12, 12), ("5", 3, 5)],
)
def test_budget(literal: str, prompt: int, expected: int) -> None:
    assert reference.budget_tokens(literal, prompt) == expected


@pytest.mark.parametrize(
    ("sinks", "window", "budget", "expected"),
    [(4, 3, 9, [0, 1, 2, 3, 9, 10, 11]), (4, 3, 5, [0, 1, 2, 3, 11]), (4, 3, 2, [0, 1]), (0, 8, 3, [9, 10, 11])],
)
def test_protection(sinks: int, window: int, budget: int, expected: list[int]) -> None:
    assert reference.protection(sinks, window, budget, 12).tolist() == expected


def test_ranking_puts_the_lower_position_first() -> None:
    assert reference.rank(np.array([1.0, 3.0, 1.0, 3.0])).tolist() == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="NaN"):
        reference.rank(np.array([1.0, np.nan]))


def test_pooling() -> None:
    scores = np.array([1.0, 5.0, 2.0, 2.0, 0.0])
    assert reference.pool(scores, 3, "max").tolist() == [5, 5, 5, 2, 2]
    np.testing.assert_allclose(reference.pool(scores, 3, "avg"), [2, 8 / 3, 3, 4 / 3, 2 / 3])
    assert reference.pool(scores, 3, "none").tolist() == scores.tolist()
    assert reference.pool(scores, 9, "max").tolist() == [5] * 5
    every = np.arange(5)
    assert reference.top(reference.pool(scores, 3, "max"), 2, every).tolist() == [0, 1]
    assert reference.top(reference.pool(scores, 3, "avg"), 2, every).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [("", [3, 4, 5, 6, 7]), ("chunk_score=mean", [3, 4, 5, 6, 9]), ("fill=none", [3, 4, 5])],
)
def test_chunks(parameters: str, expected: list[int]) -> None:
    prefix = np.array([1.0, 0, 2, 0, 5, 0, 3, 1, 1, 2])
    columns = np.append(prefix, [9.0])  # a window of one token
    choices = reference.chunk_selections(columns, 6, 1, 3, Policy.parse(f"chunkkv:{parameters}").parameters)
    assert sorted(next(choices).tolist()) == expected


def test_chunks_filled_with_tokens() -> None:
    columns = np.array([1.0, 0, 2, 0, 5, 0, 3, 1, 1, 2, 9])
    choices = reference.chunk_selections(columns, 6, 1, 3, Policy.parse("chunkkv:fill=tokens").parameters)
    assert sorted(next(choices).tolist()) == [2, 3, 4, 5, 6]


def test_streaming_below_its_sinks_keeps_the_first() -> None:
    assert kept("streaming-llm", "3") == [[[0, 1, 2]] * 2] * 4


def test_window_larger_than_the_budget_keeps_the_last() -> None:
    for policy in ("snapkv", "chunkkv", "h2o:recent=8"):
        assert all(row == [9, 10, 11] for layer in kept(policy, "3") for row in layer)


def test_heavy_tokens_may_lie_in_the_recent_part() -> None:
    ones, keys = np.ones((1, 12, 2)), np.zeros((1, 12, 2))
    keys[0, 3], keys[0, 8] = 9, 30  # each draws all attention from then on
    trace = Trace("heavy", [Layer(ones, keys, ones, np.arange(12), 0, 0)], 10, 0.5, 0.0, 4)

    def row(policy: str) -> list[int]:
        return select(trace, Policy.parse(policy), "5").rows[0][0].tolist()

    assert row("h2o:recent=3") == [0, 3, 7, 8, 9]
    assert row("h2o:recent=3,overlap=true") == [3, 7, 8, 9]


def test_nothing_in_common_with_nothing() -> None:
    local = select(FIXTURE, Policy.parse("local"), BUDGET)
    assert (reference.jaccard_matrix(FIXTURE, local, "first") == 1).all()  # everything is protected: two empty sets
    empty = reference.Selection("layer", [[np.array([], int)], [np.array([2])]], np.array([], int), [0, 1], [])
    assert reference.jaccard_matrix(FIXTURE, empty, "first").tolist() == [[1, 0], [0, 1]]
    nothing, something = np.zeros(3), np.array([1.0, 0, 2])
    assert reference.cosine(nothing, nothing) == 0
    assert reference.cosine(nothing, nothing, both_zero=1) == 1
    assert reference.cosine(nothing, something, both_zero=1) == 0
    assert reference.ratio(nothing, nothing, 1).tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------- agreement


def test_agreement() -> None:
    scores = np.array([3.0, 2.0, 1.0 + 5e-6, 1.0, 1.0, 0.5])

    def agree(theirs: list[int]) -> bool:
        return reference.sets_agree(np.array([0, 1, 2]), np.array(theirs), scores, scores[2])

    assert agree([0, 1, 2])
    assert agree([0, 1, 3])
    assert not agree([0, 1, 4])  # 3 scores exactly the same and is lower
    assert not agree([0, 1, 5])
    assert not agree([0, 2, 3])
    assert not agree([0, 1])


def test_agreement_of_chunks() -> None:
    def sets(x: list[float], parameters: str) -> set[tuple[int, ...]]:
        chosen = reference.chunk_selections(np.array(x), 4, 1, 2, Policy.parse(f"chunkkv:{parameters}").parameters)
        return {tuple(sorted(kept.tolist())) for kept in chosen}

    assert sets([1, 2, 9, 9, 1, 2.00001, 0], "") == {(0, 2, 3), (2, 3, 4)}
    assert sets([1, 2, 9, 9, 1, 2, 0], "") == {(0, 2, 3)}
    assert sets([1, 2, 9, 9, 1, 2.001, 0], "") == {(2, 3, 4)}


# ------------------------------------------------------------------------------------------------------------ laws


def random_trace(seed: int, n_layers: int, query_heads: int, kv_heads: int, d: int, prompt: int, tokens: int) -> Trace:
    """Normal numbers."""
    generator = np.random.default_rng(seed)
    layers = [
        Layer(
            q=generator.normal(size=(query_heads, tokens, d)),
            k=generator.normal(size=(kv_heads, tokens, d)),
            v=generator.normal(size=(kv_heads, tokens, d)),
            q_positions=np.arange(tokens),
            window=0,
            number=index,
        )
        for index in range(n_layers)
    ]
    return Trace(f"random{seed}", layers, prompt, d**-0.5, 0.0, 4)


RANDOM = [random_trace(1, 3, 6, 2, 8, 37, 44), random_trace(2, 1, 3, 1, 5, 23, 29), random_trace(3, 2, 2, 2, 4, 6, 9)]
POLICIES = [
    "random:seed=5,sinks=1,window=2",
    "local",
    "streaming-llm",
    "h2o",
    "h2o:heads=query",
    "h2o:heads=layer",
    "h2o:overlap=true",
    "snapkv:window=3",
    "snapkv:window=3,heads=query",
    "chunkkv:chunk=3,window=2",
    "chunkkv:chunk=3,window=2,heads=kv",
    "oracle",
    "oracle:scope=layer",
    "oracle:scope=global",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", RANDOM, ids=lambda trace: trace.name)
@pytest.mark.parametrize("budget", ["0.2", "5"])
@pytest.mark.parametrize("choice", ["continuation", "last:4"])
def test_laws(trace: Trace, policy: str, budget: str, choice: str) -> None:
    selection = select(trace, Policy.parse(policy), budget, choice)
    slots = len(trace.treated) * reference.row_count(trace, selection.heads)
    slots *= reference.budget_tokens(budget, trace.prompt)
    used = reference.counts(selection).sum()
    assert used <= slots if "overlap" in policy else used == slots
    measured = reference.measure(trace, selection, choice)
    recall, l1 = measured["attention_recall", ""].heads, measured["attention_l1", ""].heads
    np.testing.assert_allclose(l1, 2 * (1 - recall), atol=1e-12)
    queries = np.array(reference.eval_queries(trace, choice))
    for index, layer in enumerate(trace.treated):
        a = reference.attention(trace, layer, queries)
        kept_a = np.where(reference.residents(trace, selection, index, queries), a, 0)
        cosine = np.sqrt((kept_a**2).sum(-1) / (a**2).sum(-1)).mean(-1)
        np.testing.assert_allclose(measured["attention_cosine", ""].heads[index], cosine, atol=1e-12)
    ceiling = select(trace, Policy.parse(f"oracle:counts=({policy})"), budget, choice)
    best = reference.measure(trace, ceiling, choice)["attention_recall", ""].heads
    group = {"kv": trace.query_heads // trace.kv_heads, "query": 1, "layer": trace.query_heads}[selection.heads]
    gain = (best - recall).reshape(len(recall), -1, group).mean(axis=2)
    assert (gain >= -1e-12).all()


@pytest.mark.parametrize("trace", [FIXTURE, *RANDOM], ids=lambda trace: trace.name)
@pytest.mark.parametrize("choice", ["continuation", "last:3", "all", "stride:2"])
def test_full_is_exact(trace: Trace, choice: str) -> None:
    measured = reference.measure(trace, select(trace, Policy.parse("full"), "1", choice), choice, rows=True)
    for (metric, variant), values in measured.items():
        if metric.endswith(("_error", "_loss", "_l1")):
            assert values.all == 0, (metric, variant)
        elif (metric.endswith(("_recall", "_cosine"))) and variant not in ("unaligned", "nosink"):
            assert values.all == pytest.approx(1, abs=1e-12), (metric, variant)
