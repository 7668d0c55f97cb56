"""Figures of a metric with one line a policy, named at its end: shared by `curve` and `layers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvreplay.compare.comparison import prompts_of
from kvreplay.compare.statistics import bootstrap_intervals
from kvreplay.errors import Error
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.style import (
    Drawing,
    LineEnd,
    Sheet,
    errors_need_logarithms,
    label_room,
    logarithmic_axis,
    quiet_frame,
)

INTERVAL = "Bands and bars: 95 % bootstrap interval of the mean over prompts"
PER_QUERY_HEAD = "\u2020"
FEWEST_JOINED = 3  # points; fewer are no curve and are not joined by a line
MOST_MARKERS = 8  # a line of more points has no markers


def mean_over_traces(rows: pd.DataFrame, by: list[str], prompts: pd.Series | None = None) -> pd.DataFrame:
    """Columns `by`, `traces` (count), `mean`, `low`, `high`: the interval is NaN for a single prompt.

    Every trace counts once in the mean. Traces of one prompt are not independent: `low` and `high` are the
    bootstrap interval over prompts of `kvreplay compare`, which never leaves the range of the values.

    `prompts`: int by trace_hash as `prompts_of` gives it; None: each row of a group is of another prompt.
    """
    groups = rows.groupby(by, sort=True)
    found = groups["value"].agg(traces="count", mean="mean").reset_index()
    prompt = groups.cumcount() if prompts is None else rows["trace_hash"].map(prompts)
    defined = rows["value"].notna().to_numpy()
    place = prompt.to_numpy()[defined], groups.ngroup().to_numpy()[defined]
    sums, counts = np.zeros((2, 1 + max(prompt, default=-1), len(found)))
    np.add.at(sums, place, rows["value"].to_numpy(float)[defined])
    np.add.at(counts, place, 1)
    low, high = bootstrap_intervals(sums, counts, seed=0)
    return found.assign(low=low, high=high)


def prompts_of_rows(choice: Choice, rows: pd.DataFrame) -> pd.Series:
    """The prompt of each trace of `rows`, int by trace_hash: the clusters of `kvreplay compare`."""
    return prompts_of(rows[["trace_hash", "trace"]].drop_duplicates("trace_hash"), [choice.run])


def rows_to_draw(choice: Choice, by_layer: bool) -> pd.DataFrame:
    """The chosen metric's defined values of single layers, or those over all layers."""
    rows = choice.values(by_layer).dropna(subset="value")
    if rows.empty:
        wanted = "values by layer (replay --detail layer)" if by_layer else "a value over all layers"
        found = "none of " + choice.metric_name
        raise Error(str(choice.run.folder / "results.csv"), "nothing to draw", wanted, found)
    return rows


def draw_mean(axis: Axes, line: pd.DataFrame, x: str, look: dict[str, Any], name: str) -> LineEnd:
    """Draws one line, rows of `mean_over_traces` along the column `x`, with its band if it has one. Returns its end.

    If the points are too few for a line, each is drawn separately, with its interval as a bar. `look`: from `looks_of`.
    """
    joined, bounded = len(line) >= FEWEST_JOINED, line[line["low"].notna()]
    if not joined:
        look = look | {"linestyle": "none"}
        axis.vlines(bounded[x], bounded["low"], bounded["high"], color=look["color"], linewidth=1)
    elif len(bounded):
        axis.fill_between(line[x], line["low"], line["high"], color=look["color"], alpha=0.15, linewidth=0)
    if len(line) > MOST_MARKERS:
        look = look | {"marker": ""}
    axis.plot(line[x], line["mean"], **look)
    return LineEnd(name, line[x].iloc[-1], line["mean"].iloc[-1], look["color"])


def draw_lines(
    choice: Choice, rows: pd.DataFrame, x: str, panel: tuple[float, float], title: str, subtitle: str
) -> tuple[Drawing, Axes, list[LineEnd]]:
    """Means of `rows` over traces along the column `x`, with bands where there are several traces.

    A control with a single value, next to lines with more, is drawn across the whole axis. Errors that differ by orders
    of magnitude have a logarithmic axis. The caller sets the scale of x, then names the lines with
    `label_ends`.
    """
    found = mean_over_traces(rows, ["label", x], prompts_of_rows(choice, rows))
    heads = rows.groupby("label")["heads"].first()
    facts = [choice.run.trace(name) for name in sorted(set(rows["trace"][rows["heads"] == "query"]))]
    group = max((fact.query_heads // fact.kv_heads for fact in facts), default=1)
    labels = [label for label in choice.labels(controls=True) if label in heads.index]
    is_error = choice.run.better_of(choice.metric_name) == "lower"
    logarithmic = is_error and errors_need_logarithms(found["mean"].to_numpy())
    zero = [label for label in labels if logarithmic and (found["mean"][found["label"] == label] == 0).all()]
    labels = [label for label in labels if label not in zero]
    marked = [label for label in labels if heads[label] == "query" and group > 1]
    names = {label: label + (f" {PER_QUERY_HEAD}" if label in marked else "") for label in labels}
    note = f"{PER_QUERY_HEAD} one set for each query head: its cache holds {group} times as much" if marked else ""
    interval = INTERVAL if found["traces"].max() > 1 else ""
    below = f"Always 0 and not on the logarithmic axis: {', '.join(zero)}" if zero else ""
    sheet = Sheet(
        1, panel, left=0.62, right=label_room(list(names.values())), above=0.12, below=0.45,
        title=choice.title or title, subtitle=subtitle, caption=choice.caption(note, below, interval),
    )  # fmt: skip
    axis, ends = sheet.axes[0], []
    for label in labels:
        line = found[found["label"] == label]
        look = choice.looks[label]
        if len(line) == 1 and choice.role(label) == "control":
            value = line["mean"].iloc[0]
            axis.axhline(value, **look | {"marker": ""})
            ends.append(LineEnd(names[label], found[x].max(), value, look["color"]))
        else:
            ends.append(draw_mean(axis, line, x, look, names[label]))
    quiet_frame(axis)
    axis.set_ylabel(choice.metric_axis)
    if logarithmic:
        logarithmic_axis(axis)
    axis.set_ylim(axis.get_ylim())
    data = found.rename(columns={"label": "policy"})
    data.insert(1, "role", data["policy"].map(choice.role))
    data.insert(2, "heads", data["policy"].map(heads))
    data.insert(3, "metric", choice.metric_name)
    return Drawing(sheet.figure, data), axis, ends
