# %% [markdown]
# # SCA: keeping the least redundant tokens
#
# Anonymous 2024, *SCA: Selective Compression Attention for Efficiently Extending the Context Window of Large Language
# Models*, submission to the ACL.
#
# SCA uses keys and values only. Many tokens have a near duplicate, so a greedy algorithm keeps the tokens that are
# least similar to those already kept. The paper measures this redundancy on Llama2-7B and compares with H2O,
# StreamingLLM and a fixed stride. Here the model is SmolLM2-135M-Instruct, with 30 layers and 3 KV heads. Numbers are
# open loop, with queries as captured under the full cache, except for findings that begin with "closed loop". For
# these, the model answers needle prompts again under each policy; the prompts are those that it answers with its full
# cache (`tools/study papers`).

# %%
import re
from itertools import pairwise

import numpy as np
import pandas as pd
from frame import (
    COLOURS,
    KINDS,
    QUIET,
    TWIN,
    Choice,
    Drawing,
    LineEnd,
    Page,
    Sheet,
    cell,
    corpus,
    curves,
    distances,
    energy_coefficient,
    label_ends,
    label_room,
    less,
    mean_over_traces,
    more,
    needle_kept,
    of_paper,
    quiet_frame,
    traces,
    twins,
    values,
)

from kvreplay import Run, Trace

page = Page("sca")
prompts = corpus()
every = traces()
kinds = [kind for kind in KINDS if kind in set(prompts["kind"])]
BOTH = {"redundancy_key": "keys", "redundancy_value": "values"}
prompts.groupby("kind")["prompt_tokens"].agg(traces="count", least="min", most="max").loc[kinds]

# %% [markdown]
# ## Redundancy and length
#
# A token's redundancy is the largest cosine similarity between its vector and another token's (eq. 1). Vectors of all
# KV heads are concatenated, keys after RoPE. Table 1 averages it over layers and the first n tokens: keys 0.88 to 0.89
# at every length, values rising from 0.64 or 0.67 at 200 tokens to 0.69 or 0.72 at 3,200. The figure has the same
# average for those of our prompts that are long enough for the longest n.

# %%
PAPER_LENGTH = pd.DataFrame(
    {"7B, keys": [0.89, 0.89, 0.89, 0.89, 0.88], "7B, values": [0.67, 0.69, 0.70, 0.71, 0.72],
     "7B-Chat, keys": [0.88] * 5, "7B-Chat, values": [0.64, 0.66, 0.67, 0.67, 0.69]},
    index=[200, 400, 800, 1600, 3200],
)  # fmt: skip
LENGTHS = [n for n in (100, *PAPER_LENGTH.index) if n <= prompts["prompt_tokens"].max()]
long = [path for path, tokens in zip(prompts["path"], prompts["prompt_tokens"], strict=True) if tokens >= LENGTHS[-1]]
cut = {
    n: page.replay(f"length-{n}", long, ["local"], ["1.0"], "--boundary", str(n), "--metrics", ",".join(BOTH))
    for n in LENGTHS
}
rows = pd.concat([
    values(run, metric).drop_duplicates("trace").assign(n=n, tensor=tensor)
    for n, run in cut.items() for metric, tensor in BOTH.items()
])  # fmt: skip
PANELS = {"Llama2 (paper)": "redundancy (cosine)", "here": "redundancy (cosine)"}
points = pd.concat([
    of_paper(PAPER_LENGTH, "Llama2 (paper)", "n"),
    rows.assign(series=rows["tensor"].str.removesuffix("s"), panel="here"),
])  # fmt: skip
page.keep(curves(
    points, "n", PANELS, "Redundancy by length",
    f"the first n tokens of the {len(long)} prompts of {LENGTHS[-1]:,} tokens or more",
    Choice(cut[LENGTHS[-1]]).caption(), "tokens, n", "log",
), "redundancy-length")  # fmt: skip

# %%
found = mean_over_traces(rows, ["tensor", "n"])
cells = found.set_index(["tensor", "n"])
shown = PAPER_LENGTH.add_prefix("Llama2-").map("{:.2f}".format).reindex(LENGTHS).fillna("")
for tensor in BOTH.values():
    shown[f"here, {tensor}"] = [cell(cells.loc[(tensor, n)]) for n in LENGTHS]
page.table("lengths", found, shown.rename_axis("tokens").reset_index())
mean = cells["mean"]
key, value = mean["keys"], mean["values"]
page.find(
    "Table 1", "keys: 0.88 to 0.89, the same at every length",
    f"{key.min():.3f} to {key.max():.3f}", [bool(np.ptp(key) < 0.02), bool((key - 0.885).abs().max() < 0.05)],
    "keys grow more redundant with the length",
)  # fmt: skip
page.find(
    "Table 1", "values: less than keys, and rising with length, by 0.05 from 200 to 3,200 tokens",
    ", ".join(f"{one:.3f} ({n})" for n, one in value.items()),
    [bool((value < key).all()), bool(value.is_monotonic_increasing),
     bool(0.02 < value.iloc[-1] - value.loc[200] < 0.10)],
    "the rise is steeper" if value.iloc[-1] - value.loc[200] > 0.1 else "the rise is flatter",
)  # fmt: skip

# %% [markdown]
# ## Redundancy by token and layer
#
# Fig. 2 shows the redundancy of each of the first 400 tokens in some layers as a square of 20 × 20: most are high, and
# the first token is unlike all others in the first and the last layer. Fig. 7 averages 3,200 tokens layer by layer:
# keys about equal in all layers, values very high in layer 0, falling, and steady from layer 6 of 32 on.

# %%
SIDE = 20
tokens_run = cut[400]
shown_trace = sorted(tokens_run.cells["trace"].unique())[0]
facts = tokens_run.trace(shown_trace)
last = facts.layers - 1
shown_layers = [round(share * last) for share in (0, 0.25, 0.5, 0.75, 1)]


def squares() -> Drawing:
    """Redundancy of single tokens, in rows of 20 from the upper left: a column a layer, keys above values."""
    sheet = Sheet(
        2 * len(shown_layers), (1.05, 1.05), len(shown_layers), left=0.55, right=0.75, above=0.1, gap=(0.12, 0.3),
        below=0.1, headings=[0.15, 0.15], title="Redundancy of each of the first 400 tokens",
        subtitle="rows of 20 tokens from the upper left; keys above, values below; one scale",
        caption=Choice(tokens_run, traces_asked=[shown_trace]).caption("Token vectors: all KV heads of a layer"),
    )  # fmt: skip
    low = min(facts.redundancy[kind][shown_layers].min() for kind in ("key", "value"))
    data = []
    for row, kind in enumerate(("key", "value")):
        for column, layer in enumerate(shown_layers):
            axis = sheet.axes[row * len(shown_layers) + column]
            line = facts.redundancy[kind][layer]
            image = axis.imshow(line.reshape(SIDE, SIDE), cmap="cividis", vmin=min(0.0, low), vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.annotate(f"layer {layer}", (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
            if column == 0:
                axis.set_ylabel(f"{kind}s")
            about = {"tensor": kind, "layer": layer}
            data.append(pd.DataFrame(about | {"position": range(len(line)), "redundancy": line}))
    sheet.colour_bar(image, "redundancy (cosine)")
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


page.keep(squares(), "redundancy-tokens")

# %%
lines = []
for trace in sorted(tokens_run.cells["trace"].unique()):
    for kind, found in tokens_run.trace(trace).redundancy.items():
        for layer in (0, last // 2, last):
            lines.append({"tensor": f"{kind}s", "layer": layer, "first token": found[layer, 0],
                          "median token": np.median(found[layer]), "above 0.8": (found[layer] > 0.8).mean(),
                          "rank of the first": int((found[layer] < found[layer, 0]).sum()) + 1})  # fmt: skip
tokens = pd.DataFrame(lines).groupby(["tensor", "layer"]).mean().reset_index()
page.table("tokens", tokens, tokens.round(3))
tokens = tokens.set_index(["tensor", "layer"])
alone = {(t, layer): tokens.loc[(t, layer), "rank of the first"] for t in BOTH.values() for layer in (0, last)}
page.find(
    "Fig. 2", "the first token is unlike all others in the first and in the last layer",
    "its mean rank among 400, 1 the least redundant: "
    + ", ".join(f"{rank:.0f} ({tensor}, layer {layer})" for (tensor, layer), rank in alone.items()),
    [bool(rank < 5) for rank in alone.values()],
    "in layer 0 a value depends on its token alone, and the first token, the chat template's, occurs again",
)  # fmt: skip
page.find(
    "Fig. 2, section 3.2", "most tokens have a near duplicate",
    ", ".join(f"{100 * tokens.loc[(t, layer), 'above 0.8']:.0f} % of {t} above 0.8 (layer {layer})"
              for t in BOTH.values() for layer in (0, last // 2, last)),
    [bool(tokens.loc[(t, layer), "above 0.8"] > 0.5) for t in BOTH.values() for layer in (0, last // 2, last)],
    "not " + ", ".join(f"{t} of layer {layer}" for t in BOTH.values() for layer in (0, last // 2, last)
                       if not tokens.loc[(t, layer), "above 0.8"] > 0.5),
)  # fmt: skip

# %%
longest = cut[LENGTHS[-1]]
layered = pd.concat([
    values(longest, metric, "each").drop_duplicates(["trace", "layer"]).assign(series=one, panel="by layer")
    for metric, one in {"redundancy_key": "key", "redundancy_value": "value"}.items()
])  # fmt: skip
layered["layer"] = layered["layer"].astype(int)
page.keep(curves(
    layered, "layer", {"by layer": "redundancy (cosine)"}, f"Redundancy by layer, {LENGTHS[-1]:,} tokens",
    "mean over tokens", Choice(longest).caption(), "layer",
), "redundancy-layers")  # fmt: skip
by_layer = layered.groupby(["series", "layer"])["value"].mean().unstack("series")
steady = round(6 / 32 * (last + 1))  # the paper's layer 6 of 32
key, value = by_layer["key"], by_layer["value"]
page.find(
    "Fig. 7", "keys differ little between layers",
    f"{key.min():.2f} to {key.max():.2f}, standard deviation {key.std():.3f}",
    [bool(key.std() < value.std()), bool(np.ptp(key) < 0.1)], "the range over layers exceeds 0.1",
)  # fmt: skip
page.find(
    "Fig. 7", "values: very redundant in layer 0, then falling, steady after the first fifth of the layers",
    f"{value[0]:.2f} in layer 0, {value[1:steady].mean():.2f} in layers 1 to {steady - 1}, then "
    f"{value[steady:].min():.2f} to {value[steady:].max():.2f}",
    [bool(value.idxmax() == 0), bool(value[1:steady].mean() > value[steady:].mean()),
     bool(np.ptp(value[steady:]) < 0.1)],
    "in later layers the values still vary from layer to layer",
)  # fmt: skip

# %% [markdown]
# ## Keeping half of the cache and less
#
# Table 2 keeps half of short prompts: SCA 59.0 of the full cache's 59.6, H2O 57.5, StreamingLLM 53.3, a stride of two
# 39.6; Fig. 5 goes down to 30 %. The figure has all four policies at the same shares. SCA and H2O spend a quarter of
# the share on recent tokens, as in the paper. SCA has one set for all layers, H2O one for each KV head.

# %%
METHODS = {"sca": "SCA", "h2o": "H2O", "streaming-llm": "StreamingLLM", "strided": "stride", "random": "random"}
PAPER_HALF = {"SCA": 59.0, "H2O": 57.5, "StreamingLLM": 53.3, "stride": 39.6}
SHARES = ["0.1", "0.3", "0.5", "0.6", "0.7"]
half = page.replay("shares", every, ["sca", "h2o:preset=sca", "h2o:preset=sca,heads=layer", "streaming-llm", "strided"],
                   SHARES, "--controls", "twins", "--metrics", "attention_recall,output_error",
                   "--detail", "summary")  # fmt: skip
labels = {label: label.partition(":")[0] for label in Choice(half).labels(True)}
labels = {label: METHODS[name] for label, name in labels.items() if name in METHODS}
labels |= {label: "H2O, one set a layer" for label in labels if "heads=layer" in label}
PANELS = {"attention": "attention recall", "attention output": "output error"}
points = []
for panel, metric in zip(PANELS, ("attention_recall", "output_error"), strict=True):
    some = values(half, metric)
    some = some[some["label"].isin(labels)]
    points.append(some.assign(panel=panel, series=some["label"].map(labels), share=some["budget"].astype(float)))
    some = twins(half, metric, "sca")
    points.append(some.assign(panel=panel, series="SCA's twin", share=some["budget"].astype(float)))
points = pd.concat(points)
page.keep(curves(
    points[points["series"] != "H2O, one set a layer"], "share", PANELS,
    "SCA and others at the same share of the cache", "recall: more is better; error: less is",
    Choice(half).caption(), "share of the prompt kept", grey=["random", "SCA's twin"],
), "shares")  # fmt: skip

# %%
found = mean_over_traces(points, ["panel", "series", "share"])
cells = found.set_index(["panel", "series", "share"])
order = list(dict.fromkeys(labels.values()))
page.table("methods", found, pd.DataFrame([
    {"policy": name, "paper: score at 50 %": f"{PAPER_HALF[name]:.1f}" if name in PAPER_HALF else ""}
    | {f"error at {100 * float(share):.0f} %": cell(cells.loc[("attention output", name, float(share))])
       for share in SHARES}
    | {"recall at 50 %": cell(cells.loc[("attention", name, 0.5)])}
    for name in order
]))  # fmt: skip
error = cells["mean"]["attention output"].unstack("share")
ranked = sorted(PAPER_HALF, key=PAPER_HALF.get, reverse=True)


def live(layer: str = "-1", share: str = "all", use: str = "kv", objective: str = "min", sinks: int = 0) -> str:
    """SCA's label in the study of the papers."""
    return f"sca:use={use},objective={objective},sinks={sinks},layer={layer},share={share}"


page.answered(
    "Table 2", " > ".join(ranked) + " at 50 %",
    {"SCA": live(), "H2O": "h2o", "StreamingLLM": "streaming-llm", "stride": "strided"}, list(pairwise(ranked)),
    budgets=["0.5"],
)  # fmt: skip
page.not_tested(
    "Fig. 5", "SCA at 30 % is better than StreamingLLM at 60 % on two of four tasks, and H2O is comparable",
    f"output error: SCA {error.loc['SCA', 0.3]:.3f} at 30 %, StreamingLLM {error.loc['StreamingLLM', 0.6]:.3f} at 60 % "
    f"and {error.loc['StreamingLLM', 0.3]:.3f} at 30 %",
)  # fmt: skip

# %% [markdown]
# ## Retained vectors
#
# Fig. 1 shows attention maps under several methods, and t-SNE projections of the vectors that each retains: SCA's are
# distributed more like the original ones than StreamingLLM's, "so it can keep more information". Here half of the
# prompt is kept with one set per layer. The lower plots show the first two principal components, which need no random
# start. Distances in a projection say little, so the full distributions are compared. The first number is the energy
# distance between kept vectors and all vectors (0: the same distribution); the second is the cosine similarity between
# an evicted vector and the nearest kept one. Vectors are defined as for redundancy: all KV heads concatenated, keys
# after RoPE. The random twin of SCA keeps its protected tokens and random other tokens.

# %%
ONE_SET = {"SCA": half.cells["policy"] == "sca", "StreamingLLM": half.cells["policy"] == "streaming-llm",
           "H2O": (half.cells["policy"] == "h2o") & (half.cells["heads"] == "layer"),
           "stride": half.cells["policy"] == "strided",
           "random twin": (half.cells["policy"] == TWIN) & half.cells["params"].str.startswith("of=sca,")}  # fmt: skip
paths = dict(zip(prompts["name"], every, strict=True))


def kept_by(name: str, trace: str) -> np.ndarray:
    """Whether a layer keeps a token at half of the prompt: bool [layers, P], the same for all KV heads."""
    row = half.cells[ONE_SET[name] & (half.cells["trace"] == trace) & (half.cells["budget"] == "0.5")].iloc[0]
    return half.selection_of(row["cell"], half.trace(trace).boundary).mask()[:, 0]


def joined(opened: Trace, layer: int, tensor: str) -> np.ndarray:
    """Token vectors of the prompt, all KV heads joined: float32 [P, heads · d]."""
    heads = opened[f"/layers/{layer:03}/{tensor}"].astype(np.float32)[:, : opened.prompt]
    return heads.transpose(1, 0, 2).reshape(opened.prompt, -1)


lines = []
for trace in prompts["name"]:
    masks = {name: kept_by(name, trace) for name in ONE_SET}
    with Trace(paths[trace]) as opened:
        for layer in shown_layers:
            for tensor, words in {"k": "keys", "v": "values"}.items():
                vectors = joined(opened, layer, tensor)
                apart = distances(vectors)
                unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
                for name, mask in masks.items():
                    kept = mask[layer]
                    found = {"energy distance": energy_coefficient(apart, kept),
                             "nearest kept": (unit[~kept] @ unit[kept].T).max(axis=1).mean()}  # fmt: skip
                    lines += [{"trace": trace, "layer": layer, "panel": f"{words}: {quantity}", "series": name,
                               "value": float(value)} for quantity, value in found.items()]  # fmt: skip
retained = pd.DataFrame(lines)
PANELS = {"keys: energy distance": "energy coefficient", "values: energy distance": "energy coefficient",
          "keys: nearest kept": "cosine", "values: nearest kept": "cosine"}  # fmt: skip
page.keep(curves(
    retained, "layer", PANELS, "Kept vectors beside all vectors",
    "half of the prompt kept; energy: 0 is the same distribution; cosine: of an evicted vector to the nearest kept",
    Choice(half).caption(), "layer", grey=["random twin"],
), "retained")  # fmt: skip


# %%
def attention_map(opened: Trace, layer: int) -> np.ndarray:
    """Causal attention of the prompt to itself, mean over heads: float32 [P, P]."""
    n = opened.prompt
    queries, keys = (opened[f"/layers/{layer:03}/{name}"].astype(np.float32)[:, :n] for name in ("q", "k"))
    found = np.zeros((n, n), dtype=np.float32)
    for head, query in enumerate(queries):
        logits = query @ keys[head * len(keys) // len(queries)].T * opened.attribute("/model", "softmax_scale")
        logits = np.where(np.tri(n, dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        found += weights / weights.sum(axis=1, keepdims=True)
    return found / len(queries)


def first_figure(trace: str) -> Drawing:
    """Attention to the kept tokens above, kept vectors among all below: a column a method."""
    names = ["SCA", "StreamingLLM", "H2O", "random twin"]
    panel = 1.3
    sheet = Sheet(
        2 * len(names), (panel, panel), len(names), left=0.35, right=0.1, above=0.1, gap=(0.12, 0.12), below=0.12,
        headings=[0.15, 0.15], title="The kept half of a prompt: attention and keys",
        subtitle=f"{trace}, last layer; above: attention (log), evicted columns white; below: principal components of "
                 "the keys, grey: all, blue: kept", caption=Choice(half, traces_asked=[trace]).caption(),
    )  # fmt: skip
    with Trace(paths[trace]) as opened:
        weights, vectors = attention_map(opened, last), joined(opened, last, "k")
    centred = vectors - vectors.mean(axis=0)
    plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    edges = np.linspace(0, len(plane), min(len(plane), 130), endpoint=False).astype(int)
    data = []
    for column, name in enumerate(names):
        kept = kept_by(name, trace)[last]
        pooled = np.add.reduceat(np.add.reduceat(weights * kept, edges, axis=0), edges, axis=1)
        above, below = sheet.axes[column], sheet.axes[len(names) + column]
        above.imshow(np.log10(np.where(pooled > 0, pooled, np.nan)), cmap="Blues", vmin=-3, vmax=0)
        below.plot(*plane.T, ".", color="#c8c8c8", markersize=2)
        below.plot(*plane[kept].T, ".", color=COLOURS[0], markersize=2)
        for axis in (above, below):
            axis.set_xticks([])
            axis.set_yticks([])
        above.annotate(name, (0, 1), (0, 3), "axes fraction", "offset points", weight="bold")
        data.append(pd.DataFrame({"policy": name, "position": range(len(plane)), "x": plane[:, 0], "y": plane[:, 1],
                                  "kept": kept, "attention": weights.sum(axis=0)}))  # fmt: skip
    sheet.axes[0].set_ylabel("query")
    sheet.axes[len(names)].set_ylabel("keys, PC 2")
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


page.keep(first_figure(prompts.sort_values("prompt_tokens")["name"].iloc[0]), "kept-vectors")

# %%
over_layers = retained.groupby(["panel", "series", "trace"], as_index=False)["value"].mean()
found = mean_over_traces(over_layers, ["panel", "series"])
cells = found.set_index(["panel", "series"])
page.table("retained-vectors", found, pd.DataFrame([
    {"half of the prompt kept": name} | {panel: cell(cells.loc[(panel, name)]) for panel in PANELS} for name in ONE_SET
]))  # fmt: skip
alike = {panel: rows.assign(label=rows["series"]) for panel, rows in over_layers.groupby("panel")}
measured = {panel: ", ".join(f"{name} {cells.loc[(panel, name), 'mean']:.3f}" for name in ONE_SET) for panel in PANELS}
energy, nearest = list(PANELS)[:2], list(PANELS)[2:]
page.find(
    "Fig. 1", "SCA's retained vectors are distributed more like all vectors than StreamingLLM's",
    "energy distance, share of its largest value: " + "; ".join(f"{panel[:panel.index(':')]} {measured[panel]}"
                                                              for panel in energy),
    [less(alike[panel], "SCA", "StreamingLLM", panel) for panel in energy],
)  # fmt: skip
page.find(
    "(random twins)", "SCA's retained vectors are distributed more like all vectors than those of its random twin",
    "as in the row above", [less(alike[panel], "SCA", "random twin", panel) for panel in energy],
)  # fmt: skip
page.find(
    "Fig. 1, section 3.2", "a vector that SCA evicts has a more similar kept vector than under StreamingLLM",
    "cosine to the nearest kept vector: " + "; ".join(f"{panel[:panel.index(':')]} {measured[panel]}"
                                                    for panel in nearest),
    [more(alike[panel], "SCA", other, panel) for panel in nearest for other in ("StreamingLLM", "random twin")],
)  # fmt: skip

# %% [markdown]
# ## Ablations
#
# Table 6 selects by keys or values alone, by the largest instead of the least redundancy (sinks kept), and by another
# layer's tokens; Fig. 4 shares a set between N neighbouring layers. For layers 12 and 24 of the paper's 32 the nearest
# of our 30 layers are used. All variants keep half of the prompt, as in the paper's short tasks, and a fifth.
#
# SCA protects no sinks, with one exception: "the initial tokens", here four, beside the most redundant tokens. A set
# that one layer selects for others lacks the first token if that layer does not attend to it, and this would hide the
# effect of the layer. Every variant is therefore replayed twice: without protected sinks and with four.

# %%
scaled = {n: round(n / 31 * last) for n in (12, 24)}
OTHERS = ("layer 0", *(f"layer {here} (paper: {n} of 32)" for n, here in scaled.items()))
PAPER_ABLATION = {"SCA": (59.0, 38.4), "keys only": (58.5, 37.2), "values only": (58.0, 36.9),
                  "most redundant": (46.2, 30.6), OTHERS[0]: (57.4, 37.5), OTHERS[1]: (57.7, 36.9),
                  OTHERS[2]: (58.0, 37.7)}  # fmt: skip
VARIANTS = {"SCA": "sca:layer=-1,share=all,use=kv,objective=min", "keys only": "sca:use=key",
            "values only": "sca:use=value", "most redundant": "sca:objective=max", OTHERS[0]: "sca:layer=0",
            OTHERS[1]: f"sca:layer={scaled[12]}", OTHERS[2]: f"sca:layer={scaled[24]}"}  # fmt: skip
SHARING = [n for n in (1, 2, 5, 10, 15) if (last + 1) % n == 0]
SINKS = {0: "", 4: ", four sinks"}
VARIANTS_ASKED = {(name, n): f"{policy},sinks={n}" for n in SINKS for name, policy in VARIANTS.items()}
SHARING_ASKED = {(size, n): f"sca:share={size},sinks={n}" for n in SINKS for size in SHARING}
parts = page.replay("ablations", every, [*VARIANTS_ASKED.values(), *SHARING_ASKED.values()], ["0.5", "0.2"],
                    "--metrics", "attention_recall,output_error", "--detail", "summary")  # fmt: skip
named = {Choice(parts, policies=[policy]).labels(True)[0]: one for one, policy in VARIANTS_ASKED.items()}
shared = {Choice(parts, policies=[policy]).labels(True)[0]: one for one, policy in SHARING_ASKED.items()}
shared |= {label: (last + 1, n) for label, (name, n) in named.items() if name == "SCA"}
lines = []
found = pd.concat([
    mean_over_traces(values(parts, metric), ["label", "budget"]).assign(metric=metric)
    for metric in ("attention_recall", "output_error")
])  # fmt: skip
cells = found.set_index(["metric", "label", "budget"])


def sets(run: Run, label: str, budget: str) -> dict[str, np.ndarray]:
    """By trace: whether a layer keeps a token, of policies with one set a layer, bool [layers, prompt]."""
    chosen = run.cells[(run.cells["label"] == label) & (run.cells["budget"] == budget)]
    return {
        row.trace: run.selection_of(row.cell, run.trace(row.trace).boundary).mask()[:, 0] for row in chosen.itertuples()
    }


HEAVY = "8"
oracle = page.replay("heavy", every, ["oracle:heads=layer"], [HEAVY], "--metrics", "attention_recall",
                     "--detail", "summary")  # fmt: skip
heavy = sets(oracle, Choice(oracle, policies=["oracle:heads=layer"]).labels(True)[0], HEAVY)


def heavy_kept(label: str) -> float:
    """Of each layer's 8 tokens that the later queries look at most, the share in its set at 50 %; mean over traces."""
    kept = sets(parts, label, "0.5")
    return np.mean([(kept[trace] & most).sum() / most.sum() for trace, most in heavy.items()])


label_of = {one: label for label, one in named.items()}
for name, (short, tall) in PAPER_ABLATION.items():
    line = {"selection": name, "paper: short tasks": f"{short:.1f}", "paper: long tasks": f"{tall:.1f}",
            "of 8 most attended, kept at 50 %": f"{heavy_kept(label_of[name, 0]):.2f}"}  # fmt: skip
    for metric, words in (("attention_recall", "recall"), ("output_error", "output error")):
        for budget, share in {"0.5": "50 %", "0.2": "20 %"}.items():
            for n, suffix in SINKS.items():
                line[f"{words} at {share}{suffix}"] = cell(cells.loc[(metric, label_of[name, n], budget)])
    lines.append(line)
mine = found[found["label"].isin(named)]
mine = mine.assign(selection=[named[one][0] for one in mine["label"]], sinks=[named[one][1] for one in mine["label"]])
page.table("ablations", mine, pd.DataFrame(lines))
for n, suffix in SINKS.items():
    own = {"SCA": live(sinks=n)}
    page.answered(
        "Table 6", f"keys and values together are better than either alone{suffix}",
        own | {"keys only": live(use="key", sinks=n), "values only": live(use="value", sinks=n)},
        [("SCA", "keys only"), ("SCA", "values only")],
    )  # fmt: skip
    page.answered(
        "Table 6", f"keeping the most redundant tokens is far worse{suffix}",
        own | {"most redundant": live(objective="max", sinks=n)}, [("SCA", "most redundant")],
    )  # fmt: skip
page.answered(
    "Table 6", f"the choice of the selecting layer matters little{SINKS[4]}",
    {"SCA": live(sinks=4)} | {name: live(f"{layer}", sinks=4)
                              for name, layer in zip(OTHERS, (0, *scaled.values()), strict=True)},
    [], [("SCA", name) for name in OTHERS],
)  # fmt: skip

# %%
some = values(parts, "output_error")
some = some[some["label"].isin(shared)]
kept_share = {"0.5": "50 % kept", "0.2": "20 % kept"}
points = some.assign(n=[shared[label][0] for label in some["label"]], panel="attention output",
                     series=[f"{kept_share[budget]}{SINKS[shared[label][1]]}"
                             for label, budget in zip(some["label"], some["budget"], strict=True)])  # fmt: skip
page.keep(curves(
    points, "n", {"attention output": "output error"}, "Layers that share a set",
    "the last of N neighbouring layers selects for all; without protected sinks and with four",
    Choice(parts).caption(), "layers that share a set, N", "log",
), "sharing")  # fmt: skip
for n, suffix in SINKS.items():
    page.answered(
        "Fig. 4", f"sharing one set between 1 to 32 layers has little effect{suffix}",
        {f"N = {size}": live(share=f"{size}", sinks=n) for size in (1, 5, 15)} | {"N = 30": live(sinks=n)},
        [], [(f"N = {size}", "N = 1") for size in (5, 15, 30)],
    )  # fmt: skip

# %% [markdown]
# ## The threshold
#
# In the paper, 4,000 resident tokens are compressed to 2,000 whenever that threshold is reached, and kept tokens move
# to adjacent positions. Our prompts are shorter, so the thresholds are shares of the prompt. At 60 %, 30 % or 15 % of
# the prompt the cache is compressed to half of that, which gives 2, 5 and 12 compressions. The figure counts the
# resident tokens while a prompt is read. The table has their peak and mean, and the metrics of the later queries.

# %%
THRESHOLDS = {"0.6": "0.3", "0.3": "0.15", "0.15": "0.075"}
RECENT = 16  # tokens; the paper's 128 of 2,000 in proportion
RULES = {"SCA": f"sca:recent={RECENT},", "H2O": f"h2o:recent={RECENT},", "StreamingLLM": "streaming-llm:",
         "stride": "strided:"}  # fmt: skip
asked = {
    (name, peak): f"{rule}schedule=threshold({peak},{keep})"
    for peak, keep in THRESHOLDS.items() for name, rule in RULES.items()
}  # fmt: skip
flow = page.replay("threshold", every, list(asked.values()), ["0.3"], "--detail", "summary",
                   "--metrics", "attention_recall,output_error,resident_tokens,span_recall")  # fmt: skip
schedule = flow.cells[flow.cells["role"] == "asked"].drop_duplicates("label")
heading = {}
for row in schedule.itertuples():
    written = re.search(r"schedule=threshold(?:\(|,peak=)([\d.]+),", row.params)[1]
    heading[row.label] = (METHODS[row.policy], written)


def residents(trace: str, label: str) -> np.ndarray:
    """Resident tokens after each token of the prompt, itself included, in the first row of the first layer: int [P].

    A token counts until the query after which it is evicted.
    """
    about = flow.trace(trace)
    row = flow.cells[(flow.cells["trace"] == trace) & (flow.cells["label"] == label)].iloc[0]
    gone = flow.selection_of(row["cell"], about.boundary).evicted_at[0, 0][: about.boundary]
    gone = np.where((gone < 0) | (gone > len(gone)), len(gone), gone)  # after the prompt, or never
    changes = np.zeros(len(gone) + 2, dtype=int)
    changes[: len(gone)] += 1
    np.subtract.at(changes, gone + 1, 1)
    return np.cumsum(changes)[: len(gone)]


def sawtooth() -> Drawing:
    """Resident tokens while a prompt is read, by threshold."""
    trace = flow.cells["trace"].iloc[0]
    about = flow.trace(trace)
    sheet = Sheet(
        1, (3.6, 1.9), left=0.62, right=label_room(["60 % of the prompt"]), above=0.1, below=0.42,
        title="Tokens in the cache under a threshold",
        subtitle="SCA: half of the tokens are evicted whenever the cache is full",
        caption=Choice(flow, traces_asked=[trace]).caption(),
    )  # fmt: skip
    axis, ends, data = sheet.axes[0], [], []
    time = np.arange(about.boundary)
    axis.plot(time, time + 1, color=QUIET, linestyle=":")
    ends.append(LineEnd("full cache", time[-1], about.boundary, QUIET))
    for place, peak in enumerate(THRESHOLDS):
        label = next(label for label, one in heading.items() if one == ("SCA", peak))
        held = residents(trace, label)
        axis.plot(time, held, color=COLOURS[place], linewidth=1.1)
        ends.append(LineEnd(f"{100 * float(peak):.0f} % of the prompt", time[-1], held[-1], COLOURS[place]))
        data.append(pd.DataFrame({"threshold": peak, "token": time, "held": held}))
    axis.set_xlim(0, about.boundary)
    axis.set_ylim(0, 1.05 * about.boundary)
    axis.set_xlabel("prompt tokens processed")
    axis.set_ylabel("resident tokens")
    quiet_frame(axis)
    label_ends(axis, ends, 1.9)
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))


page.keep(sawtooth(), "threshold-residents")

# %%
metrics = {"resident_tokens:peak": "peak", "resident_tokens:mean": "mean", "attention_recall": "recall",
           "output_error": "output error"}  # fmt: skip
lengths = prompts.set_index("name")["prompt_tokens"]
found = []
for metric, words in metrics.items():
    some = values(flow, metric)
    some = some[some["label"].isin(heading)]
    if metric.startswith("resident"):
        some = some.assign(value=some["value"] / some["trace"].map(lengths))
    found.append(mean_over_traces(some, ["label"]).assign(quantity=words))
kept_rows = needle_kept(flow)
found.append(mean_over_traces(kept_rows[kept_rows["label"].isin(heading)], ["label"]).assign(quantity="needle kept"))
found = pd.concat(found, ignore_index=True)
found.insert(0, "threshold", found["label"].map(lambda label: heading[label][1]))
found.insert(0, "policy", found["label"].map(lambda label: heading[label][0]))
cells = found.set_index(["quantity", "policy", "threshold"])
lines = [
    {"policy": name, "threshold, of the prompt": f"{100 * float(peak):.0f} %"}
    | {words: cell(cells.loc[(words, name, peak)]) for words in [*metrics.values(), "needle kept"]}
    for peak in THRESHOLDS for name in RULES
]  # fmt: skip
page.table("threshold", found, pd.DataFrame(lines))
mean = cells["mean"]
peaks = {peak: mean[("peak", "SCA", peak)] for peak in THRESHOLDS}
page.by_construction(
    "Section 5.2", "the cache never exceeds the threshold, however long the text",
    "peak, of the prompt: " + ", ".join(f"{100 * one:.1f} % (at {peak})" for peak, one in peaks.items())
    + "; mean " + ", ".join(f"{100 * mean[('mean', 'SCA', peak)]:.1f} %" for peak in THRESHOLDS),
)  # fmt: skip
page.not_tested(
    "Table 3", "under repeated compression no other method of the four has a lower perplexity than SCA",
    "; ".join(
        f"threshold {peak}: " + ", ".join(f"{name} {mean[('output error', name, peak)]:.3f}" for name in RULES)
        for peak in THRESHOLDS
    ) + " (output error)", "the perplexity of a text read through a compressed cache",
)  # fmt: skip
kept = mean["needle kept"].unstack("threshold")
page.not_tested(
    "Fig. 3", "SCA keeps the passkey through many compressions, the others evict it",
    "; ".join(
        f"threshold {peak}: " + ", ".join(f"{name} {kept.loc[name, peak]:.2f}" for name in RULES) for peak in THRESHOLDS
    ) + " (share of the needle kept)",
)  # fmt: skip

# %% [markdown]
# ## Skill: the contribution of the scores
#
# A [random twin](../docs/conventions.md#random-twins-and-skill) keeps a policy's protected tokens and places runs of
# kept tokens of the same lengths at random. *Skill* is the position of the policy between its twin (0) and the best set
# with its token counts (1), measured by attention recall.

# %%
page.skill(half)

# %% [markdown]
# ## Findings

# %%
page.findings()
