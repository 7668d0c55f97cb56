"""Is a policy better than another, trace by trace? Paired differences against a baseline, a panel a budget."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.compare.comparison import Comparison, heads_shown
from kvreplay.compare.statistics import differences
from kvreplay.errors import Error
from kvreplay.plot.figure_options import Choice, open_loop
from kvreplay.plot.lines import WIDEST_NAME
from kvreplay.plot.style import LINE, PAGE, POINT, QUIET, SMALL, Drawing, width_of, wrap
from kvreplay.run_names import require_baseline

LABEL = 1.45  # inches at most; a longer name is broken
NARROWEST, WIDEST = 1.15, 2.6  # inches a panel
GOLDEN = (5**0.5 - 1) / 2  # multiples of it spread evenly over [0, 1), whatever their number
TOWARDS = {"higher": "better →", "lower": "← better", "neither": ""}


def draw(choice: Choice) -> Drawing:
    """A row a policy, in the order of -p or sorted by the first panel: each trace a small mark, the mean with its
    interval.

    Where rows are sorted, policies that are not at equal memory with the baseline are last: they have no rank.
    """
    require_baseline(choice.baseline, [choice.run.folder])
    budgets = choice.budgets
    comparison = Comparison(
        [choice.run], choice.baseline, choice.policies, budgets, [choice.metric_name], choice.traces_asked,
        seed=choice.seed,
    )  # fmt: skip
    choice.notes += comparison.notes
    lines = comparison.lines
    lines = lines[lines["pairs"] > 0]
    marks = differences(comparison.rows, comparison.baseline)
    if lines.empty:
        found = f"none for {choice.metric_name}"
        raise Error(str(choice.run.folder), "nothing to draw", f"traces with a value and that of {comparison.baseline}",
                    found)  # fmt: skip
    better = comparison.better.get(choice.metric_name, "neither")
    mean = lines.groupby("policy")["difference"].first()
    order = list(mean.sort_values(ascending=better == "lower", kind="stable").index)
    unranked = {label for _, label in comparison.unequal_memory}
    order = [label for label in order if label not in unranked] + [label for label in order if label in unranked]
    if choice.policies:
        order = [label for label in choice.labels(controls=True) if label in order]
    heads = {line.policy: heads_shown(line) for line in lines.itertuples()}
    names = {label: label if f"heads={heads[label]}" in label else f"{label} ({heads[label]})" for label in order}
    page = choice.page_width or PAGE
    names = {label: wrap(name, min(LABEL, WIDEST_NAME * page)) for label, name in names.items()}
    compared = int(lines["p"].notna().sum())
    unequal = comparison.unequal_memory
    verdicts = {(line.policy, line.budget): verdict(line, (line.budget, line.policy) in unequal)
                for line in lines.itertuples()}  # fmt: skip

    beside = max((width_of(one) for one in verdicts.values()), default=0) + 0.1
    counted = sorted({int(n) for n in lines["pairs"]})
    traces = f"{counted[0]}" if len(counted) == 1 else f"{counted[0]} to {counted[-1]}"
    prompts = comparison.cluster.nunique()
    left, right, gap = max(width_of(one) for name in names.values() for one in name) + 0.2, beside + 0.08, beside + 0.12
    columns = min(len(budgets), 3)
    room = float(np.clip((PAGE - left - right - (columns - 1) * gap) / columns, NARROWEST, WIDEST))
    room, columns = choice.fit(room, columns, left, right, gap, least=NARROWEST)
    row_height = 0.14 + max(map(len, names.values())) * SMALL * LINE * POINT
    sheet = choice.sheet(
        len(budgets), (room, row_height * len(order) + 0.1), columns, left, right,
        above=0.1, gap=(gap, 0.72), below=0.58,
        headings=[SMALL * LINE * POINT] * -(-len(budgets) // columns),
        title=f"{choice.metric_words} compared with {comparison.baseline}, trace by trace",
        subtitle=f"traces {traces}, prompts {prompts}; large mark: mean paired difference, bar: 95\u00a0% "
        "interval over prompts (an arrow if it continues), small marks: traces"
        + ("; right: traces better/same/worse" if TOWARDS[better] else ""),
        caption=open_loop(
            ", ".join(comparison.models), comparison.synthetic,
            f"* sign-flip p below 0.05 after Holm's correction over the {compared} comparisons drawn"
            if any("*" in words for words in verdicts.values()) else "",
            "Not equal: not at equal memory" if unequal else "",
        ),
    )  # fmt: skip
    data = []
    low, high = min(marks["difference"].min(), 0.0), max(marks["difference"].max(), 0.0)
    margin = 0.06 * (high - low) or 1.0
    for i, budget in enumerate(budgets):
        axis = sheet.axes[i]
        axis.axvline(0, color=QUIET, linewidth=0.8)
        for row, label in enumerate(order):
            own = lines[(lines["policy"] == label) & (lines["budget"] == budget)]
            if own.empty:
                axis.text(0, row, "no value", ha="center", va="center", color=QUIET)
                continue
            line = own.iloc[0]
            each = marks[(marks["label"] == label) & (marks["budget"] == budget)].sort_values("trace_name")
            colour = choice.looks[label]["color"]
            spread = (np.arange(len(each)) * GOLDEN % 1 - 0.5) * 0.5
            axis.plot(each["difference"], row + spread, "o", color=colour, markersize=2, alpha=0.45, markeredgewidth=0,
                      zorder=2)  # fmt: skip
            axis.plot([line["difference_low"], line["difference_high"]], [row, row], color="black", linewidth=1.6,
                      solid_capstyle="butt", zorder=3)  # fmt: skip
            for end, edge, arrow in (("difference_low", low - margin, "<"), ("difference_high", high + margin, ">")):
                if abs(line[end]) > abs(edge) and line[end] * edge > 0:  # the interval continues beyond the panel
                    axis.plot(edge, row, arrow, color="black", markersize=4.5, clip_on=False, zorder=3)
            axis.plot(line["difference"], row, choice.looks[label]["marker"], color=colour, markeredgecolor="black",
                      markeredgewidth=0.7, markersize=4.2, zorder=4)  # fmt: skip
            axis.annotate(verdicts[label, budget], (1, row), (4, 0), ("axes fraction", "data"), "offset points",
                          va="center_baseline")  # fmt: skip
            about = {"metric": line["metric"], "budget": budget, "policy": label, "heads": line["heads"],
                     "memory": line["memory"], "own_memory": line["own_memory"],
                     "baseline": comparison.baseline}  # fmt: skip
            statistics = line[["pairs", "paired_prompts", "difference", "difference_low", "difference_high", "p",
                               "p_holm", "wins", "ties", "losses"]]  # fmt: skip
            data.append(pd.DataFrame([about | {"quantity": "mean", "trace": ""} | statistics.to_dict()]))
            data.append(pd.DataFrame(about | {"quantity": "trace", "trace": each["trace_name"].to_numpy(),
                                              "difference": each["difference"].to_numpy()}))  # fmt: skip
        axis.set_xlim(low - margin, high + margin)
        axis.set_ylim(len(order) - 0.4, -0.6)
        axis.set_yticks(range(len(order)), ["\n".join(names[label]) for label in order])
        axis.tick_params(axis="y", length=0, labelleft=i % columns == 0)
        axis.xaxis.get_major_locator().set_params(nbins=4)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.grid(axis="x", color="#e3e3e3", linewidth=0.6)
        axis.annotate(f"budget {budget}", (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
        axis.set_xlabel("\n".join(filter(None, ["difference" + choice.metric_unit, TOWARDS[better]])))
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


def verdict(line, unequal_memory: bool) -> str:
    """Traces better/same/worse where the metric has a direction, and a star where the difference is significant."""
    if unequal_memory:
        return "not equal"
    counts = "" if pd.isna(line.wins) else f"{line.wins}/{line.ties}/{line.losses}"
    return f"{counts} *" if line.p_holm < 0.05 else counts
