"""Three searches for a better policy. Each returns its trials and its best policy; none reads a held-out trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvreplay import _engine
from kvreplay.errors import Error, Refusal
from kvreplay.results import Run
from kvreplay.tune import exact, space
from kvreplay.tune.hold_out import Captured
from kvreplay.tune.objective import Objective, of_policies

STEP = 3  # of successive halving: a third of the candidates goes on, on three times as many traces
QUARTERS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # the grid of layer budgets, in quarters of B


@dataclass(frozen=True)
class Found:
    start: str
    best: str  # the start itself where nothing is better on the fitting traces
    story: str  # what was tried


def halving(objective: Objective, traces: Sequence[Captured], start: str, asked: dict[str, space.Domain], trials: int,
            seed: int) -> Found:  # fmt: skip
    """Random search by successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943). All candidates are measured
    on few traces, the best third on three times as many, until the last ones and the start are measured on all."""
    drawn = space.candidates(start, asked, trials, seed)
    if drawn.refused:
        objective.notes.append(f"{len(drawn.refused)} random candidates are invalid, for example {drawn.refused[0]}")
    running, told = drawn.policies, []
    for share in halving_shares(len(running), len(traces)):
        some = traces[: math.ceil(len(traces) * share)]
        means = objective.sign * objective.means(some, running)
        told.append(f"{len(running)} on {len(some)}")
        order = np.argsort(-np.where(np.isnan(means), -np.inf, means), kind="stable")
        left_out = int(np.isnan(means).sum())
        if left_out:
            objective.notes.append(f"{left_out} candidates are omitted: undefined on a trace, or budget-free")
        keep = max(1, math.ceil(len(running) / STEP))
        best = running[order[0]]
        defined = [i for i in order[:keep] if not np.isnan(means[i])]
        running = [start, *(running[i] for i in defined if running[i] != start)]
    ranges = ", ".join(f"{name}={one}" for name, one in asked.items())
    every = "all of " if drawn.every else "random search in "
    return Found(start, best, f"{every}{ranges}: candidates on traces: {', '.join(told)}")


def halving_shares(candidates: int, traces: int) -> list[float]:
    """The share of the traces of each round, the last 1."""
    rounds = min(whole_log(candidates), whole_log(traces))
    return [STEP ** (i - rounds) for i in range(rounds + 1)]


def whole_log(number: int) -> int:
    """The number of digits to the base STEP, minus 1."""
    return len(np.base_repr(number, STEP)) - 1


def layer_budgets(objective: Objective, traces: Sequence[Captured], start: str) -> Found:
    """Sizes from the grid, one a layer, with the sum L*B and the best mean over layers: `allocate=list`."""
    base = space.without_part(start, "allocate")
    uniform = space.with_values(base, {"allocate": "uniform"})
    space.with_values(base, {"allocate": "list", "shares": "1"})  # refused where its layers share sets
    sizes = grid(objective.budget, min(one.tokens for one in traces))
    run = objective.run("fitting", traces, [uniform], list(sizes), detail="layer")
    rows = of_policies(objective.by_layer(run, traces), [uniform])
    sizes = sizes_that_fit(objective, run, rows, uniform, [one.name for one in traces], sizes)
    quarters = list(sizes.values())
    values = rows.pivot_table(index="layer", columns="budget", values="value", sort=True)[list(sizes)].to_numpy()
    chosen = exact.best_sizes(objective.sign * values, quarters, 4 * len(values))
    shares = ",".join(f"{quarters[i] / 4:g}" for i in chosen)
    best = space.with_values(base, {"allocate": "list", "shares": shares})
    means = objective.means(traces, [start, best])
    better = objective.sign * (means[1] - means[0]) > 0
    tried = ", ".join(f"{one / 4:g}" for one in quarters)
    return Found(start, best if better else start, f"{len(values)} layers of {tried} times B each, {len(values)} B in "
                 "all: exact on this grid")  # fmt: skip


def grid(budget: str, prompt: int) -> dict[str, int]:
    """The quarters of the budget that are valid sizes, ascending, by their texts as budgets."""
    share, count = _engine.budget(budget)
    if budget.endswith("@seen") or not (share or count):
        raise Error("-b", "cannot be allocated over layers", "a fraction of the prompt, or a count of tokens", budget,
                    Refusal.USAGE)  # fmt: skip
    most = 1.0 if share else prompt
    found = {}
    for quarters in QUARTERS:
        size = float(f"{share * quarters / 4:.15g}") if share else round(count * quarters / 4)  # 0.3, not 0.30…04
        if 0 < size <= most:
            found.setdefault(str(size), quarters)
    found = {size: quarters for size, quarters in found.items() if quarters != 4 and size != str(share or count)}
    found[budget] = 4
    return dict(sorted(found.items(), key=lambda size: size[1]))


def sizes_that_fit(objective: Objective, run: Run, rows: pd.DataFrame, policy: str, names: Sequence[str],
                   sizes: dict[str, int]) -> dict[str, int]:  # fmt: skip
    """The sizes at which every trace protects the same number of tokens as at B. A list divides the rest of B after the
    protected tokens, so values that were measured with other protected tokens would not apply to it."""
    middle = objective.budget
    tokens, by_rule = {}, {}  # by trace and size
    for one in rows[["trace", "cell", "budget", "budget_tokens"]].drop_duplicates().itertuples():
        selection = run.selection_of(one.cell, run.trace(one.trace).boundary)
        stays = 0 if selection is None else int((selection.sinks + selection.recent)[selection.layers].max())
        tokens[one.trace, one.budget], by_rule[one.trace, one.budget] = one.budget_tokens, stays
    fits = {}
    for size, quarters in sizes.items():
        for name in names:
            if (name, size) not in tokens and objective.failure():
                raise Error(objective.metric, f"not defined for {policy} at {size} of {name}",
                            "a value for each size on every fitting trace", objective.failure())  # fmt: skip
            if (name, size) not in tokens:
                raise Error("-b", "several sizes of the grid are the same number of tokens", "a larger budget", name,
                            Refusal.USAGE)  # fmt: skip
            if by_rule[name, middle] >= tokens[name, middle]:
                raise Error(
                    "-b", "protected tokens fill the budget", "a larger budget", f"{middle} of {name}", Refusal.USAGE
                )
        if any(tokens[name, size] < by_rule[name, middle] for name in names):
            continue  # no room for the protected tokens
        if any(by_rule[name, size] != by_rule[name, middle] for name in names):
            raise Error(policy, "the number of protected tokens depends on the budget", "a number of tokens, as in "
                                                                                        "recent=64",
                        "a share of the budget", Refusal.USAGE)  # fmt: skip
        fits[size] = quarters
    return fits


def layer_ranges(objective: Objective, traces: Sequence[Captured], policies: Sequence[str], most: int) -> Found:
    """Assigns one of the policies to each layer, in at most `most` ranges. The start is the best single policy."""
    for policy in policies:
        _engine.check_layers_apart(policy)
    run = objective.run("fitting", traces, policies, detail="layer")
    rows = objective.by_layer(run, traces)
    rows = of_policies(rows[rows["budget"] == objective.budget], policies)
    by_trace = rows.pivot(index=["trace", "layer"], columns="asked", values="value").reindex(
        columns=range(len(policies))
    )
    whole = by_trace.notna().sum() == len(traces) * rows["layer"].nunique()
    left_out = [policy for policy, defined in zip(policies, whole, strict=True) if not defined]
    if left_out:
        objective.notes.append(f"omitted, undefined on a fitting trace: {', '.join(left_out)}")
    policies = [policy for policy in policies if policy not in left_out]
    if not policies:
        raise Error(objective.metric, "not defined for any policy", "a policy with a value on every fitting trace",
                    objective.failure())  # fmt: skip
    values = by_trace.loc[:, whole].groupby("layer").mean().to_numpy()
    alone = objective.means(traces, policies)
    order = np.argsort(-objective.sign * alone, kind="stable")  # ties go to the policy named first
    start = policies[order[0]]
    chosen = exact.best_ranges(objective.sign * values[:, order], most)
    best = ranges_text([policies[order[i]] for i in chosen])
    story = f"{len(values)} layers in at most {most} ranges: exact; alone: " + ", ".join(
        f"{policy} {mean:.4f}" for policy, mean in zip(policies, alone, strict=True)
    )
    return Found(start, best, story)


def ranges_text(policies: Sequence[str]) -> str:
    """The policies of the layers as `layers:FIRST-LAST=(POLICY),…`; if all layers have the same policy, that policy."""
    begins = [i for i, policy in enumerate(policies) if i == 0 or policies[i - 1] != policy]
    if len(begins) == 1:
        return policies[0]
    ends = [*(begin - 1 for begin in begins[1:]), len(policies) - 1]
    pieces = [f"{first}-{last}" if first < last else f"{first}" for first, last in zip(begins, ends, strict=True)]
    return "layers:" + ",".join(f"{span}=({policies[i]})" for span, i in zip(pieces, begins, strict=True))
