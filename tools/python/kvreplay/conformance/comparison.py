"""Kept sets of an engine against ours: overlap of each row, legal ties, the first difference and its likely causes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvreplay.conformance.causes import Predicted, Question, causes
from kvreplay.kept_rows import Rows

LIKELY = 0.5  # share of the differing tokens that a cause must explain to be named
UNSORTED = "unsorted positions"


@dataclass(frozen=True)
class Explained:
    """A cause, and the share of the differing tokens that it explains."""

    name: str
    text: str
    share: float


@dataclass
class Comparison:
    """`tolerance`: scores within this share of the score at the cut are tied, as rounding changes their order.
    `any_ties`: exactly equal scores are tied too; otherwise the lower position is kept."""

    question: Question
    tolerance: float
    any_ties: bool
    unsorted: list[tuple[int, int]] = field(init=False)  # rows whose positions are not ascending

    def __post_init__(self) -> None:
        theirs = self.question.theirs
        self.unsorted = [place for place in np.ndindex(len(theirs), len(theirs[0]))
                         if (np.diff(theirs[place[0]][place[1]]) < 0).any()]  # fmt: skip

    @property
    def is_equal(self) -> bool:
        return not self.unsorted and not self.different

    @cached_property
    def overlap(self) -> np.ndarray:
        """Tokens that both keep, as a share of those that one of them keeps: float [n,H]."""
        return np.array([[jaccard(a, b) for a, b in zip(*of_layer, strict=True)]
                         for of_layer in zip(self.question.rows, self.question.theirs, strict=True)])  # fmt: skip

    @cached_property
    def tied(self) -> np.ndarray:
        """Whether a row differs in tied tokens alone: bool [n,H]."""
        found = np.zeros(self.overlap.shape, dtype=bool)
        for layer, row in np.argwhere(self.overlap < 1).tolist():
            found[layer, row] = self._is_tied(layer, row)
        return found

    @cached_property
    def different(self) -> list[tuple[int, int]]:
        """Layer and row of each difference beyond ties."""
        return [(layer, row) for layer, row in np.argwhere((self.overlap < 1) & ~self.tied).tolist()]

    def our_row(self, layer: int, row: int) -> int:
        """The row of the replay that stands for a row of the engine."""
        return row * len(self.question.ours.rows[layer]) // len(self.question.theirs[layer])

    def _is_tied(self, layer: int, row: int) -> bool:
        ours, theirs = self.question.rows[layer][row], self.question.theirs[layer][row]
        cut = self.question.ours.cut(layer, self.our_row(layer, row))
        differing = np.setxor1d(ours, theirs)
        if cut is None or len(ours) != len(theirs):
            return False
        if any(self.question.ours.is_protected(layer, self.our_row(layer, row), one) for one in differing):
            return False
        scores = self.question.ours.scores[layer, self.our_row(layer, row), differing]
        are_equal = bool((scores == np.float32(cut)).all())
        return self.any_ties if are_equal else bool((np.abs(scores - cut) <= self.tolerance * abs(cut)).all())

    @cached_property
    def causes(self) -> list[Explained]:
        """The likely causes, best first. The search ends at one that explains everything."""
        if not self.different:
            return [Explained(UNSORTED, "the positions of a row are not ascending", 1.0)] if self.unsorted else []
        found: dict[str, Explained] = {}
        for name, text, predicted in causes(self.question):
            share = -1.0 if predicted is None else self._explained(predicted)
            if share >= LIKELY and (name not in found or share > found[name].share):
                found[name] = Explained(name, text, share)
            if share == 1:
                break
        return sorted(found.values(), key=lambda cause: -cause.share)

    def _explained(self, predicted: Predicted) -> float:
        """The share of the differing tokens that the prediction explains, over the rows that it is about. 1: every row
        is as predicted. Negative: it is worse than ours."""
        unexplained = differing = 0
        for ours, theirs, one in zip(self.question.rows, self.question.theirs, predicted, strict=True):
            for our_row, their_row, row in zip(ours, theirs, one, strict=True):
                if row is not None:
                    unexplained += len(np.setxor1d(row, their_row))
                    differing += len(np.setxor1d(our_row, their_row))
        return 1 - unexplained / differing if differing else -1.0

    def first_difference(self) -> str:
        """The first differing row: a token that one side keeps, with its score, its rank and the score at the cut."""
        if not self.different:
            return ""
        layer, row = self.different[0]
        ours, theirs = self.question.rows[layer][row], self.question.theirs[layer][row]
        number = self.question.ours.selection.numbers[layer]
        pieces = [f"layer {number}, head {row}"]
        if len(ours) != len(theirs):
            pieces.append(f"{len(theirs)} tokens kept, ours {len(ours)}")
        for what, tokens in (("keeps", np.setdiff1d(theirs, ours)), ("evicts", np.setdiff1d(ours, theirs))):
            if len(tokens):
                pieces.append(f"it {what} {tokens[0]}{self._rank(layer, row, int(tokens[0]))}")
        cut = self.question.ours.cut(layer, self.our_row(layer, row))
        return "; ".join(pieces) + ("" if cut is None else f"; score at our cut {cut:.6g}")

    def _rank(self, layer: int, row: int, token: int) -> str:
        row, ours = self.our_row(layer, row), self.question.ours
        if ours.is_protected(layer, row, token):
            return " (protected)"
        if ours.scores is None:
            return ""
        rank = 1 + int(np.flatnonzero(ours.ranked(layer, row) == token)[0])
        return f" (score {ours.scores[layer, row, token]:.6g}, rank {rank})"


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Shared tokens as a share of all; 1 of two empty sets."""
    union = len(np.union1d(a, b))
    return len(np.intersect1d(a, b)) / union if union else 1.0


def rows_of(comparison: Comparison) -> list[dict[str, object]]:
    """One record a row: layer (the model's own number), head, tokens of both sides, shared tokens, overlap, tied."""
    question: Question = comparison.question
    theirs: Rows = question.theirs
    return [
        {
            "layer": int(question.ours.selection.numbers[layer]),
            "head": row,
            "ours": len(question.rows[layer][row]),
            "theirs": len(theirs[layer][row]),
            "shared": len(np.intersect1d(question.rows[layer][row], theirs[layer][row])),
            "overlap": float(comparison.overlap[layer, row]),
            "tied": bool(comparison.tied[layer, row]),
        }
        for layer, row in np.ndindex(comparison.overlap.shape)
    ]
