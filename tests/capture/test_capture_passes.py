"""Are recorded reconstruction passes those that the model computes when it repeats the prompt?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import transformers
from tiny_models import SIZES

import kvreplay as kv
from kvreplay.capture import reconstruction
from kvreplay.capture.command import main
from kvreplay.engine import program
from kvreplay.trace import Span, Trace

Folder = Callable[..., Path]
PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
ROW = {"context": "The ferry leaves at dawn. It returns at noon.", "input": "When does the ferry leave?"}


def captured(folder: Path, out: Path, *options: str) -> Trace:
    words = ["--model", str(folder), "-o", str(out), "--progress", "never", *options]
    assert main(words if "--prompts" in options else [*words, "--prompt", PROMPT]) == 0
    return Trace(out)


def passes_of(trace: Trace) -> list[tuple[list[int], int, int]]:
    """Token ids of each pass, and the prompt tokens [first, last) that it repeats."""
    ids, begin, found = trace["/reconstruction/ids"].tolist(), 0, []
    for end, first, last in trace["/reconstruction/passes"].tolist():
        found.append((ids[begin:end], first, last))
        begin = end
    return found


def largest_attention(model: transformers.PreTrainedModel, trace: Trace) -> list[np.ndarray]:
    """[L][Hq,P]: the largest attention of all queries of the passes, by transformers' eager attention."""
    prompt = trace["/tokens/ids"][: trace.attribute("/reconstruction", "boundary")].tolist()
    largest: list[np.ndarray] = [np.zeros(0)] * trace.layers
    for ids, _, _ in passes_of(trace):
        with torch.inference_mode():
            attentions = model(torch.tensor([prompt + ids]), output_attentions=True, use_cache=False).attentions
        for layer, weights in enumerate(attentions):
            most = weights[0, :, len(prompt) :, : len(prompt)].amax(1).double().numpy()
            largest[layer] = np.maximum(largest[layer], most) if largest[layer].size else most
    return largest


def recomputed(trace: Trace, layer: int) -> np.ndarray:
    """[Hq,P]: the same from the queries and keys of the trace."""
    boundary = trace.attribute("/reconstruction", "boundary")
    q, k = (trace[f"/layers/{layer:03d}/{name}_reconstruction"].astype(np.float64) for name in "qk")
    group = len(q) // len(k)
    scale, cap = (trace.attribute("/model", name) for name in ("softmax_scale", "logit_softcap"))
    window = int(trace["/model/sliding_window"][layer])
    largest, begin = np.zeros((len(q), boundary)), 0
    for ids, _, _ in passes_of(trace):
        end = begin + len(ids)
        keys = np.concatenate([trace.k(layer)[:, :boundary].astype(np.float64), k[:, begin:end]], axis=1)
        z = scale * q[:, begin:end] @ keys.repeat(group, axis=0).transpose(0, 2, 1)
        z = cap * np.tanh(z / cap) if cap else z
        at, key = boundary + np.arange(len(ids))[:, None], np.arange(keys.shape[1])
        z = np.where((key <= at) & ((key > at - window) | (window == 0)), z, -np.inf)
        weights = np.exp(z - z.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        largest = np.maximum(largest, weights[:, :, :boundary].max(axis=1))
        begin = end
    return largest


@pytest.mark.parametrize("kind", ["chunks", "whole"])
@pytest.mark.parametrize("options", [[], ["--chunk", "33"]], ids=["one_pass", "chunked_prefill"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_attention_of_the_passes_is_that_of_the_model(
    name: str, options: list[str], kind: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with sliding windows and softcaps, and queries with a norm; chunks of 40 tokens."""
    monkeypatch.setattr(reconstruction, "CHUNK", 40)
    folder = model_folder(name)
    trace = captured(folder, tmp_path / "t.h5", "--generate", "3", "--reconstruct", kind, *options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for layer, expected in enumerate(largest_attention(model, trace)):
        np.testing.assert_allclose(recomputed(trace, layer), expected, atol=2e-5)
    assert len(passes_of(trace)) == (3 if kind == "chunks" else 1)
    assert trace.problems() == []


def test_texts_of_the_passes(model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have a token for each character."""
    monkeypatch.setattr(reconstruction, "CHUNK", 40)
    trace = captured(model_folder("llama"), tmp_path / "t.h5", "--reconstruct", "chunks")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("llama"))
    ids = trace["/tokens/ids"].tolist()

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    later = "\n\nRepeat the part of the previous context exactly, starting with "
    assert passes_of(trace) == [
        ([*encode("\n\nRepeat the previous context exactly."), *encode("\n"), *ids[:40]], 0, 40),
        ([*encode(later), *ids[32:40], *encode("\n"), *ids[40:80]], 40, 80),
        ([*encode(later), *ids[72:80], *encode("\n"), *ids[80:]], 80, len(ids)),
    ]
    whole = captured(model_folder("llama"), tmp_path / "whole.h5", "--reconstruct", "whole")
    assert passes_of(whole) == [(ids, 0, len(ids))]


def test_a_template_frames_the_passes() -> None:
    ids = [*range(100, 110)]
    made = reconstruction.passes_of("chunks", ids, 8, ("ab", "xyz"), lambda text: [ord(c) for c in text])
    [one] = made.passes
    instruction = [ord(c) for c in reconstruction.INSTRUCTION + "xyz"]
    assert (one.ids, one.first, one.last) == ([*instruction, *ids[2:8]], 2, 8)
    assert (made.boundary, made.tokens, made.longest) == (8, len(one.ids), 8 + len(one.ids))


@pytest.mark.parametrize(("text", "expected"), [("prompt", 9), ("4", 4), ("span:context", 6)])
def test_boundaries(text: str, expected: int) -> None:
    assert reconstruction.boundary_of(text, 9, [Span("context", "context", 1, 6)]) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--reconstruct-at", "5"],
            "--reconstruct-at: no passes: expected --reconstruct chunks or --reconstruct whole",
        ),
        (
            ["--reconstruct", "whole", "--reconstruct-at", "0"],
            "not a boundary: expected prompt, N or span:NAME, found 0",
        ),
        (["--reconstruct", "whole", "--reconstruct-at", "9999"], "9999: expected at most 94 tokens, found 9999"),
        (["--reconstruct", "whole", "--reconstruct-at", "span:x"], "span:x: expected a span of the prompt: none"),
    ],
)
def test_options_that_contradict(
    options: list[str], message: str, model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("llama")
    capsys.readouterr()
    words = ["--model", str(folder), "--prompt", PROMPT, "-o", str(tmp_path / "t.h5"), "--progress", "never"]
    assert main([*words, *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "t.h5").exists()


def test_passes_are_replayed_at_their_boundary(
    model_folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(ROW))
    options = ["--prompts", str(prompts), "--generate", "4", "--reconstruct", "chunks"]
    trace = captured(model_folder("llama"), tmp_path / "t.h5", *options, "--reconstruct-at", "span:context")
    context = next(span for span in trace.spans if span.name == "context")
    assert trace.attribute("/reconstruction", "boundary") == context.end == passes_of(trace)[0][2] < trace.prompt
    for policy in ("kvzip", "kvcompose"):
        assert kv.replay(trace.path, policy, 0.3, boundary="span:context").failed == []
        with pytest.raises(kv.Error, match=f"expected --boundary {context.end}, or a trace captured"):
            kv.replay(trace.path, policy, 0.3)
    plain = captured(model_folder("llama"), tmp_path / "plain.h5", *options[:-2])
    with pytest.raises(
        kv.Error, match="no pass that repeats the prompt for kvzip: expected a trace captured with --rec"
    ):
        kv.replay(plain.path, "kvzip", 0.3)
    capfd.readouterr()
    assert program(["info", "--no-estimate", str(trace.path)]) == 0
    printed = capfd.readouterr().out
    assert f"1 that repeat tokens [0, {context.end})" in printed and "q_reconstruction, k_reconstruction" in printed
    assert program(["diff", str(trace.path), str(plain.path)]) == 1
    assert "/reconstruction/ids" in capfd.readouterr().out


def test_the_rest_of_a_trace_is_the_same(model_folder: Folder, tmp_path: Path) -> None:
    options = ("--generate", "3")
    traces = [
        captured(model_folder("llama"), tmp_path / f"{number}.h5", *options, *more)
        for number, more in enumerate([[], ["--reconstruct", "chunks"]])
    ]
    for path in ("/tokens/ids", *(f"/layers/000/{name}" for name in ("q", "k", "v", "input_norm"))):
        np.testing.assert_array_equal(traces[0][path], traces[1][path])
    assert "/reconstruction/ids" not in traces[0] and traces[0].hash != traces[1].hash
    runs = [kv.replay(trace, "snapkv:window=4", 0.3, metrics="attention_recall") for trace in traces]
    assert runs[0].results["value"].tolist() == runs[1].results["value"].tolist()


def test_texts_that_are_too_long(model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The passes need positions after the prompt."""
    text = "x" * (SIZES["max_position_embeddings"] - 20)
    words = ["--model", str(model_folder("llama")), "--prompt", text, "-o", str(tmp_path / "t.h5")]
    capsys.readouterr()
    assert main([*words, "--progress", "never", "--reconstruct", "whole"]) == 3
    assert "prompt: too long for the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("passes", "/reconstruction/passes: value: expected ascending ends, the last"),
        ("ids", "/reconstruction/ids: value: expected the prompt tokens [0, 94) at the end of pass 0, found others"),
        ("tensor", "/layers/001/k_reconstruction: missing: expected a dataset, found none"),
        ("group", "/layers/000/q_reconstruction: alone: expected /reconstruction/ids beside it, found none"),
    ],
)
def test_damage_is_found(
    damage: str, message: str, model_folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = captured(model_folder("llama"), tmp_path / "t.h5", "--reconstruct", "whole")
    with h5py.File(trace.path, "r+") as file:
        if damage == "passes":
            file["reconstruction/passes"][0, 0] -= 1
        elif damage == "ids":
            file["reconstruction/ids"][5] += 1
        elif damage == "tensor":
            del file["layers/001/k_reconstruction"]
        else:
            del file["reconstruction"]
    capfd.readouterr()
    assert program(["validate", str(trace.path)]) == 1
    assert message in capfd.readouterr().out
