"""Scores of the policies that read reconstruction passes, and the passes of synthetic traces, from the file alone."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from reference import chain

import kvreplay as kv
from kvreplay.program import program

SHAPE = ["--layers", "2", "--prompt", "61", "--continuation", "5", "--query-heads", "4"]


def synthesised(path: Path, *options: str) -> kv.Trace:
    heads = [] if "--kv-heads" in options else ["--kv-heads", "2"]
    shape = [*SHAPE, *heads, "--dtype", "float32", "--reconstruct", "25"]
    words = [*program(), "synth", "gaussian", "-o", path, *shape, *options]
    subprocess.run(words, check=True, capture_output=True)
    return kv.Trace(path)


def largest_attention(trace: kv.Trace, layer: int, sinks: int | None) -> np.ndarray:
    """[Hq,P]: of all queries of the passes. The softmax has the first `sinks` tokens, those that the pass repeats and
    those of the pass; or with None all tokens."""
    base = f"/layers/{layer:03}"
    q, k = (trace[f"{base}/{name}_reconstruction"].astype(np.float64) for name in "qk")
    keys, group, prompt = trace.k(layer).astype(np.float64), len(q) // len(k), trace.prompt
    window, chunk = (
        trace["/model/sliding_window"][layer],
        trace["/model/chunk"][layer] if "/model/chunk" in trace else 0,
    )
    scale, cap = trace["/model@softmax_scale"], trace["/model@logit_softcap"]
    largest, begin = np.zeros((len(q), prompt)), 0
    for end, first, last in trace["/reconstruction/passes"].tolist():
        for head in range(len(q)):
            for i in range(begin, end):
                t = prompt + i - begin
                seen = [j for j in range(prompt) if sinks is None or j < min(sinks, first) or first <= j < last]
                lowest = max(t - window + 1 if window else 0, t // chunk * chunk if chunk else 0)
                own = np.arange(begin, i + 1)
                z = np.concatenate([keys[head // group, seen] @ q[head, i], k[head // group, own] @ q[head, i]]) * scale
                z = cap * np.tanh(z / cap) if cap else z
                position = np.concatenate([seen, prompt + own - begin])
                terms = np.where(position >= lowest, np.exp(z), 0)
                sink = np.exp(trace["/model/sinks"][layer, head]) if "/model/sinks" in trace else 0
                paid = terms[: len(seen)] / (terms.sum() + sink)
                for j, weight in zip(seen, paid, strict=True):
                    if sinks is None or j >= first:
                        largest[head, j] = max(largest[head, j], weight)
        begin = end
    return largest


def scores_of(trace: kv.Trace, policy: str, out: Path) -> np.ndarray:
    """[L,H,P]."""
    run = kv.replay(trace, policy, 20, save="scores", sliding="treat", output=out)
    [cell] = run.cells.loc[run.cells["label"] == policy, "cell"]
    found = run.selection_of(cell, trace.prompt)
    assert found.mask().sum() == found.mask().shape[0] * found.mask().shape[1] * 20
    return run.scores(cell)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--sink-logits"],
        ["--softcap", "2"],
        ["--sliding-window", "30,0"],
        ["--chunk", "48,0"],
        ["--value-is-key", "--value-dim", "40", "--kv-heads", "1", "--sink-logits"],
    ],
    ids="_".join,
)
def test_scores(options: Sequence[str], tmp_path: Path) -> None:
    trace = synthesised(tmp_path / "t.h5", *options)
    kv_heads = trace.kv_heads
    zips, composes = (scores_of(trace, policy, tmp_path / policy) for policy in ("kvzip", "kvcompose"))
    for layer in range(trace.layers):
        by_group = largest_attention(trace, layer, 4).reshape(kv_heads, -1, trace.prompt)
        np.testing.assert_allclose(zips[layer], by_group.max(axis=1), rtol=1e-5, atol=1e-9)
        means = largest_attention(trace, layer, None).reshape(kv_heads, -1, trace.prompt).mean(axis=1)
        np.testing.assert_allclose(composes[layer], means + means.mean(axis=0), rtol=1e-5, atol=1e-9)


def test_synthetic_passes(tmp_path: Path) -> None:
    """The rows of the fixture are hashes of their indices; tokens of passes are numbered behind those of the trace."""
    path = tmp_path / "t.h5"
    subprocess.run([*program(), "synth", "fixture", "-o", path, "--reconstruct", "7"], check=True, capture_output=True)
    trace = kv.Trace(path)
    assert trace["/reconstruction/passes"].tolist() == [[11, 0, 7], [20, 7, 12]]
    ids, prompt = trace["/reconstruction/ids"].tolist(), trace.ids.tolist()
    assert ids[4:11] == prompt[:7] and ids[15:20] == prompt[7:12]
    for tag, name in ((1, "q"), (2, "k")):
        found = trace[f"/layers/003/{name}_reconstruction"]
        head, token, component = np.indices(found.shape)
        hashes = chain(tag, 3, head, trace.tokens + token, component)
        np.testing.assert_array_equal(found, ((hashes % np.uint64(33)).astype(np.float64) - 16) / 8)
    assert trace.problems() == []
    plain = tmp_path / "plain.h5"
    subprocess.run([*program(), "synth", "fixture", "-o", plain], check=True, capture_output=True)
    np.testing.assert_array_equal(kv.Trace(plain).q(3), trace.q(3))


def test_layers_that_read_other_keys_are_rejected(tmp_path: Path) -> None:
    trace = synthesised(tmp_path / "t.h5", "--kv-source", "0,0")
    assert "/layers/001/q_reconstruction" in trace and "/layers/001/k_reconstruction" not in trace
    with pytest.raises(kv.Error, match="kv_source: queries of several layers for kvzip"):
        kv.replay(trace, "kvzip", 20)
