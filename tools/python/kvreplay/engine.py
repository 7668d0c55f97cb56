"""The engine from Python: traces, replays and measurements in this process, with the options of the program.

P prompt tokens, T tokens in all, L layers, Hq query heads, Hkv KV heads, d components of a head.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import numbers
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.python_policies import FunctionPolicy, Policy, from_function, load, register, signature, with_values
from kvreplay.trace import AnyPath, Trace

if TYPE_CHECKING:
    import pandas as pd

    from kvreplay.python_policies import Definition
    from kvreplay.results import Run

try:
    from kvreplay import _engine
except ImportError as problem:
    need = "pip install ., or cmake --build --preset release, in the source folder of kvreplay"
    raise Error(
        "kvreplay", "the engine is not installed for this Python", need, str(problem), Refusal.CAPABILITY
    ) from None

_engine.read_policies_by(load)


Traces = AnyPath | Trace


def open(path: AnyPath) -> Trace:
    """Opens a trace. Raises Error with the object, the expected value and the found value if the trace is invalid."""
    return Trace(path)


def load_plugin(path: AnyPath) -> None:
    """Registers the policies and parts of a compiled plug-in, `mine.so`, until this process ends.

    They are then used by name, as built-in ones: `kv.replay(trace, "mine", 0.1)`, `kv.policy.mine(…)`,
    `ReplayCache(model, "mine", 0.1)`. Raises Error for a file that is not a plug-in of this version of kvreplay. A file
    that has changed since it was loaded needs a new process.
    """
    _engine.load_plugin(os.fsdecode(path))


class _Policies:
    """Registered policies as functions of their parameters: `kv.policy.snapkv(window=16)` returns the policy's text.

    `kv.policy` is also the decorator that registers a function `view -> scores` as a policy.
    """

    def __call__(self, function: Callable | None = None, **options: Any) -> Any:
        """Decorator `@kv.policy`, or `@kv.policy(heads="layer", …)` with attributes of `kv.Policy`."""
        if function is None:
            return lambda later: from_function(later, **options)
        return from_function(function, **options)

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name, *_ in _engine.policies()]

    def __iter__(self) -> Iterator[str]:
        return (name for name, *_ in _engine.policies())

    def __getattr__(self, name: str) -> Callable[..., str]:
        every = {known: rest for known, *rest in _engine.policies()}
        for known in (name, *(one for one in every if one.replace("-", "_") == name)):
            if known in every:
                return _constructor(known, *every[known])
        if (known := _engine.policy_name(name)) in every:  # a press of kvpress has other defaults than the policy
            return _constructor(name, *every[known])
        raise AttributeError(f"unknown policy {name}: {nearest(name, dir(self), 'kvreplay policies')}")


policy = _Policies()


def _constructor(
    name: str, summary: str, paper: str, score: str, parameters: Sequence[tuple[str, str, str, str]]
) -> Callable[..., str]:
    """The function of a registered policy, with a signature and a docstring from its declaration."""
    spelled = {one.replace(".", "_"): one for one, *_ in parameters}  # hybrid's chunkkv.chunk is no name in Python
    lines = [summary, "", paper, score, ""] if paper or score else [summary, ""]
    lines += [f"{one}={standard}  {span}  {help}" for one, standard, span, help in parameters]

    def make(**values: Any) -> str:
        return _engine.label(with_values(name, {spelled.get(one, one): value for one, value in values.items()}))

    make.__name__ = make.__qualname__ = name.replace("-", "_")
    make.__doc__ = "\n".join(lines)
    make.__signature__ = signature((one.replace(".", "_"), _value(standard)) for one, standard, _, _ in parameters)
    return make


def _value(text: str) -> bool | int | float | str:
    """A default as Python writes it."""
    if text in ("false", "true"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# Options of the program that have another form in Python.
PRINTED = ("dry_run", "help", "json", "policy", "budget", "progress")


def replay(
    traces: Traces | Iterable[Traces],
    policies: Any,
    budgets: float | str | Iterable[float | str] = (),
    *,
    metrics: str | Iterable[str] = (),
    output: AnyPath | None = None,
    progress: bool | Callable[[float, str], None] | None = None,
    **options: Any,
) -> Run:
    """Replays traces with policies at budgets and returns the results.

    `traces`: one or several paths or `Trace` objects. `policies`: texts as on the command line, results of
    `kv.policy.NAME(…)`, or policies in Python. `budgets`: a fraction of the prompt (0.1), a number of tokens (512), or
    a text as on the command line ("0.1@seen", "1MiB"); in place of budgets, `compression_ratio=0.9` is 0.1, as in
    kvpress. `metrics`: names (default: as `kvreplay replay`).

    `output`: the folder of results, in which finished cells are reused; None: results are kept in memory. `progress`:
    True or False shows or hides a bar; None shows it on terminals and in notebooks; a function is called with the
    finished share and the trace's name. `options`: long names of the program's options: device, threads, memory, seed,
    eval, boundary, structure, protect, controls, detail, save, observables, force, no_text …

    Raises Error for invalid arguments, as the program does. A failed cell is omitted, with a warning.
    """
    if output is not None:
        options["output"] = os.fsdecode(output)
    words, in_memory = _command_line(traces, policies, budgets, metrics, options)
    with contextlib.nullcontext(progress) if callable(progress) else _bar(progress) as heard:
        told = _engine.replay(words, in_memory, heard)
    for line in told["warnings"]:
        warnings.warn(line, stacklevel=2)
    for line in told["failed"]:
        warnings.warn(f"failed: {line}", stacklevel=2)
    from kvreplay.results import MemoryRun, Run

    return Run(Path(told["output"])) if told["output"] else MemoryRun(*told["in_memory"])


def plan(
    traces: Traces | Iterable[Traces],
    policies: Any,
    budgets: float | str | Iterable[float | str] = (),
    *,
    metrics: str | Iterable[str] = (),
    **options: Any,
) -> pd.DataFrame:
    """Returns the plan of a replay without running it, one row for each trace.

    Columns: cells to compute, finished cells in the folder `output`, seconds, and bytes of memory, of mapped pages and
    of results. The arguments are those of `kv.replay` without `progress`.
    """
    import pandas as pd

    words, in_memory = _command_line(traces, policies, budgets, metrics, options)
    rows = json.loads(_engine.plan([*words, "--dry-run"], in_memory))["traces"]
    columns = ["name", "cells", "skipped", "seconds", "memory_bytes", "mapped_bytes", "disk_bytes"]
    return pd.DataFrame([row | {"cells": len(row["cells"])} for row in rows], columns=columns)


def _command_line(
    traces: Any, policies: Any, budgets: Any, metrics: Any, options: dict[str, Any]
) -> tuple[list[str], list[Any]]:  # fmt: skip
    """The equivalent arguments of the program, and those traces that are in memory."""
    traces = _several(traces)
    words = [os.fsdecode(one.path if isinstance(one, Trace) else one) for one in traces]
    in_memory = [one._trace for one in traces if isinstance(one, Trace) and one.in_memory]
    for one in policy_texts(policies):
        words += ["--policy", one]
    for one in _several(budgets):
        words += ["--budget", str(one)]
    if metrics:
        words += ["--metrics", ",".join(_several(metrics))]
    for option, value in options.items():
        if option in PRINTED:
            raise Error("replay", "not an option in Python", "an option of kvreplay replay", option, Refusal.USAGE)
        if value is True:
            words.append("--" + option.replace("_", "-"))
        elif value is not False and value is not None:
            words += ["--" + option.replace("_", "-"), ",".join(map(str, _several(value)))]
    return words, in_memory


def measure(trace: Traces, selection: Any, **options: Any) -> Run:
    """Replays a policy that keeps exactly the given tokens, for example kept sets of another program.

    `selection`: for each layer a list of positions below P, or a list of positions for each KV head (or each query
    head). A bool mask [P], as from `Selection.mask()`, may replace a list of positions. A `Selection`, the result of
    `Run.selection`, is accepted as well. `options`: those of `kv.replay`.
    """
    from kvreplay.fixed_sets import fixed_set_policy

    opened = trace if isinstance(trace, Trace) else Trace(trace)
    made, budget = fixed_set_policy(opened, selection, options.get("sliding", "skip"))
    return replay(opened, made, budget, **options)


def _several(one: Any) -> list[Any]:
    single = AnyPath | Trace | numbers.Real | Policy | FunctionPolicy | type
    return [one] if isinstance(one, single) else list(one)


def policy_texts(policies: Any) -> list[str]:
    """The texts of one or several policies for the command line. Registers policies in Python, so that each name
    refers to the given policy."""
    definitions: dict[str, Definition] = {}
    policies = _several(policies)
    for one in policies:
        if isinstance(one, str):
            continue
        if not hasattr(one, "definition"):  # as policies in Python have, but for the class Policy itself
            raise Error("replay", "not a policy", "a string, or a policy in Python", type(one).__name__, Refusal.USAGE)
        known = definitions.setdefault(one.definition.name, one.definition)
        if known.source_hash != one.definition.source_hash:
            raise Error("replay", "two policies with the same name", "different names", known.name, Refusal.USAGE)
    for definition in definitions.values():
        register(definition)
    return [one.definition.name if isinstance(one, type) else str(one) for one in policies]


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


@contextlib.contextmanager
def _bar(wanted: bool | None) -> Iterator[Callable[[float, str], None]]:
    """tqdm's bar, in terminals and notebooks."""
    in_notebook = _in_notebook()
    if in_notebook and importlib.util.find_spec("ipywidgets"):
        from tqdm.auto import tqdm
    else:  # tqdm.auto would warn that widgets are missing
        from tqdm import tqdm

    shown = wanted if wanted is not None else in_notebook or sys.stderr.isatty()
    with tqdm(total=1.0, disable=not shown, bar_format="{desc}{percentage:3.0f} %|{bar}| {elapsed}<{remaining}") as bar:

        def heard(share: float, trace: str) -> None:
            bar.set_description_str(trace + " ", refresh=False)
            bar.update(share - bar.n)

        yield heard


def require_cell(policy: str, budget: str) -> None:
    """Rejects a text that is not one policy, and one that is not a budget."""
    texts = _engine.split_policies(policy)
    if len(texts) != 1:
        raise Error("-p", "policies", "one", ", ".join(texts) or "none", Refusal.USAGE)
    _engine.label(texts[0])
    _engine.budget(budget)


def decision_and_store(policy: str, layers: int) -> tuple[str, str]:
    """When a policy decides its sets, for a model of `layers` layers: after-prefill, during-prefill, future or never;
    and how it stores kept tokens: exact, cache-positions or changed."""
    return _engine.decision_and_store(policy, layers)


def program(words: Sequence[str]) -> int:
    """Runs the program `kvreplay` in this process; returns its exit code."""
    return _engine.program(list(words))
