"""The drawn part of a run: policies, budget, traces and metric of the command line, or defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd

from kvreplay.errors import Error, Refusal
from kvreplay.families import family_of
from kvreplay.headline import default_metric
from kvreplay.plot.colours import looks_of
from kvreplay.results import Run, Selection, TraceFacts
from kvreplay.run_names import (
    SELECT_SECONDS,
    chosen_labels,
    metric_names,
    metric_of_title,
    model_of_name,
    pick,
    pick_metrics,
)
from kvreplay.skill import TWIN

if TYPE_CHECKING:
    from kvreplay.plot.style import Sheet

VARIANTS = {"first": "first head", "mean": "mean over heads", "union": "union over heads"}


@dataclass(frozen=True)
class DrawnCell:
    """A cell with its selection."""

    label: str
    heads: str
    selection: Selection
    own_memory: bool  # it ignores the budget


@dataclass
class Choice:
    """A run and the options of the command line; empty: not given. `notes` collects notes for stderr."""

    run: Run
    policies: Sequence[str] = ()
    budgets_asked: Sequence[str] = ()
    traces_asked: Sequence[str] = ()
    metric_asked: str = ""
    variant: str = "mean"
    baseline: str = ""
    seed: int = 0
    layer: int | None = None
    head: int | None = None
    of: str = ""
    title: str = ""
    paper: bool = False
    page_width: float | None = None  # inches; None: that of the panels
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.run.cells.empty:
            raise Error(str(self.run.folder / "results.csv"), "empty", "at least one cell", "none")

    def fit(
        self, panel: float, columns: int, left: float, right: float, gap: float, least: float
    ) -> tuple[float, int]:  # fmt: skip
        """The width of a panel in inches, and the number of columns: `panel` and `columns` where the page has the width
        of its panels, else at most `columns` of panels that are at least `least` wide."""
        if self.page_width is None:
            return panel, columns

        def share(columns: int) -> float:
            return (self.page_width - left - right - (columns - 1) * gap) / columns

        columns = next((count for count in range(columns, 1, -1) if share(count) >= least), 1)
        return share(columns), columns

    def sheet(self, *grid: object, title: str, subtitle: str = "", caption: str = "", **room: object) -> Sheet:
        """The page of the figure. A page of a paper has no title but that of --title; its texts are a note, for the
        caption in the paper."""
        from kvreplay.plot.style import Sheet  # with most of matplotlib, which the report does not need

        if not self.paper:
            texts = {"title": self.title or title, "subtitle": subtitle, "caption": caption}
            return Sheet(*grid, width=self.page_width, **room, **texts)
        texts = [text[0].upper() + text[1:] for text in (title, subtitle) if text]
        texts += [caption] if caption else []  # which begins with the name of a model
        self.notes.append("caption: " + ". ".join(texts))
        return Sheet(*grid, width=self.page_width, margin=0.02, title=self.title, **room)

    @cached_property
    def asked_labels(self) -> list[str]:
        """Labels of the run that are no controls, in the order of its last call; others follow, sorted."""
        cells = self.run.cells
        known = set(cells["label"][cells["role"] != "control"])
        called = [one["label"] for one in self.run.about.get("cells", []) if one.get("label") in known]
        return [*dict.fromkeys(called), *sorted(known - set(called))]

    def role(self, label: str) -> str:
        """asked or control."""
        return "asked" if label in self.asked_labels else "control"

    def labels(self, controls: bool) -> list[str]:
        """Labels to draw: those of -p in its order, else all policies of the run's command line, and controls if
        wanted. Random twins are controls that are drawn only where -p names them: they are the reference of skill."""
        cells = self.run.cells
        rest = sorted(set(cells["label"]) - set(self.asked_labels))
        known = self.asked_labels + rest
        if self.policies:
            return chosen_labels("-p", cells, self.policies, known)
        if self.asked_labels and not controls:
            return list(self.asked_labels)
        twins = set(cells["label"][cells["policy"] == TWIN]) - set(self.asked_labels)
        return [label for label in known if label not in twins]

    def family(self, label: str) -> str:
        """The family of a label's policy."""
        cells = self.run.cells
        return family_of(cells["policy"][cells["label"] == label].iloc[0])

    @cached_property
    def looks(self) -> dict[str, dict[str, object]]:
        """Colour, dash and marker of each label to draw."""
        drawn = self.labels(controls=True)
        return looks_of(drawn, [label for label in drawn if self.role(label) == "control"])

    @cached_property
    def traces(self) -> list[str]:
        """The traces to draw, sorted; of one model, since layers and heads of two models have nothing in common."""
        known = sorted(set(self.run.cells["trace"]))
        chosen = pick("--trace", "trace", self.traces_asked, known) if self.traces_asked else known
        model_of = self.run.cells.drop_duplicates("trace").set_index("trace")["model"]
        models: dict[str, list[str]] = {}
        for trace in chosen:
            models.setdefault(model_of_name(model_of[trace]), []).append(trace)
        if len(models) > 1:
            example = ",".join(max(models.values(), key=len))
            found = "; ".join(f"{', '.join(traces)} of {model_of[traces[0]]}" for traces in models.values())
            raise Error("--trace", "traces of several models", f"--trace NAME,…, as in --trace {example}", found,
                        Refusal.USAGE)  # fmt: skip
        return chosen

    def one_trace(self) -> TraceFacts:
        """The trace of a figure that shows one: the first. From here on `traces` contains this trace only."""
        if len(self.traces) > 1:
            self.notes.append(f"draws trace {self.traces[0]}; use --trace for another of {len(self.traces)}")
            self.traces = self.traces[:1]
        return self.run.trace(self.traces[0])

    def one_layer(self, trace: TraceFacts) -> int:
        """The stored layer of a figure that shows one, by the model's own number (default: the middle treated)."""
        numbers = list(trace.layer_numbers)
        if self.layer is None:
            middle = int(trace.treated[len(trace.treated) // 2])
            if len(numbers) > 1:
                self.notes.append(f"draws layer {numbers[middle]}; use --layer for another of {len(numbers)}")
            return middle
        if self.layer not in numbers:
            raise Error("--layer", "no such layer in this trace", f"{numbers[0]} to {numbers[-1]}", str(self.layer),
                        Refusal.USAGE)  # fmt: skip
        return numbers.index(self.layer)

    @cached_property
    def budget_sizes(self) -> dict[str, float]:
        """Mean tokens of each budget of the run, over the requested traces, in ascending order."""
        cells = self.run.cells
        if self.traces_asked:
            cells = cells[cells["trace"].isin(self.traces)]
        return cells.groupby("budget")["budget_tokens"].mean().sort_values(kind="stable").to_dict()

    @cached_property
    def known_budgets(self) -> list[str]:
        """Budgets of the run's command line, as written there, in ascending order."""
        asked = set(self.run.cells["budget"][self.run.cells["role"] != "control"])
        return [budget for budget in self.budget_sizes if budget in asked or not asked]

    @property
    def budgets(self) -> list[str]:
        """The budgets to draw: -b, else all."""
        return pick("-b", "budget", self.budgets_asked or self.known_budgets, self.known_budgets)

    def budget_line(self) -> str:
        """The budget of a figure that shows one, in words."""
        budget = self.budgets[0]
        cells = self.run.cells[(self.run.cells["budget"] == budget) & self.run.cells["trace"].isin(self.traces)]
        sizes = sorted({f"{tokens:,.0f}" for tokens in cells["budget_tokens"]}, key=lambda one: (len(one), one))
        tokens = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        others = f", smallest of {', '.join(self.budgets)}" if len(self.budgets) > 1 else ""
        return f"budget {budget}{others}: {tokens} tokens per layer and head on average"

    def cells(self, trace: TraceFacts) -> list[DrawnCell]:
        """The cells of one trace at one budget that have a fixed set, in the order of `labels`."""
        budget, *larger = self.budgets
        if larger:
            self.notes.append(f"draws budget {budget}, the smallest; use -b for another: {', '.join(larger)}")
        table = self.run.cells
        table = table[(table["trace"] == trace.name) & (table["budget"] == budget)].set_index("label")
        drawn = []
        for label in self.labels(controls=False):
            if label not in table.index:
                self.notes.append(f"{label} has no cell at budget {budget}")
                continue
            row = table.loc[[label]].iloc[0]
            selection = self.run.selection_of(row["cell"], trace.boundary)
            if selection is None:
                self.notes.append(f"{label} has no static set")
            else:
                own_memory = (trace.name, row["cell"]) in self.run.own_memory
                drawn.append(DrawnCell(label, row["heads"], selection, own_memory))
        if not drawn:
            raise Error(str(self.run.folder), "nothing to draw", "a cell with a static set", "none")
        return drawn

    @cached_property
    def overall(self) -> pd.DataFrame:
        """Rows of `Run.overall`, and where they are requested the seconds of selection as one more metric."""
        if not self.metric_asked or metric_of_title(self.metric_asked) != SELECT_SECONDS:
            return self.run.overall
        table, cells, known = self.run.overall, self.run.cells, self.run.select_seconds
        seconds = cells.assign(
            trace_hash=cells["trace"].map(table.drop_duplicates("trace").set_index("trace")["trace_hash"]),
            metric=SELECT_SECONDS, variant="", layer="all", head="all", unit="s",
            value=[known.get(key, math.nan) for key in zip(cells["trace"], cells["cell"], strict=True)],
        )  # fmt: skip
        return pd.concat([table, seconds.dropna(subset="value")], ignore_index=True)

    @cached_property
    def metric(self) -> tuple[str, str]:
        """Name and variant. A metric whose values all have one variant needs no variant."""
        known = metric_names(self.overall)
        asked = self.metric_asked or default_metric(list(known), [self.run])
        variants = [name for name in known if name.partition(":")[0] == asked]
        if asked not in known and len(variants) > 1:
            raise Error("--metric", "metric with several variants", "one of " + ", ".join(variants), asked,
                        Refusal.USAGE)  # fmt: skip
        if asked not in known and variants:
            asked = variants[0]
        return known[pick_metrics([asked], list(known))[0]]

    @property
    def metric_name(self) -> str:
        """NAME[:VARIANT]."""
        return ":".join(filter(None, self.metric))

    @property
    def metric_words(self) -> str:
        """The metric as a heading calls it."""
        name, variant = self.metric
        return name.replace("_", " ").capitalize() + (f", {variant}," if variant else "")

    @property
    def metric_unit(self) -> str:
        """Its unit in parentheses, a space before them."""
        table = self.overall
        name, variant = self.metric
        units = set(table["unit"][(table["metric"] == name) & (table["variant"] == variant)]) - {"", "1"}
        return f" ({units.pop()})" if units else ""

    @property
    def metric_axis(self) -> str:
        """The metric with its unit, for an axis."""
        name, variant = self.metric
        return name.replace("_", " ") + (f", {variant}" if variant else "") + self.metric_unit

    def rows(self, metric: str) -> pd.DataFrame:
        """Rows of `overall` of a metric, of the chosen traces."""
        rows = self.overall
        mine = (rows["role"] != "trace") & (rows["metric"] == metric)
        return rows[mine & rows["trace"].isin(self.traces)]

    def rows_by_layer(self, metric: str) -> pd.DataFrame:
        """The same of single layers."""
        return self.run.rows(lambda rows: (
            (rows["layer"] != "all") & (rows["metric"] == metric) & rows["trace"].isin(self.traces)
        ))  # fmt: skip

    def values(self, by_layer: bool) -> pd.DataFrame:
        """Rows of the chosen metric, policies with controls, and budgets; a control may have other budgets."""
        name, variant = self.metric
        rows = self.rows_by_layer(name) if by_layer else self.rows(name)
        hidden = set(self.known_budgets) - set(self.budgets)
        return rows[(rows["variant"] == variant) & rows["label"].isin(self.labels(True)) & ~rows["budget"].isin(hidden)]

    def caption(self, *more: str) -> str:
        """The caption: model, trace, and the note that numbers are open loop."""
        cells = self.run.cells[self.run.cells["trace"].isin(self.traces)]
        if len(self.traces) == 1:
            fact = self.run.trace(self.traces[0])
            heads = f"{fact.query_heads} query and {fact.kv_heads} KV heads"
            tokens = f"{fact.prompt:,} prompt and {fact.tokens - fact.prompt:,} continuation tokens"
            line = f"{fact.model}, {heads}; trace {fact.name}, {tokens}"
        else:
            line = f"{cells['model'].iloc[0]}, {len(self.traces)} traces"
        return open_loop(line, cells["synthetic"].isin(["1", "true"]).any(), *more)


def open_loop(line: str, synthetic: bool, *more: str) -> str:
    """A caption: the origin of the numbers, further sentences, and the note that numbers are open loop."""
    pieces = [line, "Synthetic trace, not from a model" if synthetic else "", *more]
    return ". ".join(piece for piece in pieces if piece) + ". Open loop: queries as captured under the full cache."
