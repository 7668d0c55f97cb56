# %% [markdown]
# # Quickstart: replay policies on the trace that comes with kvreplay
#
# A *trace* holds the queries, keys and values that a language model computed for one prompt. kvreplay applies
# KV-cache eviction policies to them without running the model again. It measures which tokens each policy keeps,
# and how much of the attention it loses. This notebook needs the extra `notebooks`, no model and no GPU, and runs in
# some ten seconds on two CPU cores. To install the extra, run `pip install '.[notebooks]'` in a checkout, or
# `pip install './FILE.whl[notebooks]'` with the wheel.

# %%
import pandas as pd

import kvreplay as kv

trace = kv.open(kv.example("example.h5", force=True))
trace

# %% [markdown]
# ## Replay policies at several budgets
#
# A budget is the mean number of tokens that a policy keeps per layer and KV head, here as a share of the prompt.
# The controls in parentheses are the full cache, random tokens, and an oracle that reads the attention of the
# generated tokens. `attention_recall` is the share of the full-cache attention that falls on kept tokens (higher is
# better), `output_error:pooled` the relative error of the attention output (lower is better).

# %%
run = kv.replay(trace, ["snapkv", "h2o", "chunkkv", "streaming-llm"], [0.05, 0.1, 0.2], progress=False)
run

# %%
kv.figure("curve", run, metric="attention_recall")

# %% [markdown]
# The numbers are **open loop**: the queries are those that the model computed with the full cache. They compare
# policies at equal memory, layer by layer. They do not show how well the compressed model writes; `kvreplay live`
# measures that.
#
# ## See which tokens are kept
#
# `run.selection` returns the kept set of one policy at one budget. The map shows layers from top to bottom and
# positions from left to right.

# %%
kept = run.selection("snapkv", 0.1)
kept

# %% [markdown]
# The tokens outside the protected recent window that most layers and heads keep:

# %%
share = kept.mask().mean(axis=(0, 1))  # of all layers and heads, by position
free = kept.unprotected().all(axis=(0, 1))
tokens = pd.DataFrame({"text": [trace.text[begin:end] for begin, end in trace.offsets[: trace.prompt]], "share": share})
tokens[free].sort_values("share", ascending=False, kind="stable").head(10)

# %%
kv.figure("kept", run, policies=["snapkv", "h2o"], budgets=0.1)

# %% [markdown]
# ## Compare the kept sets of two layers
#
# The Jaccard similarity of two kept sets is the share of common tokens among all tokens of both. Where it is high,
# layers could share one set, as ChunkKV does with its index reuse.

# %%
kv.figure("heatmap", run, policies=["snapkv", "h2o", "chunkkv"], budgets=0.1)


# %% [markdown]
# ## Write a policy
#
# A policy in Python is a function that returns a score for each query head and token. The tokens with the highest
# scores are kept. This one multiplies the attention of the last queries by the norm of the value, as VATP does.


# %%
@kv.policy(recent="window")
def value_attention(view, window: int = kv.parameter(8, 1, 4096, "observation window: last queries, always kept")):
    "attention of the observation window times the L1 norm of the value"
    return view.window_attention(window) * view.value_norms(1).repeat(view.group, axis=0)


mine = kv.replay(trace, [value_attention, "snapkv", "h2o"], 0.1, progress=False)
mine

# %% [markdown]
# ## Read every number
#
# `run.results` is a pandas table with one number per row: by trace, policy, budget, layer and metric.

# %%
rows = run.results.query("metric == 'output_error' and variant == 'pooled' and layer != 'all'")
rows = rows.assign(layer=rows["layer"].astype(int)).query("budget == '0.1' and role != 'control'")
rows.pivot_table("value", "layer", "label").describe().loc[["mean", "min", "max"]].round(3)

# %% [markdown]
# ## Next steps
#
# - `kv.replay(..., output="out/mine")` writes the results into a folder. `kvreplay report out/mine` writes one HTML
#   page with all of them, `kvreplay plot` draws single figures.
# - `kvreplay capture --model NAME --prompt TEXT -o mine.h5` captures a trace of your own model, with
#   the extra `capture`.
# - `kvreplay policies` lists all policies, `help(kv.replay)` all options. [docs/python.md](../docs/python.md) describes
#   the Python package.
