"""The chance level and the colour scale of the similarity of layers, without a drawing."""

from __future__ import annotations

import numpy as np

from kvreplay.results import Selection


def chance(selection: Selection, variant: str) -> float:
    """Mean Jaccard similarity of adjacent layers if each drew its unprotected tokens independently.

    Two independent uniform sets with shares a and b of the same candidates share ab/(a+b-ab) of their union, which is
    f/(2-f) for a = b = f. Shares are those of each head (mean), of the first, or of the union over heads.
    """
    free = selection.unprotected()
    kept = selection.mask() & free
    if variant == "first":
        kept, free = kept[:, :1], free[:, :1]
    elif variant == "union":
        kept, free = kept.any(axis=1, keepdims=True), free.any(axis=1, keepdims=True)
    share = kept.sum(axis=2) / np.maximum(free.sum(axis=2), 1)
    both, either = share[:-1] * share[1:], share[:-1] + share[1:] - share[:-1] * share[1:]
    return float(np.where(either > 0, both / np.where(either > 0, either, 1), 1.0).mean()) if len(share) > 1 else np.nan


def scale_end(matrices: list[np.ndarray]) -> float:
    """End of the shared colours: the next tenth above 99 % of the defined similarities off the diagonals."""
    beside = np.concatenate([matrix[~np.eye(len(matrix), dtype=bool)] for matrix in matrices])
    if np.isnan(beside).all():
        return 1.0
    return float(np.clip(np.ceil(np.nanquantile(beside, 0.99) * 10 - 1e-9) / 10, 0.1, 1.0))
