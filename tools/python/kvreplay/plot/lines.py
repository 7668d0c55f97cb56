"""A metric drawn as one line a policy, named at its end: what `curve` and `layers` share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvreplay.compare.comparison import prompts_of
from kvreplay.errors import Error
from kvreplay.plot.choice import Choice
from kvreplay.plot.style import Drawing, LineEnd, Sheet, label_room, line_style, quiet_frame

INTERVAL = "Band: 95 % t interval of the mean, prompts being independent"
PER_QUERY_HEAD = "\u2020"
MOST_MARKERS = 8  # a line of more points goes without


def t_quantile(freedom: int, share: float = 0.95) -> float:
    """The t that |T| exceeds with probability 1 - share, T of Student's distribution with `freedom` degrees.

    For whole degrees the probability within ±t is a finite sum in the sine and cosine of atan(t/sqrt(freedom))
    (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4); it grows with the angle, which is bisected.
    """

    def within(angle: float) -> float:
        odd = freedom % 2
        term = total = math.cos(angle) if odd else 1.0
        for k in range(2 + odd, freedom - 1, 2):
            term *= (k - 1) / k * math.cos(angle) ** 2
            total += term
        if not odd:
            return math.sin(angle) * total
        return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def mean_over_traces(rows: pd.DataFrame, by: list[str], prompts: pd.Series | None = None) -> pd.DataFrame:
    """Columns `by`, `traces` (count), `mean`, `low`, `high`: the 95 % t interval, NaN for a single prompt.

    Every trace counts once in the mean m of n values. Traces of one prompt are no independent evidence: with R_c the
    sum of x - m over the traces of prompt c, of k prompts, the variance of m is k/(k-1) sum R_c^2 / n^2 (Cochran 1977,
    chapter 6: m is a ratio of sums over prompts), with k - 1 degrees of freedom. Where each prompt has as many traces
    it is the t interval over the means of the prompts; with one trace a prompt that over the traces. Unlike the
    bootstrap of `compare` it does not shrink where prompts are few, as they are in a figure's cells.

    `prompts`: int by trace_hash as `prompts_of` gives it; None: each row is of a prompt of its own.
    """
    groups = rows.groupby(by, sort=True)["value"]
    found = groups.agg(traces="count", mean="mean").reset_index()
    prompt = np.arange(len(rows)) if prompts is None else rows["trace_hash"].map(prompts).to_numpy()
    keys = [*(rows[name].to_numpy() for name in by), prompt]
    sums = (rows["value"] - groups.transform("mean")).groupby(keys).sum(min_count=1)
    spread = (sums**2).groupby(level=list(range(len(by))), sort=True).agg(["sum", "count"]).reset_index(drop=True)
    k = spread["count"]
    quantiles = k.map({n: t_quantile(n - 1) for n in set(k) if n > 1})
    half = quantiles * np.sqrt(k / (k - 1) * spread["sum"]) / found["traces"]
    return found.assign(low=found["mean"] - half, high=found["mean"] + half)


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
    """One line, rows of `mean_over_traces` along the column `x`, with its band where it has one; where it is named.

    `look` as of `line_style`.
    """
    if line["low"].notna().any():
        axis.fill_between(line[x], line["low"], line["high"], color=look["color"], alpha=0.15, linewidth=0)
    if len(line) > MOST_MARKERS:
        look = {key: value for key, value in look.items() if key != "marker"}
    axis.plot(line[x], line["mean"], **look)
    return LineEnd(name, line[x].iloc[-1], line["mean"].iloc[-1], look["color"])


def draw_lines(
    choice: Choice, rows: pd.DataFrame, x: str, panel: tuple[float, float], title: str, subtitle: str
) -> tuple[Drawing, Axes, list[LineEnd]]:
    """Means of `rows` over traces along the column `x`, with bands where there are several traces.

    A control with a single value beside lines that have more holds everywhere: it is drawn across. The caller sets the
    scale of x, then names the lines with `label_ends`.
    """
    found = mean_over_traces(rows, ["label", x], prompts_of_rows(choice, rows))
    heads = rows.groupby("label")["heads"].first()
    facts = [choice.run.trace(name) for name in sorted(set(rows["trace"][rows["heads"] == "query"]))]
    group = max((fact.query_heads // fact.kv_heads for fact in facts), default=1)
    labels = [label for label in choice.labels(controls=True) if label in heads.index]
    marked = [label for label in labels if heads[label] == "query" and group > 1]
    names = {label: label + (f" {PER_QUERY_HEAD}" if label in marked else "") for label in labels}
    note = f"{PER_QUERY_HEAD} one set for each query head: its cache holds {group} times as much" if marked else ""
    several = found["traces"].max() > 1
    sheet = Sheet(
        1, panel, left=0.62, right=label_room(list(names.values())), above=0.12, below=0.45,
        title=choice.title or title, subtitle=subtitle, caption=choice.caption(note, INTERVAL if several else ""),
    )  # fmt: skip
    axis, ends = sheet.axes[0], []
    for label in labels:
        line = found[found["label"] == label]
        look = line_style(label, choice.role(label), choice.asked_labels)
        if len(line) == 1 and choice.role(label) == "control":
            value = line["mean"].iloc[0]
            axis.axhline(value, **look)
            ends.append(LineEnd(names[label], found[x].max(), value, look["color"]))
        else:
            ends.append(draw_mean(axis, line, x, look, names[label]))
    quiet_frame(axis)
    axis.set_ylabel(choice.metric_axis)
    axis.set_ylim(axis.get_ylim())
    data = found.rename(columns={"label": "policy"})
    data.insert(1, "role", data["policy"].map(choice.role))
    data.insert(2, "heads", data["policy"].map(heads))
    data.insert(3, "metric", choice.metric_name)
    return Drawing(sheet.figure, data), axis, ends
