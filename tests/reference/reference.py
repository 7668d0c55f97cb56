"""Every convention, policy and metric of the simulator once more: plain float64 numpy, written from the rules alone.

Nothing here is fast or clever: the n x n attention of a layer is built and reduced. Shapes use L layers, Hq query
heads, Hkv key/value heads, H rows of a policy's granularity, d components a head, P prompt tokens, T tokens in all, E
eval queries. "Treated" layers are those without a sliding window; selections, metrics and matrices count only these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import h5py
import numpy as np

TOLERANCE = 1e-5  # two sets may differ in positions whose score lies this near to the score at the cut, relative to it


class MissingQueries(Exception):
    """The trace does not store the queries that a policy or metric reads."""


# ---------------------------------------------------------------------------------------------------------- the trace


@dataclass
class Layer:
    """q [Hq,Tq,d] for the ascending q_positions [Tq]; k, v [Hkv,T,d]; window W (0: none); number: the model's own."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_positions: np.ndarray
    window: int
    number: int


@dataclass(eq=False)
class Trace:
    """One trace in float64. `spans` maps a name to [begin, end); `number_bytes` is the size of a stored number."""

    name: str
    layers: list[Layer]
    prompt: int
    scale: float
    softcap: float
    number_bytes: int
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.layers[0].k.shape[1]

    @property
    def query_heads(self) -> int:
        return self.layers[0].q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.layers[0].k.shape[0]

    @property
    def dimension(self) -> int:
        return self.layers[0].k.shape[2]

    @property
    def treated(self) -> list[int]:
        """Stored layers without a sliding window."""
        return [index for index, layer in enumerate(self.layers) if layer.window == 0]


def read_trace(path: Path) -> Trace:
    """The trace in a file; every stored number, whatever its type, passes exactly through float32 into float64."""

    def numbers(dataset: h5py.Dataset) -> np.ndarray:
        values = np.empty(dataset.shape, np.float32)
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, h5py.h5t.NATIVE_FLOAT)
        return values.astype(np.float64)

    with h5py.File(path, "r") as file:
        model, tokens = file["model"], file["tokens"]
        layers = []
        for index in range(int(model.attrs["n_layers"])):
            group = file[f"layers/{index:03d}"]
            positions = group["q_positions"][:] if "q_positions" in group else np.arange(tokens["ids"].shape[0])
            layers.append(
                Layer(
                    q=numbers(group["q"]),
                    k=numbers(group["k"]),
                    v=numbers(group["v"]),
                    q_positions=positions,
                    window=int(model["sliding_window"][index]),
                    number=int(model["layer_index"][index]),
                )
            )
        spans = {}
        if "spans" in file:
            for span in file["spans"][:]:
                spans[span["name"].decode()] = (int(span["begin"]), int(span["end"]))
        return Trace(
            name=path.stem,
            layers=layers,
            prompt=int(tokens.attrs["prefill"]),
            scale=float(model.attrs["softmax_scale"]),
            softcap=float(model.attrs["logit_softcap"]),
            number_bytes=file["layers/000/k"].id.get_type().get_size(),
            spans=spans,
        )


def fixture() -> Trace:
    """The small trace that everybody can generate: numbers in [-2, 2] in steps of 1/8, from hashes of their indices."""
    n_layers, query_heads, kv_heads, dimension, prompt, tokens = 4, 4, 2, 4, 12, 16

    def tensor(tag: int, layer: int, heads: int) -> np.ndarray:
        head, token, component = np.indices((heads, tokens, dimension))
        hashes = chain(tag, layer, head, token, component)
        return ((hashes % np.uint64(33)).astype(np.float64) - 16) / 8

    layers = [
        Layer(
            q=tensor(1, index, query_heads),
            k=tensor(2, index, kv_heads),
            v=tensor(3, index, kv_heads),
            q_positions=np.arange(tokens),
            window=0,
            number=index,
        )
        for index in range(n_layers)
    ]
    return Trace("fixture", layers, prompt, scale=0.5, softcap=0.0, number_bytes=4)


# -------------------------------------------------------------------------------------------------------- conventions


def mix(z: np.ndarray | int) -> np.ndarray:
    """splitmix64 on uint64, arithmetic modulo 2^64."""
    with np.errstate(over="ignore"):
        z = np.asarray(z).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def chain(*indices: np.ndarray | int) -> np.ndarray:
    """mix(… mix(mix(x0) ^ x1) ^ x2 …), broadcast over arrays."""
    state = mix(indices[0])
    for index in indices[1:]:
        state = mix(state ^ np.asarray(index).astype(np.uint64))
    return state


def rank(scores: np.ndarray) -> np.ndarray:
    """Indices by descending score, ties by ascending index."""
    if np.isnan(scores).any():
        raise ValueError("a score is NaN")
    return np.lexsort((np.arange(len(scores)), -scores))


def top(scores: np.ndarray, count: int, candidates: np.ndarray) -> np.ndarray:
    """The `count` best of `candidates`, ascending; `scores` are indexed by position."""
    return np.sort(candidates[rank(scores[candidates])[:count]])


def budget_tokens(literal: str, prompt: int) -> int:
    """A literal with a point or % is a share of the prompt, rounded half up and at least 1; an integer is a count."""
    if literal.endswith("%"):
        share = Fraction(literal[:-1]) / 100
    elif "." in literal:
        share = Fraction(literal)
    else:
        return int(literal)
    return max(1, int(share * prompt + Fraction(1, 2)))


def protection(sinks: int, window: int, budget: int, prompt: int) -> np.ndarray:
    """The first min(s,B) and the last min(w, B-s') of the prompt, ascending."""
    sinks = min(sinks, budget)
    window = min(window, budget - sinks)
    return np.union1d(np.arange(sinks), np.arange(prompt - window, prompt))


def apportion(total: int, weights: list[int], low: list[int], high: list[int]) -> list[int]:
    """Integers that sum to min(total, sum(high)), in proportion to `weights`, each within its bounds; exact."""
    total = min(total, sum(high))
    if total < sum(low):
        raise ValueError("the total is below the sum of the lower bounds")
    shares = [Fraction(0)] * len(weights)
    free = set(range(len(weights)))
    while free:
        rest = total - sum(shares[i] for i in range(len(weights)) if i not in free)
        weight = sum(weights[i] for i in free)
        for i in free:
            shares[i] = rest * (Fraction(weights[i], weight) if weight else Fraction(1, len(free)))
        below = {i for i in free if shares[i] < low[i]}
        above = {i for i in free if shares[i] > high[i]}
        excess = sum(low[i] - shares[i] for i in below) - sum(shares[i] - high[i] for i in above)
        fixed = (below if excess >= 0 else set()) | (above if excess <= 0 else set())
        for i in fixed:
            shares[i] = Fraction(low[i] if i in below else high[i])
        free -= fixed
        if not fixed:
            break
    result = [int(share) for share in shares]
    order = sorted(range(len(weights)), key=lambda i: (result[i] - shares[i], i))
    for i in (i for i in order if result[i] < high[i]):
        if sum(result) == total:
            break
        result[i] += 1
    return result


def aggregate(scores: np.ndarray, heads: str, agg: str, kv_heads: int) -> np.ndarray:
    """[Hq,n] to [H,n]: a group by its mean, sum or maximum; one row a layer by the sum over all query heads."""
    if heads == "query":
        return scores
    if heads == "layer":
        return scores.sum(axis=0, keepdims=True)
    grouped = scores.reshape(kv_heads, len(scores) // kv_heads, scores.shape[1])
    return {"mean": grouped.mean, "sum": grouped.sum, "max": grouped.max}[agg](axis=1)


def pool(scores: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    """Along the last axis, same length: maximum over what exists; average with zeros beyond the ends; or nothing."""
    if kind == "none" or scores.shape[-1] == 0:
        return scores
    reach = kernel // 2
    edge = -np.inf if kind == "max" else 0.0
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(reach, reach)], constant_values=edge)
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return neighbours.max(axis=-1) if kind == "max" else neighbours.sum(axis=-1) / kernel


# -------------------------------------------------------------------------------------------------------- observables


def logits(trace: Trace, layer: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """z [Hq,E,T] of the given query positions [E], and which keys each of them sees [E,T]."""
    stored = trace.layers[layer]
    rows = np.searchsorted(stored.q_positions, queries)
    if (rows >= len(stored.q_positions)).any() or (stored.q_positions[rows] != queries).any():
        raise MissingQueries(f"{trace.name}: layer {layer} does not store all of the queries needed")
    keys = np.repeat(stored.k, trace.query_heads // trace.kv_heads, axis=0)
    z = trace.scale * (stored.q[:, rows] @ keys.transpose(0, 2, 1))
    if trace.softcap:
        z = trace.softcap * np.tanh(z / trace.softcap)
    position = np.arange(trace.tokens)
    visible = position <= queries[:, None]
    if stored.window:
        visible &= position > queries[:, None] - stored.window
    return z, visible


def softmax(z: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Over the last axis where `mask` holds, 0 elsewhere."""
    z = np.where(mask, z, -np.inf)
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(trace: Trace, layer: int, queries: np.ndarray) -> np.ndarray:
    """a [Hq,E,T]."""
    return softmax(*logits(trace, layer, queries))


@functools.cache
def window_attention(trace: Trace, layer: int, window: int) -> np.ndarray:
    """[Hq,P]: attention sums of the last `window` prompt queries, at most all."""
    queries = np.arange(max(0, trace.prompt - window), trace.prompt)
    return attention(trace, layer, queries)[:, :, : trace.prompt].sum(axis=1)


@functools.cache
def cumulative_attention(trace: Trace, layer: int) -> np.ndarray:
    """[Hq,P]: attention sums of all prompt queries."""
    return window_attention(trace, layer, trace.prompt)


@functools.cache
def eval_queries(trace: Trace, choice: str) -> tuple[int, ...]:
    """Positions of the queries at which metrics are taken."""
    kind, _, value = choice.partition(":")
    prompt, tokens = trace.prompt, trace.tokens
    if kind == "continuation":
        queries = range(prompt, tokens)
    elif kind == "last":
        queries = range(prompt - int(value), prompt)
    elif kind == "span":
        queries = range(*trace.spans[value])
    elif kind == "all":
        queries = range(tokens)
    elif kind == "stride":
        queries = range(0, tokens, int(value))
    else:
        raise ValueError(choice)
    if not queries:
        raise ValueError(f"{trace.name}: no eval queries in {choice}")
    return tuple(queries)


@functools.cache
def eval_attention(trace: Trace, layer: int, choice: str) -> np.ndarray:
    """[Hq,P]: attention sums of the eval queries, a query's attention to itself left out."""
    queries = np.array(eval_queries(trace, choice))
    weights = attention(trace, layer, queries)
    weights[:, np.arange(len(queries)), queries] = 0
    return weights[:, :, : trace.prompt].sum(axis=1)


def norms(vectors: np.ndarray, order: float) -> np.ndarray:
    """[H,n,d] to [H,n]."""
    return np.linalg.norm(vectors, ord=order, axis=-1)


def token_cosines(vectors: np.ndarray) -> np.ndarray:
    """[n,n]: cosines between tokens, a token's vector being [Hkv,n,d] concatenated over heads; 0 for zero vectors."""
    joined = vectors.transpose(1, 0, 2).reshape(vectors.shape[1], -1)
    lengths = np.linalg.norm(joined, axis=1, keepdims=True)
    unit = np.divide(joined, lengths, out=np.zeros_like(joined), where=lengths > 0)
    return unit @ unit.T


def token_similarity(vectors: np.ndarray) -> np.ndarray:
    """[n,n] int64: cosines in units of 2^-30, rounded to even."""
    return np.rint(2.0**30 * token_cosines(vectors)).astype(np.int64)


# ----------------------------------------------------------------------------------------------------------- policies

PRESETS = {
    "factory": {"window": "8", "kernel": "7", "pool": "max"},
    "snapkv-paper": {"window": "32", "kernel": "7", "pool": "max"},
    "snapkv-code": {"window": "32", "kernel": "5", "pool": "avg"},
    "kvpress": {"window": "64", "kernel": "5", "pool": "avg"},
}
H2O_PRESETS = {"sca": {"recent": "0.25"}, "factory": {"recent": "8"}}
DEFAULTS: dict[str, dict[str, str]] = {
    "full": {},
    "random": {"seed": "0", "sinks": "0", "window": "0", "heads": "kv"},
    "local": {},
    "streaming-llm": {"sinks": "4", "positions": "original", "rolling": "false"},
    "h2o": {"recent": "0.5", "heads": "kv", "agg": "mean", "overlap": "false"},
    "snapkv": PRESETS["factory"] | {"heads": "kv", "agg": "mean", "pool_order": "group-first"},
    "chunkkv": {
        "chunk": "10",
        "window": "8",
        "heads": "layer",
        "fill": "cut",
        "chunk_score": "sum",
        "window_mode": "reserve",
        "reuse": "1",
    },
    "oracle": {"heads": "kv", "scope": "head", "counts": "none"},
}


@dataclass(frozen=True)
class Policy:
    """A policy by name with all its parameters as the command line spells them."""

    name: str
    given: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        """Every parameter: the defaults, over them the preset, over it what was given."""
        given = dict(self.given)
        preset = given.pop("preset", None)
        chosen = {}
        if preset is not None:
            chosen = H2O_PRESETS[preset] if self.name == "h2o" else PRESETS[preset]
        defaults = DEFAULTS[self.name]
        chosen = {key: value for key, value in chosen.items() if key in defaults}
        return defaults | chosen | given

    @classmethod
    def parse(cls, text: str) -> Policy:
        """name[:key=value{,key=value}]; commas inside parentheses do not separate."""
        name, _, rest = text.partition(":")
        pieces, depth = [""], 0
        for character in rest:
            depth += (character == "(") - (character == ")")
            if character == "," and depth == 0:
                pieces.append("")
            else:
                pieces[-1] += character
        given = tuple(tuple(piece.split("=", 1)) for piece in pieces if piece)
        return cls(name, given)  # type: ignore[arg-type]


@dataclass
class Decision:
    """One choice that a policy makes at once, over one or several rows of the selection, and how it may differ."""

    places: list[tuple[int, int]]  # (treated layer, row)
    agrees: Callable[[list[np.ndarray]], bool]


@dataclass
class Selection:
    """Kept positions `rows[treated layer][row]`, ascending; what was protected; how another result may differ."""

    heads: str
    rows: list[list[np.ndarray]]
    protected: np.ndarray
    source: list[int]  # treated layer whose selection a treated layer uses
    decisions: list[Decision]


def sets_agree(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray, cut: float) -> bool:
    """Whether two sets of equally many positions differ only where the score is as good as the one at the cut.

    `scores` [n] is indexed by position. Exactly equal scores are no excuse: of these the lower positions must be kept.
    """
    if len(ours) != len(theirs):
        return False
    different = np.setxor1d(ours, theirs)
    if not (np.abs(scores[different] - cut) <= TOLERANCE * abs(cut)).all():
        return False
    for value in np.unique(scores[different]):
        kept = np.isin(np.flatnonzero(scores == value), theirs)
        if (np.diff(kept.astype(int)) > 0).any():
            return False
    return True


def exactly(place: tuple[int, int], ours: np.ndarray) -> Decision:
    """No other set will do."""
    return Decision([place], lambda theirs: np.array_equal(ours, theirs[0]))


def ranked(places: list[tuple[int, int]], scores: np.ndarray, count: int, fixed: np.ndarray) -> tuple[list, Decision]:
    """The `count` best of the flat order of `scores` [len(places), P], finite for candidates only, beside `fixed`."""
    width = scores.shape[1]
    flat = scores.ravel()
    kept = top(flat, count, np.flatnonzero(np.isfinite(flat)))
    cut = flat[kept].min() if len(kept) else np.nan
    rows = [np.union1d(fixed, kept[kept // width == row] % width) for row in range(len(places))]

    def agrees(theirs: list[np.ndarray]) -> bool:
        if not all(np.isin(fixed, row).all() for row in theirs):
            return False
        chosen = [np.setdiff1d(row, fixed, assume_unique=True) + width * index for index, row in enumerate(theirs)]
        return sets_agree(kept, np.concatenate(chosen), flat, cut)

    return rows, Decision(places, agrees)


def only(scores: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Scores [..., P] with everything but the candidates at minus infinity."""
    masked = np.full(scores.shape, -np.inf)
    masked[..., candidates] = scores[..., candidates]
    return masked


def row_count(trace: Trace, heads: str) -> int:
    """H."""
    return {"kv": trace.kv_heads, "query": trace.query_heads, "layer": 1}[heads]


def tokens_of(value: str, budget: int) -> int:
    """A number of tokens; with a point or % a share of the budget, rounded down."""
    if value.endswith("%"):
        return int(Fraction(value[:-1]) / 100 * budget)
    return int(Fraction(value) * budget) if "." in value else int(value)


@functools.cache
def select(trace: Trace, policy: Policy, literal: str, choice: str = "continuation") -> Selection:
    """The selection of a policy at a budget; `choice` names the eval queries, which only oracles read."""
    prompt = trace.prompt
    budget = budget_tokens(literal, prompt)
    parameters = policy.parameters
    heads = parameters.get("heads", "kv")
    if parameters.get("counts", "none") != "none":
        heads = Policy.parse(parameters["counts"].removeprefix("(").removesuffix(")")).parameters.get("heads", "kv")
    if policy.name == "full" or budget >= prompt:
        return everything(trace, policy, heads)
    return POLICIES[policy.name](trace, budget, literal, choice, parameters)


def everything(trace: Trace, policy: Policy, heads: str) -> Selection:
    """All positions; what the policy would have protected at B = P counts as protected."""
    parameters, prompt = policy.parameters, trace.prompt
    sinks, window = 0, 0
    if policy.name == "local":
        window = prompt
    elif policy.name == "streaming-llm":
        sinks, window = int(parameters["sinks"]), prompt
    elif policy.name == "h2o":
        window = tokens_of(parameters["recent"], prompt)
    else:
        sinks, window = int(parameters.get("sinks", 0)), int(parameters.get("window", 0))
    every = np.arange(prompt)
    return uniform(trace, heads, lambda layer, row: every, protection(sinks, window, prompt, prompt))


def uniform(trace: Trace, heads: str, kept: Callable[[int, int], np.ndarray], protected: np.ndarray) -> Selection:
    """A set per stored layer and row that nothing near a cut can change."""
    rows = [[kept(layer, row) for row in range(row_count(trace, heads))] for layer in trace.treated]
    decisions = [exactly((index, row), one) for index, layer in enumerate(rows) for row, one in enumerate(layer)]
    return Selection(heads, rows, protected, list(range(len(rows))), decisions)


def random(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The candidates with the smallest hashes of (seed, stored layer, head, position)."""
    fixed = protection(int(parameters["sinks"]), int(parameters["window"]), budget, trace.prompt)
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)

    def kept(layer: int, row: int) -> np.ndarray:
        hashes = chain(int(parameters["seed"]), layer, row, candidates)
        order = np.argsort(hashes, kind="stable")[: budget - len(fixed)]
        return np.union1d(fixed, candidates[order])

    return uniform(trace, parameters["heads"], kept, fixed)


def local(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The last B tokens."""
    kept = protection(0, budget, budget, trace.prompt)
    return uniform(trace, "kv", lambda layer, row: kept, kept)


def streaming_llm(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The first s tokens and the last B-s."""
    if (parameters["positions"], parameters["rolling"]) != ("original", "false"):
        raise NotImplementedError("moved positions and rolling sets")
    kept = protection(int(parameters["sinks"]), budget, budget, trace.prompt)
    return uniform(trace, "kv", lambda layer, row: kept, kept)


def h2o(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The last r tokens and the B-r of the greatest attention from all prompt queries."""
    heads, prompt = parameters["heads"], trace.prompt
    recent = min(tokens_of(parameters["recent"], budget), budget)
    fixed = np.arange(prompt - recent, prompt)
    overlap = parameters["overlap"] == "true"
    candidates = np.arange(prompt if overlap else prompt - recent)
    rows, decisions = [], []
    for index, layer in enumerate(trace.treated):
        scores = aggregate(cumulative_attention(trace, layer), heads, parameters["agg"], trace.kv_heads)
        rows.append([])
        for row in range(len(scores)):
            masked = only(scores[row], candidates)
            if overlap:
                kept, decision = overlapping((index, row), masked, budget - recent, fixed)
            else:
                [kept], decision = ranked([(index, row)], masked[None], budget - recent, fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return Selection(heads, rows, fixed, list(range(len(rows))), decisions)


def overlapping(
    place: tuple[int, int], scores: np.ndarray, count: int, recent: np.ndarray
) -> tuple[np.ndarray, Decision]:
    """The best tokens anywhere, united with the recent ones: the number kept depends on how many are both."""
    heavy = top(scores, count, np.arange(len(scores)))
    cut = scores[heavy].min() if len(heavy) else np.nan
    ours = np.union1d(heavy, recent)

    def agrees(theirs: list[np.ndarray]) -> bool:
        if not np.isin(recent, theirs[0]).all():
            return False
        different = np.setxor1d(ours, theirs[0])
        return bool((np.abs(scores[different] - cut) <= TOLERANCE * abs(cut)).all())

    return ours, Decision([place], agrees)


def snapkv(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The window, and the tokens that its queries attend to, pooled over neighbours."""
    heads, agg, prompt = parameters["heads"], parameters["agg"], trace.prompt
    window = min(int(parameters["window"]), prompt)
    kernel, kind = int(parameters["kernel"]), parameters["pool"]
    fixed = protection(0, window, budget, prompt)
    rows, decisions = [], []
    for index, layer in enumerate(trace.treated):
        observed = window_attention(trace, layer, window)[:, : prompt - window]
        if parameters["pool_order"] == "group-first":
            scores = pool(aggregate(observed, heads, agg, trace.kv_heads), kernel, kind)
        else:
            scores = aggregate(pool(observed, kernel, kind), heads, agg, trace.kv_heads)
        scores = np.pad(scores, ((0, 0), (0, window)), constant_values=-np.inf)
        rows.append([])
        for row in range(len(scores)):
            [kept], decision = ranked([(index, row)], scores[row][None], budget - len(fixed), fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return Selection(heads, rows, fixed, list(range(len(rows))), decisions)


def chunkkv(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The window, and the chunks that its queries attend to; layers may take over an earlier layer's sets."""
    heads, prompt = parameters["heads"], trace.prompt
    window, size = min(int(parameters["window"]), prompt), int(parameters["chunk"])
    fixed = protection(0, window, budget, prompt)
    reuse = int(parameters["reuse"])
    source = [layer // reuse * reuse for layer in range(len(trace.treated))]
    rows: list[list[np.ndarray]] = []
    decisions = []
    for index, layer in enumerate(trace.treated):
        if source[index] != index:
            rows.append(rows[source[index]])
            continue
        scores = aggregate(window_attention(trace, layer, window), heads, "mean", trace.kv_heads)
        rows.append([])
        for row in range(len(scores)):
            choices = list(chunk_selections(scores[row], budget, window, size, parameters))
            rows[-1].append(np.union1d(choices[0], fixed))
            decisions.append(Decision([(index, row)], one_of([np.union1d(kept, fixed) for kept in choices])))
    return Selection(heads, rows, fixed, source, decisions)


def one_of(choices: list[np.ndarray]) -> Callable[[list[np.ndarray]], bool]:
    """Agreement with any of the sets."""
    return lambda theirs: any(np.array_equal(choice, theirs[0]) for choice in choices)


def chunk_selections(
    x: np.ndarray, budget: int, window: int, size: int, parameters: dict[str, str]
) -> Iterator[np.ndarray]:
    """Positions that the best chunks of the columns x [P] bring; first by the exact order, then by all near ones."""
    prompt = len(x)
    slots = max(0, budget - window)
    replace = parameters["window_mode"] == "replace"
    scored = prompt if replace else prompt - window
    chunks = [np.arange(begin, min(begin + size, scored)) for begin in range(0, scored, size)]
    total = np.mean if parameters["chunk_score"] == "mean" else np.sum
    scores = np.array([total(x[chunk]) for chunk in chunks])
    fill = parameters["fill"]

    if replace:
        for order in near_orders(scores, budget // size):
            taken = sorted(position for chunk in order[: budget // size] for position in chunks[chunk])
            yield np.array(taken[:slots], dtype=int)
        return
    if fill == "cut":
        for order in near_orders(scores, slots // size + 1):
            yield np.array([position for chunk in order for position in chunks[chunk]][:slots], dtype=int)
        return
    for order in near_orders(scores, slots // size):
        taken = np.array([position for chunk in order[: slots // size] for position in chunks[chunk]], dtype=int)
        if fill == "tokens":
            others = np.setdiff1d(np.arange(scored), taken)
            taken = np.concatenate([taken, top(x, slots - len(taken), others)])
        yield taken


def near_orders(scores: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """The ranking; then those in which different scores as good as the last one taken change places or become equal.

    A short chunk taken early leaves room for one more, so the last one taken is the `count`-th or the one behind it.
    """
    order = rank(scores)
    yield order
    if count <= 0:
        return
    for last in order[count - 1 : count + 1]:
        near = np.abs(scores - scores[last]) <= TOLERANCE * abs(scores[last])
        classes = [np.flatnonzero(scores == value) for value in np.unique(scores[near])]
        if len(classes) == 1:
            continue
        above, below = order[(scores > scores[last])[order]], order[(scores < scores[last])[order]]
        above, below = above[~near[above]], below[~near[below]]
        for permuted in itertools.islice(itertools.permutations(classes), 120):
            yield np.concatenate([above, *permuted, below])
        yield np.concatenate([above, np.flatnonzero(near), below])


def oracle(trace: Trace, budget: int, literal: str, choice: str, parameters: dict[str, str]) -> Selection:
    """The tokens of the greatest attention from the eval queries: a row, a layer or the whole cache ranked together."""
    heads = parameters["heads"]
    counts = None
    if parameters["counts"] != "none":
        counted = Policy.parse(parameters["counts"].removeprefix("(").removesuffix(")"))
        chosen = select(trace, counted, literal, choice)
        heads = chosen.heads
        counts = [[len(row) for row in layer] for layer in chosen.rows]
    scores = [aggregate(eval_attention(trace, layer, choice), heads, "mean", trace.kv_heads) for layer in trace.treated]
    n_layers, n_rows = len(scores), row_count(trace, heads)
    places = [(layer, row) for layer in range(n_layers) for row in range(n_rows)]
    if parameters["scope"] == "head":
        groups = [[place] for place in places]
    elif parameters["scope"] == "layer":
        groups = [[(layer, row) for row in range(n_rows)] for layer in range(n_layers)]
    else:
        groups = [places]
    nothing = np.array([], dtype=int)
    rows: list[list[np.ndarray]] = [[nothing] * n_rows for _ in range(n_layers)]
    decisions = []
    for group in groups:
        count = sum(counts[layer][row] for layer, row in group) if counts else budget * len(group)
        kept, decision = ranked(group, np.stack([scores[layer][row] for layer, row in group]), count, nothing)
        for (layer, row), positions in zip(group, kept, strict=True):
            rows[layer][row] = positions
        decisions.append(decision)
    return Selection(heads, rows, nothing, list(range(n_layers)), decisions)


POLICIES = {
    "random": random,
    "local": local,
    "streaming-llm": streaming_llm,
    "h2o": h2o,
    "snapkv": snapkv,
    "chunkkv": chunkkv,
    "oracle": oracle,
}


# ------------------------------------------------------------------------------------------------------------ metrics


@dataclass
class Values:
    """One metric and variant: by treated layer and head [L,H], by treated layer [L], over all; None: not defined."""

    heads: np.ndarray | None
    layers: np.ndarray | None
    all: float | None


def averaged(heads: np.ndarray) -> Values:
    """Equal weight for the heads of a layer, and for the layers."""
    layers = heads.mean(axis=1)
    return Values(heads, layers, float(layers.mean()))


def cosine(a: np.ndarray, b: np.ndarray, both_zero: float = 0.0) -> np.ndarray:
    """Along the last axis; 0 where one is zero, `both_zero` where both are."""
    norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    product = norm_a * norm_b
    result = np.divide((a * b).sum(axis=-1), product, out=np.zeros_like(product), where=product > 0)
    return np.where((norm_a == 0) & (norm_b == 0), both_zero, result)


def ratio(part: np.ndarray, whole: np.ndarray, undefined: float) -> np.ndarray:
    """part / whole, `undefined` for 0/0."""
    return np.divide(part, whole, out=np.full_like(whole, undefined), where=whole > 0)


def kept_by_query_head(trace: Trace, selection: Selection, layer: int) -> np.ndarray:
    """[Hq,P] bool of a treated layer."""
    kept = np.zeros((len(selection.rows[layer]), trace.prompt), bool)
    for row, positions in enumerate(selection.rows[layer]):
        kept[row, positions] = True
    return np.repeat(kept, trace.query_heads // len(kept), axis=0)


def residents(trace: Trace, selection: Selection, layer: int, queries: np.ndarray) -> np.ndarray:
    """[Hq,E,T] bool: the kept prompt tokens up to the query, the continuation up to it, and the query itself."""
    position = np.arange(trace.tokens)
    kept = np.ones((trace.query_heads, trace.tokens), bool)
    kept[:, : trace.prompt] = kept_by_query_head(trace, selection, layer)
    return (kept[:, None, :] & (position <= queries[:, None])) | (position == queries[:, None])


def attention_metrics(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """Recall, cosine, L1 and outputs by treated layer and query head, mean over the eval queries."""
    queries = np.array(eval_queries(trace, choice))
    prompt = slice(0, trace.prompt)
    nosink = slice(4, max(4, trace.prompt))
    sums: dict[tuple[str, str], list[np.ndarray]] = {}
    for index, layer in enumerate(trace.treated):
        z, visible = logits(trace, layer, queries)
        kept = residents(trace, selection, index, queries)
        a, b = softmax(z, visible), softmax(z, kept)
        kept_a, kept_z = np.where(kept, a, 0), np.where(kept, z, 0)
        z = np.where(visible, z, 0)
        values = np.repeat(trace.layers[layer].v, trace.query_heads // trace.kv_heads, axis=0)
        output, changed = a @ values, b @ values
        first = np.argsort(~kept[..., prompt], axis=-1, kind="stable")  # kept entries move to the front, in order
        unaligned = np.take_along_axis(kept_a[..., prompt], first, axis=-1)
        by_query = {
            ("attention_recall", ""): kept_a.sum(-1),
            ("attention_recall", "prompt"): ratio(kept_a[..., prompt].sum(-1), a[..., prompt].sum(-1), 1),
            ("attention_recall", "nosink"): ratio(kept_a[..., nosink].sum(-1), a[..., nosink].sum(-1), 1),
            ("attention_cosine", ""): cosine(a, b),
            ("attention_cosine", "prompt"): cosine(a[..., prompt], b[..., prompt]),
            ("attention_cosine", "nosink"): cosine(a[..., nosink], b[..., nosink]),
            ("attention_cosine", "logits"): cosine(z[..., prompt], kept_z[..., prompt]),
            ("attention_cosine", "unaligned"): cosine(a[..., prompt], unaligned),
            ("attention_l1", ""): np.abs(a - b).sum(-1),
            ("output_cosine", ""): cosine(output, changed, both_zero=1),
            ("output_error", ""): ratio(np.linalg.norm(output - changed, axis=-1), np.linalg.norm(output, axis=-1), 0),
        }
        for key, value in by_query.items():
            sums.setdefault(key, []).append(value.mean(axis=1))
    return {key: averaged(np.stack(value)) for key, value in sums.items()}


def cosine_of_all_rows(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """The attention cosine with every token of the trace as eval query."""
    return {("attention_cosine", "rows"): attention_metrics(trace, selection, "all")[("attention_cosine", "")]}


def kv_l1_loss(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Evicted share of the L1 norms of keys and values, a ratio of sums over the heads of a layer."""
    prompt = trace.prompt
    parts = {"": ("k", "v"), "key": ("k",), "value": ("v",)}
    results: dict[str, tuple[list, list]] = {}
    for index, layer in enumerate(trace.treated):
        evicted = ~kept_by_query_head(trace, selection, index)
        group = trace.query_heads // trace.kv_heads
        if selection.heads != "query":  # a row a KV head; one set for the layer holds for all of them
            evicted, group = evicted[::group], 1
        sizes = {
            name: np.repeat(norms(getattr(trace.layers[layer], name)[:, :prompt], 1), group, axis=0)
            for name in ("k", "v")
        }
        for variant, names in parts.items():
            size = sum(sizes[name] for name in names)
            lost = np.where(evicted, size, 0)
            add_row(results, variant, selection, lost.sum(axis=1), size.sum(axis=1))
        numbers = np.full(len(evicted), 2.0 * prompt * trace.dimension)
        both = np.where(evicted, sizes["k"] + sizes["v"], 0)
        add_row(results, "absolute", selection, both.sum(axis=1), numbers)
        add_row(results, "token", selection, evicted.sum(axis=1), np.full(len(evicted), float(prompt)))
    return {
        ("kv_l1_loss", variant): Values(np.array(heads), np.array(layers), float(np.mean(layers)))
        for variant, (heads, layers) in results.items()
    }


def add_row(results: dict, variant: str, selection: Selection, lost: np.ndarray, size: np.ndarray) -> None:
    """Append one layer's ratios, by the policy's rows and over them: a ratio of sums each time."""
    heads, layers = results.setdefault(variant, ([], []))
    whole = ratio(lost.sum(keepdims=True), size.sum(keepdims=True), 0)
    layers.append(whole[0])
    heads.append(whole if selection.heads == "layer" else ratio(lost.astype(float), size, 0))


def jaccard_matrix(trace: Trace, selection: Selection, variant: str) -> np.ndarray:
    """[L,L] over treated layers: common share of row 0 (first), mean of the rows' own shares, or of the union of rows.

    With +protected as they are, otherwise without what the policy protects. Two empty sets: 1, one empty set: 0.
    """
    kind, _, protected = variant.partition("+")
    kept = np.zeros((len(selection.rows), len(selection.rows[0]), trace.prompt), bool)
    for layer, row in np.ndindex(kept.shape[:2]):
        kept[layer, row, selection.rows[layer][row]] = True
    if not protected:
        kept[:, :, selection.protected] = False
    if kind == "first":
        kept = kept[:, :1]
    elif kind == "union":
        kept = kept.any(axis=1, keepdims=True)
    both = (kept[:, None] & kept[None]).sum(axis=-1).astype(float)
    either = (kept[:, None] | kept[None]).sum(axis=-1).astype(float)
    return ratio(both, either, 1).mean(axis=-1)


def jaccard_adjacent(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Mean over neighbouring treated layers."""
    results = {}
    for variant in [kind + suffix for kind in ("first", "mean", "union") for suffix in ("", "+protected")]:
        pairs = np.diagonal(jaccard_matrix(trace, selection, variant), offset=1)
        results["jaccard_adjacent", variant] = Values(None, None, float(pairs.mean()) if len(pairs) else None)
    return results


@functools.cache
def redundancy(trace: Trace, tensor: str) -> np.ndarray:
    """[L,P]: each prompt token's greatest cosine with another one, in either direction of time; 0 for a lone token."""
    result = np.zeros((len(trace.treated), trace.prompt))
    if trace.prompt > 1:
        for index, layer in enumerate(trace.treated):
            cosines = token_cosines(getattr(trace.layers[layer], tensor)[:, : trace.prompt])
            np.fill_diagonal(cosines, -np.inf)
            result[index] = cosines.max(axis=1)
    return result


def counts(selection: Selection) -> np.ndarray:
    """[L,H] kept tokens."""
    return np.array([[len(row) for row in layer] for layer in selection.rows], float)


def layer_budget(selection: Selection) -> dict[tuple[str, str], Values]:
    """Kept tokens, with and without what is protected."""
    free = [[len(np.setdiff1d(row, selection.protected)) for row in layer] for layer in selection.rows]
    return {
        ("layer_budget", ""): averaged(counts(selection)),
        ("layer_budget", "unprotected"): averaged(np.array(free, float)),
    }


def span_recall(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Of each span inside the prompt: the share kept by any head, the heads' mean share, whether one head keeps all."""
    results = {}
    for name, (begin, end) in trace.spans.items():
        if end > trace.prompt:
            continue
        span = np.arange(begin, end)
        kept = np.array([[np.isin(span, row) for row in layer] for layer in selection.rows])  # [L,H,tokens]
        shares = {
            "any": kept.any(axis=1).mean(axis=1),
            "mean": kept.mean(axis=(1, 2)),
            "full": kept.all(axis=2).any(axis=1).astype(float),
        }
        for kind, layers in shares.items():
            results["span_recall", f"{name}.{kind}"] = Values(None, layers, float(layers.mean()))
    return results


def kv_bytes(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Bytes of the kept keys and values of the treated layers, summed; for query rows also with shared ones once."""
    one = 2 * trace.dimension * trace.number_bytes
    rows = counts(selection).sum(axis=1)
    if selection.heads == "layer":
        rows = rows * trace.kv_heads
    shared = rows
    if selection.heads == "query":
        group = trace.query_heads // trace.kv_heads
        shared = np.array(
            [
                sum(
                    len(functools.reduce(np.union1d, layer[first : first + group]))
                    for first in range(0, trace.query_heads, group)
                )
                for layer in selection.rows
            ]
        )
    return {
        ("kv_bytes", variant): Values(None, one * tokens, float(one * tokens.sum()))
        for variant, tokens in (("", rows), ("union", shared))
    }


def sizes(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """Compression and the tokens that an eval query holds."""
    queries = np.array(eval_queries(trace, choice))
    held = np.array(
        [residents(trace, selection, index, queries).sum(axis=2).mean() for index in range(len(trace.treated))]
    )
    kept = counts(selection).mean(axis=1)
    compression = ratio(np.full(len(kept), float(trace.prompt)), kept, np.nan)
    return {
        ("compression", ""): Values(None, compression, float(trace.prompt / kept.mean())),
        ("held_tokens", ""): Values(None, held, float(held.mean())),
    }


def measure(trace: Trace, selection: Selection, choice: str, rows: bool = False) -> dict[tuple[str, str], Values]:
    """Every metric and variant of a selection; `rows` adds the cosine over all queries."""
    return {
        **attention_metrics(trace, selection, choice),
        **(cosine_of_all_rows(trace, selection) if rows else {}),
        **kv_l1_loss(trace, selection),
        **jaccard_adjacent(trace, selection),
        **layer_budget(selection),
        **span_recall(trace, selection),
        **kv_bytes(trace, selection),
        **sizes(trace, selection, choice),
    }
