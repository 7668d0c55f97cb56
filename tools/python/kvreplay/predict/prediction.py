"""Offline and live numbers of the same cells, and the agreement of their orders of policies.

The headline is at equal budget and within a prompt: over the policies of one prompt at one budget the rank correlation
of each offline metric with each live one, then the mean over budgets, then over prompts with the interval of
`kvreplay compare`. Over budgets correlations are larger but less informative, since every metric falls as the budget
grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from kvreplay.compare.comparison import part_of_name, prompts_of
from kvreplay.compare.statistics import cluster_sums, intervals_of_rows, mean_intervals
from kvreplay.errors import Error
from kvreplay.live_metrics import BY_NAME as LIVE
from kvreplay.live_metrics import FEWEST, UNORDERED
from kvreplay.predict.agreement import in_order, kendall, prompts_needed, spearman
from kvreplay.results import CELL, DECIDED_LIVE, Run, labels
from kvreplay.run_folder import without_live

SHARE = 0.95
OF_A_CONTROL = "attention_recall:oracle"  # the best set with the policy's counts, not the policy's own
DAMAGE = {"higher": -1.0, "lower": 1.0}
PARTS = ("lower-half", "upper-half", "lower-third", "middle-third", "upper-third")
AGREEMENTS = {"spearman": spearman, "kendall": kendall, "in_order": in_order}


@dataclass(frozen=True)
class Measured:
    """The offline and live numbers of cells, one row a cell."""

    cells: pd.DataFrame  # trace_hash, trace, cell, label, role, decisions, budget, budget_tokens, boundary, the metrics
    offline: list[str]
    live: list[str]
    worse: dict[str, float]  # by metric: 1 where larger is worse, -1 where smaller is

    @classmethod
    def of(cls, runs: Sequence[Run], roles: Sequence[str] = ("asked",)) -> Measured:
        """The cells of these roles that `kvreplay live` measured. Metrics without a better direction are left out."""
        table = pd.concat([run.results for run in runs], ignore_index=True)
        decided = pd.concat([run.live for run in runs])[["trace_hash", "cell", "decisions"]].drop_duplicates()
        decided = decided[decided["decisions"] != DECIDED_LIVE]  # metrics of their own, beside those of replayed sets
        table = (
            table[table["role"].isin(roles)]
            .dropna(subset="value")
            .merge(decided, on=["trace_hash", "cell"], suffixes=("_of_row", ""))
        )
        table = table.drop_duplicates(["trace_hash", "cell", "layer", "metric", "variant"])
        if table.empty:
            raise without_live(run.folder for run in runs)
        table = table.assign(
            label=labels(table[CELL].assign(trace=table["trace_hash"])),
            name=table["metric"] + table["variant"].map(lambda variant: f":{variant}" if variant else ""),
        )
        is_live, is_overall = table["metric"].isin(LIVE), table["layer"] == "all"
        cell = ["trace_hash", "trace", "cell", "label", "role", "decisions", "budget", "budget_tokens", "boundary"]
        offline = pd.concat([table[~is_live & is_overall], *over_layers(table[~is_live], cell)])
        offline = offline[offline["name"].map(without_part) != OF_A_CONTROL]
        live = table[is_live & is_overall]
        worse = {}
        for run in runs:
            for name in {*offline["name"], *live["name"]}:
                if (better := run.better_of(without_part(name))) in DAMAGE:
                    worse[name] = DAMAGE[better]
        offline, live = (rows[rows["name"].isin(worse)] for rows in (offline, live))
        wide = pd.concat([offline, live]).pivot_table(index=cell, columns="name", values="value").reset_index()
        return cls(wide, *(sorted(set(rows["name"])) for rows in (offline, live)), worse)


@dataclass(frozen=True)
class Prediction:
    """Cells of some runs that have live numbers, and how offline metrics order them."""

    cells: pd.DataFrame  # prompt, kind, budget, label, share (of the prompt kept), a column a metric: damage
    offline: list[str]
    live: list[str]
    seed: int
    notes: list[str]

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        metrics: Sequence[str] = (),
        same_prompt: re.Pattern[str] | None = None,
        kind: re.Pattern[str] | None = None,
        seed: int = 0,
    ) -> Prediction:
        """All policies of the runs' command lines, except those that keep every token or read later queries;
        `metrics`: offline ones (default: all that the runs have)."""
        found = Measured.of(runs)
        hashes = found.cells[["trace_hash", "trace"]].drop_duplicates("trace_hash")
        cells = found.cells.assign(
            prompt=found.cells["trace_hash"].map(prompts_of(hashes, runs, same_prompt)),
            kind=found.cells["trace"].map(lambda name: part_of_name(name, kind or re.compile(r"[^-_0-9]+"))),
        )
        return cls.from_measured(replace(found, cells=cells), metrics, seed)

    @classmethod
    def from_measured(cls, found: Measured, metrics: Sequence[str] = (), seed: int = 0) -> Prediction:
        """The same of cells that also have the columns `prompt` and `kind`."""
        cells = found.cells[~found.cells["decisions"].isin(UNORDERED)]
        cells = cells.dropna(subset=[name for name in found.live if name == "kld"])
        if cells.empty:
            raise Error("predict", "nothing to predict", "policies that evict, with live numbers", "none")
        offline = [name for name in found.offline if name in metrics or not metrics]
        wide = cells.assign(
            share=cells["budget_tokens"] / cells["boundary"].astype(float),
            **{name: cells[name] * found.worse[name] for name in (*offline, *found.live)},
        )
        notes = []
        counts = wide.groupby(["prompt", "budget"])["label"].nunique()
        if counts.max() < FEWEST:
            raise Error("predict", "too few policies for a rank correlation",
                        f"{FEWEST} or more that evict, replayed and measured by kvreplay live at one budget",
                        str(counts.max()))  # fmt: skip
        equal = [name for name in offline if (wide.groupby(["prompt", "budget"])[name].nunique() < 2).all()]
        if equal:
            offline = [name for name in offline if name not in equal]
            whole = [name for name in equal if without_part(name) == name]
            if whole:
                notes.append(f"omitted, because all policies have the same value: {', '.join(whole)}")
        if (counts < FEWEST).any():
            few = int((counts < FEWEST).sum())
            notes.append(f"fewer than {FEWEST} policies: {few} of {len(counts)} prompts at a budget are omitted")
        return cls(wide, offline, found.live, seed, notes)

    @cached_property
    def of_prompts(self) -> pd.DataFrame:
        """One row a prompt, budget and pair of metrics: offline, live, spearman, kendall, in_order."""
        rows = []
        for (prompt, budget), some in self.cells.groupby(["prompt", "budget"]):
            some = some.groupby("label")[[*self.offline, *self.live]].mean()
            if len(some) < FEWEST:
                continue
            kind = self.cells["kind"][self.cells["prompt"] == prompt].iloc[0]
            rows += [
                {"prompt": prompt, "kind": kind, "budget": budget, "offline": one, "live": other, **found}
                for one, other, found in self._pairs(some)
            ]
        return pd.DataFrame(rows, columns=["prompt", "kind", "budget", "offline", "live", *AGREEMENTS])

    def _pairs(self, some: pd.DataFrame) -> Iterator[tuple[str, str, dict[str, float]]]:
        """The agreements of metrics that order the policies: with equal values there is no order."""
        for one in self.offline:
            for other in self.live:
                both = some[[one, other]].dropna()
                if len(both) >= FEWEST and (both.nunique() > 1).all():
                    a, b = both[one].to_numpy(), both[other].to_numpy()
                    yield one, other, {name: agreement(a, b) for name, agreement in AGREEMENTS.items()}

    @cached_property
    def headline(self) -> pd.DataFrame:
        """One row a pair of metrics: the mean over prompts of each agreement, with low and high, and `prompts`."""
        return self._over_prompts(["offline", "live"])

    @cached_property
    def by_budget(self) -> pd.DataFrame:
        """The same at each budget."""
        return self._over_prompts(["offline", "live", "budget"])

    def _over_prompts(self, by: list[str]) -> pd.DataFrame:
        means = self.of_prompts.groupby([*by, "prompt"], as_index=False)[list(AGREEMENTS)].mean()
        lines = []
        for key, some in means.groupby(by, sort=False):
            values = some[list(AGREEMENTS)].to_numpy()
            sums, counts = cluster_sums(values, np.arange(len(values)))
            low, high = mean_intervals(sums, counts)
            line = dict(zip(by, key, strict=True)) | {"prompts": len(some)}
            for i, name in enumerate(AGREEMENTS):
                mean = float(sums[:, i].sum() / counts[:, i].sum()) if counts[:, i].any() else np.nan
                line |= {name: mean, f"{name}_low": low[i], f"{name}_high": high[i]}
            lines.append(line)
        numbers = [f"{name}{end}" for name in AGREEMENTS for end in ("", "_low", "_high")]
        return pd.DataFrame(lines, columns=[*by, "prompts", *numbers])

    @cached_property
    def over_budgets(self) -> pd.DataFrame:
        """Spearman over policies and budgets together, mean over prompts: offline, live, spearman."""
        rows = []
        for prompt, some in self.cells.groupby("prompt"):
            some = some.groupby(["label", "budget"])[[*self.offline, *self.live]].mean()
            rows += [{"prompt": prompt, "offline": one, "live": other, **found}
                     for one, other, found in self._pairs(some)]  # fmt: skip
        table = pd.DataFrame(rows, columns=["prompt", "offline", "live", *AGREEMENTS])
        return table.groupby(["offline", "live"], as_index=False)["spearman"].mean()

    def better_than(self, one: str, other: str, live: str = "kld") -> tuple[float, float, float]:
        """The mean difference of Spearman's correlation with a live metric, paired by prompt, and its interval."""
        rows = self.of_prompts[self.of_prompts["live"] == live]
        grid = rows.groupby(["prompt", "offline"])["spearman"].mean().unstack("offline")
        difference = (grid[one] - grid[other]).dropna().to_numpy()[:, None]
        low, high = intervals_of_rows(difference)
        return float(difference.mean()), float(low[0]), float(high[0])

    def left_out_kinds(self, live: str = "kld") -> pd.DataFrame:
        """For each kind of prompt the offline metric that is best on all others, and how it does on this one."""
        rows = self.of_prompts[self.of_prompts["live"] == live]
        lines = []
        for kind in sorted(set(rows["kind"])):
            here = rows["kind"] == kind
            others = rows[~here].groupby("offline")["spearman"].mean()
            if others.empty:
                continue
            best = str(others.idxmax())
            mine = rows[here].groupby("offline")["spearman"].mean()
            lines.append({"kind": kind, "chosen": best, "spearman": mine.get(best), "best here": mine.idxmax(),
                          "its spearman": mine.max()})  # fmt: skip
        return pd.DataFrame(lines)

    def flipped(self, offline: str, live: str = "kld") -> pd.DataFrame:
        """Pairs of policies at a budget that the offline metric and the live one order differently, each over all
        prompts that have both, with an interval that excludes 0."""
        lines = []
        for budget, some in self.cells.groupby("budget"):
            grids = {name: some.pivot_table(index="prompt", columns="label", values=name) for name in (offline, live)}
            names = list(grids[live].columns)
            for i, one in enumerate(names):
                for other in names[i + 1 :]:
                    signs = [self._sign(grid[one] - grid[other]) for grid in grids.values()]
                    if signs[0] * signs[1] < 0:
                        lines.append({"budget": budget, "better live": one if signs[1] < 0 else other,
                                      "better offline": one if signs[0] < 0 else other})  # fmt: skip
        return pd.DataFrame(lines, columns=["budget", "better live", "better offline"])

    def _sign(self, difference: pd.Series) -> int:
        """0: the interval of the mean includes 0."""
        values = difference.dropna().to_numpy()[:, None]
        if len(values) < 2:
            return 0
        low, high = intervals_of_rows(values)
        return int(low[0] > 0) - int(high[0] < 0)

    def needed(self, offline: str, live: str = "kld") -> pd.DataFrame:
        """By budget: how many prompts order two policies that the live model tells apart, with probability 0.95."""
        lines = []
        for budget, some in self.cells.groupby("budget"):
            grids = [some.pivot_table(index="prompt", columns="label", values=name) for name in (offline, live)]
            whole = grids[0].notna().all(axis=1) & grids[1].notna().all(axis=1)
            if whole.sum() < 2:
                continue
            count, reached = prompts_needed(*(grid[whole].to_numpy() for grid in grids), SHARE, self.seed)
            lines.append({"budget": budget, "prompts": int(whole.sum()), "needed": count, "reached": reached})
        return pd.DataFrame(lines)


def over_layers(rows: pd.DataFrame, cell: list[str]) -> Iterator[pd.DataFrame]:
    """Means over parts of the treated layers, as separate metrics: NAME:upper-half and so on. Layer l of L, from 0,
    is in the upper half from ceil(L/2) on; thirds end at floor(L/3) and floor(2L/3)."""
    single = rows[rows["layer"] != "all"]
    if single.empty:
        return
    place = single["layer"].astype(int)
    ranked = place.groupby([single["trace_hash"], single["cell"], single["name"]]).rank(method="dense") - 1
    layers = place.groupby([single["trace_hash"], single["cell"], single["name"]]).transform("nunique")
    half, first, second = np.ceil(layers / 2), layers // 3, 2 * layers // 3
    chosen = (ranked < half, ranked >= half, ranked < first, (ranked >= first) & (ranked < second), ranked >= second)
    for part, some in zip(PARTS, chosen, strict=True):
        means = single[some].groupby([*cell, "name"], as_index=False)["value"].mean()
        yield means.assign(name=means["name"] + ":" + part)


def without_part(name: str) -> str:
    """The metric whose values over some layers `name` stands for."""
    metric, _, part = name.rpartition(":")
    return metric if part in PARTS else name
