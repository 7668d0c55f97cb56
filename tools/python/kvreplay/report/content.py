"""The content of the page: numbers as in the run, large arrays as planes, and notes on omitted planes."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps

from kvreplay import __version__
from kvreplay.compare.comparison import Comparison
from kvreplay.errors import Error, Refusal
from kvreplay.families import families
from kvreplay.pareto_front import on_front
from kvreplay.plot.colours import on_dark
from kvreplay.plot.figure_options import VARIANTS, Choice
from kvreplay.plot.jaccard_scale import chance, scale_end
from kvreplay.report import bit_planes, table
from kvreplay.results import Run, Selection, TraceFacts, untold_note
from kvreplay.run_names import chosen_labels, metric_names, pick
from kvreplay.tables import records

COLOUR_STOPS = 33  # of the heatmaps' colour map; the page draws straight lines between them
MOST_NAMES = 6  # in a note
# The order in which a page looks for two policies to open with, and a comparison for its baseline. It is our choice.
FIRST_POLICIES = (
    "snapkv",
    "h2o",
    "streaming-llm",
    "pyramid-kv",
    "ada-kv",
    "tova",
    "chunkkv",
    "knorm",
    "expected-attention",
)
# Columns of `Comparison.lines`, by their names in `kvreplay compare --data`.
MEANS = ("heads", "traces", "mean", "low", "high")
VERDICTS = ("difference", "difference_low", "difference_high", "p", "p_holm", "wins", "ties", "losses")
Cells = dict[tuple[str, str], dict[table.Metric, Any]]  # by (trace, cell)


@dataclass(frozen=True)
class Wanted:
    """A plane for the page: its place is stored as `target[key]`, which is None before. `place` gives the order."""

    place: tuple[int, ...]
    what: str  # its kind, for the note on omitted planes
    of: str
    target: dict[str, Any]
    key: str
    raw: Callable[[], bytes]

    def __post_init__(self) -> None:
        self.target[self.key] = None


def headline_values(run: Run, traces: Sequence[str]) -> tuple[Cells, Cells]:
    """The defined values of the table's columns on these traces: over all layers of each cell, and by the model's own
    number of the layer."""
    metrics = {column.metric for column in table.COLUMNS}
    rows = run.rows(lambda rows: rows["trace"].isin(traces))
    whole: Cells = {}
    by_layer: Cells = {}
    cells = run.cells[run.cells["trace"].isin(traces)]
    for trace, cell, tokens in zip(cells["trace"], cells["cell"], cells["kept_tokens"], strict=True):
        whole[trace, cell] = {table.KEPT: float(tokens)}
        by_layer[trace, cell] = {}
        if (trace, cell) in run.select_seconds:
            whole[trace, cell][table.SELECT] = run.select_seconds[trace, cell]
    names = ["trace", "cell", "layer", "metric", "variant", "value"]
    for trace, cell, layer, metric, variant, value in rows[names].astype(object).itertuples(index=False, name=None):
        if (metric, variant) not in metrics or (metric, variant) == table.KEPT or not math.isfinite(value):
            continue
        if layer == "all":
            whole[trace, cell][metric, variant] = value
        else:
            by_layer[trace, cell].setdefault((metric, variant), {})[int(layer)] = value
    return whole, by_layer


def headline_half_widths(run: Run, traces: Sequence[str]) -> Cells:
    """Half the widths of the 95 % intervals of the table's columns, where they are estimates from a sample."""
    rows = run.overall[run.overall["trace"].isin(traces)]
    found: Cells = {}
    if "half_width" not in rows:
        return found
    names = ["trace", "cell", "metric", "variant", "half_width"]
    for trace, cell, metric, variant, half_width in rows[names].itertuples(index=False, name=None):
        if math.isfinite(half_width):
            found.setdefault((trace, cell), {})[metric, variant] = half_width
    return found


class Page:
    """The content of one page: `content`, a dict for JSON, and `notes` for the reader."""

    def __init__(
        self,
        run: Run,
        traces: Sequence[str] = (),
        policies: Sequence[str] = (),
        budgets: Sequence[str] = (),
        text: bool = True,
        baseline: str = "",
    ) -> None:
        """Defaults: one trace, every policy, every budget, and the first of `opening` as the baseline of the
        comparison over traces. The page shows the baseline also if `policies` lacks it. `text`: whether the page
        contains the prompts."""
        self.run, self.text = run, text
        self.choice = Choice(run, policies=policies, budgets_asked=budgets)
        if baseline:
            shown, every = self.choice.labels(controls=True), sorted(set(run.cells["label"]))
            bases = chosen_labels("--baseline", run.cells, [baseline], every)
            self.choice.policies = list(dict.fromkeys([*shown, *bases]))
        self.notes: list[str] = []
        known = sorted(set(run.cells["trace"]))
        self.labels = self.choice.labels(controls=True)
        self.policy_of = dict(zip(run.cells["label"], run.cells["policy"], strict=True))
        self.traces = self._traces(traces, known)
        self.whole, self.by_layer = headline_values(run, self.traces)
        self.half_widths = headline_half_widths(run, self.traces)
        if omitted := [name for name in known if name not in self.traces]:
            by_default = "" if traces else " (a page shows one by default)"
            self.notes.append(f"{len(self.traces)} of {len(known)} traces shown{by_default}: {listed(self.traces)}; "
                              f"omitted: {listed(omitted)}; use --trace to show others")  # fmt: skip
        failed = [cell for cell in run.failed if cell.get("trace") in self.traces]
        if failed:
            self.notes.append(f"{len(failed)} failed cells, listed in the table")
        self.order = {(cell.get("trace"), cell.get("cell")): i for i, cell in enumerate(run.about.get("cells", []))}
        self.wanted: list[Wanted] = []
        self.content = {
            # A folder's name is bytes; what of it is no UTF-8 is shown as U+FFFD.
            "title": os.fsencode(run.folder.resolve().name).decode("utf-8", "replace"),
            "version": __version__,
            "synthetic": any(run.trace(name).synthetic for name in self.traces),
            "policies": [self._look(label) for label in self.labels],
            "families": list(families()),
            "opening": self.opening,
            "variants": VARIANTS,
            "colours": [[round(255 * part) for part in colormaps["cividis"](i / (COLOUR_STOPS - 1))[:3]]
                        for i in range(COLOUR_STOPS)],
            "columns": [
                {"title": column.title, "name": ":".join(filter(None, column.metric)), "meaning": column.meaning,
                 "best": column.best(run.better), "units": column.units}
                for column in table.COLUMNS
            ],
            "traces": [self._trace(run.trace(name)) for name in self.traces],
            "over_traces": self._over_traces(baseline),
            "provenance": list(provenance(run, self.traces)),
            "warnings": [str(warning) for warning in run.about.get("warnings", [])] if self._of_last_call() else [],
        }  # fmt: skip
        shown = {table.COLUMNS[i].metric for trace in self.content["traces"] for i in trace["columns"]}
        # Kept tokens are columns of results.csv, no metric of it.
        self.notes += untold_note((name for name, _ in shown - {table.KEPT}), run.better)

    def fill(self, room: int) -> None:
        """Adds the planes that fit into `room` bytes, and a note that lists the others."""
        stock = bit_planes.Planes(room)
        left_out: dict[str, dict[str, None]] = {}  # names of each kind, once each, in their order
        for one in sorted(self.wanted, key=lambda one: one.place):
            one.target[one.key] = stock.add(one.raw())
            if one.target[one.key] is None:
                left_out.setdefault(one.what, {})[one.of] = None
        self.content["planes"] = list(stock.places)
        for what, of in left_out.items():
            self.notes.append(f"page too large: without {what} of {listed(of)}; use --trace, -p or -b to show less")
        self.content["notes"] = self.notes

    def _traces(self, asked: Sequence[str], known: list[str]) -> list[str]:
        """The requested traces that have a cell to show; without a request one of them, the first with live numbers if
        there are any."""
        cells = self.run.cells
        cells = cells[cells["label"].isin(self.labels) & cells["budget"].isin(self.choice.budgets)]
        wanted = pick("--trace", "trace", asked, known) if asked else known
        present = set(cells["trace"])
        found = [name for name in wanted if name in present]
        if not found:
            raise Error("report", "nothing to show", "a trace with a cell of these policies at these budgets",
                        ", ".join(wanted), Refusal.USAGE)  # fmt: skip
        if asked:
            self.notes += [f"{name} is omitted: no cell of these policies at these budgets"
                           for name in wanted if name not in found]  # fmt: skip
        if asked:
            return found
        live = set(self.run.live["trace"])
        return [next((name for name in found if name in live), found[0])]

    def _of_last_call(self) -> bool:
        """Whether run.json describes the call that replayed one of these traces."""
        return any(one.get("trace") in self.traces for one in self.run.replayed_last)

    def _look(self, label: str) -> dict[str, Any]:
        look = self.choice.looks[label]
        dashes = look["linestyle"][1] if isinstance(look["linestyle"], tuple) else ()
        return {"label": label, "family": self.choice.family(label), "role": self.choice.role(label),
                "colour": look["color"], "on_dark": on_dark(look["color"]), "dashes": list(dashes),
                "marker": look["marker"]}  # fmt: skip

    @property
    def opening(self) -> list[str]:
        """The policies that are no controls, in the order of FIRST_POLICIES; further variants of a policy follow all
        others."""
        rank = {name: place for place, name in enumerate(FIRST_POLICIES)}
        variants: dict[str, list[str]] = {}
        for label in self.labels:
            if self.choice.role(label) != "control":
                variants.setdefault(self.policy_of[label], []).append(label)
        names = sorted(variants, key=lambda name: rank.get(name, len(rank)))
        most = max(map(len, variants.values()), default=0)
        return [variants[name][i] for i in range(most) for name in names if i < len(variants[name])]

    def _over_traces(self, baseline: str) -> dict[str, Any] | None:
        """Means over all traces of the run, and the comparison that `kvreplay compare` makes; None for one trace or
        one policy. The verdicts are those of its default metrics; the other columns of the table have means only."""
        cells = self.run.cells
        if cells["trace"].nunique() < 2 or len(self.opening) < 2:
            if baseline:
                raise Error("--baseline", "no comparison", "a run of two traces and two policies", baseline,
                            Refusal.USAGE)  # fmt: skip
            return None
        options = {"policies": self.opening, "budgets": self.choice.budgets}
        try:
            compared = Comparison([self.run], baseline or self.opening[0], **options)
        except Error as problem:
            if baseline:
                raise
            self.notes.append(f"without means over traces: {problem.what}")
            return None
        known = metric_names(self.run.overall)
        columns = {
            name: column for name, metric in known.items() for column in table.COLUMNS if column.metric == metric
        }
        every = Comparison([self.run], compared.baseline, metrics=list(columns), **options)
        with_verdicts = set(compared.lines["metric"])
        lines = [*shown_lines(compared, with_verdicts, True)]
        lines += shown_lines(every, set(columns) - with_verdicts, False)
        return {
            "baseline": compared.baseline,
            "traces": len(compared.cluster),
            "prompts": int(compared.cluster.nunique()),
            "command": self._compare_command(compared.baseline),
            "seed": compared.seed,
            "comparisons": int(compared.lines["p"].notna().sum()),
            "metrics": [
                {"name": name, "title": columns[name].title if name in columns else name,
                 "meaning": columns[name].meaning if name in columns else "", "has_verdicts": name in with_verdicts,
                 "best": columns[name].best(self.run.better) if name in columns else 0}
                for name in dict.fromkeys(line["metric"] for line in lines)
            ],
            "lines": lines,
            "notes": compared.notes,
        }  # fmt: skip

    def _compare_command(self, baseline: str) -> str:
        """The command that prints the comparison of the page."""
        words = ["kvreplay", "compare", self.run.folder, "--baseline", baseline]
        if set(self.opening) != set(self.choice.asked_labels):
            words += ["-p", ",".join(self.opening)]
        if len(self.choice.budgets) < self.run.cells["budget"].nunique():
            words += ["-b", ",".join(self.choice.budgets)]
        return os.fsencode(shlex.join(map(str, words))).decode("utf-8", "replace")

    def _trace(self, facts: TraceFacts) -> dict[str, Any]:
        cells = self.run.cells
        cells = cells[(cells["trace"] == facts.name) & cells["label"].isin(self.labels)]
        cells = cells[cells["budget"].isin(self.choice.budgets)]
        texts = self.run.texts(facts.name) if self.text else None
        found: dict[str, Any] = {
            "name": facts.name,
            "model": facts.model,
            "hash": facts.hash,
            "line": table.trace_line(facts, len(facts.treated)),
            "prompt": facts.prompt,
            "boundary": facts.boundary,
            "tokens": facts.tokens,
            "layers": facts.layer_numbers[facts.treated].tolist(),
            "query_heads": facts.query_heads,
            "kv_heads": facts.kv_heads,
            "spans": [span._asdict() for span in facts.spans],
            "text": texts and texts[1],
            "before": texts and {i: gap for i, gap in enumerate(texts[0]) if gap},
            "attention": self._attention(facts),
            "budgets": [],
        }
        written = self.run.written(facts.name) if self.text else {}
        full = self.run.cells[(self.run.cells["trace"] == facts.name) & (self.run.cells["label"] == "full")]["cell"]
        found["written"] = next((written[cell] for cell in full if cell in written), None)
        lines = {row["cell"]: self._line(row, facts) for _, row in cells.iterrows()}
        columns = table.columns_of(list(lines.values()))
        fronts = pareto_columns(columns, lines, self.run.better)
        found["full_bytes"] = next((self.whole[facts.name, cell].get(table.MEMORY) for cell in full), None)
        found["columns"] = [table.COLUMNS.index(column) for column in columns]
        found["skill"] = table.skill_line(columns)
        for place, budget in enumerate(self.choice.budgets):
            rows = [row for _, row in cells[cells["budget"] == budget].iterrows()]
            rows.sort(key=lambda row: (row["role"] == "control", self.order.get((facts.name, row["cell"]), len(cells))))
            if rows:
                of_budget = self._budget(facts, columns, rows, [lines[row["cell"]] for row in rows], place)
                for cell, row in zip(of_budget["cells"], rows, strict=True):
                    cell["written"] = written.get(row["cell"])
                    cell["bytes"] = lines[row["cell"]].values.get(table.MEMORY)
                    cell["front"] = fronts[row["cell"]]
                found["budgets"].append({"budget": budget, "failed": self._failed(facts.name, budget)} | of_budget)
        found["opens_at"] = self._main_budget(facts, cells, [one["budget"] for one in found["budgets"]])
        return found

    def _main_budget(self, facts: TraceFacts, cells: pd.DataFrame, budgets: Sequence[str]) -> str | None:
        """The budget at which the page opens, as the table of `kvreplay show` (analysis/table_rows.cpp): that with most
        live numbers; without live numbers the first at which most policies evict and select tokens, else the first at
        which some evict."""
        run, live = self.run, set(self.run.live["cell"][self.run.live["trace"] == facts.name])
        compared = [row for row in cells.itertuples()
                    if row.role != "control" and (row.trace, row.cell) not in run.own_memory]  # fmt: skip
        of = {budget: [row for row in compared if row.budget == budget] for budget in budgets}
        measured = {budget: sum(row.cell in live for row in of[budget]) for budget in budgets}
        if any(measured.values()):
            return max(budgets, key=measured.__getitem__)
        filled = run.protected_fill_budget
        evicting = [budget for budget in budgets if any(row.kept_tokens < facts.boundary for row in of[budget])]
        deciding = [budget for budget in evicting
                    if 2 * sum((row.trace, row.cell) in filled for row in of[budget]) < len(of[budget])]  # fmt: skip
        return next(iter([*deciding, *evicting, *budgets]), None)

    def _line(self, row: Any, facts: TraceFacts) -> table.Line:
        key = (facts.name, row["cell"])
        return table.Line(row["label"], row["role"], row["heads"], self.whole[key], key in self.run.own_memory,
                          key in self.run.fails_twin, self.half_widths.get(key, {}))  # fmt: skip

    def _failed(self, trace: str, budget: str) -> list[dict[str, str]]:
        failed = [cell for cell in self.run.failed if (cell.get("trace"), cell.get("budget")) == (trace, budget)]
        return [{"label": ":".join(filter(None, (cell.get("policy", ""), cell.get("params", "")))),
                 "error": cell.get("error", "")} for cell in failed]  # fmt: skip

    def _budget(
        self, facts: TraceFacts, columns: list[table.Column], rows: list[Any], lines: list[table.Line], place: int
    ) -> dict[str, Any]:
        tokens = [int(row["budget_tokens"]) for row in rows]
        layers = facts.layer_numbers[facts.treated].tolist()
        cells: list[dict[str, Any]] = []
        matrices: dict[str, list[np.ndarray]] = {variant: [] for variant in VARIANTS}
        shown = table.texts(columns, lines, self.run.better)
        for number, (row, line, texts) in enumerate(zip(rows, lines, shown, strict=True)):
            by_layer = self.by_layer[facts.name, row["cell"]]
            cell = {
                "label": line.label,
                "role": line.role,
                "heads": line.heads_shown(facts),
                "own_memory": line.own_memory,
                "values": texts,
                "by_layer": {
                    table.COLUMNS.index(column): [rounded(by_layer[column.metric].get(layer)) for layer in layers]
                    for column in columns
                    if column.metric in by_layer
                },
                "rows": 0,
            }
            cells.append(cell)
            selection = self._selection(facts, row["cell"])
            if selection is not None:
                self._add_sets(cell, selection, row, (place, line.role == "control", number))
                for variant, matrix in selection.jaccard.items() if cell["choice"] else ():
                    matrices[variant].append(matrix)
        return {
            "tokens": max(tokens),
            "line": table.budget_line(rows[0]["budget"], tokens, len(facts.treated), facts.boundary),
            "own_memory": table.own_memory_line(lines),
            "scale": {variant: scale_end(found) if found else 1.0 for variant, found in matrices.items()},
            "cells": cells,
        }

    def _selection(self, facts: TraceFacts, cell: str) -> Selection | None:
        selection = self.run.selection_of(cell, facts.boundary)
        if selection is not None and not np.array_equal(selection.layers, facts.treated):
            where = f"{self.run.cells_path(facts.name)}:/cells/{cell}"
            raise Error(where, "attribute layers", str(facts.treated.tolist()), str(selection.layers.tolist()))
        return selection

    def _add_sets(self, cell: dict[str, Any], selection: Selection, row: Any, place: tuple[int, ...]) -> None:
        """Adds a static set to a cell; planes of a later `place` are omitted first."""
        rows = selection.granted.shape[1]
        beside = {variant: np.diagonal(matrix, 1) for variant, matrix in selection.jaccard.items()}
        cell |= {
            "rows": rows,
            "kept": [rounded(mean) for mean in selection.kept.mean(axis=1)],
            "schedule": selection.evicted_at is not None,
            "choice": has_choice(selection),
            "jaccard": {},
            "adjacent": {name: float(shares.mean()) for name, shares in beside.items() if len(shares)},
            "chance": {name: chance(selection, name) for name, shares in beside.items() if len(shares)},
        }
        of = f"{row['label']} at {row['budget']}" + (f" on {row['trace']}" if len(self.traces) > 1 else "")

        def want(order: int, what: str, target: dict[str, Any], key: str, raw: Callable[[], bytes]) -> None:
            self.wanted.append(Wanted((order, *place), what, of, target, key, raw))

        shape = (len(selection.layers) * rows, selection.boundary)
        want(1, "kept tokens", cell, "sets", lambda: bit_planes.bits(selection.mask().reshape(shape)))
        by_rule = np.stack([selection.sinks, selection.recent])[:, selection.layers].astype("<i4")
        want(1, "protected tokens", cell, "by_rule", by_rule.tobytes)
        for variant, matrix in selection.jaccard.items():
            want(2, "similarity", cell["jaccard"], variant, lambda matrix=matrix: bit_planes.triangle(matrix))
        scores = self.run.scores(row["cell"])
        if scores is not None:
            ranked = [i for i, layer in enumerate(selection.layers) if not np.isnan(scores[layer]).any()]
            cell["ranked"] = ranked
            name, chosen = row["cell"], selection.layers[ranked]
            # Read again when their turn comes: those of all cells together need not be in memory.
            want(3, "ranks", cell, "ranks", lambda: bit_planes.rank_levels(self.run.scores(name)[chosen]).tobytes())

    def _attention(self, facts: TraceFacts) -> dict[str, Any] | None:
        attention = self.run.eval_attention_sums(facts.name)
        if attention is None:
            return None
        levels, most = bit_planes.attention_levels(attention[facts.treated])
        found: dict[str, Any] = {"most": most}
        self.wanted.append(Wanted((0,), "attention of evaluation queries", facts.name, found, "levels", levels.tobytes))
        return found


def has_choice(selection: Selection) -> bool:
    """Whether some unprotected token was kept and some was evicted: else there is no choice to compare."""
    kept, free = selection.mask(), selection.unprotected()
    return bool((kept & free).any() and (~kept & free).any())


def pareto_columns(
    columns: Sequence[table.Column], lines: dict[str, table.Line], better: dict[str, str]
) -> dict[str, list[int]]:
    """By cell the numbers of the columns in which it is on the Pareto front of memory; controls are excluded."""
    found: dict[str, list[int]] = {cell: [] for cell in lines}
    memory = {cell: line.values.get(table.MEMORY) for cell, line in lines.items() if line.role != "control"}
    for column in columns:
        costs = {cell: lines[cell].values.get(column.metric) for cell in memory}
        points = pd.DataFrame({"memory": memory, "cost": costs}, dtype=float).dropna()
        if direction := column.best(better):
            front = on_front(points["memory"], -direction * points["cost"], points["cost"].notna())
            for cell in front.index[front]:
                found[cell].append(table.COLUMNS.index(column))
    return found


def shown_lines(compared: Comparison, metrics: set[str], verdicts: bool) -> Iterator[dict[str, Any]]:
    """The lines of these metrics, as texts from the column of heads on and as numbers; without verdicts they end after
    the interval of the mean."""
    names, end = ((*MEANS, *VERDICTS), None) if verdicts else (MEANS, 5)
    for line, numbers in zip(compared.lines.itertuples(), records(compared.lines), strict=True):
        if line.metric in metrics:
            yield {"metric": line.metric, "budget": line.budget, "label": line.policy, "own_memory": line.own_memory,
                   "texts": [text.strip() for text in compared.line_texts(line)[1:end]],
                   "numbers": {name: numbers[name] for name in names}}  # fmt: skip


def listed(names: Collection[str]) -> str:
    """Names for a note: the first of many."""
    more = len(names) - MOST_NAMES
    return ", ".join(list(names)[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def rounded(value: float | None) -> float | None:
    """To six digits, for a drawing; None where undefined."""
    return None if value is None or math.isnan(value) else float(f"{value:.6g}")


def provenance(run: Run, traces: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The origin of these traces' numbers, from run.json, as pairs of a name and a text.

    run.json describes only the last call, so traces of earlier calls have no command and no self-check.
    """
    inputs = {one.get("trace"): one for one in run.replayed_last}
    for name in traces:
        if name not in inputs:
            yield f"trace {name}", "replayed earlier into this folder; its command and self-check are not recorded"
    of_call = [inputs[name] for name in traces if name in inputs]
    if of_call:
        yield from provenance_of_call(run.about, of_call)
    yield "page", f"kvreplay report {__version__}"


def provenance_of_call(about: dict, inputs: Sequence[dict]) -> Iterator[tuple[str, str]]:
    """The facts of run.json about its call, and about these of its inputs."""
    check = about.get("self_check", {})
    if check:
        yield "self-check", " | ".join(check.get("result", []))
    if "path_tolerance" in check:
        words = "two computations of a metric agree within {}; recall exceeds the oracle bound by at most {}"
        yield "tolerances", words.format(check["path_tolerance"], check.get("oracle_tolerance"))
    if "argv" in about:
        yield "command", shlex.join(map(str, about["argv"]))
    if "start" in about:
        yield "run", f"{about['start']} to {about.get('end', '')}"
    for one in inputs:
        words = [one.get("path", ""), one.get("model", ""), "XXH3-128 " + one.get("trace_hash", "?")]
        yield (
            f"trace {one.get('trace', '')}",
            ", ".join(filter(None, words)) + (f", failed: {one['error']}" if "error" in one else ""),
        )
    options = about.get("options", {})
    if options:
        names = ("controls", "eval", "boundary", "detail", "sliding", "save_scores", "save_attention")
        yield "options", ", ".join(f"{name} {options[name]}" for name in names if name in options)
    for name in ("seed", "numerics"):
        if name in about:
            yield name, str(about[name])
    if "backend" in about:
        yield "backend", str(about["backend"].get("description", ""))
    build = about.get("build", {})
    if build:
        yield "build", ", ".join(f"{name} {value}" for name, value in build.items() if name != "backend")
    for policy in about.get("policies", []):
        paper = f" ({policy['paper']})" if policy.get("paper") else ""
        values = ", ".join(f"{name}={value}" for name, value in policy.get("parameters", {}).items())
        yield f"policy {policy.get('label', '')}", (values or "no parameters") + paper
