"""`kvreplay sweep TRACE... -p POLICY,... -b BUDGET,...`: a replay as tasks of a cluster, one for each trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, size
from kvreplay.sweep.executors import begin_imports
from kvreplay.sweep.options import add_executor, wanted, whole
from kvreplay.sweep.plan import planned
from kvreplay.sweep.script import array_script
from kvreplay.sweep.sweep import run_plan

DESCRIPTION = """Runs a replay as tasks of dask.distributed, one per trace, on one machine or many. Accepts all options
of kvreplay replay and its @EXPERIMENT.yaml; the options below set where and how the tasks run. The results are
bit-identical to those of a single replay. If a worker is lost, its running tasks are retried on other workers."""
EXAMPLES = (
    "kvreplay sweep traces/*.h5 -p snapkv,h2o -b 0.1,0.2 -o out --workers 4",
    "kvreplay sweep @experiment.yaml --executor slurm --workers 20 --memory 8GiB --slurm partition=gpu",
)


def parser() -> Parser:
    """The options of the sweep; every other word is the replay's."""
    made = Parser(prog="kvreplay sweep", usage="kvreplay sweep @EXPERIMENT.yaml | TRACE... -p POLICY -b BUDGET "
                  "[options]", description=DESCRIPTION, writes_files=True,
                  examples=EXAMPLES)  # fmt: skip
    add = made.add_argument
    add(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="folder of results, on a disk shared by all workers (default: kvreplay-out)",
    )
    add_executor(add, "local")
    add("--threads", metavar="T", type=whole,
        help="CPU threads per task (default: local: cores divided by workers; else: 1)")  # fmt: skip
    add("--memory", metavar="SIZE", type=size,
        help="limit on memory per task, as 8GiB (default: local: free memory divided by workers; else: the worker's "
             "limit)")  # fmt: skip
    add("--emit", choices=("slurm",), help="print an sbatch script that runs the same replay without Dask, then exit")
    add("--dry-run", action="store_true", help="print the tasks and their estimated cost, then exit")
    add("--progress", choices=("auto", "always", "never"), default="auto",
        help="progress line on stderr (default: auto, only on a terminal)")  # fmt: skip
    return made


def sweep(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The exit code."""
    if "--force" in rest:
        raise Error("--force", "a sweep cannot overwrite results", "another folder", "", Refusal.USAGE)
    if "--resume" in rest:
        raise Error(
            "--resume", "unknown option", "the command without it, which keeps finished tasks", "", Refusal.USAGE
        )
    place = wanted(arguments)
    words = [*rest, *(["-o", str(arguments.output)] if arguments.output else []), *place.allowance.words(0)]
    if not (arguments.emit or arguments.dry_run):
        begin_imports(place)
    plan = planned(words, repeats_notes=not arguments.quiet)
    output = Path(plan.output)
    if arguments.emit:
        print(array_script(rest, output, place), end="")
        return 0
    if arguments.dry_run:
        print(plan.table(place.workers))
        return 0
    device = ("--device", "cuda") if place.gpus and "--device" not in plan.words else ()
    return run_plan(plan, words, device, place, arguments)


def main(argv: list[str] | None = None) -> int:
    """Runs it; the value is the exit code."""
    kept = "finished tasks are kept; run the same command to continue"
    return exit_code("sweep", lambda: sweep(*parser().parse_known_args(argv)), kept)


if __name__ == "__main__":
    sys.exit(main())
