"""Does capture find which layers rotate, in every type, and does it say so when keys cannot tell?"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import LOCAL_AND_GLOBAL, SIZES, build, character_tokenizer

from kvreplay.capture.command import main
from kvreplay.capture.probe import probe
from kvreplay.capture.rope import Frequencies, Rope, identify, produced_deviation, rotate
from kvreplay.errors import Error
from kvreplay.trace import Trace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROMPTS = ("The heron stood in the shallow water.", "A key " * 12, "7 + 35 = 42, and 42 - 7 = 35; " * 7)
THETA = 1e7
QUIET = 0.03  # fast pairs of keys beside slow ones: SmolLM2-135M's layer 28 moves by 0.05 of its largest component


def rope_parameters(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


WITH_HEADS = {**SIZES, "head_dim": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**WITH_HEADS, rope_parameters=rope_parameters(THETA)),
    "gemma3": transformers.Gemma3TextConfig(
        **WITH_HEADS,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL,
        rope_parameters={
            "sliding_attention": rope_parameters(1e3),
            "full_attention": rope_parameters(THETA),
        },
    ),
    "smollm3": transformers.SmolLM3Config(
        **WITH_HEADS, no_rope_layers=[1, 0, 1, 1], rope_parameters=rope_parameters(THETA)
    ),
    "smollm3_without": transformers.SmolLM3Config(
        **WITH_HEADS, no_rope_layers=[0, 0, 0, 0], rope_parameters=rope_parameters(THETA)
    ),
}


def theta_of(name: str, layer: int) -> float | None:
    """The base of a layer's frequencies; None: the layer does not rotate."""
    config = CONFIGS[name]
    if name.startswith("smollm3"):
        return THETA if config.no_rope_layers[layer] else None
    return 1e3 if name == "gemma3" and LOCAL_AND_GLOBAL[layer] == "sliding_attention" else THETA


def with_quiet_fast_pairs(name: str) -> Any:
    """A model whose keys hardly move with position, as those of real models: their fast pairs are small."""
    model = build(CONFIGS[name])
    loudness = torch.where(torch.arange(8) < 4, QUIET, 1.0).repeat(2)
    with torch.no_grad():
        for block in model.model.layers:
            attention = block.self_attn
            if hasattr(attention, "k_norm"):
                attention.k_norm.weight.copy_(loudness - 1.0)
            else:
                attention.k_proj.weight.mul_(loudness.repeat(2)[:, None])
    return model


@pytest.fixture(scope="module")
def quiet_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """quiet_folder("llama") -> its folder; each model is saved once."""

    @cache
    def folder(name: str) -> Path:
        made = tmp_path_factory.mktemp(name)
        with_quiet_fast_pairs(name).save_pretrained(made)
        character_tokenizer().save_pretrained(made)
        return made

    return folder


def probed(folder: Path, dtype: torch.dtype, prompt: str) -> Rope | None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = character_tokenizer()(prompt).input_ids
    return probe(model, folder.name, ids[0], len(ids) - 1)[1]


@pytest.mark.parametrize("prompt", PROMPTS, ids=("sentence", "words", "digits"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_rotate_as_their_configuration_says(
    name: str, dtype: torch.dtype, prompt: str, quiet_folder: Callable[[str], Path]
) -> None:
    rope = probed(quiet_folder(name), dtype, prompt)
    thetas = [theta_of(name, layer) for layer in range(SIZES["num_hidden_layers"])]
    if not any(thetas):
        assert rope is None
        return
    assert rope is not None and rope.style == "halves"
    expected = [np.zeros(8) if theta is None else theta ** -(np.arange(8) / 8) for theta in thetas]
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=2e-6)


def test_capture_reports_rotating_layers_and_the_margin(
    quiet_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.h5"
    words = ["--model", str(quiet_folder("smollm3")), "--prompt", PROMPTS[2], "--dtype", "bfloat16", "-o", str(trace)]
    assert main([*words, "--progress", "never"]) == 0
    assert np.any(Trace(trace)["/model/rope/inv_freq"], axis=1).tolist() == [True, False, True, True]
    line = re.search(
        r" rope 3 of 4 layers have RoPE; smallest margin in layer [023]: error (\S+), next best RoPE (\S+) verify ",
        " ".join(capsys.readouterr().out.split()),
    )
    assert line and 2 * float(line[1]) < float(line[2]) < 0.1


def identified(keys: np.ndarray, moved: np.ndarray, candidates: list[Frequencies]) -> Rope | None:
    return identify("tiny", candidates, lambda position: [moved if position else keys], 40, 2.0**-9)


def test_keys_that_fit_two_rotations_about_as_well_are_refused() -> None:
    keys = np.random.default_rng(0).normal(size=(2, 16))
    slow = Frequencies(1e-3 ** (np.arange(8) / 8), 1.0)
    close = Frequencies(slow.inv_freq * (1 + 2e-4), 1.0)
    between = rotate(keys, 40 * slow.inv_freq * (1 + 9e-5), "halves")
    message = r"layer 0: keys that fit two rotations about as well \(errors .+ and .+\)"
    with pytest.raises(Error, match=message) as refusal:
        identified(keys, between, [slow, close])
    assert "--dtype float32" in str(refusal.value)
    assert refusal.value.exit_code == 3


def test_keys_that_hardly_move_are_not_called_unmoved() -> None:
    """A rotation that no candidate describes may be weak; a layer without one gives the same bits."""
    keys = np.random.default_rng(1).normal(size=(2, 16))
    strange = rotate(keys, np.full(8, 0.02), "halves")
    with pytest.raises(Error, match="layer 0: keys that its RoPE does not explain"):
        identified(keys, strange, [Frequencies(np.ones(8), 1.0)])
    with pytest.raises(Error, match="keys rotated by unknown frequencies"):
        identified(keys, strange, [])


def test_each_axis_of_multimodal_rope_is_compared() -> None:
    """Rotary modules may give a row for each of time, height and width, [3,1,1,d]."""
    one = Frequencies(1e4 ** -(np.arange(4) / 4), 1.0)
    angles = np.tile(7 * one.inv_freq, 2)
    rows = np.tile(angles, (3, 1, 1, 1))
    assert produced_deviation([one], [(np.cos(rows), np.sin(rows))], 7) == 0
    rows[1] *= 2
    assert produced_deviation([one], [(np.cos(rows), np.sin(rows))], 7) > 0.1
