"""Options that every command in Python has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvreplay as kv
from kvreplay.command_line.command import run as python
from kvreplay.export import main as export
from kvreplay.program import Parser, exit_code, say_notes
from kvreplay.tables import aligned, narrowed, wrapped


def test_quiet_leaves_only_errors(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    kv.replay(small, "h2o", 0.5, metrics="kv_bytes", output=tmp_path / "run", progress=False)
    words = [str(tmp_path / "run"), "-o", str(tmp_path / "results.csv")]
    before = sys.stdout
    assert (export([*words, "-q"]), capsys.readouterr()) == (0, ("", ""))
    assert sys.stdout is before and (tmp_path / "results.csv").is_file()
    assert (export(words), capsys.readouterr()) == (0, (f"{tmp_path}/results.csv\n", ""))
    assert export(["nowhere", "-o", "a.csv", "--quiet"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kvreplay: nowhere: ")


def test_quiet_keeps_the_answer(capsys: pytest.CaptureFixture) -> None:
    def prints(words: list[str], **options: bool) -> bool:
        parser = Parser(prog="kvreplay some", **options)
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--dry-run", action="store_true")
        exit_code("some", lambda: print("answer") if parser.parse_args(words) else None)
        return capsys.readouterr().out == "answer\n"

    assert prints(["-q"]) and prints([], writes_files=True) and not prints(["-q"], writes_files=True)
    assert prints(["-q", "--json"], writes_files=True) and prints(["-q", "--dry-run"], writes_files=True)


def test_quiet_hides_the_progress_line() -> None:
    parser = Parser(prog="kvreplay some")
    parser.add_argument("--progress", default="auto")
    before = sys.stdout
    try:
        assert parser.parse_args(["-q"]).progress == "never"
    finally:
        sys.stdout = before
    assert parser.parse_args([]).progress == "auto"


def test_singular_and_plural_are_one_option() -> None:
    several, one = Parser(prog="kvreplay some"), Parser(prog="kvreplay other")
    several.add_argument("-p", "--policies")
    one.add_argument("--budget")
    assert several.parse_args(["--policy", "h2o"]).policies == several.parse_args(["--policies=h2o"]).policies == "h2o"
    assert one.parse_args(["--budgets=0.1"]).budget == "0.1"
    with pytest.raises(kv.Error, match="unknown option --policys: did you mean --policies"):
        several.parse_args(["--policys", "h2o"])


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_help_of_python_is_its_own(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert python(words) == 0 and capsys.readouterr().out.startswith("kvreplay python COMMAND ...\n")


def test_quiet_hides_notes(capsys: pytest.CaptureFixture) -> None:
    say_notes("report", ["a note"], quiet=True)
    assert capsys.readouterr().err == ""
    say_notes("report", ["a note"])
    assert capsys.readouterr().err == "kvreplay: report: a note\n"


def test_a_narrow_table_leaves_out_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("name", "unit", "value"), ("recall", "share of attention", "0.5")]
    assert narrowed(rows, 2, (1,)) == (aligned(rows, 2), [])
    monkeypatch.setattr("kvreplay.tables.terminal_width", lambda: 20)
    assert narrowed(rows, 2, (1,)) == (["name    value", "recall    0.5"], ["unit"])
    assert wrapped("difference: policy minus baseline", "  ") == ["difference: policy", "  minus baseline"]
