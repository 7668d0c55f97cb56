"""`kvreplay live`: what it writes, what it refuses, and what reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import pandas as pd
import pytest
from captured_case import Case

import kvreplay as kv
from kvreplay.compare.command import main as compare
from kvreplay.engine import program
from kvreplay.errors import Error
from kvreplay.live_metrics import METRICS
from kvreplay.predict.command import main as predict
from kvreplay.program import program as command
from kvreplay.report.content import Page
from kvreplay.results import COLUMNS, MEASURED, TEXT, Run

Heard = Callable[[], tuple[str, str]]


@pytest.fixture
def copy(case: Callable[..., Case], tmp_path: Path) -> Case:
    """A run that the test may change."""
    made = case("llama")
    shutil.copytree(made.run, tmp_path / "run")
    for name in ("live", "live.csv"):
        gone = tmp_path / "run" / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
    return Case(made.model, tmp_path / "run")


def rows(case: Case) -> pd.DataFrame:
    return pd.read_csv(case.run / "live.csv", dtype=str, keep_default_na=False)


def test_predict_is_proposed_where_it_has_enough_policies(
    copy: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither controls nor policies that keep all or read sparsely have a place in its order."""
    assert copy.live("--generate", "1") == 0
    measured = rows(copy)
    ordered = measured[~measured["decisions"].isin(["none", "live", "future"]) & (measured["role"] != "control")]
    count = len(ordered[["policy", "params"]].drop_duplicates())
    assert 0 < count < len(measured[["policy", "params"]].drop_duplicates())
    for fewest, proposed in ((count, True), (count + 1, False)):
        monkeypatch.setattr("kvreplay.live_metrics.FEWEST", fewest)
        capsys.readouterr()
        assert copy.live("--generate", "1") == 0
        assert ("kvreplay predict" in capsys.readouterr().out) == proposed


def test_rows(copy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell has every metric; what keeps all is exactly the reference; noise floor, table and next commands are
    printed."""
    assert copy.live("--generate", "3") == 0
    said = capsys.readouterr()
    assert said.err.count("noise floor") == 1
    lines = said.out.splitlines()
    assert any(line.startswith("policy ") and " live.kld" in line for line in lines), said.out
    assert lines[-2:] == [f"           kvreplay report {copy.run}", f"           kvreplay predict {copy.run}"]
    assert "reused" not in said.err
    table = rows(copy)
    assert list(table.columns) == [*COLUMNS, *MEASURED, TEXT]
    assert (copy.run / "live/t.csv").read_bytes() == (copy.run / "live.csv").read_bytes()
    run = Run(copy.run)
    assert set(table["cell"]) == set(run.cells["cell"])
    assert (
        set(table["open_loop"]) == {"0"}
        and set(table["n_queries"]) == {"6", "3"}
        and set(table["dtype"]) == {"float32"}
    )
    assert table["model_hash"].str.len().eq(64).all()
    answers = {"exact_match", "contains", "f1", "rouge_l"}  # the prompt has none
    assert set(table["metric"]) == {metric.name for metric in METRICS} - answers
    full = table[(table["policy"] == "full") & (table["metric"] == "kld")]
    assert set(full["value"]) == {"0"}
    assert set(table["decisions"][table["policy"] == "h2o-online"]) == {"replayed"}
    for name in ("hidden_drift", "live_output_error"):
        some = table[(table["metric"] == name) & (table["policy"] == "random")]
        assert set(some["layer"]) == {"all", "0", "1", "2", "3"}


def test_the_bar_says_when_texts_are_generated(copy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """From the first pass on, a bar is shown; without a bar, nothing is."""
    words = ["--generate", "3", "-p", "local", "-b", "24"]
    assert copy.live(*words, "--progress", "always") == 0
    said = capsys.readouterr().err
    assert said.index("t:   0%") < said.index("t: generating 3 tokens for each cell")
    shutil.rmtree(copy.run / "live")
    assert copy.live(*words) == 0 and "generating" not in capsys.readouterr().err


def test_texts_are_compared_with_the_answers_of_the_last_call(copy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of earlier calls too. If the full cache gives none of the answers, a note says so."""
    file = copy.run / "answers.jsonl"
    note = f"kvreplay: live: {copy.run}: the full cache answers no prompt"

    def contained(*answers: str) -> tuple[float, bool]:
        file.write_text(json.dumps({"name": "t", "answers": answers}) + "\n")
        assert copy.live("--generate", "3", "--answers", str(file), "-p", "full,random") == 0
        [value] = set(rows(copy).query("policy == 'full' and metric == 'contains'")["value"])
        return float(value), note in capsys.readouterr().err

    assert contained("no model writes this") == (0, True)
    before = rows(copy)
    [text] = {json.loads(text) for text in before.query("policy == 'full'")[TEXT] if text}
    assert text and contained(text) == (1, False) and contained(text, "nothing") == (0.5, False)
    assert contained("no model writes this") == (0, True) and rows(copy).equals(before)


MINE = """import kvreplay as kv

@kv.policy
def even_keys(view, sign: float = 1.0):
    return sign * view.key_norms(2.0)
"""


def test_policies_in_python(copy: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are found by run.json; the file must be that of the replay."""
    mine, run = tmp_path / "mine.py", tmp_path / "mine"
    mine.write_text(MINE)
    trace = Run(copy.run).captured("t")
    words = ["replay", trace, "-p", f"{mine}:even_keys,snapkv:window=4", "-b", "24", "-o", run, "--sliding", "treat"]
    subprocess.run([*command(), *map(str, words)], check=True, capture_output=True)
    own = Case(copy.model, run)
    assert own.live("-p", "even_keys") == 0
    assert {row["policy"] for _, row in rows(own).iterrows()} == {"even_keys"}
    assert own.live("-p", f"{mine}:even_keys:sign=1") == 0  # nothing is left to measure
    assert "measured already" in capsys.readouterr().err
    mine.write_text(MINE.replace("2.0", "1.0"))
    assert own.live("-p", "even_keys") == 3
    assert f"{mine}: even_keys has changed since the replay" in capsys.readouterr().err
    other = ["replay", trace, "-p", "local", "-b", "24", "-o", run, "--sliding", "treat"]
    subprocess.run([*command(), *map(str, other)], check=True, capture_output=True)
    shutil.rmtree(run / "live")
    assert own.live("-p", "local") == 0


def test_the_table_has_the_chosen_cells_and_reused_ones_are_counted(
    copy: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copy.live("-p", "snapkv,local", "-b", "24") == 0
    first = capsys.readouterr()
    table = [line.split() for line in first.out.splitlines()]
    kld = next(line.index("live.kld") for line in table if line[:1] == ["policy"])
    shown = {line[0]: line[kld] for line in table if line[:1] in (["local"], ["h2o"])}
    assert re.fullmatch(r"\d+\.\d{3}\*?", shown["local"]) and "h2o" not in shown
    assert copy.live("-p", "snapkv,local,full", "-b", "24") == 0
    assert re.search(r"kvreplay: live: 3 of 4 cells were measured before and are reused\n", capsys.readouterr().err)
    assert copy.live("-p", "local", "-b", "24") == 0
    again = capsys.readouterr()
    assert "all cells are measured already" in again.err and " live.kld" in again.out


def test_the_same_bits_again_and_alone(copy: Case) -> None:
    assert copy.live() == 0
    first = (copy.run / "live.csv").read_bytes()
    before = (copy.run / "live/t.csv").stat().st_mtime_ns
    assert copy.live() == 0
    assert (copy.run / "live/t.csv").stat().st_mtime_ns == before, "nothing is left to measure"
    shutil.rmtree(copy.run / "live")
    for policy in ("snapkv", "chunkkv,ada-kv,random", "h2o,h2o-online,full,oracle,local"):
        assert copy.live("-p", policy) == 0
    assert (copy.run / "live.csv").read_bytes() == first


def test_texts_are_kept_and_stand_in_the_report(copy: Case, tmp_path: Path) -> None:
    """One a cell, as the model wrote it; the numbers have nothing of it; a merge and a further call keep it."""
    shutil.copytree(copy.run, tmp_path / "other")
    assert copy.live("-p", "snapkv,full", "--generate", "5") == 0
    run = Run(copy.run)
    written = run.written("t")
    chosen = run.cells[run.cells["policy"].isin(["snapkv", "full"])]
    assert set(written) == set(chosen["cell"]) and all(written.values())
    assert TEXT not in run.results and set(run.live["metric"]) >= {"same_tokens"}
    full = written[chosen["cell"][chosen["policy"] == "full"].iloc[0]]
    [trace] = Page(run).content["traces"]
    assert trace["written"] == full
    shown = [cell["written"] for budget in trace["budgets"] for cell in budget["cells"]]
    assert sorted(filter(None, shown)) == sorted(written.values()) and None in shown
    assert "live.kld" in [Page(run).content["columns"][i]["title"] for i in trace["columns"]]

    assert Case(copy.model, tmp_path / "other").live("-p", "h2o", "--generate", "5") == 0
    assert program(["merge", str(tmp_path / "both"), str(copy.run), str(tmp_path / "other")]) == 0
    assert Run(tmp_path / "both").written("t") == written | Run(tmp_path / "other").written("t")
    assert copy.live("-p", "h2o") == 0
    assert Run(copy.run).written("t") == written


def test_a_longer_text_replaces_a_shorter_one(copy: Case) -> None:
    for count in (2, 4, 4):
        assert copy.live("-p", "snapkv", "--generate", str(count)) == 0
    table = rows(copy)
    texts = table[table["metric"] == "same_tokens"]
    assert set(texts["n_queries"]) == {"4"} and texts["cell"].is_unique
    assert set(table["n_queries"][table["metric"] == "kld"]) == {"6"}


def test_an_interrupted_run_goes_on(copy: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy.live() == 0
    first = (copy.run / "live.csv").read_bytes()
    shutil.rmtree(copy.run / "live")
    (copy.run / "live.csv").unlink()
    from kvreplay.live import measure

    passes, calls = measure.run, []

    def stops(*words: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return passes(*words)

    monkeypatch.setattr(measure, "run", stops)
    assert copy.live() == 130
    assert (copy.run / "live/t.csv").is_file(), "finished cells are kept"
    monkeypatch.undo()
    assert copy.live() == 0
    assert (copy.run / "live.csv").read_bytes() == first


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-p", "nosuch"], 2, "unknown policy"),
        (["-b", "0.9"], 2, "unknown budget"),
        (["--trace", "u"], 2, "unknown trace"),
        (["--batch", "0"], 2, "--batch: expected a whole number of at least 1, found '0'"),
        (["--generate", "-1"], 2, "--generate: expected a whole number of at least 0, found '-1'"),
        (["--answers", "missing.jsonl"], 3, "--answers"),
        (["--memory", "much"], 2, "expected a number of bytes, as 4096, 512M or 1.5G, found 'much'"),
    ],
)
def test_refusals(copy: Case, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert copy.live(*words) == code
    heard = capsys.readouterr().err.splitlines()
    assert len(heard) == 1 and said in heard[0], heard


def test_cells_that_fail_leave_the_others(copy: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantised cell is read from the trace's file again; without it that cell alone has no numbers."""
    path = tmp_path / "t.h5"
    shutil.copy(Run(copy.run).captured("t"), path)
    kv.replay(path, ["kivi:bits=2,group=8,residual=16", "local"], [24], output=tmp_path / "stores")
    path.unlink()
    capsys.readouterr()
    made = Case(copy.model, tmp_path / "stores")
    assert made.live() == 6
    said = capsys.readouterr().err.splitlines()
    assert any("t: failed: kivi at 24: its store changes tokens of the trace: " in line for line in said)
    assert said[-1].startswith("kvreplay: live: cells failed: 1 (listed above)")
    assert "local" in set(rows(made)["policy"]) and "kivi" not in set(rows(made)["policy"])


def test_no_continuation(case: Callable[..., Case], capsys: pytest.CaptureFixture[str]) -> None:
    made = case("llama", "without", ("snapkv:window=4",), 0)
    capsys.readouterr()
    assert made.live() == 3
    assert "expected a continuation after the prompt, found none" in capsys.readouterr().err


def test_another_model_is_rejected_before_it_is_loaded(
    copy: Case, case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = case("qwen3").model
    capsys.readouterr()
    monkeypatch.setattr("kvreplay.capture.model.load", lambda *_: pytest.fail("loaded"))
    assert Case(other, copy.run).live() == 3
    of_trace = Run(copy.run).trace("t").model
    assert f"another model: expected {of_trace}, weights" in capsys.readouterr().err


def test_progress_in_a_pipe(copy: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def progress() -> list[str]:
        said = capsys.readouterr().err.splitlines()
        return [line.removeprefix("kvreplay: live: ") for line in said if "measured" in line]

    monkeypatch.setattr("kvreplay.capture.progress.SECONDS_BETWEEN_LINES", 0.0)
    capsys.readouterr()
    assert copy.live("-p", "full,local", "-b", "24", "--progress", "auto") == 0
    assert progress() == ["t: 1 of 2 cells measured", "t: 2 of 2 cells measured"]
    assert copy.live("-p", "full,local", "-b", "24", "--generate", "2", "--progress", "auto") == 0
    generating = "t: generating 2 tokens for each cell: "
    assert progress() == [f"{generating}1 of 2 cells measured", f"{generating}2 of 2 cells measured"]
    assert copy.live("-p", "random", "-b", "24", "--progress", "never") == 0 and not progress()


def test_a_model_is_compared_by_keys_where_no_hash_says(
    case: Callable[..., Case], copy: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(copy.run)
    path = run.captured("t")
    shutil.copy(path, tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5", "r+") as file:
        del file["/model"].attrs["source_hash"]
    about = (copy.run / "run.json").read_text()
    (copy.run / "run.json").write_text(about.replace(str(path), str(tmp_path / "t.h5")))
    assert copy.live("-p", "full") == 0
    assert "checked by its shapes and the keys of the first tokens" in capsys.readouterr().err
    assert Case(case("one_kv_head").model, copy.run).live("-p", "snapkv") == 3
    assert "another model: expected 4 query and 2 KV heads, found 4 and 1" in capsys.readouterr().err
    assert Case(case("qwen3").model, copy.run).live("-p", "snapkv") == 3
    assert "another model: expected the keys of the first tokens in layer" in capsys.readouterr().err


def test_failed_cells_leave_the_others(
    copy: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each, exit code 6, and the same command measures only these again."""
    from kvreplay.live.cells import LiveCell

    row = LiveCell.row

    def fails(cell: LiveCell, *words: object) -> object:
        if cell.label == "random":
            raise Error("a store", "unreadable")
        return row(cell, *words)

    monkeypatch.setattr(LiveCell, "row", fails)
    assert copy.live("-b", "24", "--batch", "4") == 6
    said = capsys.readouterr().err.splitlines()
    assert "kvreplay: live: t: random at 24: failed: a store: unreadable" in said
    assert said[-1].startswith("kvreplay: live: cells failed: 1 (listed above)")
    cells = Run(copy.run).cells
    some = cells[cells["budget"] == "24"]
    assert set(rows(copy)["cell"]) == set(some["cell"][some["label"] != "random"])
    monkeypatch.undo()
    assert copy.live("-b", "24", "--batch", "4") == 0
    assert set(rows(copy)["cell"]) == set(some["cell"])


def test_nan_in_the_logits_fails_the_cell(
    copy: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvreplay.live import measure

    passes = measure.run

    def overflows(*words: object) -> object:
        found = passes(*words)
        found.log_probabilities[:] = float("nan")
        return found

    monkeypatch.setattr(measure, "run", overflows)
    assert copy.live("-b", "24", "-p", "snapkv:heads=kv") == 6
    assert "failed: logits are NaN: expected finite numbers; use another --dtype" in capsys.readouterr().err


def test_the_model_is_not_loaded_where_nothing_is_to_do(
    copy: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvreplay.capture import model

    assert copy.live("-p", "snapkv", "--generate", "2") == 0

    def loads(*_: object) -> None:
        raise Error("load", "the model is loaded")

    monkeypatch.setattr(model, "load", loads)
    capsys.readouterr()
    for words in ((), ("--generate", "2"), ("--dtype", "float32", "--device", "cpu")):
        assert copy.live("-p", "snapkv", *words) == 0
        assert capsys.readouterr().err == "kvreplay: live: all cells are measured already\n"
    for words in ((), ("-p", "snapkv", "--generate", "3"), ("-p", "snapkv", "--dtype", "bfloat16")):
        assert copy.live(*words) == 3
        assert "the model is loaded" in capsys.readouterr().err


def test_memory_bounds_the_batch(copy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """As many rows as fit; where one does not fit, no pass is run."""
    assert copy.live("--batch", "3") == 0
    wanted = (copy.run / "live.csv").read_bytes()
    shutil.rmtree(copy.run / "live")
    capsys.readouterr()
    assert copy.live("--memory", "1k") == 5
    [said] = capsys.readouterr().err.splitlines()
    words = "kvreplay: --memory: too small for one cell of trace t: expected at least (.*) MiB, found 0.0 MiB"
    least = float(re.fullmatch(words, said)[1])
    assert not (copy.run / "live").exists()
    assert copy.live("--memory", f"{least - 0.1}M") == 5
    capsys.readouterr()
    assert copy.live("--memory", f"{least + 0.1}M", "--batch", "64", "-p", "full") == 0
    said = capsys.readouterr().err
    batch = int(re.search(r"t: batch of (\d+) cells in place of 64, limited by --memory", said)[1])
    assert 1 <= batch < 64
    shutil.rmtree(copy.run / "live")
    assert copy.live("--memory", "4GiB", "--batch", "3") == 0
    assert "in place of" not in capsys.readouterr().err and (copy.run / "live.csv").read_bytes() == wanted


def test_what_reads_the_rows(copy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """compare and predict take live metrics by name, with their direction."""
    assert copy.live() == 0
    run = Run(copy.run)
    assert {"kld", "same_top_p"} <= set(run.results["metric"])
    assert run.better_of("kld:p99") == "lower" and run.better_of("same_top_p") == "higher"
    assert len(run.live) == len(rows(copy))
    capsys.readouterr()
    assert compare([str(copy.run), "--baseline", "random", "--metric", "kld", "-p", "chunkkv"]) == 0
    assert "kld" in capsys.readouterr().out
    assert predict([str(copy.run)]) == 0
    said = capsys.readouterr().out
    assert "output_error" in said and "orders the policies most like kld" in said


def test_two_ways_are_told_apart(copy: Case) -> None:
    assert copy.live("-p", "snapkv") == 0
    assert copy.live("-p", "snapkv", "--dtype", "bfloat16") == 0
    table = Run(copy.run).results
    found = set(table["variant"][table["metric"] == "same_top_p"])
    assert {one.split()[2] for one in found} == {"float32", "bfloat16"}


def test_merged_runs_have_the_rows_of_both(copy: Case, tmp_path: Path) -> None:
    """As many rows as one run, equal ones once; another number for the same row is refused."""
    path = Run(copy.run).captured("t")
    parts = []
    for name, policies in (("a", ["snapkv:window=4", "random"]), ("b", ["random", "local"])):
        kv.replay(path, policies, [24], output=tmp_path / name)
        parts.append(Case(copy.model, tmp_path / name))
        assert parts[-1].live() == 0
    assert program(["merge", str(tmp_path / "both"), str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [(tmp_path / name / "live.csv").read_text().splitlines() for name in ("a", "b", "both")]
    assert lines[2] == [lines[0][0], *sorted({*lines[0][1:], *lines[1][1:]})]
    assert (tmp_path / "both/live/t.csv").read_text().splitlines() == lines[2]
    assert len(Run(tmp_path / "both").live) == len(lines[2]) - 1
    changed = tmp_path / "b/live/t.csv"
    changed.write_text(
        "\n".join(line.replace("0.", "0.9", 1) if ",random," in line else line for line in lines[1]) + "\n"
    )
    assert program(["merge", str(tmp_path / "other"), str(tmp_path / "a"), str(tmp_path / "b")]) == 3


def test_latent_attention(case: Callable[..., Case], capsys: pytest.CaptureFixture[str]) -> None:
    """Kept sets are measured; what moves or pages latent keys is omitted by name."""
    policies = ("snapkv:window=4", "h2o:schedule=every(16),recent=4", "streaming-llm:positions=cache", "quest:page=8")
    made = case("deepseek_v3", "command", policies)
    assert made.live() == 0
    said = capsys.readouterr().err
    for name in ("streaming-llm", "quest"):
        assert re.search(f"omitted: {name}[^:]*: it moves, changes or pages latent keys", said), said
    table = rows(made)
    assert {"snapkv", "full", "random", "oracle"} <= set(table["policy"])
    assert set(table[(table["policy"] == "full") & (table["metric"] == "kld")]["value"]) == {"0"}
    assert made.live("--live-decisions") == 4


def test_decisions_with_sink_logits(case: Callable[..., Case], capsys: pytest.CaptureFixture[str]) -> None:
    """The first block is read with nothing evicted, so that its decisions are those of the replay."""
    made = case("gpt_oss", "command", ("h2o:schedule=every(16),recent=4",))
    assert made.live("--live-decisions") == 0
    table = rows(made)
    assert "h2o" in set(table["policy"])
