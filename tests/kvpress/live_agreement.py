"""`kvreplay live` predicts what a model predicts behind kvpress' presses: `tests/run kvpress`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import LEAST_OVERLAP, LIVE_CASES, LIVE_PRESSES, MODEL, RATIOS, Case

import kvreplay as kv
from kvreplay.capture.model import load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.live import passes
from kvreplay.live.cells import cells_of, evicted

GENERATED = 32
ROUNDING = 5e-4  # of a logarithm of a probability: two versions of the model's code, in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, captured: Callable[..., None]) -> Path:
    """With a trace."""
    folder = tmp_path_factory.mktemp("kvpress-live")
    captured(folder / "continued.h5", "--generate", str(GENERATED))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path, by_kvpress: Callable[..., dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What the model predicts of the trace's continuation behind each press, and the keys that the press left."""
    return by_kvpress("continuations.py", folder, "continuations.npz")


@pytest.fixture(scope="module")
def read(folder: Path) -> tuple[Any, passes.Text]:
    """The model, and the trace's tokens as it reads them."""
    model, _ = load(ModelChoices(str(MODEL), dtype="float32"))
    trace = kv.open(folder / "continued.h5")
    return model, passes.read(model, "SmolLM2", [int(one) for one in trace.ids], trace.prompt)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).double().log_softmax(-1).numpy()


def test_the_model_predicts_the_same(theirs: dict[str, np.ndarray], read: tuple[Any, passes.Text]) -> None:
    assert np.abs(log_probabilities(theirs["full"]) - read[1].own.numpy()).max() < ROUNDING


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("case", LIVE_CASES, ids=lambda case: case.press)
def test_same_predictions(
    folder: Path, theirs: dict[str, np.ndarray], read: tuple[Any, passes.Text], case: Case, ratio: float
) -> None:
    """Of the press's own set, which a policy has but for tokens whose scores differ by rounding alone."""
    model, text = read
    name = f"{case.press} {ratio}"
    kept = {layer: kept_of(keys, text.layers[layer].k) for layer, keys in enumerate(theirs[f"keys {name}"])}
    budget = int(kept[0][0].sum())
    run = kv.replay(folder / "continued.h5", case.policy, budget, metrics="attention_recall", progress=False)
    [cell], _, _ = cells_of(run, run.trace("continued"), run.cells[run.cells["role"] == "asked"])
    assert cell.decisions == "after-prefill"
    same = sum(int((rows & cell.kept[layer]).sum()) for layer, rows in kept.items())
    assert same >= LEAST_OVERLAP * sum(int(rows.sum()) for rows in kept.values())

    of_set = evicted(text, [replace(cell, kept=kept)], run.trace("continued"))
    ours = passes.run(model, text, of_set).log_probabilities[0].numpy()
    expected = log_probabilities(theirs[name])
    # What the press changes is far more than the rounding: a wrong mask would show.
    assert np.abs(expected - text.own.numpy()).max() > 1000 * ROUNDING
    assert np.abs(ours - expected).max() < ROUNDING


def kept_of(keys: np.ndarray, every: torch.Tensor) -> torch.Tensor:
    """Which of a layer's tokens the keys [Hkv,n,d] are, but for rounding: bool [Hkv,P]."""
    apart = torch.cdist(torch.from_numpy(keys).double(), every.double())  # [Hkv,n,P]
    kept = torch.zeros(every.shape[:2], dtype=torch.bool)
    kept.scatter_(1, apart.argmin(-1), True)
    assert (kept.sum(-1) == keys.shape[1]).all() and float(apart.amin(-1).max()) < 1e-3
    return kept


def test_they_are_all_there() -> None:
    assert {case.press for case in LIVE_CASES} == set(LIVE_PRESSES)
