"""Are the numbers in the page those of the run, is nothing in it that must not be, and does it fit?"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from make_run import CHUNKKV, H2O, SNAPKV, Policy, make_run
from make_special import HOSTILE, write_hostile, write_largest, write_live
from program import done
from program import kvreplay as kvreplay_program
from run_pages import POLICIES, TRACE, cell_of, kept_by, opened, write_report
from scipy.stats import rankdata

import kvreplay
from kvreplay import report
from kvreplay.compare.command import main as compare
from kvreplay.plot import colours
from kvreplay.plot.figure_options import Choice
from kvreplay.report import table
from kvreplay.report.bit_planes import Planes
from kvreplay.report.command import main
from kvreplay.report.content import Page
from kvreplay.report.page import as_json
from kvreplay.results import Run


def read(page: Path) -> dict:
    """The data of a page, as a browser takes it out."""
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(data)


def plane(content: dict, place: int) -> bytes:
    return zlib.decompress(base64.b64decode(content["planes"][place]))


def cells_of(content: dict) -> list[tuple[dict, dict, dict]]:
    """(trace, budget, cell) of all."""
    return [(t, budget, cell) for t in content["traces"] for budget in t["budgets"] for cell in budget["cells"]]


def facts_of(cell: dict, budget: dict) -> tuple[str, str, str]:
    """Policy, heads and budget."""
    return cell["label"].partition(":")[0], cell["heads"].split()[0], budget["budget"]


def test_kept_tokens_are_those_of_the_run_set_by_set(real):
    content = read(write_report(real[0]))
    assert len(cells_of(content)) == 2 * (6 + 3)
    for trace, budget, cell in cells_of(content):
        wanted = kept_by(real[0], *facts_of(cell, budget))
        raw = np.frombuffer(plane(content, cell["sets"]), dtype=np.uint8).reshape(30 * cell["rows"], -1)
        bits = np.unpackbits(raw, axis=1, bitorder="little")[:, : trace["boundary"]]
        np.testing.assert_array_equal(bits.reshape(wanted.shape), wanted, err_msg=cell["label"])
        np.testing.assert_allclose(cell["kept"], wanted.sum(axis=2).mean(axis=1), rtol=1e-5)


def test_ranks_similarity_and_rules_are_those_of_the_run(real):
    content = read(write_report(real[0]))
    with_ranks = set()
    for trace, budget, cell in cells_of(content):
        group = cell_of(real[0], *facts_of(cell, budget))
        for variant in ("first", "mean", "union"):
            matrix = group[f"jaccard_{variant}"][()]
            levels = np.frombuffer(plane(content, cell["jaccard"][variant]), dtype="<u2")
            np.testing.assert_allclose(levels / 65535, matrix[np.triu_indices(30, 1)], atol=1e-5)
            assert cell["adjacent"][variant] == pytest.approx(np.mean([matrix[i, i + 1] for i in range(29)]))
        by_rule = np.frombuffer(plane(content, cell["by_rule"]), dtype="<i4").reshape(2, 30, -1)
        np.testing.assert_array_equal(by_rule, [group["sinks"][()], group["recent"][()]])
        if "ranks" in cell:
            with_ranks.add(cell["label"])
            scores, tokens = group["scores"][()], trace["boundary"]
            ranks = (rankdata(-scores, method="ordinal", axis=2) - 1).mean(axis=1)
            levels = np.frombuffer(plane(content, cell["ranks"]), dtype=np.uint8).reshape(len(cell["ranked"]), tokens)
            np.testing.assert_array_equal(levels, np.floor(256 * ranks[cell["ranked"]] / tokens))
    assert {"snapkv:heads=kv", "snapkv:heads=query", "chunkkv"} <= with_ranks
    assert not with_ranks & {"kivi", "h2o-online"}


def test_later_attention_is_within_three_percent(real):
    content = read(write_report(real[0]))
    [trace] = content["traces"]
    levels = np.frombuffer(plane(content, trace["attention"]["levels"]), dtype=np.uint8).reshape(30, -1).astype(float)
    wanted = opened(real[0])["traces/smollm2-135m-needle/eval_attention"][()]
    most = trace["attention"]["most"]
    assert most == wanted.max()
    shown = np.where(levels > 0, most * 10 ** (-6 * (255 - levels) / 254), 0)
    large = wanted >= most * 1e-6
    np.testing.assert_allclose(shown[large], wanted[large], rtol=0.029)
    assert not shown[~large].any()


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run and its printed table, of a made-up trace in which every second layer is left as it is."""
    folder = tmp_path_factory.mktemp("sliding")
    shape = ["--layers", "6", "--prompt", "64", "--sliding-window", "16,0"]
    done("synth", "sinks", "-o", "sliding.h5", *shape, folder=folder)
    return folder / "run", done("replay", "sliding.h5", "-p", "snapkv,streaming-llm,h2o", "-b", "25%,30", "-o", "run",
                                "--all", "--wide", folder=folder)  # fmt: skip


def printed_table(printed: str) -> tuple[str, list[dict], str]:
    """The line of the trace, and by budget its line, the titles, the rows (name, heads, texts with their marks) and
    the line of those whose memory is their own, read by the places at which the columns end; the line of skill."""
    trace, *lines = printed.splitlines()
    budgets: list[dict] = []
    skill = ""
    for line in lines:
        if line.startswith("budget "):
            budgets.append({"line": " ".join(line.split()[1:]), "rows": [], "own_memory": ""})
        elif line.startswith("policy "):
            ends = [found.end() for found in re.finditer(r"\S+", line)]
            budgets[-1] |= {"titles": line.split(), "ends": ends, "heads": line.index("heads")}
        elif line.startswith("not at equal memory"):
            budgets[-1]["own_memory"] = line
        elif line.startswith("skill = "):
            skill = line
        elif line.startswith("columns "):
            break
        elif line:
            last = budgets[-1]
            heads, ends = last["heads"], last["ends"][1:]
            # Texts stand right, a mark one place further.
            ends[0] = heads + len(re.match(r"query \d+x|\w+", line[heads:])[0])
            texts = [line[begin + (i > 0) : end + 1].strip()
                     for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))]  # fmt: skip
            last["rows"].append([line[:heads].strip(), line[heads : ends[0]].strip(), *texts])
    return " ".join(trace.split()[2:-2]), budgets, skill


@pytest.mark.parametrize("name", ["real", "sliding"])
def test_the_table_is_what_replay_prints(name, request):
    """Column by column: titles and their order, texts, marks, rows and theirs, and the lines above and below."""
    run, printed = request.getfixturevalue(name)
    content = read(write_report(run))
    [trace] = content["traces"]
    line, budgets, skill = printed_table(printed)
    assert " ".join(trace["line"].split()) == line
    assert trace["skill"] == skill and bool(skill) == (name == "real")
    titles = [content["columns"][i]["title"] for i in trace["columns"]]
    if name == "real":
        replayed = [column for column in table.COLUMNS if not column.title.startswith("live.")]
        assert titles == [column.title for column in replayed if column.metric != table.PER_HEAD]
    assert [budget["line"] for budget in trace["budgets"]] == [budget["line"] for budget in budgets]
    for ours, theirs in zip(trace["budgets"], budgets, strict=True):
        assert ["policy", "heads", *titles] == theirs["titles"]
        rows = []
        for cell in ours["cells"]:
            label = f"({cell['label']})" if cell["role"] == "control" else cell["label"]
            texts = [text + ("*" if best else "") for _, text, best in cell["values"]]
            rows.append([label.partition(":")[0], cell["heads"], *texts])
        # What a run calls a policy is what was asked for; here a name has the parameters that tell it from others.
        assert rows == [[row[0].partition(":")[0], *row[1:]] for row in theirs["rows"]]

        def words(own_memory: str) -> str:
            return re.sub(r":schedule.*,sinks=4", "", own_memory)

        assert words(ours["own_memory"]) == words(theirs["own_memory"])
    marks = {i for _, _, cell in cells_of(content) for i, (_, _, best) in enumerate(cell["values"]) if best}
    assert len(marks) > 4
    if name == "real":
        assert sum(cell["own_memory"] for _, _, cell in cells_of(content)) == 2 * 3  # kivi, threshold, full


def test_skill_stands_beside_recall_and_what_does_not_beat_its_twin_is_never_best(tmp_path):
    """H2O has the most recall and the least distance of attention, but its twin has more and less."""
    policies = [SNAPKV, CHUNKKV, Policy("h2o", "heads=kv", quality=0.85)]
    run = make_run(tmp_path / "run", policies, budgets=["0.1"], twins={"snapkv": 0.3, "h2o": 0.95})
    content = read(write_report(run))
    [trace] = content["traces"]
    titles = [content["columns"][i]["title"] for i in trace["columns"]]
    assert titles.index("skill") == titles.index("recall") + 1
    assert trace["skill"] == (
        "skill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = random, 1 = best"
    )
    cells = {cell["label"]: dict(zip(titles, cell["values"], strict=True)) for _, _, cell in cells_of(content)}
    assert set(cells) == {"snapkv", "chunkkv", "h2o", "full", "random", "oracle"}
    skill = {label: values["skill"][0] for label, values in cells.items()}
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    table = table[(table["metric"] == "attention_recall") & (table["layer"] == "all")].astype({"value": float})
    recall = table.set_index(["policy", "params", "variant"])["value"]
    for policy in (SNAPKV, policies[2]):
        twin = recall["random-twin", f"of=({policy.name}),seed=0", ""]
        own, best = (recall[policy.name, policy.params, variant] for variant in ("", "oracle"))
        assert skill.pop(policy.name) == pytest.approx((own - twin) / (best - twin), rel=1e-12)
    assert set(skill.values()) == {None} and cells["chunkkv"]["skill"][1] == "-"
    assert cells["snapkv"]["skill"][0] > 0 > cells["h2o"]["skill"][0]
    recalls = {label: cells[label]["recall"][0] for label in ("snapkv", "chunkkv", "h2o")}
    assert max(recalls, key=recalls.get) == "h2o"
    assert not any(best for _, _, best in cells["h2o"].values())
    second = max(["snapkv", "chunkkv"], key=recalls.get)
    assert [label for label in cells if cells[label]["recall"][2]] == [second]
    assert cells["snapkv"]["skill"][2]  # of the two that have a skill

    named = read(write_report(run, "-p", "snapkv,random-twin:of=(snapkv)"))
    assert {cell["label"] for _, _, cell in cells_of(named)} == {"snapkv", "random-twin:of=(snapkv)"}


def marks(values: dict[str, float], failing: str = "") -> list[bool]:
    lines = [
        table.Line(name, "asked", "kv", {("attention_recall", ""): value}, fails_twin=name == failing)
        for name, value in values.items()
    ]
    return [best for [[_, _, best]] in table.texts([table.COLUMNS[3]], lines, {"attention_recall": "higher"})]


def test_of_equal_values_that_of_a_policy_that_does_not_beat_its_twin_is_not_marked():
    assert marks({"a": 0.5, "b": 0.5, "c": 0.4}, failing="b") == [True, False, False]


def test_what_looks_equal_is_marked_alike():
    assert marks({"a": 0.7404, "b": 0.7401, "c": 0.739}) == [True, True, False]
    assert marks({"a": 0.7404, "b": 0.7401}) == [False, False]


def test_durations_have_the_unit_that_suits():
    """At the edges, which no run reaches at will; worked by hand."""
    seconds = {0: "0 us", 5.66e-5: "57 us", 9.994e-4: "999 us", 1e-3: "1.0 ms", 0.5234: "523.4 ms", 1: "1.00 s",
               75.126: "75.13 s"}  # fmt: skip
    assert {value: table.duration(value) for value in seconds} == seconds


def test_values_by_cell_and_layer_are_those_of_the_table_of_results(real):
    content = read(write_report(real[0]))
    results = pd.read_csv(real[0] / "results.csv", keep_default_na=False, dtype=str)
    results = results[
        (results["head"] == "all") & (results["metric"] == "output_error") & (results["variant"] == "pooled")
    ]
    [at] = [i for i, column in enumerate(content["columns"]) if column["title"] == "out.err"][:1]
    for trace, budget, cell in cells_of(content):
        rows = results[(results["policy"] == cell["label"].partition(":")[0]) & (results["budget"] == budget["budget"])
                       & (results["heads"] == cell["heads"].split()[0])]  # fmt: skip
        by_layer = rows[rows["layer"] != "all"].astype({"layer": int, "value": float}).sort_values("layer")["value"]
        assert cell["values"][trace["columns"].index(at)][0] == float(rows[rows["layer"] == "all"]["value"].item())
        np.testing.assert_allclose(cell["by_layer"][str(at)], by_layer, rtol=1e-5)


def test_texts_are_the_tokens_of_the_trace(real):
    [trace] = read(write_report(real[0]))["traces"]
    group = opened(real[0])["traces/smollm2-135m-needle"]
    text = group["tokens/text"][()].decode()
    assert "".join(trace["text"]) == text
    assert trace["text"] == [text[begin:end] for begin, end in group["tokens/offsets"][()]]
    assert {(s["kind"], s["begin"], s["end"]) for s in trace["spans"]} == {
        (kind.decode(), begin, end) for _, kind, begin, end in group["spans"][()]
    }


def test_gaps_and_pieces_of_a_character_are_kept_apart(tmp_path):
    run = make_run(tmp_path / "run", [SNAPKV], budgets=["0.1"])
    offsets = np.full((512, 2), 6)
    offsets[:4] = [[0, 1], [3, 4], [3, 4], [4, 5]]
    with h5py.File(run / "cells/demo.h5", "a") as file:
        file["traces/demo/tokens/text"] = np.bytes_("abc\u00e9ef".encode())
        file["traces/demo/tokens/offsets"] = offsets
    [trace] = read(write_report(run))["traces"]
    assert trace["text"][:5] == ["a", "\u00e9", "", "e", ""]
    assert trace["before"] == {"1": "bc", "4": "f"}


@pytest.mark.parametrize("where", ["report", "replay"])
def test_without_text_no_word_of_the_prompt_is_in_the_file(where, real, tmp_path):
    if where == "replay":
        done("replay", TRACE, "-p", "snapkv", "-b", "0.1", "--no-text", "-o", "run", folder=tmp_path)
        page = write_report(tmp_path / "run")
    else:
        page = write_report(real[0], "--no-text")
    content = read(page)
    assert [t["text"] for t in content["traces"]] == [None]
    text = opened(real[0])["traces/smollm2-135m-needle/tokens/text"][()].decode()
    names = {"needle", "question", "answer", "context"}
    words = {word for word in re.findall(r"[a-z]{7,}", text) if word not in names}
    data = json.dumps({name: value for name, value in content.items() if name != "planes"})
    ours = re.sub(r'<script type="application/json".*?</script>', "", page.read_text(), flags=re.DOTALL)
    assert len(words) > 25 and not [word for word in words - set(re.findall(r"[a-z]+", ours)) if word in data]
    assert text[:40] not in page.read_text()


def test_no_text_of_a_run_becomes_part_of_the_page(tmp_path):
    page = write_report(write_hostile(tmp_path / "hostile"))
    text = page.read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text and "<iframe" not in text
    [trace] = read(page)["traces"]
    assert "".join(trace["text"]) == HOSTILE


def test_the_largest_page_holds_everything(tmp_path, capsys):
    page = write_report(write_largest(tmp_path / "largest"))
    assert page.stat().st_size < 8_000_000
    content = read(page)
    assert content["notes"] == [] and all(cell["ranks"] is not None for _, _, cell in cells_of(content))
    assert capsys.readouterr().err == f"kvreplay: report: {page.stat().st_size:,} bytes\n"


def test_what_has_no_room_is_named(real):
    page = Page(Run(real[0]))
    page.fill(120_000)
    planes = page.content["planes"]
    assert sum(len(plane) + 3 for plane in planes) <= 120_000
    cells = cells_of(page.content)
    assert all(cell["sets"] is not None for _, _, cell in cells)
    left_out = [f"{cell['label']} at {budget['budget']}" for _, budget, cell in cells if cell.get("ranks", 0) is None]
    assert len(left_out) > 3
    [note] = [note for note in page.notes if "ranks" in note]
    assert note.startswith(
        "page too large: without ranks of snapkv:heads=query at 0.1, chunkkv at 0.1, random at 0.1, oracle at 0.1, "
        "snapkv:heads=query at 160, chunkkv at 160 and 2 more; use --trace, -p or -b to show less"
    ) and note.endswith("; use --trace, -p or -b to show less")
    assert set(re.findall(r"\S+ at \S+?(?=,| and|;)", note)) <= set(left_out)


def test_a_cell_is_named_once_for_each_kind_that_has_no_room(tmp_path):
    run = make_run(tmp_path / "run", [SNAPKV], budgets=["0.1"])
    page = Page(Run(run), policies=["snapkv"])
    page.fill(0)
    pattern = r"page too large: without (.*) of (.*); use --trace, -p or -b to show less"
    kinds = [re.fullmatch(pattern, note) for note in page.notes if note.startswith("page too large")]
    assert len(kinds) == 4
    assert {match[1]: match[2] for match in kinds} == {
        "attention of evaluation queries": "demo", "kept tokens": "snapkv at 0.1", "protected tokens": "snapkv at 0.1",
        "similarity": "snapkv at 0.1",
    }  # fmt: skip


def test_what_is_measured_before_the_planes_are_in_grows_by_their_room_alone(real):
    for room in (0, 50_000, 10_000_000):
        page = Page(Run(real[0]))
        before = len(as_json(page.content))
        page.fill(room)
        del page.content["notes"]
        assert len(as_json(page.content)) - before <= room + len(',"planes":[]')


def test_a_place_is_paid_for_whenever_it_is_longer_than_null():
    stock = Planes(10**9)
    for number in range(10_000):
        stock.add(number.to_bytes(4, "little"))
    left = stock.room
    assert stock.add(b"more") == 10_000
    assert left - stock.room == len('"",') + len(next(reversed(stock.places))) + 1
    left = stock.room
    assert stock.add(b"more") == 10_000 and left - stock.room == 1
    assert stock.add((3).to_bytes(4, "little")) == 3 and left - stock.room == 1
    stock.room = 0
    assert stock.add(b"more") is None and stock.add((3).to_bytes(4, "little")) == 3


def test_scores_are_not_held_in_memory_until_the_page_is_written(tmp_path):
    run = write_largest(tmp_path / "large", policies=2)
    tracemalloc.start()
    page = Page(Run(run))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cells_of(page.content)) == 6
    assert held < 6 * 30 * 3 * 4000 * 4 * 0.9  # float32 scores of all cells: 8.6 MB; their positions take 3.5 MB


def test_failed_cells_are_named_with_their_error(tmp_path):
    run = make_run(tmp_path / "run", budgets=["0.1"])
    cell = next(name for name, g in opened(run)["cells"].items() if g.attrs["policy"] == "h2o")
    failed = {"trace": "demo", "cell": cell, "policy": "h2o", "params": "a=1", "budget": "0.1", "state": "failed",
              "error": "scores: not a number"}  # fmt: skip
    (run / "run.json").write_text(json.dumps({"schema": "kvreplay-run/1", "cells": [failed]}))
    [trace] = read(write_report(run))["traces"]
    assert trace["budgets"][0]["failed"] == [{"label": "h2o:a=1", "error": "scores: not a number"}]
    assert "h2o" not in [cell["label"] for cell in trace["budgets"][0]["cells"]]


def test_layers_left_as_they_are_have_no_sets(tmp_path):
    shape = ["--layers", "6", "--prompt", "64", "--sliding-window", "16,0"]
    done("synth", "sinks", "-o", "sliding.h5", *shape, folder=tmp_path)
    done("replay", "sliding.h5", "-p", "snapkv", "-b", "0.5", "-o", "run", folder=tmp_path)
    content = read(write_report(tmp_path / "run"))
    [trace] = content["traces"]
    assert trace["layers"] == [1, 3, 5] and "3 layers (3 not compressed)" in trace["line"]
    for _, budget, cell in cells_of(content):
        kept = kept_by(tmp_path / "run", *facts_of(cell, budget), tokens=64)[1::2]
        raw = np.frombuffer(plane(content, cell["sets"]), dtype=np.uint8)
        np.testing.assert_array_equal(np.unpackbits(raw, bitorder="little").reshape(kept.shape), kept)


def test_a_page_opens_at_the_trace_and_the_budget_with_most_live_numbers(tmp_path):
    run = make_run(tmp_path / "run", traces=[("a", 200, 0.4), ("b", 200, 0.4)], budgets=["0.1", "0.2", "0.5"])

    def opening() -> list[tuple[str, str]]:
        return [(trace["name"], trace["opens_at"]) for trace in read(write_report(run))["traces"]]

    assert opening() == [("a", "0.1")]
    write_live(run, trace="b", budget="0.5")
    assert opening() == [("b", "0.5")]


def test_a_page_opens_at_the_budget_of_the_table(tmp_path):
    """The first at which most policies select tokens: not 6, and not 100, which holds the whole prompt."""
    done("synth", "needle", "-o", "t.h5", "--layers", "2", "--prompt", "64", folder=tmp_path)
    for budgets, opens_at in (("6,9,32", "9"), ("100,6,32", "32"), ("100,6", "6"), ("100", "100")):
        words = ["-p", "snapkv,ada-kv,knorm", "-b", budgets, "-o", budgets]
        assert kvreplay_program("replay", "t.h5", *words, folder=tmp_path).code == 0
        assert f"\nbudget   {opens_at}" in done("show", budgets, folder=tmp_path)
        assert read(write_report(tmp_path / budgets))["traces"][0]["opens_at"] == opens_at


def test_reading_is_said_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", budgets=["0.1"])
    step = f"kvreplay: report: reading {run}\n"
    write_report(run)
    assert step not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "1000")
    write_report(run)
    assert capsys.readouterr().err.startswith(step)
    write_report(run, "-q")
    assert capsys.readouterr().err == ""


def test_policies_budgets_and_traces_can_be_chosen(tmp_path, capsys):
    many = make_run(tmp_path / "many", traces=[(f"trace-{i}", 200, 0.4) for i in range(3)])
    first = read(write_report(many))
    assert [t["name"] for t in first["traces"]] == ["trace-0"]
    note = "1 of 3 traces shown (a page shows one by default): trace-0; omitted: trace-1, trace-2; use --trace to show"
    assert note in capsys.readouterr().err
    two = read(write_report(many, "--trace", "trace-2", "--trace", "trace-1", "-p", "snapkv,random", "-b", "0.2"))
    assert [t["name"] for t in two["traces"]] == ["trace-1", "trace-2"]
    assert {(budget["budget"], cell["label"]) for _, budget, cell in cells_of(two)} == {
        ("0.2", "snapkv"), ("0.2", "random"),
    }  # fmt: skip


def test_a_trace_without_a_cell_at_the_chosen_budgets_is_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run", traces=[("a-long", 480, 0.4), ("short", 200, 0.4)], budgets=["0.1", "100"])
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    table[(table["trace"] == "short") | (table["budget"] != "100")].to_csv(run / "results.csv", index=False)
    content = read(write_report(run, "-b", "100", "--trace", "a-long", "--trace", "short"))
    assert [(t["name"], len(t["budgets"])) for t in content["traces"]] == [("short", 1)]
    note = "a-long is omitted: no cell of these policies at these budgets"
    assert content["notes"][0] == note and note in capsys.readouterr().err
    assert [t["name"] for t in read(write_report(run, "-b", "100"))["traces"]] == ["short"]
    capsys.readouterr()
    assert main([str(run), "-b", "100", "--trace", "a-long"]) == 2
    line = "report: nothing to show: expected a trace with a cell of these policies at these budgets, found a-long"
    assert capsys.readouterr().err == f"kvreplay: {line}\n"


def test_what_an_earlier_call_replayed_has_nothing_of_the_last_call(tmp_path, capsys):
    traces = [("earlier", 200, 0.4), ("last", 480, 0.4)]
    run = make_run(tmp_path / "run", traces=traces, budgets=["0.1"])
    about = json.loads((run / "run.json").read_text())
    stored = Run(run).cells_file("last")["cells"]
    cells = [{"trace": "last", "cell": name, "own_memory": False} for name in stored]
    about |= {"argv": ["kvreplay", "replay", "last.h5"], "self_check": {"result": ["of the last"]}, "cells": cells,
              "warnings": ["of the last call"], "start": "now"}  # fmt: skip
    about["inputs"] = [{"trace": "last", "path": "/there/last.h5"}]
    (run / "run.json").write_text(json.dumps(about))
    not_kept = ["trace earlier", "replayed earlier into this folder; its command and self-check are not recorded"]

    def stars(content: dict) -> dict[str, int]:
        found = {trace["name"]: 0 for trace in content["traces"]}
        for trace, _, cell in cells_of(content):
            found[trace["name"]] += sum(best for _, _, best in cell["values"])
        return found

    alone = read(write_report(run, "--trace", "earlier"))
    assert alone["provenance"][:-1] == [not_kept] and alone["provenance"][-1][0] == "page"
    assert "last" not in json.dumps(alone["provenance"]) and alone["warnings"] == []
    assert stars(alone)["earlier"] >= 2

    both = read(write_report(run, "--trace", "earlier", "--trace", "last"))
    assert not_kept in both["provenance"] and ["trace last", "/there/last.h5, XXH3-128 ?"] in both["provenance"]
    assert min(stars(both).values()) >= 2
    last = read(write_report(run, "--trace", "last"))
    assert not_kept not in last["provenance"] and ["self-check", "of the last"] in last["provenance"]
    assert last["warnings"] == ["of the last call"]


def test_a_run_that_does_not_say_what_is_better_is_said_as_compare_says_it(broken, capsys):
    note = (
        "run.json does not say whether higher or lower is better for {}; run the same replay again to record it "
        "(finished cells are reused)"
    )
    metrics = json.loads((broken / "run.json").read_text())["metrics"]
    assert not any("is better for" in one for one in read(write_report(broken))["notes"])
    write_about(broken, metrics=metrics[1:])
    content = read(write_report(broken))
    assert note.format("attention_recall") in content["notes"]
    capsys.readouterr()
    assert compare([str(broken), "--baseline", "snapkv"]) == 0
    assert f"kvreplay: compare: {note.format('attention_recall')}\n" in capsys.readouterr().err


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return make_run(tmp_path / "broken", [SNAPKV, CHUNKKV], budgets=["0.1"])


def write_about(run: Path, **parts: object) -> None:
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | parts))


def test_a_folder_whose_name_is_no_utf8_is_shown_with_replacement_characters(broken, tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.rename(broken, folder)
    command = [sys.executable, "-m", "kvreplay.report.command", folder]
    answer = subprocess.run(command, capture_output=True, env={"PYTHONPATH": ":".join(sys.path), "LC_ALL": "C.UTF-8"})
    assert (answer.returncode, answer.stdout) == (0, folder + b"/report.html\n"), answer.stderr
    page = Path(os.fsdecode(folder)) / "report.html"
    assert read(page)["title"] == "caf\ufffd" and "<title>caf\ufffd" in page.read_text()


def cut_offsets(run: Path) -> None:
    with h5py.File(run / "cells/demo.h5", "a") as file:
        group = next(iter(file["cells"].values()))
        offsets = group["offsets"][()][:-1]
        del group["offsets"]
        group["offsets"] = offsets


def write_wrong_text(run: Path) -> None:
    with h5py.File(run / "cells/demo.h5", "a") as file:
        file["traces/demo/tokens/text"] = np.bytes_(b"abc")
        file["traces/demo/tokens/offsets"] = np.array([[0, 4]] * 512)


@pytest.mark.parametrize("damage, options, code, words", [
    (None, ["-o", "page.pdf"], 2, "-o: unknown file format: expected a name ending in .html or .htm, found page.pdf"),
    (None, ["--trace", "dem"], 2, "--trace: unknown trace dem: did you mean demo?"),
    (None, ["-p", "snapvk"], 2, "-p: unknown policy snapvk: did you mean snapkv?"),
    (None, ["-b", "0.4"], 2, "-b: unknown budget: expected 0.1, found 0.4"),
    (None, ["--theme", "dark"], 2, "report: unknown option: expected an option of kvreplay report --help, found"),
    (None, ["--text"], 2, "report: unknown option --text: did you mean --no-text?"),
    (None, ["--trase", "demo"], 2, "report: unknown option --trase: did you mean --trace?"),
    (None, ["-o", "/proc/no/page.html"], 3, "/proc/no: cannot be written"),
    (lambda run: (run / "results.csv").unlink(), [], 3, "not a finished run"),
    (lambda run: (shutil.rmtree(run), run.write_bytes(b"")), [], 3, "not a run: expected kvreplay replay"),
    (lambda run: (run / "run.json").write_text("{"), [], 3, "run.json: unreadable: expected JSON"),
    (lambda run: (run / "cells/demo.h5").write_text("no"), [], 3, "demo.h5: unreadable: expected an HDF5 file"),
    (lambda run: (run / "seconds.csv").write_text("a,b\n1,2\n"), [], 3, "seconds.csv: unreadable"),
    (lambda run: write_about(run, inputs=None), [], 3, "run.json: inputs: expected a list, found null"),
    (lambda run: write_about(run, cells=[3]), [], 3, "run.json: cells[0]: expected an object, found 3"),
    (lambda run: write_about(run, metrics=[{"name": "x"}]), [], 3,
     "run.json: metrics[0].better: expected a text, found null"),
    (lambda run: write_about(run, self_check=[]), [], 3, "run.json: self_check: expected an object, found []"),
    (cut_offsets, [], 3, "offsets: expected 13 ascending, found [12]"),
    (write_wrong_text, [], 3, "tokens/offsets: range: expected 0 to 3, ascending, found 0 to 4"),
])  # fmt: skip
def test_bad_input_gets_one_line(damage, options, code, words, broken, capsys):
    if damage:
        damage(broken)
    assert main([str(broken), *options]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert words in captured.err


def test_results_are_read_without_single_heads(broken, monkeypatch):
    path = broken / "results.csv"
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    single = rows[rows["role"] == "asked"].assign(head="0", value="7")
    pd.concat([rows, single]).to_csv(path, index=False)
    read, whole = [], pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda file, **options: read.append(file) or whole(file, **options))
    run = Run(broken)
    Page(run)
    assert read.count(path) == 2  # for its cells, and for the numbers of the traces shown
    assert len(run.results) == len(rows) and set(run.results["head"]) == {"all"}
    pd.testing.assert_frame_equal(run.overall, Run(broken).overall)  # of what was read, and from the file
    assert read.count(path) == 4


def test_more_than_a_page_holds_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run", [SNAPKV], layers=1, budgets=["0.1"])
    with h5py.File(run / "cells/demo.h5", "a") as file:
        file["traces/demo/tokens/text"] = np.bytes_(b"x" * 8_000_000)
        file["traces/demo/tokens/offsets"] = np.array([[0, 8_000_000]] * 512)
    assert main([str(run)]) == 2
    assert (
        "report: results too large for a page: expected fewer traces, policies or budgets, found 8,"
        in capsys.readouterr().err
    )


def test_policies_have_the_families_of_kvreplay_policies(real):
    cards = {card["name"]: card["family"] for card in json.loads(done("policies", "--json", folder=real[0].parent))}
    content = read(write_report(real[0]))
    families = {policy["label"].partition(":")[0]: policy["family"] for policy in content["policies"]}
    assert families == {name: cards[name] for name in families} and len(set(families.values())) >= 4
    assert set(families.values()) <= set(content["families"]) and content["families"][0] == "controls"


def test_some_policies_open_the_page_and_variants_follow(tmp_path):
    other = Policy("snapkv", "window=32,kernel=7,pool=max,heads=kv")
    run = make_run(tmp_path / "run", [Policy("knorm", "heads=kv"), other, CHUNKKV, SNAPKV], budgets=["0.1"])
    opening = read(write_report(run))["opening"]
    assert [label.partition(":")[0] for label in opening] == ["snapkv", "chunkkv", "knorm", "snapkv"]


def test_a_page_opens_the_files_of_its_traces_alone(tmp_path):
    folder = make_run(tmp_path / "run", [SNAPKV, H2O], budgets=["0.1"], traces=[("a", 400, 0.2), ("b", 410, 0.4)])
    cells = Run(folder).cells[["trace", "cell"]].to_dict("records")
    write_about(folder, cells=[one | {"own_memory": False} for one in cells])
    page = Page(Run(folder))
    assert list(page.run._open) == page.traces and len(page.run.stored_traces) > len(page.traces) == 1


def test_means_over_traces_use_every_trace_of_the_run(tmp_path, capsys):
    traces = [(f"t{i}", 200 + i, 0.4) for i in range(3)]
    run = make_run(tmp_path / "run", [SNAPKV, CHUNKKV], budgets=["0.1"], traces=traces)
    found = read(write_report(run, "--trace", "t1", "--baseline", "chunkkv"))["over_traces"]
    recall = Run(run).overall.query("metric == 'attention_recall' and variant == ''").groupby("label")["value"].mean()
    lines = {line["label"]: line for line in found["lines"] if line["metric"] == "attention_recall"}
    assert (found["traces"], found["baseline"]) == (3, "chunkkv") and set(lines) == {"snapkv", "chunkkv"}
    for label, line in lines.items():
        assert line["numbers"]["mean"] == pytest.approx(recall[label], rel=1e-12)
    has_verdicts = {metric["name"]: metric["has_verdicts"] for metric in found["metrics"]}
    assert has_verdicts["attention_recall"] and not has_verdicts["attention_l1"]
    capsys.readouterr()
    one = make_run(tmp_path / "one", [SNAPKV, CHUNKKV], budgets=["0.1"])
    assert read(write_report(one))["over_traces"] is None
    capsys.readouterr()
    assert main([str(one), "--baseline", "snapkv"]) == 2
    line = "--baseline: no comparison: expected a run of two traces and two policies, found snapkv"
    assert capsys.readouterr().err == f"kvreplay: {line}\n"


def keep_metrics(run: Path, *names: str) -> Path:
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    table[table["metric"].isin(names)].to_csv(run / "results.csv", index=False)
    return run


def test_means_over_traces_need_a_metric_with_a_direction(tmp_path, capsys):
    run = make_run(tmp_path / "run", [SNAPKV, CHUNKKV], budgets=["0.1"], traces=[("a", 200, 0.4), ("b", 240, 0.4)])
    found = read(write_report(keep_metrics(run, "kv_bytes", "attention_l1")))["over_traces"]
    assert [metric["name"] for metric in found["metrics"] if metric["has_verdicts"]] == ["attention_l1"]
    content = read(write_report(keep_metrics(run, "kv_bytes")))
    what = "no default, because no metric of the run has a direction"
    assert content["over_traces"] is None and f"without means over traces: {what}" in content["notes"]
    capsys.readouterr()
    assert main([str(run), "--baseline", "snapkv"]) == 2
    assert capsys.readouterr().err == f"kvreplay: --metric: {what}: expected one of kv_bytes\n"


def test_the_page_names_the_command_of_its_comparison(tmp_path, capsys):
    traces = [(f"t{i}", 200 + i, 0.4) for i in range(3)]
    run = make_run(tmp_path / "a run", [SNAPKV, CHUNKKV, H2O], budgets=["0.1", "0.2"], traces=traces)
    for options in ([], ["-p", "h2o,chunkkv"], ["-b", "0.2", "-p", "snapkv", "--baseline", "h2o"]):
        found = read(write_report(run, *options))["over_traces"]
        capsys.readouterr()
        _, name, *words = shlex.split(found["command"])
        assert name == "compare" and compare([*words, "--json"]) == 0
        lines = json.loads(capsys.readouterr().out)["lines"]
        shown = {(line["metric"], line["budget"], line["label"]): line["numbers"] for line in found["lines"]}
        assert {key[1:] for key in shown} == {(line["budget"], line["policy"]) for line in lines}
        for line in lines:
            numbers = shown[line["metric"], line["budget"], line["policy"]]
            assert numbers == {name: line[name] for name in numbers} and "p_holm" in numbers


def test_neither_torch_nor_figures_are_imported():
    """They take longer than the page."""
    code = "import sys, kvreplay.report.page; print({'torch', 'matplotlib.figure'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("set()\n", "")


def test_the_run_of_these_tests_has_every_kind(real):
    """What the tests above rely on."""
    groups = opened(real[0])["cells"].values()
    assert {group.attrs["heads"] for group in groups} == {b"kv", b"query", b"layer"}
    assert any("evicted_at" in group for group in groups) and any("sets" in group.attrs for group in groups)
    assert POLICIES.count(",") >= 5


def test_policies_look_as_in_the_figures_and_have_a_colour_for_a_dark_page(tmp_path):
    run = Run(make_run(tmp_path / "run", [SNAPKV, CHUNKKV], budgets=["0.1"]))
    figure = Choice(run).looks
    for look in Page(run).content["policies"]:
        drawn = figure[look["label"]]
        assert (look["colour"], look["marker"]) == (drawn["color"], drawn["marker"])
        assert look["on_dark"] == colours.on_dark(drawn["color"]) != drawn["color"]
    asked = Page(run, policies=["snapkv", "chunkkv"]).content["policies"]
    assert [look["label"] for look in asked] == ["snapkv", "chunkkv"]


def test_the_page_has_a_shape_for_every_marker():
    script = (Path(report.__file__).parent / "page" / "charts.js").read_text()
    known = set(re.findall(r'(?:^|[ ,])"?(\S)"?: "M', script.partition("SHAPES = {")[2].partition("};")[0]))
    assert known == {*colours.MARKERS, *(look["marker"] for look in colours.CONTROLS.values())}


def test_titles_are_there_again_after_a_page_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "kvreplay._engine", None)
        hidden.delattr(kvreplay, "_engine", raising=False)
        assert table.titles() == {}
    assert table.titles()[table.KEPT] == "kept"
