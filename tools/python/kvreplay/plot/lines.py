"""Figures of a metric with one line a policy: shared by `curve`, `layers` and `tradeoff`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvreplay.compare.comparison import prompts_of
from kvreplay.compare.statistics import mean_intervals
from kvreplay.errors import Error
from kvreplay.families import families
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.style import (
    LINE,
    PAGE,
    POINT,
    SMALL,
    Drawing,
    LineEnd,
    errors_need_logarithms,
    label_ends,
    label_room,
    legend,
    legend_room,
    logarithmic_axis,
    quiet_frame,
    text_height,
    wrap,
)

INTERVAL = "Bands and bars: 95 % interval of the mean over prompts"
WITH_ZERO = "; no band where it includes 0, which is not on the logarithmic axis"
PER_QUERY_HEAD = "\u2020"
MOST_MARKERS = 8  # of a line
MOST_NAMED = 8  # lines of a panel that are named at their ends
WIDEST_NAME = 0.4  # of the page; a longer name is broken
LEFT = 0.62  # inches
BELOW = 0.45  # inches: ticks and label of an x axis


def mean_over_traces(rows: pd.DataFrame, by: list[str], prompts: pd.Series | None = None) -> pd.DataFrame:
    """Columns `by`, `traces` (count), `mean`, `low`, `high`: the interval is NaN for a single prompt.

    Every trace counts once in the mean. Traces of one prompt are not independent: `low` and `high` are the interval
    over prompts of `kvreplay compare`.

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
    low, high = mean_intervals(sums, counts)
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


def budget_free(choice: Choice, rows: pd.DataFrame) -> np.ndarray:
    """Which rows are of policies that are not at equal memory, controls excluded: bool."""
    free = [key in choice.run.own_memory for key in zip(rows["trace"], rows["cell"], strict=True)]
    return np.array(free, dtype=bool) & ~(rows["label"].map(choice.role) == "control").to_numpy()


def draw_mean(
    axis: Axes, line: pd.DataFrame, x: str, look: dict[str, Any], name: str, logarithmic: bool = False
) -> LineEnd:
    """Draws one line, rows of `mean_over_traces` along the column `x`, with its band if it has one. Returns its end.

    A single point has its interval as a bar. `look`: from `looks_of`; `logarithmic`: the axis of the mean will be, on
    which a mean of 0 is a gap, and a band that includes 0 has no lower edge.
    """
    joined, bounded = len(line) > 1, line[line["low"].notna()]
    if not joined:
        look = look | {"linestyle": "none"}
        axis.vlines(bounded[x], bounded["low"], bounded["high"], color=look["color"], linewidth=1)
    elif len(bounded):
        axis.fill_between(line[x], line["low"], line["high"], where=(line["low"] > 0) | (not logarithmic),
                          color=look["color"], alpha=0.15, linewidth=0)  # fmt: skip
    if len(line) > MOST_MARKERS:
        look = {"markevery": len(line) // MOST_MARKERS + 1} | look
    has_place = (line["mean"] > 0) | (not logarithmic)
    axis.plot(line[x], line["mean"].where(has_place), **look)
    end = (line[has_place] if has_place.any() else line).iloc[-1]
    return LineEnd(name, end[x], end["mean"], look["color"])


class LinePanels:
    """Panels of lines with their names: one for at most MOST_NAMED policies, else one for each family of policies.
    Controls are in each panel.

    Lines are named at their ends; those of a panel with more policies in a legend. All panels have the same y axis.
    """

    def __init__(
        self, choice: Choice, names: dict[str, str], panel: tuple[float, float], title: str, subtitle: str,
        caption: str, below: float = BELOW,
    ) -> None:  # fmt: skip
        """`names` that are shown, by label; `panel`: inches of one panel; `below`: inches for x axes."""
        self.choice = choice
        self.groups = groups_of(choice, list(names))
        longest = WIDEST_NAME * (choice.page_width or PAGE)
        self.names = {label: "\n".join(wrap(name, longest)) for label, name in names.items()}
        right = max(
            (legend_room if self.needs_legend(group) else label_room)([self.names[label] for label in group])
            for group in self.groups.values()
        )
        gap = right + 0.4
        self.y_label = wrap(choice.metric_axis, 1.6 if choice.page_width else panel[1])
        left = LEFT + (len(self.y_label) - 1) * SMALL * LINE * POINT
        width, columns = choice.fit(panel[0], min(2, len(self.groups)), left, right, gap, least=1.1)
        tallest = max(sum(text_height(self.names[label]) for label in group) for group in self.groups.values())
        height = max(min(panel[1], max(1.5, width)), tallest)
        self.headings = [wrap(family, width, SMALL, "bold") for family in self.groups if family]
        rows = [self.headings[i : i + columns] for i in range(0, len(self.headings), columns)]
        headings = [max(map(len, row)) * SMALL * LINE * POINT for row in rows]
        self.sheet = choice.sheet(
            len(self.groups), (width, height), columns, left=left, right=right, above=0.12, below=below,
            gap=(gap, 0.42), headings=headings, title=title, subtitle=subtitle, caption=caption,
        )  # fmt: skip
        self.columns, self.height = columns, height
        self.ends: list[list[LineEnd]] = [[] for _ in self.groups]

    def __iter__(self) -> Iterator[tuple[Axes, list[str], list[LineEnd]]]:
        """Axes and labels of each panel, and the list that its lines' ends are to be appended to."""
        return zip(self.sheet.axes, self.groups.values(), self.ends, strict=True)

    @property
    def bottom_axes(self) -> list[Axes]:
        """The lowest panel of each column."""
        return self.sheet.axes[-self.columns :]

    def needs_legend(self, group: list[str]) -> bool:
        """Whether the lines of a panel are too many for names at their ends."""
        return sum(self.choice.role(label) != "control" for label in group) > MOST_NAMED

    def finish(self, x_label: str, set_x_axis: Callable[[Axes], None], logarithmic: bool = False) -> None:
        """Sets the axes, those of x by `set_x_axis`, and names the lines."""
        for axis in self.sheet.axes if logarithmic else ():
            axis.set_yscale("log")
        low = min(axis.get_ylim()[0] for axis in self.sheet.axes)
        high = max(axis.get_ylim()[1] for axis in self.sheet.axes)
        for i, axis in enumerate(self.sheet.axes):
            quiet_frame(axis)
            axis.yaxis.get_offset_text().set(va="top", x=0.01)  # inside: a heading or the subtitle is above
            axis.set_ylim(low, high)
            if logarithmic:
                logarithmic_axis(axis)
            axis.set_ylim(axis.get_ylim())
            set_x_axis(axis)
            if i % self.columns == 0:
                axis.set_ylabel("\n".join(self.y_label))
            axis.set_xlabel(x_label if axis in self.bottom_axes else "")
            if self.headings:
                axis.annotate(
                    "\n".join(self.headings[i]), (0, 1), (0, 4), "axes fraction", "offset points", weight="bold"
                )
        for axis, labels, ends in self:
            if self.needs_legend(labels):
                looks = [self.choice.looks[label] for label in labels]
                legend(axis, [self.names[label] for label in labels], looks, self.height)
            else:
                label_ends(axis, ends, self.height)


def groups_of(choice: Choice, labels: list[str]) -> dict[str, list[str]]:
    """The labels of each panel of lines, controls last where there are several panels, by the name of the panel."""
    controls = [label for label in labels if choice.role(label) == "control"]
    if len(labels) - len(controls) <= MOST_NAMED:
        return {"": labels}
    groups: dict[str, list[str]] = {family: [] for family in families()}
    for label in labels:
        if label not in controls:
            groups[choice.family(label)].append(label)
    groups = {family: members + controls for family, members in groups.items() if members}
    return groups if len(groups) > 1 else {"": labels}


def shown_names(choice: Choice, rows: pd.DataFrame, labels: list[str]) -> tuple[dict[str, str], str]:
    """The name of each label, with a mark where each query head has a separate set; and the sentence on the mark."""
    heads = rows.groupby("label")["heads"].first()
    facts = [choice.run.trace(name) for name in sorted(set(rows["trace"][rows["heads"] == "query"]))]
    group = max((fact.query_heads // fact.kv_heads for fact in facts), default=1)
    marked = [label for label in labels if heads[label] == "query" and group > 1]
    names = {label: label + (f" {PER_QUERY_HEAD}" if label in marked else "") for label in labels}
    note = f"{PER_QUERY_HEAD} one set for each query head: its cache holds {group} times as much" if marked else ""
    return names, note


def never_zero(choice: Choice, found: pd.DataFrame, labels: list[str]) -> tuple[list[str], bool, str]:
    """The labels to draw, whether the axis of the metric is logarithmic, and what it omits: means of 0 have no place on
    a logarithmic axis, and neither have labels whose means are all 0. `found` has the columns policy and mean."""
    is_error = choice.run.better_of(choice.metric_name) == "lower"
    logarithmic = is_error and errors_need_logarithms(found["mean"].to_numpy())
    zeros = (found["mean"] == 0).groupby(found["policy"]).mean()  # share of each policy
    always = [label for label in labels if logarithmic and zeros[label] == 1]
    partly = [label for label in labels if logarithmic and 0 < zeros[label] < 1]
    said = {"Always 0 and not on the logarithmic axis": always, "Gaps where the value is 0": partly}
    sentences = ". ".join(f"{words}: {', '.join(named)}" for words, named in said.items() if named)
    return [label for label in labels if label not in always], logarithmic, sentences


def interval_words(means: pd.DataFrame, prompts: pd.Series, logarithmic: bool) -> str:
    """The number of traces of each mean, that of prompts, and the interval that is drawn; empty for a single trace.
    `means` has the columns of `mean_over_traces`."""
    fewest, most = int(means["traces"].min()), int(means["traces"].max())
    if most == 1:
        return ""
    traces = f"{most}" if fewest == most else f"{fewest} to {most}"
    with_zero = WITH_ZERO if logarithmic and (means["low"] <= 0).any() else ""
    return f"Means over n = {traces} traces of {prompts.nunique()} prompts. {INTERVAL}{with_zero}"


def control_words(choice: Choice, labels: list[str]) -> str:
    """The end of a subtitle: how controls are drawn, where there are some."""
    return "; controls in grey" if any(choice.role(label) == "control" for label in labels) else ""


def draw_lines(
    choice: Choice, rows: pd.DataFrame, x: str, panel: tuple[float, float], title: str, subtitle: str, x_label: str,
    set_x_axis: Callable[[Axes], None],
) -> Drawing:  # fmt: skip
    """Means of `rows` over traces along the column `x`, with bands where there are several traces.

    A control with a single value, next to lines with more, is drawn across the whole axis. Errors that differ by orders
    of magnitude have a logarithmic axis. `set_x_axis` sets scale, limits and ticks of an x axis.
    """
    prompts = prompts_of_rows(choice, rows)
    found = mean_over_traces(rows, ["label", x], prompts).rename(columns={"label": "policy"})
    heads = rows.groupby("label")["heads"].first()
    labels = [label for label in choice.labels(controls=True) if label in heads.index]
    labels, logarithmic, below = never_zero(choice, found, labels)
    names, note = shown_names(choice, rows, labels)
    intervals = interval_words(found[found["policy"].isin(labels)], prompts, logarithmic)
    panels = LinePanels(choice, names, panel, title, subtitle + control_words(choice, labels),
                        choice.caption(note, below, intervals))  # fmt: skip
    for axis, members, ends in panels:
        for label in members:
            line = found[found["policy"] == label]
            look = choice.looks[label]
            if len(line) == 1 and choice.role(label) == "control":
                value = line["mean"].iloc[0]
                axis.axhline(value, **look | {"marker": ""})
                ends.append(LineEnd(panels.names[label], found[x].max(), value, look["color"]))
            else:
                ends.append(draw_mean(axis, line, x, look, panels.names[label], logarithmic))
    panels.finish(x_label, set_x_axis, logarithmic)
    data = found
    data.insert(1, "role", data["policy"].map(choice.role))
    data.insert(2, "heads", data["policy"].map(heads))
    data.insert(3, "metric", choice.metric_name)
    return Drawing(panels.sheet.figure, data)
