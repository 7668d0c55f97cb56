"""Where do the kept tokens lie? Layer × position, grey by the share of heads that keep a token, a panel a policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvreplay.plot.choice import Choice
from kvreplay.plot.style import LINE, PAGE, POINT, SMALL, Drawing, Sheet, layer_ticks, width_of
from kvreplay.results import Span

COLUMNS = 1000  # at most; more tokens than the page can show are drawn as means of neighbours
SPAN_COLOURS = {"needle": "#D55E00", "question": "#0072B2", "answer": "#009E73"}
STEP = SMALL * LINE * POINT + 0.06  # inches a row of brackets takes


def bracket_rows(spans: Sequence[Span], inches_per_token: float, width: float) -> list[tuple[int, float]]:
    """Row and text centre (inches) of each span, so that neither brackets nor names of one row touch."""
    taken: list[list[tuple[float, float]]] = []
    found = []
    for span in spans:
        begin, end = span.begin * inches_per_token, span.end * inches_per_token
        half = width_of(span.name) / 2
        centre = min(max((begin + end) / 2, half), width - half)
        low, high = min(begin, centre - half) - 0.08, max(end, centre + half) + 0.08
        row = next((i for i, row in enumerate(taken) if all(high <= a or low >= b for a, b in row)), len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append((low, high))
        found.append((row, centre))
    return found


def brackets(axis: Axes, spans: Sequence[Span], rows: Sequence[tuple[int, float]], scale: float, height: float) -> None:
    """A bracket over each span, its name above it; the axes' unit is the inch."""
    for span, (row, centre) in zip(spans, rows, strict=True):
        colour = SPAN_COLOURS.get(span.kind, "#404040")
        low, begin, end = 0.03 + row * STEP, span.begin * scale, span.end * scale
        corners = [begin, begin, end, end], [low, low + 0.04, low + 0.04, low]
        axis.plot(*corners, color=colour, linewidth=1, clip_on=False)
        axis.text(centre, low + 0.065, span.name, color=colour, ha="center", va="baseline", clip_on=False)
    axis.set_ylim(0, height)
    axis.set_axis_off()


def draw(choice: Choice) -> Drawing:
    """One map a policy over the whole prompt, protected tokens included; the trace's spans in brackets above."""
    trace = choice.one_trace()
    cells = choice.cells(trace)
    per_column = -(-trace.boundary // COLUMNS)
    edges = np.append(np.arange(0, trace.boundary, per_column), trace.boundary)

    spans = [span for span in trace.spans if span.begin < trace.boundary]
    spans = [Span(s.name, s.kind, s.begin, min(s.end, trace.boundary)) for s in spans]
    spans.sort(key=lambda s: (s.begin - s.end, s.begin))
    left, right = 0.52, 0.15
    width = PAGE - left - right
    rows = bracket_rows(spans, width / trace.boundary, width)
    strip = (max((row for row, _ in rows), default=-1) + 1) * STEP
    tall = float(np.clip(0.03 * len(cells[0].selection.layers), 0.5, 1.2))
    name = SMALL * LINE * POINT + 0.07
    grey = "black: all heads keep the token, white: none"
    per = f"; a column is the mean of {per_column} tokens" if per_column > 1 else ""
    sheet = Sheet(
        len(cells), (width, tall), 1, left, right, above=strip + name + 0.08, gap=(0, name + 0.09), below=0.42,
        title=choice.title or "Tokens kept, by layer and position", subtitle=f"{choice.budget_line()}; {grey}{per}",
        caption=choice.caption(),
    )  # fmt: skip
    x, y, _, height = sheet.grid
    if spans:
        axis = sheet.place(x, y + height + name + 0.03, width, max(strip, STEP))
        axis.set_xlim(0, width)
        brackets(axis, spans, rows, width / trace.boundary, max(strip, STEP))
    data = []
    for i, cell in enumerate(cells):
        axis, layers = sheet.axes[i], cell.selection.numbers
        share = cell.selection.mask().mean(axis=1)  # [n,P]
        drawn = np.add.reduceat(share, edges[:-1], axis=1) / np.diff(edges)
        axis.imshow(
            drawn, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest",
            extent=(0, len(edges) - 1, len(layers) - 0.5, -0.5),
        )  # fmt: skip
        axis.set_xlim(0, trace.boundary / per_column)
        ticks = axis_ticks(trace.boundary)
        axis.set_xticks([tick / per_column for tick in ticks], [f"{tick:,}" for tick in ticks])
        layer_ticks(axis.yaxis, layers, most=4)
        axis.set_ylabel("layer", labelpad=2)
        axis.tick_params(labelbottom=i == len(cells) - 1)
        for span in spans:
            if span.kind in SPAN_COLOURS:
                for edge in (span.begin, span.end):
                    axis.axvline(edge / per_column, color=SPAN_COLOURS[span.kind], linewidth=0.5)
        axis.annotate(cell.label, (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
        axis.annotate(f"heads={cell.heads}", (1, 1), (0, 3), "axes fraction", "offset points", ha="right")
        data.append(pd.DataFrame({
            "policy": cell.label, "heads": cell.heads, "budget": choice.budgets[0],
            "layer": np.repeat(layers, len(edges) - 1), "begin": np.tile(edges[:-1], len(layers)),
            "end": np.tile(edges[1:], len(layers)), "kept_share": drawn.ravel(),
        }))  # fmt: skip
    sheet.axes[-1].set_xlabel("position of the token in the prompt")
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


def axis_ticks(prompt: int, most: int = 8) -> range:
    """Round positions below `prompt`, at most `most`."""
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return range(0, prompt, next(step for step in steps if prompt / step <= most))
