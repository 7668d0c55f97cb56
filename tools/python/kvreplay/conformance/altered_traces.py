"""Traces in memory with one change: what an engine with a certain bug computes attention from.

Hq query heads, Hkv KV heads, T tokens, P prompt tokens, d components of a head, g = Hq / Hkv.
"""

from __future__ import annotations

import numpy as np

from kvreplay.memory import Rope
from kvreplay.trace import Trace
from kvreplay.trace_copies import altered, rope_of

HIDDEN = -1e4  # logit of a key that has no attention
NO_LATER_KEY = 50.0  # c of a query without later keys: exp(-c) is nothing beside its denominator
BLOCK = 256  # queries at a time


def positions_of_queries(trace: Trace, layer: int) -> np.ndarray:
    """The position of each stored query: int [Tq]."""
    stored = trace.query_positions(layer)
    return stored if len(stored) else np.arange(trace.tokens)


def rotated_again(trace: Trace, of_queries: bool, of_keys: bool) -> Trace | None:
    """RoPE applied a second time to queries, to keys, or to both. None: the trace has no RoPE."""
    rope = rope_of(trace)
    if rope is None:
        return None

    def rotated(layer: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        frequencies = rope.inv_freq[layer]
        first, second = _pairs(rope, len(frequencies))
        angle = np.outer(positions, frequencies)
        cosine, sine = np.cos(angle), np.sin(angle)
        turned = x.copy()
        turned[..., first] = x[..., first] * cosine - x[..., second] * sine
        turned[..., second] = x[..., second] * cosine + x[..., first] * sine
        return turned

    def queries(layer: int, q: np.ndarray) -> np.ndarray:
        return rotated(layer, q, positions_of_queries(trace, layer)) if of_queries else q

    def keys(layer: int, k: np.ndarray) -> np.ndarray:
        return rotated(layer, k, np.arange(trace.tokens)) if of_keys else k

    return altered(trace, queries, keys)


def _pairs(rope: Rope, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The components that RoPE rotates together."""
    if rope.style == "interleaved":
        return rope.offset + np.arange(count) * 2, rope.offset + np.arange(count) * 2 + 1
    return rope.offset + np.arange(count), rope.offset + count + np.arange(count)


def interleaved_groups(trace: Trace) -> Trace:
    """Query head h reads KV head h mod Hkv in place of floor(h / g)."""

    def queries(layer: int, q: np.ndarray) -> np.ndarray:
        kv = trace.k(layer).shape[0]
        return q.reshape(-1, kv, *q.shape[1:]).swapaxes(0, 1).reshape(q.shape)

    return altered(trace, queries)


def mean_queries(trace: Trace) -> Trace:
    """Each query head has the mean query of its group."""

    def queries(layer: int, q: np.ndarray) -> np.ndarray:
        kv = trace.k(layer).shape[0]
        groups = q.reshape(kv, -1, *q.shape[1:])
        return np.broadcast_to(groups.mean(axis=1, keepdims=True), groups.shape).reshape(q.shape)

    return altered(trace, queries)


def later_keys_in_denominator(trace: Trace) -> Trace | None:
    """Attention without the causal mask, at the keys that a query may see. None: the logits have a soft cap.

    The softmax over all P prompt keys has the denominator Z + M, where M is the sum over the later keys. A further
    component of queries and keys adds c to every logit of a query. With a sink logit of 0, attention is then
    exp(z + c) / (Z exp(c) + 1) = exp(z) / (Z + exp(-c)): so c = -log M.
    """
    if trace.attribute("/model", "logit_softcap"):
        return None
    scale = trace.attribute("/model", "softmax_scale")

    def queries(layer: int, q: np.ndarray) -> np.ndarray:
        added = np.zeros((*q.shape[:2], 1), np.float32)
        k = trace.k(layer)[:, : trace.prompt].astype(np.float32)
        positions = positions_of_queries(trace, layer)
        for head, begin in np.ndindex(len(q), -(-q.shape[1] // BLOCK)):
            block = slice(begin * BLOCK, (begin + 1) * BLOCK)
            logits = q[head, block] @ k[head * len(k) // len(q)].T * scale
            logits[positions[block, None] >= np.arange(trace.prompt)] = -np.inf
            highest = logits.max(axis=1, keepdims=True)
            highest[~np.isfinite(highest)] = 0
            with np.errstate(divide="ignore"):
                log_sum = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
            added[head, block, 0] = np.minimum(-log_sum, NO_LATER_KEY)
        return np.concatenate([q, added / scale], axis=2)

    return altered(
        trace,
        queries,
        lambda layer, k: np.concatenate([k, np.ones((*k.shape[:2], 1), np.float32)], axis=2),
        sinks=np.zeros((trace.layers, trace.query_heads)),
        softmax_scale=scale,
    )


def prompt_queries_after_prompt(trace: Trace) -> Trace | None:
    """The prompt's keys, followed by P tokens with the prompt's queries, which therefore see every prompt key.

    The keys of these tokens have no attention: a further component lowers their logits. None: the trace lacks queries,
    has a soft cap, or has layers that read the keys of others.
    """
    lacks_queries = any(len(trace.query_positions(layer)) for layer in range(trace.layers))
    if lacks_queries or trace.attribute("/model", "logit_softcap") or "/model/kv_source" in trace:
        return None
    prompt, scale = trace.prompt, trace.attribute("/model", "softmax_scale")

    def queries(layer: int, q: np.ndarray) -> np.ndarray:
        q = np.concatenate([q[:, :prompt], q[:, :prompt]], axis=1)
        return np.concatenate([q, np.ones((*q.shape[:2], 1), np.float32)], axis=2)

    def keys(layer: int, k: np.ndarray) -> np.ndarray:
        k = np.concatenate([k[:, :prompt], np.zeros_like(k[:, :prompt])], axis=1)
        added = np.zeros((*k.shape[:2], 1), np.float32)
        added[:, prompt:] = HIDDEN / scale
        return np.concatenate([k, added], axis=2)

    values = [np.concatenate([trace.v(layer)[:, :prompt]] * 2, axis=1).astype(np.float32)
              for layer in range(trace.layers)]  # fmt: skip
    return altered(trace, queries, keys, v=values, softmax_scale=scale, spans=())
