"""Policies of 2024 to 2026 that choose once: R-KV, VaSE, CapKV, KVCrush, Keyformer, DMS as a threshold, LRU, LFU,
TriAttention, LaProx, KVzip and KVCompose."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from reference import (
    Trace,
    aggregate,
    attention,
    capped,
    chain,
    cumulative_attention,
    logits,
    norms,
    pool,
    rank,
    rows_of,
    softmax,
    unrotated,
    window_attention,
)
from reference_attention import both, followed, mean_rotation
from reference_geometry import prompt_keys, prompt_values, uniform_number, unlike_the_mean
from reference_once import observation_window
from reference_selection import (
    TOLERANCE,
    Case,
    Decision,
    Policy,
    Selection,
    Verdict,
    best_beside,
    decided,
    found,
    only,
    ranked,
    sets_agree,
    tokens_of,
    unwrapped,
)

DEFAULTS: dict[str, dict[str, str]] = {
    "r-kv": {"window": "8", "kernel": "7", "mix_lambda": "0.07", "threshold": "0.5"},
    "vase": {"window": "64", "large": "0.25", "kernel": "5", "sinks": "4", "temperature": "1", "seed": "0"},
    "cap-kv": {"tau": "5", "future": "512", "sinks": "4", "epsilon": "1e-6"},
    "kvcrush": {"window": "8", "page": "16", "ratio": "0.25", "anchor": "mean", "seed": "0", "heads": "kv"},
    "keyformer": {"recent": "0.3", "tau": "1", "gap": "false", "seed": "0"},
    "dms": {"recent": "128"},
    "lru": {"recent": "1"},
    "lfu": {"recent": "1"},
    "tri-attention": {"recent": "128", "heads": "kv", "agg": "max"},
    "laprox": {"window": "32", "kernel": "7"},
    "kvzip": {"sinks": "4", "heads": "kv", "agg": "max"},
    "kvcompose": {"heads": "kv", "agg": "mean"},
}


def by_group(trace: Trace, values: np.ndarray) -> np.ndarray:
    """[Hq,...] to [Hkv,g,...]."""
    return values.reshape(trace.kv_heads, -1, *values.shape[1:])


def window_over(case: Case, layer: int, columns: int, temperature: float = 1, maximum: bool = False) -> np.ndarray:
    """[Hq,w,n], or with the maximum of each group's logits [Hkv,w,n]: softmax of the observation window's queries over
    the first n tokens alone."""
    trace, end = case.trace, case.window_end
    z, visible = logits(trace, layer, np.arange(end - observation_window(case), end))
    z = z[..., :columns] / temperature
    if maximum:
        z = by_group(trace, z).max(axis=1)
    return softmax(z, visible[:, :columns]) if columns else z


def to_prompt(case: Case, scores: np.ndarray) -> np.ndarray:
    """[H,n] to [H,P], zeros behind."""
    return np.pad(scores, ((0, 0), (0, case.trace.prompt - scores.shape[1])))


# ---------------------------------------------------------------------------------------------------------------- r-kv


def r_kv(case: Case) -> Selection:
    """The window, and tokens that it attends to and whose keys are unlike the others (arXiv 2505.24133)."""
    share, threshold = float(case.parameters["mix_lambda"]), float(case.parameters["threshold"])
    window = observation_window(case)
    _, recent = case.guarded(case.sinks, window)
    columns = case.trace.prompt - recent

    def scores(layer: int) -> np.ndarray:
        paid = window_over(case, layer, columns, maximum=True).mean(axis=1)
        paid = pool(paid, case.number("kernel"), "max")
        alike = np.array([redundancy(keys, threshold) for keys in prompt_keys(case.trace, layer)])
        return to_prompt(case, share * paid - (1 - share) * alike[:, :columns])

    return best_beside(case, case.fixed(case.sinks, window), scores)


def redundancy(keys: np.ndarray, threshold: float) -> np.ndarray:
    """[n], sum 1: softmax of each key's mean cosine with all keys, itself and some others counted as 0: in each row the
    last key above the threshold, or the first key of all if there is none."""
    unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + 1e-8)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, 0)
    for row in cosines:
        above = np.flatnonzero(row > threshold)
        row[above[-1] if len(above) else 0] = 0
    return softmax(cosines.mean(axis=0), np.ones(len(keys), bool))


# ---------------------------------------------------------------------------------------------------------------- vase


def vase(case: Case) -> Selection:
    """The tokens whose values have the largest range, and a sample of the others in proportion to the window's
    attention (arXiv 2606.03928)."""
    trace, parameters = case.trace, case.parameters
    window = observation_window(case)
    sinks, recent = case.guarded(case.number("sinks"), window)
    fixed = case.fixed(case.number("sinks"), window)
    free = case.budget - len(fixed)
    n_large = min(free, max(0, int(Fraction(parameters["large"]) * case.budget) - sinks))
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        paid = window_over(case, layer, trace.prompt - recent, float(parameters["temperature"])).mean(axis=1)
        paid = to_prompt(case, by_group(trace, pool(paid, case.number("kernel"), "avg")).mean(axis=1))
        values = prompt_values(trace, layer)
        ranges = values.max(axis=-1) - values.min(axis=-1)
        rows.append([])
        for row in range(trace.kv_heads):
            place = (index, row)
            [large], first = ranked([place], only(ranges[row], candidates)[None], n_large, fixed)
            known = followed(case, place, ranges[row], n_large, fixed, large)
            others = np.setdiff1d(candidates, known)
            keys = sample_keys(paid[row], case.number("seed"), layer, row)
            [kept], second = ranked([place], only(keys, others)[None], case.budget - len(known), known)
            rows[-1].append(kept)
            decisions.append(both(first, second, place, known, kept))
    return case.selection(rows, fixed, decisions)


def sample_keys(weights: np.ndarray, seed: int, layer: int, head: int) -> np.ndarray:
    """The largest are a sample without replacement in proportion to the weights [n]; weights of 0 come last."""
    u = uniform_number(seed, layer, head, np.arange(len(weights)))
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(weights) - np.log(-np.log(u)), -1e300)


# -------------------------------------------------------------------------------------------------------------- cap-kv


def cap_kv(case: Case) -> Selection:
    """Leverage of values, weighted by the direction of the key towards the expected query (arXiv 2604.25975)."""
    own = case.number("sinks")
    sinks, _ = case.guarded(own, 0)

    def scores(layer: int) -> np.ndarray:
        return aggregate(capacity(case, layer, sinks), "kv", "mean", case.trace.kv_heads)

    return best_beside(case, case.fixed(own, 0), scores)


def capacity(case: Case, layer: int, sinks: int) -> np.ndarray:
    """[Hq,P], 0 for the sinks."""
    keys, values = (of_prompt(case.trace, layer)[:, sinks:] for of_prompt in (prompt_keys, prompt_values))
    return np.pad(capacity_of(case, layer, keys, values, case.trace.prompt), ((0, 0), (sinks, 0)))


def capacity_of(case: Case, layer: int, keys: np.ndarray, values: np.ndarray, seen: int) -> np.ndarray:
    """[Hq,n] of keys and values [H,n,d], when the queries [0,seen) have come."""
    trace, tau, epsilon = case.trace, float(case.parameters["tau"]), float(case.parameters["epsilon"])
    asked = np.arange(case.number("sinks"), seen)
    result = np.zeros((trace.query_heads, keys.shape[1]))
    if len(asked) == 0 or result.size == 0:
        return result
    queries = unrotated(trace, layer, rows_of(trace, layer, asked), asked).mean(axis=1)
    ahead = mean_rotation(trace, layer, seen, case.number("future"))
    for head, query in enumerate(queries @ ahead.T):
        row = head * len(keys) // trace.query_heads
        lengths = np.maximum(np.linalg.norm(keys[row], axis=1), 1e-12) * max(np.linalg.norm(query), 1e-12)
        towards = tau * (keys[row] @ query / lengths).clip(-1, 1)
        weights = np.exp(towards - towards.max())
        gram = np.eye(trace.dimension) + (values[row] * (weights + epsilon)[:, None]).T @ values[row]
        result[head] = weights * (values[row] * np.linalg.solve(gram, values[row].T).T).sum(axis=1)
    return result


# ------------------------------------------------------------------------------------------------------------- kvcrush


def kvcrush(case: Case) -> Selection:
    """Pages of the greatest attention, and for a share of the slots pages that represent the others: evenly spaced in
    their order by the distance of their signatures to an anchor (arXiv 2503.00022)."""
    trace, size = case.trace, case.number("page")
    window = observation_window(case)
    sinks, recent = case.guarded(case.sinks, window)
    fixed = case.fixed(case.sinks, window)
    free = case.budget - len(fixed)
    n_crushed = int(Fraction(case.parameters["ratio"]) * free / size)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        scores = aggregate(window_attention(trace, layer, window, case.window_end), case.heads, "mean", trace.kv_heads)
        scores = scores[:, sinks : trace.prompt - recent]
        distances = signature_distances(scores, size, case.parameters["anchor"], case.number("seed"), layer)
        rows.append([])
        for row, of_row in enumerate(scores):
            chosen = sinks + crushed(of_row, size, free, n_crushed, distances)
            kept = np.union1d(fixed, chosen)
            rows[-1].append(kept)
            decisions.append(decided([(index, row)], [kept], equal_sums(of_row, size)))
    return case.selection(rows, fixed, decisions)


def page_sums(scores: np.ndarray, size: int) -> np.ndarray:
    """Of [n]; the last page may be short."""
    return np.array([math.fsum(scores[begin : begin + size]) for begin in range(0, len(scores), size)])


def equal_sums(scores: np.ndarray, size: int) -> Callable[[list[np.ndarray]], bool]:
    """Whether two pages are so nearly equal that another order of them is as good."""
    sums = np.sort(page_sums(scores, size))
    near = bool(len(sums) > 1 and (np.diff(sums) <= TOLERANCE * np.abs(sums[1:])).any())
    return lambda theirs: near


def signature_distances(scores: np.ndarray, size: int, anchor: str, seed: int, layer: int) -> np.ndarray:
    """Of each whole page: in how many bits its signature differs from the anchor. A signature has for each token and
    row of `scores` [H,n] a bit, whether the token is among the better half of the row."""
    n_rows, n = scores.shape
    better = np.zeros((n, n_rows), bool)
    for row in range(n_rows):
        better[rank(scores[row])[: n // 2], row] = True
    whole = n // size
    signatures = better[: whole * size].reshape(whole, size * n_rows)
    bits = np.arange(size * n_rows)
    anchors = {
        "mean": signatures.mean(axis=0) > 0.5 if whole else bits > 0,
        "zeros": bits < 0,
        "ones": bits >= 0,
        "alternating": bits % 2 == 1,
        "random": chain(seed, layer, bits) % np.uint64(2) == 1,
    }
    return (signatures != anchors[anchor]).sum(axis=1)


def crushed(scores: np.ndarray, size: int, free: int, n_crushed: int, distances: np.ndarray) -> np.ndarray:
    """`free` of the tokens with these scores [n]: pages by their sums, representatives, then again pages."""
    order = rank(page_sums(scores, size))
    taken = np.zeros(len(scores), bool)

    def take(slots: int) -> None:
        for page in order:
            tokens = np.arange(page * size, min((page + 1) * size, len(scores)))
            tokens = tokens[~taken[tokens]][: max(0, slots - taken.sum())]
            taken[tokens] = True

    take(free - n_crushed * size)
    rest = [page for page in range(len(distances)) if not taken[page * size : (page + 1) * size].any()]
    rest.sort(key=lambda page: (distances[page], page))
    step = max(1, len(rest) // n_crushed) if n_crushed else 1
    for page in rest[: step * n_crushed : step]:
        taken[page * size : (page + 1) * size] = True
    take(free)
    return np.flatnonzero(taken)


# ----------------------------------------------------------------------------------------------------------- keyformer


def keyformer(case: Case) -> Selection:
    """Cumulative softmax of the logits with Gumbel noise (arXiv 2403.09054); with gap=true as its code, in which the
    token before the recent part neither is recent nor competes."""
    trace, parameters = case.trace, case.parameters
    gap = int(parameters["gap"] == "true" and case.budget < trace.prompt)
    recent = tokens_of(parameters["recent"], case.budget)
    fixed = case.fixed(case.sinks, max(0, recent - gap))
    candidates = np.setdiff1d(np.arange(trace.prompt - recent if gap else trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        noisy = gumbel_attention(trace, layer, float(parameters["tau"]), case.number("seed"))
        rows.append([])
        for row, scores in enumerate(aggregate(noisy, "kv", "mean", trace.kv_heads)):
            count = case.budget - len(fixed) - gap
            [kept], decision = ranked([(index, row)], only(scores, candidates)[None], count, fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def gumbel_attention(trace: Trace, layer: int, tau: float, seed: int) -> np.ndarray:
    """[Hq,P]: sums over the prompt's queries."""
    z, visible = logits(trace, layer, np.arange(trace.prompt))
    head, t, j = np.indices((trace.query_heads, trace.prompt, trace.prompt))
    prompt = slice(0, trace.prompt)
    return softmax((z[..., prompt] + gumbel(seed, layer, head, t, j)) / tau, visible[:, prompt]).sum(axis=1)


def gumbel(*numbers: object) -> np.ndarray:
    """Noise of query t of a query head at token j: seed, layer, head, t, j."""
    return -np.log(-np.log(uniform_number(*numbers)))


# ----------------------------------------------------------------------------------------------------------------- dms


def plain_scores(case: Case, layer: int) -> np.ndarray:
    """[Hkv,P] of the policy that is named as base."""
    trace, policy = case.trace, Policy.parse(unwrapped(case.parameters["base"]))
    if policy.name == "knorm":
        return -norms(prompt_keys(trace, layer), 2)
    if policy.name == "value-norm":
        return norms(prompt_values(trace, layer), float(dict(policy.given).get("p", "2")))
    if policy.name == "keydiff":
        return np.array([unlike_the_mean(keys) for keys in prompt_keys(trace, layer)])
    if policy.name == "observed-attention":
        paid = aggregate(cumulative_attention(trace, layer), "kv", "mean", trace.kv_heads)
        return paid / (trace.prompt - np.arange(trace.prompt))
    raise ValueError(f"dms: base: no reference for {policy.name}")


def dms(case: Case) -> Selection:
    """The recent tokens, and those whose score is not below a threshold (after arXiv 2506.05345)."""
    threshold = float(case.parameters["threshold"])
    first = case.trace.prompt - min(case.number("recent"), case.trace.prompt)
    recent = np.arange(first, case.trace.prompt)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(case.trace.treated):
        rows.append([])
        for row, scores in enumerate(plain_scores(case, layer)):
            kept = np.concatenate([np.flatnonzero(scores[:first] >= threshold), recent])
            rows[-1].append(kept)
            decisions.append(decided([(index, row)], [kept], at_threshold(kept, scores, threshold)))
    return case.selection(rows, recent, decisions)


def at_threshold(kept: np.ndarray, scores: np.ndarray, threshold: float) -> Callable[[list[np.ndarray]], bool]:
    """Agreement if the sets differ only in tokens whose score is as good as the threshold."""

    def agrees(theirs: list[np.ndarray]) -> bool:
        different = np.setxor1d(kept, theirs[0])
        return bool((np.abs(scores[different] - threshold) <= TOLERANCE * abs(threshold)).all())

    return agrees


# ------------------------------------------------------------------------------------------------------------ lru, lfu


def uses(trace: Trace, layer: int, factors: tuple[float, ...] = (1.0,)) -> list[np.ndarray]:
    """[Hkv,P,P] for each factor: whether query t uses token j < t: attends to it, in the group's mean, by more than so
    many times the even share."""
    queries = np.arange(trace.prompt)
    paid = by_group(trace, attention(trace, layer, queries)[..., : trace.prompt]).mean(axis=1)
    even = ((1 + 1e-6) / (queries + 1))[:, None]
    return [(paid > factor * even) & (queries < queries[:, None]) for factor in factors]


def last_use(used: np.ndarray) -> np.ndarray:
    """[Hkv,P]: the last query that used a token, or the token itself."""
    position = np.arange(used.shape[1])
    return np.where(used, position[:, None], position).max(axis=1)


def by_use(case: Case, by_count: bool) -> Selection:
    """The newest token, and those that were used last, or most often and of these those that were used last."""
    trace = case.trace
    fixed = case.fixed(case.sinks, case.number("recent"))
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        used, surely, perhaps = uses(trace, layer, (1, 1 + TOLERANCE, 1 - TOLERANCE))
        unsure = (surely != perhaps).any(axis=1)
        rows.append([])
        for row, (count, last) in enumerate(zip(used.sum(axis=1), last_use(used), strict=True)):
            order = np.lexsort((np.arange(trace.prompt), -last, -count * by_count))
            order = order[np.isin(order, candidates)]
            kept = np.union1d(fixed, order[: case.budget - len(fixed)])
            rows[-1].append(kept)
            decisions.append(decided([(index, row)], [kept], with_unsure(kept, unsure[row])))
    return case.selection(rows, fixed, decisions)


def with_unsure(kept: np.ndarray, unsure: np.ndarray) -> Callable[[list[np.ndarray]], bool]:
    """Agreement if a token in which the sets differ has a use that rounding decides."""
    return lambda theirs: bool(unsure[np.setxor1d(kept, theirs[0])].any())


def lru(case: Case) -> Selection:
    """Least recently used tokens are evicted."""
    return by_use(case, by_count=False)


def lfu(case: Case) -> Selection:
    """Least frequently used tokens are evicted."""
    return by_use(case, by_count=True)


# ------------------------------------------------------------------------------------------------------- tri-attention

OFFSETS = 2.0 ** np.arange(17)


def tri_attention(case: Case) -> Selection:
    """Keys by the attention that the mean query pays to them at later positions (arXiv 2604.04921)."""
    trace, over = case.trace, case.parameters.get("over_layers", "mean")
    fixed = case.fixed(case.sinks, case.number("recent"))
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    by_head = []
    for layer in trace.treated:
        scores = trigonometric(trace, layer)[:, candidates]
        spread = np.maximum(scores.std(axis=1, keepdims=True), 1e-6)
        standard = np.zeros((trace.query_heads, trace.prompt))
        standard[:, candidates] = (scores - scores.mean(axis=1, keepdims=True)) / spread
        by_head.append(standard)
    grouped = [aggregate(scores, case.heads, case.parameters["agg"], trace.kv_heads) for scores in by_head]
    if "share" in case.parameters:
        if over == "all-rows":
            together = np.repeat(np.max(grouped, axis=(0, 1))[None], case.row_count, axis=0)
        else:
            together = {"mean": np.mean, "max": np.max}[over](grouped, axis=0)
        return best_beside(case, fixed, lambda layer: together)
    return best_beside(case, fixed, lambda layer: grouped[trace.treated.index(layer)])


def pairs(trace: Trace, layer: int, vectors: np.ndarray) -> np.ndarray:
    """[...,d] to complex [...,r]: the components that RoPE turns together."""
    n = len(trace.layers[layer].inv_freq)
    if trace.interleaved:
        return vectors[..., 0 : 2 * n : 2] + 1j * vectors[..., 1 : 2 * n : 2]
    return vectors[..., :n] + 1j * vectors[..., n : 2 * n]


def trigonometric(trace: Trace, layer: int) -> np.ndarray:
    """[Hq,P] of the prompt's keys."""
    keys = prompt_keys(trace, layer)
    return trigonometric_of(trace, layer, keys, np.tile(np.arange(trace.prompt), (len(keys), 1)), trace.prompt)


def trigonometric_of(trace: Trace, layer: int, keys: np.ndarray, positions: np.ndarray, seen: int) -> np.ndarray:
    """[Hq,n] of keys [H,n,d] at these positions [H,n], when the queries [0,seen) have come; mean over the offsets:
    by the mean of the un-rotated queries, and by how much longer than it they are."""
    of_layer, asked = trace.layers[layer], np.arange(seen)
    queries = pairs(trace, layer, unrotated(trace, layer, rows_of(trace, layer, asked), asked))
    plain = np.array([unrotated(trace, layer, *row) for row in zip(keys, positions, strict=True)])
    copies = trace.query_heads // len(keys)
    keys = np.repeat(pairs(trace, layer, plain), copies, axis=0)
    positions = np.repeat(positions, copies, axis=0)
    mean, modulus = queries.mean(axis=1)[:, None], np.abs(queries).mean(axis=1)[:, None]
    phase = np.angle(mean * keys.conj())
    apart = seen - positions[..., None] + OFFSETS  # [Hq,n,17]
    turned = np.cos(apart[..., None] * of_layer.inv_freq + phase[:, :, None]).mean(axis=2)
    by_pair = np.abs(mean) * np.abs(keys) * turned + (modulus - np.abs(mean)) * np.abs(keys)
    return of_layer.attention_scaling**2 * by_pair.sum(axis=-1)


# -------------------------------------------------------------------------------------------------------------- laprox


def laprox(case: Case) -> Selection:
    """The 2-norm of the window's attention to a token times that of what its value puts out, as shares of the layer;
    all layers and heads compete (after arXiv 2605.07234)."""
    trace = case.trace
    window = observation_window(case)
    sinks, recent = case.guarded(case.sinks, window)
    fixed = case.fixed(case.sinks, window)
    candidates = np.arange(sinks, trace.prompt - recent)
    every = []
    for layer in trace.treated:
        asked = np.arange(case.window_end - window, case.window_end)
        columns = np.sqrt((attention(trace, layer, asked)[..., candidates] ** 2).sum(axis=1))
        smooth = pool(columns, case.number("kernel"), "avg")
        scores = by_group(trace, smooth * projected(trace, layer)[:, candidates]).mean(axis=1)
        every.append(np.full((trace.kv_heads, trace.prompt), -np.inf))
        every[-1][:, candidates] = scores / max(scores.sum(), 1e-12)
    places = [(layer, row) for layer in range(len(every)) for row in range(trace.kv_heads)]
    count = len(places) * (case.budget - len(fixed))
    kept, decision = ranked(places, np.concatenate(every), count, fixed)
    rows = [kept[first : first + trace.kv_heads] for first in range(0, len(kept), trace.kv_heads)]
    return case.selection(rows, fixed, [decision])


def projected(trace: Trace, layer: int) -> np.ndarray:
    """[Hq,P]: 2-norms of the values after the output projection of each query head."""
    group, d = trace.query_heads // trace.kv_heads, trace.dimension
    blocks = np.split(trace.layers[layer].wo, trace.query_heads, axis=1)
    values = np.repeat(prompt_values(trace, layer), group, axis=0)
    assert blocks[0].shape[1] == d
    return np.array([norms(of_head @ block.T, 2) for of_head, block in zip(values, blocks, strict=True)])


# ------------------------------------------------------------------------------------------------ kvzip and kvcompose


def largest_of_passes(
    trace: Trace, layer: int, reads: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """[Hq,P]: the greatest attention of a query of the passes, 0 for tokens of none. reads(first, end) of the tokens
    that a pass repeats: the prompt tokens in its softmax, and those of them that get scores."""
    of_layer, group = trace.layers[layer], trace.query_heads // trace.kv_heads
    assert of_layer.q_passes is not None and of_layer.k_passes is not None
    largest = np.zeros((trace.query_heads, trace.prompt))
    begin = 0
    for end, first, last in trace.passes:
        tokens, scored = reads(first, last)
        keys = np.concatenate([of_layer.k[:, tokens], of_layer.k_passes[:, begin:end]], axis=1)
        z = capped(trace, of_layer.q_passes[:, begin:end] @ np.repeat(keys, group, axis=0).transpose(0, 2, 1))
        visible = np.concatenate([np.ones((end - begin, len(tokens)), bool), np.tri(end - begin, dtype=bool)], axis=1)
        paid = softmax(z, visible)[:, :, np.flatnonzero(np.isin(tokens, scored))].max(axis=1)
        largest[:, scored] = np.maximum(largest[:, scored], paid)
        begin = end
    return largest


def ranked_everywhere(case: Case, scores: list[np.ndarray], fixed: np.ndarray) -> Selection:
    """All layers and rows compete: scores [L][H,P]."""
    candidates = np.setdiff1d(np.arange(case.trace.prompt), fixed)
    n_rows = case.row_count
    places = [(layer, row) for layer in range(len(scores)) for row in range(n_rows)]
    count = len(places) * (case.budget - len(fixed))
    kept, decision = ranked(places, only(np.concatenate(scores), candidates), count, fixed)
    return case.selection([kept[at : at + n_rows] for at in range(0, len(kept), n_rows)], fixed, [decision])


def kvzip(case: Case) -> Selection:
    """What the model attends to when it repeats the prompt (arXiv 2505.23416)."""
    trace = case.trace
    sinks, _ = case.guarded(case.number("sinks"), 0)

    def reads(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        repeated = np.arange(first, last)
        return np.concatenate([np.arange(min(sinks, first)), repeated]), repeated

    scores = [
        aggregate(largest_of_passes(trace, layer, reads), case.heads, case.parameters["agg"], trace.kv_heads)
        for layer in trace.treated
    ]
    return ranked_everywhere(case, scores, case.fixed(case.number("sinks"), 0))


def kvcompose(case: Case) -> Selection:
    """The same attention with the mean of all heads added to each; layers compete with the means of their heads' i-th
    best scores, so that all heads of a layer keep equally many tokens (arXiv 2509.05165)."""
    trace = case.trace
    every = np.arange(trace.prompt)
    fixed = case.fixed(case.sinks, 0)
    scores = [
        composed(largest_of_passes(trace, layer, lambda *_: (every, every)), case.heads, case.parameters["agg"], trace)
        for layer in trace.treated
    ]
    if case.parameters.get("allocate") == "ranked-global":
        return ranked_everywhere(case, scores, fixed)
    candidates = np.setdiff1d(every, fixed)
    curves = composite_curves([of_layer[:, candidates] for of_layer in scores]).ravel()
    ours = np.sort(rank(curves)[: len(scores) * (case.budget - len(fixed))])
    width = len(candidates)
    counts = np.bincount(ours // width, minlength=len(scores)).tolist() if width else [0] * len(scores)
    decisions = []
    if case.follow:
        theirs = [[len(row) - len(fixed) for row in layer] for layer in case.follow.rows]
        chosen = np.array([width * at + i for at, layer in enumerate(theirs) for i in range(layer[0])], int)
        near = all(len(set(layer)) == 1 for layer in theirs)
        near = near and sets_agree(ours, chosen, curves, curves[ours].min() if len(ours) else np.nan)
        counts_found = [layer[0] for layer in theirs]
        verdict = Verdict.EQUAL if near and counts_found == counts else Verdict.NEAR if near else Verdict.WRONG
        decisions.append(found(f"tokens of layers {counts}, found {theirs}", verdict))
        counts = counts_found
    selection = best_beside(case, fixed, dict(zip(trace.treated, scores, strict=True)).__getitem__,
                            [[count] * case.row_count for count in counts])  # fmt: skip
    selection.decisions[:0] = decisions
    return selection


def composed(largest: np.ndarray, heads: str, agg: str, trace: Trace) -> np.ndarray:
    """[H,P]: each row and the mean of all."""
    scores = aggregate(largest, heads, agg, trace.kv_heads)
    return scores + scores.mean(axis=0)


def composite_curves(scores: list[np.ndarray]) -> np.ndarray:
    """[L,n]: means over the heads [L][H,n] of the best scores, the second best and so on; of the first layer the
    largest of all layers."""
    curves = np.array([(-np.sort(-of_layer, axis=1)).mean(axis=0) for of_layer in scores])
    curves[0] = curves.max(axis=0)
    return curves


POLICIES = {
    "r-kv": r_kv,
    "vase": vase,
    "cap-kv": cap_kv,
    "kvcrush": kvcrush,
    "keyformer": keyformer,
    "lru": lru,
    "lfu": lfu,
    "tri-attention": tri_attention,
    "laprox": laprox,
    "kvzip": kvzip,
    "kvcompose": kvcompose,
}
WITHOUT_BUDGET = {"dms": dms}
