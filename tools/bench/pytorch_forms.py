"""What people write in PyTorch for the same answers. q is [Hq, n, d], k and v [Hkv, n, d].

All are float32 on the CPU, or what the caller has on its default device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def causal_mask(n: int) -> Tensor:
    """[n, n]: 0 where a query sees a key, -infinity elsewhere."""
    return torch.full((n, n), -math.inf).triu(1)


def naive(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Cumulative attention [Hq, n]: the whole [Hq, n, n] at once."""
    repeated = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    logits = q @ repeated.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return torch.softmax(logits, -1).sum(-2)


def head_by_head(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The same, one [n, n] after the other."""
    group = q.shape[0] // k.shape[0]
    rows = [torch.softmax(q[h] @ k[h // group].T / math.sqrt(q.shape[-1]) + mask, -1).sum(0) for h in range(len(q))]
    return torch.stack(rows)


def blocks_masked(q: Tensor, k: Tensor, mask: Tensor, block: int) -> Tensor:
    """Blocks of queries against all keys under the mask."""
    repeated = k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(-1, -2)
    sums = torch.zeros(q.shape[:2])
    for begin in range(0, q.shape[1], block):
        rows = slice(begin, begin + block)
        sums += torch.softmax(q[:, rows] @ repeated / math.sqrt(q.shape[-1]) + mask[rows], -1).sum(-2)
    return sums


def blocks_causal(q: Tensor, k: Tensor, mask: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of queries of all heads against the keys up to the block's end; products in `dtype`."""
    heads, n, d = q.shape
    grouped = (q / math.sqrt(d)).view(k.shape[0], -1, n, d).to(dtype)
    keys = k.to(dtype)
    sums = torch.zeros(heads, n)
    for begin in range(0, n, block):
        end = min(n, begin + block)
        queries = grouped[:, :, begin:end].reshape(k.shape[0], -1, d)
        logits = (queries @ keys[:, :end].transpose(-1, -2)).view(heads, end - begin, end).float()
        logits[:, :, begin:] += mask[: end - begin, : end - begin]
        sums[:, :end] += torch.softmax(logits, -1).sum(-2)
    return sums


def blocks_causal_head_by_head(q: Tensor, k: Tensor, mask: Tensor, block: int) -> Tensor:
    """The same for one head after the other, which stays near the cache."""
    heads, n, d = q.shape
    sums = torch.zeros(heads, n)
    for head in range(heads):
        keys = k[head // (heads // k.shape[0])]
        for begin in range(0, n, block):
            end = min(n, begin + block)
            logits = (q[head, begin:end] / math.sqrt(d)) @ keys[:end].T
            logits[:, begin:] += mask[: end - begin, : end - begin]
            sums[head, :end] += torch.softmax(logits, -1).sum(0)
    return sums


def window_sums(logits: Tensor) -> Tensor:
    """[..., w, n] logits of the last w queries -> column sums."""
    window, n = logits.shape[-2:]
    unseen = torch.arange(n) > torch.arange(n - window, n)[:, None]
    return torch.softmax(logits.masked_fill(unseen, -math.inf), -1).sum(-2)


def window_grouped(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Attention of the last queries [Hq, n], the heads of a group in one product."""
    kv_heads, n, d = k.shape
    rows = q[:, -window:].reshape(kv_heads, -1, d) / math.sqrt(d)
    return window_sums((rows @ k.transpose(-1, -2)).view(q.shape[0], window, n))


def window_repeated(q: Tensor, k: Tensor, window: int) -> Tensor:
    """The same with keys repeated for each query head."""
    repeated = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    return window_sums(q[:, -window:] @ repeated.transpose(-1, -2) / math.sqrt(q.shape[-1]))


def unit_vectors(tensor: Tensor) -> Tensor:
    """[n, heads * d]: the vectors of all heads of a token side by side, of length 1."""
    rows = tensor.transpose(0, 1).reshape(tensor.shape[1], -1)
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def similarity_row_maxima(k: Tensor) -> Tensor:
    """[n] highest cosine with another token."""
    unit = unit_vectors(k)
    return (unit @ unit.T).fill_diagonal_(-2.0).max(-1).values


def least_redundant(k: Tensor, v: Tensor, recent: int, keep: int) -> Tensor:
    """Greedy selection by what joining adds (SCA, algorithm 1), kept up to date from step to step: [keep]."""
    n = k.shape[1]
    parts = [unit @ unit.T for unit in (unit_vectors(k), unit_vectors(v))]
    joined = torch.zeros(n, dtype=torch.bool)
    floors = [torch.full((n,), 0.0) for _ in parts]
    added = [torch.zeros(n) for _ in parts]
    highest = [torch.full((n,), -2.0) for _ in parts]
    members: list[int] = []

    def join(token: int) -> None:
        for similarity, floor, above, high in zip(parts, floors, added, highest, strict=True):
            row = similarity[token]
            rising = torch.tensor(members, dtype=torch.long)[row[members] > floor[members]] if members else []
            for member in rising:
                above -= (similarity[member] - floor[member]).clamp_min(0)
                floor[member] = row[member]
                above += (similarity[member] - floor[member]).clamp_min(0)
            floor[token] = high[token] if members else 0.0
            above += (row - floor[token]).clamp_min(0)
            torch.maximum(high, row, out=high)
        if len(members) == 1:  # the first one's floor was that of a token alone
            first = members[0]
            for similarity, floor, above in zip(parts, floors, added, strict=True):
                above -= (similarity[first] - floor[first]).clamp_min(0)
                floor[first] = similarity[first, token]
                above += (similarity[first] - floor[first]).clamp_min(0)
        members.append(token)
        joined[token] = True

    for token in range(n - recent, n):
        join(token)
    while len(members) < keep:
        total = sum(added) + sum(highest)
        join(int(total.masked_fill(joined, math.inf).argmin()))
    return torch.tensor(sorted(members))


def least_redundant_steps(similarities: list[Tensor], steps: list[int]) -> None:
    """The algorithm as it reads: for each R of `steps` the step that finds R tokens there, with everything but the
    similarities computed anew. Which tokens these are does not matter for its time: the last R."""
    n = len(similarities[0])
    for count in steps:
        members = torch.arange(n - count, n)
        others = torch.arange(0, n - count)
        total = torch.zeros(len(others))
        for similarity in similarities:
            among = similarity[members][:, members].fill_diagonal_(-2.0)
            to_others = similarity[members][:, others]
            total += (to_others - among.max(-1).values[:, None]).clamp_min(0).sum(0) + to_others.max(0).values
        total.argmin()
