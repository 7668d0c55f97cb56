# %% [markdown]
# # Closed loop: which offline metric predicts what a live model does
#
# This notebook evaluates the numbers of `tools/study`: the kept sets of a replay, and the same sets in the live model.
# Offline numbers use queries as captured under the full cache. Live numbers come from a model that attends only to the
# kept tokens. All comparisons are within a prompt, at equal budget.

# %%
import re

import numpy as np
import pandas as pd
from frame import (
    COLOURS,
    INTERVAL,
    PARTS,
    Drawing,
    Measured,
    Page,
    Prediction,
    Sheet,
    answers,
    cell,
    curves,
    interval,
    less,
    mean_over_traces,
    more,
    width_of,
)
from layer_weights import EQUAL, LAYER_WEIGHTS, left_out_weights, with_weights
from study import BASES, STUDIES, file_of, read
from study import EQUAL as EQUAL_PROTECTION

page = Page("closed_loop")
LIVE = ["kld", "same_top_p", "nll_increase", "live_output_error"]
HEADLINE, HYPOTHESIS = "output_error", "output_error:residual:upper-half"
UPPER = ":upper-half"
WEIGHTS = {"smollm2-135m": "Q4_1 (4 bits)", "qwen2.5-coder-1.5b": "Q4_K_M (4 bits)"}  # of the package's file
measured = {name: read(file_of(name)) for name in WEIGHTS if file_of(name).exists()}
titles = {name: STUDIES[name].title for name in measured}
policies = {name: cells[cells["role"] == "asked"] for name, (cells, _) in measured.items()}
offline = {one for _, about in measured.values() for one in about["offline"]}
# Metrics that also exist for the upper half of the layers; of the span metrics only those of the answer.
of_layers = re.compile(r"(?!span_)|.*:answer\.(mean|layer)$")
metrics = sorted(one for one in offline if one + UPPER in offline and of_layers.match(one))


def predicted(name: str, chosen: list[str]) -> Prediction:
    """What a model's numbers say of these offline metrics."""
    about = measured[name][1]
    return Prediction.from_measured(Measured(policies[name], about["offline"], LIVE, about["worse"]), chosen)


predictions = {name: predicted(name, [*metrics, *(one + UPPER for one in metrics)]) for name in measured}

# %% [markdown]
# ## Measured policies and prompts

# %%
OTHERS = {"papers": "the papers' policies", "layers": "one layer alone"}
parts = policies | {part: read(file_of(part))[0].query("role == 'asked'") for part in OTHERS if file_of(part).exists()}
run = pd.DataFrame([
    {"part": OTHERS.get(name, "policies"), "model": STUDIES[name].title,
     "weights": WEIGHTS.get(name, WEIGHTS["smollm2-135m"]), "data type": STUDIES[name].dtype,
     "prompts": cells["prompt"].nunique(), "kinds": cells["kind"].nunique(),
     "tokens per prompt": f"{cells['tokens'].min()} to {cells['tokens'].max()}",
     "policies": cells["label"].nunique(), "budgets": ", ".join(sorted(cells["budget"].dropna().unique(), key=float)),
     "cells": len(cells)}
    for name, cells in parts.items()
])  # fmt: skip
page.table("run", run)

# %% [markdown]
# ## Which offline metric orders policies as the live model does
#
# The number is Spearman's rank correlation over the policies of one prompt at one budget, averaged over budgets, then
# over prompts. `kld` is the KL divergence between the next-token distributions with the full and the evicted cache.

# %%
grids = {
    name: found.of_prompts.groupby(["live", "prompt", "offline"])["spearman"].mean().unstack("offline")
    for name, found in predictions.items()
}


def line(name: str, metric: str) -> dict[str, object] | None:
    """The headline's numbers of one offline metric, and how far it is ahead of output_error."""
    if metric not in grids[name].columns:
        return None
    found = predictions[name].headline.set_index(["offline", "live"]).loc[metric]
    ahead, low, high = predictions[name].better_than(metric, HEADLINE)
    return {
        "model": name, "metric": metric, "prompts": int(found.loc["kld", "prompts"]),
        **{f"{live}_{end}": found.loc[live, f"spearman{suffix}"]
           for live in LIVE for end, suffix in (("mean", ""), ("low", "_low"), ("high", "_high"))},
        "in_order": found.loc["kld", "in_order"], "ahead": ahead, "ahead_low": low, "ahead_high": high,
    }  # fmt: skip


lines = pd.DataFrame([
    found for name in predictions for metric in metrics for part in ("", UPPER) if (found := line(name, metric + part))
])  # fmt: skip
lines = lines.dropna(subset="kld_mean").sort_values(["model", "kld_mean"], ascending=[False, False], kind="stable")
of = lines.set_index(["model", "metric"])


def shown_of(name: str, metric: str, column: str, after: str = "") -> str:
    """`column` of a model and metric with its interval; "": not measured."""
    if (name, metric) not in of.index:
        return ""
    return interval(*(of.loc[(name, metric), f"{column}{end}"] for end in (after, "_low", "_high")), 2)


whole_metrics = list(dict.fromkeys(lines["metric"].str.removesuffix(UPPER)))
page.table("headline", lines, pd.DataFrame([
    {"offline metric": metric}
    | {f"{titles[name]}{words}": shown_of(name, metric + part, column, after) for name in predictions
       for words, part, column, after in ((", all layers", "", "kld", "_mean"), (", upper half", UPPER, "kld", "_mean"),
                                          (", all layers, minus output_error", "", "ahead", ""))}
    for metric in whole_metrics
]))  # fmt: skip


# %%
def predictors() -> Drawing:
    """A panel a model, a row a metric, a mark for all layers and one for the upper half of them."""
    first = lines[lines["model"] == next(iter(predictions))]
    order = list(dict.fromkeys(first["metric"].str.removesuffix(UPPER)))
    left = max(width_of(metric) for metric in order) + 0.2
    sheet = Sheet(
        len(predictions), (2.2, 0.22 * len(order)), len(predictions), left=left, right=1.0, above=0.2, gap=(0.2, 0),
        below=0.42, title="Which offline metric orders policies as the live model does",
        subtitle="rank correlation with kld within a prompt, at equal budget; closed loop",
        caption="; ".join(f"{titles[name]}: {grid.loc['kld'].shape[0]} prompts" for name, grid in grids.items())
        + f". {INTERVAL}.",
    )  # fmt: skip
    for axis, name in zip(sheet.axes, predictions, strict=True):
        for colour, part, words in ((COLOURS[0], "", "all layers"), (COLOURS[1], UPPER, "upper half")):
            mine = lines[lines["model"] == name].set_index("metric").reindex([metric + part for metric in order])
            at = np.arange(len(order)) + (0.15 if part else -0.15)
            axis.hlines(at, mine["kld_low"], mine["kld_high"], color=colour, linewidth=1)
            axis.plot(mine["kld_mean"], at, "s" if part else "o", color=colour, label=words, markersize=3)
        axis.axvline(0, color="#b0b0b0", linewidth=0.6)
        axis.set_ylim(len(order) - 0.5, -0.5)
        axis.set_yticks(range(len(order)), order)
        axis.tick_params(axis="y", length=0, labelleft=axis is sheet.axes[0])
        axis.set_xlabel("rank correlation with kld")
        axis.annotate(titles[name], (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#e3e3e3", linewidth=0.6)
    sheet.axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handletextpad=0.1)
    return Drawing(sheet.figure, lines)


page.keep(predictors(), "predictors")

# %% [markdown]
# ## The hypothesis fixed before the study

# %%
for name, grid in grids.items():
    of_kld = grid.loc["kld"].rename_axis("trace").reset_index().melt("trace", var_name="label")
    of_model = lines[lines["model"] == name].set_index("metric")[["kld_mean", "kld_low", "kld_high"]]
    ahead = more(of_kld.dropna(subset="value"), HYPOTHESIS, HEADLINE, titles[name])
    page.find(
        "(hypothesis)", f"{HYPOTHESIS} orders policies by kld better than {HEADLINE}, {titles[name]}",
        "rank correlation " + " and ".join(interval(*of_model.loc[one], 2) for one in (HYPOTHESIS, HEADLINE)), [ahead],
    )  # fmt: skip

# %% [markdown]
# ## By budget, and on held-out kinds of prompts
#
# *Chosen metric* is the offline metric with the highest rank correlation on all other kinds of prompts.

# %%
best = [lines[lines["model"] == name].iloc[0]["metric"] for name in measured]
shown = list(dict.fromkeys([HEADLINE, HYPOTHESIS, *best]))
few = {name: predicted(name, shown) for name in measured}
by_budget = pd.concat([
    found.by_budget[found.by_budget["live"] == "kld"].assign(model=name) for name, found in few.items()
])  # fmt: skip
page.table("budgets", by_budget, pd.DataFrame([
    {"model": titles[name], "offline metric": metric}
    | {one["budget"]: interval(*one[["spearman", "spearman_low", "spearman_high"]], 2)
       for _, one in some.sort_values("budget", key=lambda budget: budget.astype(float)).iterrows()}
    for (name, metric), some in by_budget.groupby(["model", "offline"], sort=False)
]).fillna(""))  # fmt: skip
kinds = pd.concat([found.left_out_kinds().assign(model=name) for name, found in predictions.items()])
page.table("kinds", kinds, pd.DataFrame([
    {"model": titles[one["model"]], "kind left out": one["kind"], "chosen metric": one["chosen"],
     "rank correlation": f"{one['spearman']:.2f}", "best metric of this kind": one["best here"],
     "best rank correlation": f"{one['its spearman']:.2f}"}
    for _, one in kinds.iterrows()
]))  # fmt: skip

# %% [markdown]
# ## Weights of layers
#
# Weighted mean of an offline metric over the lower, middle and upper third of the layers. The weights, in sixths, are
# those that are best on the other kinds of prompts; for the second model, those that are best on the first model.

# %%
WEIGHTED = (HEADLINE, HYPOTHESIS.removesuffix(UPPER))
in_thirds = {name: predicted(name, [f"{one}:{part}" for one in WEIGHTED for part in PARTS[2:]]) for name in measured}
(first_name, first), *others = in_thirds.items()
learnt = []
for metric in WEIGHTED:
    weighted = with_weights(first, metric)
    learnt.append(left_out_weights(first, weighted).assign(model=first_name, metric=metric))
    best_weights = int(weighted.mean().idxmax())
    for name, found in others:
        mean = with_weights(found, metric).mean()
        learnt.append(pd.DataFrame([{
            "kind": "all", "prompts": found.cells["prompt"].nunique(), "weights": LAYER_WEIGHTS[best_weights],
            "spearman": mean[best_weights], "equal": mean[EQUAL], "best": mean.max(), "model": name, "metric": metric,
        }]))  # fmt: skip
learnt = pd.concat(learnt, ignore_index=True)
learnt["weights"] = [" ".join(f"{6 * one:.0f}" for one in weights) for weights in learnt["weights"]]
page.table("layer-weights", learnt, pd.DataFrame([
    {"model": titles[one["model"]], "offline metric": one["metric"], "kind left out": one["kind"],
     "prompts": one["prompts"], "weights of thirds, in sixths": one["weights"],
     "rank correlation": f"{one['spearman']:.2f}", "with equal weights": f"{one['equal']:.2f}",
     "best rank correlation": f"{one['best']:.2f}"}
    for _, one in learnt.iterrows()
]))  # fmt: skip

# %% [markdown]
# ## One layer alone
#
# SnapKV evicts in one layer, and all other layers keep everything. This measures the effect of evicting in that layer,
# and which offline metric predicts it. The mean of an offline metric over all layers is then that layer's value divided
# by the number of layers.

# %%
OF_LAYERS = [HEADLINE, "output_error:residual", "output_error:projected", "output_error:pooled", "attention_recall"]
if file_of("layers").exists():
    alone, about = read(file_of("layers"))
    alone = alone[alone["role"] == "asked"]
    in_order = Prediction.from_measured(Measured(alone, about["offline"], LIVE, about["worse"]), OF_LAYERS).headline
    in_order = in_order[in_order["live"] == "kld"]
    page.table("layers-order", in_order, pd.DataFrame([
        {"offline metric": one["offline"], "prompts": one["prompts"],
         "rank correlation with kld over layers": interval(
             *one[["spearman", "spearman_low", "spearman_high"]], 2)}
        for _, one in in_order.sort_values("spearman", ascending=False).iterrows()
    ]))  # fmt: skip
    alone = alone.assign(layer=alone["label"].str.extract(r"(\d+)=snapkv", expand=False).astype(int))
    treated = alone["layer"].max() + 1
    panels = {"live": "kld / nats", "open loop": HEADLINE, "against the residual stream": "output_error:residual"}
    points = pd.concat([
        alone.assign(panel=panel, series="one layer", trace=alone["prompt"],
                     value=alone[words.partition(" ")[0]] * (1 if panel == "live" else treated))
        for panel, words in panels.items()
    ])  # fmt: skip
    page.keep(curves(
        points, "layer", panels, "Evicting in one layer alone", "SnapKV at 0.1 in one layer; closed loop",
        f"{STUDIES['layers'].title}: {alone['prompt'].nunique()} prompts.", "layer",
    ), "layers")  # fmt: skip

# %% [markdown]
# ## Number of prompts needed
#
# The number of randomly drawn prompts whose offline means order two policies as the live means over all prompts do,
# with probability 0.95 over pairs of policies.

# %%
needed = pd.concat([
    found.needed(metric).assign(model=name, metric=metric)
    for name, found in few.items() for metric in shown
])  # fmt: skip
page.table("needed", needed, pd.DataFrame([
    {"model": titles[name], "offline metric": metric}
    | {one["budget"]: f"{one['needed']:.0f}" if pd.notna(one["needed"])
       else f"more than {one['prompts']} ({100 * one['reached']:.0f} %)"
       for _, one in some.sort_values("budget", key=lambda budget: budget.astype(float)).iterrows()}
    for (name, metric), some in needed.groupby(["model", "metric"], sort=False)
]).fillna(""))  # fmt: skip

# %% [markdown]
# ## Policies in the live model
#
# The table has the mean of `kld` over prompts, in nats. A random twin keeps the protected tokens of its policy and
# places runs of kept tokens of the same lengths at random. If the `kld` of a policy is not below its twin's, its scores
# do not contribute. Policies are written with the parameters that differ from their defaults.

# %%
every = pd.concat([cells.assign(model=name, trace=cells["prompt"]) for name, (cells, _) in measured.items()])
evicted = every[every["budget"].notna() & (every["label"] != "full")]
live = evicted.rename(columns={"kld": "value"}).dropna(subset="value")
found = mean_over_traces(live, ["model", "label", "budget"])
cells = found.set_index(["model", "label", "budget"])
budgets = sorted(set(live["budget"]), key=float)
MIDDLE = "0.1"
DEFAULTS = {
    "snapkv": {"window=8", "pool=max", "heads=kv"}, "pyramid-kv": {"pool=max"}, "dynamickv": {"pool=max"},
    "chunkkv": {"chunk=10", "reuse=1", "sinks=0"},
    "sca": {"sinks=auto", "use=kv", "objective=min", "layer=-1", "share=all"},
}  # fmt: skip


def plain(label: str) -> str:
    """The label of a policy without parameters that have their default, so that all tables name it alike."""
    policy, _, parameters = label.partition(":")
    others = [one for one in re.split(r",(?![^(]*\))", parameters) if one not in DEFAULTS.get(policy, ())]
    return ":".join([policy, *([",".join(others)] if any(others) else [])])


ranked = {
    name: [label for _, label in sorted(
        (cells.loc[(name, label, MIDDLE), "mean"], label) for label in set(live["label"][live["model"] == name])
        if (name, label, MIDDLE) in cells.index
    )] for name in measured
}  # fmt: skip
page.table("policies", found, pd.DataFrame([
    {"model": titles[name], "policy": plain(label)}
    | {budget: cell(cells.loc[(name, label, budget)]) if (name, label, budget) in cells.index else ""
       for budget in budgets}
    for name in measured for label in ranked[name]
]))  # fmt: skip

for name in measured:
    evaluated = {plain(label) for label in ranked[name]}
    statements = {
        "policies have a lower kld than their random twins": [(base, f"random-twin:of={base}") for base in BASES],
        "policies have a lower kld with pooled scores than without pooling":
            [(base, f"{base}:pool=none") for base in ("snapkv", "pyramid-kv", "dynamickv")],
        "ChunkKV has a lower kld than SnapKV": [("chunkkv", "snapkv")],
        "ChunkKV has a lower kld than SnapKV with one set per layer": [("chunkkv", "snapkv:heads=layer")],
        "PyramidKV's per-layer budgets have a lower kld than equal budgets": [("pyramid-kv", "snapkv")],
        "DynamicKV's per-layer budgets have a lower kld than equal budgets": [("dynamickv", "snapkv")],
        "protecting 4 sinks and 8 recent tokens lowers kld": [(f"{base}:{EQUAL_PROTECTION}", base) for base in BASES],
    }  # fmt: skip
    at_middle = live[(live["model"] == name) & (live["budget"] == MIDDLE)]
    at_middle = at_middle.assign(label=at_middle["label"].map(plain))
    kld = {plain(label): cells.loc[(name, label, MIDDLE), "mean"] for label in ranked[name]}
    for says, pairs in statements.items():
        # Some parts of the study have fewer variants of a policy.
        pairs = [pair for pair in pairs if evaluated.issuperset(pair)]
        if pairs:
            page.find(
                "(study)", f"{says}, {titles[name]} at {MIDDLE}",
                ", ".join(f"{one} {kld[one]:.3f}, {other} {kld[other]:.3f}" for one, other in pairs),
                [less(at_middle, one, other) for one, other in pairs],
            )  # fmt: skip

# %% [markdown]
# ## Answers
#
# Share of the answers that the greedy text contains, over the prompts that the model answers with the full cache.

# %%
ANSWERED_AT = ("0.1", "0.2", "0.5")
answered = evicted.rename(columns={"contains": "value"})
answered = answered.dropna(subset="value") if "value" in answered else answered.iloc[:0]
if len(answered):
    means = mean_over_traces(answered, ["model", "label", "budget"])
    at = means.set_index(["model", "label", "budget"])
    page.table("answers", means, pd.DataFrame([
        {"model": titles[name], "prompts": answered["trace"][answered["model"] == name].nunique(),
         "policy": plain(label)}
        | {budget: cell(at.loc[(name, label, budget)], 2) if (name, label, budget) in at.index else ""
           for budget in ANSWERED_AT}
        for name in measured for label in ranked[name] if label in set(answered["label"][answered["model"] == name])
    ]))  # fmt: skip

# %% [markdown]
# ## Answers under the papers' policies
#
# The table has the needle prompts that the model answers with the full cache, under the policies that the papers'
# tables compare. docs/papers.md has the verdicts.

# %%
if file_of("papers").exists():
    numbers = pd.concat([
        mean_over_traces(answers(metric), ["label", "budget"]).assign(metric=metric)
        for metric in ("contains", "nll_increase")
    ])  # fmt: skip
    at = numbers.set_index(["metric", "label", "budget"])
    page.table("papers", numbers, pd.DataFrame([
        {"policy": plain(label)}
        | {budget: cell(at.loc[("contains", label, budget)], 2) for budget in STUDIES["papers"].budgets}
        for label in sorted(set(numbers["label"]), key=plain)
    ]))  # fmt: skip

# %%
page.findings(with_differences=True)
