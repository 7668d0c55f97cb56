"""The table of a run: that replay prints, and that show prints again."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import re
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from program import PROGRAM, WITH_PYTHON, done, kvreplay
from scipy.stats import t

MANY = "snapkv:window=2,h2o,tova,knorm,keydiff,value-norm,local,streaming-llm,strided,truncate,lagkv,leverage"

SCREEN = 31  # lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the run `out` of twelve policies at three budgets with twins on one trace, and what it printed."""
    folder = tmp_path_factory.mktemp("table")
    done("synth", "needle", "-o", "t.h5", "--layers", "2", "--prompt", "96", folder=folder)
    return folder, done(
        "replay", "t.h5", "-p", MANY, "-b", "0.2,0.3,40", "--controls", "twins", "-o", "out", folder=folder
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `out` on five traces of several lengths, of which three have a needle."""
    folder = tmp_path_factory.mktemp("traces")
    for i in range(5):
        words = ["--seed", i, "--layers", "2", "--prompt", 64 + 8 * i]
        done("synth", "needle" if i < 3 else "sinks", "-o", f"t{i}.h5", *map(str, words), folder=folder)
    names = [f"t{i}.h5" for i in range(5)]
    done("replay", *names, "-p", "h2o,snapkv:window=4,knorm", "-b", "0.2,0.4", "--controls", "twins", "-o", "out",
         folder=folder)  # fmt: skip
    return folder


def titles_of(text: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith("policy "))


def without_reuse(text: str) -> str:
    """The table of a replay that found all of its cells in the folder, without that remark."""
    assert re.search(r"   (\d+) of \1 cells reused\n", text)
    return re.sub(r"   \d+ of \d+ cells reused", "", text)


def as_csv(*words: str, folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(done("show", *words, "--csv", folder=folder))))


def test_the_default_table_is_one_narrow_screen(run: tuple[Path, str]) -> None:
    folder, text = run
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, text
    assert len(lines) <= SCREEN, text
    first = text[: text.index("\nskill = ")]
    assert first.count("\nbudget ") == 1 and "budget   0.2 of 96 = 19 tokens" in first and "out.err at" not in text
    assert "(38 tokens per head over all layers)" in " ".join(first.split())
    rows = first[first.index("policy ") :].split("\n\n")[0].splitlines()[1:]
    policies = [row for row in rows if not row.startswith("(") and "omitted" not in row]
    assert len(policies) == 10 and [row.split()[0] for row in rows if row.startswith("(")] == [
        "(full)", "(random)", "(oracle)"
    ]  # fmt: skip
    place = titles_of(text).index("out.err")
    errors = [float(row.split()[place].rstrip("*")) for row in policies]
    assert errors == sorted(errors), "of more than ten policies the best are shown, best first"
    rest = "omitted: 2 policies, 2 budgets; these are the best of equal memory by out.err\n"
    assert rest in text
    best = policies[0].split()[0]
    assert re.search(rf"^best +.*\b{re.escape(best)}\b.* at 0\.2", text, re.MULTILINE)
    assert "\nself-check full error 0 | budget ok" in text and "\nresults    out   shared observables " in text
    commands = text[text.index("\nnext ") :].replace("\nnext", "").split("\n")
    commands = [line.strip() for line in commands if line.strip()]
    assert commands == ["kvreplay show out --all", "kvreplay plot curve out", "kvreplay report out"]
    done(*commands[0].split()[1:], folder=folder)


def test_a_second_block_has_the_headline_of_few_policies_at_every_budget(run: tuple[Path, str], tmp_path: Path) -> None:
    few = "h2o,tova,knorm,lagkv"
    words = ["replay", run[0] / "t.h5", "-b", "0.2,0.3,40", "--controls", "twins", "-o", "out"]
    text = done(*words, "-p", few, folder=tmp_path)
    assert len(text.splitlines()) <= SCREEN, text
    block = text[text.index("out.err at ") :].split("\n\n")[0].splitlines()
    assert block[0].split() == ["out.err", "at", "0.2", "0.3", "40"]
    assert [line.split()[0] for line in block[1:]] == few.split(","), "the controls are in the table"
    values = {row["policy"]: row for row in as_csv("out", "-b", "40", "--columns", "out.err", folder=tmp_path)}
    for line in block[1:]:
        name, *_, value = line.split()
        assert value.rstrip("*") == f"{float(values[name]['output_error:pooled']):.3f}", line
    done(*words, "-p", "strided", folder=tmp_path)
    five = done("show", "out", folder=tmp_path)
    assert "out.err at " not in five and "\nomitted: 2 budgets\n\n" in five
    assert "omitted" not in text


@pytest.mark.parametrize("words", [[], ["--wide"], ["--all"], ["--all", "--wide"], ["--columns", "skill,kept_tokens"]])
def test_show_prints_what_replay_printed(words: list[str], run: tuple[Path, str], traces: Path) -> None:
    folder, _ = run
    again = ["replay", "t.h5", "-p", MANY, "-b", "0.2,0.3,40", "--controls", "twins", "-o", "out"]
    assert done("show", "out", *words, folder=folder) == without_reuse(done(*again, *words, folder=folder))
    again = ["replay", *(f"t{i}.h5" for i in range(5)), "-p", "h2o,snapkv:window=4,knorm", "-b", "0.2,0.4",
             "--controls", "twins", "-o", "out"]  # fmt: skip
    for each in ([], ["--each"]):
        again_of_each = without_reuse(done(*again, *words, *each, folder=traces))
        assert done("show", "out", *words, *each, folder=traces) == again_of_each


def test_show_prints_the_json_of_replay(traces: Path) -> None:
    words = ["-p", "h2o,snapkv:window=4,knorm", "-b", "0.2,0.4", "--controls", "twins", "-o", "out"]
    replayed = json.loads(done("replay", *(f"t{i}.h5" for i in range(5)), *words, "--json", folder=traces))
    shown = json.loads(done("show", "out", "--json", folder=traces))
    assert {cell.pop("state") for cell in replayed["cells"] + shown["cells"]} <= {"done", "skipped"}
    assert shown == replayed
    part = json.loads(done("show", "out", "--json", "-p", "knorm", "-b", "0.4", "--traces", "t1,t3", folder=traces))
    asked = [(cell["trace"], cell["policy"]) for cell in part["cells"] if cell["role"] == "asked"]
    assert asked == [("t1", "knorm"), ("t3", "knorm")] and [one["trace"] for one in part["traces"]] == ["t1", "t3"]
    assert {cell["budget"] for cell in part["cells"]} == {"0.4"}


def test_show_has_the_failed_cells_and_those_of_earlier_calls(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    first = done("replay", "t.h5", "-p", "h2o", "-b", "6", folder=tmp_path)
    assert done("show", "kvreplay-out", folder=tmp_path) == first
    (tmp_path / "broken.h5").write_text("no trace")
    answer = kvreplay("replay", "broken.h5", "t.h5", "-p", "knorm", "-b", "6", folder=tmp_path)
    assert answer.code == 6
    [line] = answer.err.splitlines()
    assert line.startswith("kvreplay: failed: broken, all cells: broken.h5: ")
    text = done("show", "kvreplay-out", folder=tmp_path)
    assert "trace    broken  failed: " in text
    assert {"h2o", "knorm", "(oracle)"} <= {line.split(" ")[0] for line in text.splitlines()}


def test_means_and_intervals_are_those_of_numpy(traces: Path) -> None:
    results = pd.read_csv(traces / "out/results.csv").query("layer == 'all' and head == 'all'")
    results["variant"] = results["variant"].fillna("")
    columns = {"recall": ("attention_recall", ""), "out.err": ("output_error", "pooled"),
               "needle": ("span_recall", "needle.mean")}  # fmt: skip
    found = as_csv("out", "--all", "--columns", ",".join(columns), folder=traces)
    assert len(found) == 2 * 6
    for row in found:
        for metric, variant in columns.values():
            name = f"{metric}:{variant}" if variant else metric
            mine = results.query("metric == @metric and variant == @variant and policy == @row['policy'].split(':')[0]")
            values = mine[mine["budget"] == float(row["budget"])]["value"].to_numpy()
            assert len(values) == (3 if metric == "span_recall" else 5)
            assert float(row[name]) == pytest.approx(values.mean(), rel=1e-12, abs=1e-15)
            half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
            assert float(row[f"{name} half width"]) == pytest.approx(half, rel=1e-9, abs=1e-15)


def test_a_table_of_means_says_what_it_is(traces: Path) -> None:
    text = done("show", "out", folder=traces)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        text.startswith("traces   5 of ") and "n = 5 prompts" in text and "not paired" in text and "OPEN LOOP" in text
    )
    assert re.search(r"^h2o .* 0\.\d{3} ± 0\.\d{3}", text, re.MULTILINE)
    assert "budget   0.2 of the prompt = 13 to 19 tokens" in text
    wide = done("show", "out", "--wide", folder=traces)
    document = done("show", "out", "--markdown", folder=traces)
    assert "\ntraces 5 of " in document and "OPEN LOOP\n\nmean ± half width of its 95 % interval" in document
    long = "snapkv:window=4,kernel=3,pool=avg,pool_order=pool-first,heads=query"
    done("replay", "t0.h5", "-p", long, "-b", "8", "-o", "long", folder=traces)
    assert long in done("show", "long", "--wide", folder=traces) and long not in done("show", "long", folder=traces)
    h2o = re.search(r"^h2o .*", wide, re.MULTILINE)[0]
    titles = re.search(r"^policy .*", wide, re.MULTILINE)[0]
    assert re.fullmatch(r".* ± 0\.\d{3}[* ]?", h2o[: titles.index(" jaccard") + len(" jaccard")])
    assert "needle (3 traces)" in wide and "kvreplay compare out --baseline h2o" in wide
    each = done("show", "out", "--each", folder=traces)
    assert "\nnext       kvreplay show out --each --all\n" in each
    document = done("show", "out", "--each", "--markdown", folder=traces)
    for trace, tokens in enumerate([13, 14, 16, 18, 19]):
        assert f"\nt{trace}: budget 0.2 of {64 + 8 * trace} = {tokens} tokens" in document
    assert each.count("\ntrace ") + each.startswith("trace ") == 5 and "±" not in each
    few = done("show", "out", "--traces", "t2,t3", "--wide", folder=traces)
    assert "needle (1 trace)" in few and "few give wide intervals" in " ".join(few.split()) and "few give" not in text
    one = done("show", "out", "--traces", "t2", folder=traces)
    assert one.startswith("trace    t2 ") and "±" not in one


def test_every_format_has_the_same_numbers(traces: Path) -> None:
    words = ["show", "out", "--all", "--columns", "kept,recall,out.err"]
    rows = as_csv(*words[1:], folder=traces)
    markdown = done(*words, "--markdown", folder=traces).splitlines()
    latex = done(*words, "--latex", folder=traces)
    titles = "budget & policy & kept & recall & out.err"
    assert f"\n\\begin{{tabular}}{{llrrr}}\n\\toprule\n{titles} \\\\\n\\midrule\n" in latex
    assert "$\\pm$" in latex and "\\textbf{" in latex
    assert re.findall(r"\\midrule\n(\S+) &", latex) == ["0.2", "0.4"], "a rule between budgets"
    markdown = markdown[: len(rows) + 2]
    assert {line.count("|") for line in markdown} == {markdown[0].count("|")}
    for row, line in zip(rows, markdown[2:], strict=True):
        text = f"{float(row['attention_recall']):.3f} ± {float(row['attention_recall half width']):.3f}"
        assert text in line and text.replace("±", "$\\pm$") in latex
        assert row["policy"] in line and f"| {float(row['kept_tokens']):.1f} |" in line
    assert sum("**" in line for line in markdown) >= 2


def document_rows(document: str) -> list[str]:
    """The lines of a table in Markdown or LaTeX, without those beside it."""
    return [line for line in document.splitlines() if line.startswith(("|", "\\")) or line.endswith("\\\\")]


@pytest.mark.parametrize("form", ["--markdown", "--latex"])
def test_documents_name_a_single_budget_and_unequal_memory(tmp_path: Path, form: str) -> None:
    done("synth", "fixture", "-o", "fixture.h5", folder=tmp_path)
    done("replay", "fixture.h5", "-p", "h2o,quest:page=4,least_pages=1", "-b", "4,6", "-o", "out", folder=tmp_path)

    def beside(*words: str) -> list[str]:
        text = done("show", "out", form, *words, folder=tmp_path)
        rest = [line for line in text.splitlines() if line and line not in document_rows(text)]
        assert all(line.startswith("% ") for line in rest) == (form == "--latex")
        trace, *rest = [line.removeprefix("% ") for line in rest]
        assert trace.startswith("trace fixture, prompt 12 ") and trace.endswith(", synthetic, OPEN LOOP")
        return rest

    memory = "not at equal memory, so never marked as the best: quest:page=4,least_pages=1"
    [budget, note] = beside("-b", "6", "--wide")
    assert budget.startswith("budget 6 tokens per layer and head on average") and note == memory
    assert beside("--all", "--wide") == [memory]
    assert len(beside("-b", "6", "-p", "h2o", "--wide")) == 1
    assert beside("--wide")[-1] == "1 of 2 budgets; --all prints all"
    assert beside("--all") == [memory, "--wide adds " + ", ".join(omitted_titles(done("show", "out", folder=tmp_path)))]


def omitted_titles(text: str) -> list[str]:
    """Those of the line --wide."""
    [line] = re.findall(r"^--wide +adds ((?:.|\n )+?)\n(?! )", text, re.MULTILINE)
    return " ".join(line.split()).split(", ")


def test_csv_and_json_have_everything_that_is_selected(run: tuple[Path, str], traces: Path, tmp_path: Path) -> None:
    folder, _ = run
    rows = as_csv("out", folder=folder)
    assert len(rows) == 3 * (12 + 3) and {row["budget"] for row in rows} == {"0.2", "0.3", "40"}
    wide = titles_of(done("show", "out", "--wide", folder=folder))
    assert len(rows[0]) == len(["budget", *wide, "error"]), "no column depends on the width of the text"
    assert as_csv("out", "--all", "--wide", folder=folder) == rows
    cells = json.loads(done("show", "out", "--json", folder=folder))["cells"]
    assert len([cell for cell in cells if cell["policy"] != "random-twin"]) == len(rows)
    one = as_csv("out", "-b", "40", "-p", "h2o", folder=folder)
    assert [(row["budget"], row["policy"]) for row in one][:1] == [("40", "h2o")] and len(one) == 4
    assert len(as_csv("out", "--each", folder=traces)) == 5 * len(as_csv("out", folder=traces))
    for form, lines, between in (("--markdown", 2, 0), ("--latex", 6, 2)):
        short, whole = (document_rows(done("show", "out", *all_, form, folder=folder)) for all_ in ([], ["--all"]))
        assert len(short) == lines + 10 + 3 and len(whole) == lines + len(rows) + between
        named = document_rows(done("show", "out", "--columns", "kept", form, folder=folder))
        assert any("heads" in line for line in short) and not any("heads" in line for line in named)


def test_csv_has_the_reason_of_a_failure(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    done("replay", "t.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=tmp_path)
    path = tmp_path / "out/run.json"
    told = json.loads(path.read_text())
    lost = told["cells"][0] | {"state": "failed", "error": "no luck", "cell": "0" * 16, "params": "beta=2"}
    path.write_text(json.dumps(told | {"cells": [*told["cells"], lost]}))
    rows = as_csv("out", folder=tmp_path)
    assert sorted(row["error"] for row in rows) == ["", "", "", "", "no luck"]
    [failed] = [row for row in rows if row["error"]]
    assert (failed["budget"], failed["kept_tokens"]) == ("6", "")
    assert "failed: no luck" in done("show", "out", folder=tmp_path)


def test_latex_escapes_its_characters(tmp_path: Path) -> None:
    name = r"a_b%c&d#e$f{g}h~i^j\k"
    for trace in (name, "u"):
        done("synth", "needle", "-o", f"{trace}.h5", "--prompt", "32" if trace == "u" else "48", folder=tmp_path)
    done("replay", f"{name}.h5", "u.h5", "-p", "h2o", "-b", "0.5", "-o", "out", folder=tmp_path)
    latex = done("show", "out", "--each", "--latex", folder=tmp_path)
    escaped = r"a\_b\%c\&d\#e\$f\{g\}h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k"
    assert f"\n{escaped} & h2o & " in latex


def test_titles_are_names_of_metrics(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = run
    for titles, names in (("recall,out.err", "attention_recall,output_error:pooled"),
                          ("needle,KiB", "span_recall:needle.mean,kv_bytes")):  # fmt: skip
        words = ["replay", folder / "t.h5", "-p", "h2o", "-b", "0.2", "--metrics"]
        done(*words, titles, "-o", "titles", "--force", folder=tmp_path)
        done(*words, names, "-o", "names", "--force", folder=tmp_path)
        assert (tmp_path / "titles/results.csv").read_bytes() == (tmp_path / "names/results.csv").read_bytes()
        shown = [done("show", "out", "--columns", columns, folder=folder) for columns in (titles, names)]
        assert shown[0] == shown[1]
    assert done("metrics", "recall", folder=tmp_path) == done("metrics", "attention_recall", folder=tmp_path)


def test_lines_are_as_narrow_as_the_columns_allow(run: tuple[Path, str]) -> None:
    text = done("show", "out", "--columns", "recall", folder=run[0])
    assert max(map(len, text.splitlines())) <= 80


def test_show_selects(run: tuple[Path, str]) -> None:
    folder, _ = run
    text = done("show", "out", "-p", "tova,snapkv:window=2,h2o", "-b", "40", folder=folder)
    assert [line.split()[0] for line in text.splitlines() if re.match(r"(tova|snapkv|h2o|knorm)\b", line)] == [
        "snapkv:window=2", "h2o", "tova"
    ]  # fmt: skip
    assert text.count("\nbudget ") == 1 and "40 tokens" in text and "out.err at" not in text
    for words, message in (
        (["-p", "snapvk"], "--policy: unknown policy snapvk: did you mean snapkv?"),
        (["-p", "snapkv:window=3"], "--policy: unknown policy snapkv:window=3: did you mean snapkv:window=2?"),
        (["-b", "0.4"], "--budget: unknown budget: expected one of 0.2, 0.3, 40, found 0.4"),
        (["--traces", "u"], "--trace: unknown trace"),
        (["--columns", "attention_recall:prompt"], "--columns: not measured in this run"),
        (["--columns", "atention_recall"], "did you mean attention_recall?"),
        (["--metrics", "recall"], "show: unknown option --metrics: did you mean --columns?"),
        (["--csv", "--json"], "--json: two formats: expected one of them, found --csv"),
        (["--wide", "--columns", "recall"], "--columns: cannot be combined with --wide"),
    ):
        answer = kvreplay("show", "out", *words, folder=folder)
        assert answer.code == 2 and message in answer.err and answer.err.count("\n") == 1, (words, answer)
    (folder / "trace.h5").touch()
    answer = kvreplay("show", "trace.h5", folder=folder)
    assert answer.code == 3
    assert "trace.h5: not a run: expected kvreplay replay trace.h5 -o RUN, then RUN, found a file\n" in answer.err
    (folder / "empty").mkdir(exist_ok=True)
    for name in ("empty", "missing"):
        answer = kvreplay("show", name, folder=folder)
        assert answer.code == 3 and f"{name}: not a finished run" in answer.err


def rows_of(text: str) -> list[str]:
    """First words of the rows of the first table."""
    rows = text[text.index("\npolicy ") :].split("\n\n")[0].splitlines()[2:]
    omitted = next((i for i, row in enumerate(rows) if row.startswith("omitted")), None)
    return [row.split()[0] for row in rows[:omitted]]


def test_policies_without_the_headline_are_shown_in_their_order(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = run
    trace = folder / "t.h5"
    eleven = MANY.replace(",leverage", "")
    words = ["replay", trace, "-p", eleven, "-b", "0.2", "--metrics", "kept_tokens,output_cosine"]
    for controls in ("none", "random"):
        text = done(*words, "--controls", controls, "-o", controls, folder=tmp_path)
        policies = [row for row in rows_of(text) if not row.startswith("(")]
        assert policies == MANY.split(",")[:10] and ("(random)" in text) == (controls == "random")
        assert "\nomitted: 1 policy; these are the first of the run\n" in text
        assert done("show", controls, folder=tmp_path) == text
    done("replay", trace, "-p", "leverage", "-b", "0.2", "--controls", "none", "-o", "none", folder=tmp_path)
    text = done("show", "none", folder=tmp_path)
    assert rows_of(text)[0] == "leverage" and len(rows_of(text)) == 10
    rest = "omitted: 2 policies; these are the best of equal memory by out.err, then the first others "
    assert rest in " ".join(text.split())


def test_a_selection_without_a_cell_is_refused(tmp_path: Path) -> None:
    for name, prompt in (("t", "96"), ("u", "64")):
        done("synth", "needle", "-o", f"{name}.h5", "--layers", "2", "--prompt", prompt, folder=tmp_path)
    done("replay", "t.h5", "u.h5", "-p", "h2o", "-b", "0.2", "-o", "out", folder=tmp_path)
    earlier = kvreplay("replay", "t.h5", "-p", "knorm", "-b", "0.4", "-o", "out", folder=tmp_path)
    assert earlier.code == 0 and earlier.err.startswith("kvreplay: out also has results of trace u from earlier calls")
    for words, line in (
        (["--trace", "u", "-b", "0.4"], "--budget: unknown budget: expected 0.2, found 0.4"),
        (["-p", "h2o", "-b", "0.4"], "--policy: no cell at the selected budgets and traces"),
        (["--traces", "u", "-p", "knorm"], "--policy: no cell at the selected budgets and traces"),
    ):
        for form in ([], ["--json"], ["--csv"]):
            answer = kvreplay("show", "out", *words, *form, folder=tmp_path)
            assert answer.code == 2 and answer.err.startswith(f"kvreplay: {line}"), answer
    for words in (["-b", "0.4"], ["-b", "0.4", "--each"], ["-p", "knorm"]):
        text = done("show", "out", *words, folder=tmp_path)
        assert text.startswith("trace    t ") and "knorm" in text, "traces without a cell are left out"


def test_spellings_of_a_budget_are_one_budget(run: tuple[Path, str], tmp_path: Path) -> None:
    trace = run[0] / "t.h5"
    done("synth", "needle", "-o", "u.h5", "--layers", "2", "--prompt", "64", folder=tmp_path)
    for traces, policy, budget in (([trace, "u.h5"], "h2o", "0.5"), ([trace, "u.h5"], "knorm", "50%"),
                                   ([trace], "tova", "48")):  # fmt: skip
        done("replay", *traces, "-p", policy, "-b", budget, "--controls", "none", "-o", "out", "-q", folder=tmp_path)
    for budget in ("0.5", "50%", "5e-1", "48"):
        text = done("show", "out", "--traces", "t", "-b", budget, folder=tmp_path)
        assert set(rows_of(text)) == {"h2o", "knorm", "tova"} and text.count("\nbudget ") == 1
    text = done("show", "out", "-b", "0.5", folder=tmp_path)
    assert set(rows_of(text)) == {"h2o", "knorm"} and "n = 2" in text and "fewer traces" not in text


def test_show_accepts_the_names_of_replay(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    (tmp_path / "mine.py").write_text(
        "import kvreplay as kv\n\n@kv.policy\ndef least_norm(view):\n    'norms'\n"
        "    return -view.key_norms().repeat(view.group, axis=0)\n"
    )
    spellings = ["H2O", "SnapKVPress:window=4", "mine.py:least_norm"]
    names = ["h2o", "snapkv:window=4,kernel=5,pool=avg", "least_norm"]
    for policy in spellings:
        answer = kvreplay("replay", "t.h5", "-p", policy, "-b", "6", folder=tmp_path, env=WITH_PYTHON)
        assert answer.code == 0, answer
    (tmp_path / "mine.py").unlink()
    for option in ("-p", "--policy", "--policies"):
        for spelling, name in zip(spellings, names, strict=True):
            text = done("show", "kvreplay-out", option, spelling, "--budget", "6", folder=tmp_path)
            assert [row for row in rows_of(text) if not row.startswith("(")] == [name]


def on_a_terminal(*words: str, folder: Path, **environment: str) -> str:
    """Stdout of the program where it is a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [PROGRAM, *words], cwd=folder, stdout=theirs, stderr=subprocess.PIPE, env=clean | environment
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while piece := os.read(ours, 65536):
            text += piece
    except OSError:
        pass  # its end, as Linux says it
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, process.stderr
    return text.decode().replace("\r\n", "\n")


def test_colour_is_for_terminals(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = run
    plain = done("show", "out", folder=folder)
    assert "\x1b" not in plain
    coloured = on_a_terminal("show", "out", folder=folder)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    assert re.search(r"\x1b\[1m +0\.\d{3}\*\x1b\[0m", coloured), "the best is bold"
    assert "\n\x1b[2m(oracle)" in coloured, "controls are dim"
    assert on_a_terminal("show", "out", folder=folder, NO_COLOR="1") == plain
    assert "\x1b" not in on_a_terminal("show", "out", "--markdown", folder=folder)
    assert on_a_terminal("show", "out", "--color", "never", folder=folder) == plain
    assert done("show", "out", "--color", "always", folder=folder) == coloured
    (tmp_path / "kvreplay.yaml").write_text("color: never\n")
    assert on_a_terminal("show", folder / "out", folder=tmp_path).splitlines()[:9] == plain.splitlines()[:9]
    assert "\x1b" in done("show", folder / "out", "--color", "always", folder=tmp_path)


def test_the_reason_for_the_cpu_is_recorded_and_not_printed(run: tuple[Path, str]) -> None:
    folder, _ = run
    words = [PROGRAM, "replay", "t.h5", "-p", "h2o", "-b", "0.2", "-o", "cpu", "--progress", "never"]
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ours, theirs = pty.openpty()
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=theirs, check=True, env=without_gpu)
    os.write(theirs, b"end")
    assert os.read(ours, 4096) == b"end"
    os.close(ours), os.close(theirs)
    reason = json.loads((folder / "cpu/run.json").read_text())["build"]["device"]
    answer = kvreplay(*words[1:], "--device", "cuda", folder=folder, env=without_gpu)
    assert reason.startswith("auto: ") and answer.code == 4 and reason.split(": ")[-1] in answer.err


def test_a_variant_has_a_column_where_its_metric_has_no_other(run: tuple[Path, str], tmp_path: Path) -> None:
    words = ["replay", run[0] / "t.h5", "-p", "h2o,snapkv", "-b", "0.2", "-o", "out", "--metrics"]
    variants = done(*words, "attention_recall:oracle,attention_recall:nosink", folder=tmp_path)
    assert "attention_recall:oracle" in variants and "attention_recall:nosink" in variants
    both = done(*words, "attention_recall,attention_recall:nosink", "--force", folder=tmp_path)
    assert "recall" in both and "attention_recall:nosink" not in both.partition("\ncolumns")[0]


def test_columns_are_checked_before_the_run(run: tuple[Path, str], tmp_path: Path) -> None:
    words = ["replay", run[0] / "t.h5", "-p", "h2o", "-b", "0.2", "--metrics", "recall,needle", "-o", "out"]
    for columns, line in (
        ("kept,out.err", "--columns: not among --metrics: expected one of attention_recall, span_recall:needle.mean, "
         "found out.err"),
        ("recal", "recal: unknown metric: did you mean attention_recall?"),
    ):  # fmt: skip
        for form in ([], ["--json"], ["--dry-run"], ["--dry-run", "--json"]):
            answer = kvreplay(*words, "--columns", columns, *form, folder=tmp_path)
            assert (answer.code, answer.out) == (2, "") and line in answer.err, answer
    answer = kvreplay(*words, "--columns", "recall", "--wide", folder=tmp_path)
    assert answer.code == 2 and not (tmp_path / "out").exists()
    text = done(*words, "--columns", "kept,recall,needle,select,skill", "--controls", "twins", folder=tmp_path)
    assert titles_of(text)[1:] == ["kept", "recall", "needle", "select", "skill"]


def test_skill_without_twins_is_rejected_before_the_replay(run: tuple[Path, str], tmp_path: Path) -> None:
    answer = kvreplay("replay", run[0] / "t.h5", "-p", "h2o", "-b", "0.2", "--columns", "skill", folder=tmp_path)
    assert (answer.code, list(tmp_path.iterdir())) == (2, []), answer
    assert answer.err == "kvreplay: --columns: skill needs random twins: expected --controls twins\n"


def test_every_column_that_was_not_measured_is_named_at_once(tmp_path: Path) -> None:
    done("synth", "sinks", "-o", "t.h5", "--layers", "2", "--prompt", "64", folder=tmp_path)
    done("replay", "t.h5", "-p", "h2o,knorm", "-b", "0.2", "--metrics", "recall,out.err", "-o", "out", folder=tmp_path)
    answer = kvreplay("show", "out", "--columns", "skill,recall,needle", folder=tmp_path)
    assert (answer.code, answer.err) == (2, (
        "kvreplay: --columns: not measured in this run (skill needs replay --controls twins): expected some of kept, "
        "recall, out.err, jaccard, select, found skill, needle\n"
    ))  # fmt: skip


def test_warnings_are_printed_whatever_the_table_does(run: tuple[Path, str], tmp_path: Path) -> None:
    words = ["replay", run[0] / "t.h5", "-p", "h2o", "-b", "0.2,19", "--controls", "none", "-o", "out"]
    answer = kvreplay(*words, "--columns", "span_recall:nothing.mean", folder=tmp_path)
    assert answer.code == 2 and "h2o is replayed once\n" in answer.err, answer
    assert "\nkvreplay: --columns: not measured in this run" in answer.err


def test_the_table_has_the_first_budget_that_evicts_tokens(tmp_path: Path) -> None:
    done("synth", "needle", "-o", "t.h5", "--layers", "2", "--prompt", "64", folder=tmp_path)
    answer = kvreplay("replay", "t.h5", "-p", "h2o,knorm", "-b", "100,0.25,0.5", "-o", "out", folder=tmp_path)
    assert answer.code == 0 and "\nbudget   0.25 of 64 = 16 tokens" in answer.out


def test_the_table_has_the_first_budget_at_which_most_policies_select_tokens(tmp_path: Path) -> None:
    """At 6 tokens, the window of 8 fills the budgets of two of three policies; a table of the folder is the same."""
    for name, prompt in (("a", "64"), ("b", "96")):
        done("synth", "needle", "-o", f"{name}.h5", "--layers", "2", "--prompt", prompt, folder=tmp_path)
    words = ["-p", "snapkv,ada-kv,knorm", "-b", "6,9,32", "-o", "out"]
    answer = kvreplay("replay", "a.h5", "b.h5", *words, folder=tmp_path)
    assert answer.code == 0 and "\nbudget   9 tokens per layer and head" in answer.out, answer.out
    assert done("show", "out", folder=tmp_path) == answer.out
    remedy = "use a larger budget or fewer protected tokens (parameters window, sinks, recent, or --protect)"
    assert answer.err == (
        "kvreplay: warning: budget 6: protected tokens fill the budget of 2 of 3 policies, which select no other "
        f"token: snapkv, ada-kv; {remedy}\n"
    ), answer.err
    told = json.loads((tmp_path / "out/run.json").read_text())
    filled = {(cell["trace"], cell["policy"]) for cell in told["cells"] if cell.get("protected_fill_budget")}
    assert filled == {(trace, policy) for trace in "ab" for policy in ("snapkv", "ada-kv")}
    words = ["-p", "snapkv,ada-kv,caote,pyramid-kv,knorm", "-b", "0.1", "-o", "more", "--protect", "sinks=8,recent=0"]
    answer = kvreplay("replay", "a.h5", "b.h5", *words, folder=tmp_path)
    assert re.match(
        r"kvreplay: warning: budget 0\.1 in 1 of 2 traces: protected tokens fill the budget of \d of 5 policies, "
        r"which select no other token: \S+, \S+, \S+ and \d more; ", answer.err
    ), answer.err  # fmt: skip
    assert answer.err.count("\n") == 1


def test_policies_that_read_more_than_the_budget_are_named(tmp_path: Path) -> None:
    done("synth", "needle", "-o", "t.h5", "--layers", "3", "--prompt", "64", folder=tmp_path)
    words = ["t.h5", "-p", "quest,page-means:page=8,least_pages=2,h2o", "-o", "out"]
    answer = kvreplay("replay", *words, "-b", "12,20,50", folder=tmp_path)
    remedy = "use a larger budget, or smaller page or least_pages"
    assert answer.err.splitlines() == [
        f"kvreplay: warning: {policy}: a query reads at least {tokens} tokens, more than the budget of 12; {remedy}"
        for policy, tokens in (("page-means:page=8,least_pages=2", 16), ("quest", 48))
    ]
    assert "page-means" not in kvreplay("replay", *words, "-b", "16", folder=tmp_path).err
    assert not kvreplay("replay", *words, "-b", "48", folder=tmp_path).err


def test_families_of_all_policies_have_one_heading_each(tmp_path: Path) -> None:
    done("synth", "needle", "-o", "t.h5", "--layers", "2", "--prompt", "64", folder=tmp_path)
    mixed = "h2o,knorm,tova,keydiff,snapkv,leverage,observed-attention,value-norm,vatp,local,lagkv"
    answer = kvreplay("replay", "t.h5", "-p", mixed, "-b", "0.25", "-o", "out", "--all", folder=tmp_path)
    headings = [line for line in answer.out.splitlines() if line.startswith("-- ")]
    assert headings == ["-- attention", "-- keys and values", "-- positions", "-- controls"]


LIVE_HEADER = "decisions device dtype model_hash text".split()


def write_live(folder: Path, values: dict[tuple[str, str, str], dict[str, float]], device: str = "cpu") -> None:
    """Adds the rows of `values`, by (policy, budget, decisions) the number of each NAME[:VARIANT], to live/t.csv."""
    cells = pd.read_csv(folder / "results.csv", dtype=str, keep_default_na=False).drop_duplicates("cell")
    path = folder / "live/t.csv"
    path.parent.mkdir(exist_ok=True)
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for (policy, budget, decisions), numbers in values.items():
        [cell] = cells[(cells["policy"] == policy) & (cells["budget"] == budget)].to_dict("records")
        way = {"decisions": decisions, "device": device, "dtype": "float32", "model_hash": "abc", "text": ""}
        for name, value in numbers.items():
            metric, _, variant = name.partition(":")
            named = {"layer": "all", "head": "all", "metric": metric, "variant": variant, "value": repr(value)}
            rows.append(cell | named | way | {"open_loop": "0"})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A folder with the run `out` of three policies, two of them measured in the live model."""
    done("synth", "needle", "-o", "t.h5", "--layers", "2", "--prompt", "96", folder=tmp_path)
    done("replay", "t.h5", "-p", "h2o,knorm,keydiff", "-b", "0.2", "-o", "out", folder=tmp_path)
    write_live(tmp_path / "out", {
        ("h2o", "0.2", "after-prefill"): {"kld": 0.25, "kld:p99": 2.0, "contains": 1, "f1": 0.5, "same_top_p": 0.75},
        ("knorm", "0.2", "after-prefill"): {"kld": 1.5, "contains": 0.0, "f1": float("nan"), "same_top_p": 0.5},
        ("full", "0.2", "none"): {"kld": 0.0, "contains": 1},
    })  # fmt: skip
    return tmp_path


def test_live_numbers_are_beside_the_offline_ones(live: Path) -> None:
    text = done("show", "out", folder=live)
    assert max(map(len, text.splitlines())) <= 80, text
    titles = titles_of(text)
    lines = [re.sub(r"(\d) ([um]?s)", r"\1\2", line).split() for line in text.split("\n\n")[0].splitlines()]
    rows = {line[0]: dict(zip(titles, line, strict=False)) for line in lines}
    shown = {
        name: (rows[name]["live.kld"], rows[name]["live.answer"]) for name in ("h2o", "knorm", "keydiff", "(full)")
    }
    assert shown == {"h2o": ("0.250*", "1.000*"), "knorm": ("1.500", "0.000"), "keydiff": ("-", "-"),
                     "(full)": ("0.000", "1.000")}  # fmt: skip
    assert "live.* = measured in the live model" in text and "live.answer = live.contains" in text
    assert "OPEN LOOP" in text and "live.top1" not in titles
    assert "live.top1" in titles_of(done("show", "out", "--wide", folder=live))
    some = ["kept", "kld", "live.kld:p99", "f1", "live.answer"]
    assert titles_of(done("show", "out", "--columns", ",".join(some), folder=live))[1:] == [
        "kept", "live.kld", "live.kld:p99", "live.f1", "live.answer"
    ]  # fmt: skip
    h2o = as_csv("out", folder=live)[0]
    assert (h2o["policy"], h2o["live.kld"], h2o["live.same_top_p"]) == ("h2o", "0.25", "0.75")
    cells = {cell["policy"]: cell for cell in json.loads(done("show", "out", "--json", folder=live))["cells"]}
    assert cells["knorm"]["live"] == {"contains": 0, "kld": 1.5, "same_top_p": 0.5} and "live" not in cells["keydiff"]
    assert "kld" not in cells["knorm"]["values"]


def test_the_table_opens_at_the_budget_with_live_numbers(live: Path) -> None:
    done("replay", "t.h5", "-p", "h2o,knorm", "-b", "0.2,0.3", "-o", "two", folder=live)
    assert "\nbudget   0.2 of" in done("show", "two", folder=live)
    write_live(live / "two", {("h2o", "0.3", "after-prefill"): {"kld": 0.25}, ("full", "0.2", "none"): {"kld": 0.0}})
    assert "\nbudget   0.3 of" in done("show", "two", folder=live)
    assert "\nbudget   0.2 of" in done("show", "two", "-b", "0.2", folder=live)


def test_the_best_policies_are_those_of_each_live_column_too(live: Path) -> None:
    """By its direction, with all policies that look equal, and never one that is not at equal memory."""
    write_live(live / "out", {("keydiff", "0.2", "after-prefill"): {"kld": 0.75, "contains": 1.0}})
    text = done("show", "out", "--columns", "recall,live.kld,live.answer,live.top1", folder=live)
    best = text[text.index("\nbest ") : text.index("\nself-check")].split("\n")[1:]
    assert " by out.err: " in best[0] and best[0].startswith("best       ")
    assert [line.strip() for line in best[1:]][-3:] == [
        "h2o by live.kld: 0.250", "h2o, keydiff by live.answer: 1.000", "h2o by live.top1: 0.750"
    ]  # fmt: skip
    assert " by live." not in done("show", "out", "--columns", "recall", folder=live)
    done("replay", "t.h5", "-p", "kivi,h2o,knorm", "-b", "0.2", "-o", "own", folder=live)
    write_live(live / "own", {(name, "0.2", "after-prefill"): {"kld": value}
                              for name, value in (("kivi", 0.1), ("h2o", 0.5), ("knorm", 0.4))})  # fmt: skip
    assert "knorm by live.kld: 0.400" in done("show", "own", folder=live)


def test_names_of_live_numbers_tell_how_they_were_measured(live: Path) -> None:
    """As in Python and in figures: sets that were decided live, and a number that was measured on two devices."""
    write_live(live / "out", {("h2o", "0.2", "during-prefill"): {"kld": 0.5}})
    write_live(live / "out", {("knorm", "0.2", "after-prefill"): {"kld": 1.25}}, device="cuda")
    [h2o, knorm, *_] = as_csv("out", folder=live)
    ways = {name: value for name, value in knorm.items() if name.startswith("live.kld") and value}
    of_way = "live.kld:after-prefill {} float32 abc"
    assert ways == {of_way.format("cpu"): "1.5", of_way.format("cuda"): "1.25"}
    assert (h2o["live.kld"], h2o["live.kld:during-prefill"]) == ("0.25", "0.5")
    assert (
        titles_of(done("show", "out", "--columns", "kld:during-prefill", folder=live))[1] == "live.kld:during-prefill"
    )


@pytest.mark.parametrize("words", [["show", "out"], ["replay", "t.h5", "-p", "h2o", "-b", "0.2", "-o", "out"]])
def test_a_run_without_live_numbers_names_the_command_that_measures_them(words: list[str], tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    done("replay", "t.h5", "-p", "h2o", "-b", "0.2", "-o", "out", folder=tmp_path)
    answer = kvreplay(*words, "--columns", "kld", folder=tmp_path)
    said = "kvreplay: --columns: kld is measured in the live model: expected a run after kvreplay live RUN "
    assert answer.code == 2 and answer.err.startswith(said)
    answer = kvreplay("replay", "t.h5", "-p", "h2o", "-b", "0.2", "--metrics", "recall,live.kld", folder=tmp_path)
    assert answer.code == 2 and answer.err.startswith("kvreplay: --metrics: kld is measured in the live model")


def test_a_damaged_file_of_live_numbers_is_named(live: Path) -> None:
    path = live / "out/live/t.csv"
    path.write_text(path.read_text().replace("0.25", "a quarter"))
    answer = kvreplay("show", "out", folder=live)
    assert (answer.code, answer.err) == (
        3,
        "kvreplay: out/live/t.csv: value: expected a number, or empty, found a quarter\n",
    )


def test_figures_draw_the_seconds_that_tables_show(live: Path) -> None:
    for name in ("select", "select_seconds"):
        plotted = kvreplay("plot", "curve", "out", "--metric", name, "--data", "c.csv", folder=live, env=WITH_PYTHON)
        assert plotted.code == 0, plotted
    seconds = [row for row in csv.DictReader((live / "out/seconds.csv").open()) if row["metric"] == "select_seconds"]
    drawn = list(csv.DictReader((live / "c.csv").open()))
    assert {"h2o", "knorm", "keydiff"} <= {row["policy"] for row in drawn}
    for row in drawn:
        own = [float(one["value"]) for one in seconds if one["policy"] == row["policy"] and not one["variant"]]
        assert row["metric"] == "select_seconds" and math.isclose(float(row["mean"]), sum(own), rel_tol=1e-12)


def test_the_next_figure_is_of_one_model(tmp_path: Path) -> None:
    for name, model, prompt in (("a", "one", "64"), ("b", "two", "96")):
        done("synth", "needle", "-o", f"{name}.h5", "--prompt", prompt, folder=tmp_path)
        with h5py.File(tmp_path / f"{name}.h5", "r+") as file:
            file["model"].attrs["name"] = np.bytes_(model)
    done("replay", "a.h5", "b.h5", "-p", "h2o,tova", "-b", "0.2,0.4", "-o", "out", folder=tmp_path)
    text = done("show", "out", "--each", folder=tmp_path)
    assert "           kvreplay plot curve out --trace a\n" in text
    answer = kvreplay("plot", "curve", "out", folder=tmp_path, env=WITH_PYTHON)
    assert answer.err.endswith(
        "--trace: traces of several models: expected --trace NAME,…, as in --trace a, found a of one; b of two\n"
    )
    assert kvreplay("plot", "curve", "out", "--trace", "a", folder=tmp_path, env=WITH_PYTHON).code == 0
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["model"].attrs["name"] = np.bytes_("ONE")
    text = done("replay", "a.h5", "b.h5", "-p", "h2o,tova", "-b", "0.2,0.4", "-o", "same", folder=tmp_path)
    assert text.startswith("traces   2 of one   ")
    assert "plot curve same\n" in done("show", "same", "--each", folder=tmp_path)
    assert kvreplay("plot", "curve", "same", folder=tmp_path, env=WITH_PYTHON).code == 0, "a letter's case is no model"


def test_traces_of_one_prompt_are_one_sample(tmp_path: Path) -> None:
    """As in compare: two models on one prompt, and a second prompt."""
    for name, layers, prompt in (("a", 2, 96), ("b", 6, 96), ("c", 2, 64)):
        done("synth", "needle", "-o", f"{name}.h5", "--layers", str(layers), "--prompt", str(prompt), folder=tmp_path)
    done("replay", "a.h5", "b.h5", "-p", "h2o,tova", "-b", "0.2", "-o", "one", folder=tmp_path)
    one = done("show", "one", folder=tmp_path)
    assert one.startswith("traces   2 (1 prompt) of ") and "2 to 6 layers" in one
    assert "no interval, as all traces have one prompt" in one and "±" not in one
    text = done("replay", "a.h5", "b.h5", "c.h5", "-p", "h2o,tova", "-b", "0.2", "-o", "two", folder=tmp_path)
    assert text.startswith("traces   3 (2 prompts) of ") and "n = 2" in text
    values = [float(as_csv("two", "--each", "--traces", name, "--columns", "recall", "-p", "h2o", folder=tmp_path)[0]
                    ["attention_recall"]) for name in "abc"]  # fmt: skip
    found = as_csv("two", "--columns", "recall", "-p", "h2o", folder=tmp_path)[0]
    mean = np.mean(values)
    sums = np.array([values[0] + values[1] - 2 * mean, values[2] - mean])
    assert float(found["attention_recall"]) == pytest.approx(mean, rel=1e-12)
    half = t.ppf(0.975, 1) * np.sqrt(2 * (sums**2).sum()) / 3
    assert float(found["attention_recall half width"]) == pytest.approx(half, rel=1e-9)


def test_a_budget_above_the_prompt_is_the_whole_prompt(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    answer = kvreplay("replay", "t.h5", "-p", "h2o", "-b", "5000", "-o", "out", folder=tmp_path)
    text = " ".join(answer.out.split())
    assert re.search(r"budget 5000, more than the prompt: all (\d+) tokens per layer and head on average", text), text
    assert "all 5000" not in text


def test_a_second_replay_counts_the_cells_that_it_reuses(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    words = ["replay", "t.h5", "-b", "6", "-o", "out", "-p"]
    assert "reused" not in done(*words, "h2o", folder=tmp_path)
    assert re.search(r"^results +out .* 4 of 5 cells reused$", done(*words, "h2o,knorm", folder=tmp_path), re.MULTILINE)
    assert "reused" not in done(*words, "h2o,knorm", "--force", folder=tmp_path)


def test_a_wrong_file_is_reported_before_a_missing_option(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no trace")
    for words in ([], ["-p", "x"], ["-p", "x", "-b", "0.1"]):
        answer = kvreplay("replay", "README.md", *words, folder=tmp_path)
        assert answer.code == 3 and answer.err.startswith("kvreplay: README.md: signature: expected an HDF5 file")
    done("synth", "fixture", "-o", "t.h5", folder=tmp_path)
    answer = kvreplay("replay", "t.h5", "-p", "all", "-b", "0.1", folder=tmp_path)
    assert answer.code == 2 and "kvreplay info TRACE lists those that a trace supports" in answer.err
    [found] = json.loads(done("info", "t.h5", "--json", folder=tmp_path))
    names = ", ".join(one["name"] for one in found["policies"] if one["served"])  # spaces as in a printed list
    done("replay", "t.h5", "-p", names, "-b", "0.5", "--dry-run", folder=tmp_path)
