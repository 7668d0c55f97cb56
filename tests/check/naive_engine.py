"""An inference engine in float64 numpy, written from the papers, with switches for the bugs that engines had.

Hq query heads, Hkv KV heads, g = Hq / Hkv, P prompt tokens, B budget. Queries and keys are those after RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Engine:
    """SnapKV (window w, maximum over `kernel` neighbours) or H2O (all queries, half of B recent) per KV head."""

    budget: int
    window: int = 8
    kernel: int = 7
    is_h2o: bool = False
    block: int = 0  # tokens between evictions; 0: one eviction, after the prompt
    masked: bool = True
    shift: int = 0  # tokens by which the observation window ends too early
    higher_ties: bool = False
    numbers_slots: bool = False  # reports numbers of the cache before the last eviction
    divides_sums: bool = False  # divides the running sums by g at every query

    def kept(self, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
        """[Hkv,B] ascending positions of one layer: q [Hq,P,d], k [Hkv,P,d]."""
        group = len(q) // len(k)
        return np.stack([self._row(q[head * group : (head + 1) * group], k[head], scale) for head in range(len(k))])

    def _row(self, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
        prompt, resident = len(k), np.arange(0)
        block = self.block or prompt
        for end in range(block, prompt + block, block):
            end = min(end, prompt)
            resident = np.concatenate([resident, np.arange(end - (end - 1) % block - 1, end)])
            slots = self._slots(attention(q[:, :end], k, resident, scale, self.masked))
            reported, resident = slots, resident[slots]
        return reported if self.numbers_slots else resident

    def _slots(self, attention: np.ndarray) -> np.ndarray:
        """Ascending slots to keep, from the attention [g,queries,slots] of all queries so far."""
        tokens = attention.shape[2]
        if tokens <= self.budget:
            return np.arange(tokens)
        recent = self.budget // 2 if self.is_h2o else self.window
        last = attention.shape[1] - self.shift
        rows = attention[:, :last] if self.is_h2o else attention[:, last - self.window : last]
        if self.divides_sums:
            scores = np.zeros(tokens)
            for query in range(rows.shape[1]):
                scores = (scores + rows[:, query].sum(axis=0)) / len(rows)
        else:
            scores = rows.sum(axis=1).mean(axis=0)
        scores = scores[: tokens - recent]
        if not self.is_h2o:
            reach = self.kernel // 2
            scores = np.array([scores[max(0, i - reach) : i + reach + 1].max() for i in range(len(scores))])
        place = np.arange(len(scores))
        order = np.lexsort((-place if self.higher_ties else place, -scores))
        return np.sort(np.concatenate([order[: self.budget - recent], np.arange(tokens - recent, tokens)]))


def attention(q: np.ndarray, k: np.ndarray, resident: np.ndarray, scale: float, masked: bool) -> np.ndarray:
    """[g,queries,n] softmax over the resident tokens; with the mask, over those up to the query."""
    logits = np.einsum("gtd,jd->gtj", q, k[resident]) * scale
    if masked:
        logits = np.where(resident <= np.arange(q.shape[1])[:, None], logits, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights = np.nan_to_num(weights)  # a query before every resident token has no attention
    return weights / np.maximum(weights.sum(axis=2, keepdims=True), 1e-300)


def rotated(x: np.ndarray, inverse_frequencies: np.ndarray) -> np.ndarray:
    """[H,T,d] rotated by RoPE at positions 0 to T-1, pairs (i, i + d/2)."""
    half = len(inverse_frequencies)
    turn = np.exp(1j * np.outer(np.arange(x.shape[1]), inverse_frequencies))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=2)


def with_bug(engine: Engine, **bug: object) -> Engine:
    """The engine with one switch set."""
    return replace(engine, **bug)
