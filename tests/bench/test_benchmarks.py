"""The benchmarks' answers are right at every SIMD level, and the page of figures has the shape that is written.

What is measured is never asserted: times are for people.
"""

import re
from pathlib import Path

import goals
import length
import numpy as np
import performance_page as page
import pytest
import replay_times
from goals import BACKEND, NONE, Goal, Row
from timing_server import TimingServer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "kvreplay_bench"
TINY = "4-2-40/n:333"
SUBJECTS = {
    "cumulative_attention",
    "window_attention",
    "resident_attention",
    "kept_moments",
    "similarity_row_maxima",
    "least_redundant",
    "online_eviction",
    "key_norms",
}


@pytest.fixture(scope="module")
def server():
    with TimingServer(PROGRAM) as running:
        yield running


@pytest.fixture(scope="module")
def names(server):
    return server.cases()


def test_every_subject_and_type_has_a_tiny_case(names):
    tiny = [name for name in names if TINY in name]
    assert {name.split("/")[0] for name in tiny} == SUBJECTS
    assert {name.split("/")[3] for name in tiny} == {"float32", "float16", "bfloat16"}


def test_tiny_answers_are_those_of_float64_at_every_level(server, names):
    tiny = [name for name in names if TINY in name or name.startswith("mapped_bytes/n:333/")]
    assert len(tiny) > 100
    assert {name: server.problem(name) for name in tiny if server.problem(name)} == {}


def test_levels_agree_and_times_are_positive(server, names):
    cases = [name for name in names if name.startswith(f"cumulative_attention/{TINY}/float32/")]
    first = server.result(cases[0])
    assert first.shape == (4 * 333,)
    assert np.allclose(first.reshape(4, 333).sum(1), 333)
    for case in cases[1:]:
        assert np.allclose(server.result(case), first, rtol=1e-5)
    assert server.seconds(cases[0]) > 0


def test_what_cannot_be_done_is_said(server):
    with pytest.raises(RuntimeError, match="one that `list` names"):
        server.problem("no_such_case")


def test_every_row_of_the_page_has_its_cases(names):
    for row in BACKEND:
        cases = page.cases_of(row, names)
        assert cases or row.level not in {"best", ""}, row  # another machine may lack a level by name
        assert len(cases) <= len(row.threads)
        assert all(case in names for case in cases)


def test_goals_are_bounds():
    assert Goal(0.95).met(0.95) and not Goal(0.95).met(0.949)
    assert Goal(most=32).met(32) and not Goal(most=32).met(33)
    assert NONE.met(0) and NONE.text(" MB") == ""
    assert Goal(most=32).text(" MB") == "≤ 32 MB"
    assert page.verdict(Goal(2), 1.5, " x") == "**1.5 x**"


def test_a_row_of_results_is_a_row_of_the_table():
    names = [f"a/n:1/float32/{level}/threads:{n}" for level in ("AVX2", "SSE4") for n in (1, 4)]
    assert page.cases_of(Row("a/n:1/float32"), names) == names[:2]
    assert page.cases_of(Row("a/n:1/float32", level="SSE4", threads=("all",)), names) == names[3:]
    result = {"name": names[0] + "/iterations:1/manual_time", "GF/s": 90.0, "of_sgemm": 0.9}
    result |= {"extra_MB": 3.0, "max_error": 1e-6, "spread": 0.05}
    [row] = page.backend_rows([Row("a/n:1/float32", goal=Goal(0.95), threads=("1",))], [result])
    assert row == (f"`{names[0]}`", "≥ 0.95 of sgemm", "**0.9 of sgemm**", "90 GF/s", "3 MB", "1.0e-06", "5 %")


PARTS = ("backend", "real", "pytorch", "replay", "memory", "length", "live")
KINDS = (
    page.BACKEND_COLUMNS,
    page.BACKEND_COLUMNS,
    page.PYTORCH_COLUMNS,
    page.REPLAY_COLUMNS,
    page.MEMORY_COLUMNS,
    page.LENGTH_COLUMNS,
    page.LONG_COLUMNS,
    page.LIVE_COLUMNS,
)


def require_shape(generated: str, kinds: int = len(KINDS)) -> None:
    """The line about the machine, `kinds` of the tables in their order, columns in each row as in its header."""
    assert re.search(r"^Measured on .*SIMD levels ", generated)
    begun = re.findall(r": \d{4}-\d\d-\d\d, commit [0-9a-f]{12}\+?, load before the start ", generated)
    assert len(begun) == kinds
    tables = re.findall(r"(?:^\|.*\n)+", generated, re.MULTILINE)
    headers = iter("| " + " | ".join(columns) + " |" for columns in KINDS)
    assert len(tables) == kinds and all(table.splitlines()[0] in headers for table in tables)
    for table in tables:
        lines = table.splitlines()
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1


def made_up() -> dict:
    """What tools/bench/run measures, with numbers that nobody measured."""

    def result(name: str) -> dict:
        figures = dict.fromkeys(["GF/s", "extra_MB", "max_error", "spread", "of_sgemm", "top_tenth_differs"], 1.0)
        return {"name": f"{name}/iterations:1/manual_time", "real_time": 20.0, "direct_over_steps": 150.0, **figures}

    def results(rows: list[Row]) -> list[dict]:
        data = dict.fromkeys(row.data for row in rows)
        levels = {"best": ("AVX512", "AVX2", "SSE4")}
        bytes_only = {row.data for row in rows if row.figure == "GB/s"}
        every = [result(f"{name}/{level}/threads:{n}") for name in data for level in levels["best"] for n in (1, 2)]
        every = [one for one in every if not one["name"].startswith("mapped")]
        every += [result(f"{name}/threads:1") for name in data if name.startswith("mapped")]
        for one in every:
            if any(one["name"].startswith(name) for name in bytes_only):
                one["GB/s"] = one.pop("GF/s")
        return every

    traces = {"2000": "short", "4096": "middle", "8000": "long"}
    forms = {"naive, all heads at once": 3.0, "causal blocks of 512, all heads": 2.0}
    forms |= {"one more": 4.0, "in bfloat16": 0.1}
    shape = "9/3 heads, d 64, n 4,096"
    selected = {"incremental": 4.0, "as the algorithm reads, some": 40.0}
    timed = {"seconds": 10.0, "processor_seconds": 20.0, "select_seconds": 0.1, "peak_bytes": 2**28}
    replays = [{**vars(replay), **timed} for replay in (replay_times.ALONE, replay_times.ALL)]
    replays.append({**vars(replay_times.Replay("... and kivi", "h2o,kivi")), **timed, "seconds": 14.0})
    cheap = {"policy": "local", "seconds": [0.0, 0.0, 0.0, 0.01], "exponent": None}
    costly = {"policy": "h2o", "seconds": [0.1, 0.4, 1.6, 6.4], "exponent": 2.0}
    costly |= {"of_five_budgets": 1.01, "of_twice_the_layers": 2.0}
    long = [{"tokens": 2**20, "policies": "local,snapkv", **timed}]
    wanted: dict[tuple[str, str], dict[str, float]] = {}
    for subject, of_shape, form in goals.PYTORCH:
        wanted.setdefault((subject, of_shape), {}).update({form: 3.0} if form != "best" else {})
    wanted[("cumulative attention", shape)] = forms
    live = {"prompt": 2000, "capture_seconds": 20.0, "replay_seconds": 2.0, "replayed_recall": {"h2o": 0.5}}
    return {
        "machine": dict.fromkeys(["cpu", "cores", "memory", "compiler", "blas", "torch"], "some")
        | {"levels": ["AVX512"]},
        "begun": dict.fromkeys(PARTS, {"date": "2026-01-01", "commit": "0123456789ab", "load": "0.0"}),
        "traces": traces,
        "backend": results(BACKEND),
        "real": results(page.real_rows(traces)),
        "pytorch": [
            *[
                {"subject": subject, "shape": of_shape, "ours": 0.1, "forms": some}
                for (subject, of_shape), some in wanted.items()
            ],
            {"subject": "least redundant tokens", "shape": "any", "ours": 0.5, "forms": selected},
        ],
        "replay": replays,
        "memory": {"trace_bytes": 3 * 2**28, "free": replays[0], "limited": replays[1]},
        "length": {"rows": [cheap, costly], "rejected": ["kvzip"], "long": long},
        "live": {**live, "runs": [{"policy": "h2o", "seconds": 4.0, "recall": 0.5}]},
    }


def test_the_page_of_made_up_measurements():
    generated = page.page(made_up())
    require_shape(generated)
    lines = [line for line in generated.splitlines() if "cumulative attention | 9/3 heads, d 64, n 4,096" in line]
    shown = [line.split(" | ")[-2:] for line in lines if "causal blocks" in line or "naive" in line]
    assert shown == [["≥ 15 x", "30 x |"], ["≥ 5.5 x", "20 x |"], ["≥ 1.8 x", "20 x |"]]
    assert "| ≥ 4 x | 8 x |" in generated and "| ≥ 500 x | **80 x** |" in generated
    assert "20 s live" in generated and "10 x" in generated
    assert "| ≤ 0.3 x added | 14 s | 1.4 x | 4.00 s, **0.4 x** |" in generated
    assert (
        "| `h2o` | 0.40 s | 6.40 s | 2.00 | 1.01 x | 2.00 x |\n| `local` | < 0.05 s | < 0.05 s |  |  |  |" in generated
    )
    assert "| 1,048,576 | `local`, `snapkv` | 10 s | 0.2 GiB |" in generated


def test_the_exponent_is_that_of_a_power_above_the_noise():
    seconds = [1e-7 * n**1.5 for n in length.LENGTHS]
    assert seconds[1] < length.LEAST < seconds[2]
    noisy = [0.0, length.LEAST / 2, *seconds[2:]]
    assert length.exponent(length.LENGTHS, noisy) == pytest.approx(1.5)
    assert length.exponent(length.LENGTHS, [0.0, 0.0, 0.0, 1.0]) is None


def test_what_a_missed_goal_would_take():
    """9 x 4,096^2 x 64 operations, fifteen times as fast as in 1 s, are 145 GF/s."""
    parts = made_up()
    naive = next(one for one in parts["pytorch"] if one["shape"] == "9/3 heads, d 64, n 4,096")
    naive["forms"]["naive, all heads at once"] = 1.0
    shown = [
        row[-1]
        for row in page.pytorch_rows(parts["pytorch"], 100.0)
        if row[1:3] == (naive["shape"], "naive, all heads at once")
    ]
    assert shown == ["**10 x**, 15 x would need 1.45 of sgemm"]
    assert page.operations("redundancy row maxima", "n 16,384, D 192") == 16384**2 * 192
    cases = [{"name": f"a/threads:{n}/iterations:1", "GF/s": 90.0 * n, "of_sgemm": 0.9} for n in (1, 2)]
    assert page.sgemm_rate(cases) == 200.0


def test_a_goal_that_nothing_was_measured_for_is_an_error():
    parts = made_up()
    with pytest.raises(RuntimeError, match="not measured"):
        page.pytorch_rows(parts["pytorch"][1:], 200.0)
    with pytest.raises(RuntimeError, match="not measured"):
        page.backend_rows(BACKEND, parts["backend"][6:])


def test_sections_that_are_not_measured_again_remain():
    before, memory = "before\n" + page.BEGIN + "machine\n\n", "## Beyond memory\n\nold\n"
    document = before + "## Whole replays\n\nold\n\n" + memory + page.END + "after\n"
    changed = page.updated(document, "\n## Whole replays\n\nnew\n\n## Against length\n\nnew\n")
    lengths = "\n## Against length\n\nnew\n"
    assert changed == before + "## Whole replays\n\nnew\n\n" + memory + lengths + page.END + "after\n"
    assert page.updated(changed, "other\n\n## Whole replays\n\nnew\n") == changed.replace("machine", "other")
    whole = page.page(made_up())
    assert page.updated((ROOT / "docs" / "performance.md").read_text(), whole).count(whole) == 1
    alone = {key: value for key, value in made_up().items() if key in ("replay", "begun", "traces")}
    assert list(page.sections(page.page(alone))) == ["", "Whole replays"]


def test_the_page_has_the_tables_that_are_written():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert page.replaced(text, "new\n").count("new\n<!-- end -->") == 1
    generated = text.split(page.BEGIN)[1].split(page.END)[0]
    require_shape(generated, generated.count("\n## "))
    assert "## The backend against OpenBLAS" in generated
