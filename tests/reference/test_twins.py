"""Random twins and skill: worked examples, and the program's twins of every policy that has one."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import random_traces
import reference
import reference_metrics
import reference_twins
import test_crossed_schedules as crossed
from comparison import compare_metrics, compare_selections, stored_selection
from program_runs import call, cells_file, folder, metrics_of, read_frame
from reference import Trace
from reference_policies import decide, has_twin, select
from reference_selection import Policy, unwrapped
from write_trace import Content, write_trace

FIXTURE = reference.fixture()
NOTHING = np.array([], int)


# ------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("kept", "fixed", "prompt", "indices", "expected"),
    [
        ([2, 3, 5, 8, 9, 10], [0, 14, 15], 16, (1, 0, 0), [2, 6, 7, 8, 11, 12]),
        # gaps of 0, 2 and 1 come in the order 2, 0, 1: the runs of 2 and 1 become one
        ([1, 2, 5], [0, 7], 8, (2, 0, 0), [2, 3, 4]),
        # nothing to permute: no run; one run that leaves no place; no candidate
        ([], [0, 7], 8, (2, 0, 0), []),
        ([1, 2, 3], [0, 4], 5, (2, 0, 0), [1, 2, 3]),
        ([], [0, 1, 2], 3, (2, 0, 0), []),
    ],
)
def test_a_row(kept: list[int], fixed: list[int], prompt: int, indices: tuple, expected: list[int]) -> None:
    row = np.array(sorted({*kept, *fixed}), int)
    twin = reference_twins.in_another_order(row, np.array(fixed), prompt, indices)
    assert twin.tolist() == sorted({*expected, *fixed})


def test_runs_and_gaps() -> None:
    kept = np.array([0, 1, 1, 0, 0, 1, 0], bool)
    assert [part.tolist() for part in reference_twins.lengths(kept)] == [[2, 1], [1, 2, 1]]
    assert [part.tolist() for part in reference_twins.lengths(~kept)] == [[1, 2, 1], [0, 2, 1, 0]]
    assert [part.tolist() for part in reference_twins.lengths(kept[:0])] == [[], [0]]


def test_every_order_of_runs_and_gaps_is_as_frequent() -> None:
    row = np.array([2, 3, 5, 8, 9, 10])  # runs of 2, 1, 3; gaps of 2, 1, 2, 1: 6 times 6 orders that differ
    found: dict[tuple, int] = {}
    for seed in range(3600):
        key = tuple(reference_twins.in_another_order(row, NOTHING, 12, (seed, 3, 1)).tolist())
        found[key] = found.get(key, 0) + 1
    assert len(found) == 36
    chi_squared = sum((count - 100) ** 2 / 100 for count in found.values())
    assert chi_squared < 66.6  # 0.1 % of fair draws lie above it, with 35 degrees of freedom


def test_layers_that_share_a_set_share_its_twin() -> None:
    chosen = select(FIXTURE, Policy.parse("chunkkv:chunk=3,window=2,reuse=2,heads=kv"), "6")
    twin = reference_twins.random_twin(FIXTURE, chosen, 5)
    assert chosen.source == twin.source == [0, 0, 2, 2]
    for layer, source in enumerate(twin.source):
        for row in range(2):
            hashed = (5, source, row)
            expected = reference_twins.in_another_order(chosen.rows[source][row], chosen.protected[layer], 12, hashed)
            assert twin.rows[layer][row].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_layers_of_different_granularity(seed: int) -> None:
    """The one set of a layer with one has the number 0, whether or not it is repeated for each head."""
    ranges = ("chunkkv:chunk=1,window=2", "snapkv:window=2,kernel=3")
    whole = select(FIXTURE, Policy.parse(f"layers:0-1=({ranges[0]}),2-3=({ranges[1]})"), "6")
    parts = [select(FIXTURE, Policy.parse(text), "6") for text in ranges]
    twin, of_chunks, of_snapkv = (reference_twins.random_twin(FIXTURE, one, seed) for one in (whole, *parts))
    for layer, expected in enumerate([*of_chunks.rows[:2], *of_snapkv.rows[2:]]):
        assert [row.tolist() for row in twin.rows[layer]] == [row.tolist() for row in expected] * (2 // len(expected))


def test_skill() -> None:
    assert reference_twins.skill(0.6, 0.5, 0.7) == pytest.approx(0.5)
    assert reference_twins.skill(0.4, 0.5, 0.7) == pytest.approx(-0.5)
    assert reference_twins.skill(0.5, 0.5, 0.5) is None
    assert reference_twins.skill(0.5, 0.5, 0.5 + 1e-10) is None


@pytest.mark.parametrize("policy", ["snapkv:window=2,kernel=3", "h2o:heads=query", "chunkkv:chunk=3,window=2", "sca"])
def test_the_best_sets_are_those_of_the_oracle_with_the_same_counts(policy: str) -> None:
    chosen = select(FIXTURE, Policy.parse(policy), "6")
    oracle = select(FIXTURE, Policy.parse(f"oracle:counts=({policy})"), "6")
    best = reference_metrics.best_sets(FIXTURE, chosen, "continuation")
    assert [[row.tolist() for row in layer] for layer in best.rows] == [
        [row.tolist() for row in layer] for layer in oracle.rows
    ]
    bound = reference_metrics.recall_of_best_sets(FIXTURE, chosen, "continuation")["attention_recall", "oracle"]
    of_oracle, of_policy = (
        reference_metrics.attention_metrics(FIXTURE, one, "continuation")["attention_recall", ""]
        for one in (oracle, chosen)
    )
    np.testing.assert_allclose(bound.heads, of_oracle.heads, atol=1e-12)
    assert (bound.layers >= of_policy.layers).all()
    assert bound.all > of_policy.all


# ------------------------------------------------------------------------------------------------ the program's twins


@dataclasses.dataclass(frozen=True, eq=False)
class Situation:
    """Policies on a trace at a budget. `boundary`: prompt tokens under compression, 0: all."""

    name: str
    trace_name: str
    budget: str
    policies: tuple[str, ...]
    boundary: int = 0

    @functools.cached_property
    def path(self) -> Path:
        if self.trace_name in ("long", "short"):
            return crossed.written(self.trace_name)
        path = Path(folder().name) / f"twins-{self.trace_name}.h5"
        seed = self.trace_name.removeprefix("exchangeable ")
        content = exchangeable(int(seed)) if seed.isdecimal() else getattr(random_traces, self.trace_name)()
        write_trace(path, content)
        return path

    @functools.cached_property
    def trace(self) -> Trace:
        read = reference.read_trace(self.path)
        return dataclasses.replace(read, prompt=self.boundary or read.prompt)

    def call(self, policies: Iterator[str] | list[str], *more: str | Path) -> object:
        asked = [word for policy in policies for word in ("-p", policy)]
        boundary = ["--boundary", str(self.boundary)] if self.boundary else []
        return call("replay", self.path, *asked, "-b", self.budget, *boundary, "--progress", "never", *more)

    def accepts(self, policy: str) -> bool:
        finished = self.call([policy], "--dry-run")
        assert finished.returncode in (0, 2, 3), finished.stderr
        return finished.returncode == 0


SEED = 5
BY_LAYER = (
    "layers:0=(chunkkv:chunk=3,window=2),1-2=(snapkv:window=3,kernel=3,heads=query)",
    "layers:0-1=(pyramid-kv:window=3,kernel=3),2=(h2o:recent=3,heads=layer)",
    "layers:0=full,1=h2o,2=keydiff",
    "layers:0=h2o,1=h2o-online,2=tova",
    "layers:0-2=full",
    "chunkkv:chunk=3,window=2,reuse=2,heads=query",
    "sca:recent=2,share=2,positions=cache",
    "h2o:recent=3,overlap=true",
)


def situations() -> list[Situation]:
    """Every registered policy: by itself, with sinks, with other protected tokens, and on other traces."""
    made = []
    for setting in (crossed.LONG, crossed.SHORT, *crossed.COMMON, crossed.BY_QUERY_HEAD):
        if setting.budget.endswith("@seen"):
            continue
        name = " ".join(filter(None, [setting.name, setting.budget, setting.more, setting.heads]))
        taken = [policy for policy in setting.policies() if policy != "random-twin" and setting.takes(policy, "")]
        texts = tuple(setting.text(policy, "") for policy in taken)
        made.append(Situation(name, setting.name, setting.budget, texts))
    short = made[1].policies
    return [
        *made,
        Situation("boundary", "short", "17", short, boundary=41),
        Situation("sliding windows", "sliding_windows", "15", short),
        Situation("all", "short", "1000", short),
        Situation("ranges", "short", "19", BY_LAYER),
    ]


def twin_of(text: str) -> str:
    return f"random-twin:of=({text}),seed={SEED}"


@functools.cache
def with_twin(situation: Situation) -> list[str]:
    """The policies that the program has a twin of."""
    return [text for text in situation.policies if situation.accepts(text) and situation.accepts(twin_of(text))]


def replay(situation: Situation, texts: list[str], *more: str) -> tuple[dict, dict, Path]:
    """Rows of results.csv of these policies and of their twins, by text, and where their sets are."""
    out = Path(tempfile.mkdtemp(dir=folder().name)) / "out"
    asked = [policy for text in texts for policy in (text, twin_of(text))]
    finished = situation.call(asked, *more, "-o", out)
    assert finished.returncode == 0, finished.stderr
    frame = read_frame(out)
    cells = [rows for _, rows in frame[frame["role"] == "asked"].groupby("cell", sort=False)]
    assert len(cells) == len(asked), finished.stderr
    found: tuple[dict, dict] = {}, {}
    for rows in cells:
        one = Policy.parse(f"{rows['policy'].iloc[0]}:{rows['params'].iloc[0]}")
        is_twin = one.name == "random-twin"
        base = Policy.parse(unwrapped(dict(one.given)["of"])) if is_twin else one
        [text] = [text for text in texts if is_written(base, text)]
        found[is_twin][text] = rows
    return *found, cells_file(out)


@functools.cache
def replayed(situation: Situation) -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame], Path]:
    metrics = ",".join(metrics_of(situation.trace))
    return replay(situation, with_twin(situation), "--metrics", metrics, "--detail", "head")


def is_written(policy: Policy, text: str) -> bool:
    """Whether the text, the only one of that name in its situation but for layers, asks for this policy."""
    asked = Policy.parse(text)
    if asked.name != "layers":
        return policy.name == asked.name
    return policy.name == "layers" and [key for key, _ in policy.given] == [key for key, _ in asked.given]


SITUATIONS = situations()
each = pytest.mark.parametrize(
    ("situation", "text"),
    [
        pytest.param(situation, text, id=f"{situation.name}-{text}".replace(folder().name, ""))
        for situation in SITUATIONS
        for text in situation.policies
    ],
)


@each
def test_policies_with_a_twin(situation: Situation, text: str) -> None:
    if not situation.accepts(text):
        assert not situation.accepts(twin_of(text))
        return
    assert situation.accepts(twin_of(text)) == has_twin(situation.trace, Policy.parse(text))


@each
def test_twins_of_the_program(situation: Situation, text: str) -> None:
    """Their sets are what the policy's own sets become, and their numbers those of these sets."""
    bases, twins, path = replayed(situation)
    if text not in twins:
        pytest.skip("has no twin")
    trace, policy, where = situation.trace, Policy.parse(text), f"{situation.name} {text}"
    ours = select(trace, policy, situation.budget)
    with h5py.File(path) as file:
        cells = [file["cells"][rows[text]["cell"].iloc[0]] for rows in (bases, twins)]
        theirs, _ = stored_selection(trace, ours, cells[0], situation.budget, where)
        expected = reference_twins.random_twin(trace, theirs, SEED)
        twin, datasets = stored_selection(trace, expected, cells[1], situation.budget, where)
    compare_selections(trace, expected, twin, datasets, where)
    assert reference_metrics.counts(twin).tolist() == reference_metrics.counts(theirs).tolist()
    if twin.stored is not None:
        twin = dataclasses.replace(twin, stored=decide(trace, policy, situation.budget, follow=twin).stored)
    if not situation.boundary:
        compare_metrics(trace, twin, "continuation", twins[text], where)


def test_twins_of_pages() -> None:
    """Sinks are rounded up to pages, of which the runs are made."""
    text = "snapkv:window=3,sinks=3,select=chunks,chunk=4,window_mode=whole"
    situation = Situation("pages", "short", "19", (text,))
    bases, twins, path = replayed(situation)
    fixed = np.array([0, 1, 2, 3, 44, 45, 46])
    with h5py.File(path) as file:
        cells = [file["cells"][rows[text]["cell"].iloc[0]] for rows in (bases, twins)]
        for row in range(3 * 2):
            kept, twin = (cell["positions"][cell["offsets"][row] : cell["offsets"][row + 1]] for cell in cells)
            expected = reference_twins.in_another_order(kept, fixed, 47, (SEED, row // 2, row % 2))
            assert twin.tolist() == expected.tolist()


def test_skill_as_printed(tmp_path: Path) -> None:
    """Of each policy, by the recalls in results.csv; without skill there is no star."""
    situation = SITUATIONS[0]
    finished = situation.call(situation.policies, "--controls", "twins", "--wide", "--all", "-o", tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    frame = read_frame(tmp_path / "out")
    twins = {
        Policy.parse(unwrapped(dict(Policy.parse(f"random-twin:{params}").given)["of"])).name: rows
        for (policy, params), rows in frame.groupby(["policy", "params"])
        if policy == "random-twin"
    }
    assert set(twins) == {Policy.parse(text).name for text in with_twin(situation)}
    text = finished.stdout.splitlines()
    head, *lines = text[next(place for place, line in enumerate(text) if line.startswith("policy ")) :]
    lines = lines[: lines.index("")]
    printed = {line.split()[0].partition(":")[0]: line.split() for line in filter(None, lines)}
    place = head.split().index("skill")
    for name, rows in frame[frame["role"] == "asked"].groupby("policy"):
        values = None
        if name in twins:
            overall = [one[(one["layer"] == "all") & (one["head"] == "all")] for one in (rows, twins[name])]
            values = reference_twins.skill(recall(overall[0]), recall(overall[1]), recall(overall[0], "oracle"))
        expected = "-" if values is None else f"{values:.3f}"
        assert printed[name][place].rstrip("*").replace("-0.000", "0.000") == expected.replace("-0.000", "0.000"), name
        if values is not None and values <= 0:
            assert "*" not in " ".join(printed[name]), name


# ------------------------------------------------------------------------------------------------------------ the null

SEEDS = range(24)


def exchangeable(seed: int) -> Content:
    """A prompt's keys are unit vectors along one axis each, and queries are normal: their logits are independent.

    Later queries attend to tokens that nothing before them tells, and no token is more likely than another.
    """
    generator, prompt, tokens, n_layers = np.random.default_rng(seed), 64, 88, 6
    keys = np.zeros((2, tokens, prompt))
    keys[:, :prompt] = np.eye(prompt)
    return Content(
        q=[generator.normal(size=(4, tokens, prompt)) for _ in range(n_layers)],
        k=[keys] * n_layers,
        v=[generator.normal(size=(2, tokens, prompt)) for _ in range(n_layers)],
        prompt=prompt,
        scale=1.5,
    )


@functools.cache
def skills(choice: str) -> dict[str, np.ndarray]:
    """Skill by seed of each policy that has a twin, as the program's recalls have it."""
    texts = with_twin(on_exchangeable(SEEDS[0]))
    found: dict[str, list[float]] = {text: [] for text in texts}
    metrics = ["--metrics", "attention_recall,attention_recall:oracle", "--eval", choice, "--detail", "summary"]
    for seed in SEEDS:
        bases, twins, _ = replay(on_exchangeable(seed), texts, *metrics)
        for text in texts:
            recalls = recall(bases[text]), recall(twins[text]), recall(bases[text], "oracle")
            found[text].append(reference_twins.skill(*recalls))
    return {text: np.array(values, float) for text, values in found.items()}


@functools.cache
def on_exchangeable(seed: int) -> Situation:
    return Situation(f"exchangeable {seed}", f"exchangeable {seed}", "0.4", SITUATIONS[1].policies)


def recall(rows: pd.DataFrame, variant: str = "") -> float:
    [value] = rows["value"][(rows["metric"] == "attention_recall") & (rows["variant"] == variant)]
    return value


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width, four standard errors."""
    return float(values.mean()), 4 * float(values.std(ddof=1)) / len(values) ** 0.5


def test_no_policy_has_skill_where_nothing_can_be_known() -> None:
    """Within four standard errors, which are less than 0.1."""
    found = skills("continuation")
    assert len(found) >= 25
    for text, values in found.items():
        mean, width = interval(values)
        assert abs(mean) <= width, f"{text}: {mean} +- {width}"
        assert width < 0.1, f"{text}: {mean} +- {width}"


def test_policies_that_saw_the_queries_have_skill() -> None:
    """The same interval leaves 0 where the eval queries are those of the observation window."""
    found = skills("last:3")
    seen = [text for text in found if "window=3,kernel=3" in text or text.startswith("tova:")]
    assert len(seen) >= 6
    for text in seen:
        mean, width = interval(found[text])
        assert mean > width, f"{text}: {mean} +- {width}"
