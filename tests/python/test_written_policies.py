"""Are policies in Python equal to their twins in C++, bit by bit, and is what is wrong in one said in a line?"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from program import done

import kvreplay as kv

BUDGETS = [0.1, 0.3, 9, 149]
replay = partial(kv.replay, threads=1)  # these traces are too small to share


@pytest.fixture(scope="module")
def several(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Traces of other shapes: groups of 3 and of 1, a layer with a sliding window, 16 bits, and many equal scores."""
    folder = tmp_path_factory.mktemp("several")
    shape = "--layers 4 --query-heads 3 --kv-heads 3 --prompt 161 --continuation 5 --head-dim 8".split()
    done("synth", "integer", "-o", "integer.h5", *shape, "--dtype", "float16", folder=folder)
    return [traces / "small.h5", traces / "sliding.h5", folder / "integer.h5"]


def same_sets(run: kv.Run, one: str, other: str) -> None:
    """At every budget of every trace."""
    for trace in set(run.cells["trace"]) - {""}:
        for budget in dict.fromkeys(run.cells["budget"]):
            first, second = (run.selection(policy, budget, trace) for policy in (one, other))
            assert (first.offsets == second.offsets).all(), (trace, budget)
            assert (first.positions == second.positions).all(), (trace, budget)
            assert (first.granted == second.granted).all(), (trace, budget)
            assert (first.sinks == second.sinks).all() and (first.recent == second.recent).all(), (trace, budget)
            if second.evicted_at is not None:
                assert (first.evicted_at == second.evicted_at).all(), (trace, budget)
    values = run.results[run.results["role"] == "asked"].pivot_table(
        index=["trace", "budget", "layer", "head", "metric", "variant"], columns="label", values="value", dropna=False
    )
    assert values[one].notna().sum() > 20 and values[one].equals(values[other])


def group_mean(view: object, scores: np.ndarray) -> np.ndarray:
    """[Hkv, n]: the heads of each group added one by one, as the engine does."""
    grouped = scores.reshape(view.kv_heads, view.group, -1)
    total = grouped[:, 0].copy()
    for member in range(1, view.group):
        total += grouped[:, member]
    return total / view.group


@kv.policy(recent="window", queries="window")
def window_twin(view, window: int = 8):
    "attention of the last queries, without pooling"
    return view.window_attention(window)


class HeavyTwin(kv.Policy):
    "cumulative attention, and half of the budget for recent tokens"

    name = "heavy-twin"
    recent = 0.5
    queries = "all"

    def score(self, view):
        return group_mean(view, view.cumulative_attention())


class LongKeys(kv.Policy):
    "long keys, written twice"

    name = "long-keys"
    squared: bool = False

    def score(self, view):
        keys = view.keys().astype(np.float64)
        return np.sqrt((keys**2).sum(axis=-1))


@kv.policy(name="ordered-keys")
def ordered_keys(view):
    "the same order of tokens by numbers of another size"
    return np.exp(np.sqrt((view.keys().astype(np.float64) ** 2).sum(axis=-1)))


@pytest.mark.parametrize("heads", ["kv", "query", "layer"])
def test_the_twin_of_snapkv(heads: str, several: list[Path]) -> None:
    twin, real = f"window_twin:heads={heads}", f"snapkv:pool=none,heads={heads}"
    run = kv.replay(several, [twin, real], BUDGETS, threads=2)
    same_sets(run, "window_twin", "snapkv")
    small = run.selection("window_twin", 9, "small")
    assert (small.recent == 8).all() and (small.kept == 9).all()


def test_a_parameter_of_the_twin(small: Path) -> None:
    run = replay(small, [window_twin(window=3), kv.policy.snapkv(window=3, pool="none")], BUDGETS)
    same_sets(run, "window_twin", "snapkv")


def test_the_twin_of_h2o(several: list[Path]) -> None:
    same_sets(replay(several, [HeavyTwin, "h2o"], BUDGETS), "heavy-twin", "h2o")


@pytest.mark.parametrize("rest", ["agg=max", "agg=sum", "select=chunks,chunk=7", "share=every,reuse=2"])
def test_parts_go_with_a_twin_as_with_the_real_one(rest: str, several: list[Path]) -> None:
    run = replay(several, [f"window_twin:{rest}", f"snapkv:pool=none,{rest}"], [0.1, 0.4])
    same_sets(run, "window_twin", "snapkv")


def test_a_twin_under_a_schedule(several: list[Path]) -> None:
    run = replay(several, ["window_twin:schedule=every(32)", "snapkv:pool=none,schedule=every(32)"], [30])
    same_sets(run, "window_twin", "snapkv")


class Every(kv.Policy):
    "what every(32) does, written out"

    name = "every-twin"
    recent = 8
    queries = 8
    block = 32

    def score(self, view):
        return view.window_attention(8)

    def schedule(self, end):
        assert end.seen <= end.prompt and end.held <= end.seen - end.block
        return min(end.budget, end.held + end.block)


def test_a_schedule_of_our_own(several: list[Path]) -> None:
    run = replay(several, [Every, "snapkv:pool=none,schedule=every,interval=32"], [30, 47])
    same_sets(run, "every-twin", "snapkv")


def test_a_schedule_holds_what_it_says(small: Path) -> None:
    class Growing(Every):
        name = "growing"

        def schedule(self, end):
            return max(1, end.budget * end.seen // end.prompt)

    evicted_at = replay(small, Growing, 30).selection("growing", 30).evicted_at
    for seen in (32, 64, 96, 128):  # the next block's queries see what the end of this one left, and themselves
        held = (np.arange(len(evicted_at[0, 0])) < seen) & ((evicted_at < 0) | (evicted_at >= seen))
        assert (held.sum(axis=-1) == 30 * seen // 150).all()


class Rounded(kv.Policy):
    "all heads' longest keys, rounded to whole numbers, and values cut in half"

    name = "rounded"
    heads = "layer"

    def score(self, view):
        return view.key_norms(2)

    def store(self, view, kept):
        assert kept.dtype == bool and kept.shape == (view.kv_heads, view.prompt)
        return np.round(view.keys()), view.values() / 2, kept.sum() * 3.5


def test_a_store_of_our_own(small: Path) -> None:
    metrics = "kv_bytes,kv_l1_loss:key,kv_l1_loss:value,attention_l1,output_error"
    run = replay(small, Rounded, 30, metrics=metrics, detail="layer")
    assert set(run.cells["policy"]) > {"rounded"}
    trace, found = kv.open(small), run.results[run.results["label"] == "rounded"]
    mask = run.selection("rounded", 30).mask()[:, 0]
    for layer in range(trace.layers):
        rows = found[found["layer"] == str(layer)].set_index(["metric", "variant"])["value"]
        keys, values = (one[:, : trace.prompt].astype(float) for one in (trace.k(layer), trace.v(layer)))
        for name, exact, given in (("key", keys, np.round(keys)), ("value", values, values / 2)):
            lost = np.abs(np.where(mask[layer][:, None], exact - given, exact)).sum() / np.abs(exact).sum()
            assert rows[("kv_l1_loss", name)] == pytest.approx(lost, abs=1e-6)
    assert (found[found["metric"] == "kv_bytes"]["value"] == 30 * trace.kv_heads * 3.5 * trace.layers).any()


def test_one_order_of_tokens_is_one_selection(small: Path) -> None:
    same_sets(replay(small, [LongKeys, ordered_keys], BUDGETS), "long-keys", "ordered-keys")


class OwnChunks(kv.Policy):
    "whole chunks of `chunk` tokens by their sum, the last one cut: written out"

    name = "own-chunks"
    recent = 8
    queries = 8
    chunk: int = kv.parameter(10, 1, help="tokens in one")

    def score(self, view):
        return view.window_attention(8)

    def select(self, row):
        end, free = row.tokens - row.recent, row.budget - row.recent - row.sinks
        chunks = [np.arange(first, min(first + self.chunk, end)) for first in range(0, end, self.chunk)]
        kept = list(range(end, row.tokens))
        for one in sorted(chunks, key=lambda chunk: (-sum(row.scores[chunk]), chunk[0])):
            kept.extend(one[:free])
            free -= len(one[:free])
        return kept


def test_the_twin_of_chunks(several: list[Path]) -> None:
    for heads in ("kv", "layer"):
        real = f"snapkv:pool=none,select=chunks,chunk=10,heads={heads}"
        run = replay(several, [f"own-chunks:heads={heads}", real], [20, 38, 70])
        for trace in set(run.cells["trace"]) - {""}:
            for budget in (20, 38, 70):
                first, second = (run.selection(policy, budget, trace) for policy in ("own-chunks", "snapkv"))
                assert (first.positions == second.positions).all() and (first.recent == second.recent).all()


class Uniform(kv.Policy):
    "every layer and head gets B, said aloud"

    name = "uniform-twin"
    recent = 8
    queries = 8

    def score(self, view):
        return view.window_attention(8)

    def allocate(self, division):
        return np.full(division.layers, division.budget)


class Pyramid(Uniform):
    "an arithmetic sequence of layers"

    name = "pyramid-twin"
    steep: float = kv.parameter(0.5, 0, 1)

    def allocate(self, division):
        middle = (division.layers - 1) / 2
        slope = self.steep * (division.budget - division.recent) / max(middle, 1)
        counts = [int(division.budget + slope * (middle - layer)) for layer in range(division.layers)]
        return [min(count, division.prompt) for count in counts]


class Across(Uniform):
    "as many tokens of a layer and head as are among the best L H B of all"

    name = "across-twin"
    recent = 0
    queries = 8

    def allocate(self, division, scores):
        assert len(scores) == division.layers
        ranked = np.argsort(-np.stack(scores).ravel(), kind="stable")
        best = ranked[: division.layers * len(scores[0]) * division.budget]
        place = best // (len(scores[0]) * division.prompt), best // division.prompt % len(scores[0])
        counts = np.zeros((division.layers, len(scores[0])), dtype=int)
        np.add.at(counts, place, 1)
        return counts


class InPairs(Uniform):
    "every second layer takes the set before it"

    name = "pairs-twin"
    allocate = None

    def share(self, layer, layers):
        return layer - layer % 2


def test_the_twins_of_allocations_and_sharing(several: list[Path]) -> None:
    policies = [Uniform, "snapkv:pool=none", InPairs, "snapkv:pool=none,share=every,reuse=2"]
    run = replay(several, policies[:2], BUDGETS)
    same_sets(run, "uniform-twin", "snapkv")
    run = replay(several, policies[2:], BUDGETS)
    same_sets(run, "pairs-twin", "snapkv")
    positions = run.selection("pairs-twin", 9, "small").positions
    assert (positions[:18] == positions[18:36]).all() and (positions[:18] != positions[36:]).any()


def test_a_division_by_the_scores_of_all_layers(several: list[Path]) -> None:
    run = replay(several, Across, [12, 40])
    for trace in ("small", "integer"):
        kept = run.selection("across-twin", 40, trace).kept
        assert kept.sum() == 40 * kept.size and len(np.unique(kept)) > 1


def test_a_pyramid_keeps_its_sum(several: list[Path]) -> None:
    run = replay(several, Pyramid(steep=1.0), [20, 40])
    for trace in ("small", "integer"):
        kept = run.selection("pyramid-twin", 40, trace).kept
        assert (np.diff(kept[:, 0]) < 0).all() and kept.sum() <= 40 * kept.size
        assert (kept == kept[:, :1]).all()


def test_scores_may_be_of_heads_of_keys_or_of_queries(small: Path) -> None:
    kv.policy(lambda view: view.key_norms(), name="kv-rows")
    kv.policy(lambda view: np.repeat(view.key_norms(), view.group, axis=0), name="query-rows")
    for heads in ("kv", "query", "layer"):
        run = replay(small, [f"kv-rows:heads={heads}", f"query-rows:heads={heads}"], [0.2])
        same_sets(run, "kv-rows", "query-rows")


@kv.policy
def tuned(
    view,
    p: float = kv.parameter(2.0, 1.0, 4.0, "of the norm"),
    last: int = kv.parameter(3, 1, 9),
    turned: bool = False,
    of: str = kv.parameter("keys", choices=("keys", "values")),
):
    """norms of keys or values

    More about them.
    """
    assert isinstance(p, float) and isinstance(last, int) and isinstance(turned, bool) and isinstance(of, str)
    norms = view.key_norms(p) if of == "keys" else view.value_norms(p)
    return -norms if turned else norms


def test_values_of_parameters_arrive_with_their_types(small: Path) -> None:
    run = replay(small, ["tuned", tuned(p=3.0, last=4, turned=True, of="values")], 0.2, metrics="kv_bytes")
    assert set(run.cells[run.cells["policy"] == "tuned"]["params"]) == {
        "p=2,last=3,turned=false,of=keys,heads=kv,agg=mean,sinks=0",
        "p=3,last=4,turned=true,of=values,heads=kv,agg=mean,sinks=0",
    }
    assert kv.policy.tuned.__doc__.startswith("norms of keys or values\n") and "of the norm" in kv.policy.tuned.__doc__


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tuned:p=5", "tuned:p: out of range: expected 1..4, found 5"),
        ("tuned:p=x", 'tuned:p: not a number: expected a number, found "x"'),
        ("tuned:p=nan", "tuned:p: not finite: expected a number, found nan"),
        ("tuned:last=0", "tuned:last: out of range: expected 1..9, found 0"),
        ("tuned:last=1.5", 'tuned:last: not a number: expected a whole number, found "1.5"'),
        ("tuned:turned=maybe", 'tuned:turned: not a Boolean: expected false or true, found "maybe"'),
        ("tuned:of=queries", "tuned:of: unknown word: expected keys | values, found queries"),
        ("tuned:lst=1", "tuned: unknown parameter lst: did you mean last?"),
        ("tuned:select=chunkz", "tuned:select: unknown value chunkz: did you mean chunks?"),
    ],
)
def test_values_that_cannot_be_are_refused(text: str, words: str, small: Path) -> None:
    with pytest.raises(kv.Error) as refused:
        replay(small, text, 0.1)
    assert str(refused.value) == words and refused.value.exit_code == 2


BEYOND, NO_WORD = kv.parameter(9, 1, 4), kv.parameter("c", choices=("a", "b"))


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda view, p: p, "mine:p: default: expected a number, a Boolean or a string, found no default"),
        (lambda view, p=None: p, "mine:p: default: expected a number, a Boolean or a string, found NoneType"),
        (lambda view, p=BEYOND: p, "mine:p: default: expected 1..4, found 9"),
        (lambda view, p=2**40: p, "mine:p: default: expected -2147483648..2147483647, found 1099511627776"),
        (lambda view, p=NO_WORD: p, "mine:p: default: expected a | b, found c"),
    ],
)
def test_parameters_that_cannot_be_are_refused(declare, words: str) -> None:
    with pytest.raises(kv.Error) as refused:
        kv.policy(declare, name="mine")
    assert str(refused.value) == words


def ones(view):
    return np.ones((view.kv_heads, view.tokens))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nix": 3}, "mine: unknown option of a policy: expected allocate, schedule, select, share, store, found nix"),
        ({"heads": 3}, "mine: heads: expected a string, found 3"),
        ({"heads": "x"}, 'mine:heads: unknown value: expected one of kv, query, layer, found "x"'),
        ({"sinks": "a"}, f"mine ({__file__}): sinks: expected a number of tokens, 0 or more, found 'a'"),
        ({"sinks": -1}, f"mine ({__file__}): sinks: expected a number of tokens, 0 or more, found -1"),
        ({"recent": 2.0}, "or a fraction of the budget, found 2.0"),
        ({"recent": None}, "or a fraction of the budget, found None"),
        ({"queries": "some"}, "queries: expected all, future or how many of the last, found 'some'"),
        ({"queries": 0}, "queries: expected all, future or how many of the last, found 0"),
        ({"schedule": 3}, "mine: schedule: expected the name of a part, or a method, found int"),
        ({"schedule": len, "block": 0}, f"mine ({__file__}): block: expected a number of tokens, 1 or more, found 0"),
        ({"store": lambda view, kept: 3, "heads": "query"}, "expected heads=kv or heads=layer, found heads=query"),
        ({"select": "chunkz"}, "chunkz: unknown selector: did you mean chunks?"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, words: str, small: Path) -> None:
    with pytest.raises(kv.Error) as refused:
        replay(small, kv.policy(ones, name="mine", **options), 0.1)
    assert words in str(refused.value) and refused.value.exit_code == 2


def test_the_name_of_a_built_in_is_taken() -> None:
    with pytest.raises(kv.Error, match="snapkv: another policy has that name: expected another name"):
        kv.policy(ones, name="snapkv")


@pytest.mark.parametrize("name", ["a,b", "a:b", "@a", "a=b", "a(b)", " ", "a.py", "β", "a\nb", ""])
def test_names_that_a_command_line_could_not_say_are_refused(name: str) -> None:
    with pytest.raises(kv.Error, match="policy: name: expected ASCII letters, digits, - and _, ") as refused:
        kv.policy(lambda view: view.key_norms(), name=name)  # without a name it is <lambda>
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda view, heads="kv": view, "mine:heads: reserved parameter name: expected another name"),
        (lambda view, select=3: view, "mine:select: reserved parameter name: expected another name"),
        (lambda view, β=3: view, "mine:β: name: expected ASCII letters, found β"),
        (lambda: 3, "mine: arguments: expected a view, and parameters with defaults, found none"),
        (3, "policy: not a function: expected def NAME(view, …), or a class of Policy, found 3"),
        (Uniform, "policy: not a function: expected def NAME(view, …), or a class of Policy, found <class "),
        (tuned, "policy: not a function: expected def NAME(view, …), or a class of Policy, found <kvreplay"),
    ],
)  # fmt: skip
def test_functions_that_are_no_policies_are_refused(function: object, words: str) -> None:
    with pytest.raises(kv.Error) as refused:
        kv.policy(function, name="mine")
    assert words in str(refused.value)


def line_of(function: object, text: str) -> str:
    """FILE:LINE of the line in which `text` stands."""
    lines, first = inspect.getsourcelines(function)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{number}"


def divides(view):
    return view.key_norms() / (1 // 0)


def asks_too_much(view):
    return view.queries(100000)


def calls_another(view):
    return np.linalg.norm("a")


BROKEN = [
    (divides, {}, (divides, "1 // 0", ": score raised ZeroDivisionError: integer division or modulo by zero")),
    (asks_too_much, {}, (asks_too_much, "queries(1", ": queries: how many of the last: expected 1..150, found 100000")),
    (calls_another, {}, (calls_another, "linalg", ": score raised ")),
    (lambda view: np.ones((3, 150)), {}, "scores: expected [2, 150] or [6, 150], found [3, 150]"),
    (lambda view: np.ones((2, 149)), {}, "scores: expected [2, 150] or [6, 150], found [2, 149]"),
    (lambda view: None, {}, "scores: expected an array of numbers, found None"),
    (lambda view: "abc", {}, "scores: expected an array of numbers, found <U3"),
    (lambda view: [[1], [1, 2]], {}, "scores: expected an array of numbers, found "),
    (lambda view: np.ones((2, 150)) * 1j, {}, "scores: expected an array of numbers, found complex128"),
    (lambda view: np.full((2, 150), np.nan), {}, "layer 0: score of broken is NaN"),
    (ones, {"select": lambda row: range(row.tokens)}, "selected tokens: expected at most 15, found 150"),
    (ones, {"select": lambda row: [-1]}, "selected tokens: expected 0..149, found -1"),
    (ones, {"select": lambda row: [150]}, "selected tokens: expected 0..149, found 150"),
    (ones, {"select": lambda row: [7, 7]}, "selected tokens: expected each once, found 7 twice"),
    (ones, {"select": lambda row: [0.5]}, "selected tokens: expected an array of whole numbers, found float64"),
    (ones, {"select": lambda row: row.scores > 0}, "selected tokens: expected an array of whole numbers, found bool"),
    (ones, {"allocate": lambda d, s: [[-1, 1]] * d.layers}, "counts: expected 0..150, found -1"),
    (ones, {"allocate": lambda d, s: [[1, 151]] * d.layers}, "counts: expected 0..150, found 151"),
    (ones, {"allocate": lambda d, s: [1] * d.layers}, "counts: expected [3, 2], found [3]"),
    (ones, {"schedule": lambda end: 0, "block": 50}, "tokens held: expected 1..50, found 0"),
    (ones, {"schedule": lambda end: end.held + 1.0, "block": 50}, "tokens held: expected 1..50, found 1.0"),
    (ones, {"schedule": lambda end: 16, "block": 50}, "held at the end of the prompt: expected at most 15, found 16"),
    (ones, {"store": lambda view, kept: view.keys()}, "store: expected keys, values and bytes, found ndarray"),
    (ones, {"store": lambda v, kept: (v.keys(), v.values()[:1], 1)}, "stored values: expected [2, 150, "),
    (ones, {"store": lambda v, kept: (v.keys() * np.inf, v.values(), 1)}, "stored keys: expected finite numbers, "),
    (ones, {"store": lambda v, kept: (v.keys(), v.values(), -1)}, "bytes: expected a number, 0 or more, found -1"),
    (ones, {"allocate": lambda d, s: [[15, 16]] * d.layers}, "overspends its budget: expected at most 90 slots"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_what_is_wrong_fails_its_own_cells_alone(number: int, small: Path) -> None:
    score, options, told = BROKEN[number]
    broken = kv.policy(score, name="broken", **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = replay(small, ["h2o", broken, "snapkv"], 0.1, metrics="kv_bytes")
    [line] = {str(one.message) for one in heard}
    words = told if isinstance(told, str) else line_of(*told[:2]) + told[2]
    assert line.startswith("failed: small, broken at 0.1: ") and words in line and "\n" not in line
    assert {cell["policy"]: cell["state"] for cell in run.about["cells"]}["broken"] == "failed"
    assert set(run.cells["policy"]) == {"h2o", "snapkv", "full", "random", "oracle"}


@pytest.mark.filterwarnings("ignore:failed")
@pytest.mark.parametrize(
    "options",
    [
        {"allocate": lambda division: [division.budget + 1] * division.layers},
        {"allocate": lambda division: [-1] * division.layers},
        {"allocate": lambda division: 1 // 0},
        {"share": lambda layer, layers: -1},
        {"share": lambda layer, layers: 1 // 0},
    ],
)
def test_a_wrong_division_or_sharing_fails_its_own_cells_alone(options: dict, small: Path) -> None:
    broken = kv.policy(ones, name="broken", **options)
    with pytest.warns(UserWarning, match="failed: small, broken at 0.1: "):
        run = replay(small, ["h2o", broken], 0.1, metrics="kv_bytes")
    assert "h2o" in set(run.cells["policy"])


def test_what_is_wrong_at_its_making_says_where(small: Path) -> None:
    class Fragile(kv.Policy):
        window: int = kv.parameter(4, 1)

        def __init__(self, **values):
            super().__init__(**values)
            self.rest = 8 % (self.window - 4)

        score = ones

    with pytest.raises(kv.Error, match=r"test_written_policies\.py:\d+: the constructor raised ZeroDivisionError"):
        replay(small, "Fragile", 0.1)


def test_unknown_values_of_a_class() -> None:
    with pytest.raises(kv.Error, match="pyramid-twin: unknown parameter stepe: did you mean steep?"):
        Pyramid(stepe=1)


def sets(run: kv.Run) -> list[int]:
    return run.selection("changing", 0.1).positions.tolist()


def cell(run: kv.Run) -> str:
    [found] = run.cells[run.cells["policy"] == "changing"]["cell"]
    return found


def changing(turned: bool) -> object:
    """Two policies of one name, whose lines are the same."""
    return kv.policy(lambda view: view.key_norms() * (-1 if turned else 1), name="changing")


def test_a_new_definition_takes_effect(small: Path) -> None:
    first = replay(small, changing(False), 0.1)
    second = replay(small, changing(True), 0.1)
    third = replay(small, changing(False), 0.1)
    assert sets(first) == sets(third) != sets(second)


def test_a_definition_is_itself_whatever_came_after_it(small: Path) -> None:
    first, second = changing(False), changing(True)
    assert sets(replay(small, first, 0.1)) != sets(replay(small, second, 0.1)) == sets(replay(small, "changing", 0.1))
    with pytest.raises(
        kv.Error, match="replay: two policies with the same name: expected different names, found changing"
    ):
        replay(small, [first, second], 0.1)


def test_what_a_class_inherits_is_part_of_it() -> None:
    def family(sign: int) -> type[kv.Policy]:
        class Parent(kv.Policy):
            def score(self, view):
                return sign * view.key_norms()

        class Child(Parent):
            name = "child"

        return Child

    one, same, other = (family(sign).definition.source_hash for sign in (1, 1, -1))
    assert one == same != other


def test_without_a_file_what_was_compiled_counts() -> None:
    def made(number: int) -> str:
        space = {"kv": kv}
        exec(f"@kv.policy\ndef typed(view):\n    return view.key_norms({number}.0)\n", space)
        return space["typed"].definition.source_hash

    assert made(1) == made(1) != made(2)


def test_equal_content_is_equal_and_other_content_is_not() -> None:
    one, same, other = changing(False), changing(False), changing(True)
    assert one.definition.source_hash == same.definition.source_hash != other.definition.source_hash
    assert kv.policy(ones, name="a").definition.source_hash != kv.policy(divides, name="a").definition.source_hash


def test_a_new_definition_is_another_cell(small: Path, tmp_path: Path) -> None:
    first = cell(replay(small, changing(False), 0.1, output=tmp_path / "out"))
    second = cell(replay(small, changing(True), 0.1, output=tmp_path / "out"))
    again = replay(small, changing(True), 0.1, output=tmp_path / "out")
    assert first != second == cell(again)
    assert [one["state"] for one in again.about["cells"] if one["policy"] == "changing"] == ["skipped"]
