"""Does --watch replay what was edited, and nothing else, each time that a policy's file was saved?"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import WITH_PYTHON, kvreplay
from watched import PATIENCE, Watched, watching

TRACE = Path(__file__).parents[2] / "traces" / "smollm2-135m-needle.h5"
POLICY = """import kvreplay as kv

@kv.policy
def by_size(view):
    "tokens with large values"
    return view.value_norms()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TRACE, tmp_path / "trace.h5")
    (tmp_path / "mine.py").write_text(POLICY)
    return tmp_path


@pytest.fixture
def watched(folder: Path) -> Iterator[Watched]:
    with watching(folder, "-p", "mine.py:by_size,snapkv", "--figure", "curve=curve.svg") as found:
        yield found


def row(printed: str, policy: str) -> list[str]:
    """The policy's numbers, without the marks of the best and the seconds."""
    line = next(line for line in printed.splitlines() if line.startswith(policy))
    return line.replace("*", " ").split()[2:-2]


def test_an_edited_policy_has_a_new_row_and_a_new_figure(folder, watched):
    first = watched.replays(1)[0]
    figure = (folder / "curve.svg").read_bytes()
    (folder / "mine.py").write_text(POLICY.replace("return view", "return -view"))
    second = watched.replays(2)[1]
    assert row(second, "snapkv") == row(first, "snapkv")
    assert row(second, "by_size") != row(first, "by_size")
    assert (folder / "curve.svg").read_bytes() != figure
    (folder / "mine.py").write_text(POLICY.replace("view.value_norms()", "nothing"))
    assert "mine.py:6: score raised NameError" in watched.replays(3)[2]
    (folder / "mine.py").write_text(POLICY)
    fourth = watched.replays(4)[3]
    assert row(fourth, "by_size") == row(first, "by_size")
    watched.process.send_signal(signal.SIGINT)
    assert watched.process.wait(PATIENCE) == 130


def test_options_may_be_written_in_any_way(folder):
    with watching(folder, "-pmine.py:by_size", "--observables=use", "--figure=curve=curve.svg") as watched:
        first = watched.replays(1)[0]
        assert "by_size" in first and "obs.h5" not in first
        assert (folder / "curve.svg").is_file() and not list(folder.glob("*.obs.h5"))


def test_the_change_since_the_last_save_is_printed(folder, watched):
    """New minus old numbers of the edited policy alone, also when a save in between was broken."""

    def recall(printed: str) -> float:
        title = next(line for line in printed.splitlines() if line.startswith("policy"))
        line = next(line for line in printed.splitlines() if line.startswith("by_size"))
        return float(line.replace("*", " ").split()[title.split().index("recall")])

    def changed(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if line.startswith("change")]

    first = watched.replays(1)[0]
    assert changed(first) == []
    (folder / "mine.py").write_text(POLICY.replace("view.value_norms()", "nothing"))
    assert changed(watched.replays(2)[1]) == []
    (folder / "mine.py").write_text(POLICY.replace("return view", "return -view"))
    third = watched.replays(3)[2]
    [line] = changed(third)
    assert line.startswith("change   by_size at 0.1: ") and "output_error:pooled" in line
    assert float(line.partition("attention_recall ")[2].split(",")[0]) == pytest.approx(
        recall(third) - recall(first), abs=1e-3
    )


def test_only_the_edited_policy_is_computed_again(folder, watched):
    assert "writes TRACE.obs.h5 beside each trace" in watched.replays(1)[0] and (folder / "trace.obs.h5").is_file()
    (folder / "mine.py").write_text(POLICY.replace("return view", "return -view"))
    watched.replays(2)
    from kvreplay.results import Run

    states = {(cell["policy"], cell["state"]) for cell in Run(folder / "run").about["cells"]}
    assert states == {("by_size", "done"), *((name, "skipped") for name in ("snapkv", "full", "random", "oracle"))}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["-p", "snapkv", "--watch"],
            "--watch: no policy in a file: expected -p FILE.py:NAME",
        ),
        (["-p", "snapkv", "--figure", "curve=c.svg"], "--figure: needs --watch"),
    ],
)
def test_what_cannot_be_watched_is_refused(folder, words, line):
    answer = kvreplay("replay", "trace.h5", "-b", "0.1", *words, folder=folder, env=WITH_PYTHON)
    assert answer.code == 2 and answer.err.startswith(f"kvreplay: {line}"), answer


def test_without_the_python_package_it_says_what_is_missing(folder):
    bare = {**os.environ, "PATH": "/usr/bin:/bin"}
    answer = kvreplay("replay", "trace.h5", "-p", "mine.py:by_size", "-b", "0.1", "--watch", folder=folder, env=bare)
    assert answer.code == 4 and "kvreplay-python is not installed" in answer.err, answer
