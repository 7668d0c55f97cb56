"""Where do the kept tokens lie? Layer × position, grey by the share of heads that keep a token, a panel a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.plot.columns import Columns
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.spans import SpanBrackets
from kvreplay.plot.style import LINE, PAGE, POINT, SMALL, TALLEST, Drawing, layer_ticks, position_ticks, wrap

LOWEST = 0.5  # inches of a map


def draw(choice: Choice) -> Drawing:
    """One map a policy over the whole prompt, protected tokens included; the trace's spans in brackets above."""
    trace = choice.one_trace()
    cells = choice.cells(trace)
    columns = Columns(trace.boundary)
    edges, per_column = columns.edges, columns.per_column

    left, right, gap = 0.52, 0.15, 0.45
    tall = float(np.clip(0.03 * len(cells[0].selection.layers), LOWEST, 1.2))
    is_crowded = choice.page_width is not None and len(cells) * (LOWEST + 0.3) + 1 > TALLEST
    width, across = choice.fit(PAGE - left - right, 2 if is_crowded else 1, left, right, gap, least=2.5)
    rows = -(-len(cells) // across)
    spans = SpanBrackets(trace, width)
    names = [wrap(cell.label, width, SMALL, "bold") for cell in cells]
    name = max(map(len, names)) * SMALL * LINE * POINT + 0.07
    if choice.page_width is not None:
        tall = float(np.clip((TALLEST - spans.height - 0.6) / rows - name - 0.09, LOWEST, tall))
    grey = "black: all heads keep the token, white: none"
    sheet = choice.sheet(
        len(cells), (width, tall), across, left, right, above=spans.height + name + 0.08, gap=(gap, name + 0.09),
        below=0.42,
        title="Kept tokens, by layer and position",
        subtitle=f"{choice.budget_line()}; {grey}{columns.words}",
        caption=choice.caption(),
    )  # fmt: skip
    x, y, _, height = sheet.grid
    for column in range(across):
        spans.draw(sheet, x + column * (width + gap), y + height + name + 0.03)
    data = []
    for i, cell in enumerate(cells):
        axis, layers = sheet.axes[i], cell.selection.numbers
        share = cell.selection.mask().mean(axis=1)  # [n,P]
        drawn = columns.means(share)
        heads = f"heads={cell.heads}"
        beside = "" if heads in cell.label else heads
        columns.draw(axis, drawn, (len(layers) - 0.5, -0.5), names[i], beside)
        axis.set_xlim(0, trace.boundary / per_column)
        position_ticks(axis.xaxis, trace.boundary, per_column)
        layer_ticks(axis.yaxis, layers, most=4)
        if i % across == 0:
            axis.set_ylabel("layer", labelpad=2)
        is_lowest = i + across >= len(cells)
        axis.tick_params(labelbottom=is_lowest)
        axis.set_xlabel("position of the token in the prompt" if is_lowest else "")
        for edge, colour in spans.edges():
            axis.axvline(edge / per_column, color=colour, linewidth=0.5)
        data.append(pd.DataFrame({
            "policy": cell.label, "heads": cell.heads, "budget": choice.budgets[0],
            "layer": np.repeat(layers, len(columns)), "begin": np.tile(edges[:-1], len(layers)),
            "end": np.tile(edges[1:], len(layers)), "kept_share": drawn.ravel(),
        }))  # fmt: skip
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))
