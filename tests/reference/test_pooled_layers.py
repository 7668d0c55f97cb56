"""share=pooled: one set for all layers, selected here by numpy from the saved scores of every layer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from reference import top

import kvreplay as kv
from kvreplay.program import program

PROMPT, BUDGET, RECENT, SINKS = 90, 20, 8, 4
POLICIES = {  # by the number of protected first and last tokens
    "snapkv:window=8,pool=none": (0, RECENT),
    "snapkv:window=8,pool=none,heads=query": (0, RECENT),
    "knorm": (0, 0),
    f"tova:sinks={SINKS}": (SINKS, 0),
    "h2o:heads=layer": (0, BUDGET // 2),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pooled") / "layers.h5"
    shape = f"--prompt {PROMPT} --continuation 6 --layers 4 --query-heads 4 --kv-heads 2".split()
    subprocess.run([*program(), "synth", "gaussian", "-o", path, *shape], check=True, capture_output=True)
    return path


def pooled(scores: np.ndarray, how: str) -> np.ndarray:
    if how == "mean":
        return scores.mean(axis=0)
    most = scores.max(axis=0)
    return most if how == "max" else np.broadcast_to(most.max(axis=0), most.shape)


@pytest.mark.parametrize("how", ["mean", "max", "all-rows"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_set_by_the_scores_of_all_layers(trace: Path, tmp_path: Path, policy: str, how: str) -> None:
    together = f"{policy}{',' if ':' in policy else ':'}share=pooled,over_layers={how}"
    words = ["replay", trace, "-p", policy, "-p", together, "-b", str(BUDGET), "--save", "scores", "-o", tmp_path]
    subprocess.run([*program(), *map(str, words)], check=True, capture_output=True)
    run = kv.Run(tmp_path)
    cells = run.cells[run.cells["policy"] == policy.partition(":")[0]]
    is_pooled = cells["params"].str.contains("share=pooled")
    (alone, of_layers), (shared, of_pooled) = (
        (run.selection_of(cell, PROMPT).mask(), run.scores(cell))
        for cell in (*cells["cell"][~is_pooled], *cells["cell"][is_pooled])
    )
    np.testing.assert_array_equal(of_layers, of_pooled)
    sinks, recent = POLICIES[policy]
    candidates = np.arange(sinks, PROMPT - recent)
    for row, scores in enumerate(pooled(of_layers, how)):
        kept = top(scores, BUDGET - sinks - recent, candidates)
        expected = [*range(sinks), *kept, *range(PROMPT - recent, PROMPT)]
        assert all(list(np.flatnonzero(of_layer[row])) == expected for of_layer in shared), f"row {row}"
    assert (alone != alone[0]).any(), "layers alone keep the same tokens"
