"""Positions of a prompt as columns of a page."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

MOST = 1000  # more than these a page cannot show


class Columns:
    """At most MOST columns: a token each, or the mean of `per_column` neighbours. `edges`: int [columns + 1]."""

    def __init__(self, tokens: int) -> None:
        """All `tokens` of a prompt; the last column may have fewer than the others."""
        self.per_column = -(-tokens // MOST)
        self.edges = np.append(np.arange(0, tokens, self.per_column), tokens)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def means(self, values: np.ndarray) -> np.ndarray:
        """Float [..., columns] of values [..., tokens]."""
        return np.add.reduceat(values, self.edges[:-1], axis=-1) / np.diff(self.edges)

    def draw(self, axis: Axes, shares: np.ndarray, rows: tuple[float, float], name: list[str], beside: str) -> None:
        """Shares [n, columns] in grey between the heights `rows`, with lines of a name and other words above."""
        axis.imshow(shares, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest",
                    extent=(0, len(self), *rows))  # fmt: skip
        axis.annotate("\n".join(name), (0, 1), (0, 1.5), "axes fraction", "offset points", weight="bold", va="bottom")
        axis.annotate(beside, (1, 1), (0, 3), "axes fraction", "offset points", ha="right")

    @property
    def words(self) -> str:
        """The addition to a subtitle if a column is more than one token."""
        return f"; a column is the mean of {self.per_column} tokens" if self.per_column > 1 else ""
