"""Is the table of a run in Python the one that the program prints?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from program import done

import kvreplay as kv
from kvreplay.run_names import pick_metrics


def test_a_run_prints_the_table_of_the_program(small: Path, tmp_path: Path) -> None:
    run = kv.replay(small, ["snapkv", "h2o:recent=8"], [0.1, 40], output=tmp_path / "out", controls="twins")
    for words, options in (
        ([], {}),
        (["--all", "--wide"], {"all": True, "wide": True}),
        (["-p", "h2o:recent=8", "-b", "40", "--each"], {"policies": "h2o:recent=8", "budgets": 40, "each": True}),
        (["--columns", "recall,skill", "--latex"], {"columns": ["recall", "skill"], "format": "latex"}),
        (["--traces", "small", "--csv"], {"traces": ["small"], "format": "csv"}),
    ):
        table = run.table(**options)
        assert table == done("show", tmp_path / "out", *words, folder=tmp_path)
        assert repr(table) == table, "a session shows lines, not a quoted text"


def test_a_run_in_memory_has_the_same_table_without_its_folder(small: Path, tmp_path: Path) -> None:
    words = (["snapkv", "h2o"], 0.1)
    text = kv.replay(small, *words, output=tmp_path / "out").table()
    in_memory = kv.replay(small, *words).table()
    assert "kvreplay show" in text and str(tmp_path) in text
    assert "kvreplay" not in in_memory and "results " in in_memory

    def numbers(table: str) -> str:
        rows = table[: table.index("\nresults ")]
        return re.sub(r"[\d.]+ (us|ms|s)\b\*?", "TIME", rows).replace(" ", "")

    assert numbers(in_memory) == numbers(text)


def test_the_table_of_a_policy_in_python_beats_its_twin_or_is_not_marked(small: Path, tmp_path: Path) -> None:
    @kv.policy
    def least_key_norm_of_this_test(view):
        "negative norm of the key"
        return -view.key_norms().repeat(view.group, axis=0)

    options = {"controls": "twins", "output": tmp_path / "out"}
    table = kv.replay(small, [least_key_norm_of_this_test, "nacl"], 0.1, **options).table(columns="skill,recall")
    for policy in ("least-key-norm-of-this-test", "nacl"):
        [row] = [line for line in table.splitlines() if line.replace("_", "-").startswith(policy)]
        assert re.search(r" -?\d\.\d{3}", row), "its twin is found"


def test_what_cannot_be_meant_is_refused(small: Path) -> None:
    run = kv.replay(small, "h2o", 0.1)
    with pytest.raises(kv.Error, match="--policy: unknown policy"):
        run.table("snapvk")
    with pytest.raises(kv.Error, match="format: unknown format: expected text, markdown, latex, csv, found pdf"):
        run.table(format="pdf")


def test_titles_of_the_table_are_names_of_metrics() -> None:
    known = ["attention_recall", "output_error:pooled", "span_recall:needle.mean"]
    assert pick_metrics(["needle", "out.err"], known) == known[1:]
    assert pick_metrics(["attention_recall"], known) == known[:1]
    with pytest.raises(kv.Error, match="--metric: unknown metric"):
        pick_metrics(["recal"], known)
