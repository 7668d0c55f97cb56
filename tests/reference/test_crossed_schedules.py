"""Every registered policy with every schedule that the program accepts: its kept sets against the reference.

The registry says which policies and schedules there are. The program accepts a combination if and only if the reference
has one; so a new policy or schedule fails here until the reference knows it.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import random_traces
import reference
import reference_2026
from comparison import compare_rows, compare_selections, expected_rows, stored_selection
from program_runs import call, cells_file, folder, read_frame
from reference import Trace
from reference_metrics import attention_metrics, kv_bytes
from reference_policies import DEFAULTS, POLICIES, READING, WITHOUT_BUDGET, decide, select
from reference_rounds import RULES, SCHEDULES
from reference_selection import Policy, Verdict
from write_trace import Content, write_trace

# Policies without a reference for any schedule, each with the reason.
NOT_COVERED = {
    "native": "reads what the trace's model selected, which random traces do not have; see test_version_2.py"
}

# Policies whose reference was written before them: compared as soon as the registry has them.
AHEAD = {*reference_2026.POLICIES, *reference_2026.WITHOUT_BUDGET, *READING}
REGISTERED = set(call("policies", "--names").stdout.split())
ALL_POLICIES = sorted({"full", *POLICIES, *WITHOUT_BUDGET} - (AHEAD - REGISTERED))
ALL_SCHEDULES = {"once", "online", "rolling", *SCHEDULES}


# Policies that keep everything, by position alone, what the eval queries attend to, or as much as they like.
WITHOUT_PROTECTION = {"full", "kivi", "think", "minicache", "quest", "local", "streaming-llm", "strided", "truncate"}
WITHOUT_PROTECTION |= {"cam", "oracle", "random-twin", "duo-attention", "simlayerkv", "dms", *READING}
WITH_OWN_SINKS = {name for name, defaults in DEFAULTS.items() if "sinks" in defaults}
MERGES = {"cam", "cam-one-shot"}
# Policies that score by an observation window at the end of the prompt.
WINDOWS = {"snapkv", "pyramid-kv", "pyramid-infer", "dynamickv", "chunkkv", "hybrid", "ada-kv", "head-kv", "lava"}
WINDOWS |= {"defensive-kv", "caote", "tova", "scissorhands"}


def schedules_of(policy: str) -> list[str]:
    """The schedules that a policy accepts; "": its own, with none given."""
    if policy in {"hybrid", "quest", "random-twin"}:  # plans by layer, or another policy: no part can be put in
        return [""]
    if policy in READING:  # a schedule of their own; with schedule=once all is read, as by `full`
        return [""]
    if policy == "finch":  # asks a question, which must be kept whole
        return ["", "question-blocks"]
    more = {"sca": ["threshold"], **dict.fromkeys(("local", "streaming-llm"), ["online", "rolling"])}
    more |= dict.fromkeys(("h2o", "h2o-online", "tova", "cam-one-shot"), ["online"])
    more["cam"] = more["streaming-llm"]
    base = {"cam": "streaming-llm", "cam-one-shot": "h2o"}.get(policy, policy)
    return ["", "once", *more.get(policy, []), *(SCHEDULES if base in RULES else [])]


@functools.cache
def heads_of(policy: str) -> list[str]:
    """The granularities that a policy offers, by the registry."""
    offered = json.loads(call("policies", "--json").stdout)
    parameters = next(one["parameters"] for one in offered if one["name"] == policy)
    ranges = [parameter["range"] for parameter in parameters if parameter["name"] == "heads"]
    return ranges[0].split(" | ") if ranges else []


@dataclass(frozen=True, eq=False)
class Setting:
    """A trace, a budget, the arguments of the schedules, and parameters of policies."""

    name: str
    budget: str
    arguments: dict[str, str]
    parameters: dict[str, str]
    more: str = ""  # of every policy that takes it
    heads: str = ""  # the granularity of all policies; "": each policy's own

    def policies(self) -> list[str]:
        """Those that have such a granularity."""
        others = MERGES if self.heads == "query" else set()  # a merged token has one copy in each KV head
        return [one for one in ALL_POLICIES if not self.heads or self.heads in heads_of(one) if one not in others]

    def takes(self, policy: str, schedule: str) -> bool:
        """Whether the policy has the parameter `more`, under a schedule that goes with it."""
        name = self.more.partition("=")[0]
        if name == "sinks":
            return policy not in {*WITHOUT_PROTECTION, *WITH_OWN_SINKS}
        if name == "protect":
            return policy not in WITHOUT_PROTECTION
        return name == "" or (policy in WINDOWS and schedule in ("", "once"))

    def text(self, policy: str, schedule: str) -> str:
        """The policy as it is given to the program; {folder} has the tables."""
        given = [self.parameters[policy]] if policy in self.parameters else []
        given += [f"heads={self.heads}"] if self.heads else []
        given += [f"schedule={schedule}{self.arguments.get(schedule, '')}"] if schedule else []
        given += [self.more] if self.more else []
        return f"{policy}:{','.join(given)}".rstrip(":").format(folder=folder().name)


# Defaults on a prompt that is long enough for them, and parameters that leave more to the scores of a short one.
LONG = Setting(
    "long",
    "60",
    {"every": "(16)", "threshold": "(80,60)", "decoding": "(4)", "generated": "(6,4)", "question-blocks": "(16)"},
    {"head-kv": "table={folder}/long.npy", "random-twin": "of=(h2o)", "dms": "base=(knorm),threshold=-2.5,recent=20"}
    | {"oracle-top-p": "p=0.9"},
)
SHORT = Setting(
    "short",
    "19",
    {"every": "(7)", "threshold": "(23,14)", "decoding": "(2)", "generated": "(3,2)", "question-blocks": "(4)"},
    {
        "random": "seed=3,sinks=1,window=2",
        "random-twin": "of=(snapkv:window=3,kernel=3,heads=query,sinks=2),seed=3",
        "streaming-llm": "sinks=2",
        "caote": "base=cumulative",
        "critical-kv": "base=snapkv,first=0.4",
        "defensive-kv": "window=3,kernel=3",
        "expected-attention": "sinks=2,future=5",
        "finch": "norm=none,condition=all",
        "h2o": "recent=3",
        "h2o-online": "recent=3",
        "nacl": "random=0.5",
        "scissorhands": "history=12,recent=2",
        "snapkv": "window=3,kernel=3",
        "tova": "protect_last=true",
        "vatp": "sinks=2,recent=3",
        "compactor": "sinks=1,recent=2,block=7",
        "cur": "sinks=2",
        "knorm": "skip_layers=none",
        "lagkv": "sinks=2,lag=3",
        "leverage": "ridge=0.5",
        "sca": "recent=2",
        "value-norm": "p=1,sinks=1,window=2",
        "ada-kv": "window=3,kernel=3",
        "duo-attention": "sinks=2,recent=5,full_heads=0.3",
        "dynamickv": "window=3,kernel=3,update=1,r_max=2",
        "head-kv": "table={folder}/short.npy,window=3,kernel=3",
        "lava": "window=3,kernel=3",
        "pyramid-infer": "recent=3,sinks=1,r=0.5",
        "pyramid-kv": "window=3,kernel=3,beta=5",
        "simlayerkv": "sinks=1,recent=5,threshold=0.3",
        "chunkkv": "chunk=3,window=2",
        "hybrid": "chunkkv.chunk=3,chunkkv.window=2,snapkv.window=3",
        "cam": "sinks=2,merge=2",
        "cam-one-shot": "recent=3,merge=2",
        "kivi": "group=4,residual=5",
        "think": "window=4,recent=3",
        "quest": "page=4,dense_layers=1,least_pages=2",
        "r-kv": "window=3,kernel=3,mix_lambda=0.5",
        "vase": "window=4,sinks=2,large=0.4,seed=3",
        "cap-kv": "sinks=2,future=5,tau=2",
        "kvcrush": "window=3,page=3,ratio=0.5",
        "keyformer": "recent=0.2,tau=2,seed=3",
        "dms": "base=(value-norm),threshold=2.5,recent=5",
        "tri-attention": "recent=3",
        "laprox": "window=4,kernel=3",
        "kvzip": "sinks=2",
        "oracle-top-k": "sinks=2,local=3",
        "oracle-top-p": "p=0.5,sinks=1,local=2,dense_layers=1",
        "double-sparsity": "group_factor=2,label_bits=3,sinks=1",
        "page-means": "page=4,least_pages=2",
        "magic-pig": "sinks=2,local=2,bits=3,tables=2",
        "pq": "sinks=2,local=3,init_offset=2,bits=3",
    },
)
# Heads of 32 numbers, a block of every number format.
WIDE = replace(
    SHORT,
    name="wide",
    parameters=SHORT.parameters | {"head-kv": "table={folder}/wide.npy,window=3,kernel=3", "knorm": "sinks=1"},
)
GROWING = replace(SHORT, budget="0.4@seen")
COMMON = [
    replace(SHORT, more="sinks=3"),
    replace(LONG, more="sinks=4"),
    replace(GROWING, more="sinks=3"),
    replace(SHORT, more="protect=(sinks=2,recent=20%)"),
    replace(LONG, more="protect=(sinks=1,recent=3)"),
    replace(GROWING, more="protect=(sinks=2,recent=25%)"),
    replace(LONG, more="window_at=question"),
    replace(LONG, budget="9", more="window_at=question"),
]
# The prompt is cut at its end; or, if it is shorter than the peak, when the peak is reached.
WHOLE_PROMPT = [
    replace(setting, arguments={"threshold": arguments})
    for setting, arguments in ((LONG, "(80,60,true)"), (SHORT, "(23,14,true)"), (SHORT, "(51,48,true)"))
]
BY_QUERY_HEAD = replace(SHORT, heads="query")


def content(name: str) -> Content:
    """Three layers with RoPE, output projections and a marked question, which a template may follow."""
    if name == "wide":
        made = random_traces.normal(43, 3, 6, 2, 32, 47, 58, rope=True, spans={"question": ("question", 43, 47)})
    elif name == "long":
        made = random_traces.normal(
            41, 3, 4, 2, 8, 96, 110, rope=True, spans={"question": ("question", 88, 93)}, attention_scaling=1.25
        )
    else:
        made = random_traces.normal(42, 3, 6, 2, 6, 47, 58, rope=True, spans={"question": ("question", 43, 47)})
    generator = np.random.default_rng(len(name))
    made.wo = [generator.normal(size=(10, q.shape[0] * q.shape[2])) for q in made.q]
    made.input_norm = [generator.uniform(1, 9, k.shape[1]) for k in made.k]
    return random_traces.with_passes(made, 30, 1)


@functools.cache
def written(name: str) -> Path:
    """The trace's file, and beside it a table of its query heads."""
    path, made = Path(folder().name) / f"crossed-{name}.h5", content(name)
    write_trace(path, made)
    importance = np.random.default_rng(1).uniform(size=(len(made.q), len(made.q[0])))
    np.save(Path(folder().name) / f"{name}.npy", importance / importance.sum())
    return path


@functools.cache
def trace_of(name: str) -> Trace:
    return reference.read_trace(written(name))


def run(setting: Setting, policies: list[str], *more: str | Path) -> subprocess.CompletedProcess[str]:
    arguments = [argument for policy in policies for argument in ("-p", policy)]
    return call("replay", written(setting.name), *arguments, "-b", setting.budget, "--progress", "never", *more)


@functools.cache
def results(setting: Setting, schedule: str) -> tuple[dict[str, str], Path, str]:
    """Of all policies that accept a schedule: the program's cells by policy, their sets, what it says of the run."""
    out = Path(tempfile.mkdtemp(dir=folder().name)) / "out"
    texts = [
        setting.text(policy, schedule)
        for policy in setting.policies()
        if schedule in schedules_of(policy) and setting.takes(policy, schedule)
    ]
    finished = run(setting, texts, "--metrics", "attention_recall", "-o", out)
    if not (out / "results.csv").exists():
        return {}, out, f"exit {finished.returncode} {finished.stderr}"
    frame = read_frame(out)
    named = frame[frame["role"] == "asked"].groupby("policy")["cell"].first()
    return named.to_dict(), cells_file(out), finished.stderr


def test_the_reference_knows_the_registry() -> None:
    """Each registered policy has a reference or a reason why not, and so has each schedule."""
    policies = set(call("policies", "--names").stdout.split())
    assert policies == {*ALL_POLICIES, *NOT_COVERED}
    assert not NOT_COVERED.keys() & {*ALL_POLICIES}, "covered now: take it off the list"
    assert set(RULES) < policies
    parts = json.loads(call("policies", "--parts", "--json").stdout)
    assert {part["name"] for part in parts if part["kind"] == "schedule"} == ALL_SCHEDULES


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_other_schedules_are_refused(policy: str) -> None:
    accepted = {*schedules_of(policy)} | ({"once"} if policy in READING else set())
    for schedule in sorted(ALL_SCHEDULES - accepted):
        finished = run(LONG, [LONG.text(policy, schedule)], "--dry-run")
        assert finished.returncode == 2, f"{schedule}: exit {finished.returncode}\n{finished.stderr}"


@pytest.mark.parametrize("policy", ["local", "streaming-llm", "strided"])
def test_an_order_of_scores_needs_scores(policy: str) -> None:
    finished = run(SHORT, [f"{policy}:schedule=question-blocks(5,relevance)"], "-o", Path(folder().name) / policy)
    assert finished.returncode == 2, finished.stderr


@pytest.mark.parametrize(
    ("setting", "policy", "schedule"),
    [
        pytest.param(
            setting,
            policy,
            schedule,
            id="-".join(
                filter(
                    None,
                    [
                        setting.name,
                        setting.budget,
                        policy,
                        (schedule or "its own") + setting.arguments["threshold"] * (setting in WHOLE_PROMPT),
                        setting.heads,
                        setting.more,
                    ],
                )
            ),
        )
        for setting in (LONG, SHORT, GROWING, BY_QUERY_HEAD, *COMMON, *WHOLE_PROMPT)
        for policy in setting.policies()
        for schedule in schedules_of(policy)
        if setting not in WHOLE_PROMPT or schedule == "threshold"
        if not setting.budget.endswith("@seen") or schedule in ("every", "threshold", "decoding", "online")
        if setting is not BY_QUERY_HEAD or schedule in SCHEDULES
        if setting.takes(policy, schedule)
    ],
)
def test_selection(setting: Setting, policy: str, schedule: str) -> None:
    text, trace = setting.text(policy, schedule), trace_of(setting.name)
    cells, path, said = results(setting, schedule)
    assert policy in cells, said
    with h5py.File(path) as file:
        ours = select(trace, Policy.parse(text), setting.budget)
        theirs, datasets = stored_selection(trace, ours, file["cells"][cells[policy]], setting.budget, text)
    ours = decide(trace, Policy.parse(text), setting.budget, follow=theirs)
    verdicts = compare_selections(trace, ours, theirs, datasets, text)
    assert sum(verdict == Verdict.NEAR for verdict in verdicts) <= max(1, 0.01 * len(verdicts))


@pytest.mark.parametrize("policy", sorted(RULES))
def test_one_block_is_once(policy: str) -> None:
    """The rule of a round, applied to the whole prompt, is the policy that decides once."""
    for setting in (LONG, SHORT):
        text, trace = setting.text(policy, "once"), trace_of(setting.name)
        once, block = (
            [[row.tolist() for row in layer] for layer in select(trace, Policy.parse(one), setting.budget).rows]
            for one in (text, text.replace("schedule=once", "schedule=every(1000)"))
        )
        assert block == once


ONLINE = [
    f"h2o-online:{','.join(filter(None, given))}"
    for given in itertools.product(
        ("recent=3", "recent=0.25", "recent=1,heads=query", "recent=0.5,heads=layer"),
        ("", "grow=true", "prefill=once", "prefill=once,grow=true"),
        ("", "sinks=3", "protect=(sinks=2,recent=20%)"),
    )
]
ONLINE += [
    f"{policy},{','.join(given)}"
    for policy in ("h2o:schedule=online,recent=3", "tova:schedule=online", "tova:schedule=online,protect_last=true")
    for given in itertools.product(("grow=true", "prefill=once", "grow=true,prefill=once"), ("sinks=3", "sinks=1"))
]
ONLINE += [
    f"streaming-llm:schedule=online,sinks=3,positions={place}{more}"
    for place in ("original", "cache")
    for more in ("", ",grow=true", ",prefill=once", ",grow=true,prefill=once")
]


@pytest.mark.parametrize("budget", ["19", "0.4@seen", "3", "5%@seen"])
@pytest.mark.parametrize("text", ONLINE)
def test_parameters_of_online_policies(text: str, budget: str, tmp_path: Path) -> None:
    """Growing caches, one cut at the end of the prompt, sinks and protected tokens, each with each."""
    trace = trace_of(SHORT.name)
    finished = run(replace(SHORT, budget=budget), [text], "--metrics", "held_tokens", "-o", tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    frame = read_frame(tmp_path / "out")
    [cell] = frame[frame["role"] == "asked"]["cell"].unique()
    with h5py.File(cells_file(tmp_path / "out")) as file:
        ours = select(trace, Policy.parse(text), budget)
        theirs, datasets = stored_selection(trace, ours, file["cells"][cell], budget, text)
    ours = decide(trace, Policy.parse(text), budget, follow=theirs)
    verdicts = compare_selections(trace, ours, theirs, datasets, text)
    assert sum(verdict == Verdict.NEAR for verdict in verdicts) <= max(1, 0.01 * len(verdicts))


# -------------------------------------------------------------------------------------------------------------- stores

# Values of stores, those of number formats among them; the others have no values here.
VALUES_OF_STORES = {
    "quantised": ["group=4,residual=5", "bits=4,group=8,residual=0"],
    "fewer-channels": ["ratio=0.3"],
    "merged-values": ["merge=2", "merge=3,mode=sampled"],
    "merged-similar": ["", "similarity_threshold=0.1,merge_fraction=0.5"],
    "fp8_e4m3": ["", "scale=head,residual=4", "scale=token", "scale=one,skip_layers=1"],
    "fp8_e5m2": ["scale=head,hadamard=16"],
    "q4_0": ["", "residual=6,hadamard=true"],
    "turboquant": ["", "bits=2,form=product", "bits=4,form=hadamard"],
    "uniform": ["", "bits=3,residual=2"],
    "int4_per_token_head": ["", "hadamard=32"],
}
STORES = [
    f"{part['name']},{values}".rstrip(",")
    for part in json.loads(call("policies", "--parts", "--json").stdout)
    if part["kind"] == "store" and part["name"] not in ("exact", "cache", "kv")
    for values in VALUES_OF_STORES.get(part["name"], [""])
]
STORES += [
    "kv(q8_0,turboquant(bits=2)),residual=2",
    "kv(turboquant(bits=3,form=hadamard),uniform(bits=3)),skip_layers=0",
]
STORES += ["kv(exact,nvfp4)", "kv(fp8_e5m2(scale=head),mxfp4),hadamard=8"]

# Policies that are made of others, read a part of the cache, evict during the prompt, or have a store of their own.
WITH_OWN_STORE = {"hybrid", "random-twin", "quest", *READING, "h2o-online", "kivi", "think", "cam-one-shot"}
WITH_OWN_STORE |= {name for name, defaults in DEFAULTS.items() if "positions" in defaults}
# Of parameters with the names of a store's, these mean something else.
OTHER_PARAMETERS = {
    "fewer-channels": {"h2o", "keyformer", "kvcrush", "lfu", "lru", "pyramid-infer", "random", "scissorhands"}
    | {"tri-attention", "value-norm", "vatp"},
}


def takes_store(policy: str, store: str) -> bool:
    return policy not in WITH_OWN_STORE | OTHER_PARAMETERS.get(store.partition(",")[0], set())


def stored_text(policy: str, store: str) -> str:
    text = WIDE.text(policy, "")
    return f"{text}{',' if ':' in text else ':'}store={store}"


@functools.cache
def stored_results(store: str) -> tuple[dict[str, pd.DataFrame], Path, str]:
    """Of all policies that take a store: the rows of the cell by policy, the sets, what the program says of the run."""
    out = Path(tempfile.mkdtemp(dir=folder().name)) / "out"
    texts = [stored_text(policy, store) for policy in WIDE.policies() if takes_store(policy, store)]
    metrics = "output_error,attention_cosine,kv_bytes"
    finished = run(WIDE, texts, "--metrics", metrics, "--detail", "head", "-o", out)
    if not (out / "results.csv").exists():
        return {}, out, f"exit {finished.returncode} {finished.stderr}"
    frame = read_frame(out)
    return dict(list(frame[frame["role"] == "asked"].groupby("policy"))), cells_file(out), finished.stderr


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", [policy for policy in WIDE.policies() if policy not in WITH_OWN_STORE])
def test_stores(policy: str, store: str) -> None:
    """The kept tokens as the store gives them back, by what the eval queries make of them; and their bytes."""
    text, trace = stored_text(policy, store), trace_of(WIDE.name)
    if not takes_store(policy, store):
        assert run(WIDE, [text], "--dry-run").returncode == 2
        return
    cells, path, said = stored_results(store)
    assert policy in cells, said
    rows = cells[policy]
    asked = Policy.parse(text)
    with h5py.File(path) as file:
        cell = file["cells"][rows["cell"].iloc[0]]
        theirs, datasets = stored_selection(trace, select(trace, asked, WIDE.budget), cell, WIDE.budget, text)
    ours = decide(trace, asked, WIDE.budget, follow=theirs)
    compare_selections(trace, ours, theirs, datasets, text)
    changed = replace(theirs, stored=ours.stored, stored_bytes=ours.stored_bytes)
    measured = attention_metrics(trace, changed, "continuation") | kv_bytes(trace, changed)
    compared = {key: measured[key] for key in (("output_error", ""), ("attention_cosine", ""), ("kv_bytes", ""))}
    expected = expected_rows(trace, compared)
    keys = zip(rows["layer"], rows["head"], rows["metric"], rows["variant"], strict=True)
    compare_rows(text, expected, rows[[key in expected for key in keys]])


@pytest.mark.parametrize("policy", sorted({*ALL_POLICIES} & WITH_OWN_STORE - {"full"}))
def test_stores_are_refused(policy: str) -> None:
    assert run(WIDE, [stored_text(policy, "q8_0")], "--dry-run").returncode == 2


# ---------------------------------------------------------------------------------------------------- budgets in bytes


def bytes_of(policy: str, tokens: int) -> float:
    """Bytes of a policy that keeps this number of tokens in each head."""
    trace = trace_of(WIDE.name)
    total = kv_bytes(trace, select(trace, Policy.parse(policy), str(tokens)))["kv_bytes", ""].all
    assert total is not None
    return total


@pytest.mark.parametrize("store", STORES)
def test_budgets_in_bytes(store: str, tmp_path: Path) -> None:
    """B is the largest number of tokens that fits, and dividing it among heads takes no more bytes."""
    even, uneven = f"local:store={store}", f"ada-kv:window=3,kernel=3,store={store}"
    if store == "quantised,group=4,residual=5":  # one more token may take fewer bytes
        finished = run(replace(WIDE, budget="8KiB"), [even], "--dry-run")
        assert finished.returncode == 2
        assert "the bytes of store=quantised do not follow from the number of tokens" in finished.stderr
        return
    counts = (12, 25, 40)
    just_enough = {bytes_of(even, count): count for count in counts}
    one_too_few = {bytes_of(even, count + 1) - 1: count for count in counts}
    for expected in (just_enough, one_too_few):
        literals = {f"{size / 1024}KiB": size for size in expected}
        metrics = ("--metrics", "kv_bytes", "--json", "-o", tmp_path / "out", "--force")
        finished = run(replace(WIDE, budget=",".join(literals)), [even, uneven], *metrics)
        assert finished.returncode == 0, finished.stderr
        cells = [cell for cell in json.loads(finished.stdout)["cells"] if cell["role"] == "asked"]
        assert len(cells) == 2 * len(counts)
        for cell in cells:
            size = literals[cell["budget"]]
            assert cell["budget_tokens"] == expected[size]
            assert cell["values"]["kv_bytes"] <= size
            if cell["policy"] == "local":
                assert cell["values"]["kv_bytes"] == bytes_of(even, expected[size])


def test_layers_that_differ_in_bytes_must_have_equal_budgets() -> None:
    budget = replace(WIDE, budget="8KiB")
    for policy in ("pyramid-kv:window=3", "snapkv:window=3,allocate=ranked-global"):
        assert run(budget, [f"{policy},store=q8_0,residual=3"], "--dry-run").returncode == 0
        finished = run(budget, [f"{policy},store=q8_0,skip_layers=1"], "--dry-run")
        assert finished.returncode == 2
        assert "allocates tokens among layers, in some of which store=q8_0 is exact" in finished.stderr
