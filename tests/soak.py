#!/usr/bin/env python3
"""Replays at random in one process for a time that is given: each case a trace, a policy and a budget drawn from a
seed, every set and every number held against the numpy references, and the memory of the process watched.

  tests/soak.py --minutes 30       goes on with the seed after the last one; its log is build/soak/DATE.log
  tests/soak.py --repeat SEED      one case again, told in full

A case is also what a process died of, or took longer over than two minutes: the next call says so. Exit code 1: some
case failed, or the memory grew.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/reference"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import program_runs  # noqa: E402
import random_traces  # noqa: E402
import reference  # noqa: E402
import reference_metrics  # noqa: E402
import reference_policies  # noqa: E402
from comparison import compare_metrics, compare_selections, stored_selection  # noqa: E402
from reference_selection import Policy, Verdict  # noqa: E402
from write_trace import Content, write_trace  # noqa: E402

import kvreplay as kv  # noqa: E402

FOLDER = ROOT / "build/soak"
LONGEST = 120  # seconds for a case
SETTLED = 300  # cases after which the memory of the process should have found its size
GROWTH = 48  # MiB that it may grow by from there on, in any time
SUMS = 2e-5  # numbers of outputs and logits agree so well: one near 0 has lost digits of its float32 sum
NEAR = 0.005  # of a policy's choices that may be as good as the reference's and not equal
CACHED = [
    value
    for module in (reference, reference_metrics, reference_policies)
    for value in vars(module).values()
    if hasattr(value, "cache_clear")
]

COUNTS = ("0", "1", "2", "3", "5")
SHARES = ("0.1", "0.25", "0.5")
HEADS = ("kv", "query", "layer")
AGGREGATES = ("mean", "sum", "max")
WINDOW = {"window": ("1", "2", "3", "8"), "kernel": ("1", "3", "5", "7"), "pool": ("max", "avg", "none")}
SNAPKV = WINDOW | {"heads": HEADS, "agg": AGGREGATES, "pool_order": ("group-first", "pool-first")}
CHUNKS = {
    "chunk": ("1", "2", "3", "7"),
    "window": ("1", "2", "3"),
    "heads": HEADS,
    "fill": ("cut", "none", "tokens"),
    "chunk_score": ("sum", "mean"),
    "reuse": ("1", "2"),
}
THRESHOLDS = ("threshold(0.5,0.2)", "threshold(0.6,0.4)", "threshold(17,5)", "threshold(19,18)")
TABLE = "{folder}/soak-%s.npy"
# Values that the references know, of which some are drawn; a text between bars stands for a policy of the same lists.
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {},
    "random": {"seed": COUNTS, "sinks": COUNTS, "window": COUNTS, "heads": ("kv", "layer")},
    "random:schedule": {"schedule": THRESHOLDS, "sinks": ("0", "1"), "window": COUNTS},
    "local": {},
    "streaming-llm": {"sinks": COUNTS, "positions": ("original", "cache"), "rolling": ("false", "true")},
    "strided": {"schedule": ("once", *THRESHOLDS)},
    "truncate": {"keep_question": ("true", "false")},
    "h2o": {"recent": COUNTS[1:] + SHARES, "heads": HEADS, "agg": AGGREGATES, "overlap": ("false", "true")},
    "h2o:schedule": {"schedule": THRESHOLDS, "recent": COUNTS[1:] + SHARES, "heads": HEADS, "agg": AGGREGATES},
    "h2o-online": {
        "recent": COUNTS[1:] + SHARES,
        "heads": HEADS,
        "grow": ("false", "true"),
        "prefill": ("online", "once"),
    },
    "snapkv": SNAPKV,
    "pyramid-kv": SNAPKV | {"beta": ("1", "2", "5", "20"), "short_uniform": ("false", "true")},
    "pyramid-infer": {
        "recent": ("1", "3", *SHARES),
        "sinks": COUNTS,
        "r": ("0.3", "0.6", "0.9", "1.0"),
        "decay": ("cosine", "linear", "constant"),
        "distance_weight": ("1.2", "2.5"),
        "over": ("resident", "all"),
    },
    "pyramid-infer:lengths": {"lengths": ("natural",), "sinks": ("0", "1"), "r": ("0.5", "0.9")},
    "chunkkv": CHUNKS,
    "hybrid": {"chunkkv.chunk": ("2", "3", "5"), "chunkkv.window": ("2", "3"), "snapkv.window": ("2", "3")},
    "dynamickv": WINDOW
    | {
        "heads": HEADS,
        "r_max": ("1", "1.5", "2", "10"),
        "update": ("1", "2", "4"),
        "mid_total": ("full", "proportional"),
        "norm": ("sum", "minmax"),
    },
    "sca": {
        "recent": ("1", "2", *SHARES),
        "use": ("kv", "key", "value"),
        "objective": ("min", "max"),
        "sinks": ("0", "1"),
        "share": ("all", "1"),
    },
    "sca:schedule": {"schedule": THRESHOLDS[:3], "recent": ("2", "3"), "positions": ("original", "cache")},
    "finch": {
        "blocks": ("7", "12", "512"),
        "question_tokens": ("2", "4"),
        "question": ("auto", "last"),
        "positions": ("cache", "original"),
        "norm": ("visible", "none"),
        "condition": ("question", "context", "all"),
        "order": ("position", "relevance"),
        "heads": ("layer", "kv"),
    },
    "kivi": {"bits": ("2", "4", "8"), "group": ("3", "8", "32"), "residual": ("0", "7", "16", "128")},
    "oracle": {"heads": HEADS, "scope": ("head", "layer", "global")},
    "oracle:counts": {"counts": ("(snapkv:window=2,kernel=3)", "(pyramid-kv:window=2)", "(sca)", "(chunkkv:chunk=3)")},
    "tova": {"protect_last": ("false", "true"), "schedule": ("once", "online")},
    "scissorhands": {
        "history": ("4", "9", "400"),
        "recent": ("1", "2", "0.3"),
        "binary": ("true", "false"),
        "heads": HEADS,
        "agg": AGGREGATES,
    },
    "knorm": {"skip_layers": ("none", "(0)")},
    "keydiff": {"schedule": ("once", "every(7)", "every(16)")},
    "value-norm": {"p": ("1", "2"), "sinks": COUNTS, "window": COUNTS},
    "vatp": {"base": ("h2o", "scissorhands"), "sinks": ("1", "2"), "recent": ("2", "3"), "history": ("7", "12")},
    "observed-attention": {"heads": HEADS, "agg": AGGREGATES},
    "expected-attention": {
        "sinks": COUNTS,
        "future": ("4", "9", "512"),
        "epsilon": ("0", "0.02"),
        "covariance": ("true", "false"),
        "vnorm": ("true", "false"),
        "heads": HEADS,
    },
    "lagkv": {"sinks": COUNTS, "lag": ("3", "5", "128")},
    "ada-kv": WINDOW | {"alpha": ("0", "0.2", "0.5", "1"), "normalise": ("false", "true"), "heads": ("kv", "query")},
    "head-kv": WINDOW | {"table": (TABLE % "importance",), "beta": ("1.01", "1.5")},
    "critical-kv": {"base": ("snapkv", "(h2o:recent=2)"), "wo": ("none", "trace"), "first": ("0.3", "0.5", "0.75")},
    "quest": {"page": ("3", "4", "16"), "dense_layers": ("0", "1", "2"), "least_pages": ("1", "2", "3")},
    "think": {"window": ("1", "4", "32"), "ratio": ("0.4", "0.5", "0.75"), "recent": COUNTS},
    "nacl": {
        "question_tokens": ("2", "3"),
        "random": ("0.0", "0.3", "1.0"),
        "temperature": ("0.5", "1"),
        "seed": COUNTS,
    },
    "cam": {
        "sinks": ("0", "2", "4"),
        "positions": ("original", "cache"),
        "merge": ("2", "32"),
        "mode": ("expected", "sampled"),
        "attention": ("current", "cumulative"),
        "mean": ("receivers", "later"),
        "seed": COUNTS,
    },
    "cam-one-shot": {
        "recent": ("2", "0.5"),
        "merge": ("2", "3", "32"),
        "mode": ("expected", "sampled"),
        "seed": COUNTS,
    },
    "minicache": {"t": ("0.3", "0.6"), "distance": ("paper", "code"), "gap": ("0.05", "0.2", "0.5")},
    "q-filter": {"filters": ("trace", TABLE % "filters")},
    "duo-attention": {"table": ("kvpress", TABLE % "gates"), "sinks": ("1", "2"), "recent": ("3", "5")},
    "simlayerkv": {"rows": ("1", "3"), "sinks": ("1", "2"), "recent": ("4", "5"), "threshold": ("0.2", "0.3", "0.9")},
    "leverage": {"sketch": ("0", "3"), "ridge": ("0.01", "0.5"), "seed": COUNTS},
    "compactor": {"sketch": ("0", "4"), "seed": COUNTS, "sinks": COUNTS, "recent": COUNTS, "block": ("7", "16")},
    "cur": {"use": ("product", "key", "value", "avg"), "block": ("5", "7", "16"), "sinks": COUNTS},
    "caote": {"base": ("window", "cumulative"), "window": ("1", "2"), "heads": HEADS},
    "lava": WINDOW | {"floor": ("0.0", "0.2", "0.5"), "heads": HEADS, "agg": AGGREGATES},
    "defensive-kv": WINDOW | {"heads": HEADS},
}
# Always given: what they are by default is longer than these prompts, or is what the entry is for.
GIVEN = {"schedule", "lengths", "counts", "table", "question_tokens"}


@dataclass(frozen=True)
class Drawn:
    """A case."""

    content: Content
    policy: str
    budget: str
    choice: str
    threads: int

    def text(self) -> str:
        one = self.content
        shape = f"L {len(one.k)} Hq {len(one.q[0])} Hkv {len(one.k[0])} d {one.k[0].shape[2]} P {one.prompt}"
        more = f"windows {one.windows}" if one.windows else ""
        if one.q_positions is not None:
            more += f" queries from {one.q_positions[0]}"
        tokens = one.k[0].shape[1]
        return f"{shape} T {tokens} {one.dtype} {more} {self.policy} at {self.budget}, {self.choice}"


def one_of(draw: np.random.Generator, *choices: object) -> object:
    return choices[draw.integers(len(choices))]


def random_content(draw: np.random.Generator) -> tuple[Content, str]:
    """A trace of up to 100 tokens, and its kind: normal numbers, few keys, sinks, or whole numbers."""
    prompt = int(one_of(draw, 1, 2, *draw.integers(3, 90, size=8)))
    tokens = prompt + int(draw.integers(1, 9))
    layers, group = int(draw.integers(1, 6)), one_of(draw, 1, 2, 3, 4)
    kv_heads, d = one_of(draw, 1, 2, 3), one_of(draw, 4, 8, 12, 16, 34)
    others: dict[str, object] = {
        "dtype": one_of(draw, "float32", "float16", "bfloat16"),
        "rope": bool(draw.integers(6)),
        "interleaved": bool(draw.integers(2)),
        "rotated": one_of(draw, 1.0, 0.5),
        "attention_scaling": one_of(draw, 1.0, 1.25),
        "softcap": one_of(draw, 0.0, 0.0, 2.0),
    }
    if layers > 1 and not draw.integers(4):
        windows = [int(one_of(draw, 0, 8, 16)) for _ in range(layers)]
        windows[draw.integers(layers)] = 0
        others["windows"] = windows
    if prompt > 20 and draw.integers(2):
        end = prompt - int(draw.integers(3))
        others["spans"] = {"needle": ("needle", 3, 9), "question": ("question", end - int(draw.integers(2, 8)), end)}
    seed = int(draw.integers(1 << 31))
    content = random_traces.normal(seed, layers, kv_heads * group, kv_heads, d, prompt, tokens, **others)
    kind = str(one_of(draw, "normal", "normal", "normal", "few keys", "sinks", "whole"))
    if kind == "whole" and prompt < 4:
        kind = "normal"  # so few logits may all be 0, up to rounding, and have no direction
    if kind == "few keys":
        content.k = [keys[:, draw.integers(0, min(5, tokens), tokens)] for keys in content.k]
    if kind == "sinks":
        for queries, keys in zip(content.q, content.k, strict=True):
            queries[..., 0] += 2
            keys[:, :2, 0] += 3
    if kind == "whole":  # logits without rounding, also as powers of two: ties where numbers tie
        content.scale, content.softcap = math.log(2) / 2, 0.0
        for tensors in (content.q, content.k, content.v):
            tensors[:] = [np.clip(np.rint(2 * values), -4, 4) / 2 for values in tensors]
    if not draw.integers(4):
        hidden, numbers = int(draw.integers(2, 20)), kv_heads * group * d
        content.wo = [draw.normal(size=(hidden, numbers)) for _ in range(layers)]
        content.input_norm = [draw.uniform(1, 9, tokens) for _ in range(layers)]
    if not draw.integers(6):
        content.q_positions = np.arange(prompt - int(draw.integers(0, prompt + 1)), tokens)
        content.q = [queries[:, content.q_positions] for queries in content.q]
    return content, kind


def random_policy(draw: np.random.Generator) -> str:
    entry = str(one_of(draw, *PARAMETERS))
    given = [
        f"{name}={one_of(draw, *values)}"
        for name, values in PARAMETERS[entry].items()
        if name in GIVEN or draw.integers(2)
    ]
    name = entry.partition(":")[0]
    return f"{name}:{','.join(given)}" if given else name


def drawn(seed: int) -> Drawn:
    draw = np.random.default_rng([0x50A4, seed])
    content, kind = random_content(draw)
    prompt = content.prompt
    budget = str(
        one_of(draw, *(f"0.{share}" for share in ("05", "1", "2", "25", "4", "7")), *range(1, 4), prompt, prompt + 3)
    )
    if prompt > 12:
        budget = str(one_of(draw, budget, *draw.integers(4, prompt, size=3)))
    choice = str(one_of(draw, "continuation", "continuation", "all", f"last:{max(1, prompt // 3)}", "stride:5"))
    if content.q_positions is not None or kind == "whole":
        choice = "continuation"
    policy = random_policy(draw)
    if policy.startswith("keydiff") and reference.budget_tokens(budget, prompt) < 2:
        budget = "2"  # two keys are equally far from their mean, and rounding decides
    if policy.startswith("truncate") and reference.budget_tokens(budget, prompt) < 12:
        budget = "12"  # room beside the question, which the rules take for granted
    return Drawn(content, policy, budget, choice, int(one_of(draw, 1, 2)))


def replayed(case: Drawn, folder: Path) -> tuple[str, collections.Counter[Verdict] | str]:
    """The case's policy as it was asked, and how its choices compare with ours, or in which words it is refused."""
    path = folder / "soak.h5"
    write_trace(path, case.content)
    one = case.content
    treated = sum(window == 0 for window in one.windows or [0] * len(one.k))
    program_runs.table("soak", treated, len(one.q[0]), *one.k[0].shape[::2])
    policy = case.policy.format(folder=program_runs.folder().name)
    trace = reference.read_trace(path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            run = kv.replay(
                path,
                policy,
                case.budget,
                metrics=program_runs.metrics_of(trace),
                eval=case.choice,
                detail="head",
                threads=case.threads,
                progress=False,
            )
        except kv.Error as error:
            assert error.exit_code in (2, 3) and "\n" not in str(error), f"exit code {error.exit_code}: {error}"
            return policy, str(error)
    failed = [str(one.message) for one in warned if str(one.message).startswith("failed:")]
    assert not failed, "\n".join(failed)
    asked = Policy.parse(policy)
    frame = program_runs.read_frame(run.folder)
    rows = frame[frame["role"] == "asked"]
    assert rows["cell"].nunique() == 1, f"{rows['cell'].nunique()} cells were asked for"
    ours = reference_policies.select(trace, asked, case.budget, case.choice)
    with h5py.File(program_runs.cells_file(run.folder)) as file:
        cell = file["cells"][rows["cell"].iloc[0]]
        theirs, datasets = stored_selection(trace, ours, cell, case.budget, "soak")
    ours = reference_policies.decide(trace, asked, case.budget, case.choice, follow=theirs)
    theirs = dataclasses.replace(theirs, order=ours.order, stored=ours.stored, evolving=ours.evolving)
    verdicts = compare_selections(trace, ours, theirs, datasets, "soak")
    compare_metrics(trace, theirs, case.choice, rows, "soak", of_sums=SUMS)
    return policy, collections.Counter(verdicts)


def forget() -> None:
    """What the references remember, by trace, goes with the trace."""
    for function in CACHED:
        function.cache_clear()
    gc.collect()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Log:
    """build/soak: a line a minute in DATE.log, the next seed, and a file for each failure."""

    def __init__(self) -> None:
        (FOLDER / "failures").mkdir(parents=True, exist_ok=True)
        self._next, self._running = FOLDER / "next", FOLDER / "running"
        if self._running.exists():
            self.failure(int(self._running.read_text()), "the process ended during this case")
            self._running.unlink()

    def next_seed(self) -> int:
        return int(self._next.read_text()) if self._next.exists() else 0

    @contextlib.contextmanager
    def running(self, seed: int) -> Iterator[None]:
        self._running.write_text(str(seed))
        self._next.write_text(str(seed + 1))
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._running.unlink()

    def failure(self, seed: int, what: str) -> None:
        self.line(f"FAILED seed {seed}: {what.splitlines()[-1]}")
        told = f"tests/soak.py --repeat {seed}\n{what}\n"
        (FOLDER / "failures" / f"{seed}.txt").write_text(told)

    def line(self, text: str) -> None:
        now = datetime.datetime.now()
        line = f"{now:%Y-%m-%d %H:%M:%S} {text}"
        print(line, flush=True)
        with (FOLDER / f"{now:%Y-%m-%d}.log").open("a") as file:
            file.write(line + "\n")


def soak(minutes: float) -> int:
    log = Log()
    seed, end, spoken = log.next_seed(), time.monotonic() + 60 * minutes, time.monotonic()
    log.line(f"begins with seed {seed}, for {minutes:g} minutes, kvreplay {kv.__version__}")
    counts: collections.Counter[str] = collections.Counter()
    choices: dict[str, collections.Counter[Verdict]] = collections.defaultdict(collections.Counter)
    settled = highest = 0.0

    def state() -> str:
        told = ", ".join(f"{counts[name]} {name}" for name in ("compared", "refused", "failed"))
        made = sum((one for one in choices.values()), collections.Counter())
        near = f"{made[Verdict.NEAR]} of {made.total()} choices near"
        return f"seeds to {seed - 1}: {told}; {near}; {resident_mib():.1f} MiB, settled at {settled:.1f}"

    while time.monotonic() < end:
        with log.running(seed), tempfile.TemporaryDirectory(prefix="kvreplay-soak-") as folder:
            try:
                case = drawn(seed)
                policy, outcome = replayed(case, Path(folder))
                counts["refused" if isinstance(outcome, str) else "compared"] += 1
                if not isinstance(outcome, str):
                    choices[Policy.parse(policy).name] += outcome
                    if outcome[Verdict.NEAR]:
                        log.line(f"near {seed}: {policy}, {outcome[Verdict.NEAR]} of {outcome.total()} choices")
            except Exception:
                counts["failed"] += 1
                log.failure(seed, f"{case.text()}\n{traceback.format_exc()}")
        forget()
        seed += 1
        highest = max(highest, resident_mib())
        done = counts.total()
        if done == SETTLED:
            settled = highest
        if done > SETTLED and resident_mib() > settled + GROWTH:
            counts["failed"] += 1
            log.failure(seed - 1, f"memory: {resident_mib():.1f} MiB, {settled:.1f} after {SETTLED} cases")
            settled = resident_mib()
        if time.monotonic() > spoken + 60:
            spoken = time.monotonic()
            log.line(state())
    for name, made in sorted(choices.items()):
        if made[Verdict.NEAR] > max(3, NEAR * made.total()):
            counts["failed"] += 1
            log.line(f"FAILED {name}: {made[Verdict.NEAR]} of {made.total()} choices only near")
    log.line("ends: " + state())
    return 1 if counts["failed"] else 0


def repeat(seed: int) -> int:
    case = drawn(seed)
    print(case.text())
    with tempfile.TemporaryDirectory(prefix="kvreplay-soak-") as folder:
        _, outcome = replayed(case, Path(folder))
    print(outcome if isinstance(outcome, str) else f"{outcome[Verdict.EQUAL]} equal, {outcome[Verdict.NEAR]} near")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="how long")
    what.add_argument("--repeat", type=int, metavar="SEED", help="one case")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped is not crashed
    return soak(asked.minutes) if asked.minutes is not None else repeat(asked.repeat)


if __name__ == "__main__":
    sys.exit(main())
