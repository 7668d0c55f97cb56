"""Common functions of the notebooks: the corpus, its replays, and the output of a notebook.

A notebook begins with `page = Page("NAME")` and writes into out/figures/NAME each figure as SVG and PNG with its
numbers as CSV, each table as CSV and Markdown, and its findings: the paper's statements, each with a verdict.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from IPython.display import Image, Markdown, display
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from study import STUDIES, file_of, read

from kvreplay import Run, figure
from kvreplay.compare.statistics import holm, mean_intervals, sign_flip_p
from kvreplay.errors import Error, Refusal
from kvreplay.parameters import parameters
from kvreplay.plot import style
from kvreplay.plot.colours import COLOURS, MARKERS, looks_of
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.lines import INTERVAL, draw_mean, mean_over_traces
from kvreplay.plot.style import (
    LINE,
    POINT,
    QUIET,
    SMALL,
    Drawing,
    LineEnd,
    Sheet,
    errors_need_logarithms,
    label_ends,
    label_room,
    layer_axis,
    logarithmic_axis,
    quiet_frame,
    width_of,
)
from kvreplay.predict.prediction import PARTS, Measured, Prediction
from kvreplay.results import TraceFacts
from kvreplay.skill import TWIN, policy_of_twin

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path(os.environ.get("KVREPLAY_CORPUS", ROOT / "build" / "corpus"))
FIGURES = Path(os.environ.get("KVREPLAY_FIGURES", ROOT / "out" / "figures"))
KINDS = ("needle", "question", "arithmetic", "summary", "code", "chat")
INCH = 96  # pixels of a page on a screen
SIGNIFICANT = 0.05
ALIKE = 0.05  # of the answers
FLOOR = 0.2  # of the answers: where all give fewer, they do not show that they are alike
TASKS = "the paper's tasks, answered under the policy"

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
    """Values of NAME[:VARIANT] over heads in a run: trace, kind, prompt_tokens, label, budget, layer, value.

    `layer` is all (over layers) or each (the rows of single layers). Random twins are excluded; use `twins`.
    """
    return _with_kinds(run, run.results[run.results["policy"] != TWIN], metric, layer)


def twins(run: Run, metric: str, of: str) -> pd.DataFrame:
    """As `values`, of the random twin of a policy, as the twin's own label names that."""
    rows = run.results[run.results["policy"] == TWIN]
    return _with_kinds(run, rows[rows["params"].map(policy_of_twin) == of], metric)


def _with_kinds(run: Run, rows: pd.DataFrame, metric: str, layer: str = "all") -> pd.DataFrame:
    name, _, variant = metric.partition(":")
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


def answers(metric: str = "contains") -> pd.DataFrame:
    """A number of `tools/study papers`: trace, label, budget, value; of needle prompts that the full cache answers.

    contains: whether the text that the model writes under the policy has the needle; nll_increase: nats, over 64 tokens
    that begin with the answer. `full` is there at each budget.
    """
    path = file_of("papers")
    if not path.is_file():
        raise Error(str(path), "no answers", "what `tools/study papers` writes", "")
    cells = read(path)[0]
    answered = cells["trace"][(cells["label"] == "full") & (cells["contains"] == 1)]
    cells = cells[cells["trace"].isin(answered)].assign(value=cells[metric])
    budgets = STUDIES["papers"].budgets
    full = cells[cells["label"] == "full"].drop_duplicates("trace")
    every = pd.concat([cells[cells["label"] != "full"], *(full.assign(budget=budget) for budget in budgets)])
    every = every[every["budget"].isin(budgets)].dropna(subset="value")
    return every[["trace", "label", "budget", "value"]].reset_index(drop=True)


def chance_jaccard(kept: np.ndarray) -> float:
    """Jaccard similarity of two layers that draw their sets independently, each position with the probability with
    which the policy keeps it: expected intersection over expected union, in closed form.

    `kept`: bool [layers, positions], protected tokens left out. The probability is the share p of the L layers that
    keep the position. The square of such a share is too large on average; p (L p - 1) / (L - 1) is not.
    """
    share = kept.mean(axis=0)
    intersection = (share * (len(kept) * share - 1)).sum() / (len(kept) - 1)
    return float(intersection / (2 * share.sum() - intersection))


def distances(vectors: np.ndarray) -> np.ndarray:
    """Euclidean distance of every two rows."""
    squares = (vectors**2).sum(axis=1)
    found = np.sqrt(np.maximum(squares[:, None] + squares - 2 * vectors @ vectors.T, 0))
    np.fill_diagonal(found, 0)
    return found


def energy_coefficient(apart: np.ndarray, kept: np.ndarray) -> float:
    """How far the distribution of kept vectors lies from that of all: 0 the same, 1 apart.

    The energy distance of Székely and Rizzo 2013, 2 E|X - Y| - E|X - X'| - E|Y - Y'|, over 2 E|X - Y|, with X kept and
    Y any vector; `apart` holds the distance of every two.
    """
    between = 2 * apart[kept].mean()
    return float((between - apart[np.ix_(kept, kept)].mean() - apart.mean()) / between)


def of_paper(table: pd.DataFrame, panel: str, x: str) -> pd.DataFrame:
    """A table of a paper as points of `curves`: a series a column."""
    points = table.rename_axis(index=x, columns="series").stack().rename("value").reset_index()
    return points.assign(panel=panel, trace="paper")


def interval(mean: float, low: float, high: float, digits: int = 3) -> str:
    """A mean over traces as a table shows it, `mean [low, high]`; the mean alone for a single trace."""
    ends = "" if pd.isna(high) else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{mean:.{digits}f}{ends}"


def cell(row: pd.Series, digits: int = 3) -> str:
    """A mean with its interval, as tables show it."""
    return interval(row["mean"], row["low"], row["high"], digits)


@dataclass(frozen=True)
class Difference:
    """Policy `one` minus policy `other`, paired by prompt: mean, 95 % interval, sign-flip p, and `prompts`.

    As a part of a finding it states that the difference is below 0, or above 0 if `higher`.
    """

    one: str
    other: str
    mean: float
    low: float
    high: float
    p: float
    prompts: int
    where: str = ""
    higher: bool = False

    @property
    def in_words(self) -> str:
        """The difference with its interval."""
        return f"{self.one} minus {self.other} {self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def described(self) -> str:
        """The statement with its numbers."""
        sign, where = ">" if self.higher else "<", f"{self.where}, " if self.where else ""
        numbers = f"n = {self.prompts}, {self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.one} {sign} {self.other} ({where}{numbers})"

    def resolved(self, p: float) -> bool | None:
        """Whether the statement is true at this p, corrected for the number of tests; None: not resolved."""
        return bool((self.mean > 0) == self.higher) if p < SIGNIFICANT else None


def less(rows: pd.DataFrame, one: str, other: str, where: str = "") -> Difference:
    """The statement that the value of label `one` lies below that of `other`; `where`: the part of the data.

    `rows` has the columns trace, label and value, one row a trace and label. No two traces share a prompt.
    """
    grid = rows.pivot(index="trace", columns="label", values="value")
    values = (grid[one] - grid[other]).dropna().to_numpy()[:, None]
    counts = np.ones_like(values)
    low, high = mean_intervals(values, counts)[:, 0]
    return Difference(one, other, values.mean(), low, high, sign_flip_p(values, counts, seed=0)[0], len(values), where)


def more(rows: pd.DataFrame, one: str, other: str, where: str = "") -> Difference:
    """As `less`, that it lies above."""
    return replace(less(rows, one, other, where), higher=True)


def verdict(parts: Sequence[bool | None | Difference], p: Sequence[float], because: str = "") -> str:
    """The verdict on a statement of several parts, with `p` for each (corrected; NaN for a part that is no test).

    A part that is None is not resolved.

    holds: every part is true; holds in part: some; does not hold: none, and at least one is false; not resolved:
    neither. Parts that are not true are named, and `because` is added.
    """
    found = [one.resolved(at) if isinstance(one, Difference) else one for one, at in zip(parts, p, strict=True)]
    if all(found):
        return "holds"
    tested = [(one, is_true) for one, is_true in zip(parts, found, strict=True) if isinstance(one, Difference)]
    reasons = [
        ("reversed: " if is_true is False else "not resolved: ")
        + ", ".join(one.described for one, other in tested if other is is_true)
        for is_true in (False, None) if any(other is is_true for _, other in tested)
    ]  # fmt: skip
    word = "holds in part" if any(found) else "does not hold" if False in found else "not resolved"
    if word == "not resolved" and reasons:
        reasons = [reasons[0].removeprefix("not resolved: ")]
    return ": ".join([word, "; ".join([*reasons, *([because] if because else [])])]).removesuffix(": ")


def peak_p(shares: pd.DataFrame, where: slice, permutations: int = 2_000) -> tuple[int, float]:
    """The layer of `where` that is highest against its neighbours, and the permutation p of such a peak.

    `shares`: a row a prompt, a column a layer. The height of a layer is its mean over prompts less the mean of the
    layers up to four away; layer 0, which is far above all others, is left out. If prompts have no layer in common that
    is higher than others, the layers of each prompt are exchangeable: p is the share of permutations, within each
    prompt, with a peak in `where` as high as the observed one, (reached + 1) / (permutations + 1).
    """
    values = shares.to_numpy(float)[:, 1:]
    layers = np.arange(values.shape[1])
    near = (np.abs(layers[:, None] - layers) <= 4) & (layers[:, None] != layers)
    less_neighbours = np.eye(len(layers)) - near / near.sum(axis=1, keepdims=True)
    window = slice(max(where.start, 1) - 1, where.stop)
    heights = (less_neighbours @ values.mean(axis=0))[window]
    generator = np.random.default_rng(0)
    reached = 0
    for _ in range(permutations):
        permuted = generator.permuted(values, axis=1).mean(axis=0)
        reached += (less_neighbours @ permuted)[window].max() >= heights.max()
    return window.start + 1 + int(heights.argmax()), (reached + 1) / (permutations + 1)


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
        """A link to the trace in the folder of runs, so that files next to the trace are written there."""
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
        """Runs `kvreplay replay` into the folder runs/NAME; finished cells of the same request are not recomputed.

        A run shows all cells of its folder, so a folder of another request, or older than a trace, is deleted first.
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
            need = "the program that tools/figures builds"
            raise Error("kvreplay", "not found on PATH", need, "", Refusal.CAPABILITY) from missing
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("kvreplay: ")
            raise Error(f"replay {name}", said, exit_code=done.returncode)
        return Run(folder)

    def keep(self, drawing: Drawing, name: str) -> None:
        """Writes NAME.svg, NAME.png and its numbers as NAME.csv, and shows the figure."""
        for suffix in ("svg", "png"):
            style.save(drawing.figure, self.folder / f"{name}.{suffix}")
        self._numbers(drawing.data, name, "figure")
        page = io.BytesIO((self.folder / f"{name}.png").read_bytes())
        display(Image(data=page.getvalue(), width=int(drawing.figure.get_figwidth() * INCH)))

    def draw(self, kind: str, run: Run, name: str, **options: object) -> None:
        """The figure `kv.figure(kind, run, **options)`."""
        self.keep(figure(kind, run, **options), name)

    def table(self, name: str, numbers: pd.DataFrame, shown: pd.DataFrame | None = None) -> None:
        """Writes `numbers` as NAME.csv, and `shown` (text; else the numbers) as NAME.md, and shows it."""
        self._numbers(numbers, name, "table")
        text = markdown(numbers if shown is None else shown)
        (self.folder / f"{name}.md").write_text(text, encoding="utf-8")
        display(Markdown(text))

    def kinds(self, name: str, rows: pd.DataFrame, heading: str, digits: int = 3) -> None:
        """Table NAME: a line for each value of the column `series`, a column for all prompts and for each kind."""
        order = list(dict.fromkeys(rows["series"]))
        found = mean_over_traces(pd.concat([rows.assign(kind="all"), rows]), ["series", "kind"])
        cells = found.set_index(["series", "kind"])
        columns = [kind for kind in ("all", *KINDS) if kind in set(found["kind"])]
        self.table(name, found, pd.DataFrame([
            {heading: one} | {kind: cell(cells.loc[(one, kind)], digits) for kind in columns} for one in order
        ]))  # fmt: skip

    def find(
        self, where: str, says: str, ours: str, parts: Sequence[bool | None | Difference], because: str = ""
    ) -> None:
        """One finding: `where` in the paper, its statement (`says`), the measurement here, and the verdict.

        The verdict is given by `findings`, when the number of tests is known.
        """
        self.found.append({"paper": where, "says": says, "here": ours, "parts": parts, "because": because})

    def answered(
        self,
        where: str,
        says: str,
        policies: dict[str, str],
        better: Sequence[tuple[str, str]],
        alike: Sequence[tuple[str, str]] = (),
        budgets: Sequence[str] = STUDIES["papers"].budgets,
        because: str = "",
    ) -> None:
        """A finding from what the live model writes, means over `budgets`. Of each pair in `better` the first gives
        more answers than the second, and makes the answer less improbable. Those in `alike` differ by no more than
        ALIKE of the answers at either end of the interval; not resolved where both give fewer than FLOOR.

        `policies`: by the name shown, the label in the study of the papers.
        """
        rows, mean, here = {}, {}, []
        for metric, words in {"contains": "answers given", "nll_increase": "NLL increase"}.items():
            of_metric = answers(metric)
            of_metric = of_metric[of_metric["budget"].isin(budgets)]
            rows[metric] = pd.concat([
                of_metric[of_metric["label"] == label].groupby("trace", as_index=False)["value"].mean()
                .assign(label=name) for name, label in policies.items()
            ])  # fmt: skip
            mean[metric] = rows[metric].groupby("label")["value"].mean()
            here.append(f"{words}: " + ", ".join(f"{name} {mean[metric][name]:.2f}" for name in policies))
        prompts = rows["contains"]["trace"].nunique()
        shares = f"at {budgets[0]}" if len(budgets) == 1 else f"mean over {', '.join(budgets)}"
        pairs = [more(rows["contains"], one, other, "answers") for one, other in better]
        pairs += [less(rows["nll_increase"], one, other, "NLL") for one, other in better]
        apart = [less(rows["contains"], one, other) for one, other in alike]
        here += [f"{one.one} minus {one.other} {one.mean:+.2f} [{one.low:+.2f}, {one.high:+.2f}]" for one in apart]
        given = mean["contains"]
        within = [
            None if max(given[one.one], given[one.other]) < FLOOR
            else True if max(-one.low, one.high) <= ALIKE
            else False if one.low > ALIKE or one.high < -ALIKE
            else None
            for one in apart
        ]  # fmt: skip
        if alike and given[[name for pair in alike for name in pair]].max() < FLOOR:
            reasons = ["almost no prompt is answered, so no difference can show"]
        else:
            reasons = [f"{one.one} within {ALIKE} of {one.other}: {'no' if is_true is False else 'not resolved'}"
                       for one, is_true in zip(apart, within, strict=True) if not is_true]  # fmt: skip
        because = "; ".join([*reasons, *([because] if because else [])])
        self.find(where, says, f"closed loop, {prompts} needles, {shares} of the prompt; {'; '.join(here)}",
                  [*pairs, *within], because)  # fmt: skip

    def by_construction(self, where: str, says: str, ours: str) -> None:
        """A statement that follows from the definition of the policy; `ours` is the counted number."""
        self.found.append({"paper": where, "says": says, "here": ours, "verdict": "by construction"})

    def not_tested(self, where: str, says: str, ours: str, needs: str = TASKS) -> None:
        """A statement that open loop cannot decide; `ours` is the closest open-loop measurement."""
        self.found.append({"paper": where, "says": says, "here": ours, "verdict": f"not tested: needs {needs}"})

    def skill(self, run: Run) -> None:
        """Table `skill` of a run with twins, and a finding whether each policy recalls more than its twin, which has
        the same protected tokens, counts and lengths of runs (docs/conventions.md)."""
        found = mean_over_traces(values(run, "skill"), ["label", "budget"])
        cells = found.set_index(["label", "budget"])
        labels = list(dict.fromkeys(found["label"]))
        budgets = [one for one in dict.fromkeys(run.cells["budget"]) if one in set(found["budget"])]
        self.table("skill", found, pd.DataFrame([
            {"policy": label}
            | {f"skill at {budget}": cell(cells.loc[(label, budget)], 2) if (label, budget) in cells.index else ""
               for budget in budgets}
            for label in labels
        ]))  # fmt: skip
        moves = cells[(cells["mean"] != 0) | (cells["high"] != cells["low"])]
        protected = [label for label in labels if label not in moves.index.get_level_values("label")]
        behind = [f"{label} at {budget}" for label, budget in moves.index[moves["low"] <= 0]]
        skills = {label: [cells.loc[(label, one), "mean"] for one in budgets if (label, one) in cells.index]
                  for label in labels if label not in protected}  # fmt: skip
        self.find(
            "(random twins)", "every policy recalls more than its random twin",
            "skill " + ", ".join(
                f"{label} {' '.join(f'{one:.2f}' for one in means)}" for label, means in skills.items()
            ) + (f" (at {', '.join(budgets)})" if len(budgets) > 1 else "")
            + (f"; {', '.join(protected)}: 0, only protected tokens are kept" if protected else ""),
            [bool(low > 0) for low in moves["low"]],
            f"the interval reaches 0 for {', '.join(behind)}" if behind else "",
        )  # fmt: skip

    def findings(self, with_differences: bool = False) -> None:
        """All findings as a table, with verdicts: p by Holm's correction over all tests of the page.

        `with_differences` shows the difference of every two policies that a finding compares in a column.
        """
        tests = [part for one in self.found for part in one.get("parts", ()) if isinstance(part, Difference)]
        corrected = dict(zip(map(id, tests), holm(np.array([one.p for one in tests])), strict=True))
        rows = [
            {name: one[name] for name in ("paper", "says", "here")}
            | {"verdict": one.get("verdict") or verdict(
                one["parts"], [corrected.get(id(part), math.nan) for part in one["parts"]], one["because"])}
            for one in self.found
        ]  # fmt: skip
        findings = pd.DataFrame(rows)
        shown = findings.rename(columns={"says": "statement", "here": "measured"})
        if with_differences:
            shown = shown.rename(columns={"paper": "source"})
            shown.insert(3, "difference", [
                "; ".join(part.in_words for part in one.get("parts", ()) if isinstance(part, Difference))
                for one in self.found
            ])  # fmt: skip
        self.table("findings", findings, shown)

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
    errors: Sequence[str] = ("output error",),
) -> Drawing:
    """Lines of means over traces, a panel for each of `panels` (name: label of its y axis, with unit).

    `points` has the columns panel, series, trace, value and the column `x`; bands are 95 % intervals. A
    series has one colour in all panels, that of its policy where it is one; of more series than colours, panels that
    draw the same ones agree. Those in `grey` are references. Panels whose y axes say the same share one scale, which is
    logarithmic for `errors` that differ by orders of magnitude.
    """
    series = list(dict.fromkeys(points["series"]))
    drawn_in = {name: set(points["series"][points["panel"] == name]) for name in panels}
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
        here = [one for one in series if one in drawn_in[name]]
        looks = looks_of(series if len(series) <= len(COLOURS) else here, grey)
        for one in here:
            line = mine[mine["series"] == one]
            ends.append(draw_mean(axis, line, x, looks[one], one))
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
        limits.append(axis.get_ylim())
        named.append(ends)
    for axis, ends, label in zip(sheet.axes, named, panels.values(), strict=True):
        alike = [limit for limit, other in zip(limits, panels.values(), strict=True) if other == label]
        names = [name for name, other in panels.items() if other == label]
        drawn = found["mean"][found["panel"].isin(names)].to_numpy()
        if label in errors and errors_need_logarithms(drawn):
            alike = [(drawn[drawn > 0].min() / 1.2, max(high for _, high in alike))]
            logarithmic_axis(axis)
        axis.set_ylim(min(low for low, _ in alike), max(high for _, high in alike))
        label_ends(axis, ends, panel[1])
    return Drawing(sheet.figure, found)


SETTINGS = {(8, "max"): "window 8, pooled", (8, "none"): "window 8, not pooled",
            (32, "max"): "window 32, pooled", (32, "none"): "window 32, not pooled"}  # fmt: skip


def window_settings(
    page: Page, paths: Sequence[Path], policies: dict[str, str], budget: str, metrics: dict[str, str] | None = None
) -> pd.DataFrame:
    """Figure and table `windows`, and a finding on the effect of observation window and pooling at one budget.
    Returns the values: trace, kind, quantity, policy, setting, value.

    `policies`: by the name shown, the policy with `{window}` and, where it pools, `{pool}` in place of these values.
    `metrics`: what the table and the panels call a metric; their order by output error is the finding's.
    """
    metrics = metrics or {"attention_recall": "attention recall", "output_error": "output error"}
    asked = {
        (name, setting): policy.format(window=window, pool=pool)
        for name, policy in policies.items() for (window, pool), setting in SETTINGS.items()
        if "{pool}" in policy or pool == "max"
    }  # fmt: skip
    measured = [metric for metric in metrics if not metric.startswith("jaccard_adjacent")]  # which is always there
    run = page.replay("windows", paths, list(dict.fromkeys(asked.values())), [budget], "--metrics",
                      ",".join(measured), "--detail", "summary")  # fmt: skip
    called = {Choice(run, policies=[policy]).labels(True)[0]: one for one, policy in asked.items()}
    rows = pd.concat([values(run, metric).assign(quantity=words) for metric, words in metrics.items()])
    rows = rows[rows["label"].isin(called)]
    rows = rows.assign(policy=[called[label][0] for label in rows["label"]],
                       setting=[called[label][1] for label in rows["label"]])  # fmt: skip
    found = mean_over_traces(rows, ["quantity", "policy", "setting"])
    cells = found.set_index(["quantity", "policy", "setting"])
    page.keep(dots(found, list(metrics.values()), list(policies), budget, Choice(run).caption()), "windows")
    page.table("windows-settings", found, pd.DataFrame([
        {"policy": name, "metric": words}
        | {setting: cell(cells.loc[(words, name, setting)]) if (words, name, setting) in cells.index else ""
           for setting in SETTINGS.values()}
        for name in policies for words in metrics.values()
    ]))  # fmt: skip
    mine = rows[rows["quantity"] == metrics["output_error"]]
    errors = in_every_setting(mine.set_index(["trace", "policy", "setting"])["value"])
    error = errors.groupby("policy").mean()
    by_setting = {
        setting: errors[setting].rename("value").reset_index().rename(columns={"policy": "label"})
        for setting in SETTINGS.values()
    }
    default = next(iter(by_setting))
    ranked = list(error[default].sort_values().index)
    page.find(
        "(settings)", f"{' < '.join(ranked)} by output error, as with {default}, in every setting",
        "; ".join(
            f"{setting}: " + ", ".join(f"{name} {error.loc[name, setting]:.3f}" for name in ranked)
            for setting in by_setting
        ),
        [less(by_setting[setting], one, other, setting) for setting in by_setting for one, other in pairwise(ranked)],
    )  # fmt: skip
    return rows


def in_every_setting(means: pd.Series) -> pd.DataFrame:
    """A column a setting of the Series by `setting` and other levels. A policy that does not pool has the same value in
    both settings of a window."""
    table = means.unstack("setting")
    for window in {window for window, _ in SETTINGS}:
        pooled, plain = SETTINGS[window, "max"], SETTINGS[window, "none"]
        table[plain] = table[plain].fillna(table[pooled])
    return table


def dots(found: pd.DataFrame, quantities: Sequence[str], policies: Sequence[str], budget: str, caption: str) -> Drawing:
    """A panel a quantity, a row a policy, a mark with its interval for each of SETTINGS: filled where pooled."""
    left = max(width_of(name) for name in policies) + 0.2
    room = max(width_of(setting) for setting in SETTINGS.values()) + 0.4
    sheet = Sheet(
        len(quantities), (1.5, 0.45 * len(policies)), len(quantities), left=left, right=room, above=0.1, gap=(0.2, 0),
        below=0.42, title="Observation window and pooling", subtitle=f"budget {budget}; mean over prompts",
        caption=f"{caption} {INTERVAL}.",
    )  # fmt: skip
    for axis, quantity in zip(sheet.axes, quantities, strict=True):
        for place, ((window, pool), setting) in enumerate(SETTINGS.items()):
            mine = found[(found["quantity"] == quantity) & (found["setting"] == setting)]
            at = [policies.index(name) + 0.18 * (place - 1.5) for name in mine["policy"]]
            colour = COLOURS[0 if window == 8 else 1]
            axis.hlines(at, mine["low"], mine["high"], color=colour, linewidth=1)
            axis.plot(mine["mean"], at, "o" if window == 8 else "s", color=colour, label=setting,
                      markerfacecolor=colour if pool == "max" else "white")  # fmt: skip
        axis.set_ylim(len(policies) - 0.5, -0.5)
        axis.set_yticks(range(len(policies)), policies)
        axis.tick_params(axis="y", length=0, labelleft=axis is sheet.axes[0])
        axis.xaxis.get_major_locator().set_params(nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#e3e3e3", linewidth=0.6)
        axis.set_xlabel(quantity)
    sheet.axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handletextpad=0.1)
    return Drawing(sheet.figure, found)


def number(tick: float, _: int) -> str:
    """The label of a tick."""
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
