"""Policies that give layers different counts, or whose layers depend on each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from reference import Trace, apportion, logits, protection, rank, softmax
from reference_once import beside_window, free_and_room, window_scores, window_selection
from reference_selection import (
    TOLERANCE,
    Case,
    Decision,
    Selection,
    Verdict,
    exactly,
    only,
    ranked,
    row_count,
    tokens_of,
)

MOST_COUNTS = 2000  # counts across layers that near ties leave possible; beyond, they are not told apart


# ----------------------------------------------------------------------------------------------------------- pyramids


def pyramid_counts(n_layers: int, free: int, room: int, beta: int) -> list[int]:
    """Tokens beside the window, by layer: an arithmetic sequence from 2b - b/beta, at most `room`, down to b/beta."""
    if n_layers == 1:
        return [free]
    weights = [(2 * beta - 1) * (n_layers - 1) - 2 * layer * (beta - 1) for layer in range(n_layers)]
    if free * weights[0] > room * beta * (n_layers - 1):
        weights = [(n_layers - 1) * room - 2 * layer * (room - free) for layer in range(n_layers)]
    return apportion(n_layers * free, weights, [0] * n_layers, [room] * n_layers)


def pyramid_kv(case: Case) -> Selection:
    """SnapKV's tokens, more of them in shallow layers."""
    n_layers, (free, room) = len(case.trace.treated), free_and_room(case)
    if case.parameters["short_uniform"] == "true" and case.trace.prompt < 2 * free:
        return window_selection(case, [free] * n_layers, [])
    return window_selection(case, pyramid_counts(n_layers, free, room, case.number("beta")), [])


def decays(n_layers: int, r: float, kind: str) -> list[float]:
    """rho_l: what the next layer keeps of this one's relative size."""
    if kind == "cosine":
        return [r + (1 - r) * (1 + math.cos(math.pi * layer / n_layers)) / 2 for layer in range(n_layers)]
    if kind == "linear":
        return [r + (1 - r) * layer / n_layers for layer in range(n_layers)]
    return [r] * n_layers


def pyramid_infer(case: Case) -> Selection:
    """Each layer keeps some of what the layer before it kept, by the attention of the recent tokens to it."""
    trace, parameters = case.trace, case.parameters
    prompt, treated = trace.prompt, trace.treated
    natural = parameters["lengths"] == "natural"
    if natural:
        window = min(tokens_of(parameters["recent"], prompt) + 1, prompt)
        fixed = protection(case.number("sinks"), window, prompt, prompt)
    else:
        window = min(max(1, tokens_of(parameters["recent"], case.budget)), prompt)
        fixed = case.fixed(case.number("sinks"), window)
    rhos = decays(len(treated), float(parameters["r"]), parameters["decay"])
    room = prompt - len(fixed)
    if natural:
        counts = natural_counts(room, rhos)
    else:
        relative = [1.0]
        for rho in rhos[:-1]:
            relative.append(relative[-1] * rho)
        total = len(treated) * (case.budget - len(fixed))
        counts = apportion(total, relative, [0] * len(treated), [room] * len(treated))

    every = np.arange(prompt)
    rows: list[list[np.ndarray]] = []
    decisions: list[Decision] = []
    if natural:  # what a layer prunes is missing from the next one on
        rows.append([every])
        decisions.append(exactly((0, 0), every))
    while len(rows) < len(treated):
        index = len(rows)
        known = case.follow.rows if case.follow else rows
        previous = known[index - 1][0] if index else every
        scores = recency_weighted(case, treated[index - 1 if natural else index], window, previous)
        candidates = np.setdiff1d(previous, fixed)
        [kept], decision = ranked([(index, 0)], only(scores, candidates)[None], counts[index], fixed)
        rows.append([kept])
        decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def natural_counts(room: int, rhos: list[float]) -> list[int]:
    """Every token in the first layer, then a share of the layer before, unless 64 or fewer would remain."""
    counts = [room]
    for rho in rhos[:-1]:
        fewer = math.floor(counts[-1] * rho)
        counts.append(fewer if fewer > 64 else counts[-1])
    return counts


def recency_weighted(case: Case, layer: int, window: int, residents: np.ndarray) -> np.ndarray:
    """[P]: attention from the last `window` queries over the residents, later queries counting for more."""
    trace = case.trace
    z, visible = logits(trace, layer, np.arange(case.window_end - window, case.window_end))
    if case.parameters["over"] == "resident":
        visible = visible & np.isin(np.arange(trace.tokens), residents)
    weights = np.linspace(1, float(case.parameters["distance_weight"]), window)
    return (softmax(z, visible) * weights[:, None]).sum(axis=(0, 1))[: trace.prompt]


# ---------------------------------------------------------------------------------------------------------- dynamickv


def dynamic_kv(case: Case) -> Selection:
    """SnapKV's tokens, as many in a layer as it has of the best of all layers' scores."""
    trace = case.trace
    free, room = free_and_room(case)
    scores = [window_scores(case, layer) for layer in trace.treated]
    first = min(int(free * Fraction(case.parameters["r_max"])), room)
    choices = list(itertools.islice(buffer_sizes(case, scores, free, first), MOST_COUNTS))
    ours = choices[0]
    decisions = []
    if case.follow:
        kept = sum(beside_window(case))
        theirs = [[len(row) - kept for row in layer] for layer in case.follow.rows]
        counts = [layer[0] for layer in theirs]
        even = all(len(set(layer)) == 1 for layer in theirs)
        close = counts in choices or (len(choices) == MOST_COUNTS and sum(counts) == sum(ours))
        verdict = Verdict.EQUAL if counts == ours else Verdict.NEAR if close else Verdict.WRONG
        verdict = verdict if even else Verdict.WRONG
        decisions.append(Decision(f"counts: expected {ours}, found {theirs}", lambda theirs: verdict))
        ours = counts
    return window_selection(case, ours, decisions)


def buffer_sizes(
    case: Case, scores: list[np.ndarray], free: int, first: int, done: int | None = None
) -> Iterator[list[int]]:
    """Tokens of the first `done` layers (all) after their update; behind the exact ones all that near ties could make.

    `first` is the size of a buffer before any update.
    """
    n_layers = len(scores)
    every = case.number("update") if case.parameters["progressive"] == "true" else n_layers
    updates = [n for n in range(1, n_layers + 1) if n % every == 0 or n == n_layers]
    updates = [n for n in updates if n <= (done or n_layers)]

    def after(update: int, caps: list[int]) -> Iterator[list[int]]:
        if update == len(updates):
            yield caps
            return
        n = updates[update]
        caps = caps + [first] * (n - len(caps))
        share = n if case.parameters["mid_total"] == "proportional" else n_layers
        for counts in best_by_layer(scores[:n], free):
            if case.parameters["norm"] == "minmax":
                counts = [count - min(counts) for count in counts]
            total = min(free * share, sum(caps))
            yield from after(update + 1, apportion(total, counts, [0] * n, caps))

    seen = []
    for sizes in after(0, []):
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def best_by_layer(scores: list[np.ndarray], free: int) -> Iterator[list[int]]:
    """How many of the best `free` a row of all layers' scores, taken together, lie in each; then near alternatives."""
    flat = np.concatenate([layer.ravel() for layer in scores])
    owner = np.repeat(np.arange(len(scores)), [layer.size for layer in scores])
    count = free * sum(len(layer) for layer in scores)
    taken = rank(flat)[:count]
    yield np.bincount(owner[taken], minlength=len(scores)).tolist()
    if count == 0:
        return
    cut = flat[taken[-1]]
    near = np.abs(flat - cut) <= TOLERANCE * abs(cut)
    if len(np.unique(owner[near])) == 1:  # of several, even equal ones may differ by the rounding of their sums
        return
    sure = np.bincount(owner[(flat > cut) & ~near], minlength=len(scores))
    some = np.bincount(owner[near], minlength=len(scores))
    rest = count - sure.sum()
    for more in itertools.product(*(range(n + 1) for n in some)):
        if sum(more) == rest:
            yield (sure + more).tolist()


# ------------------------------------------------------------------------------------------------------------- hybrid


def joined(trace: Trace, parts: list[Selection]) -> Selection:
    """Treated layer l of parts[l], all at the finest granularity among them."""
    finest = max((part.heads for part in parts), key=("layer", "kv", "query").index)
    copies = [row_count(trace, finest) // row_count(trace, part.heads) for part in parts]

    def judge(decision: Decision, part: Selection) -> Decision:
        def verdict(whole: Selection) -> Verdict:
            for layer, _ in decision.places:
                rows, n = whole.rows[layer], copies[layer]
                if not all(np.array_equal(row, rows[index // n * n]) for index, row in enumerate(rows)):
                    return Verdict.WRONG
            rows = [layer[::n] for layer, n in zip(whole.rows, copies, strict=True)]
            return decision.verdict(Selection(part.heads, rows, part.protected, part.source))

        return Decision(decision.where, verdict, decision.places)

    return Selection(
        finest,
        [[row for row in part.rows[layer] for _ in range(copies[layer])] for layer, part in enumerate(parts)],
        [part.protected[layer] for layer, part in enumerate(parts)],
        [part.source[layer] for layer, part in enumerate(parts)],
        [
            judge(decision, part)
            for part in dict.fromkeys(parts)
            for decision in part.decisions
            if all(parts[layer] is part for layer, _ in decision.places)
        ],
        layer_heads=[part.heads for part in parts],
    )
