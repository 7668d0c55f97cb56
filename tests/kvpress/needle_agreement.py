"""kvpress' pipeline and its needle evaluation run with our policies as presses: `tests/run kvpress`."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import MODEL

SOURCE = os.environ.get("KVREPLAY_KVPRESS_SOURCE", "")  # a clone of NVIDIA/kvpress: wheels are without the evaluation


def test_answers_of_the_pipeline(tmp_path: Path, in_kvpress: Callable[..., None]) -> None:
    in_kvpress("needle.py", MODEL, tmp_path, "")
    found = json.loads((tmp_path / "answers.json").read_text())
    assert found["snapkv"] == found["SnapKVPress"]
    assert any("marmalade" in answer.lower() for answer in found["value_attention"])


@pytest.mark.skipif(not SOURCE, reason="needs KVREPLAY_KVPRESS_SOURCE, a clone of github.com/NVIDIA/kvpress")
def test_needle_evaluation(tmp_path: Path, in_kvpress: Callable[..., None]) -> None:
    """kvpress' own program, by the name of the policy in its registry."""
    in_kvpress("needle.py", MODEL, tmp_path, SOURCE)
    [folder] = (tmp_path / "results").iterdir()
    with open(folder / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["compression_ratio"] for row in rows] == ["0.4", "0.4"] and all(row["predicted_answer"] for row in rows)
    assert len(json.loads((folder / "metrics.json").read_text())) == len(rows)
