"""kvreplay.yaml gives defaults to options, below the command line and experiments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from program import done, kvreplay

WORDS = ["-p", "h2o", "-b", "6"]


def test_the_nearest_file_gives_defaults(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "kvreplay.yaml").write_text("# defaults\noutput: results\nthreads: 1\n")
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    answer = kvreplay("replay", traces / "fixture.h5", *WORDS, folder=below)
    said = f"kvreplay: defaults from {tmp_path}/kvreplay.yaml: --output results --threads 1\n"
    assert (answer.code, answer.err) == (0, said)
    assert json.loads((below / "results/run.json").read_text())["options"]["threads"] == 1
    assert done("replay", traces / "fixture.h5", *WORDS, "-q", folder=below) == ""
    (tmp_path / "a/kvreplay.yaml").write_text("")  # of the nearer folder
    assert "kvreplay-out" in done("replay", traces / "fixture.h5", *WORDS, folder=below)


def test_the_file_of_the_user_is_read_last(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "settings/kvreplay").mkdir(parents=True)
    (tmp_path / "settings/kvreplay/kvreplay.yaml").write_text("output: of-user\n")
    (tmp_path / "home/.config").mkdir(parents=True)
    (tmp_path / "home/.config/kvreplay").symlink_to(tmp_path / "settings/kvreplay")
    unset = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"}
    for settings in ({"XDG_CONFIG_HOME": f"{tmp_path}/settings"}, {"HOME": f"{tmp_path}/home"}):
        words = ["replay", traces / "fixture.h5", *WORDS, "--dry-run", "--json"]
        answer = kvreplay(*words, folder=tmp_path, env=unset | settings)
        assert json.loads(answer.out)["output"] == "of-user", answer
    (tmp_path / "kvreplay.yaml").write_text("output: of-folder\n")
    answer = kvreplay(*words, folder=tmp_path, env=unset | settings)
    assert json.loads(answer.out)["output"] == "of-folder"


def test_the_command_line_and_experiments_come_first(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "kvreplay.yaml").write_text("output: default\nthreads: 1\n")
    (tmp_path / "one.yaml").write_text(f"traces: {traces}/fixture.h5\npolicies: h2o\nbudgets: 6\noutput: experiment\n")

    def planned(*words: str) -> tuple[str, str]:
        answer = kvreplay("replay", "@one.yaml", *words, "--dry-run", "--json", folder=tmp_path)
        assert answer.code == 0, answer
        return json.loads(answer.out)["output"], answer.err

    said = f"kvreplay: defaults from {tmp_path}/kvreplay.yaml: --threads 1\n"
    assert planned() == ("experiment", said)
    assert planned("-o", "given", "--threads", "2") == ("given", "")


@pytest.mark.parametrize("name", ["kvreplay.toml", "kvreplay.yml"])
def test_a_file_of_another_name_is_not_passed_over(name: str, traces: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("threads = 1\n")
    answer = kvreplay("replay", traces / "fixture.h5", *WORDS, folder=tmp_path)
    assert answer.code == 2
    assert answer.err == f"kvreplay: {name}: not read: expected kvreplay.yaml, lines KEY: VALUE\n"


@pytest.mark.parametrize(
    "text, line",
    [
        ("device: cpu\nbudget: 0.1\n", ":2: unknown key: expected one of color, device, output, threads, found budget"),
        ("threads: [1]\n", ":1: threads: expected one value, found a list"),
        ("threads: many\n", ':1: threads: not a number: expected a whole number, found "many"'),
        ("device: gpu\n", ":1: --device: unknown device: expected auto, cpu or cuda[:N], found gpu"),
        ("- threads\n", ":1: not defaults of options: expected lines KEY: VALUE, found a list"),
    ],
)
def test_a_wrong_file_is_rejected_at_its_line(text: str, line: str, traces: Path, tmp_path: Path) -> None:
    (tmp_path / "kvreplay.yaml").write_text(text)
    answer = kvreplay("replay", traces / "fixture.h5", *WORDS, folder=tmp_path)
    assert answer.code in (2, 4) and answer.err.splitlines()[-1].startswith(f"kvreplay: {tmp_path}/kvreplay.yaml{line}")
    assert kvreplay("policies", "h2o", folder=tmp_path).code == 0, "it has no such option"
