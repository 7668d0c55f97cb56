"""A run folder with made-up numbers of plausible shape, marked synthetic: what a figure needs, in a moment."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import xxhash

from kvreplay.trace import Span, TraceWriter

COLUMNS = (
    "trace,trace_hash,model,role,policy,params,heads,agg,budget,budget_tokens,kept_tokens,boundary,eval,n_queries,layer,"
    "head,metric,variant,value,unit,open_loop,synthetic,backend,seed,cell"
).split(",")
SPANS = [("instructions", "system", 0, 0.06), ("report", "context", 0.06, 0.95), ("code word", "needle", 0.4, 0.43),
         ("question", "question", 0.955, 1.0)]  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """`alike`: share of the score that all layers have in common; `chunk`: tokens kept together."""

    name: str
    params: str = ""
    heads: str = "kv"
    alike: float = 0.5
    chunk: int = 1
    sinks: int = 0
    recent: float = 8  # tokens, or a share of the budget
    slope: float = 0.0  # of the layers' budgets, downwards
    quality: float = 0.6
    role: str = "asked"


SNAPKV = Policy("snapkv", "window=8,kernel=7,pool=max,heads=kv", alike=0.55, chunk=3, quality=0.75)
H2O = Policy("h2o", "recent=0.5,heads=kv", alike=0.3, recent=0.5, quality=0.7)
CHUNKKV = Policy("chunkkv", "chunk=10,window=8,heads=layer,reuse=1", "layer", 0.8, 10, quality=0.72)
CONTROLS = (
    Policy("full", quality=1.0, role="control"),
    Policy("random", "seed=0,sinks=0,window=0,heads=kv", alike=0.0, recent=0, quality=0.1, role="control"),
    Policy("oracle", "scope=head,heads=kv", alike=0.6, recent=0, quality=0.95, role="control"),
)
THREE = (SNAPKV, H2O, CHUNKKV)
METRICS = {"attention_recall": "higher", "attention_l1": "lower", "output_error": "lower", "span_recall": "higher",
           "kv_bytes": "neither", "held_tokens": "neither"}  # fmt: skip
NINE = (
    *THREE,
    Policy("snapkv", "window=32,kernel=5,pool=avg,heads=query", "query", alike=0.5, chunk=3, quality=0.8),
    Policy("chunkkv", "chunk=10,window=8,heads=layer,reuse=4", "layer", 1.0, 10, quality=0.68),
    Policy("streaming-llm", "sinks=4,positions=original,rolling=false", "layer", 1.0, sinks=4, recent=1e9, quality=0.4),
    Policy("pyramid-kv", "window=8,beta=20,heads=kv", alike=0.55, chunk=3, slope=1.6, quality=0.77),
    Policy("knorm", "heads=kv", alike=0.4, recent=0, quality=0.5),
    Policy("tova", "protect_last=false", "layer", alike=0.5, recent=1, quality=0.66),
)


def jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of sets as bool [..., P]; both empty: 1."""
    both, either = (a & b).sum(axis=-1), (a | b).sum(axis=-1)
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def choose(policy: Policy, budget: int, layers: int, heads: int, prompt: int, random: np.random.Generator):
    """Rows [L][H] of kept positions, granted [L,H] and how many first and last tokens are protected."""
    granted = np.full(layers, budget)
    if policy.slope and layers > 1:
        shape = 1 + policy.slope * (0.5 - np.arange(layers) / (layers - 1))
        granted = np.maximum(1, np.floor(budget * shape)).astype(int)
    recent = int(policy.recent * budget) if 0 < policy.recent < 1 else int(policy.recent)
    chunks = -(-prompt // policy.chunk)
    hill = 2 * np.exp(-0.5 * ((np.linspace(0, 1, chunks) - 0.41) / 0.02) ** 2)
    common = random.standard_normal((heads, chunks)) + hill
    rows, sinks, last = [], np.zeros((layers, heads), int), np.zeros((layers, heads), int)
    for layer in range(layers):
        row = []
        for head in range(heads):
            count = min(int(granted[layer]), prompt)
            first = min(policy.sinks, count)
            tail = min(recent, count - first)
            own = random.standard_normal(chunks)
            score = np.repeat(policy.alike * common[head] + (1 - policy.alike) * own, policy.chunk)[:prompt]
            score[:first], score[prompt - tail :] = np.inf, np.inf
            row.append(sorted(np.argsort(-score, kind="stable")[:count].tolist()))
            sinks[layer, head], last[layer, head] = first, tail
        rows.append(row)
    return rows, np.repeat(np.minimum(granted, prompt)[:, None], heads, axis=1), sinks, last


def write_trace(path: Path, prompt: int, layers: int, query_heads: int, kv_heads: int, spans: list[tuple],
                first_id: int = 0) -> Path:  # fmt: skip
    """A trace with keys and values that are alike in one stretch of the prompt, and a single query a layer."""
    random = np.random.default_rng(prompt)
    tokens, width = prompt + 32, 8
    path.parent.mkdir(parents=True, exist_ok=True)
    with TraceWriter(path) as trace:
        trace.attributes("/", synthetic=1)
        trace.attributes("/model", name="made-up-135M", architecture="none", n_layers=layers, n_query_heads=query_heads,
                         n_kv_heads=kv_heads, head_dim=width, dtype="float16", softmax_scale=1.0,
                         logit_softcap=0.0)  # fmt: skip
        trace.dataset("/model/sliding_window", np.zeros(layers, np.int32))
        trace.dataset("/model/layer_index", np.arange(layers, dtype=np.int32))
        trace.attributes("/tokens", prefill=prompt)
        trace.dataset("/tokens/ids", first_id + np.arange(tokens, dtype=np.int32))
        trace.dataset("/spans", [Span(*span) for span in spans])
        for layer in range(layers):
            k, v = 0.4 + random.standard_normal((2, kv_heads, tokens, width))
            k[:, prompt // 4 : prompt // 3] += 2
            q = random.standard_normal((query_heads, 1, width))
            trace.layer(layer, *(one.astype(np.float16) for one in (q, k, v)), q_positions=np.array([tokens - 1]))
    return path


def make_run(
    folder: Path,
    policies: Sequence[Policy] = THREE,
    layers: int = 4,
    budgets: Sequence[str] = ("0.1", "0.2", "0.3"),
    traces: Sequence[tuple[str, int, float]] = (("demo", 480, 0.41),),
    query_heads: int = 9,
    kv_heads: int = 3,
    twins: dict[str, float] | None = None,
) -> Path:
    """Writes results.csv, cells and run.json; `traces` are (name, prompt tokens, depth of the needle). `twins`: the
    quality of the random twin of each policy that has one, by the policy's name."""
    (folder / "cells").mkdir(parents=True)
    rows: list[dict[str, object]] = []
    inputs: list[dict[str, str]] = []
    sets = {"kv": kv_heads, "query": query_heads, "layer": 1}
    controls = [*CONTROLS, *(Policy("random-twin", f"of=({name}),seed=0", quality=quality, role="control")
                             for name, quality in (twins or {}).items())]  # fmt: skip
    number = 0
    for t, (trace, prompt, depth) in enumerate(traces):
        with h5py.File(folder / "cells" / f"{trace}.h5", "w") as file:
            file.attrs.update({"format": "kvcells", "version": 1})
            random = np.random.default_rng(t)
            group = file.create_group(f"traces/{trace}")
            group.attrs.update({"trace_hash": f"{t:032x}", "model": "made-up-135M", "prompt": prompt, "layers": layers,
                                "tokens": prompt + 32, "query_heads": query_heads, "kv_heads": kv_heads,
                                "head_dim": 64, "n_queries": 32})  # fmt: skip
            spans = [(name, kind, int(a * prompt), int(b * prompt)) for name, kind, a, b in SPANS if kind != "needle"]
            needle = int(depth * prompt)
            spans += [("code word", "needle", needle, needle + 12), ("answer", "answer", prompt, prompt + 8)]
            kinds = [("name", "S32"), ("kind", "S16"), ("begin", "<i4"), ("end", "<i4")]
            group["spans"] = np.array(spans, dtype=kinds)
            deep = np.linspace(0, 1, layers)[:, None]
            for kind, level in (("key", 0.86 - 0.05 * deep), ("value", 0.85 - 0.3 * deep**0.5)):
                noise = 0.07 * random.standard_normal((layers, prompt)) - 0.3 * (np.arange(prompt) == 0)
                group[f"redundancy_{kind}"] = np.clip(level + noise, -1, 1).astype(np.float32)
            attention = random.pareto(1.2, (layers, query_heads, prompt))
            attention *= 32 * 0.8 / attention.sum(axis=2, keepdims=True)  # sums over 32 eval queries
            group["eval_attention"] = attention.mean(axis=1).astype(np.float32)
            group["eval_attention_heads"] = attention.astype(np.float32)
            captured = write_trace(folder / "traces" / f"{trace}.h5", prompt, layers, query_heads, kv_heads, spans, t)
            ids = t + np.arange(prompt, dtype="<i4")
            inputs.append({"path": str(captured), "trace": trace, "trace_hash": f"{t:032x}",
                           "prompt_hash": xxhash.xxh3_128(ids.tobytes()).hexdigest()})  # fmt: skip
            about = {"trace": trace, "trace_hash": f"{t:032x}", "model": "made-up-135M", "boundary": "prompt",
                     "eval": "continuation", "n_queries": 32, "open_loop": "true", "synthetic": "true",
                     "backend": "cpu", "seed": 0}  # fmt: skip
            alone = {"role": "trace", "layer": "all", "head": "all", "metric": "redundancy_key", "value": 0.8}
            rows.append(about | alone)
            for budget in budgets:
                share = float(budget) if "." in budget else int(budget) / prompt
                tokens = max(1, int(share * prompt + 0.5))
                for policy in (*policies, *controls):
                    heads = sets[policy.heads]
                    kept = prompt if policy.name == "full" else tokens
                    positions, granted, sinks, last = choose(policy, kept, layers, heads, prompt, random)
                    if "reuse=4" in policy.params:
                        positions = [positions[layer // 4 * 4] for layer in range(layers)]
                    write_cell(file, f"{number:016x}", policy, positions, granted, sinks, last, prompt, about | {
                        "budget": budget, "budget_tokens": tokens})  # fmt: skip
                    mine = about | {
                        "role": policy.role, "policy": policy.name, "params": policy.params, "heads": policy.heads,
                        "agg": "mean", "budget": budget, "budget_tokens": tokens, "kept_tokens": float(granted.mean()),
                        "cell": f"{number:016x}",
                    }  # fmt: skip
                    level = policy.quality + (1 - policy.quality) * share**0.5 * (policy.quality < 1)
                    values = np.clip(level + 0.05 * (policy.quality < 1) * random.standard_normal(layers), 0, 1)
                    inside = [np.mean([len(set(range(needle, needle + 12)) & set(row)) / 12 for row in one])
                              for one in positions]  # fmt: skip
                    for metric, variant, unit, by_layer in (
                        ("attention_recall", "", "", values), ("attention_l1", "", "", 2 - 2 * values),
                        ("attention_recall", "oracle", "", np.maximum(values, 0.98)),
                        ("attention_recall", "prompt", "", values**2), ("span_recall", "code word.mean", "", inside),
                        ("kv_bytes", "", "bytes", 256.0 * granted.sum(axis=1)),
                    ):  # fmt: skip
                        fact = mine | {"metric": metric, "variant": variant, "unit": unit, "head": "all"}
                        rows += [fact | {"layer": layer, "value": repr(float(v))} for layer, v in enumerate(by_layer)]
                        rows.append(fact | {"layer": "all", "value": repr(float(np.mean(by_layer)))})
                    rows.append(mine | {"metric": "held_tokens", "layer": "all", "head": "all", "value": ""})
                    number += 1
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as page:
        writer = csv.DictWriter(page, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    metrics = [{"name": name, "better": better} for name, better in METRICS.items()]
    about = {"schema": "kvreplay-run/1", "open_loop": True, "metrics": metrics, "inputs": inputs}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def write_cell(file, cell, policy, positions, granted, sinks, last, prompt, about):
    """/cells/ID of a file, with its Jaccard matrices counted set by set."""
    group = file.create_group(f"cells/{cell}")
    layers = len(positions)
    group.attrs.update({
        "trace": about["trace"], "trace_hash": about["trace_hash"], "policy": policy.name, "params": policy.params,
        "budget": about["budget"], "budget_tokens": about["budget_tokens"], "heads": policy.heads, "open_loop": 1,
        "role": policy.role, "layers": np.arange(layers, dtype=np.int32),
    })  # fmt: skip
    flat = [row for one in positions for row in one]
    group["offsets"] = np.cumsum([0, *map(len, flat)]).astype(np.int64)
    group["positions"] = np.concatenate(flat).astype(np.int32)
    group["layer_source"] = np.arange(layers, dtype=np.int32)
    for name, values in (("budget", granted), ("sinks", sinks), ("recent", last)):
        group[name] = values.astype(np.int32)
    free = np.zeros((layers, len(positions[0]), prompt), dtype=bool)
    for layer, head in np.ndindex(*granted.shape):
        free[layer, head, positions[layer][head]] = True
        free[layer, head, : sinks[layer, head]] = free[layer, head, prompt - last[layer, head] :] = False
    pairs = jaccard(free[:, None], free[None])
    union = free.any(axis=1)
    first, mean, both = pairs[..., 0], pairs.mean(axis=-1), jaccard(union[:, None], union[None])
    for variant, matrix in (("first", first), ("mean", mean), ("union", both)):
        group[f"jaccard_{variant}"] = matrix


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=480)
    parser.add_argument("--nine", action="store_true", help="nine policies instead of three")
    parser.add_argument("--traces", type=int, default=1)
    asked = parser.parse_args()
    made = [(f"demo-{i:02}", asked.prompt * (1 + i % 4), 0.05 + 0.09 * (i // 4 % 10)) for i in range(asked.traces)]
    make_run(asked.folder, NINE if asked.nine else THREE, asked.layers, traces=made)
