"""The objective of a search: one metric of a policy, on some traces, at one budget."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvreplay import _engine
from kvreplay.compare.comparison import values_of
from kvreplay.engine import replay
from kvreplay.errors import Error, Refusal
from kvreplay.headline import HEADLINE
from kvreplay.results import Run
from kvreplay.tune.hold_out import Captured
from kvreplay.tune.metric import better_of, is_live

if TYPE_CHECKING:
    from kvreplay.live.measure import LiveModel

REPLAYED = "attention_recall"  # of cells whose sets alone are wanted
ADDS_UP = 1e-9  # a mean over layers, computed in another order


@dataclass
class Objective:
    """Replays into `folder`, where finished traces are reused, and reads the metric from there. `live` measures a live
    metric into the same folder."""

    metric: str  # NAME[:VARIANT]
    budget: str
    folder: Path
    options: dict[str, object]  # of the replay: device, threads, memory
    better: str = ""
    notes: list[str] = field(default_factory=list)
    live: LiveModel | None = None

    def __post_init__(self) -> None:
        self.better = better_of(self.metric)

    @property
    def is_live(self) -> bool:
        """Whether a model must run for it."""
        return is_live(self.metric)

    @property
    def loop(self) -> str:
        """closed loop: queries of the live model; open loop: queries as captured."""
        return "closed loop" if self.is_live else "open loop"

    @property
    def sign(self) -> float:
        return 1.0 if self.better == "higher" else -1.0

    def run(self, side: str, traces: Sequence[Captured], policies: Sequence[str], budgets: Sequence[str] = (),
            detail: str = "summary") -> Run:  # fmt: skip
        """Replays all policies in one call, since they share observables of a trace."""
        folder = self.folder / side
        if self.live:  # numbers of another model or type are others
            way = self.live.way
            folder = self.folder / f"{side}-{way.device}-{way.dtype}-{way.model_hash[:16]}"
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            run = replay([one.path for one in traces], list(policies), list(budgets) or [self.budget],
                         metrics=REPLAYED if self.is_live else self.metric, output=folder, detail=detail,
                         **self.options)  # fmt: skip
        self.note(*(str(one.message) for one in heard))
        return self._measured(run, traces) if self.live else run

    def _measured(self, run: Run, traces: Sequence[Captured]) -> Run:
        """The run with live numbers of all cells on these traces except controls."""
        from kvreplay.live.results import write_view

        asked = run.cells[run.cells["role"] == "asked"]
        for one in traces:
            rows = asked[(asked["trace"] == one.name) & (asked["budget"] == self.budget)]
            if len(rows):
                self.live.measure(run, run.trace(one.name), rows, 0, None)
        write_view(run.folder)
        self.note(*(f"failed: {one}" for one in self.live.failed))
        return Run(run.folder)

    def note(self, *lines: str) -> None:
        """Adds notes; repeated lines are dropped."""
        self.notes += [line for line in dict.fromkeys(lines) if line not in self.notes]

    def measure(self, side: str, traces: Sequence[Captured], policies: Sequence[str]) -> pd.DataFrame:
        """Rows of `kvreplay.compare.comparison.values_of`, one a trace and policy, with `asked`: the policy's index."""
        rows = self.of_metric(values_of(self.run(side, traces, policies)), traces)
        return of_policies(rows[rows["budget"] == self.budget], policies)

    def means(self, traces: Sequence[Captured], policies: Sequence[str]) -> np.ndarray:
        """For each policy, the mean over the fitting traces on which the start, the first policy, is defined: float
        [n]. NaN for a policy that is undefined on one of them, or that ignores the budget."""
        rows = self.measure("fitting", traces, policies)
        table = rows.pivot(index="trace_hash", columns="asked", values="value").reindex(columns=range(len(policies)))
        defined = table[table[0].notna()]
        if defined.empty:
            raise Error(self.metric, "not defined for the start", "a value on some fitting trace",
                        self.failure() or policies[0])  # fmt: skip
        found = defined.mean(axis=0, skipna=False).to_numpy(float, copy=True)
        own = set(rows["asked"][rows["own_memory"]])
        if 0 in own:
            raise Error(policies[0], "the policy ignores the budget", "a policy with a budget",
                        "a budget-free policy", Refusal.USAGE)  # fmt: skip
        found[list(own)] = np.nan
        return found

    def by_layer(self, run: Run, traces: Sequence[Captured]) -> pd.DataFrame:
        """Rows of single layers, over all heads. Raises Error for a metric that is not a mean over layers."""
        rows = self.of_metric(run.results, traces)
        layers = rows[(rows["layer"] != "all") & (rows["head"] == "all")].astype({"layer": int})
        whole = rows[(rows["layer"] == "all") & (rows["head"] == "all")].set_index(["trace", "cell"])["value"].dropna()
        means = layers.groupby(["trace", "cell"])["value"].agg(lambda values: values.mean(skipna=False))
        apart = (means.reindex(whole.index) - whole).abs()
        if layers.empty or not (apart <= ADDS_UP * whole.abs().clip(lower=1)).all():
            raise Error("--metric", f"{self.metric} is not additive over layers",
                        f"a mean over layers, such as {HEADLINE}", "", Refusal.USAGE)  # fmt: skip
        return layers

    def of_metric(self, rows: pd.DataFrame, traces: Iterable[Captured]) -> pd.DataFrame:
        metric, _, variant = self.metric.partition(":")
        known = {(one.name, one.hash) for one in traces}  # a copy of a trace may have left rows in the folder, too
        ours = np.array([one in known for one in zip(rows["trace"], rows["trace_hash"], strict=True)], dtype=bool)
        return rows[(rows["metric"] == metric) & (rows["variant"] == variant) & ours]

    def failure(self) -> str:
        """The first failed cell with its reason; empty: no cell failed."""
        return next((note for note in self.notes if note.startswith("failed: ")), "")


def of_policies(rows: pd.DataFrame, policies: Sequence[str]) -> pd.DataFrame:
    """The rows of these policies, with `asked`: the policy's index among them."""
    place = {_engine.canonical(policy): i for i, policy in enumerate(policies)}
    rows = rows.assign(asked=[place.get(one, -1) for one in zip(rows["policy"], rows["params"], strict=True)])
    return rows[rows["asked"] >= 0]
