"""The printed results of the small fixture, the worked examples of the rules, and laws that hold for any trace."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_layers
import reference_metrics
import reference_once
import reference_policies
import reference_schedules
import reference_selection
import reference_stores
from reference import Layer, Trace
from reference_policies import parameters_of, select
from reference_selection import Policy, Verdict

BUDGET = "6"
FIXTURE = reference.fixture()
WINDOW = "window=2,kernel=3"
CHUNKS = "window=2,chunk=3"
BLOCKS = "question_tokens=2,blocks=5"


def numbers(text: str) -> list[int]:
    """'0,1,9-11' as positions."""
    result = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        result += range(int(first), int(last or first) + 1)
    return result


def kept(policy: str, budget: str = BUDGET) -> list[list[list[int]]]:
    """By layer and row."""
    return [[row.tolist() for row in layer] for layer in select(FIXTURE, Policy.parse(policy), budget).rows]


def numbers_by_row(text: str) -> list[list[list[int]]]:
    return [[numbers(row) for row in layer.split(";")] for layer in text.split("|")]


def printed(text: str, also: str = "") -> list[list[list[int]]]:
    """'row ; row | row ; row': layers by |, rows by ;, each row with the positions `also`."""
    extra = numbers(also) if also else []
    return [[row + extra for row in layer] for layer in numbers_by_row(text)]


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
    ("strided", "|".join(["0,2,4,6,8,10 ; 0,2,4,6,8,10"] * 4), ""),
    ("truncate", "0-2 ; 0-2 | 0-2 ; 0-2 | 0-2 ; 0-2 | 0-2 ; 0-2", "9-11"),
    (
        "h2o-online:recent=3",
        "0,1,2 ; 0,1,2 | 0,1,2 ; 0,2,4 | 0,1,4 ; 0,1,2 | 0,1,2 ; 0,1,2",
        "9-11",
    ),
    (
        f"pyramid-kv:{WINDOW}",
        "0-4,6-8 ; 0-3,5-8 | 4-8 ; 0-4 | 0-2 ; 5-7 | ; ",
        "10,11",
    ),
    (
        "pyramid-infer:sinks=1,recent=2,r=0.3",
        "0-3,7,10,11 | 0,2,3,7,10,11 | 0,2,3,7,10,11 | 0,2,7,10,11",
        "",
    ),
    (
        "hybrid:chunkkv.chunk=3,chunkkv.window=2,snapkv.window=2,snapkv.kernel=3",
        "0-3 ; 0-3 | 3-6 ; 3-6 | 0-3 ; 3,5-7 | 0-3 ; 3-6",
        "10,11",
    ),
    (
        "layers:0-1=(chunkkv:window=2,chunk=3),2-3=(snapkv:window=2,kernel=3)",
        "0-3 ; 0-3 | 3-6 ; 3-6 | 0-3 ; 3,5-7 | 0-3 ; 3-6",
        "10,11",
    ),
    (
        f"dynamickv:{WINDOW},r_max=2.5,update=1",
        "1-4 ; 0-3 | 4-7 ; 0,2-4 | 0-3 ; 3,5-7 | 0-3 ; 3-6",
        "10,11",
    ),
    ("sca:recent=2", "1,3,7,8 | 1,3,7,8 | 1,3,7,8 | 1,3,7,8", "10,11"),
    ("sca:recent=2,use=key", "3,4,7,9 | 3,4,7,9 | 3,4,7,9 | 3,4,7,9", "10,11"),
    ("sca:recent=2,use=value", "0,1,3,6 | 0,1,3,6 | 0,1,3,6 | 0,1,3,6", "10,11"),
    ("sca:recent=2,objective=max,sinks=1", "0,2,6,8 | 0,2,6,8 | 0,2,6,8 | 0,2,6,8", "10,11"),
    ("sca:recent=2,layer=0", "1,5,7,8 | 1,5,7,8 | 1,5,7,8 | 1,5,7,8", "10,11"),
    (f"finch:{BLOCKS}", "0,6,7,9 | 1,2,5,6 | 1,2,5,6 | 4-7", "10,11"),
    (f"finch:{BLOCKS},positions=original", "1,3,6,7 | 3,5,6,7 | 0,2,5,6 | 0,4,6,7", "10,11"),
    (f"finch:{BLOCKS},rate=code", "6,7 | 5,6 | 1,5 | 6,7", "10,11"),
    (
        "oracle",
        "1,4,5,6,9,10 ; 1,2,8-11 | 0,3,5,6,9,10 ; 1-3,6,10,11 | 0-2,7,9,11 ; 1,3,4,7,10,11 | 0,1,4-7 ; 0,4-7,9",
        "",
    ),
]

FIRST_LAYERS = [
    ("tova", "1-3,6,7,11 | 2,3,5-7,11", ""),
    ("knorm", "0,4,6,7,9,11 ; 2,3,6,7,10,11 | 1,4,5,7,8,11 ; 2,4,5,7,8,11", ""),
    ("keydiff", "1,4,6,9-11 ; 1,5,8-11 | 3-6,8,11 ; 2,3,6,7,10,11", ""),
    ("observed-attention", "0-3,8,11 ; 0-2,4,5,8 | 0,2-6 ; 0-4,11", ""),
    ("vatp:recent=3,sinks=1", "0,1,3,9-11 ; 0,1,5,9-11 | 0,2,6,9-11 ; 0-2,9-11", ""),
    ("scissorhands:history=4,recent=2", "0,3,7,8 ; 1,2,6,7 | 0,3-5 ; 1-3,6", "10,11"),
    ("expected-attention:sinks=1,future=4", "0,1,4,6,8,10 ; 0,3-5,8,11 | 0,2,4,6,9,10 ; 0,1,6,8,9,11", ""),
    (f"ada-kv:{WINDOW}", "2-4 ; 0-3,5 | 4-7 ; 0,2-4", "10,11"),
    ("cur:block=4,sinks=1", "0,1,3,5,8,10 ; 0,4,5,7,8,11 | 0,2,4,6,9,11 ; 0,1,6,7,9,10", ""),
    ("caote:window=2", "0,2,3,8 ; 1,2,6,7 | 5-7,9 ; 1-3,6", "10,11"),
    ("lava:window=2,kernel=3", "2-4 ; 0-3,5 | 4-7 ; 0,2-4", "10,11"),
    ("lava:window=2,kernel=3,floor=1", "1-4 ; 0-3 | 4-7 ; 0,2-4", "10,11"),
    ("defensive-kv:window=2,kernel=3", "1-4 ; 0-3 | 0,1,4-7 ; 2,4", "10,11"),
]


@pytest.mark.parametrize(("policy", "rows", "also"), SETS, ids=[policy for policy, _, _ in SETS])
def test_sets(policy: str, rows: str, also: str) -> None:
    assert kept(policy) == printed(rows, also)


@pytest.mark.parametrize(("policy", "rows", "also"), FIRST_LAYERS, ids=[policy for policy, _, _ in FIRST_LAYERS])
def test_sets_of_two_layers(policy: str, rows: str, also: str) -> None:
    assert kept(policy)[:2] == printed(rows, also)


def test_lagging_partitions() -> None:
    expected = printed("0-2,4,5,8-11 ; 0-3,7-11 | 0-2,4,6,8-11 ; 0-3,6,8-11")
    assert kept("lagkv:sinks=2,lag=3", "9")[:2] == expected


def test_sets_of_query_heads() -> None:
    assert kept("h2o:recent=3,heads=query")[:1] == printed("0,2,3 ; 0,1,4 ; 0,1,5 ; 0,1,2", "9-11")
    expected = printed("1-4 ; 0,2-4 ; 0-3 ; 0-2,5 | 4-7 ; 4-7 ; 0,2-4 ; 0,2-4", "10,11")
    assert kept(f"snapkv:{WINDOW},heads=query")[:2] == expected


def test_online_goes_on_after_the_prompt() -> None:
    online = select(FIXTURE, Policy.parse("h2o-online:recent=3"), BUDGET)
    heavy = numbers_by_row("0,1,2 ; 0,1,2 | 0,1,2 ; 0,2,4 | 0,1,4 ; 0,1,2 | 0,1,2 ; 0,1,2")
    after = [[np.flatnonzero(row == -1).tolist() for row in layer] for layer in online.evicted_at]
    assert after == [[row + [13, 14, 15] for row in layer] for layer in heavy]


def test_sca_at_a_threshold() -> None:
    def sets(parameters: str) -> dict[int, list[int]]:
        policy = Policy.parse(f"sca:schedule=threshold(8,4),recent=1{parameters}")
        evicted_at = select(FIXTURE, policy, BUDGET).evicted_at[-1, 0]
        position = np.arange(FIXTURE.tokens)
        return {
            t: np.flatnonzero((position <= t) & ((evicted_at < 0) | (evicted_at > t))).tolist() for t in (7, 11, 15)
        }

    assert sets("") == {7: [1, 2, 3, 7], 11: [1, 9, 10, 11], 15: [1, 9, 11, 15]}
    assert sets(",positions=original")[11] == [1, 7, 8, 11]


@pytest.mark.parametrize(
    ("parameters", "scores", "caps"),
    [
        ("heads=query,r_max=2,update=2", [[18, 14], [18, 15, 17, 14]], [[8, 8], [5, 4, 4, 3]]),
        (
            "heads=kv,r_max=2.5,update=1",
            [[8], [9, 7], [8, 7, 9], [7, 7, 9, 9]],
            [[10], [9, 7], [5, 5, 6], [4, 4, 4, 4]],
        ),
    ],
)
def test_counts_of_dynamickv(parameters: str, scores: list[list[int]], caps: list[list[int]]) -> None:
    policy = Policy.parse(f"dynamickv:{WINDOW},{parameters}")
    case = reference_selection.Case(FIXTURE, parameters_of(policy), BUDGET)
    layers = [reference_once.window_scores(case, layer) for layer in range(4)]
    counts = [next(reference_layers.best_by_layer(layers[: len(expected)], 4)) for expected in scores]
    assert counts == scores
    first = 8 if "r_max=2," in parameters else 10
    for n, expected in zip(map(len, scores), caps, strict=True):
        assert next(reference_layers.buffer_sizes(case, layers, 4, first, n)) == expected


def test_dynamickv_of_query_heads() -> None:
    rows = kept(f"dynamickv:{WINDOW},heads=query,r_max=2,update=2")
    assert rows[:1] == printed("0-4 ; 0-4 ; 0-3,5 ; 0-2,5,6", "10,11")
    assert rows[3:] == printed("1-3 ; 0,1,5 ; 5-7 ; 3-5", "10,11")


def test_block_scores_of_finch() -> None:
    case = reference_selection.Case(FIXTURE, parameters_of(Policy.parse(f"finch:{BLOCKS}")), BUDGET)
    asking = np.array([10, 11])
    for there, n_kept, expected in (
        ([0, 1, 2, 3, 4], 0, "13.2838 4.6556 5.0906 14.8953 8.5034"),
        ([0, 3, 5, 6, 7, 8, 9], 2, "18.2043 5.1746 4.7845 10.1287 10.4311 4.1891 5.7242"),
    ):
        scores = reference_schedules.question_scores(case, 0, range(4), np.array(there), n_kept, asking)
        unscaled = (len(there) + 2) * scores  # the rows weighted by what they see, not by their share of it
        np.testing.assert_allclose(unscaled, np.array(expected.split(), float), rtol=0, atol=5.1e-5)


def test_kivi() -> None:
    changed = select(FIXTURE, Policy.parse("kivi:bits=2,group=4,residual=4"), BUDGET)
    keys, values = changed.stored(0)
    np.testing.assert_allclose(keys[0, 0], [-1.75, 0.874512, 0.583984, 0.5], rtol=0, atol=5.1e-7)
    np.testing.assert_allclose(values[0, 0], [-1.875, -0.291992, -1.875, 0.499512], rtol=0, atol=5.1e-7)
    losses = reference_metrics.kv_l1_loss(FIXTURE, changed)
    assert losses["kv_l1_loss", "key"].layers[0] == pytest.approx(0.095953, abs=5.1e-7)
    assert losses["kv_l1_loss", "value"].layers[0] == pytest.approx(0.071708, abs=5.1e-7)


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
    values = reference_metrics.measure(FIXTURE, select(FIXTURE, Policy.parse(policy), BUDGET), "continuation")[metric]
    expected = [float(number) for number in METRICS[metric][column].split()]
    np.testing.assert_allclose([values.layers[0], values.all], expected, rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(
    ("policy", "key", "value"),
    [(f"snapkv:{WINDOW}", 0.492021, 0.496619), ("h2o:recent=3", 0.479997, 0.510900), ("oracle", 0.463976, 0.505078)],
)
def test_loss_of_keys_and_values(policy: str, key: float, value: float) -> None:
    losses = reference_metrics.kv_l1_loss(FIXTURE, select(FIXTURE, Policy.parse(policy), BUDGET))
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
    matrix = reference_metrics.jaccard_matrix(FIXTURE, selection, variant)
    np.testing.assert_allclose(np.diagonal(matrix, offset=1), expected, rtol=0, atol=5.1e-5)
    assert (matrix == matrix.T).all()
    assert (np.diagonal(matrix) == 1).all()
    adjacent = reference_metrics.jaccard_adjacent(FIXTURE, selection)["jaccard_adjacent", variant]
    assert adjacent.all == pytest.approx(np.mean(expected), abs=5.1e-5)


def test_redundancy() -> None:
    for tensor, first, mean in (("k", 0.561688, 0.550137), ("v", 0.508931, 0.485122)):
        values = reference_metrics.redundancy(FIXTURE, tensor)
        np.testing.assert_allclose([values[0].mean(), values.mean()], [first, mean], rtol=0, atol=5.1e-7)
    by_token = ".659 .5648 .6421 .6919 .7951 .2217 .7878 .7951 .3866 .3738 .4356 .3866"
    np.testing.assert_allclose(
        reference_metrics.redundancy(FIXTURE, "k")[0], np.array(by_token.split(), float), rtol=0, atol=5.1e-5
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
    choices = reference_once.chunk_selections(columns, 6, 1, 3, parameters_of(Policy.parse(f"chunkkv:{parameters}")))
    assert sorted(next(choices).tolist()) == expected


def test_chunks_filled_with_tokens() -> None:
    columns = np.array([1.0, 0, 2, 0, 5, 0, 3, 1, 1, 2, 9])
    choices = reference_once.chunk_selections(columns, 6, 1, 3, parameters_of(Policy.parse("chunkkv:fill=tokens")))
    assert sorted(next(choices).tolist()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("n_layers", "free", "room", "first", "last"),
    [(32, 120, 2992, [234, 227, 219], [21, 13, 6]), (4, 4, 10, [8, 5], [3, 0]), (1, 7, 9, [7], [7])],
)
def test_pyramid(n_layers: int, free: int, room: int, first: list[int], last: list[int]) -> None:
    counts = reference_layers.pyramid_counts(n_layers, free, room, 20)
    assert (counts[: len(first)], counts[-len(last) :]) == (first, last)
    assert sum(counts) == n_layers * free


def test_pyramid_starts_at_the_prompt_at_most() -> None:
    assert reference_layers.pyramid_counts(3, 8, 10, 20) == [10, 8, 6]


def test_strides() -> None:
    assert reference_once.spread(12, 5).tolist() == [0, 2, 4, 7, 9]


def test_least_redundant_tokens() -> None:
    vectors = np.array([[[1.0, 0], [1, 0], [0, 1], [1, 1], [-1, 0]]])
    similarity = reference.token_similarity(vectors)
    assert reference_schedules.least_redundant([similarity], np.array([4]), 4) == [0, 2, 1]


def test_quantised_numbers() -> None:
    values = reference_stores.quantised(np.array([0.1, -0.3, 0.5, 0.2], np.float32), 4, 2)
    np.testing.assert_allclose(values, [0.2332, -0.3, 0.4998, 0.2332], rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("group", [3, 7, 64])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_quantised_within_half_a_step(bits: int, group: int) -> None:
    values = np.random.default_rng(bits).normal(size=(5, 16)).astype(np.float32)
    read = reference_stores.quantised(values, group, bits)
    for begin in range(0, 16, group):
        x, y = values[:, begin : begin + group], read[:, begin : begin + group]
        extent = x.max(axis=1, keepdims=True) - x.min(axis=1, keepdims=True)
        # the minimum and the step are rounded to float16, whose relative error is 2^-11
        allowed = extent / (2**bits - 1) / 2 + 2.0**-10 * (np.abs(x).max(axis=1, keepdims=True) + extent)
        assert (np.abs(x - y) <= allowed).all()


def test_kivi_keeps_the_latest() -> None:
    def exact(parameters: str) -> tuple[list[int], list[int]]:
        keys, values = select(FIXTURE, Policy.parse(f"kivi:{parameters}"), BUDGET).stored(0)
        return (
            np.flatnonzero((keys == FIXTURE.layers[0].k).all(axis=(0, 2))).tolist(),
            np.flatnonzero((values == FIXTURE.layers[0].v).all(axis=(0, 2))).tolist(),
        )

    assert exact("group=5,residual=5") == ([10, 11, 12, 13, 14, 15], [7, 8, 9, 10, 11, 12, 13, 14, 15])
    assert exact("group=5,residual=13") == (list(range(16)), list(range(16)))
    assert exact("group=5,residual=4")[0] == [12, 13, 14, 15]


def test_rotation_keeps_products_at_equal_distances() -> None:
    halves = reference.fixture()
    interleaved = reference.fixture()
    interleaved.interleaved = True
    for trace in (halves, interleaved):
        q, k = trace.layers[0].q[0], trace.layers[0].k[0]
        moved = np.full(len(q), 7)
        products = q @ k.T
        np.testing.assert_allclose(
            reference.rotate(trace, 0, q, moved) @ reference.rotate(trace, 0, k, moved).T, products, atol=1e-12
        )
        back = reference.rotate(trace, 0, reference.rotate(trace, 0, k, moved), -moved)
        np.testing.assert_allclose(back, k, atol=1e-12)
    turned = reference.rotate(halves, 0, np.array([[1.0, 2, 0, 0]]), np.array([3]))
    np.testing.assert_allclose(turned, [[np.cos(3), 2 * np.cos(0.3), np.sin(3), 2 * np.sin(0.3)]])
    turned = reference.rotate(interleaved, 0, np.array([[1.0, 0, 2, 0]]), np.array([3]))
    np.testing.assert_allclose(turned, [[np.cos(3), np.sin(3), 2 * np.cos(0.3), 2 * np.sin(0.3)]])
    halves.layers[0].inv_freq = np.array([1.0])  # only the first pair of components, 0 and 1, turns
    turned = reference.rotate(halves, 0, np.array([[1.0, 0, 5, 6]]), np.array([2]))
    np.testing.assert_allclose(turned, [[np.cos(2), np.sin(2), 5, 6]])


def test_question_at_the_end() -> None:
    def tokens(*spans: tuple[str, int, int]) -> int:
        trace = reference.fixture()
        trace.prompt = 40
        trace.spans = {str(index): (begin, end) for index, (_, begin, end) in enumerate(spans)}
        trace.kinds = {str(index): kind for index, (kind, _, _) in enumerate(spans)}
        return trace.question_tokens

    assert tokens(("question", 20, 30)) == 20
    assert tokens(("question", 20, 24)) == 20
    assert tokens(("question", 20, 23)) == 0
    assert tokens(("question", 1, 4), ("question", 20, 30), ("needle", 31, 35)) == 20
    assert tokens(("context", 20, 40)) == 0


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
    assert (
        reference_metrics.jaccard_matrix(FIXTURE, local, "first") == 1
    ).all()  # everything is protected: two empty sets
    empty = reference_selection.Selection(
        "layer", [[np.array([], int)], [np.array([2])]], [np.array([], int)] * 2, [0, 1]
    )
    assert reference_metrics.jaccard_matrix(FIXTURE, empty, "first").tolist() == [[1, 0], [0, 1]]
    nothing, something = np.zeros(3), np.array([1.0, 0, 2])
    assert reference_metrics.cosine(nothing, nothing) == 0
    assert reference_metrics.cosine(nothing, nothing, both_zero=1) == 1
    assert reference_metrics.cosine(nothing, something, both_zero=1) == 0
    assert reference_metrics.ratio(nothing, nothing, 1).tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------- agreement


def test_agreement() -> None:
    scores = np.array([3.0, 2.0, 1.0 + 5e-6, 1.0, 1.0, 0.5])

    def agree(theirs: list[int]) -> bool:
        return reference_selection.sets_agree(np.array([0, 1, 2]), np.array(theirs), scores, scores[2])

    assert agree([0, 1, 2])
    assert agree([0, 1, 3])
    assert not agree([0, 1, 4])  # 3 scores exactly the same and is lower
    assert not agree([0, 1, 5])
    assert not agree([0, 2, 3])
    assert not agree([0, 1])


def test_agreement_of_chunks() -> None:
    def sets(x: list[float], parameters: str) -> set[tuple[int, ...]]:
        chosen = reference_once.chunk_selections(
            np.array(x), 4, 1, 2, parameters_of(Policy.parse(f"chunkkv:{parameters}"))
        )
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
    "strided",
    "truncate",
    "h2o-online",
    "h2o-online:heads=layer,recent=1",
    "h2o-online:heads=query,prefill=once",
    "h2o-online:grow=true",
    "pyramid-kv:window=3",
    "pyramid-infer:sinks=1",
    "pyramid-infer:over=all,decay=linear,r=0.4,sinks=0",
    "hybrid:chunkkv.chunk=3,chunkkv.window=2,snapkv.window=2",
    "dynamickv:window=3,update=2",
    "dynamickv:window=3,update=1,norm=minmax,mid_total=proportional",
    "sca",
    "sca:objective=max,sinks=1,share=2",
    "finch:question_tokens=2,blocks=4,positions=original",
    "streaming-llm:sinks=1,rolling=true",
    "tova",
    "tova:schedule=online",
    "scissorhands:history=5,recent=2",
    "scissorhands:history=5,recent=0.3,heads=query",
    "keydiff",
    "keydiff:schedule=every(6)",
    "value-norm:sinks=1,window=2",
    "vatp:sinks=1",
    "observed-attention:heads=layer",
    "lagkv:sinks=1,lag=4",
    "ada-kv:window=3",
    "ada-kv:window=3,heads=query,normalise=true",
    "nacl:question_tokens=2",
    "critical-kv:wo=none,base=(snapkv:window=2)",
    "q-filter",
    "cur",
    "oracle",
    "oracle:scope=layer",
    "oracle:scope=global",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", RANDOM, ids=lambda trace: trace.name)
@pytest.mark.parametrize("budget", ["0.2", "5"])
@pytest.mark.parametrize("choice", ["continuation", "last:4"])
def test_laws(trace: Trace, policy: str, budget: str, choice: str) -> None:
    if policy.startswith("finch") and reference.budget_tokens(budget, trace.prompt) <= 2:
        return  # no room beside the question
    selection = select(trace, Policy.parse(policy), budget, choice)
    slots = len(trace.treated) * reference_selection.row_count(trace, selection.heads)
    slots *= reference.budget_tokens(budget, trace.prompt)
    used = reference_metrics.counts(selection).sum()
    assert used <= slots if "overlap" in policy else used == slots
    measured = reference_metrics.measure(trace, selection, choice)
    recall, l1 = measured["attention_recall", ""].heads, measured["attention_l1", ""].heads
    np.testing.assert_allclose(l1, 2 * (1 - recall), atol=1e-12)
    queries = np.array(reference.eval_queries(trace, choice))
    for index, layer in enumerate(trace.treated):
        a = reference.attention(trace, layer, queries)
        kept_a = np.where(reference_metrics.residents(trace, selection, index, queries), a, 0)
        cosine = np.sqrt((kept_a**2).sum(-1) / (a**2).sum(-1)).mean(-1)
        np.testing.assert_allclose(measured["attention_cosine", ""].heads[index], cosine, atol=1e-12)
    if selection.evicted_at is not None or selection.seen is not None:
        return  # no oracle with one fixed set bounds sets that change
    ceiling = select(trace, Policy.parse(f"oracle:counts=({policy})"), budget, choice)
    best = reference_metrics.measure(trace, ceiling, choice)["attention_recall", ""].heads
    for index, gained in enumerate(best - recall):
        rows = reference_selection.row_count(trace, selection.granularity(index))
        assert (gained.reshape(rows, -1).mean(axis=1) >= -1e-12).all()


@pytest.mark.parametrize("trace", [FIXTURE, *RANDOM], ids=lambda trace: trace.name)
@pytest.mark.parametrize("choice", ["continuation", "last:3", "all", "stride:2"])
def test_full_is_exact(trace: Trace, choice: str) -> None:
    measured = reference_metrics.measure(trace, select(trace, Policy.parse("full"), "1", choice), choice, rows=True)
    for (metric, variant), values in measured.items():
        if metric.endswith(("_error", "_loss", "_l1")):
            assert values.all == 0, (metric, variant)
        elif (metric.endswith(("_recall", "_cosine"))) and variant not in ("unaligned", "nosink"):
            assert values.all == pytest.approx(1, abs=1e-12), (metric, variant)


@pytest.mark.parametrize("trace", RANDOM[:2], ids=lambda trace: trace.name)
def test_following_oneself_agrees(trace: Trace) -> None:
    for text in (
        "h2o-online",
        "h2o-online:prefill=once,heads=query",
        "pyramid-infer:sinks=1",
        "dynamickv:window=3,update=2",
        "h2o:schedule=threshold(0.5,0.25)",
        "random:schedule=threshold(9,4),sinks=1",
        "strided:schedule=threshold(9,4)",
        "sca:schedule=threshold(9,4),recent=2,positions=original",
        "finch:question_tokens=2,blocks=4,positions=original",
    ):
        policy = Policy.parse(text)
        ours = select(trace, policy, "5")
        followed = reference_policies.decide(trace, policy, "5", follow=ours)
        assert followed.decisions
        assert all(decision.verdict(ours) == Verdict.EQUAL for decision in followed.decisions), text


def test_following_somebody_wrong_does_not_agree() -> None:
    trace = RANDOM[0]
    for text, other in (
        ("h2o-online", "h2o-online:recent=1"),
        ("h2o:schedule=threshold(9,4)", "random:schedule=threshold(9,4)"),
        (
            "sca:schedule=threshold(9,4),recent=2,positions=original",
            "sca:schedule=threshold(9,4),recent=1,positions=original",
        ),
        ("finch:question_tokens=2,blocks=4,positions=original", "finch:question_tokens=2,blocks=5,positions=original"),
        ("pyramid-infer:sinks=1,recent=3", "pyramid-infer:sinks=1,recent=3,distance_weight=9"),
        ("dynamickv:window=3,update=2", "dynamickv:window=3,update=2,norm=minmax"),
    ):
        theirs = select(trace, Policy.parse(other), "9")
        followed = reference_policies.decide(trace, Policy.parse(text), "9", follow=theirs)
        assert any(decision.verdict(theirs) == Verdict.WRONG for decision in followed.decisions), text


@pytest.mark.parametrize("trace", [FIXTURE, *RANDOM], ids=lambda trace: trace.name)
def test_equal_policies(trace: Trace) -> None:
    def rows(policy: str, budget: str = "5") -> list:
        return [[row.tolist() for row in layer] for layer in select(trace, Policy.parse(policy), budget).rows]

    assert rows("chunkkv:chunk=1,window=2,heads=kv") == rows("snapkv:pool=none,window=2")
    assert rows("h2o-online", str(trace.prompt)) == rows("full")
    assert rows("dynamickv:window=2,r_max=1") == rows("snapkv:window=2")
    if len(trace.layers) == 1:
        assert rows("pyramid-kv:window=2") == rows("snapkv:window=2")
    nested = rows("pyramid-infer:sinks=1,r=0.5")
    assert all(set(deep[0]) <= set(shallow[0]) for shallow, deep in zip(nested, nested[1:], strict=False))


@pytest.mark.parametrize(
    "policy",
    [
        "streaming-llm:sinks=2,positions=cache",
        "streaming-llm:sinks=2,positions=cache,rolling=true",
        "finch:question_tokens=2,blocks=5",
        "finch:question_tokens=2,blocks=5,order=relevance",
        "sca:schedule=threshold(8,4),recent=1",
    ],
)
def test_moved_tokens(policy: str) -> None:
    """Attention from the distances between slots alone, RoPE as multiplication of complex numbers."""
    selection = select(FIXTURE, Policy.parse(policy), BUDGET)
    stored = FIXTURE.layers[1]
    cosines = []
    for t in range(12, 16):
        [seen] = reference_metrics.residents(FIXTURE, selection, 1, np.array([t]))[2]
        tokens = np.flatnonzero(seen).tolist()
        if selection.order is not None:
            tokens = [*selection.order[1][0], *range(12, t + 1)]
        complex_q = stored.q[2, t, :2] + 1j * stored.q[2, t, 2:]
        weights, exact = {}, {}
        for slot, j in enumerate(tokens):
            complex_k = stored.k[1, j, :2] + 1j * stored.k[1, j, 2:]
            turn = np.exp(1j * stored.inv_freq * ((len(tokens) - 1 - t) - (slot - j)))
            weights[j] = np.exp(0.5 * (complex_q * turn * complex_k.conj()).sum().real)
        for j in range(t + 1):
            exact[j] = np.exp(0.5 * stored.q[2, t] @ stored.k[1, j])
        dot = sum(weights[j] * exact[j] for j in tokens)
        cosines.append(dot / np.sqrt(sum(w * w for w in weights.values()) * sum(w * w for w in exact.values())))
    measured = reference_metrics.attention_metrics(FIXTURE, selection, "continuation")
    assert measured["attention_cosine", ""].heads[1, 2] == pytest.approx(np.mean(cosines), abs=1e-12)


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        ("strided", 6 + 2.5),  # the prompt's, and 1 to 4 tokens after it
        ("h2o-online", 6 + 1),  # a query sees the cache before the eviction that it causes
        ("h2o-online:grow=true", 6 + 2.5),
        ("streaming-llm:sinks=2,rolling=true", 6),
        ("strided:schedule=threshold(8,4)", (5 + 6 + 7 + 8) / 4),
        ("kivi", 12 + 2.5),
    ],
)
def test_held_tokens(policy: str, held: float) -> None:
    selection = select(FIXTURE, Policy.parse(policy), BUDGET)
    assert reference_metrics.sizes(FIXTURE, selection, "continuation")["held_tokens", ""].all == held


def test_finch_grows_in_proportion() -> None:
    trace = RANDOM[0]
    selection = select(trace, Policy.parse("finch:question_tokens=2,blocks=4,positions=original"), "9")
    for end in range(4, 36, 4):
        gone = selection.evicted_at[:, 0, :end]
        assert (((gone < 0) | (gone >= end)).sum(axis=1) == 7 * end // 35).all()


def test_middle_updates_of_dynamickv() -> None:
    scores = [np.arange(10.0)[None] + 10, np.arange(10.0)[None]]
    for total, expected in (("full", [8, 0]), ("proportional", [4, 4])):
        policy = Policy.parse(f"dynamickv:update=1,mid_total={total}")
        case = reference_selection.Case(FIXTURE, parameters_of(policy), BUDGET)
        assert next(reference_layers.buffer_sizes(case, scores, 4, 8)) == expected


def test_quantisation_from_a_rounded_minimum() -> None:
    assert reference_stores.quantised(np.array([1000.3, 1001.7], np.float32), 2, 2)[0] == 1000.5


def test_evicting_when_nothing_is_due_is_wrong() -> None:
    policy = Policy.parse("strided:schedule=threshold(8,4)")
    theirs = reference_policies.decide(FIXTURE, policy, BUDGET)
    theirs.evicted_at[0, 0, 13] = 14
    followed = reference_policies.decide(FIXTURE, policy, BUDGET, follow=theirs)
    assert any(decision.verdict(theirs) == Verdict.WRONG for decision in followed.decisions)
