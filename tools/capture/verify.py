"""Attention recomputed from the trace as it lies in the file, held against what the model computed."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from kvreplay.capture.masks import selected_rows

QUERY_BLOCK = 128


@dataclass(frozen=True)
class Deviation:
    """A layer's largest deviation, and how much rounding allows there; both relative to sum_j a_j |v_j|."""

    layer: int
    head: int
    position: int
    found: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.found / self.allowed


def unit_roundoff(dtype: np.dtype) -> float:
    """u: rounding to this type changes a number by at most this factor."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def deviation(
    layer: int,
    first_head: int,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    output: np.ndarray,
    scale: float,
    softcap: float,
    window: int,
    chunk: int,
    selected: torch.Tensor | None,
    sinks: np.ndarray,
    compute: np.dtype,
    absorbed: bool,
) -> Deviation:
    """The query heads of one KV head, the first of them `first_head`: q [H,n,d] at `positions` [n], k [T,d], v
    [T,dv] as stored; `selected` [n,u]: the only keys that a query reads; `sinks` [H]; output [H,n,dv] as the model
    computed it in `compute`. `absorbed`: of latent attention, v as expanded here.

    o = sum_j a_j v_j with a = softmax(scale <q,k>), with one more term of the sink logit. The model rounds the
    weights a and the result to its type: 2u of sum_j a_j |v_j|. Its logits and sums are float32: off by about
    sqrt(d) u32 |q||k| and sqrt(T) u32. Where the stored type is narrower than the model's, q, k and v are rounded
    once more: |q||k| 2u in a logit, u in a value. Absorbed queries are rounded where the model rounds keys and
    values that it has expanded: as much once more.
    """
    exact = np.float64 if compute == np.float32 else np.float32
    width, tokens = k.shape[1], k.shape[0]
    single = unit_roundoff(np.dtype(np.float32))
    stored = unit_roundoff(q.dtype)
    narrowed = stored if stored > unit_roundoff(compute) else 0.0
    narrowed += unit_roundoff(compute) if absorbed else 0.0
    worst = Deviation(layer, first_head, int(positions[0]), 0.0, 2 * unit_roundoff(compute))
    for begin in range(0, len(positions), QUERY_BLOCK):
        block = slice(begin, begin + QUERY_BLOCK)
        t = positions[block, None]
        last = int(t[-1, 0]) + 1  # positions ascend: later keys are invisible to the whole block
        first = max(0, int(t[0, 0]) - window + 1) if window else 0
        first = max(first, int(t[0, 0]) // chunk * chunk if chunk else 0)
        j = np.arange(first, last)[None, :]
        hidden = (j > t) | (j <= t - window) if window else j > t
        hidden |= (j < t // chunk * chunk) if chunk else False
        if selected is not None:
            rows = selected_rows(selected, begin, begin + len(t), tokens).cpu().numpy()
            hidden = hidden | ~rows[:, first:last]
        keys, values = (x[first:last].astype(exact) for x in (k, v))
        longest_key = np.sqrt(np.max(np.einsum("jd,jd->j", keys, keys)))
        for head in range(len(q)):
            queries = q[head, block].astype(exact)
            logits = queries @ keys.T * exact(scale)
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            logits[hidden] = -np.inf
            highest = np.maximum(logits.max(axis=1, keepdims=True), sinks[head])
            weights = np.exp(logits - highest)
            weights /= weights.sum(axis=1, keepdims=True) + np.exp(sinks[head] - highest)
            magnitude = weights @ np.abs(values) + np.finfo(exact).tiny
            found = np.max(np.abs(output[head, block].astype(exact) - weights @ values) / magnitude, axis=1)
            largest_logit = scale * np.linalg.norm(queries, axis=1) * longest_key
            in_logits = largest_logit * (2 * narrowed + 2 * np.sqrt(width) * single)
            in_sums = 2 * unit_roundoff(compute) + narrowed + 2 * np.sqrt(tokens) * single
            allowed = np.expm1(2 * in_logits) + in_sums
            row = int(np.argmax(found / allowed))
            if not found[row] / allowed[row] <= worst.ratio:
                worst = Deviation(layer, first_head + head, int(t[row, 0]), float(found[row]), float(allowed[row]))
    return worst
