"""Caches that change what they keep of a token, or of which each query reads a part."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import numpy as np
from reference import aggregate, logits, rank, rows_of, softmax
from reference_geometry import NOTHING, uniform_number
from reference_metrics import changed_logits
from reference_number_formats import decoded, rotated, vectors_bytes
from reference_selection import Case, Selection, call_of, pieces, unwrapped


def quantised(values: np.ndarray, group: int, bits: int) -> np.ndarray:
    """[...,n] float32 written as `bits`-bit numbers and read again, by groups along the last axis; the last is short.

    A group has its minimum and its step, both float16; all arithmetic is float32.
    """
    levels = np.float32(2**bits - 1)
    result = np.empty_like(values)
    for begin in range(0, values.shape[-1], group):
        x = values[..., begin : begin + group]
        least = x.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
        step = ((x.max(axis=-1, keepdims=True) - least) / levels).astype(np.float16).astype(np.float32)
        scaled = np.divide(x - least, step, out=np.zeros_like(x), where=step != 0)
        result[..., begin : begin + group] = np.rint(np.clip(scaled, 0, levels)) * step + least
    return result


def quantised_store(case: Case, base: Selection) -> Selection:
    """Keys by channel and values by token in few bits, but for the latest ones."""
    trace = case.trace
    bits, group, residual = case.number("bits"), case.number("group"), case.number("residual")

    def counts(kept: np.ndarray) -> tuple[int, int]:
        """Of quantised keys, and of quantised values."""
        return len(kept) - (len(kept) % residual if residual else 0), max(0, len(kept) - residual)

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = trace.layers[layer].k.copy(), trace.layers[layer].v.copy()
        for head, kept in enumerate(kept_by_head(case, base, layer)):
            n_keys, n_values = counts(kept)
            by_channel = keys[head, kept[:n_keys]].astype(np.float32).T
            keys[head, kept[:n_keys]] = quantised(by_channel, group, bits).T
            older = values[head, kept[:n_values]].astype(np.float32)
            values[head, kept[:n_values]] = quantised(older, group, bits)
        return keys, values

    def stored_bytes(layer: int) -> float:
        few = sum(sum(counts(kept)) for kept in kept_by_head(case, base, layer))
        vectors = sum(2 * len(kept) for kept in kept_by_head(case, base, layer))
        return float(trace.dimension * (few * (bits + Fraction(32, group)) + (vectors - few) * 16) / 8)

    return dataclasses.replace(base, stored=stored, stored_bytes=stored_bytes)


def kept_by_head(case: Case, base: Selection, layer: int) -> list[np.ndarray]:
    """The kept positions of each KV head in a stored layer; of the followed selection if there is one."""
    rows = (case.follow or base).rows[case.trace.treated.index(layer)]
    return [rows[head * len(rows) // case.trace.kv_heads] for head in range(case.trace.kv_heads)]


def kivi(case: Case) -> Selection:
    """Every token, quantised."""
    return quantised_store(case, whole_prompt(case))


def whole_prompt(case: Case) -> Selection:
    return case.selection(everything_kept(case), NOTHING, [])


def everything_kept(case: Case) -> list[list[np.ndarray]]:
    return [[np.arange(case.trace.prompt)] * case.trace.kv_heads for _ in case.trace.treated]


# ---------------------------------------------------------------------------------------------------------------- think


def fewer_channels(case: Case, base: Selection) -> Selection:
    """Keys lose the channels in which the last queries and they themselves are small; the recent ones do not."""
    trace, prompt = case.trace, case.trace.prompt
    dropped = int(Fraction(case.parameters["ratio"]) * trace.dimension)
    last = np.arange(max(0, prompt - case.number("window")), prompt)

    def older(kept: np.ndarray) -> np.ndarray:
        return kept[: len(kept) - min(case.number("recent"), len(kept))]

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys = trace.layers[layer].k.copy()
        asked = (rows_of(trace, layer, last) ** 2).sum(axis=1)
        asked = asked.reshape(trace.kv_heads, -1, trace.dimension).sum(axis=1)
        for head, kept in enumerate(kept_by_head(case, base, layer)):
            scores = asked[head] * (keys[head, kept] ** 2).sum(axis=0)  # sums, not means: of whole numbers exact
            keys[head, older(kept)[:, None], rank(scores)[trace.dimension - dropped :]] = 0
        return keys, trace.layers[layer].v

    def stored_bytes(layer: int) -> float:
        heads = kept_by_head(case, base, layer)
        numbers = sum(2 * trace.dimension * len(kept) - dropped * len(older(kept)) for kept in heads)
        return float(numbers * trace.number_bytes)

    return dataclasses.replace(base, stored=stored, stored_bytes=stored_bytes)


def think(case: Case) -> Selection:
    """Every token, with fewer channels of its key."""
    return fewer_channels(case, whole_prompt(case))


# --------------------------------------------------------------------------------------------------------------- cam


def last_seen(case: Case, base: Selection, index: int) -> np.ndarray:
    """[Hkv,T] of a treated layer: the query after which each token is evicted, T for never."""
    trace = case.trace
    if base.seen is not None:
        seen = base.seen(np.arange(trace.tokens))
        last = np.array([[trace.tokens if of[-1] else np.flatnonzero(of)[-1] for of in seen.T]])
    elif base.evicted_at is not None:
        last = np.where(base.evicted_at[index] < 0, trace.tokens, base.evicted_at[index])
    else:
        rows = (case.follow or base).rows[index]
        last = np.full((len(rows), trace.tokens), trace.tokens)
        for row, kept in enumerate(rows):
            last[row, np.setdiff1d(np.arange(trace.prompt), kept)] = trace.prompt - 1
    return np.repeat(last, trace.kv_heads // len(last), axis=0)


def merged_values(case: Case, base: Selection) -> Selection:
    """What another policy keeps; tokens that remain take up the values of those that are evicted before them."""
    trace, given = case.trace, case.parameters

    @functools.cache
    def merges(layer: int) -> list[tuple[int, int, int, np.ndarray, float]]:
        """Query, KV head, evicted token, the tokens that take its value, and the share of it that each takes."""
        index, found = trace.treated.index(layer), []
        last = last_seen(case, base, index)
        paid = np.zeros((trace.kv_heads, trace.tokens))
        at_slots = dataclasses.replace(base, evicted_at=np.repeat([last], len(trace.treated), axis=0), seen=None)
        at_slots = dataclasses.replace(at_slots, rows=[list(last)] * len(trace.treated))  # a row a KV head
        for t in range(trace.tokens):
            z, visible = logits(trace, layer, np.array([t]))
            if base.moved:
                z = changed_logits(trace, at_slots, index, np.array([t]))
            there = (last >= t)[:, None] & visible
            now = softmax(z, np.repeat(there, trace.query_heads // trace.kv_heads, axis=0))[:, 0]
            now = aggregate(now, "kv", "mean", trace.kv_heads)
            paid = now if given["attention"] == "current" else paid + now
            for head, token in reversed(np.argwhere(last == t)):
                later = np.flatnonzero(last[head, : t + 1] > t)
                later = later[later > token]
                takers = later[: case.number("merge")]
                if len(takers) == 0 or paid[head, token] == 0:
                    continue
                compared = takers if given["mean"] == "receivers" else later
                share = min(1.0, paid[head, token] / paid[head, compared].mean())
                if given["mode"] == "sampled":
                    share = float(uniform_number(case.number("seed"), layer, head, token) < share)
                found.append((t, head, token, takers, share / len(takers)))
        return found

    def values_before(layer: int, queries: np.ndarray) -> np.ndarray:
        """[Hkv,E,T,d]; `queries` ascend."""
        values, states, done = trace.layers[layer].v.copy(), [], 0
        for query in queries:
            for t, head, token, takers, share in merges(layer)[done:]:
                if t >= query:
                    break
                values[head, takers] += share * values[head, token]
                done += 1
            states.append(values.copy())
        return np.stack(states, axis=1)

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return trace.layers[layer].k, values_before(layer, np.array([trace.prompt]))[:, 0]

    changes = base.evicted_at is not None or base.seen is not None
    return dataclasses.replace(base, stored=stored, evolving=values_before if changes else None)


def cosines(keys: np.ndarray, token: int, others: np.ndarray) -> np.ndarray:
    """By one quotient, and one sum per row: equal cosines of whole numbers are equal."""
    along = (keys[others] * keys[token]).sum(axis=1)
    squares = np.maximum((keys**2).sum(axis=1), 1e-12)
    return np.sign(along) * np.sqrt(along**2 / (squares[token] * squares[others]))


def merged_tokens(case: Case, base: Selection) -> Selection:
    """What another policy keeps; keys and values of evicted tokens are merged into kept tokens, once."""
    trace = case.trace

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = trace.layers[layer].k, trace.layers[layer].v
        kept = kept_by_head(case, base, layer)
        evicted = [np.setdiff1d(np.arange(trace.prompt), one) if len(one) else np.array([], int) for one in kept]
        each = [[cosines(keys[head], token, kept[head]) for token in tokens] for head, tokens in enumerate(evicted)]
        largest = np.full((len(kept), max(map(len, evicted))), np.nan)
        for head, of_head in enumerate(each):
            largest[head, : len(of_head)] = [one.max() for one in of_head]
        if largest.size == 0:
            return keys, values
        merging = np.nanmean(largest, axis=0) >= np.nanmean(largest) - 1e-12
        merged = keys.copy(), values.copy()
        for head, of_head in enumerate(each):
            targets = np.array([kept[head][one.argmax()] for one in of_head], int)
            for target in np.unique(targets):
                which = np.flatnonzero((targets == target) & merging[: len(targets)])
                for before, after in zip((keys, values), merged, strict=True):
                    total = before[head, target] + largest[head, which] @ before[head, evicted[head][which]]
                    after[head, target] = total / (1 + len(which))
        return merged

    return dataclasses.replace(base, stored=stored)


def merged_similar(case: Case, base: Selection) -> Selection:
    """What another policy keeps; each evicted value is merged into the remaining token with the most similar key."""
    trace = case.trace
    threshold, fraction = float(case.parameters["similarity_threshold"]), Fraction(case.parameters["merge_fraction"])

    @functools.cache
    def merges(layer: int) -> dict[int, list[tuple[int, int, np.ndarray, np.ndarray]]]:
        """By query: KV head, the token that takes values, the evicted tokens and their cosines."""
        last, found = last_seen(case, base, trace.treated.index(layer)), {}
        for t in np.unique(last[last < trace.tokens]):
            for head, keys in enumerate(trace.layers[layer].k):
                evicted, remaining = np.flatnonzero(last[head] == t), np.flatnonzero(last[head, : t + 1] > t)
                if len(evicted) == 0 or len(remaining) == 0:
                    continue
                each = np.array([cosines(keys, token, remaining) for token in evicted])
                best, largest = remaining[each.argmax(axis=1)], each.max(axis=1)
                ranked = -np.sort(-np.where(largest >= threshold, largest, -np.inf))
                merging = (largest >= threshold) & (largest >= ranked[int(fraction * (len(evicted) - 1))])
                for target in np.unique(best[merging]):
                    which = merging & (best == target)
                    found.setdefault(int(t), []).append((head, int(target), evicted[which], largest[which]))
        return found

    def values_before(layer: int, queries: np.ndarray) -> np.ndarray:
        """[Hkv,E,T,d]; `queries` ascend."""
        values, states, steps = trace.layers[layer].v.copy(), [], sorted(merges(layer))
        for query in queries:
            while steps and steps[0] < query:
                before = values.copy()
                for head, target, evicted, cosine in merges(layer)[steps.pop(0)]:
                    lengths = np.linalg.norm(before[head], axis=1)
                    weights = cosine * lengths[evicted] / (lengths[evicted] + lengths[target] + 1e-6)
                    total = before[head, target] + weights @ before[head, evicted]
                    values[head, target] = total / (1 + weights.sum())
            states.append(values.copy())
        return np.stack(states, axis=1)

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return trace.layers[layer].k, values_before(layer, np.array([trace.prompt]))[:, 0]

    changes = base.evicted_at is not None or base.seen is not None
    return dataclasses.replace(base, stored=stored, evolving=values_before if changes else None)


# ------------------------------------------------------------------------------------------------------- number formats


def rotation_size(hadamard: str, dimension: int, tensor: str) -> int:
    """Numbers that are rotated together; 1: none are."""
    if hadamard != "true":
        return 1 if hadamard == "false" else int(hadamard)
    block = dimension & -dimension  # the largest power of two that divides it
    return min(block, 64) if tensor == "v" else block


def in_format(case: Case, base: Selection, formats: dict[str, str]) -> Selection:
    """The kept tokens in number formats "NAME(KEY=VALUE,...)" of keys `k` and of values `v`, except the last `residual`
    ones and those of skipped layers."""
    trace, parameters, prompt = case.trace, case.parameters, case.trace.prompt
    residual = int(parameters.get("residual", "0"))
    skipped = pieces(unwrapped(parameters.get("skip_layers", "none").replace("none", "")))
    hadamard = parameters.get("hadamard", "false")

    def encoded(kept: np.ndarray, layer: int) -> np.ndarray:
        is_exact = str(trace.treated.index(layer)) in skipped
        return kept[: 0 if is_exact else max(0, len(kept) - residual)]

    def changed(layer: int, tensor: str) -> np.ndarray:
        exact = getattr(trace.layers[layer], tensor)
        name, values = call_of(formats[tensor])
        if name == "exact":
            return exact
        size = rotation_size(hadamard, exact.shape[2], tensor)
        turned = rotated(exact[:, :prompt].astype(np.float32), size)
        decoded_prompt = rotated(decoded(turned, name, **format_values(values)), size)
        result = exact.copy()
        for head, kept in enumerate(kept_by_head(case, base, layer)):
            result[head, encoded(kept, layer)] = decoded_prompt[head, encoded(kept, layer)]
        return result

    def stored_bytes(layer: int) -> float:
        heads = kept_by_head(case, base, layer)
        vectors = sum(len(encoded(kept, layer)) for kept in heads)
        total = 0.0
        for tensor in "kv":
            name, values = call_of(formats[tensor])
            d = getattr(trace.layers[layer], tensor).shape[2]
            total += 2 * d * (sum(map(len, heads)) - vectors)
            is_exact = name == "exact" or str(trace.treated.index(layer)) in skipped
            given = {key: value for key, value in format_values(values).items() if key != "seed"}
            total += 2 * d * vectors if is_exact else vectors_bytes(trace.kv_heads, vectors, d, name, **given)
        return total

    return dataclasses.replace(
        base, stored=lambda layer: (changed(layer, "k"), changed(layer, "v")), stored_bytes=stored_bytes
    )


def format_values(values: list[str]) -> dict[str, object]:
    """Of "KEY=VALUE" texts."""
    given = dict(value.split("=") for value in values)
    return {key: int(value) if value.isdigit() else value for key, value in given.items()}


def with_store(case: Case, base: Selection) -> Selection:
    """The selection of a policy with store=NAME; a parameter that the policy has too is its own."""
    name, values = call_of(case.parameters["store"])
    case = dataclasses.replace(case, parameters=DEFAULTS.get(name, {}) | case.parameters)
    if name in STORES:
        return STORES[name](case, base)
    if name == "kv":
        return in_format(case, base, dict(zip("kv", values, strict=True)))
    own = [f"{key}={value}" for key, value in case.parameters.items() if key in FORMAT_PARAMETERS.get(name, ())]
    text = f"{name}({','.join(own)})"
    return in_format(case, base, {"k": text, "v": text})


DEFAULTS = {
    "quantised": {"bits": "2", "group": "32", "residual": "128"},
    "fewer-channels": {"window": "32", "ratio": "0.4", "recent": "32"},
    "merged-values": {"merge": "32", "mode": "expected", "attention": "cumulative", "mean": "receivers", "seed": "0"},
    "merged-similar": {"similarity_threshold": "0", "merge_fraction": "1"},
    "turboquant": {"bits": "3"},
    "uniform": {"bits": "4"},
}
FORMAT_PARAMETERS = {
    "fp8_e4m3": {"scale"},
    "fp8_e5m2": {"scale"},
    "turboquant": {"bits", "form", "seed"},
    "uniform": {"bits"},
}
STORES = {
    "exact": lambda case, base: base,
    "cache": lambda case, base: dataclasses.replace(base, moved=True),
    "quantised": quantised_store,
    "fewer-channels": fewer_channels,
    "merged-values": merged_values,
    "merged-similar": merged_similar,
    "merged-tokens": merged_tokens,
}


# ------------------------------------------------------------------------------------------------------------ minicache


def minicache(case: Case) -> Selection:
    """Pairs of deeper layers share the directions of their keys and of their values, each with lengths of its own."""
    trace, prompt, n_layers = case.trace, case.trace.prompt, len(case.trace.treated)
    t, gap = float(case.parameters["t"]), Fraction(case.parameters["gap"])
    of_code = case.parameters["distance"] == "code"
    partners = {}
    for lower in range((n_layers + 1) // 2, n_layers - 1, 2):
        partners[lower], partners[lower + 1] = (lower, lower + 1), (lower, lower + 1)

    @functools.cache
    def merged(index: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The layer's tensor with shared directions [Hkv,T,d]; which tokens are merged [Hkv,P]."""
        layers = [trace.treated[layer] for layer in partners[index]]
        first, second = (getattr(trace.layers[layer], name)[:, :prompt] for layer in layers)
        whole = getattr(trace.layers[trace.treated[index]], name).copy()
        together = np.zeros((trace.kv_heads, prompt), bool)
        for head in range(trace.kv_heads):
            directed = first[head].any(axis=1) & second[head].any(axis=1)  # zero vectors have no direction to share
            angles = np.array([angle(a, b) for a, b in zip(first[head], second[head], strict=True)])
            angles[~directed] = 0
            if of_code:
                apart = rank(angles)[: int(gap * prompt)]
            else:
                least, most = (angles[directed].min(), angles[directed].max()) if directed.any() else (0, 0)
                apart = np.flatnonzero(angles > least + float(gap) * (most - least))
            merging = directed & (angles < math.pi - 1e-6)  # nor have opposite ones
            for token in np.setdiff1d(np.flatnonzero(merging), apart):
                direction = between(first[head, token], second[head, token], t)
                whole[head, token] = np.linalg.norm(whole[head, token]) * direction
                together[head, token] = True
        return whole, together

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        index = trace.treated.index(layer)
        if index not in partners:
            return trace.layers[layer].k, trace.layers[layer].v
        return merged(index, "k")[0], merged(index, "v")[0]

    def stored_bytes(layer: int) -> float:
        index, d = trace.treated.index(layer), trace.dimension
        numbers = 2 * trace.kv_heads * prompt * d
        if index in partners:
            shared = sum(int(merged(index, name)[1].sum()) for name in "kv")
            numbers += shared * (1 - Fraction(d, 2))
        return float(numbers * trace.number_bytes)

    return case.selection(everything_kept(case), NOTHING, [], stored=stored, stored_bytes=stored_bytes)


def angle(a: np.ndarray, b: np.ndarray) -> float:
    """Between two vectors, by one quotient: equal angles of whole numbers are equal."""
    along, squares = a @ b, (a @ a) * (b @ b)
    return math.acos(math.copysign(math.sqrt(min(1, along**2 / squares)), along)) if squares > 0 else math.pi / 2


def between(a: np.ndarray, b: np.ndarray, t: float) -> np.ndarray:
    """The direction a share t of the way along the arc from that of a to that of b."""
    omega, a, b = angle(a, b), a / np.linalg.norm(a), b / np.linalg.norm(b)
    if math.sin(omega) == 0:
        return a
    return (math.sin((1 - t) * omega) * a + math.sin(t * omega) * b) / math.sin(omega)


# ---------------------------------------------------------------------------------------------------------------- quest


def quest(case: Case) -> Selection:
    """The whole cache; each query reads the pages whose bounds promise it the most, in all but the first layers."""
    trace, prompt, size = case.trace, case.trace.prompt, case.number("page")
    dense = case.number("dense_layers")
    n_pages = -(-prompt // size)
    count = min(n_pages, max(case.number("least_pages"), case.budget // size))
    page_of = np.arange(prompt) // size

    def read(index: int, queries: np.ndarray) -> np.ndarray:
        """[Hq,E,T]: which tokens the queries at these positions read."""
        layer, position = trace.treated[index], np.arange(trace.tokens)
        seen = np.broadcast_to(position <= queries[:, None], (trace.query_heads, len(queries), trace.tokens)).copy()
        if index < dense:
            return seen
        for head, rows in enumerate(rows_of(trace, layer, queries)):
            keys = trace.layers[layer].k[head * trace.kv_heads // trace.query_heads, :prompt]
            least = np.array([keys[page_of == page].min(axis=0) for page in range(n_pages)])
            most = np.array([keys[page_of == page].max(axis=0) for page in range(n_pages)])
            for e, q in enumerate(rows):
                begun = np.arange(n_pages) * size <= queries[e]
                bounds = np.maximum(q * least, q * most).sum(axis=1)
                best = rank(np.where(begun, bounds, -np.inf))[:count]
                seen[head, e, :prompt] &= np.isin(page_of, best)
        return seen | (position == queries[:, None])

    def stored_bytes(layer: int) -> float:
        bounds = 0 if trace.treated.index(layer) < dense else n_pages
        return float(2 * trace.kv_heads * trace.dimension * trace.number_bytes * (prompt + bounds))

    unread = len(trace.treated) if case.budget >= prompt else dense
    others = {"read": read, "dense_layers": unread, "stored_bytes": stored_bytes}
    return case.selection(everything_kept(case), NOTHING, [], **others)
