"""Which layers suffer? A metric by layer at one budget, a line a policy."""

from __future__ import annotations

from kvreplay.plot.figure_options import Choice
from kvreplay.plot.lines import draw_lines, rows_to_draw
from kvreplay.plot.style import Drawing, layer_axis

PANEL = (3.3, 2.3)  # inches


def draw(choice: Choice) -> Drawing:
    """Stored layers on the axis; layers that were not treated have no value."""
    rows = rows_to_draw(choice, by_layer=True)
    rows = rows[rows["budget"] == choice.budgets[0]]
    rows = rows.assign(layer=rows["layer"].astype(int))
    drawing = draw_lines(
        choice, rows, "layer", PANEL, title=f"{choice.metric_words} by layer",
        subtitle=choice.budget_line(), x_label="layer",
        set_x_axis=lambda axis: layer_axis(axis, rows["layer"]),
    )  # fmt: skip
    drawing.data.insert(4, "budget", choice.budgets[0])
    return drawing
