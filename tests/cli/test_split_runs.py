"""A cell depends on itself alone: not on the cells beside it, its shard, or when its metrics were asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from program import done, kvreplay

BUDGETS = ["-b", "0.1,0.5"]
NEEDS = {"finch": ":question=last,question_tokens=4", "random-twin": ":of=(h2o)"}
WITHOUT = {"head-kv": "needs a table of the model's heads", "dms": "needs a threshold"}
# Kinds of traces, and what their logits are multiplied with: parts of rows lie beyond float32, more and more of them.
LOGITS = [("needle", 2), ("sinks", 8), ("gaussian", 15), ("sinks", 60), ("gaussian", 3000)]


def policies(folder: Path) -> list[str]:
    """Every registered one."""
    names = [policy["name"] for policy in json.loads(done("policies", "--json", folder=folder))]
    return [name + NEEDS.get(name, "") for name in names if name not in WITHOUT]


def replay(folder: Path, output: str, wanted: list[str], metrics: str) -> None:
    given = [word for policy in wanted for word in ("-p", policy)]
    answer = kvreplay("replay", "t.h5", *given, *BUDGETS, "--metrics", metrics, "-o", output, folder=folder)
    assert answer.code == 0, answer
    assert "VIOLATED" not in answer.out, answer.out


def same(folder: Path, one: str, other: str) -> bool:
    tables = [(folder / run / "results.csv").read_bytes() for run in (one, other)]
    return tables[0] == tables[1] and kvreplay("diff", one, other, folder=folder).out == "equal\n"


@pytest.mark.parametrize(("kind", "scale"), LOGITS)
def test_runs_split_by_policy_merge_to_the_bits_of_the_whole(kind: str, scale: int, tmp_path: Path) -> None:
    shape = ["--layers", "2", "--prompt", "90", "--continuation", "12", "--head-dim", "16", "--query-heads", "4"]
    shape += ["--reconstruct", "20"]
    done("synth", kind, "-o", "t.h5", *shape, folder=tmp_path)
    with h5py.File(tmp_path / "t.h5", "r+") as trace:
        trace["model"].attrs["softmax_scale"] *= scale
        for layer in trace["layers"].values():  # what metrics of the projected output read
            heads, tokens, dim = layer["q"].shape
            layer["wo"] = np.random.default_rng(0).normal(size=(20, heads * dim)).astype(layer["q"].dtype)
            layer["input_norm"] = np.linspace(1, 9, tokens, dtype=np.float32)
    wanted = policies(tmp_path)
    every = ",".join(
        variant["name"]
        for metric in json.loads(done("metrics", "--json", folder=tmp_path))
        for variant in metric["variants"]
        if "span" not in variant["name"] and not metric["live"]
    )
    replay(tmp_path, "whole", wanted, every)

    shards = [wanted[first::3] for first in range(3)]
    for number, shard in enumerate(shards):
        replay(tmp_path, f"shard-{number}", shard, every)
    done("merge", "merged", *(f"shard-{number}" for number in range(3)), folder=tmp_path)
    assert same(tmp_path, "merged", "whole")

    # The same cells one policy after the other, and their metrics in two goes.
    shutil.copytree(tmp_path / "shard-0", tmp_path / "grown")
    replay(tmp_path, "grown", shards[0] + shards[1], every)
    replay(tmp_path, "grown", wanted, "attention_recall")
    replay(tmp_path, "grown", wanted, every)
    assert same(tmp_path, "grown", "whole")
