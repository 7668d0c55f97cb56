"""Are the layers of models whose layers differ, multimodal models and hybrids captured as the models compute them?

Each capture recomputes the attention outputs of all queries from the trace (--verify); the tests check the header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tiny_models import LOCAL_AND_GLOBAL, SIZES, build, character_tokenizer

import kvreplay as kv
from kvreplay.capture.command import main
from kvreplay.engine import program
from kvreplay.trace import Trace

PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
WITH_HEADS = {**SIZES, "head_dim": 16}
THETA = 1e4
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
IMAGE = character_tokenizer()("#").input_ids[0]  # a character that stands for an image
PERIODIC = ["linear_attention", "full_attention"] * 2


def rope(pairs: int) -> np.ndarray:
    return THETA ** -(np.arange(pairs) / pairs)


def multimodal_rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": THETA, **more}


# Head dimension and rope_parameters of the checkpoints, apart from the base.
QWEN3_5 = {
    **SIZES,
    "head_dim": 256,
    "layer_types": PERIODIC,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": multimodal_rope(mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25),
}
MULTIMODAL: dict[str, tuple[transformers.PretrainedConfig, list[int], int]] = {  # layers with attention, rotated pairs
    "qwen3_5": (
        transformers.Qwen3_5Config(text_config=QWEN3_5, vision_config=VISION, image_token_id=IMAGE),
        [1, 3],
        32,
    ),
    "qwen2_vl": (
        transformers.Qwen2VLConfig(
            text_config={**SIZES, "rope_parameters": multimodal_rope(mrope_section=[2, 2, 2])},
            vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": SIZES["hidden_size"]},
            image_token_id=IMAGE,
        ),
        [0, 1, 2, 3],
        6,
    ),
    "qwen3_vl": (
        transformers.Qwen3VLConfig(
            text_config={**WITH_HEADS, "rope_parameters": multimodal_rope(mrope_section=[4, 2, 2])},
            vision_config={**VISION, "out_hidden_size": SIZES["hidden_size"], "deepstack_visual_indexes": [0]},
            image_token_id=IMAGE,
        ),
        [0, 1, 2, 3],
        8,
    ),
    "glm4v": (
        transformers.Glm4vConfig(
            text_config={
                **WITH_HEADS,
                "rope_parameters": multimodal_rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
            },
            vision_config={**VISION, "out_hidden_size": SIZES["hidden_size"]},
            image_token_id=IMAGE,
        ),
        [0, 1, 2, 3],
        4,
    ),
}


def saved(config: transformers.PretrainedConfig, folder: Path) -> Path:
    build(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def captured(folder: Path, out: Path, *options: str, prompt: str = PROMPT) -> Trace:
    words = ["--model", str(folder), "-o", str(out), "--progress", "never", "--verify", "--prompt", prompt, *options]
    assert main(words) == 0
    return Trace(out)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_multimodal_rope_of_a_text_is_rope(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, layers, pairs = MULTIMODAL[name]
    folder = saved(config, tmp_path / "model")
    trace = captured(folder, tmp_path / "t.h5", "--generate", "5")
    assert trace["/model/layer_index"].tolist() == layers
    np.testing.assert_allclose(trace["/model/rope/inv_freq"], np.tile(rope(pairs), (len(layers), 1)), rtol=1e-6)
    capsys.readouterr()
    words = ["--model", str(folder), "-o", str(tmp_path / "image.h5"), "--progress", "never"]
    assert main([*words, "--prompt", "An image: #"]) == 3
    message = "prompt: images, videos or sound: expected text only, found a token image_token_id"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "image.h5").exists()


GEMMA4 = transformers.Gemma4TextConfig(
    **{**SIZES, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=24,
    layer_types=LOCAL_AND_GLOBAL,
)


def test_layers_of_gemma_4(tmp_path: Path) -> None:
    """Full layers have other head dimensions, KV heads and frequencies than layers with a window."""
    folder = saved(GEMMA4, tmp_path / "model")
    full = captured(folder, tmp_path / "full.h5", "--layers", "full", "--generate", "3")
    assert full["/model/layer_index"].tolist() == [1, 3]
    assert (full.kv_heads, full.head_dim, full["/model/sliding_window"].tolist()) == (1, 32, [0, 0])
    local = captured(folder, tmp_path / "local.h5", "--layers", "0,2", "--generate", "3")
    assert (local.kv_heads, local.head_dim, local["/model/sliding_window"].tolist()) == (2, 16, [24, 24])
    assert full["/model/rope/inv_freq"].shape == (2, 16) and local["/model/rope/inv_freq"].shape == (2, 8)
    every = captured(folder, tmp_path / "all.h5", "--generate", "3", "--verify")
    assert every["/model/heads"].tolist() == [[4, 2], [4, 1]] * 2
    assert every["/model/head_dims"].tolist() == [[16, 16], [32, 32]] * 2
    assert every["/model/rope/pairs"].tolist() == [8, 16] * 2
    assert np.array_equal(every.k(1), full.k(0)) and np.array_equal(every.k(2), local.k(1))
    run = kv.replay(every, ["snapkv:window=4", "h2o"], [0.3], sliding="treat")
    assert np.isfinite(run.results["value"][run.results["metric"] == "attention_cosine"]).any()


LLAMA4 = transformers.Llama4TextConfig(
    **WITH_HEADS,
    attention_chunk_size=64,
    intermediate_size_mlp=64,
    num_local_experts=2,
    layer_types=["chunked_attention", "full_attention"] * 2,
    no_rope_layers=[1, 0] * 2,
)


def test_chunked_attention_is_causal_within_a_chunk(tmp_path: Path) -> None:
    folder = saved(LLAMA4, tmp_path / "model")
    trace = captured(folder, tmp_path / "t.h5", prompt=PROMPT[:64])
    assert (trace.tokens, trace["/model/sliding_window"].tolist()) == (64, [0] * 4)
    assert trace["/model/rope/inv_freq"].any(axis=1).tolist() == [True, False] * 2
    full = captured(folder, tmp_path / "full.h5", "--layers", "full", prompt=PROMPT[:65])
    assert full["/model/layer_index"].tolist() == [1, 3]
    assert "/model/chunk" not in trace and "/model/chunk" not in full
    longer = captured(folder, tmp_path / "long.h5", prompt=PROMPT[:65])
    assert longer["/model/chunk"].tolist() == [64, 0] * 2


HYBRIDS: dict[str, tuple[transformers.PretrainedConfig, list[dict[str, Any]]]] = {
    # Layers with recurrences: d_inner = 96 channels, a convolution over 4 tokens and 16 numbers a channel.
    "jamba": (
        transformers.JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
        [{"kind": "linear_attention", "layers": [0, 2], "bytes": 4 * (96 * 4 + 96 * 16)}],
    ),
    # 2 heads of queries and keys and 4 of values, of 8 components each; the state is [4, 8, 8].
    "qwen3_next": (
        transformers.Qwen3NextConfig(
            **{key: value for key, value in QWEN3_5.items() if key != "rope_parameters"},
            num_experts=4,
            num_experts_per_tok=1,
        ),
        [{"kind": "linear_attention", "layers": [0, 2], "bytes": 4 * ((2 * 16 + 32) * 4 + 4 * 8 * 8)}],
    ),
    # Attention and recurrences in every layer.
    "falcon_h1": (
        transformers.FalconH1Config(
            **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
        ),
        [{"kind": "hybrid", "layers": [0, 1, 2, 3], "bytes": 4 * ((32 + 2 * 8) * 4 + 4 * 8 * 8)}],
    ),
    "llama": (transformers.LlamaConfig(**SIZES), []),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_other_state_of_hybrids(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, states = HYBRIDS[name]
    trace = captured(saved(config, tmp_path / "model"), tmp_path / "t.h5")
    assert ("/model@other_state" in trace) == bool(states)
    assert trace["/@version"] == 1
    capfd.readouterr()
    assert program(["info", str(trace.path), "--json", "--no-estimate"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["other_state"] == states
    assert program(["info", str(trace.path), "--no-estimate"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("other state")]
    assert len(lines) == len(states)
    if name == "jamba":
        assert lines[0].split(maxsplit=2)[2] == "linear_attention  7.5 KiB of each of 2 layers: 0, 2"


def test_layers_that_a_model_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(transformers.MistralConfig(**WITH_HEADS, sliding_window=24), tmp_path / "model")
    words = ["--model", str(folder), "--prompt", PROMPT, "-o", str(tmp_path / "t.h5"), "--progress", "never"]
    assert main([*words, "--layers", "full"]) == 2
    assert "--layers full: no such layer: expected a model with full attention" in capsys.readouterr().err
    hybrid = saved(HYBRIDS["jamba"][0], tmp_path / "hybrid")
    assert main(["--model", str(hybrid), *words[2:], "--layers", "0"]) == 2
    assert "--layers: no such layer: expected layers of this model with attention, found 0" in capsys.readouterr().err
