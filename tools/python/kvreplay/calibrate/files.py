"""Calibration files in the formats of their methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvreplay.calibrate import statistics
from kvreplay.errors import Error
from kvreplay.export import replacing
from kvreplay.trace import Trace

LUKV_SHARES = [share / 100 for share in range(1, 100)]
LUKV_POLICY = "expected-attention:epsilon=0.02,sinks=4,heads=kv"  # the scorer of the published curve
LUKV_SINKS, LUKV_WINDOW = 4, 1
EXPECTED_SINKS = 4
DUO_SINKS, DUO_RECENT = 128, 256
GATE_WINDOW = 32

Traces = Sequence[Trace]


def require_all_layers(traces: Traces) -> None:
    """Files of the methods have a row for each layer of the model."""
    for trace in traces:
        if trace["/model/layer_index"].tolist() != list(range(trace.layers)):
            path = f"{trace.path}:/model/layer_index"
            raise Error(path, "layers", "all layers of the model", "some; capture the trace without --layers")


def require_continuation(traces: Traces) -> None:
    for trace in traces:
        if trace.tokens == trace.prompt:
            raise Error(str(trace.path), "continuation", "tokens after the prompt", "none; capture with --generate")


def save_array(path: Path, array: np.ndarray) -> None:
    with replacing(path) as partial, open(partial, "wb") as file:
        np.save(file, array)


def save_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_module(folder: Path, config: dict[str, object], tensors: dict[str, np.ndarray]) -> None:
    """A folder that huggingface_hub's PyTorchModelHubMixin.from_pretrained() reads: config.json has the arguments of
    the constructor, model.safetensors the parameters."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as partial:
        save_file({name: np.ascontiguousarray(one, np.float32) for name, one in tensors.items()}, partial)
    save_text(folder / "config.json", json.dumps(config, indent=2))


def table(traces: Traces, of_layer: Callable[[int], np.ndarray], path: Path) -> np.ndarray:
    """[L, ...]: of the treated layers for a policy of kvreplay (.npy), else of all layers."""
    if path.suffix == ".npy":
        layers = traces[0].treated_layers(False)
    else:
        require_all_layers(traces)
        layers = list(range(traces[0].layers))
    return np.stack([of_layer(layer) for layer in layers])


def write_tri_attention(traces: Traces, path: Path) -> None:
    """The payload of WeianMao/triattention, scripts/calibrate.py (commit c3744ee); methods/pruning_utils.py and
    sglang/stats_loader.py read it, and common/stats_utils.py names the required metadata."""
    import torch

    require_all_layers(traces)
    first = traces[0]
    ropes = [statistics.Rope.of(first, layer) for layer in range(first.layers)]
    for layer, rope in enumerate(ropes):
        if 2 * len(rope.frequencies) != first.head_dim or not rope.frequencies.any():
            where = f"{first.path}:/model/rope/inv_freq"
            raise Error(
                where, "pairs", f"{first.head_dim // 2} rotated pairs in each layer", f"others in layer {layer}"
            )
    stats = {}
    for layer in range(first.layers):
        means, moduli = statistics.query_pairs(traces, layer)
        for head, (mean, modulus) in enumerate(zip(means, moduli, strict=True)):
            stats[f"layer{layer:02d}_head{head:02d}"] = {
                "q_mean_real": torch.from_numpy(mean.real.astype(np.float32)),
                "q_mean_imag": torch.from_numpy(mean.imag.astype(np.float32)),
                "q_abs_mean": torch.from_numpy(modulus.astype(np.float32)),
            }
    metadata = {
        "num_traces": len(traces),
        "head_dim": first.head_dim,
        "dtype": first.dtype,
        "use_chat_template": False,
        "prompt_template": "",
        "system_prompt": "",
        "attn_implementation": "kvreplay",
        "rope_style": "interleaved" if first["/model/rope@style"] == "interleaved" else "half",
        "rope_type": "default",
        "sampled_heads": [[layer, head] for layer in range(first.layers) for head in range(first.query_heads)],
        "num_layers": first.layers,
        "num_kv_heads": first.kv_heads,
        "inv_freq": ropes[0].frequencies.tolist(),
    }
    with replacing(path) as partial:
        torch.save({"metadata": metadata, "stats": stats}, partial)


def write_lu_kv(traces: Traces, path: Path) -> None:
    """The array that kvpress 0.5.5 reads (lukv_press.py): [i, l, h] is the share of the prompt that head h of layer l
    evicts at the compression ratio (i + 1) / 100."""
    from kvreplay.engine import replay

    require_all_layers(traces)
    require_continuation(traces)
    found = []
    for trace in traces:
        run = replay(trace.path, [LUKV_POLICY], [0.5], save="scores", progress=False)
        scores = run.scores(next(cell["cell"] for cell in run.about["cells"] if cell["role"] == "asked"))
        if np.isnan(scores).any():
            raise Error(str(trace.path), "layers", "no sliding-window layers", "layers without scores")
        curves = [
            statistics.utility_curves(trace, layer, scores[layer], LUKV_SINKS, LUKV_WINDOW)
            for layer in range(trace.layers)
        ]
        found.append(statistics.pruned_shares(np.stack(curves), LUKV_SHARES, LUKV_SINKS + LUKV_WINDOW))
    save_array(path, np.mean(found, 0))


def write_duo_attention(traces: Traces, path: Path) -> None:
    """Tab-separated scores [L, Hkv] and, beside them, config.json, as mit-han-lab/duo-attention, duo_attn/utils.py,
    load_attn_pattern (commit fe93c31) reads them; or .npy for the policy duo-attention."""
    scores = table(traces, lambda layer: statistics.duo_head_scores(traces, layer), path)
    if path.suffix == ".npy":
        save_array(path, scores)
        return
    save_text(path, "".join("\t".join(f"{score:.18e}" for score in row) + "\n" for row in scores))
    sizes = {"sink_size": DUO_SINKS, "recent_size": DUO_RECENT}
    save_text(path.with_name("config.json"), json.dumps(sizes, indent=2))


def write_q_filters(traces: Traces, path: Path) -> None:
    """Directions [L, Hkv, d] with the sign of the published filters, as NathanGodey/qfilters, src/utils.py (commit
    7977a17) reads them; or, with the opposite sign, .npy for the policy q-filter."""
    directions = table(traces, lambda layer: statistics.query_directions(traces, layer), path)
    if path.suffix == ".npy":
        save_array(path, directions)
        return
    layers, heads, d = directions.shape
    save_module(path, {"num_layers": layers, "num_kv_heads": heads, "kv_head_dim": d}, {"q_filters": -directions})


def write_head_kv(traces: Traces, path: Path) -> None:
    """A list of scores for each "layer-head", as FYYFU/HeadKV writes it (statistics.retrieval_scores); or their means
    [L, Hq] as .npy for the policy head-kv."""
    scores = table(traces, lambda layer: np.stack([statistics.retrieval_scores(one, layer) for one in traces]), path)
    if path.suffix == ".npy":
        save_array(path, scores.mean(1))
        return
    names = np.ndindex(scores.shape[0], scores.shape[2])
    save_text(path, json.dumps({f"{layer}-{head}": scores[layer, :, head].tolist() for layer, head in names}))


def write_expected_attention(traces: Traces, path: Path) -> None:
    """Query mean and covariance before RoPE, as kvpress 0.5.5 reads them (expected_attention_with_stats.py)."""
    require_all_layers(traces)
    moments = [statistics.query_moments(traces, layer, EXPECTED_SINKS) for layer in range(traces[0].layers)]
    config = {
        "num_layers": traces[0].layers,
        "num_heads": traces[0].query_heads,
        "head_dim": traces[0].head_dim,
        "dataset_name": "kvreplay",
        "model_name": traces[0].model,
        "num_samples": len(traces),
        "sample_seq_len": max(trace.prompt for trace in traces),
        "n_sink": EXPECTED_SINKS,
    }
    means, covariances = (np.stack(part) for part in zip(*moments, strict=True))
    save_module(path, config, {"query_mean": means, "query_cov": covariances})


def write_gate(traces: Traces, path: Path) -> None:
    """A row for each prompt token of each KV head and treated layer; a row group for each head."""
    import pyarrow as pa
    from pyarrow import parquet

    require_continuation(traces)
    with replacing(path) as partial:
        writer = None
        for trace in traces:
            for layer in trace.treated_layers(False):
                for columns in statistics.token_features(trace, layer, GATE_WINDOW):
                    n = trace.prompt
                    rows = pa.table({
                        "trace": pa.array([trace.name] * n, pa.string()),
                        "layer": np.full(n, trace["/model/layer_index"][layer], np.int32),
                        "kv_head": np.full(n, columns.pop("kv_head"), np.int32),
                        "position": np.arange(n, dtype=np.int32),
                        "token": trace.ids[:n],
                        **columns,
                    })  # fmt: skip
                    writer = writer or parquet.ParquetWriter(partial, rows.schema)
                    writer.write_table(rows)
        if writer is None:
            raise Error(str(traces[0].path), "layers", "a layer without a sliding window", "none")
        writer.close()


WRITERS = {
    "tri-attention": write_tri_attention,
    "lu-kv": write_lu_kv,
    "duo-attention": write_duo_attention,
    "q-filters": write_q_filters,
    "head-kv": write_head_kv,
    "expected-attention": write_expected_attention,
    "gate": write_gate,
}
