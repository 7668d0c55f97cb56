"""Are observables, asked for by hand or in a policy, those of a plain softmax?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from program import done

import kvreplay as kv

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def attention(trace: object, layer: int, window: int = 0, softcap: float = 0.0) -> np.ndarray:
    """[Hq, T, T]: softmax over the keys that a query sees; `window` of 0: all up to itself."""
    q, k = trace.q(layer).astype(np.float64), trace.k(layer).astype(np.float64)
    k = np.repeat(k, trace.query_heads // trace.kv_heads, axis=0)
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(trace.head_dim)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    distance = np.arange(trace.tokens)[:, None] - np.arange(trace.tokens)
    hidden = (distance < 0) | ((distance >= window) if window else False)
    weights = np.exp(np.where(hidden, -np.inf, logits - logits.max(axis=-1, keepdims=True)))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module", params=["small", "bfloat16", "capped", "one-head"])
def case(request: pytest.FixtureRequest, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A trace and its attention in layer 1."""
    if request.param == "small":
        trace = kv.open(traces / "small.h5")
        return trace, attention(trace, 1)
    words = {
        "bfloat16": ["--dtype", "bfloat16", "--query-heads", "4", "--kv-heads", "4"],
        "capped": ["--softcap", "3", "--query-heads", "4", "--kv-heads", "1"],
        "one-head": ["--query-heads", "1", "--kv-heads", "1", "--dtype", "float32"],
    }[request.param]
    folder = tmp_path_factory.mktemp("observables")
    done("synth", "gaussian", "-o", "t.h5", "--prompt", "77", "--head-dim", "24", *words, folder=folder)
    trace = kv.open(folder / "t.h5")
    return trace, attention(trace, 1, softcap=3.0 if request.param == "capped" else 0.0)


def test_attention_of_windows_and_of_all_queries(case: tuple) -> None:
    trace, weights = case
    view, prompt = trace.layer(1), trace.prompt
    for window in (1, 8, prompt, prompt + 5):
        first = max(0, prompt - window)
        wanted = weights[:, first:prompt, :prompt].sum(axis=1)
        np.testing.assert_allclose(view.window_attention(window), wanted, **CLOSE)
    np.testing.assert_allclose(view.window_attention(8, 60), weights[:, 52:60, :prompt].sum(axis=1), **CLOSE)
    wanted = weights[:, :prompt, :prompt].sum(axis=1)
    np.testing.assert_allclose(view.cumulative_attention(), wanted, **CLOSE)


def test_attention_of_later_queries(case: tuple) -> None:
    trace, weights = case
    view, prompt = trace.layer(1), trace.prompt
    np.testing.assert_allclose(view.eval_attention(), weights[:, prompt:, :prompt].sum(axis=1), **CLOSE)
    queries = list(range(prompt, prompt + 3))
    wanted = weights[:, queries, : prompt + 3]
    np.testing.assert_allclose(view.attention_of(queries), wanted.sum(axis=1), **CLOSE)
    shares = [0.5, 2.0, 0.25]
    weighted = np.einsum("hqj,q->hj", wanted, shares)
    np.testing.assert_allclose(view.attention_of(queries, shares), weighted, **CLOSE)


def test_norms_and_similarity(case: tuple) -> None:
    trace, _ = case
    view, prompt = trace.layer(1), trace.prompt
    for name, tensor in (("key", trace.k(1)), ("value", trace.v(1))):
        wide = tensor[:, :prompt].astype(np.float64)
        norms, similarity = getattr(view, f"{name}_norms"), getattr(view, f"{name}_similarity")
        np.testing.assert_allclose(norms(), np.linalg.norm(wide, axis=-1), **CLOSE)
        np.testing.assert_allclose(norms(1.0), np.abs(wide).sum(axis=-1), **CLOSE)
        flat = wide.transpose(1, 0, 2).reshape(prompt, -1)
        flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        cosines = flat @ flat.T
        np.fill_diagonal(cosines, -np.inf)
        np.testing.assert_allclose(similarity(), cosines.max(axis=1, keepdims=True).T, **CLOSE)


def unrotated(vectors: np.ndarray) -> np.ndarray:
    """[H, T, d] before RoPE: pairs (i, i + d/2) turned back by position times frequency, as `synth` turned them."""
    pairs = vectors.shape[2] // 2
    angles = np.arange(vectors.shape[1])[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    turned = vectors.astype(np.float64)
    first, second = turned[..., :pairs].copy(), turned[..., pairs : 2 * pairs].copy()
    turned[..., :pairs] = first * np.cos(angles) + second * np.sin(angles)
    turned[..., pairs : 2 * pairs] = second * np.cos(angles) - first * np.sin(angles)
    return turned


def test_moments_of_queries_before_rope(case: tuple) -> None:
    trace, _ = case
    queries = unrotated(trace.q(1))[:, : trace.prompt]
    for first in (0, 4):
        mean, covariance = trace.layer(1).query_moments(first)
        centred = queries[:, first:] - queries[:, first:].mean(axis=1, keepdims=True)
        np.testing.assert_allclose(mean, queries[:, first:].mean(axis=1), atol=1e-9)
        expected = np.einsum("hti,htj->hij", centred, centred) / (trace.prompt - first)
        np.testing.assert_allclose(covariance, expected, atol=1e-9)


def test_what_a_layer_says_of_itself(case: tuple) -> None:
    trace, _ = case
    view, prompt = trace.layer(1), trace.prompt
    assert (view.layer, view.stored_layer, view.layers) == (1, 1, trace.layers)
    assert (view.tokens, view.seen, view.prompt) == (prompt, prompt, prompt)
    assert view.group == trace.query_heads // trace.kv_heads
    assert (view.positions() == np.arange(prompt)).all()
    assert view.keys().dtype == np.float32
    assert (view.keys() == trace.k(1)[:, :prompt].astype(np.float32)).all()
    assert (view.values() == trace.v(1)[:, :prompt].astype(np.float32)).all()
    assert (view.queries(4) == trace.q(1)[:, prompt - 4 : prompt].astype(np.float32)).all()


def test_a_shorter_prompt(small: Path) -> None:
    trace = kv.open(small)
    view = trace.layer(0, boundary=40, eval="stride:50")
    assert (view.prompt, view.tokens) == (40, 40)
    weights = attention(trace, 0)
    np.testing.assert_allclose(view.cumulative_attention(), weights[:, :40, :40].sum(axis=1), **CLOSE)


def test_a_sliding_window_hides_what_is_before_it(traces: Path) -> None:
    trace = kv.open(traces / "sliding.h5")
    prompt = trace.prompt
    for layer, window in ((0, 0), (1, 20)):
        wanted = attention(trace, layer, window)[:, prompt - 8 : prompt, :prompt].sum(axis=1)
        np.testing.assert_allclose(trace.layer(layer).window_attention(8), wanted, **CLOSE)


def test_results_are_arrays_of_their_own(small: Path) -> None:
    view = kv.open(small).layer(0)
    first = view.window_attention(4)
    first[:] = 0
    assert view.window_attention(4).any()
    assert view.window_attention(4).dtype == np.float64


def test_a_view_keeps_its_trace(small: Path) -> None:
    view = kv.open(small).layer(0)
    assert view.cumulative_attention().shape == (6, 150)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda view: view.queries(0), "queries: how many of the last: expected 1..150, found 0"),
        (lambda view: view.queries(151), "queries: how many of the last: expected 1..150, found 151"),
        (lambda view: view.positions(2), "positions: row: expected 0..1, found 2"),
        (lambda view: view.attention_of([400]), "attention_of: query: expected 0..161, found 400"),
        (lambda view: view.query_moments(150), "query_moments: first: expected 0..149, found 150"),
    ],
)
def test_what_cannot_be_asked_is_refused(ask: object, words: str, small: Path) -> None:
    with pytest.raises(kv.Error) as refused:
        ask(kv.open(small).layer(0))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda view: view.window_attention(0),
        lambda view: view.key_norms(-1.0),
        lambda view: view.attention_of([150, 151], [1.0]),
        lambda view: (view.key_norms(2.0), view.key_norms(float("nan"))),
    ],
)
def test_arguments_that_mean_nothing_are_refused(ask: object, small: Path) -> None:
    with pytest.raises(kv.Error):
        ask(kv.open(small).layer(0))


def test_a_view_that_a_policy_kept_says_that_it_is_over(small: Path) -> None:
    held = []

    @kv.policy(name="keeper")
    def keeper(view):
        held.append(view)
        return view.key_norms()

    kv.replay(small, keeper, 0.2, metrics="kv_bytes")
    assert held
    for view in held:
        for ask in (lambda v: v.tokens, lambda v: v.keys(), lambda v: v.window_attention(4), lambda v: v.positions(0)):
            with pytest.raises(kv.Error, match="its layer is closed"):
                ask(view)


def test_a_policy_of_a_schedule_sees_what_is_resident(traces: Path) -> None:
    seen = []

    @kv.policy(name="watcher", schedule="every(50)")
    def watcher(view):
        positions = np.stack([view.positions(row) for row in range(view.kv_heads)])
        keys = kv.open(traces / "small.h5").k(view.stored_layer)
        rows = np.arange(view.kv_heads)[:, None]
        assert (view.keys() == keys[rows, positions]).all()
        assert view.window_attention(4).shape == (view.query_heads, view.tokens)
        assert view.attention_of([view.seen], [1.0]).shape == (view.query_heads, view.tokens + 1)
        seen.append((view.layer, view.seen, view.tokens, positions))
        return view.keys().sum(axis=-1)

    run = kv.replay(traces / "small.h5", watcher, 20, metrics="kv_bytes")
    assert {layer for layer, *_ in seen} == {0, 1, 2}
    assert [(come, n) for layer, come, n, _ in seen if layer == 0] == [(50, 50), (100, 70), (150, 70)]
    for _, come, n, positions in seen:
        assert positions.shape[1] == n and (np.diff(positions) > 0).all() and positions.max() < come
    assert (run.selection("watcher", 20).kept == 20).all()


MANY_THREADS = """
import sys, threading
import kvreplay as kv
view = kv.open(sys.argv[1]).layer(1)
threads = [threading.Thread(target=lambda: [view.window_attention(1 + n) for n in range(140)]) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_of_python_may_share_a_view(small: Path) -> None:
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", MANY_THREADS, small], stderr=subprocess.DEVNULL).returncode == 0
