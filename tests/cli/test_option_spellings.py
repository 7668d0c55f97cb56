"""Options, policies and traces in the spellings that users of other tools expect."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from program import PROGRAM, WITH_PYTHON, done, kvreplay

from kvreplay.parameters import of_policy

EQUAL_WORDS = [
    (["--compression-ratio", "0.5,0.75"], ["-b", "0.5,0.25"]),
    (["--compression-ratio", "0.9", "--compression-ratio", "0"], ["-b", "0.1", "-b", "1.0"]),
    (["--compression-ratio", "1e-13"], ["-b", "1.0"]),
    (["--budgets", "6"], ["--budget", "6"]),
]


LISTS = (
    ["-p", "knorm,h2o", "-b", "6,9", "--metrics", "attention_recall,output_error", "--save", "attention,scores"],
    ["--compression-ratio", "0.25,0.5", "-p", "h2o"],
)


def planned(*words: str | Path, folder: Path) -> dict:
    return json.loads(done("replay", *words, "--dry-run", "--json", folder=folder))


@pytest.mark.parametrize("words", LISTS)
def test_blanks_around_list_elements_have_no_meaning(words, traces: Path, tmp_path: Path) -> None:
    runs = {}
    for name, separator in (("plain", ","), ("blanks", " , ")):
        spelt = [word.replace(",", separator) for word in words]
        done("replay", traces / "fixture.h5", *spelt, "--observables", "ignore", "-o", name, folder=tmp_path)
        run = json.loads((tmp_path / name / "run.json").read_text())
        results = (tmp_path / name / "results.csv").read_text()
        runs[name] = run["options"], [cell["cell"] for cell in run["cells"]], results
    assert runs["plain"] == runs["blanks"]


@pytest.mark.parametrize("words, plain", EQUAL_WORDS)
def test_other_forms_of_a_budget_plan_the_same_cells(words, plain, traces: Path, tmp_path: Path) -> None:
    one = planned(traces / "fixture.h5", "--policies", "h2o", *words, folder=tmp_path)
    other = planned(traces / "fixture.h5", "-p", "h2o", *plain, folder=tmp_path)
    assert (one["words"], one["budgets"]) == (other["words"], other["budgets"])
    assert one["traces"][0]["cells"] == other["traces"][0]["cells"]


@pytest.mark.parametrize(
    "words, line",
    [
        (
            ["-p", "h2o", "-b", "0.1", "0.2"],
            "0.2: a budget and no trace: expected budgets without blanks, as -b 0.1,0.2",
        ),
        (
            ["-p", "h2o", "snapkv", "-b", "6"],
            "snapkv: a policy and no trace: expected policies without blanks, as -p h2o,",
        ),
    ],
)
def test_lists_with_blanks_are_no_traces(words, line, traces: Path, tmp_path: Path) -> None:
    answer = kvreplay("replay", traces / "fixture.h5", *words, folder=tmp_path)
    assert answer.code == 2 and answer.err.startswith(f"kvreplay: {line}") and answer.err.count("\n") == 1
    (tmp_path / "0.2").write_bytes((traces / "fixture.h5").read_bytes())
    (tmp_path / "snapkv").write_bytes((traces / "fixture.h5").read_bytes())
    done("replay", *words, folder=tmp_path)  # a file of that name is a trace


def test_a_compression_ratio_gives_the_results_of_its_budget(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", "-p", "snapkv", "--metrics", "attention_recall"]
    done(*words, "--compression-ratio", "0.9", "-o", "ratio", folder=tmp_path)
    done(*words, "-b", "0.1", "-o", "budget", folder=tmp_path)
    assert (tmp_path / "ratio/results.csv").read_bytes() == (tmp_path / "budget/results.csv").read_bytes()
    [ratio, budget] = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("ratio", "budget")]
    assert ratio["options"] == budget["options"]
    assert [cell["cell"] for cell in ratio["cells"]] == [cell["cell"] for cell in budget["cells"]]


@pytest.mark.parametrize(
    "words, line",
    [
        (["-b", "0.1", "--compression-ratio", "0.9"],
         "--compression-ratio: contradicts --budget: expected one of the two"),
        (["--compression-ratio", "0.9", "--budgets", "0.1"],
         "--budgets: contradicts --compression-ratio: expected one of the two"),
        (["--compression-ratio", "1"],
         "--compression-ratio: out of range: expected the share to evict, in [0, 1), found 1"),
        (["--compression-ratio", "0.9999999999999"],
         "--compression-ratio: out of range: expected the share to evict, in [0, 1), found 0.9999999999999"),
        (["--compression-ratio", "0.9,"], "--compression-ratio: empty list element"),
        ([], "replay: no budget: expected -b BUDGET,... or --compression-ratio RATIO,..."),
    ],
)  # fmt: skip
def test_a_wrong_compression_ratio_is_rejected(words, line, traces: Path, tmp_path: Path) -> None:
    answer = kvreplay("replay", traces / "fixture.h5", "-p", "h2o", *words, folder=tmp_path)
    assert answer.code == 2 and answer.err.startswith(f"kvreplay: {line}"), answer


def test_an_experiment_has_one_form_of_budgets(traces: Path, tmp_path: Path) -> None:
    text = f"traces: {traces}/fixture.h5\npolicy: h2o\ncompression-ratio: [0.5]\n"
    (tmp_path / "one.yaml").write_text(text)
    assert planned("@one.yaml", folder=tmp_path)["budgets"] == ["0.5"]
    assert planned("@one.yaml", "-b", "4", folder=tmp_path)["budgets"] == ["4"]
    (tmp_path / "both.yaml").write_text(text + "budgets: 4\n")
    answer = kvreplay("replay", "@both.yaml", folder=tmp_path)
    line = "both.yaml:4: budgets: contradicts both.yaml:3: compression-ratio: expected one of the two"
    assert (answer.code, answer.err) == (2, f"kvreplay: {line}\n")


TIME = re.compile(r"\d+(\.\d+)? (us|ms|s|min|h)\b")  # estimates are measured in each call


def test_quiet_keeps_the_answer(traces: Path, tmp_path: Path) -> None:
    trace = traces / "fixture.h5"
    replay = ["replay", trace, "-p", "h2o", "-b", "6", "-o", "out"]
    done(*replay, folder=tmp_path)
    for words in (["policies"], ["metrics"], ["help", "replay"], ["completion", "bash"], ["info", trace],
                  ["show", "out"], ["show", "out", "--csv"], ["validate", trace], ["diff", "out", "out"],
                  [*replay, "--json"], [*replay, "--dry-run"]):  # fmt: skip
        quiet, loud = (TIME.sub("TIME", done(*words, *more, folder=tmp_path)) for more in (["-q"], []))
        assert quiet == loud != "", words
    (tmp_path / "broken.h5").write_text("no trace")
    broken = [kvreplay("validate", "broken.h5", *quiet, folder=tmp_path) for quiet in ([], ["-q"])]
    assert broken[0].out == broken[1].out and broken[1].code == 1 and "broken.h5: invalid" in broken[1].out
    for words in (["synth", "needle", "-o", "s.h5"], ["merge", "merged", "out"], ["new-policy", "mine", "--plugin"]):
        assert done(*words, "-q", folder=tmp_path) == ""
    assert done("-q", "synth", "needle", "-o", "s2.h5", folder=tmp_path) == ""
    assert done("--quiet", "-q", "policies", folder=tmp_path) == done("policies", folder=tmp_path)


def test_lists_fit_80_columns_without_a_terminal(traces: Path) -> None:
    for words in (["policies"], ["policies", "snapkv"], ["metrics"], ["metrics", "recall"], ["info", "fixture.h5"]):
        assert max(map(len, done(*words, folder=traces).splitlines())) <= 80, words


def test_quiet_leaves_only_warnings_and_errors(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "6", "--observables", "keep"]
    for _ in range(2):  # the second reads stored observables, and says so without -q
        assert done(*words, "-o", "out", "-q", "--force", "--progress", "always", folder=tmp_path) == ""
    assert (tmp_path / "out/results.csv").is_file()
    wrong = kvreplay("replay", "missing.h5", "-p", "h2o", "-b", "6", "--quiet", folder=tmp_path)
    assert wrong.code == 3 and wrong.out == "" and wrong.err.startswith("kvreplay: missing.h5: ")
    (traces / "fixture.obs.h5").unlink()


def test_a_letter_prints_the_version(tmp_path: Path) -> None:
    version = done("--version", folder=tmp_path)
    assert done("-V", folder=tmp_path) == done("replay", "-V", folder=tmp_path) == version
    in_python = kvreplay("plot", "-V", folder=tmp_path, env=WITH_PYTHON)
    assert (in_python.code, in_python.out) == (0, version)


def test_help_in_a_pipe_has_80_columns(tmp_path: Path) -> None:
    """Of every command. Examples of the commands in Python, which are copied, are not wrapped."""
    overview = done("help", folder=tmp_path)
    commands = re.findall(r"^  ([a-z-]+)  ", overview.partition("exit codes")[0], re.MULTILINE)
    assert len(commands) > 20
    for words in (["help"], *([command, "--help"] for command in commands)):
        answer = kvreplay(*words, folder=tmp_path, env=WITH_PYTHON)
        assert answer.code == 0 and answer.out
        assert [line for line in answer.out.split("\nexamples:\n")[0].splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "words",
    [
        ["help"],
        ["replay", "--help"],
        ["policies"],
        ["policies", "h2o"],
        ["policies", "chunkkv"],
        ["metrics"],
        ["metrics", "recall"],
        ["metrics", "output_error"],
        ["info", "fixture.h5"],
    ],  # fmt: skip
)
def test_lines_fit_the_terminal(words: list[str], traces: Path) -> None:
    """Of 80 columns; cards do so in pipes too."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen([PROGRAM, *words], stdout=terminal, cwd=traces)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(reader, 65536):
            shown += piece
    os.close(reader)
    assert process.wait() == 0
    lines = shown.decode().splitlines()
    assert lines and max(map(len, lines)) <= 80
    if len(words) == 2 and words[0] in ("policies", "metrics"):
        assert done(*words, folder=traces).splitlines() == lines


def test_a_press_of_kvpress_has_a_note(traces: Path, tmp_path: Path) -> None:
    def noted(policy: str) -> str:
        answer = kvreplay("replay", traces / "fixture.h5", "-p", policy, "-b", "6", "-o", "out", folder=tmp_path)
        assert answer.code == 0
        return answer.err

    assert "kvreplay: SnapKVPress is snapkv:preset=kvpress; docs/kvpress.md" in noted("SnapKVPress")
    assert "kvreplay: SnapKVPress is snapkv:preset=kvpress; docs/kvpress.md" in noted("SnapKVPress:kernel=3")
    assert "kvreplay: KnormPress is knorm; docs/kvpress.md" in noted("KnormPress")
    assert "kvpress" not in noted("SnapKV")


@pytest.mark.parametrize(("name", "expected"), [("mine.py", "expected mine.py:NAME"), ("mine.so", "expected --plugin")])
def test_a_file_in_place_of_a_policy_is_rejected(name: str, expected: str, traces: Path, tmp_path: Path) -> None:
    answer = kvreplay("replay", traces / "fixture.h5", "-p", name, "-b", "6", folder=tmp_path)
    assert answer.code == 2 and answer.err.startswith(f"kvreplay: {name}: ") and expected in answer.err


def test_the_manual_page_has_every_command_option_and_exit_code(tmp_path: Path) -> None:
    page = done("help", "--man", folder=tmp_path)
    assert page.startswith('.TH KVREPLAY 1 "" "kvreplay ')
    built = PROGRAM.with_name("kvreplay.1")  # that the build installs
    assert not (PROGRAM.parent / "CMakeCache.txt").exists() or built.read_text(encoding="utf-8") == page
    known = {line.split()[0] for line in done(folder=tmp_path).splitlines() if re.match(r"  \S", line)} - {"kvreplay"}
    plain = page.replace("\\-", "-")
    for name in known:
        assert f"\n.SS kvreplay {name}" in plain or f"\n.B {name}\n" in plain, name
    for line in done("help", "replay", folder=tmp_path).splitlines():
        if re.match(r" {2,6}-", line):
            assert f"\n.B {line.strip().split('  ')[0]}\n" in plain, line
    for name in ("capture", "plot", "sweep"):  # their options are read by the build
        section = plain.partition(f"\n.SS kvreplay {name}")[2].partition("\n.SS ")[0]
        text = kvreplay(name, "--help", folder=tmp_path, env=WITH_PYTHON).out
        options = re.findall(r"^  (?:-\w [^-]*, )?(--[a-z-]+)", text, re.MULTILINE)
        assert len(options) > 10
        for option in {*options} - {"--help", "--quiet", "--version"}:
            assert re.search(rf"^\.B (-\w, )?{option}( |$)", section, re.MULTILINE), (name, option)
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests == {".TH", ".SH", ".SS", ".TP", ".B", ".I", ".PP", ".nf", ".fi"}
    if groff := shutil.which("groff"):
        shown = subprocess.run(
            [groff, "-man", "-Kutf8", "-Tutf8", "-P-cbou", "-wall"],
            input=page,
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stderr == "" and "--compression-ratio RATIO" in shown.stdout


def test_a_press_of_kvpress_names_the_cells_with_its_values(traces: Path, tmp_path: Path) -> None:
    words = ["-b", "6", "--observables", "ignore", "--metrics", "attention_recall"]
    done("replay", traces / "fixture.h5", "-p", "snapkv:window=4", *words, "-o", "plain", folder=tmp_path)
    both = ["-p", "snapkv:window=4", "-p", "snapkv:preset=kvpress,window=4", *words, "-o", "both"]
    done("replay", traces / "fixture.h5", *both, folder=tmp_path)
    for press in ("SnapKVPress:window=4", "snapkv:preset=kvpress,window=4"):
        shown = done("show", "both", "-p", press, "--csv", folder=tmp_path)
        assert "pool=avg" in shown and "pool=max" not in shown
        refused = kvreplay("show", "plain", "-p", press, folder=tmp_path)
        assert refused.code == 2 and "unknown policy" in refused.err
        of_cells = of_policy(
            [("snapkv", "window=4,kernel=7,pool=max"), ("snapkv", "window=4,kernel=5,pool=avg")], press
        )
        assert of_cells == [False, True]
