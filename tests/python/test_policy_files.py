"""Does a policy in a Python file take part wherever a built-in one does: command line, files, plots, reports?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import pytest
from program import PROGRAM, WITH_PYTHON, Answer, kvreplay

import kvreplay as kv
from kvreplay.plot.command import main as plot
from kvreplay.report.command import main as report

MINE = """
import kvreplay as kv


@kv.policy
def long_keys(view, p: float = kv.parameter(2.0, 1.0, 4.0, "of the norm")):
    "tokens with long keys"
    return view.key_norms(p)


class Newest(kv.Policy):
    "the most recent tokens"

    name = "newest"
    paper = "nobody's"

    def score(self, view):
        return [list(range(view.tokens))] * view.kv_heads


@kv.policy
def broken(view):
    return {}[
        "no such key"
    ]
"""


@pytest.fixture
def words(tmp_path: Path, small: Path) -> dict[str, str]:
    """The environment in which kvreplay-python is on PATH, and a file mine.py beside."""
    (tmp_path / "mine.py").write_text(MINE)
    return WITH_PYTHON


def told(answer: Answer) -> str:
    assert (answer.code, answer.err) == (0, ""), answer
    return answer.out


def positions(run: Path, policy: str) -> dict[str, list[int]]:
    """By budget, of a policy's cells in a run of one trace."""
    [path] = run.glob("cells/*.h5")
    with h5py.File(path) as file:
        cells = [one for one in file["cells"].values() if one.attrs["policy"] in (policy, policy.encode())]
        return {str(one.attrs["budget_tokens"]): one["positions"][()].tolist() for one in cells}


def test_the_program_replays_it_as_python_does(words, small: Path, tmp_path: Path) -> None:
    policies = "mine.py:long_keys:p=3,mine.py:newest,local"
    table = told(kvreplay("replay", small, "-p", policies, "-b", "0.1,30", "-o", "out", folder=tmp_path, env=words))
    assert "long_keys" in table and "newest" in table
    assert positions(tmp_path / "out", "newest") == positions(tmp_path / "out", "local")
    run = kv.replay(small, [f"{tmp_path}/mine.py:long_keys:p=3"], [0.1, 30])
    assert positions(run.folder, "long_keys") == positions(tmp_path / "out", "long_keys")


def test_parameters_belong_to_the_policy_before_them(words, small: Path, tmp_path: Path) -> None:
    line = ["-p", "snapkv:window=4,kernel=3,mine.py:long_keys:p=3,heads=query,mine.py:long_keys"]
    answer = kvreplay("replay", small, *line, "-b", "0.1", "-o", "out", "--json", folder=tmp_path, env=words)
    labels = {one["label"] for one in json.loads(told(answer))["cells"] if one["role"] == "asked"}
    assert labels == {"snapkv:window=4,kernel=3", "long_keys:p=3,heads=query", "long_keys"}


@pytest.mark.parametrize(
    "policy",
    [
        "layers:0-1=(mine.py:long_keys:p=3),2=snapkv",
        "oracle:counts=(mine.py:long_keys:p=3)",
        "@experiment.yaml",
        "mine.py:long_keys:select=chunks,chunk=5",
    ],
)
def test_it_stands_where_other_policies_stand(policy: str, words, small: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("- mine.py:long_keys:p=3\n- h2o\n")
    answer = kvreplay("replay", small, "-p", policy, "-b", "0.2", "-o", "out", "--json", folder=tmp_path, env=words)
    cells = [one for one in json.loads(told(answer))["cells"] if one["role"] == "asked"]
    assert cells and all(one["state"] == "done" and one["kept_tokens"] == 30 for one in cells)


def test_policies_prints_its_card(words, tmp_path: Path) -> None:
    card = told(kvreplay("policies", "mine.py:long_keys", folder=tmp_path, env=words))
    for piece in ("long_keys", "tokens with long keys", "p=2", "1..4", "of the norm", "heads=kv"):
        assert piece in card
    for name in ("newest", "Newest"):  # its own name, and its class's
        assert "nobody's" in told(kvreplay("policies", f"mine.py:{name}", folder=tmp_path, env=words))


def test_without_python_it_says_what_to_install(words, small: Path, tmp_path: Path) -> None:
    folders = [folder for folder in os.environ["PATH"].split(":") if not (Path(folder) / "kvreplay-python").exists()]
    bare = {**words, "PATH": ":".join(folders)}
    line = ["-p", "mine.py:long_keys", "-b", "0.1"]
    answer = kvreplay("replay", small, *line, folder=tmp_path, env=bare)
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.startswith("kvreplay: python: kvreplay-python is not installed: expected ")
    assert answer.err.count("\n") == 1 and not (tmp_path / "kvreplay-out").exists()


@pytest.mark.parametrize(
    ("content", "policy", "code", "line"),
    [
        (MINE, "mine.py:nobody", 2, "mine.py: unknown policy: expected one of broken, long_keys, newest, found nobody"),
        (MINE, "other.py:one", 3, "other.py: cannot be read: expected a file with a policy in Python, found no"),
        ("x = 1\n", "mine.py:x", 2, "mine.py: unknown policy: expected a function under @kv.policy, found x"),
        ("x = 1\ndef (\n", "mine.py:x", 3, "mine.py:2: syntax error: found invalid syntax"),
        ("x = 1\n\ny = x / 0\n", "mine.py:x", 3, "mine.py:3: raised ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name\n", "mine.py:x", 3, "mine.py:1: raised ModuleNotFoundError: No module named "),
        (MINE, "mine.py:long_keys:p=9", 2, "long_keys:p: out of range: expected 1..4, found 9"),
        (MINE, "mine.py:long_keys:q=9", 2, "long_keys: unknown parameter: expected one of p, heads, agg, "),
        (MINE.replace("def long_keys", "def snapkv"), "mine.py:snapkv", 2, "snapkv: another policy has that name"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(content, policy, code, line, words, small: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    answer = kvreplay("replay", small, "-p", policy, "-b", "0.1", folder=tmp_path, env=words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("kvreplay: ") and line in answer.err and answer.err.count("\n") == 1


def test_what_it_raises_fails_its_cells_alone(words, small: Path, tmp_path: Path) -> None:
    line = ["-p", "mine.py:broken,h2o", "-b", "0.1", "-o", "out"]
    answer = kvreplay("replay", small, *line, folder=tmp_path, env=words)
    place = f"{tmp_path}/mine.py:{1 + MINE[: MINE.index('return {}[')].count(chr(10))}"
    assert answer.code == 6 and "h2o" in answer.out
    said = f"kvreplay: failed: small, broken at budget 0.1: {place}: score raised KeyError: 'no such key'\n"
    assert answer.err == said
    cells = json.loads((tmp_path / "out/run.json").read_text())["cells"]
    assert {one["policy"]: one["state"] for one in cells}["h2o"] == "done"


def test_modules_beside_the_file_are_found(words, small: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/beside_it.py").write_text("P = 3.0\n")
    (tmp_path / "sub/one.py").write_text(
        "import kvreplay as kv\nfrom beside_it import P\n\n@kv.policy\ndef one(view):\n    return view.key_norms(P)\n"
    )
    told(kvreplay("replay", small, "-p", "sub/one.py:one", "-b", "0.1", "-o", "out", folder=tmp_path, env=words))


def states(run: Path) -> dict[str, str]:
    return {one["policy"]: one["state"] for one in json.loads((run / "run.json").read_text())["cells"]}


def test_what_did_not_change_is_not_computed_again(words, small: Path, tmp_path: Path) -> None:
    line = ["replay", small, "-p", "mine.py:long_keys,h2o", "-b", "0.1", "-o", "out"]
    told(kvreplay(*line, folder=tmp_path, env=words))
    told(kvreplay(*line, folder=tmp_path, env=words))
    assert set(states(tmp_path / "out").values()) == {"skipped"}


def test_an_edited_file_is_computed_again_and_its_neighbours_are_not(words, small: Path, tmp_path: Path) -> None:
    line = ["replay", small, "-p", "mine.py:long_keys,h2o", "-b", "0.1", "-o", "out"]
    told(kvreplay(*line, folder=tmp_path, env=words))
    before = positions(tmp_path / "out", "long_keys")
    (tmp_path / "mine.py").write_text(MINE.replace("return view.key", "return -view.key"))
    told(kvreplay(*line, folder=tmp_path, env=words))
    assert states(tmp_path / "out") == {
        "long_keys": "done", "h2o": "skipped", "full": "skipped", "random": "skipped", "oracle": "skipped"
    }  # fmt: skip
    assert positions(tmp_path / "out", "long_keys") != before


def two_files(folder: Path) -> list[str]:
    """Two policies of one name."""
    for name, sign in (("one", ""), ("two", "-")):
        text = f"import kvreplay as kv\n\n@kv.policy\ndef mine(view):\n    return {sign}view.key_norms()\n"
        (folder / f"{name}.py").write_text(text)
    return [f"{folder}/one.py:mine", f"{folder}/two.py:mine"]


def test_files_take_turns_in_a_name(small: Path, tmp_path: Path) -> None:
    one, two = two_files(tmp_path)
    runs = [kv.replay(small, policy, 0.1, metrics="kv_bytes") for policy in (one, two, one)]
    first, second, third = (run.selection("mine", 0.1).positions.tolist() for run in runs)
    assert first == third != second


def test_two_files_with_one_name_in_a_run_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(kv.Error, match="mine: two policies of this name, from different files"):
        kv.replay(small, two_files(tmp_path), 0.1, metrics="kv_bytes")


def test_plots_and_reports_show_it(words, small: Path, tmp_path: Path) -> None:
    line = ["replay", small, "-p", "mine.py:long_keys:p=3,snapkv", "-b", "0.1,0.3", "-o", "out"]
    told(kvreplay(*line, folder=tmp_path, env=words))
    pytest.importorskip("matplotlib")
    for kind in ("heatmap", "kept", "curve"):
        assert plot([kind, str(tmp_path / "out"), "-p", "long_keys", "-o", str(tmp_path / f"{kind}.svg")]) == 0
        assert (tmp_path / f"{kind}.svg").stat().st_size > 0
    assert report([str(tmp_path / "out")]) == 0
    assert "long_keys" in (tmp_path / "out/report.html").read_text()


def test_the_program_in_python_is_the_program(words, tmp_path: Path) -> None:
    for line in (["metrics"], ["policies"], ["replay"], ["nonsense"], ["--version"], ["help", "replay"]):
        mine = kvreplay("python", *line, folder=tmp_path, env=words)
        real = kvreplay(*line, folder=tmp_path, env=words)
        assert (mine.code, mine.out, mine.err) == (real.code, real.out, real.err), PROGRAM
