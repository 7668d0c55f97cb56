"""`kvreplay replay … --watch`: repeats the command line whenever the file of one of its policies is saved.

Each replay is a separate process, forked from a parent that has imported all large packages. So each replay reads the
edited file, and a policy that crashes ends one replay only. The parent draws the figures, since it has the fonts and
the imports. Cells of unchanged policies are reused from the folder of results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvreplay import engine
from kvreplay.errors import Error, Refusal
from kvreplay.results import Run

POLL = 0.05  # seconds between looks at the files
LEAST_CHANGE = 0.0005  # shown with three digits
Numbers = dict[tuple[str, str], dict[str, float]]
DRAWN_AFTER = (0, 6)  # exit codes that leave a run: all done, or some cells failed


def watch(program: str, words: Sequence[str]) -> int:
    """Replays until Ctrl-C; returns the exit code. `program` is the path of the program, `words` its command line with
    --output and long names of options, each value as a separate word, without --watch."""
    rest, figures = _without_figures(words)
    files = policy_files(rest)
    if not files:
        expected = "-p FILE.py:NAME, -p @FILE or --plugin FILE"
        raise Error("--watch", "no policy in a file", expected, "", Refusal.USAGE)
    if "--observables" not in rest:
        rest += ["--observables", "keep"]
        say = "writes TRACE.obs.h5 beside each trace, so that each replay is quicker; --observables use: does not"
        print(f"kvreplay: --watch {say}", file=sys.stderr, flush=True)
    output = rest[rest.index("--output") + 1]
    before: Numbers = {}
    try:
        while True:
            seen = _stamps(files)
            start = time.monotonic()
            code = _forked(rest, program if "--plugin" in rest else "")
            if code in DRAWN_AFTER:
                now = _numbers(output)
                if "--quiet" not in rest:
                    print(changes(before, now), end="", flush=True)
                before |= now
                _draw(output, figures)
            took = f"{time.monotonic() - start:.2f} s"
            print(f"kvreplay: {took}; watching {', '.join(files)}", file=sys.stderr, flush=True)
            if code == Refusal.INTERRUPTED:
                return code
            while _stamps(files) == seen:
                time.sleep(POLL)
            while (now := _stamps(files)) != seen:  # an editor may write in several steps
                seen = now
                time.sleep(POLL)
    except KeyboardInterrupt:
        return int(Refusal.INTERRUPTED)


def policy_files(words: Sequence[str]) -> list[str]:
    """The files of policies that a command line names, also by a file of policies."""
    found: dict[str, None] = {}
    for previous, word in zip(["", *words], words, strict=False):
        if previous == "--plugin":
            found[word] = None
        for name in re.findall(r"@([^,\s]+)", word):
            if Path(name).is_file():
                found[name] = None
                word += "," + ",".join(Path(name).read_text(encoding="utf-8").split())
        found |= dict.fromkeys(re.findall(r"([^\s,=(]+\.py):", word))
    return list(found)


def _without_figures(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The command line of one replay, and the figures (kind, file) that --figure asks for."""
    rest, figures = [], []
    given = iter(words)
    for word in given:
        if word == "--figure":
            kind, _, file = next(given).partition("=")
            figures.append((kind, file))
        else:
            rest.append(word)
    return rest, figures


def _stamps(files: Sequence[str]) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for file in files:
        try:
            about = os.stat(file)
            found.append((about.st_mtime_ns, about.st_size))
        except OSError:  # between an editor's steps, or gone
            found.append(None)
    return found


def _forked(words: Sequence[str], program: str) -> int:
    """Replays in a fork of this process, or, if `program` is not empty, by this program; returns the exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = int(Refusal.INTERNAL)
        try:
            code = subprocess.run([program, *words]).returncode if program else engine.program(words)
        finally:
            sys.stdout.flush()
            os._exit(code)
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except KeyboardInterrupt:  # the child has heard it, too, and ends in its own way
            continue


def _numbers(output: str) -> Numbers:
    """By policy and budget of the last replay, means over traces: metrics with a better direction, pooled or as
    means."""
    try:
        run = Run(Path(output))
        asked = {cell["cell"] for cell in run.about["cells"] if cell["role"] == "asked" and cell["state"] != "failed"}
        names = run.overall["metric"] + run.overall["variant"].map(lambda one: f":{one}" if one else "")
        means = [name for name in names.unique() if name.partition(":")[2] in ("", "pooled") or name.endswith("mean")]
        directed = [name for name in means if run.better_of(name) in ("higher", "lower")]
        rows = run.overall.assign(name=names)[run.overall["cell"].isin(asked) & names.isin(directed)]
    except Error:  # the replay has said it
        return {}
    return {
        (str(policy), str(budget)): {name: float(of_name["value"].mean()) for name, of_name in of_cell.groupby("name")}
        for (policy, budget), of_cell in rows.groupby(["label", "budget"], sort=False)
    }


def changes(before: Numbers, now: Numbers) -> str:
    """New minus old numbers of policies that have changed, one line for each policy and budget."""
    lines = []
    for (policy, budget), numbers in now.items():
        old = before.get((policy, budget), {})
        moved = {name: numbers[name] - old[name] for name in numbers if name in old}
        shown = [f"{name} {change:+.3f}" for name, change in moved.items() if abs(change) >= LEAST_CHANGE]
        if shown:
            lines.append(f"change   {policy} at {budget}: {', '.join(shown)}\n")
    return "".join(lines)


def _draw(output: str, figures: Sequence[tuple[str, str]]) -> None:
    if not figures:
        return
    from kvreplay.plot.command import main as plot

    for kind, file in figures:
        plot([kind, output, "-o", file])
