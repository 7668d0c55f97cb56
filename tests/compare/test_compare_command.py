"""Does `kvreplay compare` read runs, join prompts, print what it computed, and refuse what cannot be meant?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from write_run import write_run

from kvreplay.compare.command import main

SIX = [f"needle-{i:03d}" for i in range(6)]
BASE = [0.5, 0.6, 0.7, 0.5, 0.6, 0.7]
VALUES = {
    "base": {"attention_recall": BASE, "output_error": [0.2] * 6},
    "a": {"attention_recall": [x + d for x, d in zip(BASE, [0.1, 0.2, 0.1, 0.25, 0.1, 0.0], strict=True)],
          "output_error": [0.1] * 5 + [0.3]},
    "b:chunk=10": {"attention_recall": [0.4] * 6, "output_error": [0.2] * 6},
    "b:chunk=20": {"attention_recall": [0.45, "", "", "", "", ""], "output_error": [""] * 6},
    "random": {"attention_recall": [0.1] * 6, "output_error": [0.9] * 6},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", VALUES, SIX)


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines(capsys: pytest.CaptureFixture[str], *arguments: object) -> pd.DataFrame:
    return pd.DataFrame(document(capsys, *arguments)["lines"]).set_index(["metric", "policy"])


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert main([str(one) for one in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_one_run_against_a_baseline(run, capsys):
    found = document(capsys, run, "--baseline", "base", "--metric", "attention_recall,output_error")
    assert (found["open_loop"], found["traces"], found["prompts"], found["models"]) == (True, 6, 6, ["small"])
    assert found["comparisons"] == 5  # b:chunk=20 has no output_error
    table = pd.DataFrame(found["lines"]).set_index(["metric", "policy"])
    recall = table.loc[("attention_recall", "a")]
    assert recall["difference"] == pytest.approx(0.125, abs=1e-12)
    assert recall["p"] == 2 / 2**6 * 2  # 0.75 in all: all six signs alike, and that of the difference 0 is free
    assert (recall["wins"], recall["ties"], recall["losses"]) == (5, 1, 0)
    error = table.loc[("output_error", "a")]
    assert (error["wins"], error["ties"], error["losses"]) == (5, 0, 1)
    partly = table.loc[("attention_recall", "b:chunk=20")]
    assert (partly["traces"], partly["pairs"], partly["mean"]) == (1, 1, 0.45)
    assert "means are over the shared traces, and those of the baseline over all its traces: b:chunk=20" in (
        "".join(found["notes"])
    )
    assert table.loc[("output_error", "b:chunk=20"), "pairs"] == 0
    assert table.loc[("attention_recall", "base"), "difference"] is None or pd.isna(
        table.loc[("attention_recall", "base"), "difference"])  # fmt: skip
    assert "random" not in table.index.get_level_values("policy")


def test_holm_counts_the_comparisons_that_are_printed(run, capsys):
    alone = lines(capsys, run, "--baseline", "base", "-p", "a").loc[("attention_recall", "a")]
    assert alone["p_holm"] == alone["p"]
    both = lines(capsys, run, "--baseline", "base", "-p", "a,b:chunk=10").loc["attention_recall"]
    assert both.loc["b:chunk=10", "p"] == 2 / 2**6  # 0.1 to 0.3 less on every prompt
    assert both.loc["b:chunk=10", "p_holm"] == 4 / 2**6 and both.loc["a", "p_holm"] == 4 / 2**6


def test_the_star_is_for_what_holm_leaves(run, capsys):
    """p is 0.031 both times; with a second comparison Holm makes it 0.062."""
    for policies, star in (("b:chunk=10", True), ("a,b:chunk=10", False)):
        assert main([str(run), "--baseline", "base", "-p", policies]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if one.startswith("b:chunk=10 ")]
        assert ("*" in line) is star


def test_the_table_is_aligned_and_says_open_loop(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([str(run), "--baseline", "base", "-p", "a,random"]) == 0
    captured = capsys.readouterr()
    page = captured.out.splitlines()
    assert page[0] == "traces    6 of 6 prompts   small        OPEN LOOP"
    assert page[1] == "baseline  base"
    assert page[2:4] == ["", "attention_recall (share), budget 0.1"]
    assert page[4].split() == ("policy heads traces mean 95 % interval difference 95 % interval p p Holm "
                               "better/same/worse").split()  # fmt: skip
    assert page[5].split()[:4] == ["base", "kv", "6", "0.6000"] and page[5].split()[-1] == "baseline"
    assert page[6].split()[:4] == ["a", "kv", "6", "0.7250"] and page[6].endswith("5/1/0")
    assert page[7].split()[0] == "(random)" and page[7].endswith("0/0/6")
    assert len(page[6]) == len(page[7]) == len(page[4])
    assert captured.err.splitlines() == [
        "kvreplay: compare: no policy has a random twin: skill is not compared (use replay --controls twins)",
    ]


@pytest.mark.parametrize(("prompts", "note"), [(5, "few prompts (5): the smallest possible p is 0.0625"), (6, "")])
def test_too_few_prompts_for_a_significant_difference_are_noted(prompts, note, tmp_path, capsys):
    values = {label: {"attention_recall": BASE[:prompts]} for label in ("base", "a")}
    run = write_run(tmp_path / "run", values, SIX[:prompts])
    assert main([str(run), "--baseline", "base", "-p", "a"]) == 0
    assert ("few prompts" in (said := capsys.readouterr().err)) == bool(note) and note in said


def test_the_table_fits_80_columns_without_a_terminal(run, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([str(run), "--baseline", "base", "--metric", "attention_recall,output_error"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert max(map(len, page)) <= 80
    assert [line for line in page if "budget 0.1" in line] == [
        "attention_recall (share), budget 0.1", "output_error (relative L2 norm), budget 0.1"
    ]  # fmt: skip
    assert "columns not shown in this width: heads, traces, 95 % interval of the mean" in "\n".join(page)


def test_a_metric_without_a_direction_has_no_winner(tmp_path, capsys):
    values = {name: {"kv_bytes": [n] * 2, "attention_recall": [n] * 2} for name, n in (("base", 1), ("a", 2))}
    run = write_run(tmp_path / "run", values, SIX[:2])
    found = lines(capsys, run, "--baseline", "base", "--metric", "kv_bytes,attention_recall")
    assert pd.isna(found.loc[("kv_bytes", "a"), "wins"]) and found.loc[("attention_recall", "a"), "wins"] == 2
    assert main([str(run), "--baseline", "base", "--metric", "kv_bytes"]) == 0
    assert capsys.readouterr().out.splitlines()[6].endswith(" -")
    untold = write_run(tmp_path / "untold", values, SIX[:2], better={})
    assert main([str(untold), "--baseline", "base"]) == 0
    assert "run.json does not say whether higher or lower is better for attention_recall" in capsys.readouterr().err


def test_a_variant_has_its_own_direction_and_unit_and_else_those_of_its_metric(tmp_path, capsys):
    names = ["kv_l1_loss", "kv_l1_loss:key", "kv_l1_loss:rho", "kv_l1_loss:token"]
    values = {policy: {name: [n] * 2 for name in names} for policy, n in (("base", 1), ("a", 2))}
    run = write_run(tmp_path / "run", values, SIX[:2], better={"kv_l1_loss": "lower"},
                    variants={"kv_l1_loss:rho": "higher", "kv_l1_loss:token": "neither"})  # fmt: skip
    found = lines(capsys, run, "--baseline", "base", "--metric", ",".join(names)).xs("a", level="policy")
    assert list(found.loc[names, "better"]) == ["lower", "lower", "higher", "neither"]
    assert list(found.loc[names, "unit"]) == ["share", "share", "ratio", "share"]
    assert [found.loc[name, "wins"] for name in names[:3]] == [0, 0, 2] and pd.isna(found.loc[names[3], "wins"])


def with_twins(recall: dict[str, list[float]], twin: float, oracle: float) -> dict[str, dict[str, list[float]]]:
    """Values of these policies and their twins, which all recall the same, as the best sets do."""
    return {
        name: {"attention_recall": values, "attention_recall:oracle": [oracle] * len(values)}
        for policy, own in recall.items()
        for name, values in ((policy, own), (f"random-twin:of=({policy}),seed=0", [twin] * len(own)))
    }


def test_skill_is_compared_beside_recall_where_there_are_twins(tmp_path, capsys):
    values = with_twins({"base": [0.5] * 3, "a": [0.6, 0.7, 0.4]}, twin=0.4, oracle=0.8)
    run = write_run(tmp_path / "run", values | {"c": VALUES["b:chunk=10"], "random": VALUES["random"]}, SIX[:3])
    assert main([str(run), "--baseline", "base", "--json"]) == 0
    captured = capsys.readouterr()
    found = pd.DataFrame(json.loads(captured.out)["lines"]).set_index(["metric", "policy"])
    assert list(found.index) == [("attention_recall", "base"), ("attention_recall", "a"), ("attention_recall", "c"),
                                 ("skill", "base"), ("skill", "a")]  # fmt: skip
    a = found.loc[("skill", "a")]
    # 0.5, 0.75 and 0 against 0.25 each.
    assert a["mean"] == pytest.approx(1.25 / 3) and a["difference"] == pytest.approx(0.5 / 3)
    assert (a["wins"], a["losses"], a["unit"], a["better"]) == (2, 1, "ratio", "higher")
    assert "twin" not in captured.err
    assert set(lines(capsys, run, "--baseline", "base", "--metric", "attention_recall").index.get_level_values(0)) == {
        "attention_recall"}  # fmt: skip


def test_the_pooled_error_is_compared_if_the_run_has_it(tmp_path, capsys):
    values = {
        name: {"attention_recall": [0.5] * 2, "output_error": [0.1] * 2, "output_error:pooled": [error] * 2}
        for name, error in (("base", 0.2), ("a", 0.1))
    }
    found = lines(capsys, write_run(tmp_path / "run", values, SIX[:2]), "--baseline", "base")
    assert set(found.index.get_level_values(0)) == {"output_error:pooled"}
    assert found.loc[("output_error:pooled", "a"), "wins"] == 2


def test_a_baseline_without_a_twin_has_no_skill_to_compare_with(tmp_path, capsys):
    run = write_run(tmp_path / "run", with_twins({"a": [0.5] * 6}, 0.4, 0.8) | {"random": VALUES["random"]}, SIX)
    assert main([str(run), "--baseline", "random"]) == 0
    captured = capsys.readouterr()
    assert "skill" not in captured.out and "attention_recall" in captured.out
    assert "kvreplay: compare: random has no random twin: skill is not compared\n" in captured.err


def test_a_twin_is_compared_when_it_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", with_twins({"a": [0.5] * 6, "b": [0.6] * 6}, 0.25, 1.0), SIX)
    named = lines(capsys, run, "--baseline", "a", "-p", "random-twin:of=(a)", "--metric", "attention_recall")
    assert named.loc[("attention_recall", "random-twin:of=(a)"), "difference"] == -0.25


def test_two_models_on_one_prompt_are_one_cluster(tmp_path, capsys):
    runs = [write_run(tmp_path / model, VALUES, SIX, model) for model in ("small", "large")]
    found = document(capsys, *runs, "--baseline", "base", "-p", "a")
    assert (found["traces"], found["prompts"], found["models"]) == (12, 6, ["large", "small"])
    same = write_run(tmp_path / "same", VALUES, SIX, "Small")
    assert document(capsys, runs[0], same, "--baseline", "base", "-p", "a")["models"] == ["small"]
    line = found["lines"][1]
    assert (line["pairs"], line["paired_prompts"]) == (12, 6)
    assert line["p"] == 2 / 2**6 * 2  # as with one model: twelve traces are no more evidence than six prompts


def test_two_continuations_of_one_prompt_are_one_cluster(tmp_path, capsys):
    prompts = ["x", "x", "y", "y", "z", "z"]
    run = write_run(tmp_path / "run", VALUES, SIX, prompts=prompts)
    assert document(capsys, run, "--baseline", "base")["prompts"] == 3


def test_a_pattern_says_which_names_are_of_one_prompt(tmp_path, capsys):
    names = ["p0-small", "p0-large", "p1-small", "p1-large", "p2-small", "p3-large"]
    run = write_run(tmp_path / "run", VALUES, names)
    assert document(capsys, run, "--baseline", "base")["prompts"] == 6
    for pattern in ("p[0-9]", "(p[0-9])-[a-z]+", "^[^-]*"):
        assert document(capsys, run, "--baseline", "base", "--same-prompt", pattern)["prompts"] == 4


def test_a_cell_in_two_runs_counts_once(tmp_path, capsys):
    first = write_run(tmp_path / "first", VALUES, SIX)
    second = write_run(tmp_path / "second", VALUES, SIX)
    assert main([str(first), str(second), "--baseline", "base", "-p", "a"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("traces    6 of 6 prompts")
    assert "30 cells occur in several runs and are counted once" in captured.err


def test_a_baseline_is_the_label_of_one_where_others_have_a_parameter_more(tmp_path, capsys):
    """`snapkv` of a run without --protect, beside one whose policies all have it."""
    recall = {name: {"attention_recall": VALUES[name]["attention_recall"]} for name in ("base", "a", "b:chunk=10")}
    plain = {"snapkv:window=8": recall["base"], "h2o": recall["b:chunk=10"]}
    protected = {"snapkv:window=8,protect=(sinks=4,recent=0.1)": recall["a"]}
    runs = [write_run(tmp_path / "plain", plain, SIX), write_run(tmp_path / "protected", protected, SIX)]
    label = "snapkv:protect=(sinks=4,recent=0.1)"
    found = lines(capsys, *runs, "--baseline", "snapkv")["difference"]
    assert set(found.index.get_level_values("policy")) == {"snapkv", label, "h2o"}
    assert found["attention_recall", label] == pytest.approx(0.125)
    found = lines(capsys, *runs, "--baseline", label)["difference"]
    assert found["attention_recall", "snapkv"] == pytest.approx(-0.125)
    found = lines(capsys, *runs, "--baseline", "h2o", "-p", label)
    assert set(found.index.get_level_values("policy")) == {"h2o", label}
    said = refused(capsys, 2, *runs, "--baseline", "snapkv", "--protect", "sinks=4")
    assert said == "kvreplay: compare: unknown option: expected an option of kvreplay compare --help, found --protect\n"


def test_a_trace_under_two_names_is_one_trace(tmp_path, capsys):
    """Two runs with other eval queries: what they differ in tells their policies apart, whatever the file is called."""
    hashes = [f"hash {i}" for i in range(6)]
    first = write_run(tmp_path / "first", VALUES, SIX, hashes=hashes)
    copies = [f"copy-{i}" for i in range(6)]
    second = write_run(tmp_path / "second", VALUES, copies, hashes=hashes, eval_queries="prompt", version="/prompt")
    found = document(capsys, first, second, "--baseline", "base:eval=continuation", "-p", "a")
    assert (found["traces"], found["prompts"]) == (6, 6)
    assert [line["policy"] for line in found["lines"]] == [
        "base:eval=continuation", "a:eval=continuation", "a:eval=prompt"]  # fmt: skip


def test_two_results_that_nothing_tells_apart_are_refused(tmp_path, capsys):
    first = write_run(tmp_path / "first", VALUES, SIX)
    second = write_run(tmp_path / "second", VALUES, SIX, version="/edited")
    line = refused(capsys, 2, first, second, "--baseline", "base", "-p", "a")
    assert f"{first}, {second}: two results of base at budget 0.1 for trace needle-000: expected one cell" in line


def test_traces_whose_prompts_are_not_known_are_named(run, capsys):
    """run.json lists the traces of the last replay into a folder; those of an earlier one have a name alone."""
    about = json.loads((run / "run.json").read_text())
    about["inputs"] = about["inputs"][:4]
    (run / "run.json").write_text(json.dumps(about))
    assert main([str(run), "--baseline", "base"]) == 0
    note = "run.json has no prompt hashes of 2 traces (needle-004, needle-005): traces are grouped"
    assert note in capsys.readouterr().err
    assert main([str(run), "--baseline", "base", "--same-prompt", "needle-[0-9]"]) == 0
    assert "token ids" not in capsys.readouterr().err


def test_traces_that_a_budget_lacks_are_counted(tmp_path, capsys):
    """Of two traces of other lengths a budget of as many tokens may have two names."""
    long = write_run(tmp_path / "long", VALUES, SIX, "long", budgets=("0.1", "0.2"))
    short = write_run(tmp_path / "short", VALUES, SIX[:4], "short", budgets=("0.2", "0.4"))
    assert main([str(long), str(short), "--baseline", "base"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "are omitted" in line]
    assert [line.removeprefix("kvreplay: compare: ") for line in notes] == [
        "budget 0.1: 4 of 10 traces have no cell at this budget and are omitted",
        "budget 0.4: 6 of 10 traces have no cell at this budget and are omitted"]  # fmt: skip


def held_by_own_rule(run: Path, policy: str) -> None:
    """Says in run.json that no budget binds the policy."""
    about = json.loads((run / "run.json").read_text())
    about["cells"] = [{"trace": trace, "cell": f"small/{trace}/{policy}/0.1", "own_memory": True} for trace in SIX]
    (run / "run.json").write_text(json.dumps(about))


def test_what_no_budget_binds_has_no_verdict(run, capsys):
    held_by_own_rule(run, "b:chunk=10")
    assert main([str(run), "--baseline", "base", "-p", "a,b:chunk=10"]) == 0
    captured = capsys.readouterr()
    [line] = [one for one in captured.out.splitlines() if one.startswith("b:chunk=10 ")]
    assert "-0.200" in line and line.split()[-2:] == ["-", "-"]
    assert "not at equal memory, so no p and no verdict: b:chunk=10" in captured.err
    found = document(capsys, run, "--baseline", "base", "-p", "a,b:chunk=10")
    assert found["comparisons"] == 1  # Holm corrects for what is tested
    assert [line["own_memory"] for line in found["lines"]] == [False, False, True]


def test_nothing_is_at_equal_memory_with_a_baseline_that_no_budget_binds(run, capsys):
    held_by_own_rule(run, "base")
    found = document(capsys, run, "--baseline", "base", "-p", "a")["lines"][1]
    assert found["difference"] == pytest.approx(0.125) and found["p"] is None and found["wins"] is None


def test_the_seed_decides_every_draw(tmp_path, capsys):
    names = [f"t{i}" for i in range(20)]
    values = {"base": {"attention_recall": [0.5] * 20}, "a": {"attention_recall": [0.45 + i / 100 for i in range(20)]}}
    run = write_run(tmp_path / "run", values, names)
    first, again, other = (document(capsys, run, "--baseline", "base", "--seed", seed)["lines"] for seed in (7, 7, 8))
    assert first == again
    assert first[1]["p"] != other[1]["p"]
    assert first[1]["difference"] == other[1]["difference"]


def test_csv_holds_the_table_in_full_precision(run, tmp_path, capsys):
    data = tmp_path / "new" / "table.csv"
    found = lines(capsys, run, "--baseline", "base", "--data", data)
    table = pd.read_csv(data, float_precision="round_trip").set_index(["metric", "policy"])
    assert list(table["mean"]) == list(found["mean"])
    assert set(table["unit"]) == set(found["unit"]) == {"share"}
    assert list(table["p"].dropna()) == list(found["p"].dropna())


def test_a_failed_cell_is_left_out(run, capsys):
    about = json.loads((run / "run.json").read_text())
    about["cells"] = [{"trace": SIX[0], "cell": f"small/{SIX[0]}/a/0.1", "state": "failed"}]
    (run / "run.json").write_text(json.dumps(about))
    assert main([str(run), "--baseline", "base", "-p", "a", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lines"][1]["pairs"] == 5
    assert captured.err.startswith(f"kvreplay: compare: {run}: 1 failed cells are omitted\n")


def test_a_thousand_traces_of_two_policies_with_other_rows_between(tmp_path, capsys):
    names = [f"t{i}" for i in range(1000)]
    values = {"base": {"attention_recall": [0.5] * 1000},
              "a": {"attention_recall": [0.5 + (i % 3 - 0.5) / 10 for i in range(1000)]}}  # fmt: skip
    run = write_run(tmp_path / "run", values, names, budgets=("0.1", "0.2"))
    found = document(capsys, run, "--baseline", "base")
    assert (found["traces"], found["prompts"], len(found["lines"])) == (1000, 1000, 4)
    assert found["lines"][1]["wins"] == 666 and found["lines"][1]["losses"] == 334


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--baseline: no policy to compare with: expected a policy of the run, found none"),
        (["--baseline", "bas"], "--baseline: unknown policy bas: did you mean base?"),
        (["--baseline", "b"], "--baseline: ambiguous policy: expected one of b:chunk=10, b:chunk=20, found b"),
        (["--baseline", "base", "-p", "base"], "--baseline: no policy to compare with the baseline"),
        (["--baseline", "base", "-p", "c"], "-p: unknown policy"),
        (["--baseline", "base", "-b", "0.2"], "-b: unknown budget: expected 0.1, found 0.2"),
        (
            ["--baseline", "base", "--metric", "atention_recall"],
            "--metric: unknown metric atention_recall: did you mean attention_recall?",
        ),
        (["--baseline", "base", "--same-prompt", "("], "--same-prompt: not a regular expression"),
        (["--baseline", "base", "--data", "table.txt"], "--data: unknown file format: expected a name ending in .csv"),
        (["--baseline", "base", "--seed", "-1"], "--seed: out of range: expected 0 or more, found -1"),
        (["--baseline", "base", "--seed", "x"], "compare: argument --seed: invalid int value"),
        (["--base", "base"], "compare: unknown option --base: did you mean --baseline?"),
        (["--baseline=base", "--metrik", "x"], "compare: unknown option --metrik: did you mean --metric?"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_nearest(options, words, run, capsys):
    assert words in refused(capsys, 2, run, *options)


def test_what_cannot_be_read_is_refused_by_name(run, tmp_path, capsys):
    assert "not a finished run" in refused(capsys, 3, run, tmp_path / "none", "--baseline", "base")
    assert "/dev/null: cannot be written" in refused(
        capsys, 3, run, "--baseline", "base", "--data", "/dev/null/table.csv")  # fmt: skip
    table = (run / "results.csv").read_text()
    (run / "results.csv").write_text(table.splitlines()[0] + "\n")
    assert "nothing to compare: expected at least one cell, found none" in refused(capsys, 3, run, "--baseline", "a")
    (run / "results.csv").write_text(table.replace(",0.6,", ",six,"))
    assert "value: expected a number, or empty, found six" in refused(capsys, 3, run, "--baseline", "base")


@pytest.mark.parametrize("option, unbuffered", [("--json", ""), ("--json", "1"), ("--help", "")])
def test_a_reader_that_leaves_is_no_bug(option, unbuffered, run):
    """As `kvreplay compare ... | head -1`, with the reader gone before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvreplay.compare.command", str(run), "--baseline", "random", option]
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer) as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 141  # as of the signal by which the replay program leaves
    assert "bug" not in done.stderr and "BrokenPipe" not in done.stderr


def test_without_pandas_it_says_what_to_install(run):
    code = "import sys; sys.modules['pandas'] = None; from kvreplay.compare.command import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(run), "--baseline", "base"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "kvreplay: compare: pandas is not installed; run pip install pandas\n"


def test_the_table_shows_parameters_that_differ_from_the_defaults(tmp_path, capsys):
    """Also where the run has one cell of the policy. Data keep the label, and the shown name is accepted."""
    metrics = {"attention_recall": BASE}
    policies = {"chunkkv:chunk=4,reuse=1": metrics, "snapkv:window=8,kernel=3": metrics,
                "snapkv:window=4,kernel=3": metrics}  # fmt: skip
    run = write_run(tmp_path / "run", policies, SIX)
    assert main([str(run), "--baseline", "chunkkv:chunk=4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "baseline  chunkkv:chunk=4" in said
    assert any(line.startswith("difference: policy minus baseline (chunkkv:chunk=4),") for line in said)
    shown = {line.split()[0] for line in said if line.startswith(("snapkv", "chunkkv"))}
    assert shown == {"chunkkv:chunk=4", "snapkv:window=4,kernel=3", "snapkv:window=8,kernel=3"}
    named = set(lines(capsys, run, "--baseline", "chunkkv").reset_index()["policy"])
    assert named == {"chunkkv", "snapkv:window=4", "snapkv:window=8"}


@pytest.mark.parametrize(("metrics", "open_loop"), [("live.kld", False), ("kld,attention_recall", True)])
def test_live_metrics_are_named_and_explained_as_in_other_tables(tmp_path, capsys, metrics, open_loop):
    values = {"attention_recall": BASE, "kld": BASE}
    better = {"attention_recall": "higher", "kld": "lower"}
    run = write_run(tmp_path / "run", {"base": values, "other": values}, SIX, better=better)
    assert main([str(run), "--baseline", "base", "--metric", metrics]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "live.kld (nats), budget 0.1" in said
    assert "live.*: measured in the live model that decodes with these kept sets (closed loop)" in said
    explained = "OPEN LOOP: queries as captured under the full cache"
    assert said.count("OPEN LOOP") == 2 * open_loop and (explained in said) == open_loop
    assert document(capsys, run, "--baseline", "base", "--metric", metrics)["open_loop"] == open_loop


def test_notes_are_as_wide_as_the_terminal(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", {"base": VALUES["base"], "a": VALUES["a"]}, SIX)
    words = [str(run), "--baseline", "base"]
    assert main(words) == 0
    notes = capsys.readouterr().err
    assert max(map(len, notes.splitlines())) > 80
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    said = capsys.readouterr().err
    assert max(map(len, said.splitlines())) <= 80 and said.split() == notes.split()
