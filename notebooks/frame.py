"""What the notebooks share: the corpus, replays of it, and what a notebook leaves behind.

A notebook begins with `page = Page("NAME")` and leaves in out/figures/NAME each figure as SVG and PNG with its numbers
as CSV, each table as CSV and Markdown, and its findings: the paper's statements, each with a verdict.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import pandas as pd
from IPython.display import Image, Markdown, display
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvreplay.errors import Error, Refusal
from kvreplay.plot import style
from kvreplay.plot.choice import Choice
from kvreplay.plot.lines import INTERVAL, draw_mean, mean_over_traces
from kvreplay.plot.style import Drawing, Sheet, label_ends, label_room, layer_axis, line_style, quiet_frame
from kvreplay.results import Run

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path(os.environ.get("KVREPLAY_CORPUS", ROOT / "build" / "corpus"))
FIGURES = Path(os.environ.get("KVREPLAY_FIGURES", ROOT / "out" / "figures"))
KINDS = ("needle", "question", "arithmetic", "summary", "code", "chat")
INCH = 96  # pixels of a page on a screen

# A notebook's process draws nothing else: all its figures look like those of `kvreplay plot`.
matplotlib.rcParams.update({name: value for name, value in style.SETTINGS.items() if name != "backend"})


def corpus() -> pd.DataFrame:
    """The traces: name, kind, prompt_tokens, needle_depth (NaN without a needle), and path, by kind and name."""
    path = CORPUS / "corpus.csv"
    try:
        table = pd.read_csv(path)
        table["path"] = [CORPUS / f"{name}.h5" for name in table["name"]]
        order = table["kind"].map({kind: place for place, kind in enumerate(KINDS)})
    except (OSError, ValueError, KeyError) as problem:
        raise Error(str(path), "no corpus", "what tools/corpus writes", str(problem)) from problem
    if order.isna().any():
        raise Error(str(path), "kind", "one of " + ", ".join(KINDS), str(table["kind"][order.isna()].iloc[0]))
    return table.assign(order=order).sort_values(["order", "name"]).drop(columns="order").reset_index(drop=True)


def traces(*kinds: str) -> list[Path]:
    """The traces of these kinds, or all."""
    table = corpus()
    return list(table["path"][table["kind"].isin(kinds or KINDS)])


def values(run: Run, metric: str, layer: str = "all") -> pd.DataFrame:
    """What results.csv has of NAME[:VARIANT] over heads: trace, kind, prompt_tokens, label, budget, layer, value.

    `layer` is all (over layers) or each (the rows of single layers).
    """
    name, _, variant = metric.partition(":")
    rows = run.table
    rows = rows[(rows["metric"] == name) & (rows["variant"] == variant)]
    rows = rows[(rows["layer"] == "all") == (layer == "all")].dropna(subset="value")
    if rows.empty:
        raise Error(str(run.folder / "results.csv"), metric, "at least one value", "none")
    about = corpus()[["name", "kind", "prompt_tokens"]].rename(columns={"name": "trace"})
    columns = ["trace", "label", "role", "heads", "budget", "budget_tokens", "kept_tokens", "layer", "value"]
    return rows[columns].merge(about, on="trace", how="left")


def means(rows: pd.DataFrame, by: str | list[str] = "label") -> pd.DataFrame:
    """Mean over traces with its interval, by label or more."""
    by = [by] if isinstance(by, str) else by
    return mean_over_traces(rows, by).set_index(by)


def needle_kept(run: Run) -> pd.DataFrame:
    """Share of the needle kept, mean over heads: the rows of each trace's needle spans."""
    names = sorted(
        {span.name for path in traces("needle") for span in run.trace(path.stem).spans if span.kind == "needle"}
    )
    rows = pd.concat([values(run, f"span_recall:{name}.mean") for name in names])
    return rows[rows["kind"] == "needle"].groupby(["trace", "kind", "label", "budget"], as_index=False)["value"].mean()


def of_paper(table: pd.DataFrame, panel: str, x: str) -> pd.DataFrame:
    """A table of a paper as points of `curves`: a series a column."""
    points = table.rename_axis(index=x, columns="series").stack().rename("value").reset_index()
    return points.assign(panel=panel, trace="paper")


def interval(mean: float, low: float, high: float, digits: int = 3) -> str:
    """A mean over traces as a table shows it, `mean ± half of the interval`; the mean alone for a single trace."""
    half = "" if pd.isna(high) else f" ± {(high - low) / 2:.{digits}f}"
    return f"{mean:.{digits}f}{half}"


def cell(row: pd.Series, digits: int = 3) -> str:
    """A mean with its interval, as tables show it."""
    return interval(row["mean"], row["low"], row["high"], digits)


def less(rows: pd.DataFrame, one: str, other: str) -> bool:
    """Whether label `one` lies below `other`: the 95 % t interval of their difference, paired by trace, is below 0.

    `rows` has the columns trace, label and value, one row a trace and label.
    """
    grid = rows.pivot(index="trace", columns="label", values="value")
    difference = (grid[one] - grid[other]).rename("value").reset_index().assign(label="difference")
    return bool(mean_over_traces(difference, ["label"])["high"].iloc[0] < 0)


def verdict(parts: Sequence[bool], because: str = "") -> str:
    """holds: every part; holds in part: some; does not hold: none. `because` is said where not all hold."""
    if not parts:
        return f"not comparable: {because}"
    if all(parts):
        return "holds"
    return ("holds in part" if any(parts) else "does not hold") + (f": {because}" if because else "")


def markdown(table: pd.DataFrame) -> str:
    """A table of text in Markdown."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).to_numpy().tolist()]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


@dataclass
class Page:
    """A notebook: where its replays and figures go."""

    name: str
    found: list[dict[str, str]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)  # what a name in the folder is: a figure or a table

    @property
    def folder(self) -> Path:
        return FIGURES / self.name

    def linked(self, path: Path) -> Path:
        """A trace under the folder of runs: what is kept beside it for the next run stays here, with the runs."""
        if not path.is_file():
            return path
        link = self.folder / "runs" / "traces" / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
        return link

    def replay(
        self, name: str, paths: Sequence[Path], policies: Sequence[str], budgets: Sequence[str], *options: str
    ) -> Run:
        """`kvreplay replay` into the folder runs/NAME; what that holds of the same request is not computed again.

        A run shows all that its folder holds, so one of another request, or older than a trace, is begun anew.
        """
        folder = self.folder / "runs" / name
        asked = [word for policy in policies for word in ("-p", policy)] + ["-b", ",".join(budgets), *options]
        command = ["replay", *(str(self.linked(path)) for path in paths), *asked, "--progress", "never"]
        command += [] if "--observables" in options else ["--observables", "keep"]
        request = [command, [path.stat().st_mtime_ns for path in paths if path.is_file()]]
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        mark = folder.with_suffix(".request")
        if not mark.is_file() or mark.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(digest)
        try:
            done = subprocess.run(["kvreplay", *command, "-o", str(folder)], capture_output=True, text=True)
        except FileNotFoundError as missing:
            need = "what tools/figures builds"
            raise Error("kvreplay", "not found on PATH", need, "", Refusal.CAPABILITY) from missing
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no word"])[-1].removeprefix("kvreplay: ")
            raise Error(f"replay {name}", said, exit_code=done.returncode)
        return Run(folder)

    def keep(self, drawing: Drawing, name: str) -> None:
        """Writes NAME.svg, NAME.png and its numbers as NAME.csv, and shows the figure."""
        for suffix in ("svg", "png"):
            style.save(drawing.figure, self.folder / f"{name}.{suffix}")
        self._numbers(drawing.data, name, "figure")
        page = io.BytesIO((self.folder / f"{name}.png").read_bytes())
        display(Image(data=page.getvalue(), width=int(drawing.figure.get_figwidth() * INCH)))

    def draw(self, kind: str, run: Run, name: str, **asked: object) -> None:
        """A figure as `kvreplay plot KIND` draws it; `asked` are the fields of Choice."""
        self.keep(importlib.import_module(f"kvreplay.plot.{kind}").draw(Choice(run, **asked)), name)

    def table(self, name: str, numbers: pd.DataFrame, shown: pd.DataFrame | None = None) -> None:
        """Writes `numbers` as NAME.csv, and `shown` (text; else the numbers) as NAME.md, and shows it."""
        self._numbers(numbers, name, "table")
        text = markdown(numbers if shown is None else shown)
        (self.folder / f"{name}.md").write_text(text, encoding="utf-8")
        display(Markdown(text))

    def find(self, where: str, says: str, ours: str, parts: Sequence[bool], because: str = "") -> None:
        """One finding: `where` in the paper, what it `says`, what is measured here, and whether that agrees."""
        self.found.append({"paper": where, "says": says, "here": ours, "verdict": verdict(parts, because)})

    def findings(self) -> None:
        """All findings as a table."""
        self.table("findings", pd.DataFrame(self.found))

    def _numbers(self, data: pd.DataFrame, name: str, kind: str) -> None:
        if self.kept.setdefault(name, kind) != kind:
            raise Error(
                f"{self.name}, {kind} {name}", "name taken", "another name", f"a {self.kept[name]}", Refusal.USAGE
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        data.to_csv(self.folder / f"{name}.csv", index=False, float_format="%.17g", lineterminator="\n")


def curves(
    points: pd.DataFrame,
    x: str,
    panels: dict[str, str],
    title: str,
    subtitle: str,
    caption: str,
    x_label: str,
    scale: str = "linear",
    columns: int = 2,
    grey: Sequence[str] = (),
) -> Drawing:
    """Lines of means over traces, a panel for each of `panels` (name: what its y axis says, with unit).

    `points` has the columns panel, series, trace, value and the column `x`; bands are 95 % t intervals. A series has
    one colour in all panels, by its place among all of them in the order of `points`; those in `grey` are references.
    Panels whose y axes say the same share one scale.
    """
    series = list(dict.fromkeys(points["series"]))
    coloured = [one for one in series if one not in grey]
    found = mean_over_traces(points, ["panel", "series", x])
    several = found["traces"].max() > 1
    panel, columns = (1.95, 1.6), min(columns, len(panels))
    room = label_room(series)
    sheet = Sheet(
        len(panels), panel, columns, left=0.62, right=room, above=0.1, gap=(room + 0.5, 0.65), below=0.45,
        headings=[style.SMALL * style.LINE * style.POINT] * -(-len(panels) // columns),
        title=title, subtitle=subtitle, caption=f"{caption} {INTERVAL}." if several else caption,
    )  # fmt: skip
    ticks = sorted(set(points[x]))
    limits, named = [], []
    for axis, (name, label) in zip(sheet.axes, panels.items(), strict=True):
        mine = found[found["panel"] == name]
        ends = []
        for one in [one for one in series if one in set(mine["series"])]:
            line = mine[mine["series"] == one]
            look = line_style(one, "control" if one in grey else "asked", coloured)
            ends.append(draw_mean(axis, line, x, look, one))
        if x == "layer":
            layer_axis(axis, ticks)
        else:
            axis.set_xscale(scale)
            axis.xaxis.set_major_locator(FixedLocator(readable(ticks, scale)))
            axis.xaxis.set_major_formatter(FuncFormatter(number))
            axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(x_label)
        axis.set_ylabel(label)
        axis.annotate(name, (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
        quiet_frame(axis)
        axis.set_xlim(axis.get_xlim())
        low, high = mine["mean"].min(), mine["mean"].max()
        room_for_bands = (high - low) or abs(high) or 1.0  # wider bands, of few traces, leave the panel
        bottom, top = axis.get_ylim()
        limits.append((max(bottom, low - room_for_bands), min(top, high + room_for_bands)))
        named.append(ends)
    for axis, ends, label in zip(sheet.axes, named, panels.values(), strict=True):
        alike = [limit for limit, other in zip(limits, panels.values(), strict=True) if other == label]
        axis.set_ylim(min(low for low, _ in alike), max(high for _, high in alike))
        label_ends(axis, ends, panel[1])
    return Drawing(sheet.figure, found)


def number(tick: float, _: int) -> str:
    """What a tick says."""
    return f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}"


def readable(ticks: Sequence[float], scale: str, apart: float = 0.09) -> list[float]:
    """Those ticks that lie at least the share `apart` of the axis from the one before; the last one always."""
    place = [math.log(tick) if scale == "log" else tick for tick in ticks]
    least = apart * (place[-1] - place[0])
    shown = [len(ticks) - 1]
    for i in range(len(ticks) - 2, -1, -1):
        if place[shown[-1]] - place[i] >= least:
            shown.append(i)
    return [ticks[i] for i in reversed(shown)]
