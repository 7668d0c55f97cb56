"""The style of all figures: sizes in inches, fonts of at least 8 points, colours that all readers can distinguish.

The layout of a figure begins with its panels. So a panel always has the same size: title, captions and margins enlarge
the page, not the panel.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvreplay.program import require_format, writing

PAGE = 7.0  # inches: both columns of a two-column page
COLUMN = 3.35  # inches: one of them, the narrowest figure without a given width
TALLEST = 8.0  # inches: a page of a paper, with room for a caption
POINT = 1 / 72  # inches
SMALL, MEDIUM, LARGE = 8.0, 9.0, 10.0  # points
LINE = 1.3  # line height over font size
QUIET = "#595959"

LOGARITHMIC = 10  # the largest value of an error over the smallest from which its axis is logarithmic
SAVED_AS = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}, "png": {}}

SETTINGS = rcParamsDefault | {
    "font.size": SMALL,
    "axes.titlesize": MEDIUM,
    "axes.labelsize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.linewidth": 0.6,
    "axes.formatter.limits": (-3, 6),  # longer numbers at ticks have no room
    "axes.edgecolor": QUIET,
    "axes.labelcolor": "black",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.6,
    "savefig.dpi": 200,
    "svg.hashsalt": "kvreplay",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Drawing:
    """A figure, the numbers drawn in it, and notes for its reader; with style="paper" one of these is the caption."""

    figure: Figure
    data: pd.DataFrame
    notes: Sequence[str] = ()

    def save(self, path: str | Path) -> list[Path]:
        """Writes svg, pdf, png or pgf by the path's suffix, in the style of all figures; the files written."""
        require_format("save", Path(path), *(f".{kind}" for kind in (*SAVED_AS, "pgf")))
        return save(self.figure, Path(path))

    def _repr_svg_(self) -> str:
        """The figure in a notebook."""
        return encoded(self.figure, "svg").decode()


def errors_need_logarithms(values: np.ndarray) -> bool:
    """Whether on a linear axis of errors the largest would flatten the others. Zeros, such as the error of the full
    cache, have no place on a logarithmic one and do not count."""
    positive = values[values > 0]
    return bool(positive.size and (values >= 0).all() and positive.max() >= LOGARITHMIC * positive.min())


# Leading digits of logarithmic ticks, the densest first. An axis of memory often has less than a decade.
COARSE = ((1, 2, 5), (1, 3))
DIGITS = {
    "x": ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 3, 5), *COARSE),
    "y": COARSE,
}


def logarithmic_axis(axes: Axes, which: str = "y") -> None:
    """A logarithmic x or y axis with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.yaxis if which == "y" else axes.xaxis
    low, high = axis.get_view_interval()
    width, height = axes.get_position().size * axes.figure.get_size_inches()
    logarithmic_ticks(axis, high / low, height / 0.25 if which == "y" else width / 0.4)
    axes.set(**{f"{which}lim": (low, high)})


def logarithmic_ticks(axis: Axis, span: float, most: float) -> None:
    """At most `most` ticks with plain numbers at round values. `span`: the end of the axis over its beginning."""
    digits = next((one for one in DIGITS[axis.axis_name] if len(one) * np.log10(span) <= most), (1,))
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axis.set_minor_locator(NullLocator())


@cache
def width_of(line: str, size: float = SMALL, weight: str = "normal") -> float:
    """Inches that a line of text takes, by the advance widths of its font: outlines would take 25 times as long."""
    if not line.strip():
        return 0.0
    properties = FontProperties(size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(line, properties, ismath=False)[0] * POINT


def wrap(line: str, width: float, size: float = SMALL, weight: str = "normal") -> list[str]:
    """The text in lines of at most `width` inches, broken behind spaces, commas, colons and
    hyphens of words."""
    lines = [""]
    for piece in re.split(r"(?<=[ ,:])(?=[^ ])|(?<=[a-z]-)(?=[a-z])", line):
        if lines[-1] and width_of((lines[-1] + piece).rstrip(), size, weight) > width:
            lines.append("")
        lines[-1] += piece
    return [one.rstrip() for one in lines]


class Sheet:
    """A grid of equal panels, sized in inches, with a title and a subtitle above it and a caption below."""

    def __init__(
        self,
        count: int,
        panel: tuple[float, float],
        columns: int = 1,
        left: float = 0.5,
        right: float = 0.1,
        above: float = 0.0,
        gap: tuple[float, float] = (0.3, 0.5),
        below: float = 0.45,
        headings: Sequence[float] = (),
        title: str = "",
        subtitle: str = "",
        caption: str = "",
        width: float | None = None,
        margin: float = 0.08,
    ) -> None:
        """Room in inches: `above` the first row of panels, `gap` between panels, `below` the last for ticks and labels;
        `headings` over each row, for the names of its panels. `width` of the page; None: that of its panels."""
        rows = -(-count // columns)
        names = np.cumsum(headings or [0.0] * rows)
        grid_width = columns * panel[0] + (columns - 1) * gap[0]
        width = width or max(left + grid_width + right, COLUMN)
        room = 0.98 * (width - 2 * margin)  # programs that show the page may set text a little wider
        heading = [(one, LARGE, "bold", "black") for one in wrap(title, room, LARGE, "bold") if title]
        heading += [(one, SMALL, "normal", "black") for one in wrap(subtitle, room) if subtitle]
        footing = [(one, SMALL, "normal", QUIET) for one in wrap(caption, room) if caption]
        top = margin + sum(size * LINE * POINT for _, size, _, _ in heading) + above
        bottom = margin + sum(size * LINE * POINT for _, size, _, _ in footing) + below
        height = top + names[-1] + rows * panel[1] + (rows - 1) * gap[1] + bottom
        self.figure = Figure(figsize=(width, height))
        self.size = (width, height)
        self.axes: list[Axes] = []
        for i in range(count):
            row, column = divmod(i, columns)
            x = left + column * (panel[0] + gap[0])
            y = height - top - names[row] - (row + 1) * panel[1] - row * gap[1]
            self.axes.append(self.place(x, y, *panel))
        self.grid = (left, bottom, grid_width, height - top - names[0] - bottom)
        for y, lines in ((height - margin, heading), (bottom - below, footing)):
            for one, size, weight, colour in lines:
                y -= size * LINE * POINT
                self.write(margin, y, one, size=size, weight=weight, color=colour)

    def place(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes at inches from the lower left corner."""
        w, h = self.size
        return self.figure.add_axes((x / w, y / h, width / w, height / h))

    def write(self, x: float, y: float, line: str, **look: object) -> None:
        """Text at inches from the lower left corner, its descenders above `y`."""
        self.figure.text(x / self.size[0], (y + 0.03) / self.size[1], line, va="baseline", **look)

    def colour_bar(self, image: object, label: str, beside: float = 0.15, **options: object) -> None:
        """The scale that all panels share, `beside` inches right of them."""
        x, y, width, height = self.grid
        tall = min(height, 2.4)
        axis = self.place(x + width + beside, y + height - tall, 0.1, tall)
        bar = self.figure.colorbar(image, cax=axis, **options)
        bar.set_label(label)
        bar.outline.set_linewidth(0.6)


class PanelNames:
    """The heading of each panel: the policy, wrapped to the panel's width, and its granularity."""

    def __init__(self, policies: Sequence[tuple[str, str]], width: float) -> None:
        """From (label, heads) of each panel; a label that tells the heads is enough."""
        self.lines: list[list[tuple[str, str]]] = []  # (text, weight), from the top
        for label, heads in policies:
            bold = [(line, "bold") for line in wrap(label, width, SMALL, "bold")]
            self.lines.append(bold if f"heads={heads}" in label else [*bold, (f"heads={heads}", "normal")])

    def headings(self, columns: int) -> list[float]:
        """Inches that the names of each row of panels take."""
        rows = [self.lines[i : i + columns] for i in range(0, len(self.lines), columns)]
        return [max(len(lines) for lines in row) * SMALL * LINE * POINT for row in rows]

    def write(self, axis: Axes, panel: int) -> None:
        """Over the panel's upper left corner."""
        for row, (line, weight) in enumerate(reversed(self.lines[panel])):
            lift = 3 + row * SMALL * LINE
            axis.annotate(line, (0, 1), (0, lift), "axes fraction", "offset points", weight=weight)


def columns_for(count: int) -> int:
    """Columns of a grid of small squares that is readable on a page."""
    return count if count <= 3 else 2 if count == 4 else 3 if count <= 9 else 4 if count <= 12 else 5


def layer_ticks(axis: object, layers: Sequence[int], most: int = 7) -> None:
    """Ticks at indices 0 … n-1, labelled with the layers' own numbers; evenly stepped, 0 and round steps first."""
    steps = [step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100) if (len(layers) - 1) // step + 1 <= most]
    ticks = np.arange(0, len(layers), steps[0] if steps else len(layers))
    axis.set_ticks(ticks, [str(layers[i]) for i in ticks])


def position_ticks(axis: object, prompt: int, per_column: float = 1, most: int = 8) -> None:
    """Ticks at most `most` round positions below `prompt`, on an axis whose unit is `per_column` tokens."""
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    ticks = range(0, prompt, next(step for step in steps if prompt / step <= most))
    axis.set_ticks([tick / per_column for tick in ticks], [f"{tick:,}" for tick in ticks])


def layer_axis(axis: Axes, layers: Sequence[int]) -> None:
    """An x axis from the first to the last layer, ticks at whole numbers."""
    margin = 0.02 * (max(layers) - min(layers)) or 0.5
    axis.set_xlim(min(layers) - margin, max(layers) + margin)
    inches = axis.get_position().width * axis.figure.get_figwidth()
    axis.xaxis.set_major_locator(MaxNLocator(nbins=min(7, int(inches / 0.3)), integer=True, min_n_ticks=1))
    axis.set_xlabel("layer")


def quiet_frame(axis: Axes) -> None:
    """Only the two axes that carry ticks, and a light horizontal grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e3e3e3", linewidth=0.6)


def spread(wanted: np.ndarray, sizes: np.ndarray, low: float, high: float) -> np.ndarray:
    """Centres nearest to `wanted` (least squares) of intervals of these sizes that do not overlap, within [low, high]
    where they fit.

    With z = wanted - (centres of the intervals one upon the other) in ascending order this is isotonic regression:
    neighbours that violate it share their mean.
    """
    order = np.argsort(wanted, kind="stable")
    stacked = np.cumsum(sizes[order]) - sizes[order] / 2
    blocks: list[list[float]] = []
    for value, centre in zip(wanted[order], stacked, strict=True):
        blocks.append([value - centre, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            other, more = blocks.pop()
            blocks.append([(mean * count + other * more) / (count + more), count + more])
    z = np.concatenate([np.full(int(count), mean) for mean, count in blocks])
    places = np.clip(z, low, max(low, high - sizes.sum())) + stacked
    found = np.empty_like(places)
    found[order] = places
    return found


@dataclass(frozen=True)
class LineEnd:
    """The end of a line, and its name, in one or more lines of text."""

    label: str
    x: float
    y: float
    colour: str


SAMPLE = 0.36  # inches: of a line beside its name in a legend


def text_height(label: str) -> float:
    """Inches that the lines of a text take."""
    return (1 + label.count("\n")) * SMALL * LINE * POINT


def label_room(labels: Sequence[str]) -> float:
    """Inches right of the axes that `label_ends` needs."""
    return max((width_of(line) for label in labels for line in label.split("\n")), default=0) + 0.36


def legend_room(names: Sequence[str]) -> float:
    """Inches right of the axes that `legend` needs."""
    return label_room(names) + SAMPLE - 0.14


def label_ends(axis: Axes, ends: Sequence[LineEnd], panel_height: float) -> None:
    """Names lines at their right end instead of in a legend: labels in the order of the lines, moved apart."""
    if not ends:
        return
    to_panel = axis.transData + axis.transAxes.inverted()
    heights = np.clip([to_panel.transform((end.x, end.y))[1] for end in ends], 0, 1)
    inches = heights * panel_height
    sizes = np.array([text_height(end.label) for end in ends])
    room = max(panel_height + SMALL * LINE * POINT, sizes.sum())
    places = spread(inches, sizes, (panel_height - room) / 2, (panel_height + room) / 2)
    right = axis.get_xlim()[1]
    width = axis.get_position().width * axis.figure.get_figwidth()
    for end, height, place in zip(ends, heights, places, strict=True):
        start = (to_panel.transform((min(end.x, right), end.y))[0], height)
        bend = (1 + 0.2 / width, place / panel_height)
        for a, b, look in ((start, (1.0, start[1]), ":"), ((1.0, start[1]), bend, "-")):
            axis.plot(*zip(a, b, strict=True), transform=axis.transAxes, color=end.colour, linestyle=look,
                      linewidth=0.6, clip_on=False, zorder=1)  # fmt: skip
        at = (1 + 0.24 / width, bend[1])
        several = "\n" in end.label
        axis.text(*at, end.label, transform=axis.transAxes, color=end.colour, linespacing=LINE * 0.9,
                  va="center" if several else "center_baseline")  # fmt: skip


def legend(axis: Axes, names: Sequence[str], looks: Sequence[dict[str, object]], panel_height: float) -> None:
    """Names lines from the top right corner of the axes down, each with a sample of its line. The marker is at its left
    end, where it hides no dash that distinguishes the line."""
    width = axis.get_position().width * axis.figure.get_figwidth()
    left, top = 1 + 0.1 / width, 1.0
    for name, look in zip(names, looks, strict=True):
        middle = top - text_height(name) / 2 / panel_height
        ends = [left, left + (SAMPLE - 0.06) / width]
        axis.plot(ends, [middle] * 2, transform=axis.transAxes, clip_on=False, **look | {"marker": ""})
        axis.plot(ends[:1], [middle], transform=axis.transAxes, clip_on=False, **look)
        axis.text(left + SAMPLE / width, middle, name, transform=axis.transAxes, linespacing=LINE * 0.9,
                  va="center" if "\n" in name else "center_baseline")  # fmt: skip
        top -= text_height(name) / panel_height


def encoded(figure: Figure, kind: str) -> bytes:
    """The figure as svg, pdf or png, without dates: the same figure gives the same bytes."""
    page = io.BytesIO()
    with settings():
        figure.savefig(page, format=kind, metadata=SAVED_AS[kind])
    return page.getvalue()


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes svg, pdf, png or pgf by the path's suffix; the files written."""
    kind = path.suffix[1:].lower()
    if kind == "pgf":
        from kvreplay.plot.pgf import save_pgf

        with settings():
            return save_pgf(figure, path)
    page = encoded(figure, kind)
    with writing(path):
        path.write_bytes(page)
    return [path]


def settings() -> object:
    """The context in which a figure is drawn and saved, whatever the user's own matplotlib settings are."""
    return rc_context(SETTINGS)
