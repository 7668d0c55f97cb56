# %% [markdown]
# # Overview: the papers' policies compared
#
# All policies run with their defaults at the same budgets, between two bounds. *Random* keeps random tokens; *oracle*
# keeps the tokens to which the later queries attend most, the same number in each layer and KV head. Prompts have at
# most 2,100 tokens here, so that all policies take minutes. Numbers are open loop, with queries as captured under the
# full cache, except for findings that begin with "closed loop". For these, the model answers needle prompts again under
# each policy; the prompts are those that it answers with its full cache (`tools/study papers`).

# %%
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from frame import (
    COLOURS,
    KINDS,
    MARKERS,
    QUIET,
    Choice,
    Drawing,
    Page,
    Sheet,
    cell,
    corpus,
    curves,
    less,
    mean_over_traces,
    more,
    values,
    width_of,
    window_settings,
)

page = Page("overview")
prompts = corpus()
prompts = prompts[prompts["prompt_tokens"] <= 2100]
every = list(prompts["path"])
kinds = [kind for kind in KINDS if kind in set(prompts["kind"])]
CONTROLS = ["random", "oracle", "full"]
# The systems of the papers and the baselines that they compare with; docs/policies.md has the rest of the field.
policies = ["chunkkv", "dynamickv", "finch", "h2o", "h2o-online", "hybrid", "kivi", "local", "pyramid-infer",
            "pyramid-kv", "sca", "snapkv", "streaming-llm", "strided", "truncate"]  # fmt: skip
prompts.groupby("kind")["prompt_tokens"].agg(traces="count", least="min", most="max").loc[kinds]

# %% [markdown]
# ## At one budget
#
# *Of the way* is the position of a policy between random (0) and oracle (1), measured by attention recall. *Skill* is
# the same position between bounds that depend on the policy. The lower bound is its random twin, which keeps the same
# protected tokens and places runs of the same lengths at random. The upper bound is the best set with the policy's
# token counts. Skill therefore measures the contribution of a policy's scores. `kivi` keeps every token in fewer bits
# and ignores the budget. `chunkkv`, `finch`, `pyramid-infer` and `sca` have one set for a whole layer, while the oracle
# has one for each KV head. `h2o-online` and `finch`, which have dynamic sets, and `kivi` have no twin.

# %%
BUDGETS = ["0.125", "0.2", "0.3", "0.5"]
ONE = BUDGETS[0]  # the longest question is an eighth of its prompt, and finch and truncate keep it whole
METRICS = "attention_recall,output_error,span_recall,kv_bytes"
one = page.replay("one", every, policies, [ONE], "--controls", "twins", "--metrics", METRICS, "--detail", "summary")
recall, error, size, skill = (
    values(one, metric) for metric in ("attention_recall", "output_error", "kv_bytes", "skill")
)
bound = {name: recall[recall["label"] == name].set_index("trace")["value"] for name in CONTROLS}
way = recall.assign(value=(recall["value"] - recall["trace"].map(bound["random"]))
                    / (recall["trace"].map(bound["oracle"]) - recall["trace"].map(bound["random"])))  # fmt: skip
whole = size[size["label"] == "full"].set_index("trace")["value"]
size = size.assign(value=size["value"] / size["trace"].map(whole))
spans = {}
for kind in ("needle", "answer"):
    some = one.results[(one.results["metric"] == "span_recall") & one.results["label"].isin(recall["label"])]
    some = some[some["variant"].str.fullmatch(rf"{kind}.*\.mean") & (some["layer"] == "all")]
    spans[kind] = some[["trace", "label", "value"]]
columns = {"attention recall": recall, "output error": error, "of the way": way, "skill": skill, "bytes": size,
           "needle kept": spans["needle"], "answer kept": spans["answer"]}  # fmt: skip
found = pd.concat([mean_over_traces(rows, ["label"]).assign(quantity=name) for name, rows in columns.items()])
cells = found.set_index(["quantity", "label"])
heads = recall.groupby("label")["heads"].first()
ranked = cells.loc["output error", "mean"].sort_values().index
page.table("policies", found, pd.DataFrame([
    {"policy": label, "sets": heads[label]}
    | {name: cell(cells.loc[(name, label)], 2 if name in ("of the way", "skill", "bytes") else 3)
       if (name, label) in cells.index else "" for name in columns}
    for label in ranked
]))  # fmt: skip

# %% [markdown]
# ## Over budgets
#
# The figure has three families: policies that score by the attention of the last queries, policies that select by
# position, and all others. Recall has one scale and error another, and the bounds are grey. `h2o-online` evicts after
# every token and was run at one budget only.

# %%
FAMILIES = {
    "last queries": ["snapkv", "pyramid-kv", "dynamickv", "chunkkv", "hybrid", "pyramid-infer"],
    "position": ["streaming-llm", "local", "strided", "truncate"],
}
FAMILIES["others"] = [name for name in policies if not any(name in family for family in FAMILIES.values())]
larger = page.replay("budgets", every, [name for name in policies if name != "h2o-online"],
                   [budget for budget in BUDGETS if budget != ONE],
                   "--metrics", "attention_recall,output_error", "--detail", "summary")  # fmt: skip
points, panels = [], {}
for metric, words in {"attention_recall": "attention recall", "output_error": "output error"}.items():
    rows = pd.concat([values(run, metric) for run in (one, larger)])
    rows = rows[rows["label"] != "full"]
    rows = rows.assign(series=rows["label"], share=rows["budget"].astype(float))
    for family, members in FAMILIES.items():
        panel = f"{family}: {'recall' if 'recall' in metric else 'error'}"
        panels[panel] = words
        points.append(rows[rows["label"].isin([*members, "oracle", "random"])].assign(panel=panel))
points = pd.concat(points)
drawn = [f"{family}: {words}" for family in FAMILIES for words in ("recall", "error")]
page.keep(curves(
    points, "share", {name: panels[name] for name in drawn}, "What a budget buys",
    "controls in grey; no budget binds kivi, which holds every token in 2 bits", Choice(one).caption(),
    "share of the prompt kept", "log", grey=["oracle", "random"],
), "budgets")  # fmt: skip

# %% [markdown]
# ## Window and pooling
#
# The policies that score by an observation window have a window of 8 queries by default, as in KVCache-Factory. The
# figure also has a window of 32, with and without pooling; ChunkKV does not pool.

# %%
window_settings(page, every, {
    "snapkv": "snapkv:window={window},pool={pool}", "pyramid-kv": "pyramid-kv:window={window},pool={pool}",
    "dynamickv": "dynamickv:window={window},pool={pool}",
    "hybrid": "hybrid:chunkkv.window={window},snapkv.window={window},snapkv.pool={pool}",
    "chunkkv": "chunkkv:window={window}",
}, ONE)  # fmt: skip

# %% [markdown]
# ## By kind of prompt


# %%
def by_kind(rows: pd.DataFrame, words: str, best: str) -> Drawing:
    """A matrix of policies (the best on top) and kinds, with the means in it."""
    grid = rows.groupby(["label", "kind"])["value"].mean().unstack("kind")[kinds]
    grid = grid.drop(index="full").assign(all=rows.groupby("label")["value"].mean())
    grid = grid.sort_values("all", ascending=best == "least")
    top = 1.0 if best == "most" else min(1.0, float(np.ceil(10 * grid.to_numpy().max()) / 10))
    left = max(width_of(label) for label in grid.index) + 0.2
    sheet = Sheet(
        1, (0.62 * len(grid.columns), 0.19 * len(grid)), left=left, right=0.8, above=0.1, below=0.3,
        title=f"{words} by kind of prompt", subtitle=f"budget {ONE}; {best} is best; mean over prompts of a kind",
        caption=Choice(one).caption("" if top == 1.0 and best == "most" else f"Colours end at {top:g}"),
    )  # fmt: skip
    axis = sheet.axes[0]
    image = axis.imshow(grid, cmap="cividis" if best == "most" else "cividis_r", vmin=0, vmax=top, aspect="auto")
    axis.set_xticks(range(len(grid.columns)), grid.columns)
    axis.set_yticks(range(len(grid)), grid.index)
    axis.tick_params(length=0)
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        dark = (value / top < 0.5) == (best == "most")
        axis.text(column, row, f"{value:.2f}", ha="center", va="center_baseline", color="white" if dark else "black")
    sheet.colour_bar(image, words.lower())
    return Drawing(sheet.figure, grid.rename_axis("policy").reset_index())


page.keep(by_kind(recall, "Attention recall", "most"), "kinds-recall")
page.keep(by_kind(error, "Output error", "least"), "kinds-error")

# %% [markdown]
# ## Time
#
# The figure has the time of scoring and selecting on one thread, summed over layers, as the fastest of three runs, for
# prompts of different length with a needle in the middle. The attention of the prompt, which policies share, is not
# included; a vertical line gives it for each length. `h2o-online` decides at every token, `finch` block by block.

# %%
middle = corpus()
middle = middle[middle["kind"] == "needle"]
middle = middle[(middle["needle_depth"] - 0.5).abs() <= (middle["needle_depth"] - 0.5).abs().min() + 0.05]
timed = [
    page.replay(f"time-{i}", list(middle["path"]), policies, [ONE], "--metrics", "select_seconds", "--threads", "1",
                "--observables", "ignore") for i in range(3)
]  # fmt: skip
seconds = pd.concat([pd.read_csv(run.folder / "seconds.csv", keep_default_na=False) for run in timed])
seconds = seconds[(seconds["variant"] == "") & (seconds["layer"] != "all")]
seconds = seconds.assign(label=seconds["policy"].where(seconds["policy"] != "", "attention of the prompt"),
                         tokens=seconds["trace"].map(middle.set_index("name")["prompt_tokens"]))  # fmt: skip
seconds = seconds.groupby(["label", "tokens", "layer"])["value"].min()  # the quickest of the three
seconds = seconds.groupby(level=["label", "tokens"]).sum().unstack("tokens")
seconds = seconds.drop(index=[name for name in (*CONTROLS, "kivi") if name in seconds.index])  # kivi selects nothing
shared = seconds.loc["attention of the prompt"]
alone = seconds.drop(index="attention of the prompt").sort_values(seconds.columns[-1])


def times() -> Drawing:
    """Seconds of scoring and selecting: a row a policy, a mark a prompt length."""
    left = max(width_of(label) for label in alone.index) + 0.2
    sheet = Sheet(
        1, (4.2, 0.17 * len(alone)), left=left, right=1.4, above=0.1, below=0.42,
        title="Seconds of scoring and selecting", subtitle=f"budget {ONE}; one thread; all layers",
        caption=Choice(timed[0]).caption("Vertical lines: attention of the prompt and of later queries, shared"),
    )  # fmt: skip
    axis = sheet.axes[0]
    for place, tokens in enumerate(alone.columns):
        axis.plot(alone[tokens], range(len(alone)), MARKERS[place], color=COLOURS[place],
                  label=f"{tokens:,} tokens")  # fmt: skip
        axis.axvline(shared[tokens], color=COLOURS[place], linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_yticks(range(len(alone)), alone.index)
    axis.set_ylim(-0.6, len(alone) - 0.4)
    axis.set_xlabel("seconds")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#e3e3e3", linewidth=0.6)
    axis.tick_params(axis="y", length=0, colors=QUIET, labelcolor="black")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handletextpad=0.1)
    data = seconds.stack().rename("seconds").rename_axis(["policy", "prompt_tokens"]).reset_index()
    return Drawing(sheet.figure, data)


page.keep(times(), "time")
page.table("seconds", alone.reset_index(), pd.DataFrame([
    {"policy": label} | {f"{tokens:,} tokens": f"{1000 * one:.3g} ms" for tokens, one in line.items()}
    for label, line in pd.concat([alone, shared.to_frame().T]).iterrows()
]))  # fmt: skip

# %% [markdown]
# ## Findings

# %%
mean = cells["mean"].unstack("quantity")
OWN = {
    "chunkkv": ("ChunkKV", ["pyramid-kv", "snapkv", "h2o", "streaming-llm"]),
    "dynamickv": ("DynamicKV", ["pyramid-kv", "snapkv", "h2o", "streaming-llm"]),
    "sca": ("SCA", ["h2o", "streaming-llm", "strided"]),
    "finch": ("FINCH", ["truncate"]),
}
LIVE = {"chunkkv": "chunkkv:chunk=10,reuse=1,sinks=0", "snapkv": "snapkv:heads=kv",
        "sca": "sca:use=kv,objective=min,sinks=0,layer=-1,share=all"}  # fmt: skip


def compared(where: str, says: str, better: Sequence[tuple[str, str]]) -> None:
    """A finding on the answers under these policies."""
    page.answered(where, says, {name: LIVE.get(name, name) for pair in better for name in pair}, better)


for policy, (paper, baselines) in OWN.items():
    compared(paper, f"{policy} is ahead of " + ", ".join(baselines), [(policy, name) for name in baselines])
order = ["streaming-llm", "h2o", "snapkv", "pyramid-kv"]
compared(
    "DynamicKV Table 1, three of four models at 128 tokens",
    " < ".join(order),
    [(other, one) for one, other in pairwise(order)],
)
compared("StreamingLLM; SCA section 3.2", "without the first tokens a model collapses", [("streaming-llm", "local")])
least = error[error["role"] == "asked"].groupby(["kind", "label"])["value"].mean().drop(index="kivi", level="label")
best = least.groupby("kind").idxmin().map(lambda pair: pair[1])
page.not_tested(
    "DynamicKV section 3", "the best policy depends on the task",
    "least output error: " + ", ".join(f"{best[kind]} ({kind})" for kind in kinds),
)  # fmt: skip
most = mean["attention recall"].drop(index=["kivi", *CONTROLS])  # kivi holds every token
page.find(
    "(bounds)", "every policy recalls less than the oracle and more than random",
    f"oracle {bound['oracle'].mean():.3f}, best policy {most.max():.3f} ({most.idxmax()}), random "
    f"{bound['random'].mean():.3f}",
    [*(less(recall, name, "oracle") for name in most.index), *(more(recall, name, "random") for name in most.index)],
)  # fmt: skip
page.skill(one)
page.findings()
