"""Numbers at the edges, by random small shapes: a trace is replayed as the rules say, or refused in one line that says
what and where. Nothing undefined becomes a number."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import program_runs
import pytest
import random_traces
import reference
import reference_metrics
from comparison import compare_rows, compare_selections, expected_rows, stored_selection
from hypothesis import given
from hypothesis import strategies as some
from reference_policies import decide, select
from reference_selection import Policy
from write_trace import Content, write_trace

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
# Most of what they compute is told in one line each here, so that a trace is a run or two.
POLICIES = [
    "full",
    "random:sinks=1",
    "local",
    "streaming-llm:sinks=1",
    "strided",
    "h2o:recent=0.25",
    "h2o-online:recent=1",
    "snapkv:window=1,kernel=3",
    "snapkv:window=1,pool=none,heads=query",
    "chunkkv:chunk=3,window=1",
    "pyramid-kv:window=1",
    "tova",
    "observed-attention",
    "value-norm:sinks=0,window=1",
]
# More of them, whose scores of equal tokens only rounding tells apart.
OTHERS = [
    "knorm",
    "keydiff",
    "sca:recent=1",
    "lagkv:sinks=0,lag=3",
    "expected-attention:sinks=0",
    "leverage",
    "compactor:sinks=0,recent=0",
    "cur:sinks=0",
    "caote:window=1",
    "lava:window=1",
    "defensive-kv:window=1",
    "quest:page=3",
    "kivi:group=4,residual=2",
    "think:window=1,recent=1",
    "cam:sinks=1",
    "cam-one-shot:recent=1",
    "minicache",
    "q-filter",
    "ada-kv:window=1",
    "dynamickv:window=1",
    "vatp:sinks=0,recent=1",
    "scissorhands:recent=1",
    "simlayerkv:sinks=1,recent=1",
    "duo-attention:sinks=1,recent=1",
    "critical-kv:wo=none",
    "streaming-llm:sinks=1,positions=cache",
    "oracle:scope=global",
]
KINDS: dict[str, Callable[[np.ndarray, str, str], np.ndarray]] = {  # of normal numbers, which tensor, stored type
    "normal": lambda x, of, _: x,
    "zero keys": lambda x, of, _: 0 * x if of == "k" else x,
    "zero queries": lambda x, of, _: 0 * x if of == "q" else x,
    "zero values": lambda x, of, _: 0 * x if of == "v" else x,
    "zeros": lambda x, of, _: 0 * x,
    "equal keys": lambda x, of, _: np.broadcast_to(x[:, :1], x.shape).copy() if of == "k" else x,
    "equal tokens": lambda x, of, _: np.broadcast_to(x[:, :1], x.shape).copy(),
    "denormal": lambda x, of, dtype: np.rint(4 * x) * LEAST[dtype],
    "denormal values": lambda x, of, dtype: np.rint(4 * x) * LEAST[dtype] if of == "v" else x,
    "huge logits": lambda x, of, _: 1000 * x if of == "q" else x,
    "large values": lambda x, of, dtype: np.clip(x, -1, 1) * LARGEST["float16"] if of == "v" else x,
    "largest": lambda x, of, dtype: np.where(x < 0, -1.0, 1.0) * LARGEST[dtype],
}
EXACT = {"normal", "zero keys", "zero queries", "zero values", "zeros", "equal keys", "equal tokens", "denormal"}


@some.composite
def contents(draw: some.DrawFn, kinds: list[str]) -> tuple[Content, str]:
    """A trace of up to 30 tokens, and its kind."""
    kind = draw(some.sampled_from(kinds))
    dtype = draw(some.sampled_from(["float16", "bfloat16", "float32"]))
    prompt, continuation = draw(some.integers(1, 24)), draw(some.integers(1, 4))
    kv_heads, group = draw(some.sampled_from([1, 2, 3])), draw(some.sampled_from([1, 2, 5]))
    layers, d = draw(some.integers(1, 3)), draw(some.sampled_from([2, 4, 7, 16]))
    others = {"dtype": dtype, "rope": True, "softcap": draw(some.sampled_from([0.0, 0.0, 3.0]))}
    seed = draw(some.integers(0, 2**31))
    heads = (kv_heads * group, kv_heads)
    content = random_traces.normal(seed, layers, *heads, d, prompt, prompt + continuation, **others)
    for name in "qkv":
        setattr(content, name, [KINDS[kind](values, name, dtype) for values in getattr(content, name)])
    return content, kind


def replay(trace: Path, policies: list[str], budgets: list[str], *more: str | Path) -> subprocess.CompletedProcess[str]:
    asked = [word for policy in policies for word in ("-p", policy)]
    out = trace.with_suffix("")
    more = (*more, "--threads", "1", "--progress", "never", "-o", out)
    return program_runs.call("replay", trace, *asked, "-b", ",".join(budgets), "--detail", "head", *more)


def told(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr but warnings."""
    return [line for line in finished.stderr.splitlines() if not line.startswith("kvreplay: warning:")]


def budgets_around(prompt: int) -> list[str]:
    return sorted({"1", str(max(1, prompt - 1)), str(prompt), str(prompt + 7)})


def expect_numbers(frame: pd.DataFrame, folder: Path) -> None:
    """Defined or empty, and within their bounds."""
    text = (folder / "results.csv").read_text().lower()
    assert not re.search(r",(-?nan|-?inf(inity)?),", text)
    for metric, least, most in (
        ("attention_recall", 0, 1 + 1e-6),
        ("attention_cosine", 0, 1 + 1e-6),
        ("attention_l1", 0, 2 + 1e-6),
        ("output_cosine", -1 - 1e-6, 1 + 1e-6),
        ("redundancy_key", -1, 1),
        ("redundancy_value", -1, 1),
    ):
        values = frame[(frame["metric"] == metric) & (frame["variant"] == "")]["value"].dropna()
        assert values.between(least, most).all(), f"{metric}: {values.min()} to {values.max()}"
    about = json.loads((folder / "run.json").read_text())
    assert not [cell for cell in about["cells"] if cell["state"] == "failed"]


@given(contents(list(KINDS)))
def test_every_number_is_defined_or_refused_by_name(drawn: tuple[Content, str]) -> None:
    content, kind = drawn
    with tempfile.TemporaryDirectory(prefix="kvreplay-numbers-") as folder:
        path = Path(folder) / "trace.h5"
        write_trace(path, content)
        finished = replay(path, POLICIES + OTHERS, budgets_around(content.prompt))
        overflows = kind in ("largest", "huge logits", "large values")
        if finished.returncode == 0:
            expect_numbers(program_runs.read_frame(path.with_suffix("")), path.with_suffix(""))
            return
        lines = told(finished)
        assert lines and finished.returncode in ((2, 3, 6) if overflows else (6,)), f"{kind}: {finished.stderr}"
        for line in lines:  # what the trace is too short for, or has no float32 for
            assert line.startswith("kvreplay: ") and ": expected " in line, line
            assert overflows or "exceeds the trace" in line or "no room" in line, f"{kind}: {line}"


@given(contents(sorted(EXACT)), some.data())
def test_sets_and_numbers_of_the_references(drawn: tuple[Content, str], data: some.DataObject) -> None:
    content, kind = drawn
    budget = data.draw(some.sampled_from(budgets_around(content.prompt)))
    with tempfile.TemporaryDirectory(prefix="kvreplay-numbers-") as folder:
        path = Path(folder) / "trace.h5"
        write_trace(path, content)
        metrics = [name for name in program_runs.METRICS if name != "attention_cosine:logits"]  # zero logits: rounding
        finished = replay(path, POLICIES, [budget], "--metrics", ",".join(metrics))
        assert finished.returncode == 0, finished.stderr
        trace, out = reference.read_trace(path), path.with_suffix("")
        frame = program_runs.read_frame(out)
        asked = frame[frame["role"] == "asked"]
        for name, rows in asked.groupby("cell"):
            [(policy, parameters)] = set(zip(rows["policy"], rows["params"], strict=True))
            [text] = [
                one
                for one in POLICIES
                if program_runs.equal_parameters(Policy.parse(one), Policy.parse(f"{policy}:{parameters}"))
                and one.partition(":")[0] == policy
            ]
            where = f"{kind} {text} at {budget}"
            ours = select(trace, Policy.parse(text), budget)
            with h5py.File(program_runs.cells_file(out)) as file:
                theirs, datasets = stored_selection(trace, ours, file["cells"][name], budget, where)
            ours = decide(trace, Policy.parse(text), budget, follow=theirs)
            theirs = dataclasses.replace(theirs, order=ours.order, stored=ours.stored)
            compare_selections(trace, ours, theirs, datasets, where)
            if kind == "denormal":
                continue  # their products are below all float32
            measured = reference_metrics.measure(trace, theirs, "continuation")
            del measured["attention_cosine", "logits"]
            compare_rows(where, expected_rows(trace, measured), rows, of_sums=2e-5)


@pytest.mark.parametrize("budget", ["0", "-1", "0.0", "1.01", "nan", "inf", "1e400"])
def test_budgets_that_are_none(budget: str, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", random_traces.one_layer())
    finished = replay(tmp_path / "trace.h5", ["local"], [budget])
    assert finished.returncode == 2 and len(told(finished)) == 1, finished.stderr


# ------------------------------------------------------------------------------------------------- what is no number


def hidden(path: Path, tensor: str, place: tuple[int, int, int], number: float, **more: object) -> None:
    """A trace whose last layer has `number` there."""
    content = random_traces.normal(1, 2, 4, 2, 8, 30, 34, rope=True, **more)
    content.wo = [np.ones((3, 32)) for _ in content.q]
    getattr(content, tensor)[1][place] = number
    write_trace(path, content)


def archived(path: Path) -> None:
    """The chunked and compressed form of a trace."""
    with h5py.File(path, "r+", libver=("v108", "v110")) as file:
        for layer in file["layers"].values():
            for name in "qkv":
                values = layer[name]
                kind, numbers, attributes = values.id.get_type(), values[:], dict(values.attrs)
                del layer[name]
                layer.create_dataset(name, data=numbers, dtype=kind, chunks=True, compression="gzip", track_times=False)
                layer[name].attrs.update(attributes)


NUMBERS = [math.nan, math.inf, -math.inf]


def expect_refused(
    finished: subprocess.CompletedProcess[str], path: Path, tensor: str, place: tuple, number: float
) -> None:
    head, position, component = place
    found = f"found {number} at head {head}, position {position}, component {component}"
    assert (finished.returncode, told(finished)) == (
        3,
        [f"kvreplay: {path}:/layers/001/{tensor}: number: expected finite numbers, {found}"],
    )


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("tensor", "place"), [("k", (1, 4, 7)), ("v", (0, 33, 0)), ("q", (3, 31, 2))])
def test_what_is_no_number_is_refused_by_its_place(
    tensor: str, place: tuple[int, int, int], softcap: float, number: float, tmp_path: Path
) -> None:
    path = tmp_path / "trace.h5"
    hidden(path, tensor, place, number, softcap=softcap)
    expect_refused(replay(path, ["snapkv:window=2"], ["5"]), path, tensor, place, number)


@pytest.mark.parametrize("number", NUMBERS)
def test_archives_are_looked_at_too(number: float, tmp_path: Path) -> None:
    path, place = tmp_path / "trace.h5", (1, 4, 7)
    hidden(path, "k", place, number)
    archived(path)
    expect_refused(replay(path, ["local", "minicache"], ["5"]), path, "k", place, number)


def test_what_observables_are_known_of_is_looked_at_too(tmp_path: Path) -> None:
    path, place = tmp_path / "trace.h5", (1, 4, 3)
    assert program_runs.call("synth", "fixture", "-o", path).returncode == 0
    assert replay(path, ["h2o"], ["5"], "--observables", "keep").returncode == 0
    assert path.with_suffix(".obs.h5").exists()
    with h5py.File(path, "r+", libver=("v108", "v110")) as file:  # its hash stays what the file says
        file["layers/001/k"][place] = math.nan
    expect_refused(replay(path, ["h2o"], ["6"], "--force"), path, "k", place, math.nan)


def test_queries_that_nobody_reads_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "trace.h5"
    hidden(path, "q", (0, 3, 1), math.nan)
    assert replay(path, ["snapkv:window=2", "local"], ["5"]).returncode == 0
    expect_refused(replay(path, ["h2o"], ["5"], "--force"), path, "q", (0, 3, 1), math.nan)


def test_of_queries_that_are_stored_the_position_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.h5"
    content = random_traces.normal(1, 2, 4, 2, 8, 30, 34)
    content.q_positions = np.arange(24, 34)
    content.q = [queries[:, 24:] for queries in content.q]
    content.q[1][2, 5, 3] = math.inf
    write_trace(path, content)
    expect_refused(replay(path, ["snapkv:window=4"], ["5"]), path, "q", (2, 29, 3), math.inf)


def test_output_projections_are_looked_at_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.h5"
    hidden(path, "wo", (1, 5), math.nan)
    assert replay(path, ["local"], ["5"]).returncode == 0
    finished = replay(path, ["critical-kv:base=snapkv"], ["5"], "--force")
    assert finished.returncode == 3 and "/layers/001/wo: number: expected finite numbers" in finished.stderr


def test_other_traces_of_the_run_are_replayed(tmp_path: Path) -> None:
    sound, broken = tmp_path / "sound.h5", tmp_path / "broken.h5"
    write_trace(sound, random_traces.one_layer())
    hidden(broken, "v", (0, 1, 2), math.nan)
    finished = program_runs.call("replay", broken, sound, "-p", "local", "-b", "5", "-o", tmp_path / "out")
    assert finished.returncode == 6 and "found nan at head 0, position 1, component 2" in finished.stderr
    assert set(program_runs.read_frame(tmp_path / "out")["trace_hash"].dropna())
