"""A capture whose prompts are tasks of a cluster: each loads the model and writes one trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.sweep.options import wanted
from kvreplay.sweep.progress import Line
from kvreplay.sweep.schedule import Task
from kvreplay.sweep.sweep import alone, run_tasks, told
from kvreplay.sweep.work import Capture

PROGRAM = (sys.executable, "-m", "kvreplay.capture.command")


def capture_prompts(arguments: argparse.Namespace, words: Sequence[str], names: Sequence[str]) -> int:
    """Captures the prompts `names` into the folder `arguments.output`; returns the exit code. `words`: the command line
    of one such capture, without the prompt's name and the folder."""
    output = Path(arguments.output).absolute()
    done = [name for name in names if (output / f"{name}.h5").exists()]
    if done and not (arguments.resume or arguments.force):
        where = str(output / f"{done[0]}.h5")
        raise Error(where, "exists", "--resume, --force, or another folder", "", Refusal.USAGE)
    left = [name for name in names if arguments.force or name not in done]
    output.mkdir(parents=True, exist_ok=True)
    place = wanted(arguments)
    command = (*PROGRAM, *words, "--threads", str(place.allowance.threads or 1))
    directory = str(Path.cwd())
    tasks = [Task(name, 1, output, Capture(command, directory, name, str(output))) for name in left]
    with alone(output):
        line = Line(arguments.progress, "prompts")
        schedule = run_tasks(tasks, place, arguments.retries, output / "tasks.csv", done, line)
    return told(schedule, "prompts", str(arguments.output), len(names) - len(left))
