"""Does `kv.figure` draw what `kvreplay plot` draws, also of a run in memory?"""

from __future__ import annotations

from pathlib import Path

import pytest

import kvreplay as kv
from kvreplay.plot.command import main
from kvreplay.tables import write_csv

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run(small: Path) -> kv.Run:
    return kv.replay(small, ["snapkv", "h2o"], [0.25, 0.5], progress=False)


def test_the_same_numbers_and_bytes_as_the_command(run: kv.Run, tmp_path: Path) -> None:
    drawing = kv.figure("curve", run, policies=["h2o", "snapkv"], budgets=0.5, metric="output_cosine", title="One")
    words = "-p h2o,snapkv -b 0.5 --metric output_cosine --title One".split()
    assert (
        main(["curve", str(run.folder), *words, "-o", str(tmp_path / "a.svg"), "--data", str(tmp_path / "a.csv")]) == 0
    )
    write_csv(drawing.data, tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()
    drawing.save(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "a.svg").read_bytes()
    assert drawing._repr_svg_() == (tmp_path / "b.svg").read_text(encoding="utf-8")
    of_folder = kv.figure("curve", str(run.folder), policies=["h2o", "snapkv"], budgets=0.5, metric="output_cosine")
    assert of_folder.data.equals(drawing.data)


def test_the_caption_of_a_paper_is_a_note(run: kv.Run) -> None:
    notes = kv.figure("curve", run, budget=[0.25, 0.5], style="paper").notes
    assert [note for note in notes if note.startswith("caption: ") and "Open loop" in note] == list(notes)
    assert f". {run.cells['model'].iloc[0]}, " in notes[0]  # as it is written


def test_another_file_format_is_refused(run: kv.Run, tmp_path: Path) -> None:
    with pytest.raises(kv.Error, match=r"save: unknown file format: expected a name ending in \.svg, \.pdf, \.png or"):
        kv.figure("curve", run).save(tmp_path / "figure.foo")


def test_the_similarity_of_tokens_is_drawn_of_a_trace(run: kv.Run, small: Path) -> None:
    assert set(kv.figure("similarity", kv.open(small), of="keys").data["tensor"]) == {"keys"}
    with pytest.raises(kv.Error, match="plot: curve needs a run: expected a folder of results of kvreplay replay"):
        kv.figure("curve", kv.open(small))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("curv", {}, "plot: unknown kind of figure curv: did you mean curve"),
        ("curve", {"metrics": "recall"}, "figure: unknown option metrics: did you mean metric?"),
        ("curve", {"layer": 1}, "--layer: not an option of this figure"),
        ("curve", {"output": "a.svg"}, "figure: unknown option: expected one of baseline, "),
        ("curve", {"colour": 1}, "figure: unknown option: expected one of baseline, "),
        ("curve", {"policies": "none"}, "-p: unknown policy: expected one of"),
    ],
)
def test_invalid_arguments_are_refused_as_by_the_command(kind: str, options: dict, message: str, run: kv.Run) -> None:
    with pytest.raises(kv.Error) as refusal:
        kv.figure(kind, run, **options)
    assert str(refusal.value).startswith(message) and refusal.value.exit_code == 2
