"""Policies that choose once, at the end of the prompt, each layer by itself and with the same count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from reference import aggregate, chain, cumulative_attention, pool, protection, rank, top, window_attention
from reference_selection import TOLERANCE, Case, Decision, Selection, decided, only, ranked, tokens_of, uniform


def random(case: Case) -> Selection:
    """The candidates with the smallest hashes of (seed, stored layer, head, position)."""
    fixed = case.fixed(case.number("sinks"), case.number("window"))
    candidates = np.setdiff1d(np.arange(case.trace.prompt), fixed)

    def kept(layer: int, row: int) -> np.ndarray:
        order = hash_order(case.number("seed"), layer, row, candidates)
        return np.union1d(fixed, order[: case.budget - len(fixed)])

    return uniform(case, kept, fixed)


def hash_order(seed: int, layer: int, row: int, candidates: np.ndarray) -> np.ndarray:
    """Candidates by ascending hash."""
    return candidates[np.argsort(chain(seed, layer, row, candidates), kind="stable")]


def local(case: Case) -> Selection:
    """The last B tokens."""
    kept = protection(0, case.budget, case.budget, case.trace.prompt)
    return uniform(case, lambda layer, row: kept, kept)


def spread(slots: int, count: int) -> np.ndarray:
    """`count` of so many slots in equal strides."""
    return np.array([i * slots // count for i in range(count)], int)


def strided(case: Case) -> Selection:
    """Tokens in equal strides over the prompt."""
    kept = spread(case.trace.prompt, case.budget)
    return uniform(case, lambda layer, row: kept, np.array([], int))


def truncate(case: Case) -> Selection:
    """The first and the last half; a question at the end stays whole, the rule then applies to what precedes it."""
    question = case.trace.question_tokens if case.parameters["keep_question"] == "true" else 0
    budget, context = case.budget - question, case.trace.prompt - question
    kept = np.concatenate(
        [np.arange(budget - budget // 2), np.arange(context - budget // 2, context), context + np.arange(question)]
    )
    return uniform(case, lambda layer, row: kept, kept)


def h2o(case: Case) -> Selection:
    """The last r tokens and the B-r of the greatest attention from all prompt queries."""
    trace, budget, prompt = case.trace, case.budget, case.trace.prompt
    recent = min(tokens_of(case.parameters["recent"], budget), budget)
    fixed = case.fixed(case.sinks, recent)
    overlap = case.parameters["overlap"] == "true"
    candidates = np.arange(prompt) if overlap else np.setdiff1d(np.arange(prompt), fixed)
    rows, decisions = [], []
    for index, layer in enumerate(trace.treated):
        scores = aggregate(cumulative_attention(trace, layer), case.heads, case.parameters["agg"], trace.kv_heads)
        rows.append([])
        for row in range(len(scores)):
            masked = only(scores[row], candidates)
            if overlap:
                kept, decision = overlapping((index, row), masked, budget - len(fixed), fixed)
            else:
                [kept], decision = ranked([(index, row)], masked[None], budget - len(fixed), fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def overlapping(
    place: tuple[int, int], scores: np.ndarray, count: int, recent: np.ndarray
) -> tuple[np.ndarray, Decision]:
    """The best tokens anywhere, united with the recent ones: the number kept depends on how many are both."""
    heavy = top(scores, count, np.arange(len(scores)))
    cut = scores[heavy].min() if len(heavy) else np.nan
    ours = np.union1d(heavy, recent)

    def agrees(theirs: list[np.ndarray]) -> bool:
        if not np.isin(recent, theirs[0]).all():
            return False
        different = np.setxor1d(ours, theirs[0])
        return bool((np.abs(scores[different] - cut) <= TOLERANCE * abs(cut)).all())

    return ours, decided([place], [ours], agrees)


def window_scores(case: Case, layer: int) -> np.ndarray:
    """[H,n]: the window's attention to the n tokens that are not protected, reduced to rows and pooled over them."""
    trace, heads, agg = case.trace, case.heads, case.parameters["agg"]
    kernel, kind = case.number("kernel"), case.parameters["pool"]
    sinks, recent = beside_window(case)
    observed = window_attention(trace, layer, observation_window(case), case.window_end)
    observed = observed[:, sinks : trace.prompt - recent]
    if case.parameters["pool_order"] == "group-first":
        return pool(aggregate(observed, heads, agg, trace.kv_heads), kernel, kind)
    return aggregate(pool(observed, kernel, kind), heads, agg, trace.kv_heads)


def observation_window(case: Case) -> int:
    """w: the queries that score, never shortened by the budget, only by the prompt."""
    return min(case.number("window"), case.window_end)


def beside_window(case: Case) -> tuple[int, int]:
    """Protected first and last tokens of a policy whose own are its observation window."""
    return case.guarded(case.sinks, observation_window(case))


def free_and_room(case: Case) -> tuple[int, int]:
    """Slots of a row beside the protected tokens, and tokens that compete for them."""
    protected = sum(beside_window(case))
    return case.budget - protected, case.trace.prompt - protected


def window_selection(case: Case, counts: list[int] | list[list[int]], decisions: list[Decision]) -> Selection:
    """The window, and `counts` tokens that its queries attend to most: as many in all rows of a layer, or [L][H]."""
    trace = case.trace
    protected = beside_window(case)
    fixed = protection(*protected, case.budget, trace.prompt)
    rows, decisions = [], list(decisions)
    for index, layer in enumerate(trace.treated):
        scores = np.pad(window_scores(case, layer), ((0, 0), protected), constant_values=-np.inf)
        of_rows = np.broadcast_to(counts[index], len(scores))
        rows.append([])
        for row in range(len(scores)):
            [kept], decision = ranked([(index, row)], scores[row][None], of_rows[row], fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def snapkv(case: Case) -> Selection:
    """The window, and the tokens that its queries attend to, pooled over neighbours."""
    return window_selection(case, [free_and_room(case)[0]] * len(case.trace.treated), [])


def chunkkv(case: Case) -> Selection:
    """The window, and the chunks that its queries attend to; layers may take over an earlier layer's sets."""
    trace = case.trace
    window, size = observation_window(case), case.number("chunk")
    sinks, recent = beside_window(case)
    fixed = protection(sinks, recent, case.budget, trace.prompt)
    reuse = case.number("reuse")
    source = [layer // reuse * reuse for layer in range(len(trace.treated))]
    rows: list[list[np.ndarray]] = []
    decisions = []
    for index, layer in enumerate(trace.treated):
        if source[index] != index:
            rows.append(rows[source[index]])
            continue
        scores = aggregate(window_attention(trace, layer, window, case.window_end), case.heads, "mean", trace.kv_heads)
        rows.append([])
        for row in range(len(scores)):
            choices = [
                np.union1d(sinks + kept, fixed)
                for kept in chunk_selections(scores[row, sinks:], case.budget - sinks, recent, size, case.parameters)
            ]
            rows[-1].append(choices[0])
            decisions.append(decided([(index, row)], [choices[0]], one_of(choices)))
    return case.selection(rows, fixed, decisions, source=source)


def one_of(choices: list[np.ndarray]) -> Callable[[list[np.ndarray]], bool]:
    """Agreement with any of the sets."""
    return lambda theirs: any(np.array_equal(choice, theirs[0]) for choice in choices)


def chunk_selections(
    x: np.ndarray, budget: int, window: int, size: int, parameters: dict[str, str]
) -> Iterator[np.ndarray]:
    """Positions that the best chunks of the columns x [P] bring; first by the exact order, then by all near ones."""
    prompt = len(x)
    slots = max(0, budget - window)
    replace = parameters["window_mode"] == "replace"
    scored = prompt if replace else prompt - window
    chunks = [np.arange(begin, min(begin + size, scored)) for begin in range(0, scored, size)]
    mean = parameters["chunk_score"] == "mean"
    scores = np.array([math.fsum(x[chunk]) / (len(chunk) if mean else 1) for chunk in chunks])
    fill = parameters["fill"]

    if replace:
        for order in near_orders(scores, budget // size):
            taken = sorted(position for chunk in order[: budget // size] for position in chunks[chunk])
            yield np.array(taken[:slots], dtype=int)
        return
    if fill == "cut":
        for order in near_orders(scores, slots // size + 1):
            yield np.array([position for chunk in order for position in chunks[chunk]][:slots], dtype=int)
        return
    for order in near_orders(scores, slots // size):
        taken = np.array([position for chunk in order[: slots // size] for position in chunks[chunk]], dtype=int)
        if fill == "tokens":
            others = np.setdiff1d(np.arange(scored), taken)
            taken = np.concatenate([taken, top(x, slots - len(taken), others)])
        yield taken


def near_orders(scores: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """The ranking; then those in which different scores as good as the last one taken change places or become equal.

    A short chunk taken early leaves room for one more, so the last one taken is the `count`-th or the one behind it.
    """
    order = rank(scores)
    yield order
    if count <= 0:
        return
    for last in order[count - 1 : count + 1]:
        near = np.abs(scores - scores[last]) <= TOLERANCE * abs(scores[last])
        classes = [np.flatnonzero(scores == value) for value in np.unique(scores[near])]
        if len(classes) == 1:
            continue
        above, below = order[(scores > scores[last])[order]], order[(scores < scores[last])[order]]
        above, below = above[~near[above]], below[~near[below]]
        for permuted in itertools.islice(itertools.permutations(classes), 120):
            yield np.concatenate([above, *permuted, below])
        yield np.concatenate([above, np.flatnonzero(near), below])
