"""Is a trace what the model's attention saw, for every kind of model, and is the model left as it is?"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, LOCAL_AND_GLOBAL, SIZES

from kvreplay.capture.command import main
from kvreplay.capture.model import decoder, load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.capture.observe import LayerCall, observed
from kvreplay.trace import Trace

Folder = Callable[..., Path]
PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
GENERATED = 6
PAIRS = {"phi3": 3, "glm": 4, "smollm3": 6}  # rotated pairs; 8 = d/2 elsewhere


def captured(folder: Path, out: Path, *options: str) -> Trace:
    words = ["--model", str(folder), "-o", str(out), "--progress", "never", *options]
    assert main(words if "--prompt" in options or "--prompts" in options else [*words, "--prompt", PROMPT]) == 0
    return Trace(out)


def as_defined(folder: Path) -> Any:
    """The model with eager attention: sdpa may leave out a softcap without a word."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def window_of(name: str, layer: int) -> int:
    if name == "mistral":
        return 24
    return 24 if name in ("gemma2", "gemma3") and LOCAL_AND_GLOBAL[layer] == "sliding_attention" else 0


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, softcap: float, window: int) -> np.ndarray:
    """The definition, one query at a time, float64: [Hq,T,d] -> [T, Hq*d]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    output = np.empty_like(q)
    for head in range(q.shape[0]):
        for t in range(q.shape[1]):
            begin = max(0, t - window + 1) if window else 0
            logits = scale * k[head // group, begin : t + 1] @ q[head, t]
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max())
            output[head, t] = weights / weights.sum() @ v[head // group, begin : t + 1]
    return output.transpose(1, 0, 2).reshape(q.shape[1], -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_that_generates_is_as_defined(name: str, model_folder: Folder) -> None:
    folder = model_folder(name)
    loaded, _ = load(ModelChoices(str(folder)))
    ids = torch.arange(3, 3 + 90)[None] % 120
    with torch.inference_mode():
        found, expected = (model(ids, use_cache=False).logits for model in (loaded, as_defined(folder)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_same_bits_with_capture_on(name: str, model_folder: Folder) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(name)).eval()
    ids = torch.arange(3, 3 + 90)[None] % 120
    softcapped = name == "gemma2"  # sdpa has no softcap
    model.set_attn_implementation("eager" if softcapped else "sdpa")
    with torch.inference_mode():
        off = model(ids, use_cache=False).logits
        seen: list[LayerCall] = []
        with observed(model, name, seen.append):
            on = model(ids, use_cache=False).logits
        off_again = model(ids, use_cache=False).logits
    assert [call.layer for call in seen] == [0, 1, 2, 3]
    assert torch.equal(off, off_again)
    if softcapped:
        torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(on, off)


@pytest.mark.parametrize("name", CONFIGS)
def test_trace_reproduces_what_the_attention_modules_gave(name: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder(name)
    trace = captured(folder, tmp_path / "t.h5", "--generate", str(GENERATED), "--with-wo", "--verify")
    kv_heads = 1 if name in ("one_kv_head", "gpt_bigcode") else 2
    width = 12 if name in ("phi3", "smollm3", "gpt_bigcode") else 16
    assert (trace.prompt, trace.tokens) == (len(PROMPT), len(PROMPT) + GENERATED)
    assert trace.layers == SIZES["num_hidden_layers"]

    model = as_defined(folder)
    given: dict[int, np.ndarray] = {}
    biases: dict[int, np.ndarray] = {}
    for module in model.modules():
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention"):
            projection = getattr(module, "o_proj", None) or module.c_proj
            biases[module.layer_idx] = 0.0 if projection.bias is None else projection.bias.detach().numpy()

            def keep(module: torch.nn.Module, inputs: tuple, output: tuple) -> None:
                given[module.layer_idx] = output[0][0].detach().double().numpy()

            module.register_forward_hook(keep)
    with torch.inference_mode():
        decoder(model)(torch.tensor(trace["/tokens/ids"][None].astype(np.int64)), use_cache=False)

    for layer in range(trace.layers):
        q, k, v, wo = (trace[f"/layers/{layer:03d}/{tensor}"] for tensor in ("q", "k", "v", "wo"))
        assert q.shape == (4, trace.tokens, width)
        assert k.shape == v.shape == (kv_heads, trace.tokens, width)
        assert trace["/model/sliding_window"][layer] == window_of(name, layer)
        scale, softcap = trace.attribute("/model", "softmax_scale"), trace.attribute("/model", "logit_softcap")
        found = attention(q, k, v, scale, softcap, window_of(name, layer)) @ wo.astype(np.float64).T + biases[layer]
        np.testing.assert_allclose(found, given[layer], rtol=0, atol=2e-4 * np.abs(given[layer]).max())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_bigcode"])
def test_rope_data_turns_keys_back(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """A text of one letter: the first layer's keys differ by their rotation alone, and turned back they are equal."""
    trace = captured(model_folder(name), tmp_path / "t.h5", "--prompt", "a" * 60)
    inv_freq = trace["/model/rope/inv_freq"]
    style = trace.attribute("/model/rope", "style")
    assert style == ("interleaved" if name == "glm" else "halves")
    assert inv_freq.shape == (4, PAIRS.get(name, 8))
    r = inv_freq.shape[1]
    for layer in range(4) if name == "smollm3" else range(1):
        rotates = layer in (0, 2) or name != "smollm3"
        assert np.any(inv_freq[layer]) == rotates
    keys = trace["/layers/000/k"].astype(np.float64)
    angles = np.arange(60)[:, None] * inv_freq[0]
    first, second = (slice(0, r), slice(r, 2 * r)) if style == "halves" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
    pairs = (keys[..., first] + 1j * keys[..., second]) * np.exp(-1j * angles)
    np.testing.assert_allclose(pairs, np.broadcast_to(pairs[:, :1], pairs.shape), atol=2e-4 * np.abs(pairs).max())
    rest = keys[..., 2 * r :]
    np.testing.assert_allclose(rest, np.broadcast_to(rest[:, :1], rest.shape), atol=1e-4)
    expected = {"llama_yarn": 0.1 * math.log(4.0) + 1.0}.get(name, 1.0)
    np.testing.assert_allclose(trace["/model/rope/attention_scaling"], expected)


def test_local_and_global_layers_have_their_own_frequencies(model_folder: Folder, tmp_path: Path) -> None:
    trace = captured(model_folder("gemma3"), tmp_path / "t.h5")
    pair = np.arange(8) / 8
    for layer, kind in enumerate(LOCAL_AND_GLOBAL):
        expected = 100.0**-pair if kind == "sliding_attention" else 10000.0**-pair / 2
        np.testing.assert_allclose(trace["/model/rope/inv_freq"][layer], expected, rtol=1e-5)


def test_absolute_positions_have_no_rope(model_folder: Folder, tmp_path: Path) -> None:
    assert "/model/rope/inv_freq" not in captured(model_folder("gpt_bigcode"), tmp_path / "t.h5")


def test_generated_and_forced_continuation_give_the_same_trace(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    generated = captured(folder, tmp_path / "generated.h5", "--generate", "9")
    text = tmp_path / "continuation.txt"
    text.write_text(generated.text[len(PROMPT) :], "utf-8")
    forced = captured(folder, tmp_path / "forced.h5", "--continuation", str(text))
    assert forced.tokens == len(PROMPT) + 9
    np.testing.assert_array_equal(generated["/tokens/ids"], forced["/tokens/ids"])
    for layer in range(4):
        for tensor in "qkv":
            path = f"/layers/{layer:03d}/{tensor}"
            np.testing.assert_array_equal(generated[path], forced[path])


def test_generation_is_greedy_and_exactly_as_long_as_asked(model_folder: Folder, tmp_path: Path) -> None:
    trace = captured(model_folder("one_kv_head"), tmp_path / "t.h5", "--generate", "12")
    ids = torch.tensor(trace["/tokens/ids"].astype(np.int64))
    assert trace.tokens == len(PROMPT) + 12
    model = as_defined(model_folder("one_kv_head"))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].clone()
        logits[:, SIZES["eos_token_id"]] = -torch.inf  # end of text is not chosen
    assert torch.equal(logits.argmax(-1)[len(PROMPT) - 1 : -1], ids[len(PROMPT) :])


def test_partial_queries_and_chosen_layers_are_rows_of_the_whole(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("mistral")
    whole = captured(folder, tmp_path / "whole.h5", "--generate", "3")
    part = captured(
        folder, tmp_path / "part.h5", "--generate", "3", "--queries", "last:5", "--layers", "1,3", "--verify"
    )
    assert part["/model/layer_index"].tolist() == [1, 3]
    expected = np.arange(len(PROMPT) - 5, len(PROMPT) + 3)
    for number, layer in enumerate((1, 3)):
        np.testing.assert_array_equal(part.query_positions(number), expected)
        np.testing.assert_array_equal(part[f"/layers/{number:03d}/q"], whole[f"/layers/{layer:03d}/q"][:, expected])
        np.testing.assert_array_equal(part[f"/layers/{number:03d}/k"], whole[f"/layers/{layer:03d}/k"])


@pytest.mark.parametrize("store", ["float16", "bfloat16", "float32"])
def test_stored_type_is_the_models_own_unless_asked(store: str, model_folder: Folder, tmp_path: Path) -> None:
    exact = captured(model_folder("qwen3"), tmp_path / "exact.h5")
    rounded = captured(model_folder("qwen3"), tmp_path / "rounded.h5", "--store-dtype", store, "--verify")
    computed = captured(model_folder("qwen3"), tmp_path / "computed.h5", "--dtype", store)
    assert exact["/layers/000/k"].dtype == np.float32
    assert rounded["/layers/000/k"].dtype.name == computed["/layers/000/k"].dtype.name == store
    assert rounded.attribute("/model", "dtype") == "float32"
    assert computed.attribute("/model", "dtype") == store
    expected = exact["/layers/002/q"].astype(rounded["/layers/002/q"].dtype)
    np.testing.assert_array_equal(rounded["/layers/002/q"], expected)
