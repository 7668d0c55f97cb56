"""Causes of a difference: each predicts the kept sets of an engine with this bug, most by a replay of a variant.

n treated layers, H rows a layer, P prompt tokens, B budget.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from kvreplay.conformance import altered_traces
from kvreplay.engine import _engine
from kvreplay.errors import Error
from kvreplay.kept_rows import Decision, Rows, decisions
from kvreplay.parameters import parameters as parameters_of
from kvreplay.python_policies import Definition, Policy, register
from kvreplay.trace import Trace

Predicted = list[list[np.ndarray | None]]  # [n][H]; None: the cause says nothing about this row


@dataclass(frozen=True)
class Question:
    """One comparison: the policy and trace of the replay, our kept sets, and those of the engine, [n][H] each."""

    trace: Trace
    policy: str
    ours: Decision
    rows: Rows  # ours, in the engine's number of rows
    theirs: Rows
    options: dict[str, Any]

    def replayed(self, policies: Sequence[str], trace: Trace | None = None, **options: Any) -> list[Rows | None]:
        """Kept sets of variants, in the engine's number of rows. None: a variant that is rejected."""
        budget = options.pop("budget", self.ours.budget)
        try:
            found = decisions(trace or self.trace, policies, budget, **self.options | options)
        except Error:
            return [None] * len(policies)
        return [one and repeated(one.rows, len(self.theirs[0])) for one in found]


Cause = tuple[str, str, Predicted | None]  # name, what the engine does, its prediction


def repeated(rows: Rows, count: int) -> Rows | None:
    """The rows of each layer repeated to `count`; None: not a multiple."""
    if any(count % len(layer) for layer in rows):
        return None
    return [[layer[row * len(layer) // count] for row in range(count)] for layer in rows]


def causes(question: Question) -> Iterator[Cause]:
    """Every cause, cheap ones first: layout of the file, ties, variants of the policy, variants of the trace."""
    for family in (order_of_heads, order_of_layers, numbering, ties, budgets, shifted_windows, parameters,
                   divided_sums, traces):  # fmt: skip
        yield from family(question)


def best_source(theirs: Sequence[Sequence[np.ndarray]], ours: Sequence[Sequence[np.ndarray]]) -> list[int]:
    """For each entry of `theirs`, the entry of `ours` with the largest overlap over all its rows."""
    common = [[sum(len(np.intersect1d(a, b)) for a, b in zip(one, other, strict=True)) for other in ours]
              for one in theirs]  # fmt: skip
    return [int(np.argmax(row)) for row in common]


def order_of_heads(question: Question) -> Iterator[Cause]:
    order = best_source(list(zip(*question.theirs, strict=True)), list(zip(*question.rows, strict=True)))
    if sorted(order) == list(range(len(order))) and order != sorted(order):
        listed = ", ".join(map(str, order))
        predicted = [[layer[head] for head in order] for layer in question.rows]
        yield (
            "heads in another order",
            f"its rows are heads {listed}; if intended, write heads in the metadata",
            predicted,
        )


def order_of_layers(question: Question) -> Iterator[Cause]:
    count = len(question.rows)
    for shift in (-1, 1):
        predicted: Predicted = [
            list(question.rows[layer + shift]) if 0 <= layer + shift < count else [None] * len(question.theirs[0])
            for layer in range(count)
        ]
        yield "layer off by one", f"its layer l has the sets of layer l {'+' if shift > 0 else '-'} 1", predicted
    order = best_source(question.theirs, question.rows)
    if sorted(order) == list(range(count)) and order != sorted(order):
        text = f"its layers are layers {', '.join(map(str, order))}; if intended, write layers in the metadata"
        yield "layers in another order", text, [list(question.rows[layer]) for layer in order]


def numbering(question: Question) -> Iterator[Cause]:
    """Positions that do not number the tokens of the prompt."""
    boundary = question.ours.selection.boundary
    for shift in (-1, 1):
        text = f"its positions are ours {'+' if shift > 0 else '-'} 1"
        inside = np.arange(max(0, -shift), boundary - max(0, shift))  # a file has no other positions
        predicted = [[np.intersect1d(row, inside) + shift for row in layer] for layer in question.rows]
        yield "positions shifted by one", text, predicted
    text = "its positions number the cache after the eviction, not the tokens of the prompt"
    slots = [[np.arange(len(row)) for row in layer] for layer in question.rows]
    yield "indices wrong after the first eviction", text, slots
    evicted_at = question.ours.selection.evicted_at
    if evicted_at is None:
        return
    of_layers = evicted_at[question.ours.selection.layers]
    before = []  # slots just before the last eviction of the prompt
    for layer, rows in enumerate(question.ours.rows):
        before.append([])
        for row, kept in enumerate(rows):
            when = of_layers[layer, row, :boundary]
            last = when.max()
            resident = np.flatnonzero((when < 0) | (when >= last))
            before[-1].append(np.flatnonzero(np.isin(resident, kept)))
    text = "its positions number the cache before the last eviction, not the tokens of the prompt"
    yield "indices wrong after the first eviction", text, repeated(before, len(question.theirs[0]))


def ties(question: Question) -> Iterator[Cause]:
    ours = question.ours
    if ours.scores is None:
        return
    higher = [
        [ours.top(layer, row, higher_first=True) if ours.cut(layer, row) is not None else kept
         for row, kept in enumerate(rows)]
        for layer, rows in enumerate(ours.rows)
    ]  # fmt: skip
    text = "of equal scores it keeps the higher position (--ties any accepts every order)"
    yield "ties to the higher position", text, repeated(higher, len(question.theirs[0]))


def budgets(question: Question) -> Iterator[Cause]:
    for change in (-1, 1):
        budget = question.ours.budget + change
        if budget > 0:
            [predicted] = question.replayed([question.policy], budget=budget)
            yield f"budget {change:+d}", f"it keeps {budget} tokens a row in place of {question.ours.budget}", predicted


def shifted_windows(question: Question) -> Iterator[Cause]:
    """The policy on the first P-1 tokens. Either all of it is shifted, or the queries alone: then the protected recent
    tokens are the same, and one of them is the token left out."""
    selection = question.ours.selection
    boundary = selection.boundary - 1
    [predicted] = question.replayed([question.policy], boundary=str(boundary))
    yield "window shifted by one", "its windows end one token before the prompt does", predicted
    recent, sinks, budget = int(selection.recent.max()), int(selection.sinks.max()), question.ours.budget
    if recent < 1 or budget < 2:
        return
    without_last = with_value(question.policy, "protect", f"(sinks={sinks},recent={recent - 1})")
    [shifted] = question.replayed([without_last], boundary=str(boundary), budget=budget - 1)
    if shifted is not None:
        predicted = [[np.append(row, boundary) for row in layer] for layer in shifted]
        yield "window shifted by one", "its observation window ends one token before the prompt does", predicted


def parameters(question: Question) -> Iterator[Cause]:
    """Each other choice of a parameter, and whole numbers one less and one more, or two where they must be odd."""
    variants = {}
    for parameter, value, span, is_seed in _engine.parameters(question.policy):
        choices = span.split(" | ") if " | " in span else neighbours(value, span)
        for choice in () if is_seed else choices:
            text = with_value(question.policy, parameter, choice)
            with contextlib.suppress(Error):
                if choice != value and _engine.label(text) != _engine.label(question.policy):
                    variants[text] = parameter, f"it computes {parameter}={choice} in place of {value}"
    found = question.replayed(list(variants)) if variants else []
    if variants and not any(found):  # one that is rejected rejects all
        found = [question.replayed([text])[0] for text in variants]
    for (parameter, text), predicted in zip(variants.values(), found, strict=True):
        yield NAMES.get(parameter, f"another {parameter}"), text, predicted


NAMES = {
    "agg": "group mean against sum or maximum",
    "heads": "another granularity",
    "window": "window one token shorter or longer",
}


def with_value(policy: str, name: str, value: str) -> str:
    """The policy's text with one value changed."""
    policy_name, _, values = policy.partition(":")
    return policy_name + ":" + ",".join(f"{key}={one}" for key, one in (parameters_of(values) | {name: value}).items())


def neighbours(value: str, span: str) -> tuple[str, ...]:
    """The next whole numbers on both sides of a value, if it is one."""
    if not value.isdecimal():
        return ()
    step = 2 if "odd" in span else 1
    return tuple(str(one) for one in (int(value) - step, int(value) + step) if one > 0)


SMALLEST_WEIGHT = 1e-12  # of a query, beside that of the newest


def divided_sums(question: Question) -> Iterator[Cause]:
    """A running sum that is divided by the group g at each token, s_t = (s_(t-1) + sum of the group's attention) / g.

    The query n tokens before the newest then has the weight g^-n.
    """
    trace, selection = question.trace, question.ours.selection
    group, width = trace.query_heads // trace.kv_heads, len(question.ours.rows[0])
    if group == 1:
        return
    queries = min(selection.boundary, math.ceil(-math.log(SMALLEST_WEIGHT, group)))
    values = {
        "heads": {1: "layer", trace.kv_heads: "kv"}.get(width, "query"),
        "agg": "sum",
        "recent": int(selection.recent.max()),
        "sinks": int(selection.sinks.max()),
    }

    def score(view: Any) -> np.ndarray:
        return sum(group**-before * view.window_attention(1, view.tokens - before) for before in range(queries))

    def make(_: Any) -> Policy:
        made = object.__new__(Policy)
        vars(made).update(values, score=score)
        return made

    name = "sums-divided-by-the-group"
    register(Definition(name, "running sums divided at each token", make, heads=values["heads"], agg=values["agg"],
                        source_hash=xxhash.xxh3_128_hexdigest(repr((values, queries)).encode())))  # fmt: skip
    [predicted] = question.replayed([name])
    yield "sums divided by the group", "it divides its running sums by the group at every token", predicted


def traces(question: Question) -> Iterator[Cause]:
    """The policy on a trace whose attention is that of an engine with the bug."""
    trace, policy = question.trace, question.policy
    unmasked = with_value(policy, "score", "eval")
    made: list[tuple[str, str, str, Callable[[], Trace | None], dict[str, Any]]] = [
        ("mask ignored", "later tokens are in the softmax of a query", policy,
         lambda: altered_traces.later_keys_in_denominator(trace), {}),
        ("mask ignored", "queries attend to later tokens, whose attention counts", unmasked,
         lambda: altered_traces.prompt_queries_after_prompt(trace), {"eval": "continuation"}),
        ("RoPE applied twice", "queries and keys are rotated twice", policy,
         lambda: altered_traces.rotated_again(trace, True, True), {}),
        ("RoPE applied twice", "keys are rotated twice", policy,
         lambda: altered_traces.rotated_again(trace, False, True), {}),
        ("RoPE applied twice", "queries are rotated twice", policy,
         lambda: altered_traces.rotated_again(trace, True, False), {}),
        ("query heads in other groups", "query head h reads KV head h mod Hkv", policy,
         lambda: altered_traces.interleaved_groups(trace), {}),
        ("mean of the queries of a group", "it averages queries, not attention", policy,
         lambda: altered_traces.mean_queries(trace), {}),
    ]  # fmt: skip
    for name, text, variant, make, options in made:
        changed = make()
        if changed is not None:
            [predicted] = question.replayed([variant], changed, **options)
            yield name, text, predicted
