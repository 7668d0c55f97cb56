"""`tools/study`: the closed-loop study. Captures each prompt, replays it, measures it live, and stores the numbers.

docs/closed-loop/STUDY.parquet has a row for each cell of the finished prompts; their traces and runs are deleted. The
program continues after an interruption, on any machine that has this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.capture.study_prompts import GENERATED
from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, program

if TYPE_CHECKING:
    import pandas as pd

    from kvreplay.capture.prompts import Prompt
    from kvreplay.results import Run, TraceFacts

DESCRIPTION = """Measures offline and live metrics of many policies, one prompt after another, and writes them into
docs/closed-loop. Finished prompts are not measured again."""
ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "study"
DATA = ROOT / "docs" / "closed-loop"

EQUAL = "protect=(sinks=4,recent=8)"  # equal protection
BASES = ("snapkv", "h2o", "tova", "expected-attention", "keydiff")  # with equal protection too, and with twins
POLICIES = (
    "snapkv", "snapkv:pool=none", "snapkv:window=32", "snapkv:window=32,pool=none", "snapkv:heads=layer",
    "pyramid-kv", "pyramid-kv:pool=none", "dynamickv", "dynamickv:pool=none", "chunkkv", "chunkkv:chunk=20",
    "chunkkv:reuse=5,sinks=4", "hybrid", "ada-kv", "lava", "h2o", "tova", "observed-attention", "scissorhands", "vatp",
    "caote", "critical-kv", "expected-attention", "keydiff", "knorm", "value-norm", "compactor", "q-filter", "sca",
    "sca:sinks=4", "streaming-llm", "truncate", *(f"{base}:{EQUAL}" for base in BASES),
)  # fmt: skip
FEW_POLICIES = (
    "snapkv", "snapkv:pool=none", "pyramid-kv", "dynamickv", "chunkkv", "ada-kv", "h2o", "tova", "expected-attention",
    "keydiff", "knorm", "streaming-llm", f"snapkv:{EQUAL}", f"h2o:{EQUAL}",
)  # fmt: skip
# Policies of the papers' tables of answers: chunk sizes, layers that share sets, keys and values, truncation. A shared
# set may lack the first tokens, so policies that share sets also run with protected sinks.
OF_PAPERS = (
    "local", "streaming-llm", "strided", "h2o", "snapkv", "snapkv:heads=layer", "pyramid-kv", "dynamickv", "hybrid",
    *(f"chunkkv:chunk={size}" for size in (1, 3, 5, 10, 20, 30)),
    *(f"chunkkv:reuse={layers}" for layers in (2, 5, 10, 30)), "chunkkv:reuse=2,sinks=4", "chunkkv:reuse=30,sinks=4",
    *(f"sca:{changed},sinks={sinks}" for sinks in (0, 4)
      for changed in ("use=kv", "use=key", "use=value", "objective=max", "share=1", "share=5", "share=15")),
    *(f"sca:layer={layer},sinks=4" for layer in (0, 11, 22)), "finch", "truncate",
)  # fmt: skip
LAYERS = 30  # of SmolLM2-135M


def in_one_layer(layer: int) -> str:
    """SnapKV in one layer, all tokens in the others."""
    ranges = ((0, layer - 1, "full"), (layer, layer, "snapkv"), (layer + 1, LAYERS - 1, "full"))
    return "layers:" + ",".join(f"{first}-{last}={policy}" if first < last else f"{first}={policy}"
                                for first, last, policy in ranges if first <= last)  # fmt: skip


# Equal bytes: keys and values in these formats without eviction, these policies in 16 bits, and both together.
FORMATS = (
    "q8_0", "fp8_e4m3(scale=head)", "fp8_e5m2(scale=head)", "kv(q8_0,q4_0)", "kv(q4_0,q8_0)", "q5_1", "q5_0", "q4_1",
    "q4_0", "q4_0(hadamard=true)", "uniform(bits=4)", "int4_per_token_head", "nvfp4", "mxfp4",
    "quantised(bits=4,residual=0)", "quantised(bits=2,residual=0)",
    *(f"turboquant(bits={bits})" for bits in (4, 3, 2)), "turboquant(bits=4,form=product)",
    "turboquant(bits=3,form=product)",
)  # fmt: skip
EVICTIONS = ("snapkv", "h2o", "chunkkv", "tova", "compactor", "oracle", "random")
FEW_EVICTIONS = ("ada-kv", "expected-attention", "streaming-llm")
FULL_BITS = 16  # of a number of the full cache
# Format, its bits per number with scales at a head dimension of 64, policies, and bits per number of the full cache.
# In smollm2-135m compactor has the lowest kld at 0.2 and 0.5, and chunkkv one of the lowest.
COMBINED = (
    ("q8_0", 8.5, ("chunkkv",), (2, 4, 6, 8)),
    ("q8_0", 8.5, ("compactor",), (4,)),
    ("q4_0", 4.5, ("chunkkv",), (2, 3, 4)),
    ("q4_0", 4.5, ("compactor", "oracle", "random"), (3,)),
    ("nvfp4", 4.5, ("chunkkv",), (2, 3, 4)),
    ("turboquant(bits=4)", 4.25, ("chunkkv",), (2, 3, 4)),
    ("quantised(bits=2,residual=0)", 3.0, ("chunkkv",), (2,)),
)


def budgets_of(bits: float, targets: tuple[int, ...]) -> tuple[str, ...]:
    """The shares of tokens that take `targets` bits per number of the full cache if a stored number takes `bits`."""
    return tuple(f"{target / bits:.4g}" for target in targets)


METRICS = (
    "attention_recall", "attention_recall:prompt", "attention_recall:unprotected", "attention_recall:worst",
    "attention_cosine", "attention_l1", "output_error", "output_error:pooled", "output_error:worst",
    "output_error:projected", "output_error:residual", "output_cosine", "kv_l1_loss", "sink_mass", "head_consensus",
    "span_recall", "span_erased", "kv_bytes",
)  # fmt: skip
FEW_METRICS = (
    "attention_recall", "output_error:pooled", "output_error:residual", "output_cosine", "span_recall", "kv_bytes"
)  # fmt: skip
ANSWER_TOKENS = 32  # of greedy text, where the full cache answers
AT_ONCE = 8, 32  # cells in a pass that predicts, and texts, whose steps of one token cost little more together
MEMORY = 11 << 29  # bytes that a pass may take beside the weights: fewer cells at once where prompts are long


# Policies, and the budgets at which each of them is replayed.
Cells = tuple[tuple[str, ...], tuple[str, ...]]
UNCOMPRESSED: Cells = (("full",), ("0.5",))
QUANTISED: Cells = (tuple(f"full:store={one}" for one in FORMATS), ("0.5",))  # they ignore the budget
EVICTED: tuple[Cells, ...] = (
    (EVICTIONS, budgets_of(FULL_BITS, (2, 4, 8))),
    (FEW_EVICTIONS, budgets_of(FULL_BITS, (4,))),
    (("chunkkv",), budgets_of(FULL_BITS, (3, 6, 12))),
)
BOTH: tuple[Cells, ...] = tuple(
    (tuple(f"{policy}:store={one}" for policy in policies), budgets_of(bits, targets))
    for one, bits, policies, targets in COMBINED
)


@dataclass(frozen=True)
class Studied:
    """A part of the study: a model with its policies, budgets and prompts."""

    file: str  # in build/model, or an absolute path
    title: str
    dtype: str
    cells: tuple[Cells, ...]
    of_each_kind: int  # prompts
    longest: int  # tokens of a prompt
    kinds: tuple[str, ...] = ()  # of prompts; (): all
    texts: bool = True  # whether the model also writes them
    generated: int = GENERATED  # tokens of a continuation
    stored: str | None = None  # type of the numbers in the trace (default: dtype)
    controls: str = "twins"
    metrics: tuple[str, ...] = METRICS

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(policy for policies, _ in self.cells for policy in policies))

    @property
    def budgets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(budget for _, budgets in self.cells for budget in budgets))


STUDIES = {
    "smollm2-135m": Studied(
        "smollm2-135m-instruct.gguf", "SmolLM2-135M-Instruct", "float32",
        ((POLICIES, ("0.02", "0.05", "0.1", "0.2", "0.5")),), 10, 5000,
    ),
    "qwen2.5-coder-1.5b": Studied(
        "qwen2.5-coder-1.5b-instruct.gguf", "Qwen2.5-Coder-1.5B-Instruct", "float32",
        ((FEW_POLICIES, ("0.05", "0.1", "0.2")),), 3, 1500,
    ),
    "papers": Studied(
        "smollm2-135m-instruct.gguf", "SmolLM2-135M-Instruct", "float32", ((OF_PAPERS, ("0.1", "0.2", "0.3", "0.5")),),
        24, 1500, ("niah-noise", "niah-essay", "needle"),  # what this model answers
    ),
    "layers": Studied(
        "smollm2-135m-instruct.gguf", "SmolLM2-135M-Instruct", "float32",
        ((tuple(map(in_one_layer, range(LAYERS))), ("0.1",)),), 3, 1500, texts=False,
    ),
    "equal-bytes": Studied(
        "smollm2-135m-instruct.gguf", "SmolLM2-135M-Instruct", "float32", (UNCOMPRESSED, QUANTISED, *EVICTED, *BOTH),
        10, 1000, generated=32, stored="float16", controls="none", metrics=FEW_METRICS,
    ),
    "equal-bytes-qwen": Studied(
        "qwen2.5-coder-1.5b-instruct.gguf", "Qwen2.5-Coder-1.5B-Instruct", "float32", (UNCOMPRESSED, QUANTISED),
        3, 1000, texts=False, generated=32, stored="float16", controls="none", metrics=FEW_METRICS,
    ),
}  # fmt: skip


def say(line: str) -> None:
    """Prints a line on stderr and writes it with the time into the log."""
    print(f"study: {line}", file=sys.stderr, flush=True)
    WORK.mkdir(parents=True, exist_ok=True)
    with open(WORK / "log", "a", encoding="utf-8") as log:
        log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")


def kind_of(name: str) -> str:
    return name.rpartition("-")[0]


def chosen(prompts: Sequence[Prompt], studied: Studied, count_tokens: Callable[[str], int]) -> Iterator[Prompt]:
    """Round by round one prompt of each kind, so that an unfinished study has all kinds."""
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kind = kind_of(prompt.name)
        if kind in (studied.kinds or [kind]) and count_tokens(prompt.text) <= studied.longest:
            by_kind.setdefault(kind, []).append(prompt)
    for number in range(studied.of_each_kind):
        yield from (some[number] for some in by_kind.values() if number < len(some))


class Study:
    """One model, loaded once."""

    def __init__(self, name: str) -> None:
        from kvreplay.capture.command import quiet_libraries

        quiet_libraries(False)
        from kvreplay.capture.model import load
        from kvreplay.capture.model_options import ModelChoices
        from kvreplay.capture.source import Source
        from kvreplay.capture.study_prompts import needle_prompts, study_prompts
        from kvreplay.live.measure import LiveModel

        self.name, self.studied = name, STUDIES[name]
        self.folder = WORK / name
        path = ROOT / "build" / "model" / self.studied.file
        say(f"{name}: loading {path.name}")
        self._model, self._tokenizer = load(ModelChoices(str(path), dtype=self.studied.dtype))
        self._hash = Source.parse(str(path)).hash()
        memory = MEMORY + self._model.get_memory_footprint()
        self._predicting, self._writing = (
            LiveModel(self._model, self._tokenizer, self.studied.title, self._hash, batch, memory) for batch in AT_ONCE
        )

        def count_tokens(text: str) -> int:
            return len(self._tokenizer(text, add_special_tokens=False).input_ids)

        prompts = study_prompts(count_tokens)
        if "needle" in self.studied.kinds:
            prompts += needle_prompts(count_tokens)
        self.prompts = list(chosen(prompts, self.studied, count_tokens))

    def measure(self, prompt: Prompt) -> tuple[pd.DataFrame, dict[str, Any]]:
        """All numbers of one prompt: one row per cell, and the kinds of its columns."""
        from kvreplay.predict.prediction import Measured
        from kvreplay.results import Run

        work = self.folder / prompt.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        path = work / f"{prompt.name}.h5"
        self._capture(prompt, path)
        self._replay(path, work / "run")
        run = Run(work / "run")
        trace = run.trace(prompt.name)
        twins = {f"random-twin:of={base}" for base in BASES}
        rows = run.cells[(run.cells["role"] == "asked") | run.cells["label"].isin({"full", "oracle", *twins})]
        self._measure_live(run, trace, rows)
        if self.studied.texts and prompt.answers and self._answers(run, trace, rows, prompt):
            self._measure_live(run, trace, rows, prompt.answers)
        run = Run(work / "run")
        found = Measured.of([run], roles=("asked", "control"))
        memory = run.overall[(run.overall["metric"] == "kv_bytes") & (run.overall["variant"] == "")]
        shutil.rmtree(work)
        cells = found.cells.assign(prompt=prompt.name, kind=kind_of(prompt.name), tokens=trace.boundary,
                                   kv_bytes=found.cells["cell"].map(memory.set_index("cell")["value"]))  # fmt: skip
        return cells, {"offline": found.offline, "live": found.live, "worse": found.worse}

    def _capture(self, prompt: Prompt, path: Path) -> None:
        from tqdm import tqdm

        from kvreplay.capture.capture import Choices, capture

        choices = Choices(self.studied.title, generate=self.studied.generated, with_wo=True, source_hash=self._hash,
                          store_dtype=self.studied.stored)  # fmt: skip
        capture(self._model, self._tokenizer, prompt, path, choices, lambda layers: tqdm(total=layers, disable=True))

    def _replay(self, path: Path, folder: Path) -> None:
        for policies, budgets in self.studied.cells:
            words = [word for policy in policies for word in ("-p", policy)]
            command = [*program(), "replay", path, *words, "-b", ",".join(budgets), "--metrics",
                       ",".join(self.studied.metrics), "--controls", self.studied.controls, "--detail", "layer",
                       "--progress", "never", "-o", folder]  # fmt: skip
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1]
                raise Error(path.stem, "replay failed", "", reason, exit_code=done.returncode)

    def _measure_live(self, run: Run, trace: TraceFacts, rows: pd.DataFrame, answers: Sequence[str] = ()) -> None:
        """With answers, the generated text, in batches of cells of similar size."""
        from kvreplay.live.results import write_view

        if answers:
            by_size = rows.sort_values("kept_tokens", kind="stable")
            self._writing.measure(run, trace, by_size, ANSWER_TOKENS, list(answers))
        else:
            self._predicting.measure(run, trace, rows, 0, None)
        if failed := self._predicting.failed + self._writing.failed:
            raise Error(trace.name, "cells failed", "", ", ".join(failed))
        write_view(run.folder)

    def _answers(self, run: Run, trace: TraceFacts, rows: pd.DataFrame, prompt: Prompt) -> bool:
        """Whether the full cache gives all answers."""
        from kvreplay.results import Run

        self._measure_live(run, trace, rows[rows["label"] == "full"].head(1), prompt.answers)
        live = Run(run.folder).live
        return bool((live["value"][live["metric"] == "contains"] == 1).any())


def write(path: Path, cells: pd.DataFrame, about: dict[str, Any]) -> None:
    """One row a cell; numbers of metrics in 32 bits. `about` goes into the file's metadata."""
    import pyarrow as pa
    from pyarrow import parquet

    small = cells.astype({name: "float32" for name in (*about["offline"], *about["live"])})
    table = pa.Table.from_pandas(small, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"kvreplay": json.dumps(about).encode()})
    partial = path.with_name(path.name + ".partial")
    parquet.write_table(table, partial, compression="zstd")
    partial.replace(path)


def read(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Reads a file of `write`."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    return table.to_pandas(), json.loads(table.schema.metadata[b"kvreplay"])


def file_of(name: str) -> Path:
    return DATA / f"{name}.parquet"


def finished(name: str) -> set[str]:
    """Prompts whose numbers are in docs/closed-loop/STUDY.parquet, which must be of the same policies and budgets."""
    if not file_of(name).exists():
        return set()
    cells, _ = read(file_of(name))
    asked = cells[cells["role"] == "asked"]
    measured = asked["label"].nunique(), set(asked["budget"])
    wanted = len(STUDIES[name].policies), set(STUDIES[name].budgets)
    if measured != wanted:
        expected, found = (f"{count} policies at {', '.join(sorted(budgets))}" for count, budgets in (wanted, measured))
        raise Error(str(file_of(name)), "other cells; remove the file to measure all cells again", expected, found)
    return set(cells["prompt"])


def add(name: str, cells: pd.DataFrame, about: dict[str, Any]) -> None:
    """The numbers of one more prompt."""
    import pandas as pd

    if file_of(name).exists():
        before, of_before = read(file_of(name))
        cells = pd.concat([before, cells], ignore_index=True)
        about = {
            **{key: sorted({*of_before[key], *about[key]}) for key in ("offline", "live")},
            "worse": {**of_before["worse"], **about["worse"]},
        }
    DATA.mkdir(parents=True, exist_ok=True)
    write(file_of(name), cells, about)


def parser() -> Parser:
    """The command line."""
    build = Parser(prog="tools/study", description=DESCRIPTION, allow_abbrev=False)
    add = build.add_argument
    add("studies", metavar="STUDY", nargs="*", help=f"parts of the study (default: all): {', '.join(STUDIES)}")
    add("--minutes", metavar="N", type=float, help="start no new prompt after N minutes (default: no limit)")
    add("--prompts", metavar="N", type=int, help="measure the first N prompts of each part (default: all)")
    return build


def study(arguments: argparse.Namespace) -> None:
    """Measures prompt by prompt until the time limit."""
    for name in arguments.studies:
        if name not in STUDIES:
            raise Error("study", "part", " or ".join(STUDIES), name, Refusal.USAGE)
    begin = time.monotonic()
    for name in arguments.studies or STUDIES:
        done = finished(name)
        one = Study(name)
        prompts = one.prompts[: arguments.prompts]
        for prompt in prompts:
            if prompt.name in done:
                continue
            if arguments.minutes and time.monotonic() - begin > 60 * arguments.minutes:
                say("time limit reached; repeat the command to continue")
                break
            started = time.monotonic()
            add(name, *one.measure(prompt))
            done.add(prompt.name)
            say(f"{name}: {prompt.name}: {time.monotonic() - started:.0f} s")
        say(f"{name}: {len(done)} of {len(one.prompts)} prompts are finished")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; the value is its exit code."""

    kept = "finished prompts are kept; repeat the command to continue"
    return exit_code("study", lambda: study(parser().parse_args(argv)), kept)


if __name__ == "__main__":
    sys.exit(main())
