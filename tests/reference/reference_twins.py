"""Random twins, controls of policies: the same runs of kept tokens and the gaps between them in a random order."""

from __future__ import annotations

import dataclasses

import numpy as np
from reference import Trace, chain
from reference_selection import Selection, exactly, row_count


def random_twin(trace: Trace, chosen: Selection, seed: int) -> Selection:
    """The policy's selection with each row's unprotected tokens in other places; everything else is the policy's.

    Runs are ordered by chain(seed, stored layer, row, i), gaps by chain(seed, stored layer, row, i, 1). Layers that
    use another layer's set use its twin, whose hashes are those of the source layer.
    """
    rows: list[list[np.ndarray]] = []
    for layer, source in enumerate(chosen.source):
        kept, fixed = chosen.rows[source], chosen.protected[source]
        copies = len(kept) // row_count(trace, chosen.granularity(source))  # rows are repeated to the finest
        stored = trace.treated[source]
        twins = [in_another_order(row, fixed, trace.prompt, (seed, stored, i)) for i, row in enumerate(kept[::copies])]
        rows.append([twin for twin in twins for _ in range(len(chosen.rows[layer]) // len(twins))])
    decisions = [exactly((layer, i), row) for layer, of_layer in enumerate(rows) for i, row in enumerate(of_layer)]
    return dataclasses.replace(chosen, rows=rows, decisions=decisions)


def in_another_order(row: np.ndarray, fixed: np.ndarray, prompt: int, indices: tuple[int, int, int]) -> np.ndarray:
    """The row whose runs of kept tokens and gaps come in the order of their hashes; `fixed` is kept where it is.

    Of 16 tokens 0, 14 and 15 are fixed, and 2, 3, 5, 8, 9, 10 are kept: runs of 2, 1 and 3 tokens and gaps of 1, 1, 2
    and 3. For (1, 0, 0) the order of the runs is 1, 2, 0 and that of the gaps 0, 3, 2, 1. From token 1 on there are a
    gap of 1, a run of 1, a gap of 3, a run of 3, a gap of 2, a run of 2, a gap of 1: kept are 2, 6, 7, 8, 11 and 12.
    """
    candidates = np.setdiff1d(np.arange(prompt), fixed)  # neighbours: first and last tokens are fixed
    runs, gaps = lengths(np.isin(candidates, row))
    runs = runs[np.argsort(chain(*indices, np.arange(len(runs))), kind="stable")]
    gaps = gaps[np.argsort(chain(*indices, np.arange(len(gaps)), 1), kind="stable")]
    pieces = [np.repeat([False, True], pair) for pair in zip(gaps[:-1], runs, strict=True)]
    kept = np.concatenate([*pieces, np.zeros(gaps[-1], bool)])
    return np.union1d(fixed, candidates[kept])


def lengths(kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the m maximal runs of True, and of the m+1 gaps around them, of which the outer ones may be empty."""
    changes = np.flatnonzero(np.diff(kept.astype(int), prepend=0, append=0))
    begins, ends = changes[::2], changes[1::2]
    return ends - begins, np.append(begins, len(kept)) - np.insert(ends, 0, 0)


def skill(policy: float, twin: float, oracle: float) -> float | None:
    """Of recalls: 0 for the twin's, 1 for that of the best sets with the same counts; None where the two are equal."""
    return (policy - twin) / (oracle - twin) if oracle - twin > 1e-9 else None
