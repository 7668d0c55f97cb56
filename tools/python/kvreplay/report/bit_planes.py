"""Large arrays of a report as short text: quantised and compressed; equal arrays are stored once.

A plane is the base64 text of a zlib stream; the page decompresses it with the browser's DecompressionStream("deflate").
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field

import numpy as np

RANGE = 1e6  # largest over least attention that a level tells from none
STEPS = 254


def bits(kept: np.ndarray) -> bytes:
    """Packs each row of a bool [rows,P] into ceil(P/8) bytes, the first token in the lowest bit."""
    return np.packbits(kept, axis=1, bitorder="little").tobytes()


def triangle(matrix: np.ndarray) -> bytes:
    """The values above the diagonal of a symmetric [n,n] of shares in [0,1], row by row, as uint16: 65535 is 1."""
    above = matrix[np.triu_indices(len(matrix), 1)]
    return np.rint(np.clip(above, 0, 1) * 65535).astype("<u2").tobytes()


def rank_levels(scores: np.ndarray) -> np.ndarray:
    """The rank of each token in its layer from scores [n,H,P], mean over heads, as uint8 [n,P]: 0 is the best 1/256.

    Larger scores come first; among equal scores the lower position. This is the order in which tokens are kept.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.empty(scores.shape, dtype=np.int32)
    np.put_along_axis(ranks, order, np.arange(scores.shape[-1], dtype=np.int32)[None, None], axis=-1)
    return np.floor(ranks.mean(axis=1) * 256 / scores.shape[-1]).astype(np.uint8)


def attention_levels(attention: np.ndarray) -> tuple[np.ndarray, float]:
    """The nearest of 255 levels in geometric steps for attention [n,P], as uint8, and the largest attention m.

    Level k > 0 denotes m·10^(−6(255−k)/254), with an error below 2.8 %; level 0 denotes smaller attention.
    """
    most = float(attention.max(initial=0.0))
    levels = np.zeros(attention.shape, dtype=np.uint8)
    counts = attention >= most / RANGE if most > 0 else np.zeros(attention.shape, dtype=bool)
    steps = np.log(attention[counts] / most) / np.log(RANGE) * STEPS
    levels[counts] = np.rint(255 + steps).astype(np.uint8)
    return levels, most


@dataclass
class Planes:
    """The planes of one page, in at most `room` bytes."""

    room: int
    places: dict[str, int] = field(default_factory=dict)  # by plane, in the order in which they were added

    def add(self, raw: bytes) -> int | None:
        """The place of these bytes among the planes; None where they do not fit."""
        plane = base64.b64encode(zlib.compress(raw, 9)).decode("ascii")
        place = self.places.get(plane, len(self.places))
        cost = max(0, len(str(place)) - len("null"))
        if plane not in self.places:
            cost += len(plane) + len('"",')
        if cost > self.room:
            return None
        self.room -= cost
        return self.places.setdefault(plane, place)
