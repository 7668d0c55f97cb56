"""Statistics of the prompt's queries and keys over traces of one model. L layers, Hq query heads, Hkv KV heads, d
components, P prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvreplay.errors import Error
from kvreplay.trace import Trace

MEAN_COPIES = 500  # positions of the mean key in duo_head_scores()


@dataclass
class Rope:
    """Rotary position embedding of one layer."""

    frequencies: np.ndarray  # [r] radians a position; empty: none
    scaling: float
    first: np.ndarray  # [r] components of the first numbers of the pairs
    second: np.ndarray

    @classmethod
    def of(cls, trace: Trace, layer: int) -> Rope:
        if "/model/rope@style" not in trace:
            return cls(np.zeros(0), 1.0, np.zeros(0, int), np.zeros(0, int))
        pairs = trace["/model/rope/pairs"][layer] if "/model/rope/pairs" in trace else None
        frequencies = trace["/model/rope/inv_freq"][layer][:pairs]
        numbers = np.arange(len(frequencies))
        offset = trace["/model/rope@offset"] if "/model/rope@offset" in trace else 0
        if trace["/model/rope@style"] == "interleaved":
            first, second = offset + 2 * numbers, offset + 2 * numbers + 1
        else:
            first, second = offset + numbers, offset + numbers + len(numbers)
        return cls(frequencies, float(trace["/model/rope/attention_scaling"][layer]), first, second)

    def turned(self, vectors: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Vectors [..., d] whose pairs are rotated by `angles` [..., r]."""
        result = vectors.copy()
        x, y = vectors[..., self.first], vectors[..., self.second]
        result[..., self.first] = x * np.cos(angles) - y * np.sin(angles)
        result[..., self.second] = x * np.sin(angles) + y * np.cos(angles)
        return result

    def before(self, vectors: np.ndarray) -> np.ndarray:
        """Stored vectors [H, n, d] of the positions 0 to n - 1 as they were before RoPE."""
        return self.turned(vectors, -np.arange(vectors.shape[1])[:, None] * self.frequencies) / self.scaling


def require_one_model(traces: Sequence[Trace]) -> None:
    """The traces have the same layers and heads, and all layers of a trace have the same heads."""
    first = traces[0]
    for trace in traces:
        for name in ("layers", "query_heads", "kv_heads", "head_dim"):
            expected, found = getattr(first, name), getattr(trace, name)
            if expected != found:
                raise Error(str(trace.path), name, f"{expected}, as in {first.path}", str(found))
        for path in ("/model/heads", "/model/head_dims", "/model/kv_source"):
            if path in trace:
                raise Error(f"{trace.path}:{path}", "not supported", "layers of the same shape", "a dataset")


def queries(trace: Trace, layer: int) -> np.ndarray:
    """float64 [Hq, P, d]: the prompt's queries as they are stored."""
    if len(trace.query_positions(layer)):
        path = f"{trace.path}:/layers/{layer:03d}/q"
        raise Error(path, "queries", "all queries of the prompt", "some")
    return trace.q(layer)[:, : trace.prompt].astype(np.float64)


def keys(trace: Trace, layer: int) -> np.ndarray:
    """float64 [Hkv, P, d]: the prompt's keys as they are stored."""
    return trace.k(layer)[:, : trace.prompt].astype(np.float64)


def grouped(of_query_heads: np.ndarray, kv_heads: int) -> np.ndarray:
    """[Hkv, ...]: means over the query heads of each KV head."""
    return of_query_heads.reshape(kv_heads, -1, *of_query_heads.shape[1:]).mean(1)


def query_moments(traces: Sequence[Trace], layer: int, sinks: int) -> tuple[np.ndarray, np.ndarray]:
    """[Hq, d] and [Hq, d, d]: mean and unbiased covariance, before RoPE, of the queries from position `sinks` on."""
    counts, means, scatters = [], [], []
    for trace in traces:
        if trace.prompt < sinks + 2:
            raise Error(str(trace.path), "prompt", f"at least {sinks + 2} tokens", str(trace.prompt))
        moved = Rope.of(trace, layer).before(queries(trace, layer))[:, sinks:]
        counts.append(moved.shape[1])
        means.append(moved.mean(1))
        centred = moved - means[-1][:, None]
        scatters.append(centred.transpose(0, 2, 1) @ centred)
    mean = np.average(means, 0, counts)
    for count, one in zip(counts, means, strict=True):
        scatters.append(count * np.einsum("hi,hj->hij", one - mean, one - mean))
    return mean, np.sum(scatters, 0) / (sum(counts) - 1)


def query_pairs(traces: Sequence[Trace], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """complex [Hq, r] and float [Hq, r]: mean, and mean modulus, of the pairs of the queries before RoPE."""
    means, moduli = [], []
    for trace in traces:
        rope = Rope.of(trace, layer)
        moved = rope.before(queries(trace, layer))
        pairs = moved[..., rope.first] + 1j * moved[..., rope.second]
        means.append(pairs.mean(1))
        moduli.append(np.abs(pairs).mean(1))
    counts = [trace.prompt for trace in traces]
    return np.average(means, 0, counts), np.average(moduli, 0, counts)


def query_directions(traces: Sequence[Trace], layer: int) -> np.ndarray:
    """[Hkv, d]: for each query head the first right singular vector of the stored queries, with the sign that gives
    their mean a positive projection; then the mean over the heads of a group (Q-Filters, arXiv:2503.02812)."""
    gram, total = np.zeros(()), np.zeros(())
    for trace in traces:
        stored = queries(trace, layer)
        gram, total = gram + stored.transpose(0, 2, 1) @ stored, total + stored.sum(1)
    first = np.linalg.eigh(gram)[1][..., -1]
    signs = np.where(np.einsum("hd,hd->h", total, first) < 0, -1.0, 1.0)
    return grouped(first * signs[:, None], traces[0].kv_heads)


def duo_head_scores(traces: Sequence[Trace], layer: int) -> np.ndarray:
    """[Hkv]: area under the cumulative attention of the mean query to copies of the mean key, as kvpress computes head
    scores on the fly (kvpress 0.5.5, duo_attention_press.py, duo_attention_on_the_fly); mean over traces."""
    scores = []
    for trace in traces:
        rope = Rope.of(trace, layer)
        query = rope.before(queries(trace, layer)).mean(1)
        key = np.repeat(rope.before(keys(trace, layer)).mean(1), len(query) // trace.kv_heads, 0)
        distances = np.arange(MEAN_COPIES) - (MEAN_COPIES - 1)
        copies = rope.turned(np.repeat(key[:, None], MEAN_COPIES, 1), distances[:, None] * rope.frequencies)
        logits = float(trace["/model@softmax_scale"]) * rope.scaling**2 * np.einsum("hd,hnd->hn", query, copies)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        scores.append(grouped(weights.cumsum(1).mean(1), trace.kv_heads))
    return np.mean(scores, 0)


def retrieval_scores(trace: Trace, layer: int) -> np.ndarray:
    """[Hq]: HeadKV's importance of a head (FYYFU/HeadKV, retrieval_head_detection_r2.py, commit 75016c0): of the n
    tokens that a step of the answer attends to most, n the length of the needle, the attention to tokens of the needle,
    summed over the steps, times 10 / (n * steps). The steps are the queries that predict the continuation."""
    needle = next((span for span in trace.spans if span.name == "needle"), None)
    if needle is None:
        raise Error(f"{trace.path}:/spans", "missing", "a span named needle", "none")
    steps = trace.tokens - trace.prompt
    if steps == 0 or trace.prompt < 2:
        raise Error(str(trace.path), "continuation", "at least one token, after two of the prompt", "none")
    length = needle.end - needle.begin
    first = trace.prompt - 1
    view = trace.layer(layer, boundary=first)
    total = np.zeros(trace.query_heads)
    for step in range(steps):
        positions = list(range(first, first + step + 1))
        attention = view.attention_of(positions, [0.0] * step + [1.0])
        top = np.argsort(-attention, axis=1, kind="stable")[:, :length]
        inside = (top >= needle.begin) & (top < needle.end)
        total += (np.take_along_axis(attention, top, 1) * inside).sum(1)
    return 10 * total / (length * steps)


def utility_curves(trace: Trace, layer: int, scores: np.ndarray, sinks: int, window: int) -> np.ndarray:
    """[Hkv, P + 1]: attention of the later tokens, as a mean over queries and over the heads of a group, to the first n
    tokens of each head's ranking. `scores` [Hkv, P]; the first `sinks` and the last `window` tokens rank first."""
    ranked = scores.copy()
    ranked[:, :sinks] = ranked[:, len(ranked[0]) - window :] = np.inf
    order = np.argsort(-ranked, axis=1, kind="stable")
    attention = grouped(trace.layer(layer).eval_attention(), trace.kv_heads) / (trace.tokens - trace.prompt)
    gains = np.take_along_axis(attention, order, 1)
    return np.concatenate([np.zeros((len(gains), 1)), gains.cumsum(1)], 1)


def hull_slopes(curve: np.ndarray, least: int) -> np.ndarray:
    """[n - least]: slopes of the upper concave hull of curve[least:] at each further token, descending."""
    corners: list[int] = []
    for n in range(least, len(curve)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (curve[b] - curve[a]) * (n - b) > (curve[n] - curve[b]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    pieces = zip(corners, corners[1:], strict=False)
    return np.concatenate([np.full(b - a, (curve[b] - curve[a]) / (b - a)) for a, b in pieces] or [np.zeros(0)])


def pruned_shares(curves: np.ndarray, shares: Sequence[float], least: int) -> np.ndarray:
    """[len(shares), L, Hkv]: share of its tokens that each head evicts if all heads together evict `shares`.

    `curves` [L, Hkv, P + 1]. Each head keeps `least` tokens; the others go to the heads whose hulls are steepest, which
    maximises the sum of the hulls.
    """
    layers, heads, ends = curves.shape
    prompt, rows = ends - 1, layers * heads
    least = min(least, prompt)
    slopes = [hull_slopes(curve, least) for curve in curves.reshape(rows, ends)]
    owners = np.repeat(np.arange(rows), [len(one) for one in slopes])
    order = np.argsort(-np.concatenate(slopes), kind="stable")
    result = np.empty((len(shares), layers, heads))
    for i, share in enumerate(shares):
        further = max(0, round((1 - share) * rows * prompt) - rows * least)
        kept = least + np.bincount(owners[order[:further]], minlength=rows)
        result[i] = (1 - kept / prompt).reshape(layers, heads)
    return result


def token_features(trace: Trace, layer: int, window: int) -> Iterator[dict[str, np.ndarray | int]]:
    """Columns of each KV head: features of the prompt's tokens when the prompt ends, and the attention of the later
    tokens, as a mean over queries and the heads of a group."""
    view = trace.layer(layer)
    window = min(window, trace.prompt)
    kv_heads = view.kv_heads
    columns = {
        "attention": grouped(view.cumulative_attention(), kv_heads),
        "window_attention": grouped(view.window_attention(window), kv_heads) / window,
        "key_norm": view.key_norms(),
        "value_norm": view.value_norms(),
        "key_similarity": np.repeat(view.key_similarity(), kv_heads, 0),
        "value_similarity": np.repeat(view.value_similarity(), kv_heads, 0),
        "future_attention": grouped(view.eval_attention(), kv_heads) / (trace.tokens - trace.prompt),
    }
    for head in range(kv_heads):
        yield {"kv_head": head, **{name: values[head] for name, values in columns.items()}}
