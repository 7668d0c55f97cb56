"""Policies that choose once or at every token by attention, seen or foreseen, each layer by itself."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
from reference import (
    Trace,
    aggregate,
    attention,
    cumulative_attention,
    logits,
    norms,
    protection,
    rotate,
    rows_of,
    softmax,
    top,
    unrotated,
    window_attention,
)
from reference_geometry import prompt_keys, prompt_values, uniform_number
from reference_once import window_scores
from reference_schedules import Residents, budget_after, guarded_among, lowest_goes, scheduled
from reference_selection import (
    TOLERANCE,
    Case,
    Decision,
    Selection,
    Verdict,
    best_beside,
    decided,
    found,
    only,
    ranked,
    ranked_once,
    tokens_of,
)

# ------------------------------------------------------------------------------------------------------- seen attention


def tova(case: Case) -> Selection:
    """What the last token attends to: at the end of the prompt, or after every token."""
    trace, budget = case.trace, case.budget
    last = 1 if case.parameters["protect_last"] == "true" else 0
    fixed_at_end = case.fixed(case.sinks, last)
    if case.parameters["schedule"] == "once":
        return best_beside(
            case,
            fixed_at_end,
            lambda layer: window_attention(trace, layer, 1, case.window_end).mean(axis=0, keepdims=True),
        )
    layers, decisions = [], []
    grow, once = (case.parameters.get(name) == value for name, value in (("grow", "true"), ("prefill", "once")))
    for index, layer in enumerate(trace.treated):
        residents = Residents(case, index)
        layers.append(residents)
        z, _ = logits(trace, layer, np.arange(trace.tokens))
        for t in range(trace.prompt - 1 if once else 0, trace.tokens):
            later = max(0, t - trace.prompt + 1) * grow
            there, budget = residents.at(0, t), budget_after(case, t + 1 - later)
            if len(there) <= budget + later:
                continue
            sinks, recent = guarded_among(case, there, last, budget)
            scores = np.full(trace.tokens, np.inf)
            scores[there] = softmax(z[:, t, there], np.ones(len(there), bool)).mean(axis=0)
            others = there[sinks : len(there) - recent]
            fixed, where = np.setdiff1d(there, others), f"treated layer {index} query {t}"
            if once and t == trace.prompt - 1:
                scores, theirs = only(scores, others), residents.theirs(0, t)
                kept, verdict = ranked_once(scores, budget - len(fixed), fixed, theirs)
                residents.keep(0, t, kept)
                decisions.append(found(where, verdict))
                continue
            scores[fixed] = np.inf
            decisions.append(found(where, lowest_goes(residents, scores[None], t)))
    return scheduled(case, layers, decisions, fixed=fixed_at_end)


def observed_attention(case: Case) -> Selection:
    """Cumulative attention over the number of queries that could see the token."""
    trace = case.trace
    seen_by = trace.prompt - np.arange(trace.prompt)

    def scores(layer: int) -> np.ndarray:
        return (
            aggregate(cumulative_attention(trace, layer), case.heads, case.parameters["agg"], trace.kv_heads) / seen_by
        )

    return best_beside(case, case.fixed(case.sinks, 0), scores)


def vatp(case: Case) -> Selection:
    """Another policy's attention times the L1 norm of the value."""
    trace, parameters = case.trace, case.parameters
    of_h2o = parameters["base"] == "h2o"
    recent = {True: "0.5", False: "10"}[of_h2o] if parameters["recent"] == "auto" else parameters["recent"]
    recent = min(tokens_of(recent, case.budget), trace.prompt)
    fixed = case.fixed(case.number("sinks"), recent)

    def scores(layer: int) -> np.ndarray:
        observed = window_attention(trace, layer, trace.prompt if of_h2o else case.number("history"), case.window_end)
        return aggregate(observed, "kv", "mean", trace.kv_heads) * norms(prompt_values(trace, layer), 1)

    return best_beside(case, fixed, scores)


def scissorhands(case: Case) -> Selection:
    """The recent tokens, and those that recent queries attended to more than evenly most often."""
    trace, parameters = case.trace, case.parameters
    prompt, agg = trace.prompt, parameters["agg"]
    recent = min(tokens_of(parameters["recent"], case.budget), case.budget)
    sinks, recent = case.guarded(case.sinks, recent)
    fixed = protection(sinks, recent, case.budget, prompt)
    queries = np.arange(max(0, case.window_end - case.number("history")), case.window_end)

    def rows_of_layer(observed: np.ndarray) -> np.ndarray:
        return aggregate(observed[:, : prompt - recent], case.heads, agg, trace.kv_heads)

    if parameters["binary"] == "false":
        padded = ((0, 0), (0, recent))
        return best_beside(
            case,
            fixed,
            lambda layer: np.pad(rows_of_layer(window_attention(trace, layer, len(queries), case.window_end)), padded),
        )
    rows: list[list[np.ndarray]] = []
    decisions = []
    for index, layer in enumerate(trace.treated):
        weights = attention(trace, layer, queries)[:, :, :prompt]
        even = ((1 + 1e-6) / (queries + 1))[:, None]
        sums = rows_of_layer(weights.sum(axis=1))
        counts, least, most = (
            rows_of_layer((weights > even * factor).sum(axis=1)) for factor in (1, 1 + TOLERANCE, 1 - TOLERANCE)
        )
        rows.append([])
        for row in range(len(sums)):
            order = np.lexsort((np.arange(prompt - recent), -sums[row], -counts[row]))
            order = order[order >= sinks]
            kept = np.union1d(fixed, order[: case.budget - len(fixed)])
            agrees = as_often(order, case.budget - len(fixed), fixed, (least[row], most[row]), sums[row])
            rows[-1].append(kept)
            decisions.append(decided([(index, row)], [kept], agrees))
    return case.selection(rows, fixed, decisions)


def as_often(
    order: np.ndarray, count: int, fixed: np.ndarray, bounds: tuple[np.ndarray, np.ndarray], sums: np.ndarray
) -> Callable[[list[np.ndarray]], bool]:
    """Agreement where tokens change places with the last one taken that may count as often, and then weigh as much."""
    least, most = bounds

    def agrees(theirs: list[np.ndarray]) -> bool:
        if not np.isin(fixed, theirs[0]).all() or len(theirs[0]) != len(fixed) + count:
            return False
        cut = order[count - 1] if count else 0
        for token in np.setxor1d(np.setdiff1d(theirs[0], fixed), order[:count]).astype(int):
            sure = least[token] == most[token] and least[cut] == most[cut]
            if most[token] < least[cut] or least[token] > most[cut]:
                return False
            if sure and (abs(sums[token] - sums[cut]) > TOLERANCE * sums[cut]):
                return False
        return True

    return agrees


def nacl(case: Case) -> Selection:
    """The proxy tokens at the prompt's end, what they attend to, and some of the rest by chance."""
    trace, parameters = case.trace, case.parameters
    asked = trace.question_tokens if parameters["question"] == "auto" else 0
    proxies = min(asked or case.number("question_tokens"), trace.prompt)
    fixed = case.fixed(case.sinks, proxies)
    observing = min(proxies, case.budget - (0 if "protect" in parameters else min(case.sinks, case.budget)))
    free = case.budget - len(fixed)
    by_chance = int(Fraction(parameters["random"]) * free)
    temperature, seed = float(parameters["temperature"]), case.number("seed")
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        paid = aggregate(
            window_attention(trace, layer, max(1, observing)), case.heads, parameters.get("agg", "mean"), trace.kv_heads
        )
        rows.append([])
        for row, scores in enumerate(paid):
            u = uniform_number(seed, layer, row, np.arange(trace.prompt))
            drawn = scores / temperature - np.log(-np.log(u))
            [chosen], first = ranked([(index, row)], only(scores, candidates)[None], free - by_chance, fixed)
            known = followed(case, (index, row), scores, free - by_chance, fixed, chosen)
            others = np.setdiff1d(candidates, known)
            [kept], second = ranked([(index, row)], only(drawn, others)[None], by_chance, known)
            rows[-1].append(kept)
            decisions.append(both(first, second, (index, row), known, kept))
    return case.selection(rows, fixed, decisions)


def followed(
    case: Case, place: tuple[int, int], scores: np.ndarray, count: int, fixed: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """What the first of two choices of a row made: `chosen`, or the best of the whole row that is followed."""
    if case.follow is None:
        return chosen
    theirs = np.setdiff1d(case.follow.rows[place[0]][place[1]], fixed)
    return np.union1d(fixed, top(scores, count, theirs))


def both(first: Decision, second: Decision, place: tuple[int, int], known: np.ndarray, kept: np.ndarray) -> Decision:
    """Two choices of one row: the first made `known`, the second the whole row."""
    layer, row = place

    def agrees(theirs: list[np.ndarray]) -> bool:
        states = [Selection("kv", {layer: {row: now}}, [], []) for now in (known, theirs[0])]  # type: ignore[arg-type]
        return first.verdict(states[0]) < Verdict.WRONG and second.verdict(states[1]) < Verdict.WRONG

    return decided([place], [kept], agrees)


# --------------------------------------------------------------------------------------------------- foreseen attention


def expected_attention(case: Case) -> Selection:
    """The sinks, and what a normal distribution of future queries is expected to attend to, by its value's length."""
    trace, parameters = case.trace, case.parameters
    fixed = case.fixed(case.number("sinks"), 0)

    def scores(layer: int) -> np.ndarray:
        expected = expected_weights(case, layer)
        if parameters["vnorm"] == "true":
            lengths = np.repeat(norms(prompt_values(trace, layer), 2), trace.query_heads // trace.kv_heads, axis=0)
            expected = (expected + float(parameters["epsilon"])) * lengths
        grouped = aggregate(expected, case.heads, parameters["agg"], trace.kv_heads)
        return sinks_first(grouped, case.number("sinks"))

    return best_beside(case, fixed, scores)


def sinks_first(scores: np.ndarray, sinks: int) -> np.ndarray:
    """Scores [H,n] whose first columns, which are not scored, have the largest score of their row."""
    if sinks < scores.shape[1]:
        scores[:, :sinks] = scores[:, sinks:].max(axis=1, keepdims=True)
    return scores


def expected_weights(case: Case, layer: int) -> np.ndarray:
    """[Hq,P] for the prompt's keys and queries."""
    return expected_of_keys(case, layer, prompt_keys(case.trace, layer), case.trace.prompt, case.number("sinks"))


def expected_of_keys(case: Case, layer: int, keys: np.ndarray, seen: int, sinks: int) -> np.ndarray:
    """[Hq,n] for keys [Hkv,n,d] or [Hq,n,d], of which the first are sinks, when the queries [0,seen) have come: softmax
    over the other keys, 0 for the sinks."""
    trace, parameters, future = case.trace, case.parameters, case.number("future")
    result = np.zeros((trace.query_heads, keys.shape[1]))
    if sinks >= keys.shape[1]:
        return result
    asked = np.arange(case.number("sinks"), seen)
    queries = unrotated(trace, layer, rows_of(trace, layer, asked), asked)
    ahead = mean_rotation(trace, layer, seen, future)
    for head in range(trace.query_heads):
        mean = queries[head].mean(axis=0)
        scored = keys[head * len(keys) // trace.query_heads, sinks:]
        z = trace.scale * scored @ (ahead @ mean)
        if parameters["covariance"] == "true":
            centred = queries[head] - mean
            covariance = ahead @ (centred.T @ centred / len(asked)) @ ahead.T
            z += trace.scale**2 / 2 * ((scored @ covariance) * scored).sum(axis=1)
        result[head, sinks:] = softmax(z, np.ones(len(z), bool))
    return result


def mean_rotation(trace: Trace, layer: int, first: int, future: int) -> np.ndarray:
    """[d,d]: mean of attention_scaling R(t), attention_scaling R(t+1)… from `first` on, over so many positions."""
    d = trace.dimension
    moved = [rotate(trace, layer, np.eye(d), np.full(d, first + i)).T for i in range(future)]
    return trace.layers[layer].attention_scaling * np.mean(moved, axis=0)


def critical_kv(case: Case, name: str, base: Case) -> Selection:
    """A share of the budget by the score of a base policy, the rest by that score, as a mean over the queries whose
    attention it adds up, times what the value puts out."""
    trace, parameters = case.trace, case.parameters
    if name == "expected-attention":
        own = base.number("sinks"), 0
    elif name == "h2o":
        own = 0, tokens_of(base.parameters["recent"], case.budget)
    else:
        own = 0, base.number("window")
    protected = case.guarded(int(parameters.get("sinks", own[0])), own[1])
    fixed = protection(*protected, case.budget, trace.prompt)
    first = max(0, int(Fraction(parameters["first"]) * case.budget) - len(fixed))
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    for index, layer in enumerate(trace.treated):
        if name == "expected-attention":
            scores, queries = aggregate(expected_weights(base, layer), "kv", "mean", trace.kv_heads), 1
            scores = sinks_first(scores, base.number("sinks"))
        elif name == "h2o":
            scores = aggregate(cumulative_attention(trace, layer), "kv", base.parameters["agg"], trace.kv_heads)
            queries = trace.prompt
        else:
            scores = np.pad(window_scores(base, layer), ((0, 0), protected))
            queries = min(base.number("window"), base.window_end)
        weighted = (scores / queries + 1e-4) * output_norms(trace, layer, parameters["wo"])
        rows.append([])
        for row in range(trace.kv_heads):
            place = (index, row)
            [chosen], by_score = ranked([place], only(scores[row], candidates)[None], first, fixed)
            known = followed(case, place, scores[row], first, fixed, chosen)
            others = np.setdiff1d(candidates, known)
            count = case.budget - len(known)
            [kept], by_output = ranked([place], only(weighted[row], others)[None], count, known)
            rows[-1].append(kept)
            decisions.append(both(by_score, by_output, place, known, kept))
    return case.selection(rows, fixed, decisions)


def output_norms(trace: Trace, layer: int, wo: str) -> np.ndarray:
    """[Hkv,P]: L1 norm of what a value adds to the output of a query head, its group's mean; without Wo, of itself."""
    values = prompt_values(trace, layer)
    if wo == "none":
        return norms(values, 1)
    group, d = trace.query_heads // trace.kv_heads, trace.dimension
    projection = trace.layers[layer].wo
    result = np.zeros((trace.query_heads, trace.prompt))
    for head in range(trace.query_heads):
        result[head] = norms(values[head // group] @ projection[:, head * d : (head + 1) * d].T, 1)
    return result.reshape(trace.kv_heads, group, trace.prompt).mean(axis=1)
