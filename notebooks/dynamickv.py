# %% [markdown]
# # DynamicKV: budgets that depend on layer and task
#
# Zhou et al. 2024, *DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs*, arXiv:2412.14838.
#
# DynamicKV scores tokens as SnapKV does and then divides the budget over layers by how many of the best scores each
# layer has. The paper finds that tasks differ in how many tokens each layer needs. It compares with even budgets
# (SnapKV) and budgets that fall with depth (PyramidKV) on models of 7B and 8B parameters. Here the model is
# SmolLM2-135M-Instruct, with 30 layers. Numbers are open loop, with queries as captured under the full cache, except
# for findings that begin with "closed loop". For these, the model answers needle prompts again under each policy; the
# prompts are those that it answers with its full cache (`tools/study papers`).

# %%
from itertools import combinations

import numpy as np
import pandas as pd
from frame import (
    KINDS,
    SIGNIFICANT,
    Choice,
    Page,
    answers,
    cell,
    corpus,
    curves,
    holm,
    mean_over_traces,
    means,
    more,
    needle_kept,
    of_paper,
    peak_p,
    traces,
    twins,
    values,
    window_settings,
)
from study import STUDIES

page = Page("dynamickv")
prompts = corpus()
every = traces()
kinds = [kind for kind in KINDS if kind in set(prompts["kind"])]
shortest = prompts["prompt_tokens"].min()
prompts.groupby("kind")["prompt_tokens"].agg(traces="count", least="min", most="max").loc[kinds]

# %% [markdown]
# ## Which layers need many tokens?
#
# Fig. 2 counts, for four kinds of task, in which layers the best 128·L of all attention scores lie (L layers; scores
# are those of the last queries, mean over heads): a sharp fall after the first layer, peaks around layer 15 of 32 and
# towards the last, and larger numbers in upper layers for code. The figure has the same count for each kind of prompt.
# It is compared with the budgets of DynamicKV itself (sets for each KV head, pooled scores, updates every four layers),
# with PyramidKV's budgets, and with even budgets.

# %%
BEST, WINDOW = 128, 8
BUDGET = str(BEST + WINDOW)  # the window comes on top of what is counted
COUNT = "dynamickv:heads=layer,pool=none,progressive=false,r_max=1000000000"
SHARES = {"best scores": COUNT, "DynamicKV": "dynamickv:heads=kv,pool=max", "PyramidKV": "pyramid-kv", "even": "snapkv"}
UNPOOLED = "dynamickv:heads=kv,pool=none"
divided = page.replay("layers", every, [*SHARES.values(), UNPOOLED], [BUDGET], "--metrics", "layer_budget:unprotected",
                      "--detail", "layer")  # fmt: skip
budgets = values(divided, "layer_budget:unprotected", "each")
budgets = budgets[budgets["role"] == "asked"]
names = {label: name for name, policy in SHARES.items() for label in Choice(divided, policies=[policy]).labels(False)}
names |= {Choice(divided, policies=[UNPOOLED]).labels(False)[0]: "DynamicKV, not pooled"}
budgets = budgets.assign(series=budgets["label"].map(names), layer=budgets["layer"].astype(int), panel=budgets["kind"])
drawn = budgets[budgets["series"].isin(SHARES)]
drawn = drawn.sort_values("series", key=lambda one: one.map(list(SHARES).index), kind="stable")
page.keep(curves(
    drawn, "layer", dict.fromkeys(kinds, "tokens"), "Tokens by layer and kind of prompt",
    f"budget {BUDGET} tokens per layer and head on average, the last {WINDOW} left out", Choice(divided).caption(),
    "layer", grey=["PyramidKV", "even"],
), "layers")  # fmt: skip


# %%
def shares(series: str) -> pd.DataFrame:
    """Shares of the budget: a row a trace, a column a layer."""
    mine = budgets[budgets["series"] == series]
    tokens = mine.pivot_table(index=["kind", "trace"], columns="layer", values="value")
    return tokens.div(tokens.sum(axis=1), axis=0)


share = shares("best scores")
by_kind = share.groupby("kind").mean().loc[kinds]
last = share.columns.max()
middle, end = (slice(round(low * last), round(high * last)) for low, high in ((0.41, 0.57), (0.83, 1.0)))
half, depth = (last + 1) // 2, pd.Series(range(last + 1))


def described(line: pd.Series) -> dict[str, object]:
    """What the paper says of Fig. 2, in numbers."""
    return {
        "layer 0": line[0], "layer 1": line[1], "upper half": line[half:].sum(),
        "trend": line.corr(depth, method="spearman"), "upper trend": line[half:].corr(depth, method="spearman"),
    }  # fmt: skip


facts = pd.DataFrame({kind: described(line) for kind, line in by_kind.iterrows()}).T.rename_axis("kind").reset_index()
shown = facts.assign(**{
    **{one: facts[one].map("{:.3f}".format) for one in ("layer 0", "layer 1", "upper half")},
    **{one: facts[one].map("{:+.2f}".format) for one in ("trend", "upper trend")},
}).rename(columns={"layer 0": "share of layer 0", "layer 1": "of layer 1", "upper half": "of the upper half",
                   "trend": "rank correlation with depth", "upper trend": "in the upper half"})  # fmt: skip
page.table("layers-described", facts, shown)
facts = facts.set_index("kind")

# %%
fell = facts["layer 1"] < facts["layer 0"] * 2 / 3
page.find(
    "Fig. 2, section 3", "the share falls sharply after the first layer, in every task",
    "shares of layers 0 and 1: "
    + ", ".join(f"{kind} {line['layer 0']:.3f}, {line['layer 1']:.3f}" for kind, line in facts.iterrows()),
    [bool(one) for one in fell], "the fall is less than a third in " + ", ".join(fell.index[~fell]),
)  # fmt: skip
peaks = {(kind, name): peak_p(share.loc[kind], where) for kind in kinds
         for name, where in {"middle": middle, "end": end}.items()}  # fmt: skip
p_peaks = holm(np.array([p for _, p in peaks.values()]))
page.find(
    "Fig. 2", "peaks around layer 15 (of 32) and towards the last layers",
    "; ".join(
        f"layers {where.start} to {where.stop}: " + ", ".join(
            f"{kind} layer {layer} (p {p:.2g}, n = {len(share.loc[kind])})"
            for ((kind, one), (layer, _)), p in zip(peaks.items(), p_peaks, strict=True) if one == name)
        for name, where in {"middle": middle, "end": end}.items()
    ),
    [True if p < SIGNIFICANT else None for p in p_peaks], "permutation test, Holm's correction",
)  # fmt: skip
rising = facts["upper trend"].astype(float)
page.find(
    "Section 3", "upper layers need increasingly many tokens",
    "rank correlation with depth in the upper half: " + ", ".join(f"{kind} {one:+.2f}" for kind, one in rising.items()),
    [bool(one > 0.3) for one in rising],
)  # fmt: skip
upper = facts["upper half"].astype(float)
if {"code", "summary"} <= set(kinds):
    page.find(
        "Section 1, section 3", "code needs the most tokens in upper layers, summaries few",
        "share of the upper half: "
        + ", ".join(f"{kind} {one:.3f}" for kind, one in upper.sort_values(ascending=False).items()),
        [upper.idxmax() == "code", upper["summary"] < upper.median()], "the order of kinds differs",
    )  # fmt: skip
falls = facts["trend"].astype(float) < -0.5
page.find(
    "Section 6", "budgets form a pyramid in synthetic tasks and summaries, a wave in code",
    "rank correlation with depth: " + ", ".join(f"{k} {f['trend']:+.2f}" for k, f in facts.iterrows()),
    [bool(falls[kind] == (kind != "code")) for kind in ("needle", "summary", "code") if kind in kinds],
    "no kind of prompt has budgets that fall with depth" if not falls.any() else "",
)  # fmt: skip

first = {name: shares(name)[0].mean() for name in ("best scores", "DynamicKV", "DynamicKV, not pooled")}
page.find(
    "Eqs. 1 and 5 to 8", "DynamicKV allocates the budget as the best scores are distributed",
    "share of layer 0: " + ", ".join(f"{name} {one:.3f}" for name, one in first.items()),
    [bool(abs(first[one] / first["best scores"] - 1) < 0.25) for one in ("DynamicKV", "DynamicKV, not pooled")],
    "with pooled scores the share of layer 0 differs",
)  # fmt: skip

# %% [markdown]
# Do kinds of task differ more than prompts of one kind? The distance of two allocations is the share of the budget that
# would have to move to make them equal (total variation).

# %%
pairs = [
    {"same kind": a[0] == b[0], "value": (share.loc[a] - share.loc[b]).abs().sum() / 2}
    for a, b in combinations(share.index, 2)
]
even = (share - 1 / (last + 1)).abs().sum(axis=1) / 2
pyramid = (share - shares("PyramidKV")).abs().sum(axis=1) / 2
distance = pd.DataFrame(pairs).groupby("same kind")["value"].mean()
rows = {"prompts of the same kind": distance.get(True), "prompts of different kinds": distance.get(False),
        "a prompt and even budgets": even.mean(), "a prompt and PyramidKV": pyramid.mean()}  # fmt: skip
distances = pd.DataFrame({"between": rows.keys(), "share of the budget": rows.values()}).dropna()
page.table("distances", distances, distances.round(3))
if len(distance) == 2:
    page.find(
        "Sections 1 and 3", "tasks have distinct patterns, and no fixed pattern fits them",
        f"two prompts of one kind differ in {100 * distance[True]:.0f} % of the budget, of different kinds in "
        f"{100 * distance[False]:.0f} %; from even budgets they differ in {100 * even.mean():.0f} %, from PyramidKV's "
        f"in {100 * pyramid.mean():.0f} %",
        [bool(distance[False] > distance[True]), bool(min(even.mean(), pyramid.mean()) > distance[False])],
        "prompts of different kinds are as alike as those of one kind",
    )  # fmt: skip

# %% [markdown]
# ## At equal memory
#
# Table 1 compares five policies at 128 and 512 tokens on LongBench, Table 2 DynamicKV from 64 to 1024. The figure has
# attention recall and output error, for all prompts, with one set for each KV head.

# %%
METHODS = {"streaming-llm": "StreamingLLM", "h2o": "H2O", "snapkv": "SnapKV", "pyramid-kv": "PyramidKV",
           "dynamickv": "DynamicKV"}  # fmt: skip
ASKED = ["streaming-llm", "h2o:recent=8", "snapkv", "pyramid-kv", "dynamickv"]
SIZES = [size for size in (64, 128, 256, 512) if size < shortest]
PAPER_AVERAGE = pd.DataFrame(
    {"StreamingLLM": [32.03, 34.70], "H2O": [35.39, 37.20], "SnapKV": [35.76, 40.30], "PyramidKV": [37.45, 40.18],
     "DynamicKV": [37.75, 40.73]}, index=[128, 512],
)  # fmt: skip
equal = page.replay("equal", every, ASKED, [str(size) for size in SIZES], "--controls", "twins",
                    "--metrics", "attention_recall,output_error,kv_bytes", "--detail", "summary")  # fmt: skip
PANELS = {"LongBench, LLaMA-3-8B (paper)": "score", "attention": "attention recall", "attention output": "output error"}
points = [of_paper(PAPER_AVERAGE, next(iter(PANELS)), "size")]
for panel, metric in {"attention": "attention_recall", "attention output": "output_error"}.items():
    rows = values(equal, metric)
    rows = rows[rows["label"].isin(METHODS)]
    points.append(rows.assign(panel=panel, series=rows["label"].map(METHODS), size=rows["budget"].astype(int)))
    rows = twins(equal, metric, "dynamickv")
    points.append(rows.assign(panel=panel, series="its twin", size=rows["budget"].astype(int)))
points = pd.concat(points)
page.keep(curves(
    points, "size", PANELS, "At equal memory", "every policy keeps the same number of tokens over all layers and heads",
    Choice(equal).caption("Its twin: DynamicKV's random twin"), "tokens kept per layer and head", "log",
    grey=["its twin"],
), "equal-memory")  # fmt: skip

# %%
bytes_kept = values(equal, "kv_bytes")
bytes_kept = bytes_kept[bytes_kept["label"].isin(METHODS)]
uneven = bytes_kept.groupby(["trace", "budget"])["value"].agg(lambda one: np.ptp(one) / one.max()).max()
error = points[points["panel"] == "attention output"].groupby(["size", "series"])["value"].mean().unstack("series")
recall = points[points["panel"] == "attention"].groupby(["size", "series"])["value"].mean().unstack("series")
order = list(METHODS.values())
at = 128

page.not_tested(
    "Table 1", "DynamicKV best on average at 128 and at 512",
    f"output error at {at}: " + ", ".join(f"{name} {error.loc[at, name]:.3f}" for name in order)
    + "; attention recall: " + ", ".join(f"{name} {recall.loc[at, name]:.3f}" for name in order)
    + f"; memory differs by {100 * uneven:.1f} % at most",
)  # fmt: skip
given = answers().pivot(index=["trace", "budget"], columns="label", values="value")
gain = (given["dynamickv"] - given["snapkv:heads=kv"]).rename("value").reset_index().rename(columns={"budget": "label"})
least, *_, most = STUDIES["papers"].budgets
page.find(
    "Sections 5.2 and 6", "dynamic budgets gain more in smaller caches",
    "closed loop, needles; DynamicKV's share of answers minus SnapKV's: "
    + ", ".join(f"{value:+.2f} (at {budget})" for budget, value in means(gain)["mean"].items()),
    [more(gain, least, most)],
)  # fmt: skip

# %% [markdown]
# The table has the output error by kind of prompt at 128 tokens, with the scores of LongBench's categories for
# LLaMA-3-8B: questions on one and several documents, synthetic tasks for our needles, few-shot learning for our
# arithmetic. Our conversations have no counterpart.

# %%
PAPER_128 = pd.DataFrame(  # means over the data sets of Table 1
    {"question": [22.35, 25.16, 25.65, 26.18, 26.70], "summary": [19.50, 21.18, 20.16, 20.95, 21.12],
     "arithmetic": [49.00, 54.94, 57.13, 65.06, 64.60], "needle": [37.65, 37.50, 37.18, 37.71, 37.32],
     "code": [48.85, 55.93, 56.02, 54.37, 56.01]}, index=order,
)  # fmt: skip
rows = points[(points["panel"] == "attention output") & (points["size"] == at)]
found = mean_over_traces(rows, ["series", "kind"])
cells = found.set_index(["series", "kind"])
lines = []
for method in order:
    line = {"output error (paper: score)": method}
    for kind in kinds:
        paper = f" ({PAPER_128.loc[method, kind]:.2f})" if kind in PAPER_128 else ""
        line[kind] = cell(cells.loc[(method, kind)]) + paper
    lines.append(line)
page.table("kinds", found, pd.DataFrame(lines))
grid = cells["mean"].unstack("kind")[kinds]
if "code" in kinds:
    improvement = 1 - grid.loc["DynamicKV"] / grid.loc["PyramidKV"]
    page.not_tested(
        "Section 5.2", "against PyramidKV, DynamicKV gains most on code",
        "output error below PyramidKV's by "
        + ", ".join(f"{100 * one:+.1f} % ({kind})" for kind, one in improvement.items()),
    )  # fmt: skip

# %% [markdown]
# ## Window and pooling
#
# All three policies score by an observation window and pool the scores. The figures above use the window of 8 queries
# and the maximum over 7 neighbours that the code behind the paper's tables uses; SnapKV's own configurations have a
# window of 32. The figure has both windows, with and without pooling.

# %%
window_settings(page, every, {
    "SnapKV": "snapkv:window={window},pool={pool}", "PyramidKV": "pyramid-kv:window={window},pool={pool}",
    "DynamicKV": "dynamickv:window={window},pool={pool}",
}, str(at))  # fmt: skip

# %% [markdown]
# ## The allocation alone
#
# An oracle that sees the later queries gives the best static set with a policy's token counts in each layer and head.
# With the three allocations of the same budget it shows the effect of an allocation apart from the scores.

# %%
BOUNDS = {"even": "snapkv", "PyramidKV": "pyramid-kv", "DynamicKV": "dynamickv"}
FREE = {"free among heads": "oracle:scope=layer", "free among layers and heads": "oracle:scope=global"}
compared = [*BOUNDS.values(), *(f"oracle:counts={policy}" for policy in BOUNDS.values()), *FREE.values()]
worth = page.replay("division", every, compared, [str(at)], "--metrics", "attention_recall,output_error",
                    "--detail", "summary")  # fmt: skip
lines, found = [], []
for metric in ("attention_recall", "output_error"):
    found.append(means(values(worth, metric)).reset_index().assign(metric=metric))
division = pd.concat(found, ignore_index=True)
cells = division.set_index(["metric", "label"])
label = {policy: Choice(worth, policies=[policy]).labels(True)[0] for policy in compared}

for name, policy in BOUNDS.items():
    line = {"allocation": name}
    for metric, words in (("attention_recall", "recall"), ("output_error", "output error")):
        line[words] = cell(cells.loc[(metric, label[policy])])
        line[f"{words} of the oracle"] = cell(cells.loc[(metric, label[f"oracle:counts={policy}"])])
    lines.append(line)
for name, policy in FREE.items():
    line = {"allocation": name}
    for metric, words in (("attention_recall", "recall"), ("output_error", "output error")):
        line[f"{words} of the oracle"] = cell(cells.loc[(metric, label[policy])])
    lines.append(line)
page.table("division", division, pd.DataFrame(lines).fillna(""))
best = {
    name: cells.loc[("attention_recall", label[f"oracle:counts={policy}"]), "mean"] for name, policy in BOUNDS.items()
}
bounds = {label[f"oracle:counts={policy}"]: name for name, policy in BOUNDS.items()}
named_divisions = values(worth, "attention_recall")
named_divisions = named_divisions[named_divisions["label"].isin(bounds)].assign(
    label=lambda one: one["label"].map(bounds)
)
page.find(
    "Section 4", "budgets by counts of the best scores use memory better than even or falling budgets",
    "recall of the best sets with each allocation's token counts: "
    + ", ".join(f"{name} {one:.3f}" for name, one in best.items()),
    [more(named_divisions, "DynamicKV", name) for name in ("even", "PyramidKV")],
)  # fmt: skip

# %% [markdown]
# ## Needles
#
# Fig. 4 retrieves needles at 64 tokens kept with Mistral-7B: DynamicKV keeps 90 % of the full cache's score, 57, 37, 41
# and 11 points more than StreamingLLM, H2O, SnapKV and PyramidKV. Retrieval needs generation. The table here gives the
# share of the needle's tokens that is kept, as the mean over layers and heads.

# %%
PAPER_NEEDLE = {"StreamingLLM": 33, "H2O": 53, "SnapKV": 49, "PyramidKV": 79, "DynamicKV": 90}
needles = page.replay("needle", traces("needle"), ASKED, ["64", "128"], "--metrics", "span_recall",
                      "--detail", "summary")  # fmt: skip
page.draw("needle", needles, "needle", budgets="64")
kept = needle_kept(needles)
kept = kept[kept["label"].isin(METHODS)].assign(series=kept["label"].map(METHODS))
found = mean_over_traces(kept, ["series", "budget"])
cells = found.set_index(["series", "budget"])
page.table("needles", found, pd.DataFrame([
    {"policy": method, "paper: score at 64": f"{PAPER_NEEDLE[method]} %",
     "needle kept at 64": cell(cells.loc[(method, "64")]), "needle kept at 128": cell(cells.loc[(method, "128")])}
    for method in order
]))  # fmt: skip
ranked = sorted(PAPER_NEEDLE, key=PAPER_NEEDLE.get, reverse=True)
labels = {shown: label for label, shown in METHODS.items()} | {"SnapKV": "snapkv:heads=kv"}
page.answered(
    "Fig. 4, section 5.3", "DynamicKV ahead of PyramidKV, H2O, SnapKV and StreamingLLM", labels,
    [("DynamicKV", name) for name in ranked[1:]],
)  # fmt: skip

# %% [markdown]
# ## Skill: the contribution of the scores
#
# A [random twin](../docs/conventions.md#random-twins-and-skill) keeps a policy's protected tokens and places runs of
# kept tokens of the same lengths at random. *Skill* is the position of the policy between its twin (0) and the best set
# with its token counts (1), measured by attention recall.

# %%
page.skill(equal)

# %% [markdown]
# ## Findings

# %%
page.findings()
