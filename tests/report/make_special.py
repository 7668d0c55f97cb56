"""Runs that no real trace gives in a moment: the largest page, and a prompt that would like to be a program."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from make_run import COLUMNS, SNAPKV, Policy, make_run

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2> {{script}} "
    "<style>body{display:none}</style> <!-- \u2028 \u202eturned\u202c &lt;b&gt; ${window.hacked=3} 'quoted' \"twice\"\n"
    "<iframe src=https://example.com></iframe> <svg/onload=window.hacked=4> caf\u00e9 \U0001f600 end"
)


def write_largest(folder: Path, policies: int = 15, layers: int = 30, prompt: int = 4000) -> Path:
    """A run of 4,000 tokens x 30 layers x 3 KV heads x 15 policies x three budgets, sets and scores at random, which no
    compression makes smaller; a policy's scores are the same at every budget."""
    (folder / "cells").mkdir(parents=True)
    random = np.random.default_rng(5)
    heads, rows = 3, []
    with h5py.File(folder / "cells/large.h5", "w") as file:
        file.attrs.update({"format": "kvcells", "version": 1})
        trace = file.create_group("traces/large")
        trace.attrs.update({"model": "made-up", "prompt": prompt, "layers": layers, "tokens": prompt, "query_heads": 9,
                            "kv_heads": heads, "trace_hash": "0" * 32})  # fmt: skip
        trace["eval_attention"] = random.lognormal(-8, 2, (layers, prompt)).astype(np.float32)
        words = "".join(f"{word:<6}" for word in range(prompt))
        trace["tokens/text"] = np.bytes_(words)
        trace["tokens/offsets"] = np.arange(prompt)[:, None] * 6 + np.array([0, 6])
        for number in range(policies):
            scores = random.standard_normal((layers, heads, prompt), dtype=np.float32)
            for budget in ("0.1", "0.2", "0.3"):
                count = int(float(budget) * prompt)
                cell = f"{number:08}{budget.replace('.', ''):>08}"
                kept = np.sort(np.argpartition(random.random((layers * heads, prompt)), count)[:, :count])
                group = file.create_group(f"cells/{cell}")
                group.attrs.update({"trace": "large", "layers": np.arange(layers)})
                group["offsets"] = np.arange(layers * heads + 1) * count
                group["positions"] = kept.ravel().astype(np.int32)
                for name in ("budget", "sinks", "recent"):
                    group[name] = np.full((layers, heads), count if name == "budget" else 0, np.int32)
                for variant in ("first", "mean", "union"):
                    group[f"jaccard_{variant}"] = random.random((layers, layers))
                group["scores"] = scores
                rows.append({"trace": "large", "role": "asked", "policy": f"policy-{number:02}", "heads": "kv",
                             "budget": budget, "budget_tokens": count, "kept_tokens": count, "layer": "all",
                             "head": "all", "metric": "attention_recall", "value": 0.5, "cell": cell})  # fmt: skip
    lines = [",".join(COLUMNS), *(",".join(str(row.get(name, "")) for name in COLUMNS) for row in rows)]
    (folder / "results.csv").write_text("\n".join(lines) + "\n")
    cells = [{"trace": "large", "cell": row["cell"], "own_memory": False} for row in rows]
    metrics = [{"name": "attention_recall", "better": "higher"}]
    about = {"schema": "kvreplay-run/1", "inputs": [{"trace": "large"}], "metrics": metrics, "cells": cells}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def write_hostile(folder: Path) -> Path:
    """Every text of the run is one that HTML or a script would take for its own."""
    made = Policy("<b>snapkv</b>", "seed=</script><script>window.hacked=5</script>")
    other = Policy("<b>snapkv</b>", 'seed="><img src=x onerror=window.hacked=6>')
    name = "<img src=x onerror=window.hacked=7>"
    make_run(folder, [made, other, SNAPKV], budgets=["0.1", "0.2"], traces=[(name, 480, 0.41)])
    pieces = [HOSTILE[i : i + 4] for i in range(0, len(HOSTILE), 4)]
    text, ends = HOSTILE, np.cumsum([len(piece) for piece in pieces])
    offsets = np.full((512, 2), ends[-1])
    offsets[: len(ends)] = np.stack([ends - [len(piece) for piece in pieces], ends], axis=1)
    with h5py.File(folder / "cells" / f"{name}.h5", "a") as file:
        trace = file[f"traces/{name}"]
        trace["tokens/text"] = np.bytes_(text.encode())
        trace["tokens/offsets"] = offsets
        spans = trace["spans"][()]
        spans["name"][0] = b"<i onclick=hacked>"
        del trace["spans"]
        trace["spans"] = spans
    about = {"schema": "kvreplay-run/1", "argv": ["kvreplay", HOSTILE], "warnings": [HOSTILE], "host": "<b>host</b>",
             "inputs": [{"trace": name}], "self_check": {"result": [HOSTILE]}, "cells": [
                 {"trace": name, "policy": HOSTILE, "budget": "0.1", "state": "failed", "error": HOSTILE}]}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def write_live(run: Path, **only: str) -> Path:
    """Adds numbers of a live model to a run: its KL divergence, which falls while recall rises. `only`: the value of a
    column in the rows to write, as budget."""
    rows = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    rows = rows[(rows["metric"] == "attention_recall") & (rows["variant"] == "") & (rows["layer"] == "all")]
    for column, value in only.items():
        rows = rows[rows[column] == value]
    kld = (1 - rows["value"].astype(float)).astype(str)
    live = rows.assign(metric="kld", unit="nats", value=kld, decisions="replayed", device="cpu", dtype="float32",
                       model_hash="0", text="")  # fmt: skip
    live.to_csv(run / "live.csv", index=False)
    return run
