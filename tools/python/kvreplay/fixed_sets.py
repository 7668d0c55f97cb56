"""Given sets of tokens as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from kvreplay.engine import Trace
from kvreplay.errors import Error, Refusal
from kvreplay.python_policies import Definition, Policy, register
from kvreplay.results import Selection


def fixed_set_policy(trace: Trace, selection: Any, sliding: str) -> tuple[str, int]:
    """The policy `given`, which keeps exactly these positions, and the budget that it needs: tokens a row on average,
    rounded up. `sliding`: skip or treat, as in `kv.replay`. Each call replaces the policy of this name."""
    rows = [_rows(trace, layer, one) for layer, one in enumerate(_layers(trace, selection))]
    if len({len(layer) for layer in rows}) > 1:
        found = ", ".join(str(len(layer)) for layer in rows)
        raise Error("selection", "rows", "the same number in every layer", found, Refusal.USAGE)
    treated = trace.treated_layers(sliding == "treat")
    counts = np.array([[len(row) for row in rows[layer]] for layer in treated], dtype=np.int64)
    heads = dict(zip((1, trace.query_heads, trace.kv_heads), ("layer", "query", "kv"), strict=True))[len(rows[0])]

    def score(view: Any) -> np.ndarray:
        kept = np.zeros((len(rows[0]), view.tokens))
        for row, positions in enumerate(rows[view.stored_layer]):
            kept[row, positions] = 1.0
        return kept

    def make(values: Any) -> Policy:
        made = object.__new__(Policy)
        made.heads, made.score, made.allocate = heads, score, lambda division, scores: counts
        return made

    content = b"".join(row.tobytes() + b"|" for layer in rows for row in layer)
    digest = xxhash.xxh3_128_hexdigest(content)
    register(Definition("given", "tokens that were chosen elsewhere", make, heads=heads, source_hash=digest))
    return "given", max(1, int(np.ceil(counts.mean())))


def _layers(trace: Trace, selection: Any) -> list[Any]:
    """The selection of each stored layer."""
    if isinstance(selection, Selection):
        rows = np.split(selection.positions, selection.offsets[1:-1])
        heads = selection.granted.shape[1]
        selection = [rows[first : first + heads] for first in range(0, len(rows), heads)]
    if not isinstance(selection, Sequence | np.ndarray):
        raise Error("selection", "kind", "a list for each layer", type(selection).__name__, Refusal.USAGE)
    if len(selection) != trace.layers:
        raise Error("selection", "layers", str(trace.layers), str(len(selection)), Refusal.USAGE)
    return list(selection)


def _rows(trace: Trace, layer: int, one: Any) -> list[np.ndarray]:
    """int32 positions of each row of a layer."""
    where = f"selection, layer {layer}"
    if not isinstance(one, Sequence | np.ndarray) or isinstance(one, str):
        raise Error(where, "kind", "a list of positions", type(one).__name__, Refusal.USAGE)
    single = all(np.ndim(entry) == 0 for entry in one)
    rows = [np.asarray(row).ravel() for row in ([one] if single else one)]
    if len(rows) not in (1, trace.kv_heads, trace.query_heads):
        raise Error(where, "rows", f"1, {trace.kv_heads} or {trace.query_heads}", str(len(rows)), Refusal.USAGE)
    for number, row in enumerate(rows):
        place = f"{where}, row {number}"
        if row.dtype == bool:
            if len(row) != trace.prompt:
                raise Error(place, "mask", f"{trace.prompt} values", str(len(row)), Refusal.USAGE)
            row = rows[number] = np.flatnonzero(row)
        if len(row) and not np.issubdtype(row.dtype, np.integer):
            raise Error(place, "positions", "whole numbers", str(row.dtype), Refusal.USAGE)
        outside = row[(row < 0) | (row >= trace.prompt)]
        if len(outside):
            raise Error(place, "position", f"0..{trace.prompt - 1}", str(outside[0]), Refusal.USAGE)
        if len(np.unique(row)) != len(row):
            raise Error(place, "positions", "unique positions", "duplicates", Refusal.USAGE)
    return [row.astype(np.int32) for row in rows]
