"""Which tokens do layers share? Layer × layer Jaccard similarity of the kept tokens, a panel a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.plot.figure_options import VARIANTS, Choice
from kvreplay.plot.style import LINE, POINT, SMALL, Drawing, PanelNames, columns_for, layer_ticks
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
    """Where the shared colours end: the next tenth above 99 % of what lies off the diagonals."""
    beside = np.concatenate([matrix[~np.eye(len(matrix), dtype=bool)] for matrix in matrices])
    if beside.size == 0:
        return 1.0
    return float(np.clip(np.ceil(np.quantile(beside, 0.99) * 10 - 1e-9) / 10, 0.1, 1.0))


def draw(choice: Choice) -> Drawing:
    """One matrix a policy, all on one colour scale, the mean of adjacent layers beside its chance level below each."""
    trace = choice.one_trace()
    cells = choice.cells(trace)
    matrices = [cell.selection.jaccard[choice.variant] for cell in cells]
    end = scale_end(matrices)
    stops = "" if end == 1 else f"Colours end at {end:.1f}; the diagonal is 1"

    columns = columns_for(len(cells))
    side, columns = choice.fit(1.72 if columns < 4 else 1.4, columns, 0.52, 0.8, 0.28, least=0.8)
    apart = ", " if side > 1.6 else "\n"
    names = PanelNames([(cell.label, cell.heads) for cell in cells], side + 0.1)
    lowest = 0.62 + (apart == "\n") * SMALL * LINE * POINT
    sheet = choice.sheet(
        len(cells), (side, side), columns, left=0.52, right=0.8, above=0.12, gap=(0.28, lowest + 0.13), below=lowest,
        headings=names.headings(columns), title="Jaccard similarity of the kept tokens of two layers",
        subtitle=f"{choice.budget_line()}; {VARIANTS[choice.variant]}; protected tokens (sinks and recent window) "
                 "excluded",
        caption=choice.caption("Chance: expected value of independent random sets of the same size", stops),
    )  # fmt: skip
    data = []
    for i, (cell, matrix) in enumerate(zip(cells, matrices, strict=True)):
        axis, layers = sheet.axes[i], cell.selection.numbers
        image = axis.imshow(matrix, cmap="cividis", vmin=0, vmax=end, interpolation="nearest")
        most = min(7, int(side / 0.22))
        layer_ticks(axis.xaxis, layers, most)
        layer_ticks(axis.yaxis, layers, most)
        axis.set_xlabel("layer", labelpad=1)
        if i % columns == 0:
            axis.set_ylabel("layer", labelpad=2)
        names.write(axis, i)
        adjacent = float(np.diagonal(matrix, 1).mean()) if len(matrix) > 1 else np.nan
        expected = chance(cell.selection, choice.variant)
        if np.isnan(adjacent):
            below = "one layer"
        elif not (cell.selection.mask() & cell.selection.unprotected()).any():
            below = f"only{apart.strip(',')}protected tokens"
        else:
            below = f"adjacent {adjacent:.3f}{apart}chance {expected:.3f}"
        axis.annotate(below, (0.5, 0), (0, -25), "axes fraction", "offset points", ha="center", va="top")
        about = {"policy": cell.label, "heads": cell.heads, "budget": choice.budgets[0], "variant": choice.variant}
        first, second = np.meshgrid(layers, layers, indexing="ij")
        pairs = {"quantity": "jaccard", "layer": first.ravel(), "other_layer": second.ravel(), "value": matrix.ravel()}
        data.append(pd.DataFrame(about | pairs))
        data.append(pd.DataFrame([about | {"quantity": "adjacent_mean", "value": adjacent},
                                  about | {"quantity": "adjacent_chance", "value": expected}]))  # fmt: skip
    sheet.colour_bar(image, "Jaccard similarity", extend="neither" if end == 1 else "max")
    table = pd.concat(data, ignore_index=True)
    return Drawing(sheet.figure, table.astype({"layer": "Int64", "other_layer": "Int64"}))
