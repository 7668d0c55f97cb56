"""The spans of a trace above a panel whose axis is the position in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from kvreplay.plot.style import LINE, POINT, SMALL, Sheet, width_of
from kvreplay.results import TraceFacts
from kvreplay.trace import Span

SPAN_COLOURS = {"needle": "#D55E00", "question": "#0072B2", "answer": "#009E73"}
OTHER = "#404040"
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


class SpanBrackets:
    """Those that begin in the compressed prompt, cut to it, the longest first; `width` of the panel in inches."""

    def __init__(self, trace: TraceFacts, width: float) -> None:
        """Brackets of a trace over a panel that shows its whole compressed prompt."""
        self.prompt, self.width = trace.boundary, width
        spans = [span for span in trace.spans if span.begin < self.prompt]
        spans = [Span(s.name, s.kind, s.begin, min(s.end, self.prompt)) for s in spans]
        self.spans = sorted(spans, key=lambda s: (s.begin - s.end, s.begin))
        self.rows = bracket_rows(self.spans, width / self.prompt, width)

    @property
    def height(self) -> float:
        """Inches that all rows take."""
        return (max((row for row, _ in self.rows), default=-1) + 1) * STEP

    def draw(self, sheet: Sheet, x: float, y: float) -> None:
        """A bracket over each span, its name above it, from the lower left corner (x, y) in inches."""
        if not self.spans:
            return
        axis = sheet.place(x, y, self.width, self.height)
        axis.set_xlim(0, self.width)
        scale = self.width / self.prompt
        for span, (row, centre) in zip(self.spans, self.rows, strict=True):
            colour = SPAN_COLOURS.get(span.kind, OTHER)
            low, begin, end = 0.03 + row * STEP, span.begin * scale, span.end * scale
            corners = [begin, begin, end, end], [low, low + 0.04, low + 0.04, low]
            axis.plot(*corners, color=colour, linewidth=1, clip_on=False)
            axis.text(centre, low + 0.065, span.name, color=colour, ha="center", va="baseline", clip_on=False)
        axis.set_ylim(0, self.height)
        axis.set_axis_off()

    def draw_beside(self, axis: Axes, scale: float, width: float) -> None:
        """Bars right of a panel of `width` inches whose downward axis is the position times `scale`."""
        coloured = [span for span in self.spans if span.kind in SPAN_COLOURS]
        for place, span in enumerate(coloured):
            x = 1 + (0.05 + 0.05 * place) / width
            axis.plot([x, x], [span.begin * scale, span.end * scale], transform=axis.get_yaxis_transform(),
                      color=SPAN_COLOURS[span.kind], linewidth=2.5, solid_capstyle="projecting",
                      clip_on=False)  # fmt: skip

    def edges(self) -> list[tuple[int, str]]:
        """Begin and end, with their colour, of the spans whose kind has one."""
        return [(edge, SPAN_COLOURS[span.kind]) for span in self.spans if span.kind in SPAN_COLOURS
                for edge in (span.begin, span.end)]  # fmt: skip
