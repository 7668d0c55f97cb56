"""Which method has the least error for its memory? A metric over the bytes of the cache, a point a cell."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvreplay.errors import Error, Refusal
from kvreplay.pareto_front import on_front
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.lines import (
    BELOW,
    LinePanels,
    budget_free,
    control_words,
    draw_mean,
    interval_words,
    mean_over_traces,
    never_zero,
    prompts_of_rows,
    rows_to_draw,
)
from kvreplay.plot.style import Drawing, logarithmic_axis, logarithmic_ticks

PANEL = (2.9, 2.4)  # inches
MEMORY = "kv_bytes"
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
FRONT = {"color": "black", "linewidth": 0.8, "zorder": 1}  # unlike the lines of policies, and of controls in grey
FULL_BITS = 16  # bits per number of the full cache on the second axis


def draw(choice: Choice) -> Drawing:
    """Means over traces; the points of a policy are joined over its budgets, those of budget-free policies are not."""
    better = choice.run.better_of(choice.metric_name)
    if better not in ("higher", "lower"):
        raise Error("--metric", "no direction", "a metric of which higher or lower values are better",
                    choice.metric_name, Refusal.USAGE)  # fmt: skip
    rows = rows_with_memory(choice)
    prompts = prompts_of_rows(choice, rows)
    points = points_of(choice, rows, prompts, better == "lower")
    unit = next(name for name, size in UNITS.items() if points[MEMORY].max() >= size or size == 1)
    points["memory"] = points[MEMORY] / UNITS[unit]
    full = full_bytes(choice)
    points.insert(points.columns.get_loc(MEMORY) + 1, "bits_per_number", FULL_BITS * points[MEMORY] / full)
    labels = [label for label in choice.labels(controls=True) if label in set(points["policy"])]
    names, logarithmic, below = never_zero(choice, points, labels)
    panels = LinePanels(
        choice, {label: label for label in names}, PANEL, title=f"{choice.metric_words} by memory",
        subtitle="a point for each budget; circles and black steps: Pareto front, controls excluded"
        + control_words(choice, names),
        caption=choice.caption(below, interval_words(points[points["policy"].isin(names)], prompts, logarithmic)),
        below=BELOW if np.isnan(full) else 2 * BELOW,
    )  # fmt: skip
    drawn = points[points["policy"].isin(names)]
    front = drawn[drawn["on_front"]]
    for axis, members, ends in panels:
        axis.step(front["memory"], front["mean"], where="post", **FRONT)
        for label in members:
            line, look = points[points["policy"] == label], choice.looks[label] | {"markevery": 1}
            pieces = [line.iloc[[i]] for i in range(len(line))] if line["budget_free"].any() else [line]
            ends.append(
                [draw_mean(axis, piece, "memory", look, panels.names[label], logarithmic) for piece in pieces][-1]
            )
            ringed = line[line["on_front"]]
            axis.plot(ringed["memory"], ringed["mean"], "o", markersize=7, markerfacecolor="none",
                      markeredgecolor="black", markeredgewidth=0.7, linestyle="none", zorder=3)  # fmt: skip

    def set_x_axis(axis: Axes) -> None:
        low, high = drawn["memory"].min(), drawn["memory"].max()
        axis.set_xlim(low / 1.15, high * 1.15)
        logarithmic_axis(axis, "x")

    panels.finish(f"memory of kept keys and values ({unit})", set_x_axis, logarithmic)
    for axis in () if np.isnan(full) else panels.bottom_axes:
        add_bits_axis(axis, FULL_BITS * UNITS[unit] / full)
    return Drawing(panels.sheet.figure, points.drop(columns="memory"))


def full_bytes(choice: Choice) -> float:
    """Mean memory of the full cache over the chosen traces; NaN if the run lacks `full` on one of them."""
    rows = choice.rows(MEMORY)
    full = rows[(rows["policy"] == "full") & (rows["params"] == "") & (rows["variant"] == "")]
    return full.groupby("trace")["value"].first().reindex(choice.traces).mean(skipna=False)


def add_bits_axis(axis: Axes, bits: float) -> None:
    """A second x axis, below the first one: a unit of memory is `bits` for each number of the full cache."""
    width, height = axis.get_position().size * axis.figure.get_size_inches()
    functions = (lambda memory: memory * bits, lambda number: number / bits)
    second = axis.secondary_xaxis(-BELOW / height, functions=functions)
    second.set_xlabel(f"bits per number (full cache: {FULL_BITS})")
    low, high = axis.get_xlim()
    logarithmic_ticks(second.xaxis, high / low, width / 0.4)


def rows_with_memory(choice: Choice) -> pd.DataFrame:
    """Rows of the metric, with the column kv_bytes and whether the policy ignores the budget."""
    rows = rows_to_draw(choice, by_layer=False)
    memory = choice.rows(MEMORY)
    memory = memory[memory["variant"] == ""].dropna(subset="value")[["trace", "cell", "value"]]
    rows = rows.merge(memory.rename(columns={"value": MEMORY}), on=["trace", "cell"])
    if rows.empty:
        raise Error(str(choice.run.folder / "results.csv"), "nothing to draw",
                    f"values of {MEMORY} (replay --metrics {MEMORY})", "none")  # fmt: skip
    return rows.assign(budget_free=budget_free(choice, rows))


def points_of(choice: Choice, rows: pd.DataFrame, prompts: pd.Series, less_is_better: bool) -> pd.DataFrame:
    """A row for each point, by policy and ascending memory; equal points of several budgets are one."""
    found = mean_over_traces(rows, ["label", "budget"], prompts)
    groups = rows.groupby(["label", "budget"])
    found = found.merge(groups[[MEMORY, "budget_tokens"]].mean().reset_index(), on=["label", "budget"])
    found = found.merge(groups[["heads", "budget_free"]].first().reset_index(), on=["label", "budget"])
    found = found.sort_values(["label", MEMORY, "budget_tokens"], kind="stable")
    found = found.drop_duplicates(["label", MEMORY, "mean"]).reset_index(drop=True)
    found.insert(1, "role", found["label"].map(choice.role))
    found.insert(2, "metric", choice.metric_name)
    found["on_front"] = on_front(found[MEMORY], found["mean"] * (1 if less_is_better else -1), found["role"] == "asked")
    return found.rename(columns={"label": "policy"}).sort_values([MEMORY, "policy"], kind="stable")
