"""A model's attention over some tokens of a prompt: the masks of cells as batch rows.

A pass runs the tokens [begin, T) of one text in every batch row. Keys and values of the tokens before `begin` are
given, those of the pass are its own. Row b sees the given tokens that cell b holds, as far as a layer's sliding window
shows them, and the tokens of the pass causally, or until the cell evicts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from kvreplay.capture.masks import ROW_BLOCK, attention_of, causal
from kvreplay.capture.observe import replaced_attention

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Layer:
    """One layer as a pass of the model observed it: its attention rule, and keys and values of the prompt's tokens."""

    scale: float
    softcap: float  # 0: none
    window: int  # 0: none
    k: torch.Tensor  # [Hkv,P,d], after RoPE
    v: torch.Tensor  # [Hkv,P,dv]
    chunk: int = 0  # 0: none
    sinks: torch.Tensor | None = None  # [Hq] logits of the term of the softmax that has no key


@dataclass(frozen=True)
class Held:
    """Tokens of one layer that queries attend to: of one cell [H,n,...], or of the batch rows [B,H,n,...]. H is Hkv, or
    Hq where each query head has a separate set."""

    k: torch.Tensor  # [...,H,n,d]
    v: torch.Tensor  # [...,H,n,d]
    tokens: torch.Tensor  # int64 [...,H,n]: which tokens they are; NEVER fills up shorter rows
    positions: torch.Tensor  # int64 [...,H,n]: where their keys stand, so where a sliding window counts them


def kept_tokens(layer: Layer, kept: torch.Tensor) -> Held:
    """The kept tokens of a cell, unchanged, from a boolean [1 | Hkv | Hq, P]. A layer's set applies to each KV head."""
    kv_heads = layer.k.shape[0]
    kept = kept.to(layer.k.device).expand(max(kv_heads, kept.shape[0]), -1)
    # Kept positions ascending, then others: a stable sort of "is not kept".
    order = torch.argsort((~kept).to(torch.uint8), dim=-1, stable=True)[:, : max(1, int(kept.sum(-1).max()))]
    source = torch.arange(len(kept), device=order.device) * kv_heads // len(kept)
    k, v = (x[source[:, None], order] for x in (layer.k, layer.v))
    tokens = torch.where(kept.gather(-1, order), order, NEVER)
    return Held(k, v, tokens, tokens)


def together(cells: Sequence[Held]) -> Held:
    """Cells as batch rows, padded to one length, and repeated to query heads if one cell has sets of query heads."""
    heads, most = (max(cell.tokens.shape[i] for cell in cells) for i in (0, 1))

    def padded(name: str, value: int) -> torch.Tensor:
        pieces = [getattr(cell, name) for cell in cells]
        rows = pieces[0].new_full((len(cells), heads, most, *pieces[0].shape[2:]), value)
        for row, one in zip(rows, pieces, strict=True):
            row[:, : one.shape[1]] = one.repeat_interleave(heads // one.shape[0], 0)
        return rows

    return Held(padded("k", 0), padded("v", 0), padded("tokens", NEVER), padded("positions", NEVER))


@dataclass(frozen=True)
class Queries:
    """Queries of one layer behind the prompt."""

    q: torch.Tensor  # [B,Hq,n,d]
    positions: torch.Tensor  # [n]
    seen: torch.Tensor  # bool [B,Hq,n,m]: the prompt tokens that they see
    layer: Layer


class Reads(Protocol):
    """Which tokens of the prompt each query of each query head reads."""

    def read(self, queries: Queries, keys: torch.Tensor) -> torch.Tensor:
        """Of the tokens of keys [B,Hkv,m,d], in the order of the text: bool [B,Hq,n,m]."""
        ...

    def every(self, tokens: int) -> Reads:
        """The same with a budget of all tokens."""
        ...


@dataclass(frozen=True)
class PageReads:
    """The best `count` pages of the prompt; among equal pages the earlier one. The score of a page is
    sum_c max(q_c min_c, q_c max_c), with the extremes of each channel over its keys (Tang et al. 2024, Quest,
    arXiv:2406.10774), or with `by_mean` the product with the mean of its keys (Lu et al. 2025, MoBA,
    arXiv:2502.13189)."""

    page: int  # tokens
    count: int
    by_mean: bool = False

    def read(self, queries: Queries, keys: torch.Tensor) -> torch.Tensor:
        tokens, query = keys.shape[2], queries.q.double()
        pages = -(-tokens // self.page)
        group = query.shape[1] // keys.shape[1]

        def in_pages(beyond: float) -> torch.Tensor:
            padded = torch.nn.functional.pad(keys.double(), (0, 0, 0, pages * self.page - tokens), value=beyond)
            return padded.unflatten(2, (pages, self.page)).repeat_interleave(group, 1)

        def products(q: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
            return q @ vectors.transpose(-1, -2)  # [B,Hq,n,pages]

        if self.by_mean:
            sizes = torch.full((pages, 1), float(self.page), dtype=torch.float64, device=keys.device)
            sizes[-1] = tokens - (pages - 1) * self.page
            scores = products(query, in_pages(0).sum(3) / sizes)
        else:
            least, most = in_pages(math.inf).amin(3), in_pages(-math.inf).amax(3)
            scores = products(query.clamp(min=0), most) + products(query.clamp(max=0), least)
        return _best(scores, self.count).repeat_interleave(self.page, -1)[..., :tokens]

    def every(self, tokens: int) -> PageReads:
        return replace(self, count=tokens)


@dataclass(frozen=True)
class TokenReads:
    """The first `sinks` tokens, the prompt tokens among the last `local` ones up to the query, and of the others those
    with the largest product of query and key: `count` in all, the sinks first; or without `count` those whose attention
    weights reach the `share` of the others' sum (skylight-org/sparse-attention-hub, OracleTopKMasker and
    OracleTopPMasker). Among equal tokens the earlier one."""

    sinks: int
    local: int
    count: int | None = None
    share: float = 1.0

    def read(self, queries: Queries, keys: torch.Tensor) -> torch.Tensor:
        group = queries.q.shape[1] // keys.shape[1]
        products = queries.q.double() @ keys.double().repeat_interleave(group, 1).transpose(-1, -2)
        number = torch.arange(keys.shape[2], device=keys.device)
        sinks, recent = number < self.sinks, number > queries.positions[:, None] - self.local
        hidden = products.masked_fill(~queries.seen, -math.inf)
        if self.count is not None:
            # Of sinks the first ones are read, of recent tokens the last ones.
            largest = torch.finfo(torch.float64).max
            latest = largest / 2 * (1 + number.double() / len(number))
            order = torch.where(recent, latest, hidden).masked_fill(sinks, math.inf)
            return _best(order.masked_fill(~queries.seen, -math.inf), self.count) & queries.seen
        logits = hidden * queries.layer.scale
        if queries.layer.softcap:
            logits = queries.layer.softcap * torch.tanh(logits / queries.layer.softcap)
        competing = queries.seen & ~(sinks | recent)
        weights = logits.masked_fill(~competing, -math.inf)
        weights = torch.exp(weights - weights.amax(-1, keepdim=True)).nan_to_num()
        ordered = weights.sort(dim=-1, descending=True).values
        sums = ordered.cumsum(-1)
        # The first weight whose cumulative share exceeds `share`, or else the last one of the competing tokens.
        at = (sums / sums[..., -1:] <= self.share).sum(-1, keepdim=True)
        least = ordered.gather(-1, torch.minimum(at, (competing.sum(-1, keepdim=True) - 1).clamp(min=0)))
        return queries.seen & ((sinks | recent) | (competing & (weights >= least)))

    def every(self, tokens: int) -> TokenReads:
        return replace(self, count=tokens)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each one is among the `count` largest along the last axis, of equal ones the first."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


ROOM = 64  # tokens


class Growing:
    """Keys and values [B,H,m,d] of one layer, to which each step of a pass adds some."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._both, self._count = (k, v), k.shape[2]

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Appends keys and values of new tokens to the existing ones; the number of heads is the same."""
        end = self._count + k.shape[2]
        if end > self._both[0].shape[2]:
            # With room for later steps: a copy at each would cost more than the step.
            more = (0, 0, 0, end + ROOM - self._both[0].shape[2])
            self._both = tuple(torch.nn.functional.pad(x, more) for x in self._both)
        for x, new in zip(self._both, (k, v), strict=True):
            x[:, :, self._count : end] = new
        self._count = end

    def all(self) -> tuple[torch.Tensor, ...]:
        return tuple(x[:, :, : self._count] for x in self._both)


@dataclass
class MaskedAttention:
    """The registered attention function, for one pass over the tokens from `begin` on, whole or in steps.

    `held`: the resident tokens of each layer before the pass, by the layer's number in the model; empty in a pass that
    begins at 0. `leaves`: by layer int64 [B,H,T], the query after which a token of the pass is evicted, or NEVER.
    `reads`: by layer, which of these resident tokens a query reads; all tokens must be resident, in order.
    """

    layers: dict[int, Layer]
    begin: int
    held: dict[int, Held] = field(default_factory=dict)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    reads: dict[int, Reads] = field(default_factory=dict)
    seen: Callable[[int, torch.Tensor], None] | None = None  # layer, output [B,n,Hq,d]
    cached: dict[int, Growing] = field(default_factory=dict)  # by layer: held tokens, then those of the pass

    def __call__(
        self,
        number: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        key, value = self._keys(number, key, value)
        layer, queries = self.layers[number], query.shape[2]
        begin = self.begin + key.shape[2] - self._given(number) - queries
        output = query.new_empty((len(query), queries, query.shape[1], value.shape[3]))
        for first in range(0, queries, ROW_BLOCK):
            rows = slice(first, min(first + ROW_BLOCK, queries))
            output[:, rows] = self._rows(number, layer, query[:, :, rows], key, value, begin + first)
        if self.seen:
            self.seen(number, output)
        return output, None

    def _given(self, number: int) -> int:
        """The number of resident tokens of a layer before the pass."""
        return self.held[number].k.shape[2] if number in self.held else 0

    def _keys(self, number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Adds keys and values of this step; returns all of the layer: those before the pass, then the pass's own."""
        held = self.held.get(number)
        heads = held.k.shape[1] if held else key.shape[1]
        own = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        if number not in self.cached:
            self.cached[number] = Growing(*((held.k, held.v) if held else (x[:, :, :0] for x in (key, value))))
        self.cached[number].add(*own)
        return self.cached[number].all()

    def _rows(
        self, number: int, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """The attention of some queries, the first at position `first`: [B,n,Hq,d]."""
        batch, query_heads, n, _ = query.shape
        positions = torch.arange(first, first + n, device=query.device)
        own = torch.arange(self.begin, self.begin + key.shape[2] - self._given(number), device=query.device)
        seen = causal(positions, own, layer.window, layer.chunk)[None, None]  # [1,1,n,m]
        if number in self.leaves:
            seen = seen & (self.leaves[number][:, :, None, own] >= positions[:, None])
        if held := self.held.get(number):
            given = causal(positions, held.positions, layer.window, layer.chunk)
            if number in self.reads:
                given = given.repeat_interleave(query_heads // given.shape[1], 1)
                given = given & self.reads[number].read(Queries(query, positions, given, layer), held.k)
            seen = torch.cat([given, seen.expand(batch, given.shape[1], -1, -1)], -1)
        return attended(layer, query, key, value, seen)


def attended(
    layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention of queries [B,Hq,n,d] to keys [B,H,m,d] under a boolean mask [B,1 | Hkv | Hq,n,m]: [B,n,Hq,dv]."""
    batch, query_heads, n, width = query.shape
    heads = max(seen.shape[1], key.shape[1])
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x for x in (key, value))
    group = query_heads // heads
    # The query heads of a key head are rows of one product.
    q = query.reshape(batch, heads, group * n, width)
    seen = seen[:, :, None].expand(-1, -1, group, -1, -1).reshape(*seen.shape[:2], group * n, key.shape[2])
    sinks = None
    if layer.sinks is not None:
        sinks = layer.sinks.repeat_interleave(n).reshape(heads, group * n, 1)
    output = attention_of(q, key, value, seen, layer.scale, layer.softcap, sinks)
    return output.reshape(batch, query_heads, n, value.shape[3]).transpose(1, 2)


def masked(model: Any, attention: MaskedAttention) -> AbstractContextManager[None]:
    """A context in which `model` uses this attention."""
    return replaced_attention(model, "kvreplay-live", attention, lambda **_: None)
