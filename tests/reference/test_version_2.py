"""Traces of version 2: metrics recomputed from the trace with numpy, from the formulas of docs/conventions.md."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

import kvreplay as kv
from kvreplay.program import program

POLICIES = ["snapkv:window=8", "streaming-llm", "h2o", "ada-kv:window=8", "tova", "snapkv:window=8,heads=query"]
METRICS = ["attention_recall", "attention_l1", "attention_cosine", "output_error", "sink_mass:logit"]
SHAPE = ["--layers", "2", "--prompt", "90", "--continuation", "6"]


def random_sources(seed: int) -> list[str]:
    """Options that let each of the last layers read the keys and values of one of the first."""
    draw = np.random.default_rng(seed)
    sources = [0, 1, *map(int, draw.integers(0, 2, 3))]
    query_heads = draw.integers(1, 4, 5) * 2
    words = {
        "--layers": "5",
        "--query-heads": query_heads,
        "--kv-source": sources,
        "--head-dim": draw.integers(3, 30, 2),
    }
    return [word for option, of in words.items()
            for word in (option, of if isinstance(of, str) else ",".join(map(str, of)))]  # fmt: skip


def random_shapes(seed: int) -> list[str]:
    """Options of `kvreplay synth` that give each of two layers another number of heads and other dimensions."""
    draw = np.random.default_rng(seed)
    kv_heads, groups = draw.permutation(4)[:2] + 1, draw.integers(1, 4, 2)
    dims = {"--head-dim": draw.permutation(30)[:2] + 3, "--value-dim": draw.permutation(30)[:2] + 3}
    lists = {"--query-heads": kv_heads * groups, "--kv-heads": kv_heads, **dims}
    return [word for option, numbers in lists.items() for word in (option, ",".join(map(str, numbers)))]


def queries_of(trace: kv.Trace, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [heads, T, d] and sink logits of all layers that read the keys of a layer: for each KV head those of its
    group in the first of these layers, then in the next."""
    sources = trace["/model/kv_source"] if "/model/kv_source" in trace else np.arange(trace.layers)
    kv_heads = len(trace.k(layer))
    queries: list[list[np.ndarray]] = [[] for _ in range(kv_heads)]
    sinks: list[list[np.ndarray]] = [[] for _ in range(kv_heads)]
    for reader in np.flatnonzero(sources == layer):
        q = trace.q(reader).astype(np.float64)
        logits = trace["/model/sinks"][reader][: len(q)] if "/model/sinks" in trace else np.full(len(q), -np.inf)
        for kv_head, heads in enumerate(np.split(np.arange(len(q)), kv_heads)):
            queries[kv_head].append(q[heads])
            sinks[kv_head].append(logits[heads])
    return np.concatenate(sum(queries, [])), np.concatenate(sum(sinks, []))


def bytes_of(trace: kv.Trace, layer: int, kept: np.ndarray) -> float:
    """Bytes of the kept tokens of a layer, a key and a value for each KV head, or for each set."""
    k, v = trace.k(layer), trace.v(layer)
    components = k.shape[2] + (v.shape[2] if "/model@value_is_key" not in trace else 0)
    return float(kept.sum() * max(1, len(k) // len(kept)) * components * k.itemsize)


def attention(logits: np.ndarray, sink: float, held: np.ndarray) -> np.ndarray:
    """Softmax over the held keys and the sink logit; 0 for other keys."""
    highest = max(logits[held].max(), sink)
    weights = np.where(held, np.exp(logits - highest), 0)
    return weights / (weights.sum() + np.exp(sink - highest))


def expected(trace: kv.Trace, layer: int, kept: np.ndarray, with_sinks: bool = True) -> dict[str, float]:
    """Means over eval queries and query heads. `kept`: bool [rows, P]."""
    k, v = (array.astype(np.float64) for array in (trace.k(layer), trace.v(layer)))
    q, all_sinks = queries_of(trace, layer)
    group = len(q) // len(k)
    chunk = trace["/model/chunk"][layer] if "/model/chunk" in trace else 0
    sinks = all_sinks if with_sinks else np.full(len(q), -np.inf)
    values: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for head, sink in enumerate(sinks):
        row = {1: 0, len(k): head // group}.get(len(kept), head)
        for t in range(trace.prompt, trace.tokens):
            logits = trace["/model@softmax_scale"] * (k[head // group][: t + 1] @ q[head][t])
            held = np.concatenate([kept[row], np.ones(t + 1 - trace.prompt, bool)])
            visible = np.arange(t + 1) >= (t // chunk * chunk if chunk else 0)
            held &= visible
            full, evicted = attention(logits, sink, visible), attention(logits, sink, held)
            outputs = [weights @ v[head // group][: t + 1] for weights in (full, evicted)]
            values["attention_recall"].append(full[held].sum() / full.sum())
            values["attention_l1"].append(np.abs(full - evicted).sum())
            values["attention_cosine"].append(full @ evicted / np.linalg.norm(full) / np.linalg.norm(evicted))
            values["output_error"].append(np.linalg.norm(outputs[0] - outputs[1]) / np.linalg.norm(outputs[0]))
            values["sink_mass:logit"].append(1 - full.sum())
    return {metric: float(np.mean(numbers)) for metric, numbers in values.items()}


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 0.0, 4.0])
def test_closed_forms(sink: float) -> None:
    """The metrics of docs/conventions.md follow from sums over the kept keys, with σ the share of the sink logit."""
    random = np.random.default_rng(7)
    for tokens in (1, 2, 17, 400):
        logits = 3 * random.standard_normal(tokens)
        held = random.random(tokens) < 0.4
        held[-1] = True
        full, evicted = (attention(logits, sink, set_) for set_ in (np.ones(tokens, bool), held))
        kept, share = full[held].sum(), 1 - full.sum()
        lost = 1 - share - kept
        assert np.abs(full - evicted).sum() == pytest.approx(
            lost * (2 * kept + share) / (kept + share), abs=1e-12, rel=0
        )
        cosine = full @ evicted / np.linalg.norm(full) / np.linalg.norm(evicted)
        assert cosine == pytest.approx(np.linalg.norm(full[held]) / np.linalg.norm(full), abs=1e-12, rel=0)
        assert evicted[held] == pytest.approx(full[held] / (kept + share), abs=1e-12, rel=0)


@pytest.mark.parametrize(
    "options",
    [
        ["--sink-logits"],
        ["--value-dim", "24"],
        ["--value-dim", "80", "--sink-logits"],
        ["--value-is-key", "--value-dim", "40", "--kv-heads", "1", "--sink-logits"],
        ["--chunk", "80,0"],
        ["--query-heads", "4,6", "--kv-heads", "2,3", "--sink-logits"],
        ["--head-dim", "24,40", "--value-dim", "56,16"],
        *(random_shapes(seed) for seed in range(4)),
        *([*random_sources(seed), *more] for seed, more in enumerate([[], ["--sink-logits"], ["--value-dim", "7"]])),
        ["--value-is-key", "--value-dim", "40", "--kv-heads", "1", "--kv-source", "0,0"],
    ],
    ids="_".join,
)
def test_metrics(options: Sequence[str], tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    shape = SHAPE if "--layers" not in options else SHAPE[2:]
    subprocess.run([*program(), "synth", "gaussian", "-o", path, *shape, *options], check=True, capture_output=True)
    trace = kv.Trace(path)
    assert trace["/@version"] == 2
    run = kv.replay(
        trace, policies=POLICIES, budgets=[20], metrics=[*METRICS, "kv_bytes"], sliding="treat"
    )  # fmt: skip
    table = run.results[run.results["head"] == "all"].fillna({"variant": ""})
    for cell in run.cells["cell"]:
        selection = run.selection_of(cell, trace.prompt)
        kept = selection.mask()
        if selection.rows is not None and len(set(selection.rows.tolist())) > 1:
            assert np.isnan(selection.jaccard["mean"][0, 1]), "undefined: layers with different numbers of rows"
            assert 0 <= selection.jaccard["union"][0, 1] <= 1
        for place, layer in enumerate(selection.layers):
            own = kept[place] if selection.rows is None else kept[place][: selection.rows[place]]
            wanted = expected(trace, layer, np.asarray(own))
            wanted["kv_bytes"] = bytes_of(trace, layer, np.asarray(own))
            rows = table[(table["cell"] == cell) & (table["layer"].astype(str) == str(layer))]
            for metric, number in wanted.items():
                name, _, variant = metric.partition(":")
                found = rows[(rows["metric"] == name) & (rows["variant"] == variant)]["value"]
                assert found.tolist() == pytest.approx([number], abs=2e-7), (cell, layer, metric)
    if "--sink-logits" in options:
        without = expected(trace, 0, kept[0], with_sinks=False)
        assert abs(without["output_error"] - expected(trace, 0, kept[0])["output_error"]) > 1e-4


def put(visible: h5py.Dataset, unit: int) -> None:
    """As the first unit of the last query but one."""
    visible[0, -2, 0] = unit


@pytest.mark.parametrize("stored", [[], ["--queries", "last:6"]], ids=["all", "last"])
def test_native_reads(stored: Sequence[str], tmp_path: Path) -> None:
    """Each query reads the tokens of its units, and all tokens after the prompt."""
    path = tmp_path / "t.h5"
    words = [*program(), "synth", "gaussian", "-o", path, *SHAPE, *stored, "--visible", "5,4"]
    subprocess.run(words, check=True, capture_output=True)
    trace = kv.Trace(path)
    before = trace.hash
    run = kv.replay(trace, policies=["native", "full"], budgets=[20], metrics=METRICS[:2])
    table = run.results[(run.results["head"] == "all") & (run.results["variant"].fillna("") == "")]
    values = table.set_index(["label", "metric", "layer"])["value"]
    for layer in range(trace.layers):
        q, k = (array.astype(np.float64) for array in (trace.q(layer), trace.k(layer)))
        units, group, recalls = trace[f"/layers/{layer:03}/visible"], len(q) // len(k), []
        for head in range(len(q)):
            for t in range(trace.prompt, trace.tokens):
                row = t if not stored else t - trace.tokens + q.shape[1]
                full = attention(trace["/model@softmax_scale"] * (k[head // group][: t + 1] @ q[head][row]), -np.inf,
                                 np.ones(t + 1, bool))  # fmt: skip
                read = np.isin(np.arange(t + 1) // 4, units[head // group, row])
                read[trace.prompt :] = True
                recalls.append(full[read].sum())
        assert values["native", "attention_recall", str(layer)] == pytest.approx(np.mean(recalls), abs=2e-7)
        assert values["native", "attention_l1", str(layer)] == pytest.approx(2 - 2 * np.mean(recalls), abs=2e-7)
        assert values["full", "attention_recall", str(layer)] == 1
    assert np.mean(recalls) < 0.5
    with h5py.File(path, "r+", libver=("v108", "v110")) as file:
        last = file["layers/001/visible"][1, -1]
        last[0] = next(unit for unit in range(last[1]) if unit != last[0])
        file["layers/001/visible"][1, -1] = last
    assert kv.Trace(path).hash != before


@pytest.mark.parametrize(
    ("options", "edit", "said"),
    [
        (["--sink-logits"], lambda file: file.attrs.modify("version", np.int64(1)), "/@version: value: expected 2"),
        ([], lambda file: file.attrs.modify("version", np.int64(2)), "/@version: value: expected 1"),
        (["--value-dim", "24"], lambda file: file["model"].attrs.__delitem__("value_dim"), "/layers/000/v: shape"),
        (["--value-is-key"], lambda file: file["layers/001"].copy("k", "v"), "/001/v: beside /model@value_is_key"),
        (["--visible", "3,8"], lambda file: file["model"].attrs.__delitem__("visible_block"), "/model@visible_block"),
        (["--visible", "3,8"], lambda file: put(file["layers/001/visible"], 12), "units of a query: expected at least"),
        (["--visible", "3,8"], lambda file: put(file["layers/000/visible"], -1), "units of a query: expected at least"),
        (["--kv-heads", "2,4"], lambda file: file["model/heads"].write_direct(np.array([[8, 3], [8, 4]], np.int32)),
         "/model/heads: value: expected a divisor of 8 (Hq), found 3 at element 1"),
        (["--kv-heads", "2,4"], lambda file: file["model/heads"].write_direct(np.array([[8, 2], [8, 2]], np.int32)),
         "/model@n_kv_heads: value: expected 2, the largest in /model/heads, found 4"),
        (["--head-dim", "8,4"], lambda file: file["model/head_dims"].write_direct(np.array([[4, 8], [8, 4]], np.int32)),
         "/layers/000/k: shape: expected [2, 96, 4], found [2, 96, 8]"),
        (["--head-dim", "8,4"], lambda file: file["model/rope/pairs"].write_direct(np.array([4, 3], np.int32)),
         "/model/rope/pairs: shape: expected at most 2 pairs (offset + 2r <= d), found 3"),
        (["--head-dim", "8,4"], lambda file: file["model"].__delitem__("rope/pairs"), "at most 2 pairs"),
        (["--kv-source", "0,0"], lambda file: file["layers/000"].copy("k", "/layers/001/k"),
         "/layers/001/k: beside /model/kv_source: expected none, found a dataset"),
        (["--kv-source", "0,0"], lambda file: file["model/kv_source"].write_direct(np.array([0, 1], np.int32)),
         "/layers/001/k: missing"),
        (["--chunk", "32"], lambda file: file["model/chunk"].write_direct(np.array([8, -1], np.int32)), "/model/chunk"),
    ],
)  # fmt: skip
def test_violations(options: Sequence[str], edit: Callable[[h5py.File], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    subprocess.run([*program(), "synth", "gaussian", "-o", path, *SHAPE, *options], check=True, capture_output=True)
    with h5py.File(path, "r+", libver=("v108", "v110")) as file:
        edit(file)
    result = subprocess.run([*program(), "validate", path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert said in result.stdout + result.stderr


def test_a_later_run_reads_the_sets_of_layers_of_different_shape(tmp_path: Path) -> None:
    shape = ["--query-heads", "8,4", "--kv-heads", "4,2", "--head-dim", "16,24"]
    trace = tmp_path / "t.h5"
    subprocess.run([*program(), "synth", "gaussian", "-o", trace, *SHAPE, *shape], check=True, capture_output=True)
    policies = "snapkv:window=8,h2o:heads=query,layers:0=(h2o:heads=layer),1=snapkv"
    more = "attention_recall,output_error,kv_l1_loss"
    for folder, metrics in (("two", "attention_recall"), ("two", more), ("one", more)):
        words = ["replay", trace, "-p", policies, "-b", "20", "--metrics", metrics, "-o", tmp_path / folder]
        subprocess.run([*program(), *words], check=True, capture_output=True)
    diff = [*program(), "diff", tmp_path / "one", tmp_path / "two"]
    assert subprocess.run(diff, capture_output=True, text=True, check=False).returncode == 0
