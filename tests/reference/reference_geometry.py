"""Policies that look at keys and values themselves, their lengths and directions, and hardly at attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from reference import Trace, apportion, chain, norms, pool, rank, rows_of, top, unrotated
from reference_selection import (
    Case,
    Decision,
    Selection,
    best_beside,
    decided,
    exactly,
    sets_agree,
)

NOTHING = np.array([], dtype=int)


def prompt_keys(trace: Trace, layer: int) -> np.ndarray:
    """[Hkv,P,d]."""
    return trace.layers[layer].k[:, : trace.prompt]


def prompt_values(trace: Trace, layer: int) -> np.ndarray:
    """[Hkv,P,d]."""
    return trace.layers[layer].v[:, : trace.prompt]


def standardised(scores: np.ndarray) -> np.ndarray:
    """In standard deviations from the mean, both over all heads and tokens of a layer; 0 where all are equal."""
    spread = scores.std()
    return (scores - scores.mean()) / spread if spread > 0 else np.zeros_like(scores)


def gaussian(*indices: np.ndarray | int) -> np.ndarray:
    """A normal number from the chains of the indices that end in 0 and 1."""
    return np.sqrt(-2 * np.log(uniform_number(*indices, 0))) * np.cos(2 * np.pi * uniform_number(*indices, 1))


def uniform_number(*indices: np.ndarray | int) -> np.ndarray:
    """In (0,1), from the chain of the indices."""
    return ((chain(*indices) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


# -------------------------------------------------------------------------------------------------- one token by itself


def knorm(case: Case) -> Selection:
    """The shortest keys; some layers may keep all, the others then share what these leave of L*B."""
    trace = case.trace
    n_layers, prompt = len(trace.treated), trace.prompt
    skipped = layer_list(case.parameters["skip_layers"])
    whole = [layer in skipped for layer in range(n_layers)]
    left = n_layers * case.budget - prompt * sum(whole)
    ones = [1] * (n_layers - sum(whole))
    shares = iter(apportion(left, ones, [0] * len(ones), [prompt] * len(ones)))
    counts = [[prompt if full else next(shares)] * trace.kv_heads for full in whole]
    fixed = case.fixed(case.sinks, 0)
    counts = [[count - len(fixed) for count in layer] for layer in counts]
    return best_beside(case, fixed, lambda layer: -norms(prompt_keys(trace, layer), 2), counts)


def layer_list(value: str) -> list[int]:
    """'(0,1)' or '0' or 'none'."""
    return [] if value == "none" else [int(number) for number in value.strip("()").split(",")]


def value_norm(case: Case) -> Selection:
    """The longest values, beside sinks and window."""
    fixed = case.fixed(case.number("sinks"), case.number("window"))
    order = float(case.parameters["p"])
    return best_beside(case, fixed, lambda layer: norms(prompt_values(case.trace, layer), order))


def q_filter(case: Case) -> Selection:
    """Keys along the direction in which the queries lie most."""
    trace, filters = case.trace, case.parameters["filters"]

    def scores(layer: int) -> np.ndarray:
        if filters == "trace":
            directions = main_directions(trace, layer)
        else:
            directions = np.load(Path(filters))[trace.treated.index(layer)].astype(float)
        return (prompt_keys(trace, layer) * directions[:, None, :]).sum(axis=-1)

    return best_beside(case, case.fixed(case.sinks, 0), scores)


def main_directions(trace: Trace, layer: int, seen: int | None = None) -> np.ndarray:
    """[Hkv,d]: each group's mean of the first right singular vectors of its heads' queries [0,seen), by default the
    prompt's."""
    directions = []
    for queries in rows_of(trace, layer, np.arange(trace.prompt if seen is None else seen)):
        _, _, right = np.linalg.svd(queries, full_matrices=False)
        forward = right[0] @ queries.mean(axis=0) >= 0
        directions.append(right[0] if forward else -right[0])
    return np.reshape(directions, (trace.kv_heads, -1, trace.dimension)).mean(axis=1)


# --------------------------------------------------------------------------------------------- a token among the others


def unlike_the_mean(keys: np.ndarray) -> np.ndarray:
    """[n]: minus the cosine between each of the keys [n,d] and the mean of their directions; 0 for a key of zeros."""
    lengths = np.linalg.norm(keys, axis=1)
    directions = np.array([key / length if length > 0 else 0 * key for key, length in zip(keys, lengths, strict=True)])
    anchor = directions.mean(axis=0)
    length = np.linalg.norm(anchor)
    return np.zeros(len(keys)) if length == 0 else -(directions * anchor).sum(axis=1) / length


def keydiff(case: Case) -> Selection:
    """The keys least like their mean."""
    return best_beside(
        case,
        case.fixed(case.sinks, 0),
        lambda layer: np.array([unlike_the_mean(keys) for keys in prompt_keys(case.trace, layer)]),
    )


def lagkv(case: Case) -> Selection:
    """In each partition the tokens that spread most on the scale of the next one; the last whole one and what follows
    it come first, as sinks do."""
    trace, lag = case.trace, case.number("lag")
    prompt, budget = trace.prompt, case.budget
    sinks, _ = case.guarded(case.number("sinks"), 0)
    whole = (prompt - sinks) // lag
    fixed = case.fixed(case.number("sinks"), 0)
    candidates = np.setdiff1d(np.arange(prompt), fixed)
    if whole < 2:
        kept = np.union1d(fixed, candidates[len(candidates) - (budget - len(fixed)) :])
        every = [[kept] * trace.kv_heads for _ in trace.treated]
        places = [(layer, row) for layer in range(len(every)) for row in range(trace.kv_heads)]
        return case.selection(every, fixed, [exactly(place, kept) for place in places])
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        rows.append([])
        for row in range(trace.kv_heads):
            keys, values = prompt_keys(trace, layer)[row], prompt_values(trace, layer)[row]
            scores, spreads, partitions = ranks_in_partitions(keys, values, sinks, lag)
            kept = np.union1d(fixed, top(scores, budget - len(fixed), candidates))
            rows[-1].append(kept)
            decisions.append(decided([(index, row)], [kept], as_spread(kept, spreads, partitions)))
    return case.selection(rows, fixed, decisions)


def ranks_in_partitions(
    keys: np.ndarray, values: np.ndarray, sinks: int, lag: int
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Scores [n] of tokens with keys and values [n,d], what they rank by, and the partitions in which they do."""
    whole = (len(keys) - sinks) // lag
    partitions = [np.arange(sinks + i * lag, sinks + (i + 1) * lag) for i in range(whole)]
    scores, spreads = np.ones(len(keys)), np.full(len(keys), np.nan)
    for now, following in zip(partitions, partitions[1:], strict=False):
        spreads[now] = (spread(keys[now], keys[following]) + spread(values[now], values[following])) / 2
        for place, token in enumerate(now[rank(spreads[now])]):
            scores[token] = (lag - 1 - place) / lag
    return scores, spreads, partitions[:-1]


def spread(tokens: np.ndarray, following: np.ndarray) -> np.ndarray:
    """[g]: softmax over tokens [g,d] of their channels' standard deviation, in units of what follows."""
    least, extent = following.min(axis=0), following.max(axis=0) - following.min(axis=0)
    scaled = np.divide(tokens - least, extent, out=np.zeros_like(tokens), where=extent > 0)
    deviation = np.array([channels.std(ddof=1) for channels in scaled])
    weights = np.exp(deviation - deviation.max())
    return weights / weights.sum()


def as_spread(
    kept: np.ndarray, spreads: np.ndarray, partitions: list[np.ndarray]
) -> Callable[[list[np.ndarray]], bool]:
    """Agreement if each partition's share is as large, and as spread within the tolerance; all else is fixed."""

    def agrees(theirs: list[np.ndarray]) -> bool:
        scored = np.concatenate(partitions)
        if not np.array_equal(np.setdiff1d(kept, scored), np.setdiff1d(theirs[0], scored)):
            return False
        for partition in partitions:
            mine, other = np.intersect1d(kept, partition), np.intersect1d(theirs[0], partition)
            cut = spreads[mine].min() if len(mine) else np.nan
            if not sets_agree(mine, other, spreads, cut):
                return False
        return True

    return agrees


def cur(case: Case) -> Selection:
    """Keys and values that are long among their neighbours."""
    trace, use, size = case.trace, case.parameters["use"], case.number("block")
    fixed = case.fixed(case.number("sinks"), 0)
    return best_beside(
        case, fixed, lambda layer: shares_of_blocks(prompt_keys(trace, layer), prompt_values(trace, layer), use, size)
    )


def shares_of_blocks(keys: np.ndarray, values: np.ndarray, use: str, size: int) -> np.ndarray:
    """[Hkv,n] of [Hkv,n,d]: a token's share of the squares in its block of `size`, of keys, of values or of both.

    One quotient each: of whole numbers equal ones are equal.
    """

    def of_block(squares: np.ndarray) -> np.ndarray:
        """The sum of the squares in each token's block, 1 where that is 0."""
        begins = np.arange(0, squares.shape[1], size)
        sums = np.repeat(np.add.reduceat(squares, begins, axis=1), size, axis=1)[:, : squares.shape[1]]
        return np.where(sums > 0, sums, 1)

    key, value = ((vectors**2).sum(axis=-1) for vectors in (keys, values))
    keys, values = of_block(key), of_block(value)
    if use == "avg":
        return (key * values + value * keys) / (2 * keys * values)
    return {"key": key / keys, "value": value / values, "product": key * value / (keys * values)}[use]


# ------------------------------------------------------------------------------------------------------------- leverage


def leverages(case: Case, layer: int, positions: np.ndarray | None = None) -> np.ndarray:
    """[Hkv,n]: x_j (X'X + ridge I)^-1 x_j of the un-rotated, centred keys at `positions` [Hkv,n], by default all of the
    prompt, or of some random combinations of their channels; standardised over the layer."""
    trace, columns, seed = case.trace, case.number("sketch"), case.number("seed")
    ridge = float(case.parameters.get("ridge", "0.01"))
    if positions is None:
        positions = np.tile(np.arange(trace.prompt), (trace.kv_heads, 1))
    result = np.zeros(positions.shape)
    for head, there in enumerate(positions):
        keys = unrotated(trace, layer, trace.layers[layer].k[head, there], there)
        x = keys - keys[0]  # so that two keys lie exactly opposite about their mean
        x = x - x.mean(axis=0)
        if columns:
            channel, column = np.indices((trace.dimension, columns))
            x = x @ (gaussian(seed, layer, head, channel, column) / math.sqrt(columns))
        inverse = np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1]))
        result[head] = ((x @ inverse) * x).sum(axis=1)
    return standardised(result)


def leverage(case: Case) -> Selection:
    """Keys that no others stand in for."""
    return best_beside(case, case.fixed(case.sinks, 0), lambda layer: leverages(case, layer))


def compactor(case: Case) -> Selection:
    """Leverage, and what the tokens of a block pay to each other; the smaller the budget the more of the former. Of all
    this the protected tokens are no part."""
    trace, parameters = case.trace, case.parameters
    sinks, recent = case.guarded(case.number("sinks"), case.number("recent"))
    fixed = case.fixed(case.number("sinks"), case.number("recent"))
    mix = 1 - case.budget / trace.prompt if parameters["mix"] == "auto" else float(parameters["mix"])
    begin, end = sinks, trace.prompt - recent

    def scores(layer: int) -> np.ndarray:
        result = np.zeros((trace.kv_heads, trace.prompt))
        if begin == end:
            return result
        scored = np.arange(begin, end)
        lengths = norms(prompt_values(trace, layer)[:, scored], 2)
        paid = attention_in_blocks(trace, layer, scored, case.number("block")) * lengths
        leverage = leverages(case, layer, np.tile(scored, (trace.kv_heads, 1)))
        mixed = mix * leverage + standardised(pool(paid, 3, "avg"))
        result[:] = mixed.max()
        result[:, scored] = mixed
        return result

    return best_beside(case, fixed, scores)


def attention_in_blocks(trace: Trace, layer: int, positions: np.ndarray, size: int) -> np.ndarray:
    """[Hkv,n]: column sums of the softmax of queries times keys, unscaled and in both directions of time, in blocks of
    the tokens at `positions`."""
    queries, group = rows_of(trace, layer, positions), trace.query_heads // trace.kv_heads
    result = np.zeros((trace.query_heads, len(positions)))
    for head in range(trace.query_heads):
        keys = prompt_keys(trace, layer)[head // group, positions]
        for begin in range(0, len(positions), size):
            block = slice(begin, begin + size)
            products = queries[head, block] @ keys[block].T
            weights = np.exp(products - products.max(axis=1, keepdims=True))
            result[head, block] = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return result.reshape(trace.kv_heads, group, len(positions)).mean(axis=1)
