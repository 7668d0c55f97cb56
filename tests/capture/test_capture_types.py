"""Are the rotations, the layers and the values of models with rules of their own captured as the models compute them?

Each capture recomputes the attention outputs of all queries from the trace (--verify). The models are those of
model_types.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from model_types import configuration
from tiny_models import build, character_tokenizer
from transformers import AutoModelForCausalLM

import kvreplay as kv
from kvreplay.capture.command import main
from kvreplay.capture.rope import rotate
from kvreplay.errors import Error
from kvreplay.live.passes import Evicted, everything, generate, read
from kvreplay.live.passes import run as run_pass
from kvreplay.trace import Trace

PROMPT = "The heron stood in the shallow water all the morning, and did not move."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folder("llama", key=value) -> a folder with this model, of settings other than those of model_types.py."""

    @cache
    def saved(kind: str, **settings: object) -> Path:
        path = tmp_path_factory.mktemp(kind)
        config = configuration(kind)
        for name, value in settings.items():
            setattr(config, name, value)
        build(config).save_pretrained(path)
        character_tokenizer().save_pretrained(path)
        return path

    return saved


def capture(model: Path, out: Path, *options: str) -> int:
    words = ["--model", str(model), "-o", str(out), "--progress", "never", "--verify", "--prompt", PROMPT]
    return main([*words, "--dtype", "float32", *options])


def captured(model: Path, out: Path, *options: str) -> Trace:
    assert capture(model, out, *options) == 0
    return Trace(out)


@pytest.mark.parametrize(
    "kind, style, sense",
    [("nanochat", "halves", -1), ("gptj", "interleaved", 1), ("codegen", "interleaved", 1),
     ("recurrent_gemma", "halves", 1)],
)  # fmt: skip
def test_rotation(kind: str, style: str, sense: int, folder: Callable[..., Path], tmp_path: Path) -> None:
    """A negative angle, a table of sines, and a recurrent block that begins at position 0."""
    trace = captured(folder(kind), tmp_path / "t.h5")
    frequencies = trace["/model/rope/inv_freq"]
    rotates = frequencies.any(1)
    assert rotates.any() and (np.sign(frequencies[rotates]) == sense).all()
    if kind == "recurrent_gemma":
        return
    # In the first layer, keys of equal tokens are equal apart from the rotation.
    ids = trace["/tokens/ids"].tolist()
    first = next(place for place, token in enumerate(ids) if token in ids[place + 1 :])
    second = ids.index(ids[first], first + 1)
    keys = trace.k(0).astype(np.float64)
    turned = rotate(keys[:, first], (second - first) * frequencies[0], style)
    np.testing.assert_allclose(turned, keys[:, second], atol=1e-5 * np.abs(keys).max())


def test_layers_without_rope_behind_sink_logits(folder: Callable[..., Path], tmp_path: Path) -> None:
    """The weight of a single token depends on rounded logits, so keys of later layers have not the same bits."""
    trace = captured(folder("flint"), tmp_path / "t.h5")
    assert trace["/model/rope/inv_freq"].any(1).tolist() == [False, True] * 2
    assert "/model/sinks" in trace


@pytest.mark.parametrize("kind, layers", [("dory", 6), ("hrm_text", None), ("zamba2", 2)])
def test_modules_that_are_called_several_times(
    kind: str, layers: int | None, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Each call has separate keys and values, so it is a layer. In chunks the cache of the model has the same ones."""
    whole = captured(folder(kind), tmp_path / "whole.h5")
    numbers = whole["/model/layer_index"].tolist()
    assert len(numbers) > 1 and numbers == list(range(layers or len(numbers)))
    chunks = captured(folder(kind), tmp_path / "chunks.h5", "--chunk", "16")
    some = captured(folder(kind), tmp_path / "some.h5", "--layers", "1")
    for layer in numbers:
        np.testing.assert_allclose(chunks.k(layer), whole.k(layer), atol=1e-4 * np.abs(whole.k(layer)).max())
    assert not np.allclose(whole.k(0), whole.k(1), atol=0.1)
    assert np.array_equal(some.k(0), whole.k(1))


def test_output_projection_of_several_calls(folder: Callable[..., Path], tmp_path: Path) -> None:
    trace = captured(folder("zamba2"), tmp_path / "t.h5", "--with-wo")
    assert "/layers/000/wo" in trace and "/layers/001/wo" in trace
    captured(folder("zamba2"), tmp_path / "some.h5", "--layers", "1", "--with-wo")


def test_differential_attention(
    folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two calls with the same queries and keys are one layer with both halves of the values."""
    model = folder("diffllama")
    trace = captured(model, tmp_path / "t.h5", "--generate", "3")
    assert trace["/model/layer_index"].tolist() == [0, 1, 2, 3]
    assert (trace.kv_heads, trace.head_dim, trace.v(0).shape[2]) == (2, 16, 32)
    run = kv.replay(trace, ["snapkv:window=8"], [0.3], metrics=["output_error"])
    assert run.results.query("label == 'snapkv' and metric == 'output_error'")["value"].max() > 0
    assert capture(model, tmp_path / "w.h5", "--with-wo") == 3
    assert "--with-wo: layer 0: output projection: expected one of" in capsys.readouterr().err
    with pytest.raises(Error, match="differential attention"):
        read(AutoModelForCausalLM.from_pretrained(model), "tiny", trace["/tokens/ids"].tolist(), 40)


def test_selection_in_a_mask(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen4-Exp masks the keys that its indexer does not select: complete blocks, and the tokens behind them."""
    trace = captured(folder("qwen4_exp_text"), tmp_path / "t.h5")
    units = trace["/layers/000/visible"]
    assert units.shape == (trace.kv_heads, trace.tokens, 19)
    t = np.arange(trace.tokens)
    complete = (t + 1) // 4
    expected = 4 * np.minimum(complete, 4) + (t + 1) % 4
    assert ((units >= 0).sum(2) == expected).all()


REJECTED = {
    "git": "no attention interface",
    "doge": "ALiBi or other additive bias",
    "deepseek_v4": "compressed entries",
    "gemma4_assistant": "keys and values of another model",
}


@pytest.mark.parametrize("kind", REJECTED)
def test_rejected_by_name(
    kind: str, folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "git":
        model = folder(kind)
    else:
        model = tmp_path / "model"
        configuration(kind).save_pretrained(model)  # no weights: it is rejected before they are read
        character_tokenizer().save_pretrained(model)
    assert capture(model, tmp_path / "t.h5", "--generate", "2") == 3
    assert f"found {REJECTED[kind]}\n" in capsys.readouterr().err


def test_selected_blocks_of_each_head(
    folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder("minimax_m3_vl_text", index_block_size=8, index_topk_blocks=4)
    assert capture(model, tmp_path / "t.h5") == 3
    expected = "a text of at most 8 tokens (--max-tokens), found blocks of keys that each head selects"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["dory", "zamba2"])
def test_passes_of_the_live_model_number_layers_alike(kind: str, folder: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder(kind)).eval()
    ids = character_tokenizer()(PROMPT).input_ids
    text = read(model, "tiny", ids, len(ids) - 4)
    assert list(text.layers) == list(range(6 if kind == "dory" else 2))
    run = run_pass(model, text, Evicted.behind_prompt(text, [everything(text)]))
    if kind == "dory":  # without the other state of a hybrid, a pass behind the prompt has no equal
        torch.testing.assert_close(run.log_probabilities[0], text.own, atol=1e-4, rtol=1e-4)
    assert len(generate(model, text, [everything(text)], 3)[0]) == 3
