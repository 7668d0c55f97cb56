"""Are the tokens kept that are attended to later? Eval attention over the prompt, kept tokens in a strip a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.errors import Error, Refusal
from kvreplay.plot.columns import Columns
from kvreplay.plot.figure_options import Choice, DrawnCell
from kvreplay.plot.spans import SpanBrackets
from kvreplay.plot.style import (
    LINE,
    PAGE,
    POINT,
    SMALL,
    TALLEST,
    Drawing,
    position_ticks,
    quiet_frame,
    width_of,
    wrap,
)
from kvreplay.results import TraceFacts

PANEL, LOWEST = 1.5, 0.9  # inches
STRIP = 0.17  # inches
FAINTEST = 1e-6  # of an eval query's attention: less is drawn as this
GREY = "#8c8c8c"  # of attention: spans have the colours


def kept_share(cell: DrawnCell, layer: int, head: int | None, facts: TraceFacts) -> np.ndarray | None:
    """Share of the layer's sets that keep a token, float [boundary]; of a query head, its own set: 0 or 1.

    None where the policy left the layer as it is.
    """
    treated = np.flatnonzero(cell.selection.layers == layer)
    if not len(treated):
        return None
    rows = cell.selection.mask()[treated[0]]
    if head is None:
        return rows.mean(axis=0)
    return rows[head * len(rows) // facts.query_heads].astype(float)


def draw(choice: Choice) -> Drawing:
    """One curve over the prompt; below it a strip a policy, black where a token is kept."""
    facts = choice.one_trace()
    layer, head = choice.one_layer(facts), choice.head
    if head is not None and not 0 <= head < facts.query_heads:
        raise Error("--head", "no such query head", f"0 to {facts.query_heads - 1}", str(head), Refusal.USAGE)
    number = facts.layer_numbers[layer]
    attention = choice.run.eval_attention(facts.name, layer, head)
    if attention.shape != (facts.boundary,):
        where = f"{choice.run.cells_path(facts.name)}:/traces/{facts.name}"
        raise Error(where, "eval attention", f"{facts.boundary} tokens", str(list(attention.shape)))
    if np.isnan(attention).any():
        treated = ", ".join(map(str, facts.layer_numbers[facts.treated]))
        raise Error("--layer", "not treated in this run", f"one of {treated}", str(number), Refusal.USAGE)
    strips = [(cell, kept_share(cell, layer, head, facts)) for cell in choice.cells(facts)]
    choice.notes += [f"{cell.label} leaves layer {number} as it is" for cell, share in strips if share is None]
    strips = [(cell, share) for cell, share in strips if share is not None]
    if not strips:
        raise Error("--layer", "nothing to draw", "a layer that a policy treats", str(number), Refusal.USAGE)

    columns = Columns(facts.boundary)
    edges, per_column = columns.edges, columns.per_column
    left, right = 0.62, 0.15
    width = (choice.page_width or PAGE) - left - right
    spans = SpanBrackets(facts, width)
    names = [wrap(cell.label, width, SMALL, "bold") for cell, _ in strips]
    name = max(map(len, names)) * SMALL * LINE * POINT + 0.05
    pitch = STRIP + name + 0.05
    rest = len(strips) * pitch + spans.height + 0.7
    tall = PANEL if choice.page_width is None else float(np.clip(TALLEST - rest, LOWEST, PANEL))
    whose = f"query head {head}" if head is not None else f"mean over {facts.query_heads} query heads"
    grey = "black: kept" if head is not None else "black: kept by all sets of the layer, white: by none"
    sheet = choice.sheet(
        1, (width, tall), 1, left, right, above=spans.height + 0.1, below=len(strips) * pitch + 0.48,
        title=f"Attention of evaluation queries and kept tokens: layer {number}, {whose}",
        subtitle=f"{choice.budget_line()}; {grey}{columns.words}",
        caption=choice.caption(f"Mean over {queries(choice, facts)} evaluation queries"),
    )  # fmt: skip
    axis = sheet.axes[0]
    shown = columns.means(attention)
    axis.stairs(np.maximum(shown, FAINTEST), edges / per_column, baseline=FAINTEST, fill=True, color=GREY,
                linewidth=0)  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(FAINTEST, 1)
    axis.set_ylabel("attention to a token")
    quiet_frame(axis)
    pages = [axis]
    x, y, _, height = sheet.grid
    spans.draw(sheet, x, y + height + 0.03)
    total = attention.sum()
    data = []
    for i, (cell, share) in enumerate(strips):
        strip = sheet.place(x, y - 0.04 - (i + 1) * pitch, width, STRIP)
        strip.set_yticks([])
        held = "" if f"heads={cell.heads}" in cell.label else f"heads={cell.heads}"
        if head is not None and total > 0:
            part = f"{100 * (attention @ share) / total:.1f} %"
            held = ": ".join(filter(None, (held, f"holds {part} of this head's attention to the prompt")))
            if width_of(names[i][-1], weight="bold") + width_of(held) + 0.1 > width:
                held = part
        columns.draw(strip, columns.means(share)[None], (0, 1), names[i], held)
        pages.append(strip)
        data.append(pd.DataFrame({
            "policy": cell.label, "heads": cell.heads, "budget": choice.budgets[0], "layer": number,
            "head": "mean" if head is None else head, "begin": edges[:-1], "end": edges[1:],
            "attention": shown, "kept_share": columns.means(share),
        }))  # fmt: skip
    for page in pages:
        page.set_xlim(0, facts.boundary / per_column)
        position_ticks(page.xaxis, facts.boundary, per_column)
        page.tick_params(labelbottom=page is pages[-1])
        for edge, colour in spans.edges():  # behind the curve and below the strips: a short span is not hidden
            ends = (0, 1) if page is axis else (-0.28, 0)
            page.plot([edge / per_column] * 2, ends, color=colour, linewidth=0.8, linestyle=(0, (4, 2)),
                      clip_on=False, zorder=0.5, transform=page.get_xaxis_transform())  # fmt: skip
    pages[-1].set_xlabel("position of the token in the prompt")
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


def queries(choice: Choice, facts: TraceFacts) -> str:
    """The number of eval queries of the trace, from results.csv."""
    table = choice.run.overall
    return table[table["trace"] == facts.name]["n_queries"].iloc[0]
