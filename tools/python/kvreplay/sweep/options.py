"""Options for the place of tasks, shared by sweeps of replays and of captures."""

from __future__ import annotations

import argparse
import re

from kvreplay.errors import Error, Refusal
from kvreplay.sweep.executors import Wanted, cores_here, gpus_here, memory_here, room_at
from kvreplay.sweep.work import Allowance


def add_executor(add_argument, executor: str | None) -> None:
    """`executor`: the default."""
    add_argument("--executor", metavar="local|dask:ADDRESS|slurm", default=executor,
        help="local: processes here; dask: workers of a running scheduler, as dask:tcp://HOST:8786; "
             "slurm: Slurm jobs")  # fmt: skip
    add_argument("--workers", metavar="N", type=whole,
        help="workers to start (default: one per GPU, else one per four cores)")  # fmt: skip
    add_argument(
        "--gpus",
        metavar="N|auto",
        default="0",
        help="workers with one GPU each; auto: one per GPU of this machine (default: 0)",
    )
    add_argument("--retries", metavar="K", type=whole, default=3,
        help="retries of a failed task on other workers (default: 3)")  # fmt: skip
    add_argument("--slurm", metavar="KEY=VALUE", nargs="+", action="extend", default=[],
        help="sbatch directives by their long names: partition=gpu account=mine time=8:00:00")  # fmt: skip


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    return int(text)


def wanted(arguments: argparse.Namespace) -> Wanted:
    """The cluster that the options describe; raises Error for invalid options."""
    executor = arguments.executor
    if executor not in ("local", "slurm") and not re.fullmatch(r"dask:\S+", executor):
        raise Error("--executor", "unknown value", "local, dask:ADDRESS or slurm", executor, Refusal.USAGE)
    for directive in arguments.slurm:
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", directive):
            raise Error(
                "--slurm", "not a directive", "KEY=VALUE, with a long option name of sbatch", directive, Refusal.USAGE
            )
    if arguments.gpus != "auto" and not arguments.gpus.isdecimal():
        raise Error("--gpus", "not a number", "a whole number, or auto", arguments.gpus, Refusal.USAGE)
    if arguments.workers == 0:
        raise Error("--workers", "out of range", "1 or more", "0", Refusal.USAGE)
    gpus = gpus_here() if arguments.gpus == "auto" else int(arguments.gpus)
    there = room_at(executor.partition(":")[2]) if executor.startswith("dask:") else 0
    workers = there or arguments.workers or gpus or max(1, cores_here() // 4)
    threads, memory = arguments.threads, arguments.memory
    if executor == "local":
        threads = threads or max(1, cores_here() // workers)
        memory = memory or memory_here() // workers
    elif executor == "slurm" and memory is None:
        raise Error("--memory", "required with --executor slurm", "memory per task, as 8GiB", "", Refusal.USAGE)
    return Wanted(executor, workers, gpus, Allowance(threads, memory), tuple(arguments.slurm))
