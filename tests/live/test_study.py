"""Does tools/study keep the numbers of finished prompts, and go on from there?"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch", reason="the study needs tools/setup build python")

from tiny_models import save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks"))

import study  # noqa: E402

from kvreplay.capture import study_prompts
from kvreplay.capture.prompts import Prompt
from kvreplay.predict.prediction import Measured, Prediction
from kvreplay.program import program
from kvreplay.results import Run

POLICIES = ("snapkv", "h2o", "tova", "knorm", "keydiff", "streaming-llm", f"h2o:{study.EQUAL}")
CONTEXT = "The tide was late. The lamp is green. It rained all day, and the boats stayed in the harbour until noon."


@pytest.fixture
def small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three prompts of a tiny model; the folder in which they are measured."""
    model = save(tmp_path / "model", "llama")
    prompts = [
        Prompt("text-1", CONTEXT, continuation=" Then they left, one after another, and nobody saw them again."),
        Prompt("niah-noise-1", CONTEXT, "What is green?", ("lamp",), "The lamp is green.", continuation="lamp"),
        Prompt("text-2", CONTEXT[::-1], continuation=CONTEXT),
    ]
    cells = ((POLICIES, ("0.2", "0.5")),)
    studied = study.Studied(str(model), "tiny", "float32", cells, of_each_kind=2, longest=10_000)
    monkeypatch.setattr(study, "STUDIES", {"tiny": studied})
    monkeypatch.setattr(study, "WORK", tmp_path / "work")
    monkeypatch.setattr(study, "DATA", tmp_path / "data")
    monkeypatch.setattr(study_prompts, "study_prompts", lambda count_tokens: prompts)
    return tmp_path / "work" / "tiny"


def test_a_study_goes_on_where_it_ended(small_study: Path, tmp_path: Path) -> None:
    assert study.main(["tiny", "--prompts", "1"]) == 0
    before, _ = study.read(tmp_path / "data" / "tiny.parquet")
    assert set(before["prompt"]) == {"text-1"}
    assert study.main(["tiny"]) == 0
    log = (small_study.parent / "log").read_text()
    assert [log.count(f"tiny: {name}:") for name in ("text-1", "niah-noise-1", "text-2")] == [1, 1, 1]
    assert not list(small_study.iterdir())  # neither traces nor runs are left

    cells, about = study.read(tmp_path / "data" / "tiny.parquet")
    assert set(cells["prompt"]) == {"text-1", "niah-noise-1", "text-2"}
    assert dict(cells[["prompt", "kind"]].drop_duplicates().to_numpy()) == {
        "text-1": "text", "niah-noise-1": "niah-noise", "text-2": "text"
    }  # fmt: skip
    asked = cells[cells["role"] == "asked"]
    assert (asked.groupby(["prompt", "budget"])["label"].nunique() == len(POLICIES)).all()
    assert {"kld", "same_top_p", "nll_increase"} <= set(about["live"])
    assert {"output_error", "output_error:upper-half", "attention_recall:unprotected"} <= set(about["offline"])
    full = cells[cells["label"] == "full"]
    assert full["prompt"].nunique() == 3 and (full["kld"] == 0).all()
    twins = cells[cells["label"] == "random-twin:of=h2o"]
    assert twins["kld"].notna().all() and len(twins) == 6
    evicted = asked[asked["budget"] == "0.2"]
    assert (evicted["kld"] > 0).all() and np.isfinite(evicted["output_error"]).all()


def test_numbers_of_other_policies_are_not_mixed(
    small_study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(["tiny", "--prompts", "1"]) == 0
    few = replace(study.STUDIES["tiny"], cells=((POLICIES[:3], ("0.2", "0.5")),))
    monkeypatch.setattr(study, "STUDIES", {"tiny": few})
    capsys.readouterr()
    assert study.main(["tiny"]) == 3
    assert "expected 3 policies at 0.2, 0.5, found 7 policies at 0.2, 0.5" in capsys.readouterr().err


def test_the_file_of_a_study_is_what_predict_orders(small_study: Path, tmp_path: Path) -> None:
    assert study.main(["tiny"]) == 0
    cells, about = study.read(tmp_path / "data" / "tiny.parquet")
    measured = Measured(cells[cells["role"] == "asked"], **about)
    found = Prediction.from_measured(measured, seed=0)
    assert len(found.of_prompts["prompt"].unique()) == 3
    line = found.headline.set_index(["offline", "live"]).loc[("output_error", "kld")]
    mean = np.mean([
        some[["output_error", "kld"]].corr("spearman").iloc[0, 1]
        for _, some in measured.cells.groupby(["prompt", "budget"])
    ])  # fmt: skip
    assert line["spearman"] == pytest.approx(mean) and line["prompts"] == 3


def test_the_text_is_written_only_where_the_full_cache_answers(small_study: Path, tmp_path: Path) -> None:
    """The tiny model, with random weights, does not answer: only the full cache has written."""
    assert study.main(["tiny"]) == 0
    cells, _ = study.read(tmp_path / "data" / "tiny.parquet")
    written = cells.dropna(subset="contains")
    assert set(written["label"]) == {"full"} and set(written["prompt"]) == {"niah-noise-1"}
    assert (written["contains"] == 0).all()


def test_prompts_come_round_by_round(small_study: Path) -> None:
    prompts = [Prompt(f"{kind}-{number}", "x" * number) for kind in ("a", "b") for number in (1, 2, 3)]
    some = study.Studied("", "", "", (), of_each_kind=2, longest=2)
    assert [one.name for one in study.chosen(prompts, some, len)] == ["a-1", "b-1", "a-2", "b-2"]
    assert [one.name for one in study.chosen(prompts, replace(some, kinds=("b",)), len)] == ["b-1", "b-2"]


def test_equal_bytes_has_every_number_format_and_cells_of_equal_bytes(tmp_path: Path) -> None:
    """A store that keeps recent tokens exact on request is a number format."""
    parts = json.loads(subprocess.run([*program(), "policies", "--parts", "--json"], capture_output=True).stdout)
    formats = {part["name"] for part in parts if part["kind"] == "store" and "residual=" in part["parameters"]}
    studied = study.STUDIES["equal-bytes"]
    assert {one.partition("(")[0] for one in study.FORMATS} == formats and len(formats) > 10

    trace = tmp_path / "trace.h5"
    shape = ["--layers", "1", "--query-heads", "2", "--kv-heads", "2", "--prompt", "500", "--continuation", "4"]
    subprocess.run([*program(), "synth", "gaussian", *shape, "-q", "-o", trace], check=True)
    for policies, budgets in studied.cells:
        words = ["-p", ",".join(policies), "-b", ",".join(budgets), "--metrics", "kv_bytes", "--controls", "none"]
        subprocess.run([*program(), "replay", trace, *words, "-q", "-o", tmp_path / "run"], check=True)
    table = Run(tmp_path / "run").overall
    table = table[(table["metric"] == "kv_bytes") & (table["variant"] == "")]
    numbers = 2 * 2 * 64 * 500
    bits = 8 * table["value"] / numbers
    of_format = table["policy"] == "full"
    targets = np.array([2, 3, 4, 6, 8, 12])
    distance = np.abs(bits.to_numpy()[:, None] / targets - 1).min(axis=1)
    assert len(bits) == sum(len(policies) * len(budgets) for policies, budgets in studied.cells)
    assert (distance[~of_format] < 0.01).all()
    assert set(bits[of_format].round(2)) == {
        2.25, 3.0, 3.25, 3.5, 4.25, 4.5, 5.0, 5.5, 6.0, 6.5, 8.0, 8.5, 16.0
    }  # fmt: skip


def test_an_unknown_part_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["gpt-2"]) == 2
    assert capsys.readouterr().err == f"kvreplay: study: part: expected {' or '.join(study.STUDIES)}, found gpt-2\n"


def test_a_row_a_cell_and_numbers_in_32_bits(tmp_path: Path) -> None:
    cells = pd.DataFrame({"prompt": ["a"], "kld": [0.1], "output_error": [0.2]})
    about = {"offline": ["output_error"], "live": ["kld"], "worse": {"kld": 1.0, "output_error": 1.0}}
    study.write(tmp_path / "a.parquet", cells, about)
    again, same = study.read(tmp_path / "a.parquet")
    assert same == about and again["kld"].dtype == np.float32 and again["kld"].iloc[0] == np.float32(0.1)
