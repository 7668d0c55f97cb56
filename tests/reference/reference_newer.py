"""CAOTE, LAVa and DefensiveKV, from the papers' equations and the choices in docs/readings.md."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from reference import (
    aggregate,
    apportion,
    attention,
    cumulative_attention,
    norms,
    pool,
    protection,
    window_attention,
)
from reference_geometry import prompt_values
from reference_once import beside_window, free_and_room, observation_window
from reference_selection import Case, Decision, Selection, Verdict, best_beside, only, ranked, tokens_of


def caote(case: Case) -> Selection:
    """What the attention output would change without a token (Goel et al. 2025, arXiv:2504.14051, eq. 6)."""
    trace, parameters = case.trace, case.parameters
    of_window = parameters["base"] == "window"
    recent = observation_window(case) if of_window else tokens_of("0.5", case.budget)
    fixed = case.fixed(case.sinks, min(recent, trace.prompt))

    def scores(layer: int) -> np.ndarray:
        seen = (
            window_attention(trace, layer, observation_window(case), case.window_end)
            if of_window
            else cumulative_attention(trace, layer)
        )
        change = change_of_output(seen, prompt_values(trace, layer))
        return aggregate(change, case.heads, parameters["agg"], trace.kv_heads)

    return best_beside(case, fixed, scores)


def change_of_output(seen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[Hq,n] by the attention [Hq,n] to tokens with these values [Hkv,n,d]: what the output loses without each."""
    share = seen / seen.sum(axis=1, keepdims=True)
    values = np.repeat(values, len(seen) // len(values), axis=0)
    outputs = np.einsum("hj,hjd->hd", share, values)
    apart = np.linalg.norm(outputs[:, None] - values, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a token with all of the attention is all of the output
        return np.where(share < 1, share / (1 - share) * apart, np.inf)


def lava(case: Case) -> Selection:
    """SnapKV's attention by the head's largest value; layers by entropy, heads by rank (Shen et al. 2025,
    arXiv:2509.09754, eqs. 6 to 9)."""
    trace, parameters = case.trace, case.parameters
    window, n_rows, n_layers = observation_window(case), case.row_count, len(trace.treated)
    protected = sinks, recent = beside_window(case)
    fixed = protection(*protected, case.budget, trace.prompt)
    free, room = free_and_room(case)
    scores = []
    for layer in trace.treated:
        largest = norms(prompt_values(trace, layer), 1).max(axis=1)
        seen = window_attention(trace, layer, window, case.window_end)[:, sinks : trace.prompt - recent]
        seen = seen * np.repeat(largest, trace.query_heads // trace.kv_heads)[:, None]
        grouped = aggregate(seen, case.heads, parameters["agg"], trace.kv_heads)
        scores.append(np.pad(pool(grouped, case.number("kernel"), parameters["pool"]), ((0, 0), protected)))
    weights = [entropy(one[:, sinks : trace.prompt - recent]) for one in scores]
    slots = apportion(n_layers * n_rows * free, weights, [0] * n_layers, [n_rows * room] * n_layers)
    share = Fraction(parameters["floor"]).limit_denominator(1000)
    return floored(case, scores, slots, share, fixed)


def floored(case: Case, scores: list[np.ndarray], slots: list[int], share: Fraction, fixed: np.ndarray) -> Selection:
    """Each head has (1 - share) of its entries among the best of its layer and a share of the mean, divided among all
    heads of all layers at once; it keeps its own best."""
    trace, n_rows = case.trace, case.row_count
    candidates = np.setdiff1d(np.arange(trace.prompt), fixed)
    free = max(0, case.budget - len(fixed))
    among_best: list[int] = []
    for of_layer, count in zip(scores, slots, strict=True):
        order = np.argsort(-of_layer[:, candidates].ravel(), kind="stable")[:count]
        among_best += np.bincount(order // len(candidates), minlength=n_rows).tolist()
    shares = [(1 - share) * count + share * free for count in among_best]
    counts = apportion(len(shares) * free, shares, [0] * len(shares), [len(candidates)] * len(shares))
    decisions = []
    if case.follow:
        theirs = [len(row) - len(fixed) for layer in case.follow.rows for row in layer]
        near = sum(theirs) == sum(counts) and max(abs(a - b) for a, b in zip(theirs, counts, strict=True)) <= 1
        verdict = Verdict.EQUAL if theirs == counts else Verdict.NEAR if near else Verdict.WRONG
        decisions.append(Decision(f"slots of heads {counts}, found {theirs}", lambda _: verdict))
        counts = theirs
    rows: list[list[np.ndarray]] = []
    for index, of_layer in enumerate(scores):
        rows.append([])
        for row in range(n_rows):
            place = (index, row)
            [kept], decision = ranked(
                [place], only(of_layer[row], candidates)[None], counts[index * n_rows + row], fixed
            )
            rows[-1].append(kept)
            decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def entropy(scores: np.ndarray) -> float:
    """Of the scores as shares of their sum, 1 where all are equal."""
    if scores.size < 2 or scores.sum() == 0:
        return 0.0
    shares = scores[scores > 0] / scores.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum() / np.log(scores.size)))


def defensive_kv(case: Case) -> Selection:
    """The most that any query of the window and of the group pays, and at least the mean of that (Feng et al. 2025,
    arXiv:2510.13334, algorithm 2)."""
    trace, parameters = case.trace, case.parameters
    window = observation_window(case)
    protected = sinks, recent = beside_window(case)
    fixed = protection(*protected, case.budget, trace.prompt)
    free, room = free_and_room(case)
    scores = []
    for layer in trace.treated:
        rows = attention(trace, layer, np.arange(case.window_end - window, case.window_end))
        rows = rows[:, :, sinks : trace.prompt - recent]
        smooth = np.stack([pool(rows[:, t], case.number("kernel"), parameters["pool"]) for t in range(window)], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            smooth = np.nan_to_num(smooth / smooth.sum(axis=2, keepdims=True) * rows.sum(axis=2, keepdims=True))
        risk = aggregate(smooth.max(axis=1), case.heads, parameters["agg"], trace.kv_heads)
        if room:
            risk = np.maximum(risk, risk.mean(axis=1, keepdims=True))
        scores.append(np.pad(risk, ((0, 0), protected)))
    return shared_by_heads(case, scores, [free * case.row_count] * len(scores), fixed)


def shared_by_heads(case: Case, scores: list[np.ndarray], slots: list[int], fixed: np.ndarray) -> Selection:
    """In each layer its number of best entries, whichever head they are of, beside what stays in every head."""
    candidates = np.setdiff1d(np.arange(case.trace.prompt), fixed)
    rows, decisions = [], []
    for index, of_layer in enumerate(scores):
        places = [(index, row) for row in range(len(of_layer))]
        kept, decision = ranked(places, only(of_layer, candidates), slots[index], fixed)
        rows.append(kept)
        decisions.append(decision)
    return case.selection(rows, fixed, decisions)
