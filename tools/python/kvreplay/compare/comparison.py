"""The comparison of policies of some runs with a baseline, and its table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import pandas as pd

from kvreplay.compare import statistics
from kvreplay.errors import Error, Refusal
from kvreplay.headline import default_metric
from kvreplay.live_metrics import is_live, shown_name
from kvreplay.results import CELL, Run, labels, untold_note
from kvreplay.run_names import chosen_labels, metric_names, model_of_name, pick, pick_metrics, with_settings
from kvreplay.skill import SKILL
from kvreplay.tables import narrowed, records, wrapped

NAMED = 5  # traces in a note
TITLES = ("policy", "heads", "traces", "mean", "95 % interval", "difference", "95 % interval", "p", "p Holm",
          "better/same/worse")  # fmt: skip
HEADS = 1  # the column
# Columns that a narrow table leaves out, in this order: heads, interval of the mean, p, traces, mean, verdicts.
NARROW = (HEADS, 4, 7, 2, 3, 9)
VALUE = ["trace", "name", "budget", "label"]  # what tells one value from another; trace is the trace's hash here


class Comparison:
    """The lines of `statistics.paired`, and where they come from: `rows`, one value each (see VALUE), `cluster`, the
    number of each trace's prompt, `shown`, the text of each label in the table, `better` (higher, lower or neither) and
    `units` by name, and `notes`."""

    def __init__(
        self,
        runs: Sequence[Run],
        baseline: str,
        policies: Sequence[str] = (),
        budgets: Sequence[str] = (),
        metrics: Sequence[str] = (),
        traces: Sequence[str] = (),
        same_prompt: re.Pattern[str] | None = None,
        seed: int = 0,
    ) -> None:
        """Names as on the command line; empty: all policies but controls, all budgets, all traces, and the headline
        metric, with skill where the baseline has it."""
        self.seed, self.runs, self.notes = seed, [str(run.folder) for run in runs], []
        table = self._cells(runs)
        known_traces = sorted(set(table["trace"]))
        table = table[table["trace"].isin(pick("--trace", "trace", traces or known_traces, known_traces))]

        asked = sorted(set(table["label"][table["role"] != "control"]))
        every = asked + sorted(set(table["label"]) - set(asked))
        base = chosen_labels("--baseline", table, [baseline], every)
        if baseline in base:  # the label of one, and the name of others that have a parameter more, as protect=
            base = [baseline]
        if len(base) > 1:
            raise Error("--baseline", "ambiguous policy", "one of " + ", ".join(base), baseline, Refusal.USAGE)
        [self.baseline] = base
        known = list(metric_names(table))
        names = pick_metrics(metrics or self._default_metrics(table, known, runs), known)
        shown = chosen_labels("-p", table, policies, every) if policies else asked
        compared = [self.baseline, *(label for label in shown if label != self.baseline)]
        if len(compared) == 1:
            raise Error(
                "--baseline", "no policy to compare with the baseline", "another policy", self.baseline, Refusal.USAGE
            )
        sizes = table.groupby("budget")["budget_tokens"].mean().sort_values(kind="stable").index.tolist()
        literals = pick("-b", "budget", list(budgets) or sizes, sizes)

        chosen = table[table["label"].isin(compared) & table["budget"].isin(literals)]
        every_trace = table["trace_hash"].nunique()
        for literal in literals:
            present = chosen["trace_hash"][chosen["budget"] == literal].nunique()
            if present < every_trace:
                self.notes.append(f"budget {literal}: {every_trace - present} of {every_trace} traces have no cell at "
                                  "this budget and are omitted")  # fmt: skip
        rows = chosen[chosen["name"].isin(names)]
        for column, wanted in (("label", compared), ("budget", literals), ("name", names)):
            rows = rows.sort_values(column, key=lambda one: one.map(wanted.index), kind="stable")  # noqa: B023
        refuse_two_values(rows)
        of_compared = table[table["label"].isin(compared)][["label", "policy", "params"]].drop_duplicates("label")
        self.shown = {one[0]: with_settings(*one) for one in of_compared.itertuples(index=False, name=None)}
        identities = rows[["trace_hash", "trace"]].drop_duplicates("trace_hash")
        self.cluster = prompts_of(identities, runs, same_prompt)
        unknown = [] if same_prompt else without_prompt_hash(identities, runs)
        if unknown:
            shown = ", ".join(unknown[:NAMED]) + (", …" if len(unknown) > NAMED else "")
            self.notes.append(f"run.json has no prompt hashes of {len(unknown)} traces ({shown}): traces are grouped "
                              "into prompts by name; use --same-prompt to group them")  # fmt: skip
        for column, what in (("eval", "evaluation queries"), ("seed", "seeds")):
            kinds = sorted(set(rows[column]))
            if len(kinds) > 1:
                self.notes.append(f"traces with different {what} are pooled: {', '.join(kinds)}")
        if samples := {trace: of for trace, of in zip(rows["trace"], rows["sample"], strict=True) if of}:
            shown = ", ".join(f"{of} of {trace}" for trace, of in list(samples.items())[:NAMED])
            self.notes.append(f"estimates from samples: {shown}{', …' if len(samples) > NAMED else ''}; intervals over "
                              "prompts contain the error of sampling")  # fmt: skip
        self.better = {name: word for run in runs for name in names if (word := run.better_of(name))}
        self.units = {name: unit for run in runs for name in names if (unit := run.unit_of(name))}
        self.notes += untold_note(names, self.better)
        self.models = list(rows["model"].groupby(rows["model"].map(model_of_name)).first())
        self.synthetic = rows["synthetic"].isin(["1", "true"]).any()
        rows = rows.rename(columns={"trace": "trace_name"}).rename(columns={"trace_hash": "trace"})
        facts = ["value", "heads", "memory", "own_memory", "role", "trace_name"]
        self.rows = rows[[*VALUE, *facts]].reset_index(drop=True)
        self._add_notes()

    def _cells(self, runs: Sequence[Run]) -> pd.DataFrame:
        """The values of all cells, each once, with their `label` and `name`, NAME[:VARIANT]."""
        table = pd.concat([values_of(run) for run in runs], ignore_index=True)
        table = table[table["role"] != "trace"].reset_index(drop=True)
        if table.empty:
            raise Error(", ".join(self.runs), "nothing to compare", "at least one cell", "none")
        table["label"] = labels(table[CELL].assign(trace=table["trace_hash"]))  # in two runs it may have two names
        table["name"] = table["metric"] + table["variant"].map(lambda variant: f":{variant}" if variant else "")
        again = table.duplicated(["trace_hash", "cell", "metric", "variant"])
        if again.any():
            cells = len(table[again][["trace_hash", "cell"]].drop_duplicates())
            self.notes.append(f"{cells} cells occur in several runs and are counted once")
        return table[~again]

    def _default_metrics(self, table: pd.DataFrame, known: Sequence[str], runs: Sequence[Run]) -> list[str]:
        metric = default_metric(known, runs)
        with_skill = set(table["label"][(table["name"] == SKILL["name"]) & table["value"].notna()])
        if self.baseline in with_skill:
            return [metric, SKILL["name"]]
        if with_skill:
            self.notes.append(f"{self.baseline} has no random twin: skill is not compared")
        else:
            self.notes.append("no policy has a random twin: skill is not compared (use replay --controls twins)")
        return [metric]

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Columns of `statistics.paired` with `heads` and `role` of each policy, and the direction of each metric."""
        lines = statistics.paired(self.rows, self.cluster, self.baseline, self.better, self.seed, self.unequal_memory)
        facts = self.rows.groupby("label").agg({"heads": "first", "role": "first", "memory": "max"})
        lines = lines.rename(columns={"name": "metric", "label": "policy"})
        lines.insert(1, "unit", lines["metric"].map(self.units))
        for place, column in enumerate(("heads", "memory", "role"), 4):
            lines.insert(place, column, lines["policy"].map(facts[column]))
        lines.insert(7, "better", lines["metric"].map(self.better))
        pairs = zip(lines["budget"], lines["policy"], strict=True)
        lines.insert(8, "own_memory", [pair in self.own_memory for pair in pairs])
        return lines

    @cached_property
    def own_memory(self) -> set[tuple[str, str]]:
        """(budget, policy) of the policies that ignore the budget in some trace."""
        own = self.rows[self.rows["own_memory"]]
        return set(zip(own["budget"], own["label"], strict=True))

    @property
    def unequal_memory(self) -> set[tuple[str, str]]:
        """(budget, policy) whose difference is not one at equal memory: their own memory, or the baseline's."""
        every = set(zip(self.rows["budget"], self.rows["label"], strict=True))
        return {(budget, label) for budget, label in every
                if {(budget, label), (budget, self.baseline)} & self.own_memory}  # fmt: skip

    def _add_notes(self) -> None:
        """Adds notes for the reader of the numbers."""
        own = sorted({label for _, label in self.own_memory})
        if own:
            self.notes.append(f"not at equal memory, so no p and no verdict: {', '.join(own)}")
        compared = self.lines[self.lines["policy"] != self.baseline]
        for line in compared[compared["pairs"] == 0].itertuples():
            place = f"{shown_name(line.metric)} of {self.shown[line.policy]} at budget {line.budget}"
            self.notes.append(f"{place}: in no trace together with the baseline")
        of_baseline = self.lines[self.lines["policy"] == self.baseline].set_index(["metric", "budget"])["traces"]
        fewer = [line.traces < of_baseline.get((line.metric, line.budget), 0) for line in compared.itertuples()]
        if names := sorted(set(compared["policy"][fewer])):
            self.notes.append(f"not measured on all traces of the baseline, so means are over the shared traces, and "
                              f"those of the baseline over all its traces: {', '.join(names)}")  # fmt: skip
        fewest = int(compared["paired_prompts"][compared["pairs"] > 0].min()) if (compared["pairs"] > 0).any() else 0
        if fewest > 0 and (smallest := 2.0 ** (1 - fewest)) > 0.05:
            self.notes.append(f"few prompts ({fewest}): the smallest possible p is {smallest:.3g}")

    @property
    def is_open_loop(self) -> bool:
        """Whether some metric is not measured in the live model."""
        return not all(map(is_live, self.lines["metric"]))

    def document(self) -> dict:
        """The comparison for JSON."""
        return {
            "open_loop": self.is_open_loop,
            "synthetic": bool(self.synthetic),
            "runs": self.runs,
            "models": self.models,
            "traces": len(self.cluster),
            "prompts": int(self.cluster.nunique()),
            "baseline": self.baseline,
            "seed": self.seed,
            "comparisons": int(self.lines["p"].notna().sum()),
            "lines": records(self.lines),
            "notes": self.notes,
        }

    def table(self) -> str:
        """Where it comes from, a table of policies for each metric and budget, and how to read it."""
        head = f"traces    {len(self.cluster)} of {self.cluster.nunique()} prompts   {', '.join(self.models)}"
        head += "   synthetic" if self.synthetic else ""
        texts = [TITLES, *map(self.line_texts, self.lines.itertuples())]
        needed = (HEADS,) if (self.lines["memory"] > 1).any() else ()  # it tells caches of different size
        (titles, *rows), omitted = narrowed(texts, 2, [place for place in NARROW if place not in needed])
        tables = []
        for place, row in zip(self.lines[["metric", "unit", "budget"]].itertuples(index=False), rows, strict=True):
            unit = "" if pd.isna(place.unit) else f" ({place.unit})"
            heading = f"{shown_name(place.metric)}{unit}, budget {place.budget}"
            tables += [row] if heading in tables else ["", heading, titles, row]
        count = int(self.lines["p"].notna().sum())
        baseline = self.shown[self.baseline]
        foot = [f"difference: policy minus baseline ({baseline}), mean over traces; intervals: Student's t over "
                f"prompts; p: sign flips of prompts, seed {self.seed};",
                f"* Holm-corrected p below 0.05, over all comparisons of these tables: {count}"]  # fmt: skip
        if self.is_open_loop:
            foot.append("OPEN LOOP: queries as captured under the full cache")
        if any(map(is_live, self.lines["metric"])):
            foot.append("live.*: measured in the live model that decodes with these kept sets (closed loop)")
        if omitted:
            names = ", ".join(omitted).replace("95 % interval", "95 % interval of the mean")
            foot.append(f"columns not shown in this width: {names}; use --data FILE.csv or --json")
        lines = [head + ("        OPEN LOOP" if self.is_open_loop else ""), f"baseline  {baseline}"]
        return "\n".join([*(part for line in lines for part in wrapped(line)), *tables, "",
                          *(part for line in foot for part in wrapped(line))])  # fmt: skip

    def line_texts(self, line) -> tuple[str, ...]:
        """The texts of TITLES for one line; undefined values are dashes."""
        own = line.policy == self.baseline
        shown = self.shown[line.policy]
        policy = f"({shown})" if line.role == "control" else shown
        first = (policy, heads_shown(line), str(line.traces), number(line.mean), interval(line.low, line.high))
        if own:
            return (*first, "baseline", *[""] * 4)
        counts = (line.wins, line.ties, line.losses)
        verdict = "-" if any(pd.isna(one) for one in counts) else "/".join(map(str, counts))
        mark = "*" if line.p_holm < 0.05 else " "
        return (*first, number(line.difference, sign=True), interval(line.difference_low, line.difference_high, True),
                probability(line.p), probability(line.p_holm) + mark, verdict)  # fmt: skip


def values_of(run: Run) -> pd.DataFrame:
    """The compared rows of `Run.overall`, with `run`, `own_memory` as `Run.own_memory`, and `memory`: the size of a
    policy's cache, relative to that with one set for each KV head. Sets of query heads need one copy for each query
    head of a group."""
    rows = run.overall[[*CELL, "trace_hash", "metric", "variant", "value"]]
    facts = {name: run.trace(name) for name in sorted(set(rows["trace"][rows["heads"] == "query"]))}
    group = {name: fact.query_heads // fact.kv_heads for name, fact in facts.items()}
    cells = zip(rows["trace"], rows["cell"], strict=True)
    heads = zip(rows["trace"], rows["heads"], strict=True)
    return rows.assign(
        run=str(run.folder),
        sample=run.overall["sample"].fillna("") if "sample" in run.overall else "",
        own_memory=[cell in run.own_memory for cell in cells],
        memory=[group[name] if of == "query" else 1 for name, of in heads],
    )


def heads_shown(line) -> str:
    """The granularity of a policy's sets; of query heads with the memory that these hold."""
    return f"query {line.memory}x" if line.heads == "query" else line.heads


def prompts_of(identities: pd.DataFrame, runs: Sequence[Run], pattern: re.Pattern[str] | None = None) -> pd.Series:
    """The cluster of each trace, int by trace_hash: all traces of one prompt, by name or by the prompt's token ids.

    `identities`: trace_hash and trace (the name), one row a trace; with `pattern` the names alone tell.
    """
    prompts = {trace: prompt for run in runs for trace, prompt in run.prompt_hashes.items()}
    return pd.Series(
        statistics.joined(
            [part_of_name(name, pattern) for name in identities["trace"]],
            [None if pattern else prompts.get(one) for one in identities["trace_hash"]],
        ),
        index=identities["trace_hash"],
    )


def without_prompt_hash(identities: pd.DataFrame, runs: Sequence[Run]) -> list[str]:
    """Names of the traces whose prompts' token ids no run.json knows: it lists those of the last replay into a run."""
    known = {trace for run in runs for trace in run.prompt_hashes}
    return sorted(identities["trace"][~identities["trace_hash"].isin(known)])


def refuse_two_values(rows: pd.DataFrame) -> None:
    """Cells that nothing in their names tells apart: an edited policy file, other numerics."""
    key = ["trace_hash", "name", "budget", "label"]
    twice = rows[rows.duplicated(key, keep=False)]
    if len(twice):
        one = twice.iloc[0]
        same = twice[(twice[key] == one[key]).all(axis=1)]
        where = ", ".join(dict.fromkeys(same["run"]))
        found = "cells " + ", ".join(dict.fromkeys(same["cell"]))
        raise Error(where, f"two results of {one['label']} at budget {one['budget']} for trace {one['trace']}",
                    "one cell, from runs with the same version of each policy", found, Refusal.USAGE)  # fmt: skip


def part_of_name(trace: str, pattern: re.Pattern[str] | None) -> str:
    """The first group of the pattern's match in a trace's name, or the whole match; without a match, the name."""
    found = pattern.search(trace) if pattern else None
    if found is None:
        return trace
    return (found.group(1) if found.re.groups else found.group()) or trace


def number(value: float, sign: bool = False) -> str:
    """Four digits, of differences three and their sign; a dash where undefined."""
    if pd.isna(value) or value == 0:
        return "-" if pd.isna(value) else "0"
    if abs(value) >= 1e4:
        return f"{value:+,.0f}" if sign else f"{value:,.0f}"
    return f"{value:+#.3g}".rstrip(".") if sign else f"{value:#.4g}".rstrip(".")


def interval(low: float, high: float, sign: bool = False) -> str:
    """LOW to HIGH."""
    return "-" if pd.isna(low) else f"{number(low, sign)} to {number(high, sign)}"


def probability(p: float) -> str:
    """Two digits."""
    return "-" if pd.isna(p) else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
