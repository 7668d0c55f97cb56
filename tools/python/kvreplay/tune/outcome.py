"""The outcome of a search: start and best policy on both sides, and a test of the difference on held-out traces."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvreplay import __version__
from kvreplay.compare import statistics
from kvreplay.compare.comparison import interval, number, probability
from kvreplay.errors import Error
from kvreplay.tables import wrapped
from kvreplay.tune.hold_out import Captured, Sides
from kvreplay.tune.objective import Objective
from kvreplay.tune.search import Found


@dataclass(frozen=True)
class Difference:
    """Start and best on one side, means over the traces on which both are defined, and their paired difference, best
    less start."""

    traces: int
    undefined: int  # traces of the side that are not among them
    prompts: int
    start: float
    best: float
    difference: float
    low: float
    high: float
    p: float
    memory: float  # how many times as much the best holds: sets of query heads hold a copy for each of a group


def difference(objective: Objective, side: str, traces: Sequence[Captured], found: Found, seed: int) -> Difference:
    """By the statistics of `kvreplay compare`."""
    rows = objective.measure(side, traces, list(dict.fromkeys([found.start, found.best])))
    if found.best == found.start:
        rows = pd.concat([rows, rows.assign(asked=1)])
    memory = rows.groupby("asked")["memory"].max()
    defined = rows.pivot(index="trace_hash", columns="asked", values="value").dropna()
    if len(defined.columns) < 2 or defined.empty:
        what = f"not defined for both start and best on any {side.replace('_', '-')} trace"
        raise Error(objective.metric, what, "a value of both", objective.failure())
    rows = rows[rows["trace_hash"].isin(defined.index)]
    labels = rows["asked"].map({0: "start", 1: "best"})
    rows = pd.DataFrame({"trace": rows["trace_hash"], "name": objective.metric, "budget": objective.budget,
                         "label": labels, "value": rows["value"]})  # fmt: skip
    cluster = pd.Series({one.hash: one.prompt for one in traces})
    cluster[:] = pd.factorize(cluster)[0]
    lines = statistics.paired(rows, cluster, "start", {objective.metric: objective.better}, seed).set_index("label")
    start, best = lines.loc["start"], lines.loc["best"]
    return Difference(int(best["pairs"]), len(traces) - len(defined), int(best["paired_prompts"]), start["mean"],
                      best["mean"], best["difference"], best["difference_low"], best["difference_high"], best["p"],
                      float(memory[1] / memory[0]))  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    objective: Objective
    found: Found
    sides: Sides
    fitting: Difference
    held_out: Difference
    command: Sequence[str]

    @property
    def better(self) -> bool:
        """Whether the interval on held-out traces lies on the better side of 0, at equal memory."""
        bound = self.held_out.low if self.objective.better == "higher" else -self.held_out.high
        return bool(bound > 0) and self.held_out.memory == 1 and not self.held_out.undefined

    @property
    def verdict(self) -> str:
        if self.found.best == self.found.start:
            return "not better on held-out traces: no candidate beats the start on the fitting traces"
        one = self.held_out
        change = f"{number(one.difference, sign=True)} [{number(one.low, True)}, {number(one.high, True)}]"
        if one.undefined:
            every = one.undefined + one.traces
            return f"no verdict: start or best is undefined on {one.undefined} of {every} held-out traces"
        if one.memory != 1:
            return f"no verdict, unequal memory: the best uses {one.memory:g} times as much; difference {change}"
        answer = "better" if self.better else "not better"
        return f"{answer} on held-out traces: {change} over {one.prompts} prompts"

    def table(self, output: Path, work: Path) -> str:
        """Where it comes from, start and best on both sides, the verdict, the policy file and the folder of runs."""
        objective, fitting, held_out = self.objective, self.fitting, self.held_out
        lines = [
            f"objective  {objective.metric}, {objective.better} is better, at budget {objective.budget}"
            f"        {objective.loop.upper()}",
            f"tried      {self.found.story}",
            f"           {'fitting':>10} {'held out':>10}",
            f"traces     {fitting.traces:>10} {held_out.traces:>10}",
            f"prompts    {fitting.prompts:>10} {held_out.prompts:>10}",
            f"start      {number(fitting.start):>10} {number(held_out.start):>10}  {self.found.start}",
            f"best       {number(fitting.best):>10} {number(held_out.best):>10}  {self.found.best}",
            f"difference {number(fitting.difference, True):>10} {number(held_out.difference, True):>10}  "
            f"95 % interval on held-out prompts {interval(held_out.low, held_out.high, True)}, "
            f"p {probability(held_out.p)}",
            self.verdict,
            f"runs       {work}, reused by the next call",
            f"replay     -p @{output}" if self.better else f"written    {output}: not shown to be better",
        ]
        return "\n".join(part for line in lines for part in wrapped(line, " " * 11))

    def document(self, output: str) -> dict:
        """The same for JSON."""
        sides = {"fitting": (self.fitting, self.sides.fitting), "held_out": (self.held_out, self.sides.held_out)}
        return {
            "open_loop": not self.objective.is_live,
            "version": __version__,
            "metric": self.objective.metric,
            "direction": self.objective.better,
            "budget": self.objective.budget,
            "tried": self.found.story,
            "start": self.found.start,
            "best": self.found.best,
            **{side: {key: None if isinstance(value, float) and math.isnan(value) else value
                      for key, value in vars(one).items()} | {"traces": [trace.name for trace in traces]}
               for side, (one, traces) in sides.items()},
            "better": self.better,
            "verdict": self.verdict,
            "output": output,
            "notes": self.objective.notes,
        }  # fmt: skip

    def policy_file(self) -> str:
        """YAML that `-p @FILE` reads, with its provenance."""
        names = {side: ", ".join(one.name for one in traces) for side, traces in vars(self.sides).items()}
        lines = [
            f"kvreplay {__version__}: {self.objective.metric} ({self.objective.better} is better) at budget "
            f"{self.objective.budget}, {self.objective.loop}",
            shlex.join(["kvreplay", "tune", *self.command]),
            f"tried: {self.found.story}",
            f"fitted on {names['fitting']}: start {number(self.fitting.start)}, best {number(self.fitting.best)}",
            f"held out {names['held_out']}: start {number(self.held_out.start)}, best {number(self.held_out.best)}",
            self.verdict,
        ]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
        return comments + "'" + self.found.best.replace("'", "''") + "'\n"
