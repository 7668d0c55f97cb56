"""Policies keep the tokens that kvpress' presses keep: `tests/run kvpress`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import (
    CASES,
    LEAST_OVERLAP,
    LUKV,
    LUKV_PROTECTED,
    NOT_COMPARED,
    PASS_CASES,
    PASS_KINDS,
    RATIOS,
    SKETCH,
    THINK,
    TOKENS,
    Case,
    presses_of,
)
from reference_geometry import gaussian

import kvreplay as kv
from kvreplay.calibrate.command import main as calibrate
from kvreplay.conformance.command import main as check

ROOT = Path(__file__).parents[2]
CONTROLS = {"full", "random", "oracle"}


# Files that presses read, and those of the policies with the same numbers. Budgets of heads need a continuation.
CALIBRATED = (
    ("q-filters", "trace.h5", "filters"),
    ("q-filters", "trace.h5", "filters.npy"),
    ("duo-attention", "trace.h5", "duo/full_attention_heads.tsv"),
    ("duo-attention", "trace.h5", "roles.npy"),
    ("expected-attention", "trace.h5", "statistics"),
    ("lu-kv", "chunks.h5", "curve.npy"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, captured: Callable[..., None]) -> Path:
    """With a trace, one for each kind of passes, the random matrices of leverage scores, and the files that `kvreplay
    calibrate` computes from the traces."""
    folder = tmp_path_factory.mktemp("kvpress")
    captured(folder / "trace.h5", "--with-wo")
    for kind in PASS_KINDS:
        captured(folder / f"{kind}.h5", "--reconstruct", kind, "--generate", "8")
    trace = kv.open(folder / "trace.h5")
    np.save(folder / "sketch.npy", gaussian(0, *np.indices((trace.layers, trace.kv_heads, trace.head_dim, SKETCH))))
    for kind, name, output in CALIBRATED:
        assert calibrate([kind, str(folder / name), "-o", str(folder / output)]) == 0
    return folder


@pytest.fixture(scope="module")
def arrays(folder: Path, by_kvpress: Callable[..., dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What the presses keep of the trace's tokens."""
    return by_kvpress("presses.py", folder, "kept.npz")


@pytest.fixture(scope="module")
def table() -> list[str]:
    return []


def replayed(folder: Path, case: Case, ratio: float, counts: np.ndarray, **options: str) -> tuple[kv.Run, str]:
    """A run at as many tokens as the press keeps on average, and the policy's cell."""
    text = case.policy.format(
        ratio=f"{ratio:g}", keep=f"{1 - ratio:g}", counts=",".join(f"{n:g}" for n in counts.mean(axis=1)), folder=folder
    )
    run = kv.replay(folder / case.trace, text, round(counts.mean()), eval="last:1", progress=False, **options)
    [cell] = run.cells.loc[~run.cells["policy"].isin(CONTROLS), "cell"]
    return run, cell


def overlap(folder: Path, case: Case, ratio: float, theirs: np.ndarray, **options: str) -> float:
    """Mean over layers and KV heads."""
    counts = theirs.sum(axis=-1)
    run, cell = replayed(folder, case, ratio, counts, **options)
    ours = np.broadcast_to(run.selection_of(cell, theirs.shape[-1]).mask(), theirs.shape)
    return float(((ours & theirs).sum(axis=-1) / np.maximum(ours.sum(axis=-1), counts)).mean())


def test_the_model_is_the_same(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    trace = kv.open(folder / "trace.h5")
    for layer, keys in enumerate(arrays["keys"]):
        np.testing.assert_allclose(keys, trace.k(layer), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is chosen")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.press)
def test_same_sets(folder: Path, arrays: dict[str, np.ndarray], table: list[str], case: Case) -> None:
    overlaps = [overlap(folder, case, ratio, arrays[f"{case.press} {ratio}"]) for ratio in RATIOS]
    table.append(f"| `{case.press}` | `{case.policy}` | " + " | ".join(f"{one:.5f}" for one in overlaps) + " |")
    assert min(overlaps) >= LEAST_OVERLAP


@pytest.mark.parametrize("ratio", RATIOS)
def test_same_channels(folder: Path, arrays: dict[str, np.ndarray], ratio: float) -> None:
    """The share of a layer's keys, in the L1 norm, that lies in the channels that ThinK sets to 0."""
    sizes = np.abs(arrays["keys"].astype(float))
    left = (sizes * arrays[f"{THINK.press} {ratio}"][:, :, None]).sum(axis=(1, 2, 3))
    every_token = np.full((1, 1), TOKENS)
    run, cell = replayed(folder, THINK, ratio, every_token, metrics="kv_l1_loss:key")
    rows = run.results[(run.results["cell"] == cell) & (run.results["layer"] != "all")]
    np.testing.assert_allclose(rows["value"], 1 - left / sizes.sum(axis=(1, 2, 3)), rtol=1e-6)


def test_heads_keep_the_shares_of_a_file(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """LUKVPress keeps the best tokens of each head, as many as the file of `kvreplay calibrate lu-kv` says."""
    run, cell = replayed(folder, LUKV, 0.5, np.full((1, 1), TOKENS // 2), save="scores")
    scores = run.scores(cell)
    sinks, recent = LUKV_PROTECTED
    scores[..., :sinks] = scores[..., TOKENS - recent :] = np.inf
    shares = np.load(folder / "curve.npy")
    for ratio in RATIOS:
        theirs = arrays[f"{LUKV.press} {ratio}"]
        counts = theirs.sum(axis=-1)
        assert (np.abs(counts - (1 - shares[round(100 * ratio) - 1]) * TOKENS) < 1).all() and counts.std() > 1
        ranks = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
        assert (theirs & (ranks < counts[..., None])).sum() / counts.sum() >= LEAST_OVERLAP


@pytest.mark.usefixtures("arrays")
def test_recorded_positions_are_accepted(folder: Path) -> None:
    """The file that the code of docs/check.md writes in kvpress."""
    words = ["-p", "snapkv:preset=kvpress", "--ties", "any", "-b", str(int(TOKENS * (1 - 0.9)))]
    assert check([str(folder / "trace.h5"), str(folder / "kept.safetensors"), *words]) == 0


def test_every_press_is_named(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    compared = {name for case in (*CASES, THINK, LUKV) for name in presses_of(case)}
    exported = set(json.loads((folder / "presses.json").read_text()))
    assert compared | set(NOT_COMPARED) == exported
    assert not compared & set(NOT_COMPARED)


def test_the_page_names_them(table: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """docs/kvpress.md lists all presses and policies. Its overlaps are of one measurement and are not compared."""
    page = (ROOT / "docs" / "kvpress.md").read_text()
    with capsys.disabled():
        print("", *table, sep="\n")
    for case in (*CASES, *PASS_CASES, THINK):
        assert f"| `{case.press}` | `{case.policy}` |" in page
    for press, reason in NOT_COMPARED.items():
        assert f"| `{press}` | {reason} |" in page
