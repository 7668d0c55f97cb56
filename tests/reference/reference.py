"""The simulator once more: plain float64 numpy, written from the rules alone. Here traces, conventions, observables.

Nothing is fast or clever: the n x n attention of a layer is built and reduced. Shapes use L layers, Hq query heads,
Hkv key/value heads, H rows of a policy's granularity, d components a head, P prompt tokens, T tokens in all, E eval
queries. "Treated" layers are those without a sliding window; selections, metrics and matrices count only these.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import h5py
import numpy as np


class MissingQueries(Exception):
    """The trace does not store the queries that a policy or metric reads."""


# ---------------------------------------------------------------------------------------------------------- the trace


@dataclass(repr=False)
class Layer:
    """q [Hq,Tq,d] for the ascending q_positions [Tq]; k, v [Hkv,T,d]; window W (0: none); number: the model's own.

    inv_freq [r]: radians a position by which RoPE turns each of the first r pairs of components; None: no RoPE.
    attention_scaling: what RoPE multiplies queries and keys by; wo [hidden,Hq*d]: the output projection, if stored, and
    input_norm [T]: norms of the hidden states at the layer's input. q_passes [Hq,R,d] and k_passes [Hkv,R,d]: of the
    passes that repeat the prompt.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_positions: np.ndarray
    window: int
    number: int
    inv_freq: np.ndarray | None = None
    attention_scaling: float = 1.0
    wo: np.ndarray | None = None
    input_norm: np.ndarray | None = None
    q_passes: np.ndarray | None = None
    k_passes: np.ndarray | None = None


@dataclass(eq=False, repr=False)
class Trace:
    """One trace in float64. `number_bytes` is the size of a stored number.

    `spans` maps a name to [begin, end), `kinds` to what it is; `interleaved`: RoPE turns components 2i and 2i+1
    together, otherwise i and i+r. `passes`: of each pass behind the prompt its end in q_passes, and [first, end) of the
    prompt tokens that its last tokens repeat.
    """

    name: str
    layers: list[Layer]
    prompt: int
    scale: float
    softcap: float
    number_bytes: int
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    passes: list[tuple[int, int, int]] = field(default_factory=list)

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
    def has_projections(self) -> bool:
        """Whether outputs can be held against the residual stream."""
        return all(layer.wo is not None and layer.input_norm is not None for layer in self.layers)

    @property
    def treated(self) -> list[int]:
        """Stored layers without a sliding window."""
        return [index for index, layer in enumerate(self.layers) if layer.window == 0]

    @property
    def question_tokens(self) -> int:
        """Prompt tokens from the begin of the last question on, 0 without one or if more than 16 tokens follow it."""
        return self.from_question[0]

    @property
    def tokens_behind_question(self) -> int:
        """Prompt tokens behind that question, as of a chat template; 0 without one."""
        return self.from_question[1]

    @property
    def from_question(self) -> tuple[int, int]:
        """Prompt tokens from the begin of the last question on, and from its end on."""
        questions = [
            (end, begin)
            for name, (begin, end) in self.spans.items()
            if self.kinds.get(name) == "question" and end <= self.prompt
        ]
        if not questions:
            return 0, 0
        end, begin = max(questions)
        return (self.prompt - begin, self.prompt - end) if self.prompt - end <= 16 else (0, 0)


def read_trace(path: Path) -> Trace:
    """The trace in a file; every stored number, whatever its type, passes exactly through float32 into float64."""

    def numbers(dataset: h5py.Dataset) -> np.ndarray:
        values = np.empty(dataset.shape, np.float32)
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, h5py.h5t.NATIVE_FLOAT)
        return values.astype(np.float64)

    with h5py.File(path, "r") as file:
        model, tokens = file["model"], file["tokens"]
        rope = model.get("rope")
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
                    inv_freq=rope["inv_freq"][index] if rope else None,
                    attention_scaling=float(rope["attention_scaling"][index]) if rope else 1.0,
                    wo=numbers(group["wo"]) if "wo" in group else None,
                    input_norm=numbers(group["input_norm"]) if "input_norm" in group else None,
                    q_passes=numbers(group["q_reconstruction"]) if "q_reconstruction" in group else None,
                    k_passes=numbers(group["k_reconstruction"]) if "k_reconstruction" in group else None,
                )
            )
        spans, kinds = {}, {}
        if "spans" in file:
            for span in file["spans"][:]:
                name = span["name"].decode()
                spans[name] = (int(span["begin"]), int(span["end"]))
                kinds[name] = span["kind"].decode()
        return Trace(
            name=path.stem,
            layers=layers,
            prompt=int(tokens.attrs["prefill"]),
            scale=float(model.attrs["softmax_scale"]),
            softcap=float(model.attrs["logit_softcap"]),
            number_bytes=file["layers/000/k"].id.get_type().get_size(),
            spans=spans,
            kinds=kinds,
            interleaved=rope is not None and rope.attrs["style"] == b"interleaved",
            passes=[tuple(map(int, one)) for one in file["reconstruction/passes"]] if "reconstruction" in file else [],
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
            inv_freq=np.array([1.0, 0.1]),
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
    """A literal with a point or % is a share of the prompt, rounded half up and at least 1; an integer is a count.

    A share `@seen` is one of the tokens seen so far, at the end of the prompt of all of it.
    """
    literal = literal.removesuffix("@seen")
    if literal.endswith("%"):
        share = Fraction(literal[:-1]) / 100
    elif "." in literal:
        share = Fraction(literal)
    else:
        return int(literal)
    return max(1, int(share * prompt + Fraction(1, 2)))


def protection(sinks: int, window: int, budget: int, prompt: int) -> np.ndarray:
    """The first min(s,B) and the last min(w, B-s') of the prompt, ascending; no more than it has."""
    budget = min(budget, prompt)
    sinks = min(sinks, budget)
    window = min(window, budget - sinks)
    return np.union1d(np.arange(sinks), np.arange(prompt - window, prompt))


def apportion(total: int, weights: list, low: list[int], high: list[int]) -> list[int]:
    """Integers that sum to min(total, sum(high)), in proportion to `weights`, each within its bounds; exact.

    Weights may be integers, fractions, or floats, which stand for the binary fraction that they are.
    """
    weights = [Fraction(weight) for weight in weights]
    total = min(total, sum(high))
    if total < sum(low):
        raise ValueError("the total is below the sum of the lower bounds")
    shares = [Fraction(0)] * len(weights)
    free = set(range(len(weights)))
    while free:
        rest = total - sum(shares[i] for i in range(len(weights)) if i not in free)
        weight = sum(weights[i] for i in free)
        for i in free:
            shares[i] = rest * (weights[i] / weight if weight else Fraction(1, len(free)))
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
    if kind == "max":
        return neighbours.max(axis=-1)
    return np.apply_along_axis(math.fsum, -1, neighbours) / kernel  # the same neighbours in any order have one sum


# -------------------------------------------------------------------------------------------------------- observables


def logits(trace: Trace, layer: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """z [Hq,E,T] of the given query positions [E], and which keys each of them sees [E,T]."""
    stored = trace.layers[layer]
    keys = np.repeat(stored.k, trace.query_heads // trace.kv_heads, axis=0)
    z = capped(trace, rows_of(trace, layer, queries) @ keys.transpose(0, 2, 1))
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
def window_attention(trace: Trace, layer: int, window: int, end: int | None = None) -> np.ndarray:
    """[Hq,P]: attention sums of the last `window` prompt queries, at most all; or of those before position `end`."""
    last = trace.prompt if end is None else end
    queries = np.arange(max(0, last - window), last)
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


def rotate(trace: Trace, layer: int, vectors: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Keys or queries [...,n,d] after RoPE, moved by `steps` [n] positions; what RoPE leaves alone stays."""
    frequencies = trace.layers[layer].inv_freq
    if frequencies is None:
        raise ValueError(f"{trace.name}: no RoPE to move positions by")
    pairs = len(frequencies)
    first = np.arange(0, 2 * pairs, 2) if trace.interleaved else np.arange(pairs)
    second = first + (1 if trace.interleaved else pairs)
    angles = np.asarray(steps, float)[:, None] * frequencies
    cosines, sines = np.cos(angles), np.sin(angles)
    moved = vectors.copy()
    moved[..., first] = vectors[..., first] * cosines - vectors[..., second] * sines
    moved[..., second] = vectors[..., first] * sines + vectors[..., second] * cosines
    return moved


def unrotated(trace: Trace, layer: int, vectors: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys or queries [...,n,d] as they were before RoPE put them at their positions [n]."""
    return rotate(trace, layer, vectors, -np.asarray(positions)) / trace.layers[layer].attention_scaling


def capped(trace: Trace, products: np.ndarray) -> np.ndarray:
    """z from products of queries and keys: scaled, and bent where the model caps its logits."""
    z = trace.scale * products
    return trace.softcap * np.tanh(z / trace.softcap) if trace.softcap else z


def rows_of(trace: Trace, layer: int, queries: np.ndarray) -> np.ndarray:
    """q [Hq,E,d] of the given positions."""
    stored = trace.layers[layer]
    rows = np.searchsorted(stored.q_positions, queries)
    if (rows >= len(stored.q_positions)).any() or (stored.q_positions[rows] != queries).any():
        raise MissingQueries(f"{trace.name}: layer {layer} does not store all of the queries needed")
    return stored.q[:, rows]
