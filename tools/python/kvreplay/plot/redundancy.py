"""How alike are tokens? Redundancy of keys and of values, by layer and by position."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.errors import Error
from kvreplay.plot.colours import COLOURS
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.style import (
    Drawing,
    LineEnd,
    label_ends,
    label_room,
    layer_axis,
    quiet_frame,
)

BINS = 60  # at most, along the prompt
KINDS = {"key": COLOURS[0], "value": COLOURS[1]}


def quartiles(values: np.ndarray, axis: int) -> np.ndarray:
    """Lower quartile, median and upper quartile: [3, …]."""
    return np.quantile(values.astype(np.float64), [0.25, 0.5, 0.75], axis=axis)


def draw(choice: Choice) -> Drawing:
    """Medians with quartiles: over tokens for each layer, over layers and neighbouring tokens for each position."""
    trace = choice.one_trace()
    if not trace.redundancy:
        where = f"{choice.run.cells_path(trace.name)}:/traces/{trace.name}"
        raise Error(where, "redundancy was not measured", "metrics redundancy_key and redundancy_value", "neither")
    per_bin = -(-trace.boundary // BINS)
    edges = np.append(np.arange(0, trace.boundary, per_bin), trace.boundary)
    room = label_room(list(KINDS))
    width, columns = choice.fit(2.45, 2, 0.58, room, 0.25, least=1.4)
    panel = (width, 1.9 if columns == 2 else 1.4)
    sheet = choice.sheet(
        2, panel, columns, left=0.58, right=room, above=0.12, gap=(0.25, 0.5), below=0.42,
        title="Redundancy: cosine similarity to the most similar other token of the prompt",
        subtitle="line: median; band: quartiles; left: over tokens, right: over layers"
        + (f" and {per_bin} neighbouring tokens" if per_bin > 1 else ""),
        caption=choice.caption("Token vectors: all KV heads of a layer concatenated"),
    )  # fmt: skip
    by_layer, by_position = sheet.axes
    ends, data = [], []
    for kind, values in trace.redundancy.items():
        colour = KINDS[kind]
        measured = ~np.isnan(values).any(axis=1)
        layer, values = trace.layer_numbers[measured], values[measured]
        layers = quartiles(values, axis=1)
        pairs = zip(edges[:-1], edges[1:], strict=True)
        positions = np.stack([quartiles(values[:, a:b].ravel(), axis=0) for a, b in pairs], axis=1)
        middle = (edges[:-1] + edges[1:] - 1) / 2
        for axis, by, x, begin, end, (low, median, high) in (
            (by_layer, "layer", layer, layer, layer + 1, layers),
            (by_position, "position", middle, edges[:-1], edges[1:], positions),
        ):
            if len(x) > 1:
                axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
                axis.plot(x, median, color=colour)
            else:
                axis.vlines(x, low, high, color=colour, linewidth=1)
                axis.plot(x, median, "o", color=colour)
            data.append(pd.DataFrame({
                "tensor": kind, "by": by, "begin": begin, "end": end,
                "lower_quartile": low, "median": median, "upper_quartile": high,
            }))  # fmt: skip
        ends.append(LineEnd(kind, middle[-1], positions[1, -1], colour))
    bottom = min(axis.get_ylim()[0] for axis in sheet.axes)
    top = max(axis.get_ylim()[1] for axis in sheet.axes)
    for axis in sheet.axes:
        axis.set_ylim(bottom, top)
        quiet_frame(axis)
    layer_axis(by_layer, layer)
    by_layer.set_ylabel("redundancy (cosine)")
    by_position.set_xlabel("position of the token in the prompt")
    by_position.set_xlim(0, trace.boundary)
    by_position.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    by_position.tick_params(labelleft=columns == 1)
    if columns == 1:
        by_position.set_ylabel("redundancy (cosine)")
    label_ends(by_position, ends, panel[1])
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))
