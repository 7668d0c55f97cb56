"""ReplayPress evicts and predicts as kvpress' own presses do: `tests/run kvpress`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cases import LEAST_OVERLAP, MODEL, PRESS_CASES, PRESS_RATIOS, PRESS_TOKENS, Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "cli"))

from program import done  # noqa: E402

ROUNDING = 1e-5  # of a logit or value, as a share of the largest: the order of the kept tokens differs
LARGE_MODEL = MODEL.with_name("qwen2.5-coder-1.5b-instruct.gguf")
MODELS = [
    "qwen3",
    str(MODEL),
    pytest.param(
        str(LARGE_MODEL), marks=pytest.mark.skipif(not LARGE_MODEL.is_file(), reason="needs tools/setup large-model")
    ),
]


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """Rows that are printed after the tests: the figures of docs/kvpress.md are of one measurement."""
    rows: list[str] = []
    yield rows
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *rows, sep="\n")


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: Path(model).stem)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, in_kvpress: Callable[..., None]
) -> dict[str, np.ndarray]:
    """Kept sets and logits of both programs, on one model."""
    file = tmp_path_factory.mktemp("presses") / "found.npz"
    in_kvpress("replay_presses.py", request.param, file)
    with np.load(file) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("ratio", PRESS_RATIOS)
@pytest.mark.parametrize("case", PRESS_CASES, ids=lambda case: case.press)
def test_same_sets_and_predictions(
    found: dict[str, np.ndarray], case: Case, ratio: float, table: list[str], request: pytest.FixtureRequest
) -> None:
    name = f"{case.press} {ratio}"
    theirs, ours = (found[f"{name} {whose} kept"] for whose in ("theirs", "ours"))
    same = (theirs & ours).sum(-1) / np.maximum(theirs.sum(-1), ours.sum(-1))
    assert theirs.sum() == ours.sum() == int(PRESS_TOKENS * (1 - ratio)) * theirs[..., 0].size
    largest = np.abs(found["full"]).max()
    apart = np.abs(found[f"{name} theirs"] - found[f"{name} ours"]).max() / largest
    effect = np.abs(found[f"{name} theirs"] - found["full"]).max() / largest
    values = (found[f"{name} values apart"] < ROUNDING)[theirs & ours].mean()
    model = Path(request.node.callspec.params["found"]).stem
    row = [model, f"`{case.press}`", str(ratio), f"{same.mean():.5f}", f"{values:.5f}", f"{apart:.1e}", f"{effect:.1e}"]
    table.append(f"| {' | '.join(row)} |")
    assert same.mean() >= LEAST_OVERLAP and values >= LEAST_OVERLAP
    assert effect > 1000 * ROUNDING
    # Where two kept keys are equally similar to an evicted one, rounding decides which value it is merged into.
    assert apart < ROUNDING or ("Merging" in case.press and values < 1), apart


def test_policies_of_plug_ins(tmp_path: Path, in_kvpress: Callable[..., None]) -> None:
    """A plug-in of the policy that new-policy writes keeps the sets of its built-in equal."""
    [*_, build, _] = done("new-policy", "mine", "--plugin", folder=tmp_path).splitlines()
    subprocess.run(build, shell=True, cwd=tmp_path, check=True, capture_output=True)
    in_kvpress("plugin_press.py", tmp_path / "mine/build/mine.so", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["mine"], found["built in"])
        assert (found["mine"] != found["another"]).any()
