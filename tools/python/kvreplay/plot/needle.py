"""Is the needle kept, however deep it lies? Span recall by prompt length and depth, a panel a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.lines import mean_over_traces, prompts_of_rows
from kvreplay.plot.style import QUIET, Drawing, PanelNames, columns_for
from kvreplay.results import TraceFacts
from kvreplay.trace import Span

METRIC = "span_recall"
DEPTHS = 10  # needles share a row by their depth to the nearest tenth
ROW, LOWEST = 0.22, 0.6  # inches a row, and a panel
SAME_LENGTH = 1.1  # prompts within this factor of the shortest of a column share it
VARIANTS = {"any": "by at least one head", "mean": "mean over heads", "full": "whole by at least one head"}


def columns_of(lengths: list[int]) -> dict[int, int]:
    """The column of each prompt length: one more than SAME_LENGTH longer than a column's shortest begins the next."""
    columns: dict[int, int] = {}
    shortest = 0
    for length in sorted(set(lengths)):
        if not columns or length > SAME_LENGTH * shortest:
            shortest = length
            columns[length] = len(set(columns.values()))
        else:
            columns[length] = max(columns.values())
    return columns


def context_of(needle: Span, trace: TraceFacts) -> Span | None:
    """The span of kind context that the needle lies in; None: the trace names none."""
    around = [span for span in trace.spans if span.kind == "context" and span.begin <= needle.begin < span.end]
    return around[0] if around else None


def depth_of(needle: Span, trace: TraceFacts) -> float:
    """Where the needle begins, in tokens, as a fraction of the context around it; of the prompt where none is named."""
    context = context_of(needle, trace) or Span("prompt", "prompt", 0, trace.prompt)
    return (needle.begin - context.begin) / (context.end - context.begin)


def places_of(traces: list[TraceFacts]) -> str:
    """The range of which depths are fractions: context, prompt, or both."""
    needles = [(span, trace) for trace in traces for span in trace.spans if span.kind == "needle"]
    return " or ".join(sorted({"context" if context_of(*one) else "prompt" for one in needles}))


def draw(choice: Choice) -> Drawing:
    """One matrix a policy: a row each depth and a column each length that the traces have, in a cell the mean over its
    needles; it is crossed out where there is none."""
    name, _, measure = (choice.metric_asked or METRIC).partition(":")
    measure = measure or "mean"
    if name != METRIC:
        raise Error("--metric", "not a metric of this figure", f"{METRIC}:{'|'.join(VARIANTS)}", name, Refusal.USAGE)
    if measure not in VARIANTS:
        raise Error("--metric", "unknown variant", nearest(measure, VARIANTS), measure, Refusal.USAGE)
    facts = {name: choice.run.trace(name) for name in choice.traces}
    needles = pd.DataFrame(
        [
            {"trace": fact.name, "variant": f"{span.name}.{measure}", "prompt_tokens": fact.prompt,
             "depth": depth_of(span, fact)}
            for fact in facts.values() for span in fact.spans if span.kind == "needle" and span.end <= fact.prompt
        ],
        columns=["trace", "variant", "prompt_tokens", "depth"],
    )  # fmt: skip
    where = str(choice.run.folder)
    if needles.empty:
        raise Error(where, "no needle", "traces with a span of kind needle in the prompt", f"{len(facts)} without")
    rows = choice.rows(METRIC)
    rows = rows[rows["budget"] == choice.budgets[0]].dropna(subset="value")
    rows = rows[["trace", "trace_hash", "variant", "label", "heads", "value"]].merge(needles, on=["trace", "variant"])
    if rows.empty:
        raise Error(where, "nothing to draw", f"span_recall:NEEDLE.{measure} of a needle span", "none")

    column = columns_of(list(rows["prompt_tokens"]))
    rows["column"] = rows["prompt_tokens"].map(column)
    rows["tenth"] = np.floor(rows["depth"] * DEPTHS + 0.5).astype(int)
    tenths = sorted(set(rows["tenth"]))
    rows["row"] = rows["tenth"].map(tenths.index)
    cells = mean_over_traces(rows, ["label", "heads", "row", "column"], prompts_of_rows(choice, rows))
    lengths = rows.drop_duplicates(["trace", "column"]).groupby("column")["prompt_tokens"].mean()

    place = places_of([facts[name] for name in sorted(set(rows["trace"]))])
    labels = [label for label in choice.labels(controls=False) if label in set(rows["label"])]
    columns = columns_for(len(labels))
    wanted = float(np.clip(0.34 * len(lengths), 1.1, 1.75))
    width, columns = choice.fit(wanted, columns, 0.62, 0.8, 0.2, least=0.8)
    panel = (width, max(LOWEST, ROW * len(tenths)))
    heads = rows.groupby("label")["heads"].first()
    names = PanelNames([(label, heads[label]) for label in labels], panel[0])
    sheet = choice.sheet(
        len(labels), panel, columns, left=0.62, right=0.8, above=0.1, gap=(0.2, 0.55), below=0.47,
        headings=names.headings(columns),
        title="Share of the needle kept, by depth and prompt length",
        subtitle=f"{choice.budget_line()}; span recall, {VARIANTS[measure]}, mean over layers; depth in the {place}",
        caption=choice.caption(f"Numbers and colours: mean over the needles of a cell, {counts_text(cells)}; ×: none"),
    )  # fmt: skip
    data = []
    for i, label in enumerate(labels):
        axis = sheet.axes[i]
        mine = cells[cells["label"] == label]
        grid = np.full((len(tenths), len(lengths)), np.nan)
        grid[mine["row"], mine["column"]] = mine["mean"]
        image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        empty = np.argwhere(np.isnan(grid))
        axis.plot(empty[:, 1], empty[:, 0], "x", color=QUIET, markersize=3, markeredgewidth=0.6)
        for one in mine.itertuples():
            colour = "white" if one.mean < 0.5 else "black"
            axis.text(one.column, one.row, share_text(one.mean), color=colour, ha="center", va="center_baseline")
        step = -(-len(lengths) * 0.33 // panel[0])
        shown = np.arange(0, len(lengths), max(1, int(step)))
        axis.set_xticks(shown, [short(lengths.iloc[k]) for k in shown])
        axis.set_yticks(range(len(tenths)), [f"{100 * tenth // DEPTHS}" for tenth in tenths])
        axis.tick_params(length=0, labelleft=i % columns == 0)
        if i % columns == 0:
            axis.set_ylabel("depth / %")
        axis.set_xlabel("prompt tokens")
        names.write(axis, i)
        data.append(pd.DataFrame({
            "policy": label, "heads": heads[label], "budget": choice.budgets[0], "measure": measure,
            "prompt_tokens": mine["column"].map(lengths), "depth": np.take(tenths, mine["row"]) / DEPTHS,
            "traces": mine["traces"], "span_recall": mine["mean"],
            "low": mine["low"], "high": mine["high"],
        }))  # fmt: skip
    sheet.colour_bar(image, "share kept", ticks=[0, 0.5, 1])
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


def share_text(share: float) -> str:
    """A share for a narrow cell: .07, 1."""
    return "1" if share > 0.995 else f"{share:.2f}"[1:] if share > 0 else "0"


def counts_text(cells: pd.DataFrame) -> str:
    """How many needles the cells have: 1 each, 1 to 3."""
    least, most = cells["traces"].min(), cells["traces"].max()
    return f"{least} each" if least == most else f"{least} to {most}"


def short(tokens: float) -> str:
    """A prompt length for a narrow tick: 480, 3.2k, 128k."""
    return f"{tokens:.0f}" if tokens < 1000 else f"{tokens / 1000:.3g}k"
