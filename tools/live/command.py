"""`kvreplay live RUN... --model M`: measures the live model with the kept sets of policies."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.capture.model_options import (
    ModelChoices,
    add_device_options,
    add_model_options,
    count,
    natural,
    say_loading,
    shows_progress,
    take_user_defaults,
)
from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, names, size
from kvreplay.run_folder import require_run
from kvreplay.run_names import check_names, chosen_labels, pick, split_policies

if TYPE_CHECKING:
    import pandas as pd

    from kvreplay.live.results import Way
    from kvreplay.results import Run, TraceFacts

DESCRIPTION = """Applies the kept sets of a finished replay in the live model: one pass of the unchanged model over the
text, then one pass over the continuation for each cell, with its evicted tokens masked. Writes the numbers to
RUN/live.csv."""
EXAMPLES = (
    "kvreplay live out --model ./model",
    "kvreplay live out --model ./model -p snapkv,h2o -b 0.1 --generate 32 --device cuda",
)


def parser() -> Parser:
    """The options; every one has its help."""
    build = Parser(prog="kvreplay live", description=DESCRIPTION, examples=EXAMPLES, writes_files=True)
    add = build.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders of results of kvreplay replay")
    add_model_options(build)
    add_device_options(build)
    add = build.add_argument_group("cells to measure").add_argument
    add("-p", "--policies", metavar="POLICY,...", action="append", default=[], help="policies (default: all)")
    add("-b", "--budgets", metavar="BUDGET,...", action="extend", type=names, default=[],
        help="budgets, as given to replay (default: all)")  # fmt: skip
    add("--trace", metavar="NAME,...", action="extend", type=names, default=[], help="traces (default: all)")
    add = build.add_argument_group("measurement").add_argument
    add(
        "--generate",
        metavar="N",
        type=natural,
        default=0,
        help="also generate N tokens by greedy decoding (default: 0)",
    )
    add(
        "--live-decisions",
        action="store_true",
        help="measure only the policies that evict during prefill, with their sets recomputed from the tensors of the "
        "live model, block by block (default: all cells, with the sets of the replay)",
    )
    add("--answers", metavar="FILE.jsonl", type=Path, help="reference answers for the text metrics, lines with name "
                                                           "(of a "
        "trace) and answers (default: the answer spans of the trace)")  # fmt: skip
    add("--batch", metavar="N", type=count, help="cells per pass (default: 1; on a GPU 8)")
    add("--memory", metavar="SIZE", type=size, help="limit on device memory for weights and a pass, as "
        "512MiB or 4G; reduces --batch where needed (default: the free memory)")  # fmt: skip
    return build


def live(arguments: argparse.Namespace) -> None:
    """Checks, measures, writes."""
    if arguments.live_decisions and arguments.generate:
        raise Error("--live-decisions", "with --generate", "one of the two", "", Refusal.USAGE)
    for folder in arguments.runs:
        require_run(folder)
    policies = [_registered(name) for name in split_policies(arguments.policies)]
    check_names(arguments.runs, policies=policies, budgets=arguments.budgets, traces=arguments.trace)
    choices = ModelChoices.of(arguments)
    choices.check()
    answers = _answers(arguments.answers)
    show = shows_progress(arguments)
    say_loading("live", choices.source, arguments)
    from kvreplay.results import Run

    take_user_defaults("live", arguments)
    choices = ModelChoices.of(arguments)
    runs = [Run(folder) for folder in arguments.runs]
    traces = [(run, run.trace(name)) for run in runs for name in _traces(run, arguments.trace)]
    wanted = [(run, trace, _chosen(run, trace, policies, arguments.budgets)) for run, trace in traces]
    for run, _, rows in wanted:
        register_policies_of(run, rows)

    from kvreplay.capture.command import allow_bars, quiet_libraries

    allow_bars(show)
    choices.source.require_reachable()
    quiet_libraries(show)
    import torch

    from kvreplay.capture.model import load, placement
    from kvreplay.capture.progress import progress_of
    from kvreplay.live.measure import LiveModel, has_weights_of, say
    from kvreplay.live.results import Way, compare_texts, write_view

    for run, trace, _ in wanted:
        if trace.tokens <= trace.boundary:
            raise Error(str(run.folder), f"trace {trace.name}", "a continuation after the prompt", "none")
        if trace.name in answers:
            compare_texts(run.folder, trace.name, answers[trace.name])
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    source = choices.source
    model_hash = source.hash()
    if (place := placement(choices)) and _is_done(wanted, Way(*place, model_hash), arguments):
        for run in runs:
            write_view(run.folder)
        say("all cells are measured already")
        _print_tables(runs, arguments)
        return
    for run, trace, _ in wanted:
        has_weights_of(run, trace, model_hash)  # another model is rejected before it is loaded
    model, tokenizer = load(choices)
    machine = LiveModel(model, tokenizer, source.title, model_hash or source.hash(), arguments.batch,
                        arguments.memory, decide=arguments.live_decisions)  # fmt: skip
    for _, trace, rows in wanted:
        machine.batch_of(trace, rows)  # before the first pass
    for run, trace, rows in wanted:
        machine.measure(
            run,
            trace,
            rows,
            count=arguments.generate,
            answers=answers.get(trace.name),
            progress=partial(progress_of, "live", "cells measured", arguments=arguments),
        )
        write_view(run.folder)
        if (floor := machine.floors.pop(trace.name, None)) is not None:
            say(f"{trace.name}: noise floor {floor:.3g} nats (KLD between these passes without eviction and the "
                "unchanged model)")  # fmt: skip
    if machine.reused:
        say(f"{machine.reused} of {sum(len(rows) for *_, rows in wanted)} cells were measured before and are reused")
    _print_tables(runs, arguments)
    if machine.failed:
        raise Error("live", f"cells failed: {len(machine.failed)} (listed above); the others are in live.csv. Run the "
                    "same command again to measure the failed cells", exit_code=Refusal.SOME_FAILED)  # fmt: skip


def _is_done(wanted: Sequence[tuple[Run, TraceFacts, pd.DataFrame]], way: Way, arguments: argparse.Namespace) -> bool:
    """Whether all cells were measured this way before. If so, it prints the cells that cannot be measured."""
    from kvreplay.live.measure import Work, say

    left_out = []
    for run, trace, rows in wanted:
        work = Work.of(run, trace, rows, arguments.generate, way, arguments.live_decisions)
        if work.cells or work.failed:
            return False
        left_out += work.left_out
    for reason in left_out:
        say(reason)
    return True


def _print_tables(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    """Prints the table of each run, with offline and live numbers of the chosen cells, and a further command."""
    from kvreplay.live.measure import say
    from kvreplay.live_metrics import FEWEST, UNORDERED

    for run in runs:
        if note := _unanswered(run):
            say(note)
        print(run.table(split_policies(arguments.policies), arguments.budgets, arguments.trace), end="")
    ordered = [run.live[~run.live["decisions"].isin(UNORDERED) & (run.live["role"] != "control")] for run in runs]
    measured = {one for live in ordered for one in zip(live["policy"], live["params"], strict=True)}
    if len(measured) >= FEWEST:
        print(f"{'':11}kvreplay predict {' '.join(shlex.quote(str(run.folder)) for run in runs)}")


def _unanswered(run: Run) -> str:
    """A note where the full cache gives no answer at all: answers then do not compare policies; otherwise empty."""
    live = run.live
    answers = live[(live["metric"] == "contains") & (live["policy"] == "full")]
    if answers.empty or answers["value"].any():
        return ""
    return (f"{run.folder}: the full cache answers no prompt: live.answer does not compare policies; an instruction "
            "model may need capture --chat")  # fmt: skip


def _traces(run: Run, asked: Sequence[str]) -> list[str]:
    known = list(dict.fromkeys(run.cells["trace"]))
    return pick("--trace", "trace", asked, known) if asked else known


def _chosen(run: Run, trace: TraceFacts, policies: Sequence[str], budgets: Sequence[str]) -> pd.DataFrame:
    """Rows of run.cells."""
    rows = run.cells
    if policies:
        rows = rows[rows["label"].isin(chosen_labels("-p", rows, policies, list(dict.fromkeys(rows["label"]))))]
    if budgets:
        rows = rows[rows["budget"].isin(pick("-b", "budget", budgets, list(dict.fromkeys(run.cells["budget"]))))]
    return rows[rows["trace"] == trace.name]


def _registered(policy: str) -> str:
    """A policy of -p without its file: the policy FILE.py:NAME is registered as NAME."""
    file, found, rest = policy.partition(".py:")
    if not found:
        return policy
    from kvreplay.python_policies import load

    name, colon, values = rest.partition(":")
    return load(file + ".py", name) + colon + values


def register_policies_of(run: Run, rows: pd.DataFrame) -> None:
    """Registers the policies of these cells that are not built in, from the files that run.json names."""
    from kvreplay.engine import _engine
    from kvreplay.engine import policy as known
    from kvreplay.python_policies import load, source_hash

    sources = {one["name"]: one.get("source", []) for one in run.about["policies"]}
    for policy in dict.fromkeys(rows["policy"]):
        for source in sources.get(policy, []):
            path = source["path"]
            is_python = Path(path).suffix == ".py"
            if (source_hash(load(path, policy)) if is_python else _engine.load_plugin(path)) != source["hash"]:
                raise Error(path, f"{policy} has changed since the replay", "the file of the replay; run the "
                            "same replay again", "another hash")  # fmt: skip
        if policy not in known:
            raise Error(str(run.folder), f"{policy} is not built in, and the last replay here did not use it",
                        f"-p FILE.py:{policy}, or -p with other policies", "no file")  # fmt: skip


def _answers(path: Path | None) -> dict[str, list[str]]:
    """By the name of a trace."""
    found: dict[str, list[str]] = {}
    if path is None:
        return found
    try:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            answers = row.get("answers") if isinstance(row, dict) else None
            answers = [answers] if isinstance(answers, str) else answers
            if not isinstance(answers, list) or not isinstance(row.get("name"), str):
                raise Error(f"{path}:{number}", "line", '{"name": TRACE, "answers": [TEXT, ...]}', line[:60])
            found[row["name"]] = answers
    except (OSError, ValueError) as problem:
        raise Error("--answers", str(path), "a readable JSONL file", str(problem)) from problem
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; the value is its exit code."""
    return exit_code("live", lambda: live(parser().parse_args(argv)), "finished cells are kept")


if __name__ == "__main__":
    sys.exit(main())
