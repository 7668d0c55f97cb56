"""What does a budget buy? A metric over the budget, a line a policy."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from kvreplay.errors import Error, Refusal
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.lines import budget_free, draw_lines, rows_to_draw
from kvreplay.plot.style import Drawing

PANEL = (2.5, 2.3)  # inches
LOGARITHMIC = 4  # the largest budget over the smallest from which the axis is logarithmic


def draw(choice: Choice) -> Drawing:
    """Budgets on the axis by their mean tokens, with the names of the command line."""
    rows = rows_to_draw(choice, by_layer=False)
    sizes = [choice.budget_sizes[budget] for budget in choice.budgets]
    if len(set(sizes)) < len(sizes):
        raise Error("-b", "several budgets have the same number of tokens", "one of them",
                    ", ".join(choice.budgets), Refusal.USAGE)  # fmt: skip

    def set_x_axis(axis: Axes) -> None:
        low, high = min(sizes), max(sizes)
        if high >= LOGARITHMIC * low:
            axis.set_xscale("log")
            edge = (high / low) ** 0.04
            axis.set_xlim(low / edge, high * edge)
        else:
            edge = 0.04 * (high - low) or 0.5 * low
            axis.set_xlim(low - edge, high + edge)
        axis.xaxis.set_major_locator(FixedLocator(sizes))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticklabels(choice.budgets)

    free = sorted(set(rows["label"][budget_free(choice, rows)]))
    unequal = f"; not at equal memory: {', '.join(free)}" if free else ""
    drawing = draw_lines(
        choice, rows.assign(tokens=rows["budget"].map(choice.budget_sizes)), "tokens", PANEL,
        title=f"{choice.metric_words} by budget", subtitle=f"over all layers{unequal}",
        x_label=budget_axis(choice.budgets), set_x_axis=set_x_axis,
    )  # fmt: skip
    names = {size: budget for budget, size in choice.budget_sizes.items()}
    data = drawing.data.rename(columns={"tokens": "budget_tokens"})
    data.insert(4, "budget", data["budget_tokens"].map(names))
    return Drawing(drawing.figure, data)


def budget_axis(budgets: list[str]) -> str:
    """The axis label for these budgets: a budget in B is a size, one with a point or % a share, any other a count."""
    if any(budget.endswith("B") for budget in budgets):
        return "budget (memory of the kept keys and values)"
    shares = ["." in budget or "%" in budget for budget in budgets]
    if all(shares):
        return "budget (share of the prompt kept)"
    return "budget (share of the prompt or tokens)" if any(shares) else "budget (tokens per layer and head)"
