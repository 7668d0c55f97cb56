"""Kept sets and scores of policies on one trace: what `kvreplay check` and `kvreplay why` read of a replay.

n treated layers, H rows a layer (1, KV heads or query heads).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvreplay import engine
from kvreplay.engine import _engine
from kvreplay.errors import Error
from kvreplay.results import Selection
from kvreplay.trace import Trace

Rows = list[list[np.ndarray]]  # [n][H] of positions


@dataclass(frozen=True)
class Decision:
    """The kept set of a policy at the end of the prompt, and the scores by which it ranked tokens."""

    selection: Selection
    scores: np.ndarray | None  # float32 [n,H,boundary]; None: the policy ranks no tokens, or ranks them repeatedly
    budget: int  # tokens a row on average

    @property
    def rows(self) -> Rows:
        """The kept positions of the treated layers, ascending."""
        every = np.split(self.selection.positions, self.selection.offsets[1:-1])
        width = self.selection.granted.shape[1]
        counts = [width] * len(self.selection.layers) if self.selection.rows is None else self.selection.rows
        return [
            [every[layer * width + row] for row in range(count)]
            for layer, count in zip(self.selection.layers, counts, strict=True)
        ]

    def ranked(self, layer: int, row: int, higher_first: bool = False) -> np.ndarray:
        """Unprotected positions by descending score; equal scores by ascending position, or by descending."""
        candidates = np.flatnonzero(self._unprotected(layer, row))
        order = -candidates if higher_first else candidates
        return candidates[np.lexsort((order, -self.scores[layer, row, candidates]))]

    def top(self, layer: int, row: int, higher_first: bool = False) -> np.ndarray:
        """The protected positions and the highest-ranked others, up to the number that the policy keeps in this row."""
        protected = np.flatnonzero(~self._unprotected(layer, row))
        count = len(self.rows[layer][row]) - len(protected)
        return np.sort(np.concatenate([protected, self.ranked(layer, row, higher_first)[: max(count, 0)]]))

    def cut(self, layer: int, row: int) -> float | None:
        """The lowest score of a kept unprotected token. None: the row is not the top of its scores, as with chunks, or
        it has no such token."""
        kept = self.rows[layer][row]
        if self.scores is None or not np.array_equal(self.top(layer, row), kept):
            return None
        chosen = kept[self._unprotected(layer, row)[kept]]
        return float(self.scores[layer, row, chosen].min()) if len(chosen) else None

    def is_protected(self, layer: int, row: int, position: int) -> bool:
        """Whether a position is an attention sink or in the recent window."""
        return not self._unprotected(layer, row)[position]

    def _unprotected(self, layer: int, row: int) -> np.ndarray:
        return np.asarray(self.selection.unprotected()[layer, row])


def decisions(trace: Trace, policies: Sequence[str], budget: float | str, **options: Any) -> list[Decision | None]:
    """Replays the policies; None for a policy without a static kept set, or whose cell failed. Warnings are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = engine.replay(
            trace, policies, budget, metrics="attention_recall", controls="none", save="scores", progress=False,
            **{"eval": "last:1"} | options,
        )  # fmt: skip
    boundary = run.trace(run.stored_traces[0]).boundary
    cells = {(row.policy, row.params): row for row in run.cells.itertuples()}
    found: list[Decision | None] = []
    for policy in policies:
        cell = cells.get(_engine.canonical(policy))
        selection = run.selection_of(cell.cell, boundary) if cell else None
        if selection is None:
            found.append(None)
            continue
        scores = run.scores(cell.cell)
        found.append(Decision(selection, None if scores is None else scores[selection.layers], int(cell.budget_tokens)))
    return found


def decision(trace: Trace, policy: str, budget: float | str, **options: Any) -> Decision:
    """Replays one policy, which must have a kept set."""
    [found] = decisions(trace, [policy], budget, **options)
    if found is None:
        raise Error(policy, "no kept set", "a policy that evicts tokens", "sparse reads, or a failed cell")
    return found
