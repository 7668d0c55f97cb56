"""The keys that queries may see: the rule behind transformers' mask, evaluated in blocks of rows, never as [T,T]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

ROW_BLOCK = 256  # rows of a mask, or of logits, held at once
SAMPLED_BLOCKS = 16  # of rows, evenly spread: all rows up to 4,096


class OwnAttention(Exception):
    """A model computes attention without transformers' AttentionInterface."""


@dataclass(frozen=True)
class MaskRule:
    """A mask [1,1,n,m] of n queries and m keys that is not made: the arguments that sdpa_mask would make it from."""

    arguments: dict[str, Any]

    @property
    def first_query(self) -> int:
        """The position of the first query."""
        if "cache_position" in self.arguments:  # transformers 5.0
            return int(self.arguments["cache_position"][0])
        return int(self.arguments["q_offset"])

    @property
    def keys(self) -> int:
        """The number of keys."""
        return int(self.arguments["kv_length"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole mask."""
        return 1, 1, int(self.arguments.get("q_length") or len(self.arguments["cache_position"])), self.keys

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return torch.bool

    @property
    def device(self) -> torch.device:
        """Of the elements."""
        return torch.device(self.arguments.get("device") or self.arguments["cache_position"].device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Elements of the whole mask, for models that read it, as sparse attention does."""
        return self.rows(0, self.shape[2], self.device)[None, None][index]

    def __radd__(self, logits: torch.Tensor) -> Any:
        """Models that add the mask to logits compute attention themselves."""
        raise OwnAttention

    def __and__(self, other: torch.Tensor) -> torch.Tensor:
        """The whole mask of what both see, as sparse attention makes it."""
        return self[...] & other

    def rows(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Rows [begin, end) of the mask, boolean [end - begin, m]."""
        arguments = {**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        for name in ("cache_position", "attention_mask"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].to(device)
        if "cache_position" in arguments:
            arguments["cache_position"] = arguments["cache_position"][begin:end]
        else:
            arguments |= {"q_length": end - begin, "q_offset": arguments["q_offset"] + begin, "device": device}
        return sdpa_mask(**arguments)[0, 0]


def mask_rule(**arguments: Any) -> MaskRule | None:
    """As an AttentionMaskInterface calls it: None where sdpa_mask gives None, for causal attention without a window."""

    def everything(batch: Any, head: Any, query: torch.Tensor, key: Any) -> torch.Tensor:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=query.device)

    # The mask of this function is one element, however large its shape.
    made = sdpa_mask(**{**arguments, "mask_function": everything, "use_vmap": False})
    return None if made is None else MaskRule(arguments)


def causal(queries: torch.Tensor, keys: torch.Tensor, window: int, chunk: int = 0) -> torch.Tensor:
    """Causal visibility [...,n,m] of keys at positions [...,m] to queries at positions [n], in a sliding window or a
    chunk (0: none)."""
    t, j = queries[:, None], keys[..., None, :]
    seen = (j <= t) & (j > t - window) if window else j <= t
    return seen & (j >= t // chunk * chunk) if chunk else seen


@dataclass(frozen=True)
class Visibility:
    """The keys that each query sees: n queries and m keys, both at the end of the same tokens. Mask None: causal."""

    mask: MaskRule | torch.Tensor | None
    queries: int
    keys: int
    tokens: int  # up to and including the last query

    @classmethod
    def of(cls, mask: MaskRule | torch.Tensor | None, queries: int, keys: int) -> Visibility:
        return cls(mask, queries, keys, mask.first_query + queries if isinstance(mask, MaskRule) else keys)

    def rows(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Of queries [begin, end): boolean [end - begin, m]."""
        if isinstance(self.mask, MaskRule):
            return self.mask.rows(begin, end, device)
        if self.mask is not None:
            return self.mask[0, 0, begin:end].to(device)
        return self.causal_rows(begin, end, device, 0)

    def causal_rows(self, begin: int, end: int, device: torch.device, window: int, chunk: int = 0) -> torch.Tensor:
        first_query, first_key = self.tokens - self.queries, self.tokens - self.keys
        positions = torch.arange(first_query + begin, first_query + end, device=device)
        return causal(positions, torch.arange(first_key, self.tokens, device=device), window, chunk)

    def rule(self, device: torch.device, chunk: int = 0) -> tuple[int, int] | None:
        """Sliding window and chunk, of which one is 0: without a window, chunks of the given size are tried. (0, 0):
        causal; None: something else. Read from sampled blocks of rows."""
        if isinstance(self.mask, torch.Tensor) and (
            self.mask.dtype != torch.bool or self.mask.shape != (1, 1, self.queries, self.keys)
        ):
            return None
        seen_by_last = int(self.rows(self.queries - 1, self.queries, device).sum())
        window = 0 if seen_by_last == self.tokens else seen_by_last
        for rule in [(window, 0), *([(0, chunk)] if chunk else [])]:
            if self._follows(device, *rule):
                return rule
        return None

    def selection(self) -> torch.Tensor | None:
        """The numbers of the keys that each query sees, ascending, then -1: int [n,u], of a mask that a model made
        from a choice of earlier keys for each query. None: the mask is of another kind."""
        mask = self.mask
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or self.keys != self.tokens:
            return None
        if mask.shape != (1, 1, self.queries, self.keys) or not mask.any(-1).all():
            return None
        rows = mask[0, 0]
        if (rows & ~self.causal_rows(0, self.queries, rows.device, 0)).any():
            return None
        numbers = torch.arange(self.keys, device=rows.device, dtype=torch.int32).expand(rows.shape)
        numbers = torch.where(rows, numbers, self.keys).sort(-1).values[:, : int(rows.sum(-1).max())]
        return torch.where(numbers < self.keys, numbers, -1)

    def _follows(self, device: torch.device, window: int, chunk: int) -> bool:
        blocks = -(-self.queries // ROW_BLOCK)
        for block in torch.linspace(0, blocks - 1, min(blocks, SAMPLED_BLOCKS)).round().long().tolist():
            begin, end = block * ROW_BLOCK, min((block + 1) * ROW_BLOCK, self.queries)
            if not torch.equal(self.rows(begin, end, device), self.causal_rows(begin, end, device, window, chunk)):
                return False
        return True


def selected_rows(selected: torch.Tensor, begin: int, end: int, keys: int) -> torch.Tensor:
    """Whether queries [begin, end) select each key, boolean [end - begin, m], from the numbers of these keys."""
    numbers = selected[begin:end].long()
    rows = torch.zeros(end - begin, keys + 1, dtype=torch.bool, device=selected.device)
    return rows.scatter_(-1, torch.where(numbers < 0, keys, numbers), True)[:, :keys]


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [...,n,d] over k [...,m,d], v [...,m,dv] under a boolean mask. A softcap makes z into c*tanh(z/c);
    `sinks` [...,1,1] are logits of one more term of the softmax, which has no value. sdpa has neither."""
    if not softcap and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    logits = query.float() @ key.float().transpose(-1, -2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().expand(*logits.shape[:-1], 1)], -1)
    return logits.softmax(-1)[..., : key.shape[-2]].to(value.dtype) @ value


def attention_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q [1,Hq,n,d] over k [1,Hkv,m,d], v [1,Hkv,m,dv], ROW_BLOCK queries at once: [1,n,Hq,dv].

    `sinks` [Hq]: logits of terms without a key. `selected` [n,u]: the numbers of the only keys that a query reads. Of a
    window no keys are read that none of a block sees.
    """
    query_heads, queries, kv_heads = query.shape[1], query.shape[2], key.shape[1]
    group = query_heads // kv_heads
    first_query, first_key = visibility.tokens - queries, visibility.tokens - visibility.keys
    output = query.new_empty((1, queries, query_heads, value.shape[3]))
    for begin in range(0, queries, ROW_BLOCK):
        rows = slice(begin, min(begin + ROW_BLOCK, queries))
        low = max(0, first_query + begin - window + 1 - first_key) if window else 0
        seen = slice(low, first_query + rows.stop - first_key)
        visible = visibility.rows(rows.start, rows.stop, query.device)
        if selected is not None:
            visible = visible & selected_rows(selected, rows.start, rows.stop, visible.shape[1])
        visible = visible[:, seen]
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q = query[:, heads, rows]
            k, v = (x[:, kv_head : kv_head + 1, seen].expand(-1, group, -1, -1) for x in (key, value))
            logits = None if sinks is None else sinks[heads, None, None]
            block = attention_of(q, k, v, visible[None, None], scale, softcap, logits)
            output[:, rows, heads] = block.transpose(1, 2)
    return output
