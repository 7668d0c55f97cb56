"""Sparse reads beside `quest`: all tokens are kept, and each query of each query head reads some of the prompt. It also
reads all later tokens up to itself, and itself. Rules: oracle top-k and top-p, double sparsity, page means, MagicPIG,
PQ."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from reference import Trace, capped, chain, protection, rank, rows_of, top, unrotated
from reference_2026 import by_group
from reference_geometry import NOTHING, gaussian, prompt_keys
from reference_selection import Case, Selection
from reference_stores import everything_kept

OPEN = {"sinks": "0", "local": "0", "dense_layers": "0"}
DEFAULTS: dict[str, dict[str, str]] = {
    "oracle-top-k": OPEN,
    "oracle-top-p": OPEN,
    "double-sparsity": OPEN | {"group_factor": "16", "label_bits": "4", "channels": "qk", "share": "query-head"},
    "page-means": {"page": "16", "least_pages": "3", "dense_layers": "0"},
    "magic-pig": {"sinks": "128", "local": "128", "bits": "8", "tables": "75", "collisions": "1"}
    | {"seed": "0", "dense_layers": "0"},
    "pq": {"sinks": "128", "local": "128", "parts": "2", "bits": "6", "iterations": "10"}
    | {"init_offset": "128", "seed": "0", "dense_layers": "0"},
}


def kv_head(trace: Trace, head: int) -> int:
    """That a query head reads."""
    return head * trace.kv_heads // trace.query_heads


# A rule of a stored layer: query head, query [d] and its position to the prompt tokens that it reads.
Rule = Callable[[int, np.ndarray, int], np.ndarray]


def reading(
    case: Case,
    rule: Callable[[int], Rule],
    index_bits: int = 0,
    weight: Callable[[int, np.ndarray], np.ndarray] | None = None,
    has_budget: bool = True,
) -> Selection:
    """The whole cache, read by the rule of each stored layer; the index of a layer has `index_bits`."""
    trace, dense = case.trace, case.number("dense_layers")
    unread = len(trace.treated) if has_budget and case.budget >= trace.prompt else dense

    @functools.cache
    def rule_of(index: int) -> Rule:
        return rule(trace.treated[index])

    def read(index: int, queries: np.ndarray) -> np.ndarray:
        position = np.arange(trace.tokens)
        seen = np.broadcast_to(position <= queries[:, None], (trace.query_heads, len(queries), trace.tokens)).copy()
        if index < dense:
            return seen
        for head, rows in enumerate(rows_of(trace, trace.treated[index], queries)):
            for e, (q, t) in enumerate(zip(rows, queries, strict=True)):
                seen[head, e, : trace.prompt] &= np.isin(position[: trace.prompt], rule_of(index)(head, q, t))
        return seen | (position == queries[:, None])

    def stored_bytes(layer: int) -> float:
        index = 0 if trace.treated.index(layer) < dense else index_bits / 8
        return 2 * trace.kv_heads * trace.dimension * trace.number_bytes * trace.prompt + index

    others = {"read": read, "dense_layers": unread, "weight": weight, "stored_bytes": stored_bytes}
    return case.selection(everything_kept(case), NOTHING, [], **others)


def always_read(case: Case, t: int, budget: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Of the prompt tokens that query t sees: the sinks and the local ones, within a budget if there is one; the
    others."""
    prompt, sinks, local = case.trace.prompt, case.number("sinks"), case.number("local")
    visible = np.arange(min(t + 1, prompt))
    local = max(0, local - max(0, t + 1 - prompt))
    most = len(visible) if budget is None else budget
    fixed = protection(sinks, local, most, len(visible))
    return fixed, np.setdiff1d(visible, fixed)


def best_tokens(
    case: Case, scores: Callable[[int], Callable[[int, np.ndarray], np.ndarray]], first: int = 0
) -> Callable[[int], Rule]:
    """The rule that fills the budget with the best tokens from `first` on by scores(stored layer)(head, query) [P]."""

    def rule(layer: int) -> Rule:
        of_layer = scores(layer)

        def chosen(head: int, q: np.ndarray, t: int) -> np.ndarray:
            fixed, others = always_read(case, t, case.budget)
            others = others[others >= first]
            return np.union1d(fixed, top(of_layer(head, q), case.budget - len(fixed), others))

        return chosen

    return rule


def exact(case: Case, layer: int) -> Callable[[int, np.ndarray], np.ndarray]:
    """The logits."""
    keys = prompt_keys(case.trace, layer)
    return lambda head, q: capped(case.trace, keys[kv_head(case.trace, head)] @ q)


# -------------------------------------------------------------------------------------------------------- upper bounds


def oracle_top_k(case: Case) -> Selection:
    """The largest logits."""
    return reading(case, best_tokens(case, functools.partial(exact, case)))


def oracle_top_p(case: Case) -> Selection:
    """The fewest tokens whose share of the attention to the tokens beside sinks and local exceeds p."""
    share = float(case.parameters["p"])

    def rule(layer: int) -> Rule:
        z = exact(case, layer)

        def chosen(head: int, q: np.ndarray, t: int) -> np.ndarray:
            fixed, others = always_read(case, t, None)
            weights = np.exp(z(head, q)[others] - z(head, q)[others].max(initial=-np.inf))
            ordered = -np.sort(-weights)
            last = np.searchsorted(np.cumsum(ordered) / ordered.sum(), share, side="right")
            least = ordered[min(last, len(ordered) - 1)] if len(ordered) else 0
            return np.union1d(fixed, others[weights >= least])

        return chosen

    return reading(case, rule, has_budget=False)


# ----------------------------------------------------------------------------------------------------- double sparsity


def double_sparsity(case: Case) -> Selection:
    """Products of a few channels in a few bits."""
    trace, bits = case.trace, case.number("label_bits")
    r = max(1, trace.dimension // case.number("group_factor"))
    shares = case.parameters["share"] == "kv-head"

    def scores(layer: int) -> Callable[[int, np.ndarray], np.ndarray]:
        channels = [rank(of_head)[:r] for of_head in channel_sizes(case, layer)]
        labels = [
            label(prompt_keys(trace, layer)[kv_head(trace, head)][:, channels[head]], bits)
            for head in range(trace.query_heads)
        ]
        return lambda head, q: labels[head] @ label(q[channels[head]], bits) / math.sqrt(r)

    lists = 1 if shares else trace.query_heads // trace.kv_heads
    index_bits = trace.kv_heads * trace.prompt * lists * (r * bits + (32 if bits < 16 else 0))
    return reading(case, best_tokens(case, scores), index_bits)


def channel_sizes(case: Case, layer: int) -> np.ndarray:
    """[Hq,d]: means over the prompt's tokens of |q_c k_c|, or before RoPE of |q_c| or |k_c|."""
    trace, position = case.trace, np.arange(case.trace.prompt)
    queries, keys = rows_of(trace, layer, position), prompt_keys(trace, layer)
    group = trace.query_heads // trace.kv_heads
    if case.parameters["channels"] == "qk":
        sizes = np.abs(queries * np.repeat(keys, group, axis=0)).mean(axis=1)
    elif case.parameters["channels"] == "q":
        sizes = np.abs(unrotated(trace, layer, queries, position)).mean(axis=1)
    else:
        sizes = np.repeat(np.abs(unrotated(trace, layer, keys, position)).mean(axis=1), group, axis=0)
    if case.parameters["share"] == "kv-head":
        return np.repeat(by_group(trace, sizes).mean(axis=1), group, axis=0)
    return sizes


def label(x: np.ndarray, bits: int) -> np.ndarray:
    """[...,r] in steps between the least and the largest number of each vector, in float32."""
    if bits == 16:
        return x
    x, levels = x.astype(np.float32), np.float32(2**bits - 1)
    least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = levels / np.where(most > least, most - least, np.float32(1))
    return (np.rint((x - least) * scale).clip(0, levels) / scale + least).astype(float)


# ---------------------------------------------------------------------------------------------------------- page means


def page_means(case: Case) -> Selection:
    """Pages of the prompt by the product of the query and the mean key; a query's own page is read up to itself."""
    trace, size = case.trace, case.number("page")
    count = max(case.number("least_pages"), case.budget // size)
    n_pages = -(-trace.prompt // size)
    page_of = np.arange(trace.prompt) // size

    def rule(layer: int) -> Rule:
        keys = prompt_keys(trace, layer)
        means = np.stack([keys[:, page_of == page].mean(axis=1) for page in range(n_pages)], axis=1)

        def chosen(head: int, q: np.ndarray, t: int) -> np.ndarray:
            gates = means[kv_head(trace, head)] @ q
            own = t // size if t < trace.prompt else n_pages
            gates[own:] = np.where(np.arange(own, n_pages) == own, np.inf, -np.inf)
            return np.flatnonzero(np.isin(page_of, rank(gates)[:count]))

        return chosen

    return reading(case, rule, trace.kv_heads * n_pages * trace.dimension * trace.number_bytes * 8)


# ----------------------------------------------------------------------------------------------------------- magic-pig


def magic_pig(case: Case) -> Selection:
    """Tokens whose code of random projections is the query's in enough tables, with weights that undo their
    probability."""
    trace, tables, bits, least = case.trace, *(case.number(name) for name in ("tables", "bits", "collisions"))

    @functools.cache
    def hashed(layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean keys [Hkv,d], prepared keys [Hkv,P,d+1], directions [tables,bits,d+1]."""
        keys = prompt_keys(trace, layer)
        means = keys.mean(axis=1)
        directions = np.arange(tables * bits).reshape(tables, bits, 1)
        normal = gaussian(case.number("seed"), layer, directions, np.arange(trace.dimension + 1))
        return means, lifted_keys(keys - means[:, None]), normal

    def probabilities(layer: int, head: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each prompt token [P]: whether the query retrieves it, and how probable that is."""
        means, lifted, normal = hashed(layer)
        keys, q = lifted[kv_head(trace, head)], q - means[kv_head(trace, head)]
        q = np.append(q, 0)
        equal = ((keys @ normal.transpose(0, 2, 1) > 0) == (normal @ q > 0)[:, None, :]).all(axis=2).sum(axis=0)
        lengths = np.linalg.norm(q) * np.linalg.norm(keys, axis=1)
        angle = np.arccos((keys @ q / np.where(lengths > 0, lengths, 1)).clip(-1, 1))
        p = (1 - angle / math.pi) ** bits
        fewer = sum(math.comb(tables, i) * p**i * (1 - p) ** (tables - i) for i in range(least))
        return equal >= least, 1 - fewer

    def rule(layer: int) -> Rule:
        def chosen(head: int, q: np.ndarray, t: int) -> np.ndarray:
            fixed, others = always_read(case, t, None)
            return np.union1d(fixed, others[probabilities(layer, head, q)[0][others]])

        return chosen

    def weight(index: int, queries: np.ndarray) -> np.ndarray:
        factors = np.ones((trace.query_heads, len(queries), trace.tokens))
        if index < case.number("dense_layers"):
            return factors
        layer = trace.treated[index]
        for head, rows in enumerate(rows_of(trace, layer, queries)):
            for e, (q, t) in enumerate(zip(rows, queries, strict=True)):
                others = np.setdiff1d(always_read(case, t, None)[1], t)
                factors[head, e, others] = 1 / (probabilities(layer, head, q)[1][others] + 1e-6)
        return factors

    return reading(case, rule, trace.kv_heads * trace.prompt * tables * bits, weight, has_budget=False)


def lifted_keys(keys: np.ndarray) -> np.ndarray:
    """[Hkv,n,d] to unit vectors [Hkv,n,d+1], whose product with a query, 0 in the last component, is as before up to
    the largest length of all heads; zeros if all keys are."""
    squares = (keys**2).sum(axis=-1, keepdims=True)
    largest = math.sqrt(squares.max()) or 1.0
    return np.concatenate([keys, np.sqrt(squares.max() - squares)], axis=-1) / largest


# ------------------------------------------------------------------------------------------------------------------ pq


def pq(case: Case) -> Selection:
    """Products of the query with the centre of each part of a key."""
    trace, parts, first = case.trace, case.number("parts"), case.number("init_offset")
    n = max(0, trace.prompt - first)
    width = trace.dimension // parts
    n_centres = min(2 ** case.number("bits"), n)

    def scores(layer: int) -> Callable[[int, np.ndarray], np.ndarray]:
        keys = prompt_keys(trace, layer)[:, first:].reshape(trace.kv_heads, n, parts, width).transpose(0, 2, 1, 3)
        centres, codes = k_means(keys, n_centres, case.number("iterations"), case.number("seed"), layer)

        def of_query(head: int, q: np.ndarray) -> np.ndarray:
            of_head = kv_head(trace, head)
            products = np.einsum("scd,sd->sc", centres[of_head], q.reshape(parts, width))
            return np.pad(np.take_along_axis(products, codes[of_head], axis=1).sum(axis=0), (first, 0))

        return of_query

    index_bits = n * parts * case.number("bits") + parts * n_centres * width * trace.number_bytes * 8
    return reading(case, best_tokens(case, scores, first), trace.kv_heads * index_bits)


def k_means(keys: np.ndarray, n_centres: int, iterations: int, seed: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres [Hkv,parts,centres,d/parts] of the keys [Hkv,parts,n,d/parts], and codes [Hkv,parts,n]: those before the
    last update of the centres."""
    heads, parts, n, _ = keys.shape
    place = list(np.ndindex(heads, parts))
    centres = np.zeros((heads, parts, n_centres, keys.shape[3]))
    codes = np.zeros((heads, parts, n), int)
    for head, part in place:
        order = np.argsort(chain(seed, layer, head, part, np.arange(n)), kind="stable")
        centres[head, part] = keys[head, part, order[:n_centres]]
    for iteration in range(iterations if n else 0):
        moved = np.zeros_like(centres)
        for head, part in place:
            of_part = keys[head, part]
            distances = ((of_part[:, None] - centres[head, part]) ** 2).sum(axis=2)
            codes[head, part] = distances.argmin(axis=1)
            for centre in range(n_centres):
                members = of_part[codes[head, part] == centre]
                spare = int(chain(seed, layer, head, part, centre, iteration) % np.uint64(n))
                moved[head, part, centre] = members.mean(axis=0) if len(members) else of_part[spare]
        shifts = np.linalg.norm(moved - centres, axis=3).sum(axis=2)
        centres = moved
        if (shifts**2 < 1e-4).all():
            break
    return centres, codes


POLICIES = {
    "oracle-top-k": oracle_top_k,
    "double-sparsity": double_sparsity,
    "page-means": page_means,
    "pq": pq,
}
WITHOUT_BUDGET = {"oracle-top-p": oracle_top_p, "magic-pig": magic_pig}
