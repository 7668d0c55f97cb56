"""Which tokens do layers share? Layer × layer Jaccard similarity of the kept tokens, a panel a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.plot.figure_options import VARIANTS, Choice
from kvreplay.plot.jaccard_scale import chance, scale_end
from kvreplay.plot.style import LINE, POINT, SMALL, Drawing, PanelNames, columns_for, layer_ticks


def draw(choice: Choice) -> Drawing:
    """One matrix a policy, all on one colour scale, the mean of adjacent layers beside its chance level below each."""
    trace = choice.one_trace()
    cells = choice.cells(trace)
    chosen = [bool((cell.selection.mask() & cell.selection.unprotected()).any()) for cell in cells]
    matrices = [np.where(some, cell.selection.jaccard[choice.variant], np.nan)
                for some, cell in zip(chosen, cells, strict=True)]  # fmt: skip
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
        if len(matrix) == 1:
            below = "one layer"
        elif not chosen[i]:
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
