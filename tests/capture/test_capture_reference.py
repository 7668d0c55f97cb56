"""Do the reference distributions and the norms of layer inputs agree with the model's own logits and hidden states?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, SIZES

import kvreplay as kv
from kvreplay.capture.command import main
from kvreplay.capture.model import decoder
from kvreplay.engine import program
from kvreplay.errors import Error
from kvreplay.trace import Trace, TraceWriter

Folder = Callable[..., Path]
PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."


def captured(folder: Path, out: Path, *options: str) -> Trace:
    words = ["--model", str(folder), "--prompt", PROMPT, "-o", str(out), "--progress", "never", *options]
    assert main(words) == 0
    return Trace(out)


def as_defined(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("options", [[], ["--chunk", "33"], ["--chunk", "94"]])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_bigcode"])
def test_reference_lists_the_models_own_distributions(
    name: str, options: list[str], model_folder: Folder, tmp_path: Path
) -> None:
    """gemma2 caps its logits; a chunk that ends with the prompt (94) holds one distribution of the seven."""
    trace = captured(model_folder(name), tmp_path / "t.h5", "--generate", "7", "--save-reference", *options)
    ids = torch.tensor(trace["/tokens/ids"][None].astype(np.int64))
    with torch.inference_mode():
        logits = as_defined(model_folder(name))(ids, use_cache=False).logits[0].double()
    expected = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1].numpy()
    listed, values, tail = (trace[f"/reference/{part}"] for part in ("ids", "log_probabilities", "tail"))
    assert listed.shape == values.shape == (7, 64) and tail.shape == (7,)
    assert np.all(np.diff(values, axis=1) <= 0)
    np.testing.assert_allclose(values, np.take_along_axis(expected, listed, 1), atol=2e-4)
    np.testing.assert_allclose(values, np.sort(expected, axis=1)[:, :-65:-1], atol=2e-4)
    np.testing.assert_allclose(np.exp(values.astype(np.float64)).sum(1) + tail, 1, atol=1e-6)
    assert np.all(tail > 0)  # of a vocabulary of 128
    for row, token in zip(listed, ids[0, len(PROMPT) :].tolist(), strict=True):
        assert token == next(number for number in row if number != SIZES["eos_token_id"])


def test_reference_needs_a_continuation(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("llama")
    capsys.readouterr()
    words = ["--model", str(folder), "--prompt", PROMPT, "-o", str(tmp_path / "t.h5"), "--progress", "never"]
    assert main([*words, "--save-reference"]) == 2
    message = (
        "kvreplay: --save-reference: no continuation: expected a continuation (--generate N or --continuation FILE)"
    )
    assert capsys.readouterr().err == f"{message}\n"
    assert "/reference/ids" not in captured(folder, tmp_path / "plain.h5", "--generate", "2")


@pytest.mark.parametrize("name", CONFIGS)
def test_input_norms_are_those_of_the_hidden_states(name: str, model_folder: Folder, tmp_path: Path) -> None:
    trace = captured(model_folder(name), tmp_path / "t.h5", "--layers", "1-3")
    ids = torch.tensor(trace["/tokens/ids"][None].astype(np.int64))
    with torch.inference_mode():
        hidden = as_defined(model_folder(name))(ids, use_cache=False, output_hidden_states=True).hidden_states
    for number, layer in enumerate(range(1, 4)):
        norms = trace[f"/layers/{number:03d}/input_norm"]
        assert norms.dtype == np.float32
        np.testing.assert_allclose(norms, np.linalg.norm(hidden[layer][0].double().numpy(), axis=-1), rtol=2e-5)
    assert trace.problems() == []


def test_damage_to_norms_is_found(model_folder: Folder, tmp_path: Path) -> None:
    captured(model_folder("llama"), tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5") as file:
        offset = file["/layers/002/input_norm"].id.get_offset()
    with open(tmp_path / "t.h5", "r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)
        file.seek(offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    [problem] = Trace(tmp_path / "t.h5").problems()
    assert "/layers/002/input_norm: xxh3" in problem


@pytest.mark.parametrize(
    ("path", "array", "message"),
    [
        ("/layers/000/input_norm", np.ones(5, np.float16), "input_norm: type: expected float32, found float16"),
        ("/layers/000/input_norm", np.ones(4, np.float32), r"input_norm: shape: expected \[5\], found \[4\]"),
        ("/reference/ids", np.ones((3, 64), np.int32), r"ids: shape: expected \[2, K\], found \[3, 64\]"),
        ("/reference/tail", np.array([0.5, 1.5]), "tail: value: expected 0 to 1, found 1.5 at element 1"),
    ],
)
def test_the_writer_refuses_what_the_schema_does_not_allow(
    path: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    with pytest.raises(Error, match=message), TraceWriter(tmp_path / "t.h5") as trace:
        trace.attributes("/tokens", prefill=3)
        trace.dataset("/tokens/ids", np.arange(5, dtype=np.int32))
        trace.dataset(path, array)


@pytest.mark.parametrize("chunk", [[], ["--chunk", "20"]], ids=["one_pass", "chunks"])
def test_hidden_states(
    chunk: list[str], model_folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The inputs of the layers as the model computes them; results of a replay are those without them."""
    folder = model_folder("llama")
    trace = captured(folder, tmp_path / "t.h5", "--generate", "4", "--layers", "1-3", "--with-hidden", *chunk)
    model = as_defined(folder)
    with torch.inference_mode():
        ids = torch.tensor(trace["/tokens/ids"][None].astype(np.int64))
        states = decoder(model)(ids, use_cache=False, output_hidden_states=True).hidden_states
    for layer in range(3):
        x = trace[f"/layers/00{layer}/x"]
        assert x.shape == (trace.tokens, SIZES["hidden_size"])
        np.testing.assert_allclose(x, states[layer + 1][0].numpy(), rtol=0, atol=1e-5 * np.abs(x).max())
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), trace[f"/layers/00{layer}/input_norm"], rtol=1e-6)
    plain = captured(folder, tmp_path / "plain.h5", "--generate", "4", "--layers", "1-3", *chunk)
    runs = [kv.replay(one, "snapkv:window=4", 0.3, metrics="attention_recall,output_error") for one in (trace, plain)]
    values = [run.results["value"].tolist() for run in runs]
    assert values[0] == values[1] and trace.hash != plain.hash
    capfd.readouterr()
    assert program(["validate", "--deep", str(trace.path)]) == 0
    assert program(["diff", str(trace.path), str(plain.path)]) == 1
    assert program(["info", "--no-estimate", str(trace.path)]) == 0
    printed = capfd.readouterr().out
    assert "/layers/002/x" in printed and "q, k, v, input_norm, x" in printed
    with h5py.File(trace.path, "r+") as file:
        file["layers/001/x"][3, 5] = np.nan
    assert program(["validate", "--deep", str(trace.path)]) == 1
    assert "/layers/001/x: number: expected finite numbers, found nan at head 0, position 3" in capfd.readouterr().out
    assert kv.replay(trace.path, "snapkv:window=4", 0.3, metrics="output_error").failed == []  # x is not read
