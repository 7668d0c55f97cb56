"""`kvreplay sweep TRACE... -p POLICY,... -b BUDGET,...`: a replay as tasks of a cluster, one for each trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, size
from kvreplay.sweep.options import add_executor, wanted, whole
from kvreplay.sweep.plan import planned
from kvreplay.sweep.script import array_script
from kvreplay.sweep.sweep import run_plan

DESCRIPTION = """A replay whose traces are tasks of dask.distributed, on this machine or on many. All options of
`kvreplay replay` and its @EXPERIMENT.yaml are understood; those below say where and how it runs. The folder of results
is then what one replay leaves there, bit by bit. A worker that is lost costs its running tasks only: they are tried
again elsewhere."""


def parser() -> Parser:
    """The options of the sweep; every other word is the replay's."""
    made = Parser(prog="kvreplay sweep", usage="kvreplay sweep @EXPERIMENT.yaml | TRACE... -p POLICY,... -b BUDGET,... "
                  "[options]", description=DESCRIPTION, allow_abbrev=False)  # fmt: skip
    add = made.add_argument
    add("-o", "--output", metavar="DIR", type=Path, help="the folder of results, on a disk that all workers see")
    add_executor(add, "local")
    add("--threads", metavar="T", type=whole,
        help="of each task (default: this machine's cores over its workers; elsewhere 1)")  # fmt: skip
    add("--memory", metavar="SIZE", type=size,
        help="what each task may hold (default: its worker's limit; here, what is free over the workers)")  # fmt: skip
    add("--parquet", action="store_true", help="results.parquet beside results.csv")
    add("--emit", choices=("slurm",), help="only print a script for sbatch that does the same without Dask")
    add("--dry-run", action="store_true", help="only say what would be computed, and what it would cost")
    add("--progress", choices=("auto", "always", "never"), default="auto",
        help="a line on stderr (default: on a terminal)")  # fmt: skip
    return made


def sweep(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The exit code."""
    if "--force" in rest:
        raise Error("--force", "a sweep computes what its folder lacks", "another folder", "", Refusal.USAGE)
    place = wanted(arguments)
    words = [*rest, *(["-o", str(arguments.output)] if arguments.output else []), *place.allowance.words(0)]
    plan = planned(words)
    output = Path(plan.output)
    if arguments.emit:
        print(array_script(rest, output, place), end="")
        return 0
    if arguments.dry_run:
        print(plan.table(place.workers))
        return 0
    device = ("--device", "cuda") if place.gpus and "--device" not in plan.words else ()
    code = run_plan(plan, words, device, place, arguments)
    if arguments.parquet and (output / "results.csv").exists():
        from kvreplay.export import write_table

        write_table(output / "results.csv", output / "results.parquet")
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs it; the value is the exit code."""
    kept = "finished tasks are kept, and --resume goes on"
    return exit_code("sweep", lambda: sweep(*parser().parse_known_args(argv)), kept)


if __name__ == "__main__":
    sys.exit(main())
