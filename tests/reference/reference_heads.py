"""Policies that share a layer's tokens out among its heads, or tell heads or layers that need all of theirs."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from reference import apportion, attention, capped, protection, rank, rotate, rows_of, softmax, unrotated
from reference_layers import MOST_COUNTS, best_by_layer
from reference_once import beside_window, free_and_room, window_scores, window_selection
from reference_selection import TOLERANCE, Case, Decision, Selection, Verdict, decided, exactly

NOTHING = np.array([], dtype=int)


def ada_kv(case: Case) -> Selection:
    """SnapKV's tokens, more of them in heads that have many of their layer's best."""
    trace, parameters = case.trace, case.parameters
    n_rows, (free, room) = case.row_count, free_and_room(case)
    floor = int(Fraction(parameters["alpha"]) * 1000)
    counts, decisions = [], []
    for index, layer in enumerate(trace.treated):
        scores = window_scores(case, layer)
        if parameters["normalise"] == "true" and free > 0:
            best = -np.sort(-scores, axis=1)[:, :free]
            scores = scores * (best.sum(axis=1) / scores.sum(axis=1))[:, None]
        choices = []
        for shares in itertools.islice(best_by_layer([row[None] for row in scores], free), MOST_COUNTS):
            weights = [(1000 - floor) * share + floor * free for share in shares]
            choices.append(apportion(free * n_rows, weights, [0] * n_rows, [room] * n_rows))
        chosen = choices[0]
        if case.follow:
            chosen = [len(row) - sum(beside_window(case)) for row in case.follow.rows[index]]
            decisions.append(counted(index, chosen, choices))
        counts.append(chosen)
    return window_selection(case, counts, decisions)


def counted(index: int, found: list[int], choices: list[list[int]]) -> Decision:
    """Counts of a layer's heads, against the exact ones and those that near ties could make."""
    verdict = Verdict.EQUAL if found == choices[0] else Verdict.NEAR if found in choices else Verdict.WRONG
    return Decision(f"treated layer {index}: counts {choices[0]}, found {found}", lambda theirs: verdict)


def head_kv(case: Case) -> Selection:
    """SnapKV's tokens, more of them in heads that a table calls important."""
    trace = case.trace
    n_rows, n_layers, (free, room) = case.row_count, len(trace.treated), free_and_room(case)
    beta = float(case.parameters["beta"])
    table = np.load(case.parameters["table"]).astype(float)
    importance = table.reshape(n_layers, n_rows, -1).mean(axis=2)
    weights = [p * (free / beta) * n_layers * trace.query_heads + (free - free / beta) for p in importance.ravel()]
    sizes = apportion(n_layers * n_rows * free, weights, [0] * len(weights), [room] * len(weights))
    return window_selection(case, [sizes[i : i + n_rows] for i in range(0, len(sizes), n_rows)], [])


def simlayerkv(case: Case) -> Selection:
    """Sinks and recent tokens in layers whose last queries attend to hardly anything else; the other layers whole."""
    trace, parameters = case.trace, case.parameters
    prompt, sinks, recent = trace.prompt, case.number("sinks"), case.number("recent")
    threshold = float(parameters["threshold"])
    few, every = protection(sinks, recent, min(sinks + recent, prompt), prompt), np.arange(prompt)
    last = np.arange(max(0, prompt - case.number("rows")), prompt)
    rows, decisions = [], []
    for index, layer in enumerate(trace.treated):
        mass = attention(trace, layer, last)[:, :, few].sum(axis=2).mean()
        choices = [few, every] if mass > threshold else [every, few]
        close = abs(mass - threshold) <= TOLERANCE * threshold
        rows.append([choices[0]])
        decisions.append(either((index, 0), choices if close else choices[:1]))
    return case.selection(rows, few, decisions)


def either(place: tuple[int, int], choices: list[np.ndarray]) -> Decision:
    """The first of the choices, or another that a value at a threshold allows."""
    return decided([place], choices[:1], lambda theirs: any(np.array_equal(one, theirs[0]) for one in choices))


def duo_attention(case: Case) -> Selection:
    """Heads that retrieve keep all, the others sinks and recent tokens."""
    trace, parameters = case.trace, case.parameters
    prompt, sinks, recent = trace.prompt, case.number("sinks"), case.number("recent")
    few, every = protection(sinks, recent, min(sinks + recent, prompt), prompt), np.arange(prompt)
    if parameters["table"] == "kvpress":
        scores = np.array([early_attention(case, layer) for layer in trace.treated]).ravel()
    else:
        scores = np.load(parameters["table"]).astype(float).ravel()
    whole = np.zeros(len(scores), bool)
    whole[rank(scores)[: rounded(Fraction(parameters["full_heads"]) * len(scores))]] = True
    heads = [(layer, row) for layer in range(len(trace.treated)) for row in range(trace.kv_heads)]
    rows: list[list[np.ndarray]] = [[] for _ in trace.treated]
    for (layer, _), full_head in zip(heads, whole, strict=True):
        rows[layer].append(every if full_head else few)
    return case.selection(rows, few, [exactly((layer, row), rows[layer][row]) for layer, row in heads])


def rounded(value: Fraction) -> int:
    """Half up."""
    return int(value + Fraction(1, 2))


def early_attention(case: Case, layer: int) -> np.ndarray:
    """[Hkv]: how early the mean query, as the last of 500 positions, attends to the mean key at all of them."""
    trace, n = case.trace, 500
    prompt, group = np.arange(trace.prompt), trace.query_heads // trace.kv_heads
    keys = unrotated(trace, layer, trace.layers[layer].k[:, : trace.prompt], prompt).mean(axis=1)
    queries = unrotated(trace, layer, rows_of(trace, layer, prompt), prompt).mean(axis=1)
    scaling = trace.layers[layer].attention_scaling
    areas = []
    for head in range(trace.query_heads):
        query = scaling * rotate(trace, layer, queries[head][None], np.array([n - 1]))[0]
        at_all = scaling * rotate(trace, layer, np.tile(keys[head // group], (n, 1)), np.arange(n))
        weights = softmax(capped(trace, at_all @ query), np.ones(n, bool))
        areas.append(np.cumsum(weights).mean())
    return np.reshape(areas, (trace.kv_heads, group)).mean(axis=1)
