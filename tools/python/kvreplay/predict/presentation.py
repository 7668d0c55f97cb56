"""A prediction as tables, a sentence, a JSON document and a figure."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvreplay.errors import Error
from kvreplay.headline import HEADLINE
from kvreplay.predict.prediction import SHARE, Prediction
from kvreplay.run_names import pick
from kvreplay.tables import aligned, records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_FIRST = (HEADLINE, "output_error")  # by the tables of the program: the first that the run has
MOST = 12  # flipped pairs that the text lists


class Presentation:
    """Everything about one live metric."""

    def __init__(self, found: Prediction, live: str) -> None:
        self._found = found
        [self._live] = pick("--live", "live metric", [live], found.live)
        self._headline = next((one for one in SHOWN_FIRST if one in found.offline), None)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """The headline's rows of this live metric, best first."""
        rows = self._found.headline
        rows = rows[rows["live"] == self._live].sort_values("spearman", ascending=False, kind="stable")
        if rows.empty:
            raise Error("predict", f"no order of the policies by {self._live}",
                        "policies with different offline and live values at one budget", "equal values")  # fmt: skip
        return rows

    @property
    def best(self) -> str:
        return str(self.lines["offline"].iloc[0])

    def sentence(self) -> str:
        """The offline metric with the highest rank correlation, and its lead over the headline metric."""
        first = self.lines.iloc[0]
        text = (
            f"{self.best} orders the policies most like {self._live}: rank correlation "
            f"{interval(first, 'spearman')}, {100 * first['in_order']:.0f} % of pairs in order"
        )
        if self._headline in set(self.lines["offline"]) and self.best != self._headline:
            difference, low, high = self._found.better_than(self.best, self._headline, self._live)
            if first["prompts"] > 1:
                word = "better than" if low > 0 else "not significantly better than"
                gap = f"{difference:+.2f} [{low:+.2f}, {high:+.2f}], {first['prompts']} prompts"
                text += f"; {word} {self._headline} ({gap})"
        if first["prompts"] == 1:
            text += "; not resolved, since one prompt has no interval"
        return text + "."

    def by_budget(self) -> pd.DataFrame:
        """The best offline metric and the headline's, at each budget."""
        rows = self._found.by_budget
        wanted = list(dict.fromkeys([self.best, *([self._headline] if self._headline else [])]))
        return rows[(rows["live"] == self._live) & rows["offline"].isin(wanted)]

    def text(self) -> str:
        """All of it, aligned."""
        over = self._found.over_budgets
        over = over[over["live"] == self._live].set_index("offline")["spearman"]
        cells = self._found.cells
        head = (
            f"prompts   {cells['prompt'].nunique()} of {cells['kind'].nunique()} kinds   policies "
            f"{cells['label'].nunique()}   budgets {', '.join(sorted(set(cells['budget'])))}   live {self._live}\n\n"
        )
        table = [("offline metric", "rank correlation", "tau", "pairs in order", "across budgets")] + [
            (line["offline"], interval(line, "spearman"), f"{line['kendall']:.2f}", f"{100 * line['in_order']:.0f} %",
             f"{over.get(line['offline'], math.nan):.2f}") for _, line in self.lines.iterrows()
        ]  # fmt: skip
        budgets = [("budget", "offline metric", "rank correlation", "pairs in order")] + [
            (line["budget"], line["offline"], interval(line, "spearman"), f"{100 * line['in_order']:.0f} %")
            for _, line in self.by_budget().iterrows()
        ]
        parts = [head + text_of(table), text_of(budgets), *self._further(), self.sentence()]
        return "\n\n".join(parts)

    def _further(self) -> list[str]:
        found = []
        kinds = self._found.left_out_kinds(self._live)
        if len(kinds) > 1:
            rows = [("held-out kind", "best on the others", "here", "best here", "")] + [
                (one["kind"], one["chosen"], f"{one['spearman']:.2f}", one["best here"], f"{one['its spearman']:.2f}")
                for _, one in kinds.iterrows()
            ]
            found.append(text_of(rows))
        needed = self._found.needed(self.best, self._live)
        if len(needed):
            rows = [("budget", "prompts", f"prompts to order {100 * SHARE:.0f} % of pairs", "in order")] + [
                (one["budget"], str(one["prompts"]), "no pair resolved" if pd.isna(one["reached"])
                 else f"more than {one['prompts']}" if pd.isna(one["needed"])
                 else f"{one['needed']:.0f}", f"{100 * one['reached']:.0f} %") for _, one in needed.iterrows()
            ]  # fmt: skip
            found.append(text_of(rows))
        flipped = self._found.flipped(self.best, self._live)
        if len(flipped):
            rows = [("budget", "better live", f"better by {self.best}")] + [
                tuple(map(str, one)) for one in flipped.head(MOST).itertuples(index=False)
            ]
            more = len(flipped) - MOST
            found.append(text_of(rows) + (f"\nand {more} more pairs" if more > 0 else ""))
        return found

    def document(self) -> dict[str, Any]:
        """A value for JSON; undefined values are null."""
        return {
            "live": self._live,
            "prompts": int(self._found.cells["prompt"].nunique()),
            "headline": records(self.lines),
            "by_budget": records(self.by_budget()),
            "over_budgets": records(self._found.over_budgets),
            "left_out_kinds": records(self._found.left_out_kinds(self._live)),
            "needed": records(self._found.needed(self.best, self._live)),
            "flipped": records(self._found.flipped(self.best, self._live)),
            "sentence": self.sentence(),
        }

    def figure(self) -> Figure:
        """Offline against live, one point a cell, coloured by budget: the headline's metric and the best one."""
        from kvreplay.plot.colours import COLOURS, MARKERS
        from kvreplay.plot.style import Sheet, logarithmic_axis

        wanted = list(dict.fromkeys([*([self._headline] if self._headline else []), self.best]))
        cells = self._found.cells
        budgets = cells.groupby("budget")["share"].mean().sort_values().index
        sheet = Sheet(
            len(wanted), (2.3, 2.0), len(wanted), left=0.75, right=1.0, above=0.25, gap=(0.75, 0.5), below=0.45,
            title="Offline metrics against the live model", subtitle="one point per prompt, policy and budget",
            caption=f"Prompts: {cells['prompt'].nunique()}. ρ: mean rank correlation within a prompt at equal budget",
        )  # fmt: skip
        of_metric = self.lines.set_index("offline")["spearman"]
        for axis, name in zip(sheet.axes, wanted, strict=True):
            for place, budget in enumerate(budgets):
                some = cells[cells["budget"] == budget]
                axis.plot(some[name].abs(), some[self._live].abs(), MARKERS[place % len(MARKERS)], markersize=2.5,
                          color=COLOURS[place % len(COLOURS)], label=str(budget), alpha=0.7)  # fmt: skip
            for which in "xy":
                logarithmic_axis(axis, which)
            axis.set_xlabel(name)
            axis.set_ylabel(self._live)
            axis.spines[["top", "right"]].set_visible(False)
            axis.annotate(f"ρ = {of_metric[name]:.2f}", (0, 1), (0, 4), "axes fraction", "offset points")
        sheet.axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title="budget")
        return sheet.figure


def interval(line: pd.Series, name: str) -> str:
    """A mean over prompts with its interval; without one for a single prompt."""
    ends = "" if pd.isna(line[f"{name}_low"]) else f" [{line[f'{name}_low']:.2f}, {line[f'{name}_high']:.2f}]"
    return f"{line[name]:.2f}{ends}"


def text_of(rows: list[tuple[str, ...]]) -> str:
    """All columns start below each other."""
    return "\n".join(aligned(rows, words=len(rows[0])))
