"""Where tasks run: a cluster on this machine, one that runs already, or jobs of Slurm. One function each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.sweep.plan import call
from kvreplay.sweep.work import Allowance

if TYPE_CHECKING:
    from distributed import Client

# Settings of clusters that the sweep starts: it counts the attempts at a task itself and abandons silent hosts. Its
# workers wait for programs: profiles take a tenth of a core of each, ticks every 20 ms a hundredth. Processes that are
# forked after the imports start with a tenth of the CPU time.
OWN = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # Ctrl-C is for the sweep
WORKER_MIB = 512  # of a job, beside what its task may hold
STARTS = 5  # of a cluster on this machine, before it is given up
BUSY = 3  # seconds after which a scheduler that answers nobody is not there


@dataclass(frozen=True)
class Wanted:
    """The requested cluster."""

    executor: str  # local, dask:ADDRESS, slurm
    workers: int  # to start; of a running scheduler, the tasks at a time that it has room for
    gpus: int  # workers that have one
    allowance: Allowance  # of one task
    directives: tuple[str, ...]  # KEY=VALUE of sbatch


def begin_imports(wanted: Wanted) -> None:
    """Starts the process from which the workers of this machine are forked. It imports their modules meanwhile."""
    if wanted.executor == "local":
        forkserver.set_forkserver_preload(["distributed", "kvreplay.sweep.sweep"])
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the sweep
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, heard)


@contextlib.contextmanager
def cluster(wanted: Wanted, logs: Path) -> Iterator[Client]:
    """A client of the cluster. The context ends a cluster that it has started. `logs`: folder for logs of jobs."""
    kind, _, address = wanted.executor.partition(":")
    begin_imports(wanted)
    import bokeh  # noqa: F401  the dashboard's
    import dask
    import distributed

    for name in [*logging.root.manager.loggerDict]:  # what they say of lost workers is said by tasks.csv
        if name.partition(".")[0] in ("asyncio", "bokeh", "distributed", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    open_cluster = {"local": local, "dask": running, "slurm": slurm}[kind]
    with dask.config.set(OWN), open_cluster(wanted, address, logs) as place:
        with distributed.Client(place, set_as_default=False) as client:
            yield client


def room_at(address: str) -> int:
    """Tasks that an existing scheduler runs at a time."""
    from distributed import Client
    from distributed.comm import get_address_host_port

    try:
        get_address_host_port(address, strict=True)  # a client of a malformed address also prints a traceback
        with Client(address, timeout=BUSY, set_as_default=False) as client:
            return sum(client.nthreads().values())
    except (OSError, ValueError) as problem:
        text = str(problem).split("\n")[0]
        raise Error("--executor", "no scheduler at this address", "dask:ADDRESS of a running scheduler, as dask:tcp://HOST:8786",
                    f"{address} ({text})", Refusal.CAPABILITY) from problem  # fmt: skip


@contextlib.contextmanager
def running(wanted: Wanted, address: str, logs: Path) -> Iterator[str]:
    """An existing scheduler; the sweep does not stop its workers."""
    yield address


@contextlib.contextmanager
def local(wanted: Wanted, _: str, logs: Path) -> Iterator[object]:
    """Processes on this machine; a nanny replaces each process that ends."""
    from distributed import Nanny, Scheduler, SpecCluster

    options = {"nthreads": 1, "memory_limit": 0, "silence_logs": logging.CRITICAL, "host": "127.0.0.1",
               "preload": [DEAF]}  # fmt: skip

    def worker(number: int) -> dict:
        gpu = {"resources": {"GPU": 1}, "env": {"CUDA_VISIBLE_DEVICES": str(number)}} if number < wanted.gpus else {}
        return {"cls": Nanny, "options": {**options, **gpu}}

    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}}
    workers = {number: worker(number) for number in range(wanted.workers)}

    def started() -> SpecCluster:
        """Starts the cluster, with retries: a worker that fails at its start, killed or out of memory, ends it."""
        for _ in range(STARTS):
            try:
                return SpecCluster(scheduler=scheduler, workers=workers, silence_logs=logging.CRITICAL)
            except RuntimeError as problem:
                reason = problem
        raise Error("--workers", "workers failed to start", f"{wanted.workers} processes", str(reason),
                    Refusal.RESOURCES)  # fmt: skip

    with started() as place:
        yield place


@contextlib.contextmanager
def slurm(wanted: Wanted, _: str, logs: Path) -> Iterator[object]:
    """Slurm jobs, each a worker; a job that ends before the sweep is replaced by another."""
    from dask_jobqueue import SLURMCluster

    if shutil.which("sbatch") is None:
        raise Error("--executor", "Slurm is not available", "sbatch on PATH", "", Refusal.CAPABILITY)
    logs.mkdir(parents=True, exist_ok=True)
    with SLURMCluster(
        cores=1,  # tasks at a time; the program of a task has threads of its own
        processes=1,
        memory=str(wanted.allowance.memory),
        job_extra_directives=directives(wanted),
        job_directives_skip=["-t ", "--cpus-per-task", "--mem"],  # directives() says what of these there is
        worker_extra_args=["--resources", "GPU=1"] if wanted.gpus else [],
        log_directory=str(logs),
        local_directory=os.environ.get("TMPDIR", "/tmp"),
        job_name="kvreplay-sweep",
        silence_logs=logging.CRITICAL,
    ) as place:
        place.adapt(minimum_jobs=wanted.workers, maximum_jobs=wanted.workers)
        yield place


def directives(wanted: Wanted) -> list[str]:
    """The sbatch directives of one job: threads and memory of a task, and the user's directives."""
    asked = [f"--cpus-per-task={wanted.allowance.threads or 1}"]
    if wanted.allowance.memory:
        asked.append(f"--mem={wanted.allowance.memory // 2**20 + WORKER_MIB}M")
    if wanted.gpus:
        asked.append("--gres=gpu:1")
    return asked + [f"--{directive}" for directive in wanted.directives]


def cores_here() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus_here() -> int:
    """GPUs of this machine that a worker may have."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return listed.count("\nGPU ") + listed.startswith("GPU ")


def memory_here() -> int:
    """Bytes that are free on this machine, or in this container."""
    return json.loads(call(["doctor", "--json"]))["memory"]["free_bytes"]
