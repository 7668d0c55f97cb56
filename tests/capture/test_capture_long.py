"""Long prompts: is memory linear in the tokens, and is a trace in chunks the trace of one pass?"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, SIZES, build, character_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvreplay.capture.command import main
from kvreplay.capture.observe import observed
from kvreplay.trace import Trace

Folder = Callable[..., Path]
PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."


def long_model(name: str) -> Any:
    """A tiny model that knows 4,096 positions."""
    config = copy.deepcopy(CONFIGS[name])
    config.max_position_embeddings = 4096
    return build(config)


def words(folder: Path, out: Path, *more: str) -> list[str]:
    prompt = [] if "--prompt" in more else ["--prompt", PROMPT]
    return ["--model", str(folder), *prompt, "-o", str(out), "--progress", "never", *more]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        made = operation(*inputs, **(named or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@pytest.mark.parametrize("options", [[], ["--chunk", "1000"]])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_no_tensor_has_tokens_times_tokens_elements(name: str, options: list[str], tmp_path: Path) -> None:
    """Causal layers, windows, and a softcap; the prompt that generates, and the recorded pass."""
    long_model(name).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    tokens = 3000
    with LargestTensor() as largest:
        out = tmp_path / "t.h5"
        assert main(words(tmp_path / "model", out, "--prompt", "a" * (tokens - 2), "--generate", "2", *options)) == 0
    assert Trace(out).tokens == tokens
    assert tokens < largest.elements < tokens * tokens / 4


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_blocks_of_rows_give_the_models_own_outputs(name: str) -> None:
    """700 tokens are three blocks; windows of 24 begin and end inside of them."""
    model = long_model(name)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 120, (1, 700), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with observed(model, name, lambda call: None):
            found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, 7) for name in CONFIGS), ("mistral", 20), ("mistral", 50), ("gemma3", 50)]
)
def test_a_trace_in_chunks_is_that_of_one_pass(name: str, chunk: int, model_folder: Folder, tmp_path: Path) -> None:
    """Chunks shorter and longer than the window of 24, the last of one token (7) or more: within float32 rounding."""
    folder, common = model_folder(name), ["--continuation", str(tmp_path / "more.txt"), "--verify"]
    (tmp_path / "more.txt").write_text("abcde")
    assert main(words(folder, tmp_path / "whole.h5", *common)) == 0
    assert main(words(folder, tmp_path / "chunks.h5", *common, "--chunk", str(chunk))) == 0
    whole, chunks = Trace(tmp_path / "whole.h5"), Trace(tmp_path / "chunks.h5")
    assert chunks.tokens == len(PROMPT) + 5 and chunks.tokens % 7 == 1
    assert chunks.problems() == []
    np.testing.assert_array_equal(chunks["/model/sliding_window"], whole["/model/sliding_window"])
    for layer in range(4):
        for tensor in ("q", "k", "v", "input_norm"):
            expected, found = (trace[f"/layers/{layer:03d}/{tensor}"] for trace in (whole, chunks))
            assert np.max(np.abs(found - expected)) <= 2e-5 * np.max(np.abs(expected))


def test_chunks_hold_the_queries_that_are_asked_for(model_folder: Folder, tmp_path: Path) -> None:
    """Stored queries that begin in the middle of a chunk, and chunks without any."""
    options = ["--generate", "6", "--queries", "last:5", "--layers", "1,3", "--verify"]
    for name, more in (("whole", []), ("chunks", ["--chunk", "25"])):
        assert main(words(model_folder("mistral"), tmp_path / f"{name}.h5", *options, *more)) == 0
    whole, chunks = Trace(tmp_path / "whole.h5"), Trace(tmp_path / "chunks.h5")
    np.testing.assert_array_equal(chunks["/tokens/ids"], whole["/tokens/ids"])
    for layer in range(2):
        np.testing.assert_array_equal(chunks.query_positions(layer), np.arange(len(PROMPT) - 5, len(PROMPT) + 6))
        for tensor in "qkv":
            expected, found = (trace[f"/layers/{layer:03d}/{tensor}"] for trace in (whole, chunks))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_frequencies_that_depend_on_the_length_do_not_change_between_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LongRoPE: chunks within the original length would be rotated as a short text."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    build(transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=rope)).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    assert main(words(tmp_path / "model", tmp_path / "whole.h5")) == 0
    capsys.readouterr()
    assert main(words(tmp_path / "model", tmp_path / "t.h5", "--chunk", "30")) == 3
    assert "RoPE whose frequencies changed in the pass" in capsys.readouterr().err


# Peak memory in KiB above that of the loaded model: a plain pass, a capture, or a short capture.
# (ru_maxrss would count the process that forked.)
PEAK = """
import re, sys
from pathlib import Path
import torch
from kvreplay.capture.capture import Choices, capture
from kvreplay.capture.model import load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.capture.prompts import Prompt
torch.set_num_threads(1)
what, folder, out, tokens = sys.argv[1:]
model, tokenizer = load(ModelChoices(folder))
class Bar:
    update = close = lambda self: None
def run(tokens):
    capture(model, tokenizer, Prompt("p", "a" * tokens), Path(out), Choices("wide", force=True), lambda calls: Bar())
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
if what == "plain":
    with torch.inference_mode():
        model.model(torch.full((1, int(tokens)), 70), use_cache=False)
else:
    run(int(tokens) if what == "capture" else 50)
print(peak() - before)
"""


def test_capture_adds_less_than_three_layers_to_the_models_own_memory(tmp_path: Path) -> None:
    """Six layers of 29 MiB; the trace is six times as large. What a short capture adds is code."""
    tokens, layer = 5000, 12 * 5000 * 128 * 4
    sizes = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    build(transformers.LlamaConfig(**sizes, head_dim=128)).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")

    def peak(what: str) -> int:
        command = [sys.executable, "-c", PEAK, what, str(tmp_path / "model"), str(tmp_path / "t.h5"), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return 1024 * int(done.stdout)

    # On a busy machine a thread may free its buffers late: of two peaks the lower one is what capture needs.
    short, plain, captured = peak("short"), peak("plain"), min(peak("capture"), peak("capture"))
    assert (tmp_path / "t.h5").stat().st_size > 6 * layer
    print(layer, short, plain, captured)
    assert captured - short - plain < 3 * layer, (layer, short, plain, captured)
