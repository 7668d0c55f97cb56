"""Sink logits, latent attention, other value dimensions and chunks: are outputs those of the model's own modules?"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_capture_models import as_defined, captured
from tiny_models import EXPERTS, LATENT, SIZES, VERSION_2, build, character_tokenizer, save
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import kvreplay as kv
from kvreplay.capture.command import main
from kvreplay.capture.model import decoder
from kvreplay.trace import Trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: save(tmp_path_factory.mktemp(name) / "model", name)


def outputs(trace: Trace, layer: int) -> np.ndarray:
    """The definition, one query at a time, float64: [T, Hq*dv]."""
    base = f"/layers/{layer:03d}"
    q, k = (trace[f"{base}/{name}"].astype(np.float64) for name in "qk")
    latent = trace["/model@value_is_key"] if "/model@value_is_key" in trace else 0
    v = k[:, :, :latent] if latent else trace[f"{base}/v"].astype(np.float64)
    sinks = trace["/model/sinks"][layer] if "/model/sinks" in trace else np.full(len(q), -np.inf)
    window, chunk = (trace[name][layer] if name in trace else 0 for name in ("/model/sliding_window", "/model/chunk"))
    found = np.empty((trace.tokens, len(q), v.shape[2]))
    for head, sink in enumerate(sinks):
        group = head * len(k) // len(q)
        for t in range(trace.tokens):
            begin = max(0, t - window + 1 if window else 0, t // chunk * chunk if chunk else 0)
            logits = trace["/model@softmax_scale"] * k[group, begin : t + 1] @ q[head, t]
            weights = np.exp(logits - max(logits.max(), sink))
            weights /= weights.sum() + np.exp(sink - max(logits.max(), sink))
            found[t, head] = weights @ v[group, begin : t + 1]
    return found.reshape(trace.tokens, -1)


@pytest.mark.parametrize("name", VERSION_2)
@pytest.mark.parametrize("chunk", ["", "20"], ids=["one_pass", "chunks"])
def test_outputs(name: str, chunk: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Projected outputs of the trace are those of the model's modules; `--verify` has recomputed all queries."""
    path = folder(name)
    options = ["--generate", "6", "--with-wo", "--verify", "--queries", "all", *(["--chunk", chunk] if chunk else [])]
    trace = captured(path, tmp_path / "t.h5", *options)
    assert trace["/@version"] == 2
    given: dict[int, np.ndarray] = {}
    biases: dict[int, Any] = {}
    model = as_defined(path)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            biases[module.layer_idx] = 0 if module.o_proj.bias is None else module.o_proj.bias.detach().numpy()

            def keep(module: torch.nn.Module, inputs: tuple, output: tuple) -> None:
                given[module.layer_idx] = output[0][0].detach().double().numpy()

            module.register_forward_hook(keep)
    with torch.inference_mode():
        decoder(model)(torch.tensor(trace["/tokens/ids"][None].astype(np.int64)), use_cache=False)
    for layer in range(trace.layers):
        wo = trace[f"/layers/{layer:03d}/wo"].astype(np.float64)
        found = outputs(trace, layer) @ wo.T + biases[layer]
        np.testing.assert_allclose(found, given[layer], rtol=0, atol=2e-4 * np.abs(given[layer]).max())


def test_what_is_stored(folder: Callable[[str], Path], tmp_path: Path) -> None:
    sinks = captured(folder("gpt_oss"), tmp_path / "a.h5")
    assert np.isfinite(sinks["/model/sinks"]).all() and sinks["/model/sinks"].shape == (4, 4)
    assert sinks["/model/sliding_window"].tolist() == [24, 0, 24, 0]
    latent = captured(folder("deepseek_v3"), tmp_path / "b.h5")
    assert latent["/layers/000/q"].shape == (4, 64, 24) and latent["/layers/000/k"].shape[0::2] == (1, 24)
    assert "/layers/000/v" not in latent
    assert (latent["/model@value_is_key"], latent["/model/rope@offset"]) == (16, 16)
    chunks = captured(folder("llama4"), tmp_path / "c.h5")
    assert chunks["/model/chunk"].tolist() == [32, 0, 32, 0]


def test_latent_bytes_are_those_of_the_models_cache(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = folder("deepseek_v3")
    trace = captured(path, tmp_path / "t.h5", "--generate", "4")
    run = kv.replay(trace, ["full"], [10], metrics=["kv_bytes"])
    with torch.inference_mode():
        cache = as_defined(path)(
            torch.tensor(trace["/tokens/ids"][None, : trace.prompt].astype(np.int64))
        ).past_key_values
    own = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    rows = run.results[(run.results["metric"] == "kv_bytes") & (run.results["layer"] == "all")]
    [found] = set(rows[(rows["label"] == "full") & (rows["head"] == "all")]["value"])
    assert found == own


def test_evicted_tokens_are_masked_keys_of_gpt_oss(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Errors of a replay are those of GptOssForCausalLM's eager attention with evicted keys masked."""
    trace = captured(folder("gpt_oss"), tmp_path / "t.h5", "--generate", "6")
    metrics = ["output_error", "attention_l1"]
    run = kv.replay(trace, ["snapkv:window=4", "random"], [20], metrics=metrics, sliding="treat")
    table = run.results[run.results["head"] == "all"].set_index(["cell", "metric", "variant", "layer"])["value"]
    for cell in run.cells["cell"]:
        kept = run.selection_of(cell, trace.prompt).mask()
        for layer in range(trace.layers):
            q, k, v = (
                torch.tensor(x.astype(np.float32))[None] for x in (trace.q(layer), trace.k(layer), trace.v(layer))
            )
            module = SimpleNamespace(num_key_value_groups=2, training=False,
                                     sinks=torch.tensor(trace["/model/sinks"][layer], dtype=torch.float32))  # fmt: skip
            t = torch.arange(trace.prompt, trace.tokens)[:, None]
            j = torch.arange(trace.tokens)[None]
            window = int(trace["/model/sliding_window"][layer])
            seen = (j <= t) & ((j > t - window) if window else True)
            held = torch.ones(len(kept[layer]), trace.tokens, dtype=torch.bool)
            held[:, : trace.prompt] = torch.tensor(kept[layer])
            found = []
            for visible in (seen[None], seen[None] & held.repeat_interleave(4 // len(held), 0)[:, None]):
                mask = torch.where(visible, 0.0, -torch.inf)[None]
                found.append(eager_attention_forward(module, q[:, :, trace.prompt :], k, v, mask,
                                                     trace["/model@softmax_scale"]))  # fmt: skip
            (whole, weights), (evicted, kept_weights) = found
            error = (whole - evicted).norm(dim=-1) / whole.norm(dim=-1)
            difference = (weights - kept_weights).abs().sum(-1)
            expected = {"output_error": float(error.mean()), "attention_l1": float(difference.mean())}
            for metric, value in expected.items():
                assert table[cell, metric, "", str(layer)] == pytest.approx(value, abs=2e-6), (cell, layer, metric)


def test_queries_of_latent_attention(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """By default the last 64 of the prompt."""
    path = folder("minicpm3")
    some = captured(path, tmp_path / "a.h5", "--generate", "2")
    assert some["/layers/000/q_positions"].tolist() == list(range(some.prompt - 64, some.tokens))
    every = captured(path, tmp_path / "b.h5", "--generate", "2", "--queries", "all")
    assert every.q(0).shape[1] == every.tokens


def test_gates_have_no_output_projection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Qwen3NextConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=1, layer_types=["full_attention"] * 4
    )
    build(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    captured(tmp_path / "model", tmp_path / "a.h5")
    words = ["--model", str(tmp_path / "model"), "--prompt", "A few words", "-o", str(tmp_path / "b.h5"), "--with-wo"]
    assert main(words) == 3
    assert "--with-wo: layer 0 changes the output of attention before its projection" in capsys.readouterr().err


@pytest.mark.parametrize("chunk", ["", "20"], ids=["one_pass", "chunks"])
def test_native_selection(chunk: str, tmp_path: Path) -> None:
    """The tokens that the indexer selects; `--verify` has recomputed outputs from these alone."""
    config = transformers.DeepseekV32Config(
        **LATENT, **EXPERTS, first_k_dense_replace=2, index_n_heads=2, index_head_dim=16, index_topk=12
    )
    build(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    options = ["--generate", "4", "--queries", "all", "--verify", *(["--chunk", chunk] if chunk else [])]
    trace = captured(tmp_path / "model", tmp_path / "t.h5", *options)
    for layer in range(trace.layers):
        units = trace[f"/layers/{layer:03d}/visible"]
        assert units.shape == (1, trace.tokens, 12)
        assert ((units >= 0).sum(2)[0] == np.minimum(np.arange(trace.tokens) + 1, 12)).all()
    run = kv.replay(trace, ["native"], [20], metrics=["attention_recall"])
    rows = run.results[(run.results["label"] == "native") & (run.results["metric"] == "attention_recall")]
    recall = rows[(rows["variant"].fillna("") == "") & (rows["head"] == "all")]["value"]
    assert 0 < recall.min() and recall.max() < 1
    config.index_topk = 200
    build(config).save_pretrained(tmp_path / "model")
    assert "/layers/000/visible" not in captured(tmp_path / "model", tmp_path / "u.h5", *options)


@pytest.mark.parametrize("name", ["minicpm3", "qwen3-next"])
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic traces of other architectures, with the heads of their checkpoints."""
    families = runpy.run_path(str(Path(__file__).resolve().parents[2] / "traces" / "families.py"))
    monkeypatch.setattr(sys, "argv", ["families.py", name, "-o", str(tmp_path)])
    assert families["main"]() == 0
    trace = Trace(tmp_path / f"{name}.h5")
    assert trace.synthetic and trace.prompt == 512 and trace.tokens == 528
    assert (trace.query_heads, trace.kv_heads) == {"minicpm3": (40, 1), "qwen3-next": (16, 2)}[name]
    run = kv.replay(trace, ["snapkv:window=8", "knorm"], [0.2])
    assert run.table().startswith("trace ")


def test_shared_keys_and_values(tmp_path: Path) -> None:
    """Readers have queries alone. Their outputs are verified with the keys and values of their sources."""
    sizes = {**SIZES, "num_hidden_layers": 6, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
    kinds = ["sliding_attention", "full_attention"] * 3
    config = transformers.Gemma3nTextConfig(
        **{**sizes, "intermediate_size": 64}, head_dim=16, num_kv_shared_layers=2, sliding_window=24, layer_types=kinds,
        laurel_rank=4, activation_sparsity_pattern=[0.0] * 6,
    )  # fmt: skip
    build(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    trace = captured(tmp_path / "model", tmp_path / "t.h5", "--generate", "4", "--verify")
    assert trace["/model/kv_source"].tolist() == [0, 1, 2, 3, 2, 3]
    assert "/layers/003/k" in trace and "/layers/004/k" not in trace and "/layers/005/v" not in trace
    chunks = captured(tmp_path / "model", tmp_path / "c.h5", "--generate", "4", "--verify", "--chunk", "20")
    np.testing.assert_allclose(chunks["/layers/003/k"], trace["/layers/003/k"], atol=1e-4)
    run = kv.replay(trace, ["snapkv:window=4", "h2o"], [0.3], sliding="treat")
    assert set(run.results["layer"].astype(str)) == {"all", "0", "1", "2", "3"}
