"""Who gets the budget? Kept tokens by layer, a panel a policy."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import MaxNLocator

from kvreplay.plot.figure_options import Choice
from kvreplay.plot.style import QUIET, Drawing, PanelNames, columns_for


def draw(choice: Choice) -> Drawing:
    """Bars: mean over heads; a thin line spans the heads of a layer where they differ; dashed: the budget.

    The panels have one scale, that of the policies at equal memory: the bars of others may end beyond their panel."""
    trace = choice.one_trace()
    cells = choice.cells(trace)
    width, columns = choice.fit(1.85, columns_for(len(cells)), 0.65, 0.12, 0.18, least=1.0)
    panel = (width, 1.05)
    names = PanelNames([(cell.label, cell.heads) for cell in cells], panel[0])
    asked = choice.run.cells
    asked = asked[(asked["trace"] == trace.name) & (asked["budget"] == choice.budgets[0])]["budget_tokens"].iloc[0]
    at_equal_memory = [cell for cell in cells if not cell.own_memory] or cells
    top = 1.08 * max(asked, *(cell.selection.kept.max() for cell in at_equal_memory))
    cut = [cell.label for cell in cells if cell.selection.kept.max() > top]
    sheet = choice.sheet(
        len(cells), panel, columns, left=0.65, right=0.12, above=0.1, gap=(0.18, 0.35), below=0.42,
        headings=names.headings(columns), title="Kept tokens per layer",
        subtitle=f"{choice.budget_line()} (dashed); bars: mean over heads; thin lines: range over heads",
        caption=choice.caption(f"Not at equal memory, bars end beyond the panel: {', '.join(cut)}" if cut else ""),
    )  # fmt: skip
    data = []
    for i, cell in enumerate(cells):
        axis, layers, kept = sheet.axes[i], cell.selection.numbers, cell.selection.kept
        colour = choice.looks[cell.label]["color"]
        mean, least, most = kept.mean(axis=1), kept.min(axis=1), kept.max(axis=1)
        axis.bar(layers, mean, width=0.8, color=colour, alpha=0.75, linewidth=0)
        uneven = least < most
        axis.vlines(layers[uneven], least[uneven], most[uneven], color="black", linewidth=0.7)
        axis.axhline(asked, color=QUIET, linewidth=0.8, linestyle=(0, (4, 2)))
        axis.set_ylim(0, top)
        if cell.label in cut:
            axis.annotate(f"to {most.max():,}", (1, 1), (-3, -3), "axes fraction", "offset points", ha="right",
                          va="top", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
        axis.set_xlim(trace.layer_numbers[0] - 0.7, trace.layer_numbers[-1] + 0.7)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axis.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelleft=i % columns == 0)
        if i % columns == 0:
            axis.set_ylabel("tokens per head")
        if i + columns >= len(cells):
            axis.set_xlabel("layer")
        names.write(axis, i)
        data.append(pd.DataFrame({
            "policy": cell.label, "heads": cell.heads, "budget": choice.budgets[0],
            "layer": layers, "kept_mean": mean, "kept_least": least, "kept_most": most,
        }))  # fmt: skip
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))
