"""Laws that every policy obeys, tried on small synthetic traces: what the tests of the built-in ones try in C++.

```python
kv.check(my_policy)   # silent, or an Error that names the law
```

P prompt tokens, B the budget: tokens that a row keeps on average.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvreplay.engine import replay
from kvreplay.errors import Error, Refusal
from kvreplay.results import Run, Selection

# Groups of query heads, one head for each, one KV head for all; ties; a layer that slides; fewer tokens than a window.
TRACES = {
    "grouped": "gaussian --layers 3 --query-heads 6 --kv-heads 2 --head-dim 8 --prompt 61 --continuation 7",
    "ungrouped": "sinks --layers 1 --query-heads 2 --kv-heads 2 --head-dim 16 --prompt 40 --continuation 3",
    "ties": "integer --layers 4 --query-heads 4 --kv-heads 1 --head-dim 4 --prompt 48 --continuation 4",
    "sliding": "repeat --layers 3 --sliding-window 0,9,0 --head-dim 8 --prompt 53 --continuation 6",
    "tiny": "gaussian --layers 2 --query-heads 2 --kv-heads 1 --head-dim 4 --prompt 3 --continuation 2",
}
FULL = 64  # tokens: more than any of these prompts
BUDGETS = (0.2, 7, FULL)
SETS = ("offsets", "positions", "granted", "sinks", "recent", "evicted_at")
SYNTH = "import json, sys; from kvreplay import _engine\nfor words in json.loads(sys.argv[1]): _engine.program(words)"


def check(policy: Any) -> None:
    """Replays a policy, given as for `kv.replay`, on small traces; raises Error for the first law that it violates.

    Every run checks itself as well: a cell fails if its recall exceeds its oracle bound or its metrics contradict each
    other.
    """
    first = _replayed(policy, threads=1)
    name = first.asked
    for cell in first.run.failed:
        raise _broken(name, "every trace is replayed", _place(cell), "", cell["error"])
    for cell in first.cells:
        selection = first.selections[cell["cell"], cell["trace"]]
        binding = (cell["trace"], cell["cell"]) not in first.run.own_memory
        if selection is not None:
            check_sets(name, _place(cell), selection, cell["budget_tokens"] if binding else None)
    _check_equal("again the same", first, _replayed(policy, threads=1))
    _check_equal("the same on two threads", first, _replayed(policy, threads=2))


def check_sets(policy: str, place: str, selection: Selection, budget: int | None) -> None:
    """Checks the laws of one cell's kept sets, `budget` tokens a row on average; None: it ignores the budget."""
    prompt = selection.boundary
    kept = np.diff(selection.offsets)
    for row, positions in enumerate(np.split(selection.positions, selection.offsets[1:-1])):
        where = f"{place}, row {row}"
        if len(positions) and not 0 <= positions.min() <= positions.max() < prompt:
            found = f"{positions.min()}..{positions.max()}"
            raise _broken(policy, "positions are those of the prompt", where, f"0..{prompt - 1}", found)
        if (np.diff(positions) <= 0).any():
            raise _broken(policy, "positions ascend", where, "each above the one before it", str(positions.tolist()))
    rows = selection.granted[selection.layers].size
    if budget is not None and kept.sum() > rows * budget:
        raise _broken(policy, "the budget is kept", place, f"at most {rows * budget} slots", str(kept.sum()))
    if budget is not None and budget >= prompt and kept.sum() != rows * prompt:
        raise _broken(policy, "a full budget keeps everything", place, f"{rows * prompt} slots", str(kept.sum()))


@dataclass(frozen=True)
class _Replay:
    """A run of the policy over all traces and budgets, and its sets by cell and trace."""

    run: Run
    asked: str
    cells: list[dict[str, Any]]
    selections: dict[tuple[str, str], Selection | None]


def _replayed(policy: Any, threads: int) -> _Replay:
    traces = [_folder() / f"{name}.h5" for name in TRACES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of failed cells: they are told otherwise
        run = replay(traces, policy, BUDGETS, threads=threads, detail="summary", progress=False)
    cells = run.cells[run.cells["role"] == "asked"].to_dict("records")
    sets = {
        (one["cell"], one["trace"]): run.selection_of(one["cell"], run.trace(one["trace"]).boundary) for one in cells
    }
    asked = next(one["policy"] for one in run.about["cells"] if one["role"] == "asked")
    return _Replay(run, asked, cells, sets)


def _check_equal(law: str, first: _Replay, other: _Replay) -> None:
    """Compares two replays bit by bit: sets, times of eviction, and every number."""
    for cell in first.cells:
        one, same = (of.selections.get((cell["cell"], cell["trace"])) for of in (first, other))
        differ = [name for name in SETS if not np.array_equal(getattr(one, name, None), getattr(same, name, None))]
        if differ:
            raise _broken(first.asked, law, _place(cell), "equal sets", f"others: {', '.join(differ)}")
    if not first.run.results.equals(other.run.results):
        raise _broken(first.asked, law, "results.csv", "equal numbers", "others")


def _place(cell: dict[str, Any]) -> str:
    return f"{cell['trace']} at {cell['budget']}"


def _broken(policy: str, law: str, place: str, expected: str, found: str) -> Error:
    return Error(f"{policy}: {place}", f'breaks the law "{law}"', expected, found, Refusal.NO)


@functools.cache
def _folder() -> Path:
    """The traces. A process creates them once and deletes them at its end."""
    folder = tempfile.mkdtemp(prefix="kvreplay-laws-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = [["synth", *shape.split(), "-o", f"{folder}/{name}.h5"] for name, shape in TRACES.items()]
    subprocess.run([sys.executable, "-c", SYNTH, json.dumps(words)], check=True, stdout=subprocess.DEVNULL)
    return Path(folder)
