"""The program against the reference: every selection and every number of a run, on the fixture, random and real traces.

The program is the one that the environment variable KVREPLAY names, or that of the release build. Sets must be equal
but for positions whose scores lie within a relative 1e-5 of the cut (those of random, local, streaming-llm and full
without exception); metrics, computed by the reference from the program's own sets, to 1e-6.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import random_traces
import reference
from reference import Policy, Selection, Trace, select
from write_trace import write_trace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVREPLAY", ROOT / "build/release/kvreplay"))
REAL = ROOT / "traces/smollm2-135m-needle.h5"
BUDGETS = ("0.1", "0.2", "5")
MORE_THAN_THE_PROMPT = "1000"

POLICIES = [
    "full",
    "random",
    "random:seed=7,sinks=2,window=3",
    "random:heads=layer",
    "local",
    "streaming-llm",
    "streaming-llm:sinks=1",
    "h2o",
    "h2o:recent=3",
    "h2o:recent=0.25,heads=query",
    "h2o:recent=2,heads=layer",
    "h2o:agg=max",
    "h2o:recent=3,overlap=true",
    "h2o:preset=sca",
    "h2o:preset=factory",
    "snapkv",
    "snapkv:window=2,kernel=3",
    "snapkv:window=2,kernel=3,heads=query",
    "snapkv:window=3,kernel=5,heads=layer",
    "snapkv:window=2,kernel=5,pool=avg",
    "snapkv:window=2,pool=none,agg=sum",
    "snapkv:window=4,kernel=3,agg=max",
    "snapkv:window=2,kernel=3,pool_order=pool-first",
    "snapkv:window=1,kernel=1,heads=query,pool=avg",
    "snapkv:preset=snapkv-paper",
    "snapkv:preset=snapkv-code",
    "snapkv:preset=kvpress",
    "chunkkv",
    "chunkkv:chunk=3,window=2",
    "chunkkv:chunk=4,window=1,heads=kv",
    "chunkkv:chunk=2,window=2,heads=query",
    "chunkkv:chunk=3,window=2,fill=none",
    "chunkkv:chunk=3,window=1,fill=tokens",
    "chunkkv:chunk=4,window=1,chunk_score=mean",
    "chunkkv:chunk=2,window=2,window_mode=replace",
    "chunkkv:chunk=3,window=2,reuse=2,heads=kv",
    "oracle",
    "oracle:heads=query",
    "oracle:heads=layer",
    "oracle:scope=layer",
    "oracle:scope=global",
    "oracle:scope=global,heads=query",
    "oracle:counts=(snapkv:window=2,kernel=3,heads=query)",
    "oracle:counts=(chunkkv:chunk=3,window=2,fill=none)",
]
FEW_POLICIES = [
    "random",
    "h2o:recent=0.25,heads=query",
    "snapkv:window=2,kernel=3",
    "chunkkv:chunk=3,window=2",
    "oracle",
]
REAL_POLICIES = [
    "random",
    "streaming-llm",
    "h2o",
    "h2o:preset=factory,heads=query",
    "snapkv",
    "snapkv:heads=query",
    "snapkv:preset=snapkv-code",
    "snapkv:heads=layer",
    "chunkkv",
    "chunkkv:heads=query,reuse=3",
    "oracle",
    "oracle:scope=global",
]
ALSO_LARGE_BUDGETS = (random_traces.one_layer, random_traces.sliding_windows)
ALSO_ALL_ROWS = (
    random_traces.grouped_queries,
    random_traces.prompt_shorter_than_the_window,
    random_traces.sliding_windows,
    random_traces.softcap,
)
METRICS = [
    "attention_recall",
    "attention_recall:prompt",
    "attention_recall:nosink",
    "attention_cosine",
    "attention_cosine:prompt",
    "attention_cosine:nosink",
    "attention_cosine:logits",
    "attention_cosine:unaligned",
    "attention_l1",
    "output_cosine",
    "output_error",
    "kv_l1_loss",
    "kv_l1_loss:key",
    "kv_l1_loss:value",
    "kv_l1_loss:absolute",
    "kv_l1_loss:token",
    "jaccard_adjacent",
    "layer_budget",
    "layer_budget:unprotected",
    "span_recall",
    "kv_bytes",
    "kv_bytes:union",
    "compression",
    "held_tokens",
    "redundancy_key",
    "redundancy_value",
]


@dataclass(frozen=True)
class Run:
    """One call of the program."""

    trace: str
    choice: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    rows: bool  # with the cosine over all queries


@dataclass
class Cell:
    """A cell of the program's: its policy with all parameters, the budget as asked, its rows of results.csv."""

    policy: Policy
    budget: str
    name: str
    rows: pd.DataFrame


@dataclass
class Results:
    """What the program wrote: results.csv, whole and by cell, and where selections.h5 lies."""

    frame: pd.DataFrame
    cells: list[Cell]
    selections: Path


def queries_of(policy: Policy) -> str:
    """Which prompt queries a policy reads: all, last or none."""
    if policy.name == "oracle" and policy.parameters["counts"] != "none":
        return queries_of(Policy.parse(policy.parameters["counts"].strip("()")))
    return {"h2o": "all", "snapkv": "last", "chunkkv": "last"}.get(policy.name, "none")


def accepted(content: random_traces.Content, text: str) -> bool:
    """Whether the trace has the queries that the policy reads, and is long and deep enough for what the user gives."""
    policy = Policy.parse(text)
    given = dict(policy.given)
    if content.q_positions is not None:
        first = content.prompt - content.q_positions[0]
        window = policy.parameters.get("window", "0")
        if queries_of(policy) == "all" or (queries_of(policy) == "last" and int(window) > first):
            return False
    limits = {"sinks": content.prompt, "recent": content.prompt, "reuse": len(content.k)}
    if policy.name == "random":
        limits["window"] = content.prompt
    return all("." in given[key] or int(given[key]) <= limit for key, limit in limits.items() if key in given)


def runs() -> list[Run]:
    every = [Run("fixture", "continuation", tuple(POLICIES), (*BUDGETS, "6", MORE_THAN_THE_PROMPT), True)]
    every += [Run("fixture", choice, tuple(FEW_POLICIES), ("6",), False) for choice in ("last:4", "all", "stride:3")]
    for build in random_traces.TRACES:
        content = build()
        policies = tuple(policy for policy in POLICIES if accepted(content, policy))
        choice = "continuation" if content.prompt < content.k[0].shape[1] else "last:4"
        large = (MORE_THAN_THE_PROMPT,) if build in ALSO_LARGE_BUDGETS else ()
        every.append(Run(build.__name__, choice, policies, BUDGETS + large, build in ALSO_ALL_ROWS))
    for choice in ("last:4", "all", "stride:3", "span:needle", "span:reply"):
        every.append(Run("grouped_queries", choice, tuple(FEW_POLICIES), ("0.2", "5"), False))
    every.append(Run("sliding_windows", "last:5", tuple(FEW_POLICIES), ("0.2",), False))
    every.append(Run("large_logits", "all", tuple(FEW_POLICIES), ("0.2",), False))
    if REAL.exists():
        every.append(Run("real", "continuation", tuple(REAL_POLICIES), ("0.1", "0.2"), False))
    return every


RUNS = runs()
CASES = [(run, policy, budget) for run in RUNS for policy in run.policies for budget in run.budgets]
case = pytest.mark.parametrize(
    ("run", "policy", "budget"),
    CASES,
    ids=[f"{run.trace}-{run.choice}-{policy}-{budget}" for run, policy, budget in CASES],
)
by_run = pytest.mark.parametrize("run", RUNS, ids=[f"{run.trace}-{run.choice}" for run in RUNS])


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="kvreplay-reference-")


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if not PROGRAM.exists():
        pytest.fail(f"no program at {PROGRAM}: build it, or name it with KVREPLAY")
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=120)


@functools.cache
def trace_path(name: str) -> Path:
    """The trace's file, written on first use."""
    if name == "real":
        return REAL
    path = Path(folder().name) / f"{name}.h5"
    if name == "fixture":
        finished = call("synth", "fixture", "-o", path)
        assert finished.returncode == 0, finished.stderr
    else:
        write_trace(path, getattr(random_traces, name)())
    return path


@functools.cache
def trace_of(name: str) -> Trace:
    return reference.read_trace(trace_path(name))


def results(run: Run) -> Results:
    """The program's results of a run, made once; a run that fails fails every test that reads it."""
    made = replayed(run)
    if isinstance(made, str):
        pytest.fail(made)
    return made


@functools.cache
def replayed(run: Run) -> Results | str:
    """The program's results of a run, or how it failed."""
    out = Path(folder().name) / f"{run.trace}-{run.choice.replace(':', '-')}"
    metrics = METRICS + (["attention_cosine:rows"] if run.rows else [])
    finished = call(
        "replay",
        trace_path(run.trace),
        *(argument for policy in run.policies for argument in ("-p", policy)),
        "-b",
        ",".join(run.budgets),
        "--eval",
        run.choice,
        "--metrics",
        ",".join(metrics),
        "--detail",
        "head",
        "--progress",
        "never",
        "-o",
        out,
    )
    if finished.returncode != 0:
        return f"{run.trace} {run.choice}: exit {finished.returncode}\n{finished.stderr}"
    text = ["policy", "params", "budget", "layer", "head", "metric", "variant", "cell", "role", "heads", "trace_hash"]
    frame = pd.read_csv(out / "results.csv", dtype=dict.fromkeys(text, str), keep_default_na=False, low_memory=False)
    frame["value"] = frame["value"].replace("", np.nan).astype(float)
    cells = [
        Cell(Policy.parse(f"{policy}:{params}"), budget, str(name), rows)
        for (policy, params, budget, name), rows in frame.groupby(["policy", "params", "budget", "cell"])
        if policy
    ]
    return Results(frame, cells, out / "selections.h5")


def equal_values(ours: str, theirs: str) -> bool:
    """Parameter values as the command line spells them: 0.50 is 0.5, but 1.0 (a share) is not 1 (a count)."""
    if ours.startswith("(") or ":" in ours:
        mine, other = Policy.parse(ours.strip("()")), Policy.parse(theirs.strip("()"))
        return mine.name == other.name and equal_parameters(mine, other)
    try:
        return float(ours) == float(theirs) and ("." in ours) == ("." in theirs)
    except ValueError:
        return ours == theirs


def equal_parameters(ours: Policy, theirs: Policy) -> bool:
    other = theirs.parameters
    return all(key in other and equal_values(value, other[key]) for key, value in ours.parameters.items())


def cell_of(run: Run, policy: str, budget: str) -> Cell:
    """The one cell of a policy with these parameters at this budget; budgets of as many tokens are one."""
    ours = Policy.parse(policy)
    prompt = trace_of(run.trace).prompt
    tokens = reference.budget_tokens(budget, prompt)
    found = [
        cell
        for cell in results(run).cells
        if cell.policy.name == ours.name
        and reference.budget_tokens(cell.budget, prompt) == tokens
        and equal_parameters(ours, cell.policy)
    ]
    assert len(found) == 1, f"{policy} at {budget}: {len(found)} cells of {run.trace}"
    return found[0]


@functools.cache
def program_selection(run: Run, policy: str, budget: str) -> tuple[Selection, Selection, dict[str, np.ndarray]]:
    """Ours, theirs in the same terms, and the other datasets of the cell."""
    trace = trace_of(run.trace)
    ours = select(trace, Policy.parse(policy), budget, run.choice)
    where = f"{run.trace} {policy} {budget}"
    with h5py.File(results(run).selections) as file:
        cell = file["cells"][cell_of(run, policy, budget).name]
        attributes = dict(cell.attrs)
        datasets = {name: cell[name][:] for name in cell}
    heads = attributes["heads"]
    heads = heads.decode() if isinstance(heads, bytes) else heads
    assert heads == ours.heads, f"{where}: granularity {heads}, expected {ours.heads}"
    assert int(attributes["budget_tokens"]) in (
        reference.budget_tokens(budget, trace.prompt),
        min(trace.prompt, reference.budget_tokens(budget, trace.prompt)),
    ), where
    offsets, positions = datasets["offsets"], datasets["positions"]
    n_rows = reference.row_count(trace, ours.heads)
    assert offsets.shape == (len(trace.layers) * n_rows + 1,), where
    assert offsets[0] == 0, where
    assert offsets[-1] == len(positions), where
    stored = [
        [positions[offsets[layer * n_rows + row] : offsets[layer * n_rows + row + 1]] for row in range(n_rows)]
        for layer in range(len(trace.layers))
    ]
    for layer, rows in enumerate(stored):
        for head, row in enumerate(rows):
            assert (np.diff(row) > 0).all(), f"{where}: layer {layer} head {head} is not ascending"
            assert layer in trace.treated or len(row) == 0, f"{where}: layer {layer} is not treated but has rows"
    theirs = Selection(ours.heads, [stored[layer] for layer in trace.treated], ours.protected, ours.source, [])
    return ours, theirs, datasets


@case
def test_selection(run: Run, policy: str, budget: str) -> None:
    trace = trace_of(run.trace)
    ours, theirs, datasets = program_selection(run, policy, budget)
    where = f"{run.trace} {policy} {budget}"
    for decision in ours.decisions:
        if not decision.agrees([theirs.rows[layer][row] for layer, row in decision.places]):
            for layer, row in decision.places:
                expected, found = ours.rows[layer][row].tolist(), theirs.rows[layer][row].tolist()
                assert found == expected, f"{where}: layer {trace.treated[layer]} head {row}"
    for layer, source in enumerate(ours.source):
        for row, kept in enumerate(theirs.rows[layer]):
            assert kept.tolist() == theirs.rows[source][row].tolist(), f"{where}: layer {layer} head {row}: reuse"
    sources = np.full(len(trace.layers), -1)
    sources[trace.treated] = np.array(trace.treated)[ours.source]
    assert datasets["layer_source"].tolist() == sources.tolist(), where
    for variant in ("first", "mean", "union"):
        expected = reference.jaccard_matrix(trace, theirs, variant)
        np.testing.assert_allclose(datasets[f"jaccard_{variant}"], expected, rtol=0, atol=1e-12, err_msg=where)


def expected_rows(trace: Trace, measured: dict[tuple[str, str], reference.Values]) -> dict[tuple, float | None]:
    """Keyed as in results.csv: layer, head, metric, variant."""
    rows: dict[tuple, float | None] = {}
    for (metric, variant), values in measured.items():
        rows["all", "all", metric, variant] = values.all
        for index, layer in enumerate(trace.treated):
            number = str(trace.layers[layer].number)
            if values.layers is not None:
                rows[number, "all", metric, variant] = values.layers[index]
            if values.heads is not None:
                for head, value in enumerate(values.heads[index]):
                    rows[number, str(head), metric, variant] = value
    return rows


def compare_rows(where: str, expected: dict[tuple, float | None], frame: pd.DataFrame) -> None:
    """Each expected row is there, none without a reference, and all values are equal."""
    keys = list(zip(frame["layer"], frame["head"], frame["metric"], frame["variant"], strict=True))
    assert len(set(keys)) == len(keys), f"{where}: a row appears twice"
    missing = expected.keys() - set(keys)
    unknown = set(keys) - expected.keys()
    assert not missing, f"{where}: {len(missing)} rows are missing, the first is {min(missing)}"
    assert not unknown, f"{where}: {len(unknown)} rows without a reference, the first is {min(unknown)}"
    wanted = np.array([np.nan if expected[key] is None else expected[key] for key in keys], float)
    found = frame["value"].to_numpy(float)
    tolerance = np.array([0 if key[2] == "kv_bytes" else 1e-6 for key in keys])
    wrong = ~((np.abs(found - wanted) <= tolerance) | (np.isnan(found) & np.isnan(wanted)))
    lines = [f"{key}: {f!r}, expected {w!r}" for key, f, w, bad in zip(keys, found, wanted, wrong, strict=True) if bad]
    assert not lines, (
        f"{where}: {len(lines)} of {len(keys)} values differ (layer, head, metric, variant)\n" + "\n".join(lines[:12])
    )


@case
def test_metrics(run: Run, policy: str, budget: str) -> None:
    trace = trace_of(run.trace)
    where = f"{run.trace} {policy} {budget}"
    _, theirs, _ = program_selection(run, policy, budget)
    measured = reference.measure(trace, theirs, run.choice, run.rows)
    cell = cell_of(run, policy, budget)
    compare_rows(where, expected_rows(trace, measured), cell.rows)
    one = cell.rows.iloc[0]
    assert float(one["kept_tokens"]) == pytest.approx(reference.counts(theirs).mean(), abs=1e-9), where
    assert int(one["n_queries"]) == len(reference.eval_queries(trace, run.choice)), where


@by_run
def test_redundancy(run: Run) -> None:
    trace = trace_of(run.trace)
    frame = results(run).frame
    frame = frame[frame["role"] == "trace"]
    expected: dict[tuple, float | None] = {}
    tokens = {name: reference.redundancy(trace, tensor) for name, tensor in (("key", "k"), ("value", "v"))}
    for name, values in tokens.items():
        mean = reference.Values(None, values.mean(axis=1), float(values.mean()))
        expected |= expected_rows(trace, {(f"redundancy_{name}", ""): mean})
    compare_rows(run.trace, expected, frame)
    with h5py.File(results(run).selections) as file:
        [group] = file["traces"].values()
        for name, values in tokens.items():
            np.testing.assert_allclose(group[f"redundancy_{name}"][:][trace.treated], values, rtol=0, atol=1e-6)


@by_run
def test_every_full_cell_is_exact(run: Run) -> None:
    frame = results(run).frame
    frame = frame[frame["policy"] == "full"]
    assert len(frame)
    for metric, value in (
        ("attention_recall", 1),
        ("attention_cosine", 1),
        ("output_cosine", 1),
        ("attention_l1", 0),
        ("output_error", 0),
        ("kv_l1_loss", 0),
    ):
        found = frame[(frame["metric"] == metric) & (frame["variant"] == "")]["value"]
        assert (found == value).all(), f"{run.trace}: {metric} of full is {found[found != value].iloc[0]!r}"


def test_fixture_is_made_bit_for_bit() -> None:
    theirs, ours = trace_of("fixture"), reference.fixture()
    assert (theirs.prompt, theirs.scale, theirs.softcap) == (ours.prompt, ours.scale, ours.softcap)
    for layer, (found, expected) in enumerate(zip(theirs.layers, ours.layers, strict=True)):
        for name in "qkv":
            np.testing.assert_array_equal(
                getattr(found, name), getattr(expected, name), err_msg=f"layer {layer} {name}"
            )


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("h2o", ()),
        ("snapkv:window=9", ()),
        ("snapkv:preset=snapkv-paper", ()),
        ("chunkkv:window=9", ()),
        ("oracle:counts=(h2o)", ()),
        ("local", ("--eval", "all")),
        ("local", ("--eval", "last:9")),
        ("local", ("--metrics", "attention_cosine:rows")),
    ],
)
def test_queries_that_are_not_stored_are_refused(policy: str, more: tuple[str, ...], tmp_path: Path) -> None:
    trace = trace_path("last_queries_only")
    finished = call("replay", trace, "-p", policy, "-b", "0.2", "-o", tmp_path / "out", "--progress", "never", *more)
    assert finished.returncode == 3, finished.stderr
    assert "quer" in finished.stderr


def test_default_eval_needs_a_continuation(tmp_path: Path) -> None:
    finished = call("replay", trace_path("no_continuation"), "-p", "local", "-b", "0.2", "-o", tmp_path / "out")
    assert finished.returncode in (2, 3), finished.stderr
