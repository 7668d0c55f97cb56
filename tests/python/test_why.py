"""Does `kvreplay why` report scores, ranks and attention as numpy computes them?"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from kvreplay.why import main

POLICY, B, WINDOW = "snapkv:window=8,pool=none", 30, 8
P, GROUP = 150, 3


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(trace: Path, layer: int) -> np.ndarray:
    """[Hq,T,T] float64, causal."""
    with h5py.File(trace) as file:
        q, k = (file[f"layers/{layer:03d}/{name}"][()].astype(float) for name in "qk")
        logits = np.einsum("htd,hjd->htj", q, np.repeat(k, GROUP, axis=0)) * file["model"].attrs["softmax_scale"]
    return softmax(np.where(np.tri(q.shape[1], dtype=bool), logits, -np.inf))


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_scores_ranks_and_rivals(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = attention(small, 1)
    scores = weights[:, P - WINDOW : P, : P - WINDOW].sum(axis=1).reshape(-1, GROUP, P - WINDOW).mean(axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    for place in (0, B - WINDOW - 1, B - WINDOW, P - WINDOW - 1):
        token = int(order[0, place])
        rows = json.loads(told(capsys, small, "-p", POLICY, "-b", B, "-t", token, "--layer", 1, "--json"))["rows"]
        assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, 1)]
        for row, own, ranked in zip(rows, scores, order, strict=True):
            is_kept = token in ranked[: B - WINDOW]
            assert (row["kept"], row["protected"]) == (is_kept, False)
            assert row["rank"] == 1 + list(ranked).index(token)
            assert row["rival"] == ranked[B - WINDOW - (not is_kept)]
            assert row["score"] == pytest.approx(own[token], rel=1e-5)
            assert row["cut"] == pytest.approx(own[ranked[B - WINDOW - 1]], rel=1e-5)


def test_the_later_query_with_the_largest_attention(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = 40
    rows = json.loads(told(capsys, small, "-p", "h2o", "-t", token, "--json"))["rows"]
    assert len(rows) == 6
    for row in rows:
        own = attention(small, row["layer"])[row["head"] * GROUP : (row["head"] + 1) * GROUP, P:, token]
        head, query = np.unravel_index(own.argmax(), own.shape)
        assert (row["query"], row["query_head"]) == (P + query, row["head"] * GROUP + head)
        assert row["query_attention"] == pytest.approx(own.max(), rel=1e-5)
        assert row["later_attention"] == pytest.approx(own.mean(), rel=1e-5)


def test_protected_tokens_and_policies_without_a_cut(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, small, "-p", POLICY, "-t", P - 1)
    assert out.count("  protected  ") == 6
    assert out.splitlines()[1] == "kept in 6 of 6 rows (layers x heads), protected in 6"
    out = told(capsys, small, "-p", "chunkkv", "-t", 3)
    assert "No cut: the policy does not keep the tokens with the highest scores" in out
    rows = json.loads(told(capsys, small, "-p", "snapkv:schedule=every,interval=50", "-t", 3, "--json"))["rows"]
    assert {row["evicted_at"] for row in rows if not row["kept"]} <= {49, 99, 149}


def test_wrong_questions(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(small), "-p", "snapkv", "-t", "150"]) == 2
    assert capsys.readouterr().err == "kvreplay: --token: position: expected 0 to 149, found 150\n"
    assert main([str(small), "-p", "snapkv", "-t", "3", "--layer", "3"]) == 2
    assert capsys.readouterr().err == "kvreplay: --layer: layer: expected a treated layer: 0 to 2, found 3\n"
    assert main([str(small.parent), "-p", "snapkv", "-t", "3"]) == 2
    assert capsys.readouterr().err == f"kvreplay: {small.parent}: not a trace: expected TRACE.h5, found a folder\n"
    (small.parent / "run.json").write_text('{"inputs": [{"path": "a/b.h5"}, {"path": "c.h5"}]}')
    assert main([str(small.parent), "-p", "snapkv", "-t", "3"]) == 2
    assert "expected a trace of this run: a/b.h5, c.h5, found a folder\n" in capsys.readouterr().err
