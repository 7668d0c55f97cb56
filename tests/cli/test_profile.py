"""kvreplay replay --profile: a table of seconds, and a flame graph for speedscope."""

import json
from pathlib import Path

from program import done, kvreplay

POLICIES = "h2o,kivi,keyformer"


def frames_closed(events: list[dict], names: list[str]) -> dict[str, float]:
    """Seconds by name, work inside other work included. Every event must nest in those that are open."""
    stack: list[tuple[int, float]] = []
    seconds: dict[str, float] = {}
    last = 0.0
    for event in events:
        assert event["at"] >= last, event
        last = event["at"]
        if event["type"] == "O":
            stack.append((event["frame"], event["at"]))
        else:
            frame, begin = stack.pop()
            assert frame == event["frame"]
            seconds[names[frame]] = seconds.get(names[frame], 0) + event["at"] - begin
    assert not stack
    return seconds


def test_profile(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", POLICIES, "-b", "8", "--threads", "1", "-o", "out"]
    text = done(*words, "--profile", "profile.json", folder=tmp_path)
    lines = text[text.index("profile:") :].splitlines()
    assert "of peak" in lines[1]
    titles = {line.split("  ")[0] for line in lines[2:]}
    assert {"observables", "comparisons of changed or weighted tokens", "metrics", "writing results"} <= titles
    assert lines[-1].startswith("layers: ")

    document = json.loads((tmp_path / "profile.json").read_text())
    names = [frame["name"] for frame in document["shared"]["frames"]]
    assert len(names) == len(set(names))
    profiles = document["profiles"]
    assert len(profiles) == 1
    seconds = frames_closed(profiles[0]["events"], names)
    scored = {name.split(": ")[-1] for name in names if name.startswith("policies: scores and schedules")}
    assert set(POLICIES.split(",")) <= scored
    assert {"oracle", "random", "full"} <= scored
    layers = sum(value for name, value in seconds.items() if name.startswith("other work on layers"))
    assert seconds["observables: gumbel_attention"] < layers <= profiles[0]["endValue"]


def test_results_do_not_depend_on_it(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", POLICIES, "-b", "8", "-q"]
    for folder, more in (("with", ["--profile", "p.json"]), ("without", [])):
        kvreplay(*words, *more, "-o", folder, folder=tmp_path)
    with_profile, without = ((tmp_path / name / "results.csv").read_bytes() for name in ("with", "without"))
    assert with_profile == without


def test_json_alone_on_stdout(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "8", "-o", "out", "--json", "--profile", "p.json"]
    json.loads(done(*words, folder=tmp_path))
    assert (tmp_path / "p.json").stat().st_size > 0


def test_a_file_that_cannot_be_written(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "8", "-o", "out", "--profile", "folder"]
    answer = kvreplay(*words, folder=tmp_path)
    assert answer.code in (2, 3) and "folder" in answer.err
