"""Names of a run's policies, budgets, traces and metrics, as on command lines.

`check_names` rejects unknown names before the packages that read tables are imported.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.live_metrics import is_live
from kvreplay.nearest import nearest
from kvreplay.parameters import of_policy, parameters, split_list
from kvreplay.skill import SKILL, TWIN

if TYPE_CHECKING:
    import pandas as pd

BESIDE = ("boundary", "eval", "backend", "seed")  # parameters of a label where two cells differ in nothing else
LABELLED = ("trace", "policy", "params", "budget", *BESIDE)  # the columns of a cell that labels depend on
Cell = tuple[str, ...]  # values of LABELLED
SELECT_SECONDS = "select_seconds"  # the metric of seconds.csv that tables show
LISTS = {"policy": "kvreplay show RUN --all", "metric": "kvreplay metrics", "trace": "kvreplay show RUN --each"}


def pick(flag: str, what: str, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """`asked` in the order of `known`; a name that is not known is refused with the nearest."""
    for name in asked:
        if name not in known:
            raise Error(flag, f"unknown {what}", nearest(name, known, LISTS.get(what, "")), name, Refusal.USAGE)
    return [name for name in known if name in asked]


def pick_metrics(asked: Sequence[str], known: Sequence[str], flag: str = "--metric") -> list[str]:
    """`pick` of metrics NAME[:VARIANT], which titles of the table, such as recall, stand for as well."""
    return pick(flag, "metric", [name if name in known else metric_of_title(name) for name in asked], known)


def model_of_name(name: str) -> str:
    """The model that a name stands for: names that differ only in case are those of one model, as on the hub."""
    return name.casefold()


def metric_of_title(name: str) -> str:
    """The metric that a title of the table stands for; another text, and any text without the engine, as it is."""
    with contextlib.suppress(ImportError):  # figures work without the engine
        from kvreplay import _engine

        return _engine.metric_of_title(name)
    return name


def labels_of(cells: Iterable[Cell]) -> dict[Cell, str]:
    """The label of each cell's policy: its name, followed by the parameters in which cells of this name differ. Those
    of BESIDE count as parameters where two cells differ in nothing else. A cell without a policy, which is a trace, has
    no label."""
    cells = dict.fromkeys(cells)
    beside_of = defaultdict(set)
    for cell in cells:
        beside_of[cell[:4]].add(cell[4:])
    beside = [i for i in range(len(BESIDE)) if any(len({one[i] for one in same}) > 1 for same in beside_of.values())]

    def key_of(cell: Cell) -> Cell:
        return (cell[1], cell[2], *(cell[4 + i] for i in beside))

    values: dict[str, dict[Cell, dict[str, str]]] = defaultdict(dict)
    for policy, params, *others in map(key_of, cells):
        own = {BESIDE[i]: value for i, value in zip(beside, others, strict=True)} | parameters(params)
        values[policy][policy, params, *others] = own
    names = {}
    for policy, known in values.items():
        every = dict.fromkeys(name for one in known.values() for name in one)
        differ = [name for name in every if len({one.get(name) for one in known.values()}) > 1]
        for key, one in known.items():
            suffix = ",".join(f"{name}={one[name]}" for name in differ if name in one)
            names[key] = f"{policy}:{suffix}" if suffix else policy
    return {cell: names[key_of(cell)] for cell in cells}


def with_settings(label: str, policy: str, params: str) -> str:
    """The label with the parameters that differ from the defaults of its policy, as the table of replay shows them.
    Without the engine, or for a policy that the engine does not know, the label."""
    try:
        from kvreplay import _engine

        settings = parameters(_engine.label(f"{policy}:{params}").partition(":")[2]) if params else {}
    except (ImportError, Error):
        return label
    values = parameters(label.partition(":")[2]) | settings
    return f"{policy}:" + ",".join(f"{name}={value}" for name, value in values.items()) if values else label


def chosen_labels(flag: str, cells: pd.DataFrame, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """The labels that `asked` names, in its order: as labels of `known`, or as replay writes policies.

    A name takes all labels of that policy, in the order of `known`; name:key=value,… takes those with these values.
    """
    policies = cells[["label", "policy", "params"]].drop_duplicates()
    return _chosen(flag, list(policies.itertuples(index=False, name=None)), asked, known)


def _chosen(
    flag: str, policies: Sequence[tuple[str, str, str]], asked: Sequence[str], known: Sequence[str]
) -> list[str]:
    """`chosen_labels` of (label, policy, params)."""
    chosen: list[str] = []
    for one in asked:
        fits = of_policy([(policy, params) for _, policy, params in policies], one)
        labels = {label for (label, *_), fit in zip(policies, fits, strict=True) if fit}
        labels = labels or set(pick(flag, "policy", [one], known))
        chosen += [label for label in known if label in labels]
    return list(dict.fromkeys(chosen))


def metric_names(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Metric and variant by NAME[:VARIANT], of the rows of cells, sorted."""
    pairs = rows[rows["role"] != "trace"][["metric", "variant"]].drop_duplicates().itertuples(index=False, name=None)
    return dict(sorted((name + (f":{variant}" if variant else ""), (name, variant)) for name, variant in pairs))


def split_policies(values: Sequence[str]) -> list[str]:
    """Policies of comma lists: a piece with `=` before any `:` or `(` belongs to the policy before it."""
    names: list[str] = []
    for value in values:
        for i, piece in enumerate(split_list(value)):
            head = piece.split(":")[0].split("(")[0]
            if i and "=" in head:
                names[-1] += "," + piece
            else:
                names.append(piece)
    return names


def entries(run: Path, records: str, name: str) -> list[str]:
    """A field of each record in run.json, which describes the last replay into the folder: ("policies", "label") or
    ("inputs", "path"). An unreadable file has no records."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [str(one[name]) for one in json.loads((run / "run.json").read_bytes())[records]]
    return []


def require_baseline(baseline: str, runs: Sequence[Path]) -> None:
    """Rejects a comparison without `--baseline`, with the policies of the runs."""
    if baseline:
        return
    known = dict.fromkeys(label for folder in runs for label in entries(folder, "policies", "label"))
    expected = f"one of {', '.join(known)}" if known else "a policy of the run"
    raise Error("--baseline", "no policy to compare with", expected, "none", Refusal.USAGE)


def not_a_trace(folder: Path) -> Error:
    """The error of a folder in place of a trace, which names the traces of a run."""
    traces = entries(folder, "inputs", "path")
    expected = f"a trace of this run: {', '.join(traces)}" if traces else "TRACE.h5"
    return Error(str(folder), "not a trace", expected, "a folder", Refusal.USAGE)


def trace_path(text: str) -> Path:
    """The type of an operand TRACE: a file, or a folder that is not a run."""
    if (Path(text) / "run.json").exists():
        raise not_a_trace(Path(text))
    return Path(text)


def _listed(folder: Path) -> tuple[set[str], set[str], set[str], set[str]]:
    """Policies, budgets, traces and metrics of the last replay into the folder, from run.json."""
    about = json.loads((folder / "run.json").read_bytes())
    policies = {one[key] for one in about["policies"] for key in ("label", "name")}
    policies |= {one["policy"] for one in about["cells"]}
    options = about["options"]
    return policies, set(options["budgets"]), {one["trace"] for one in about["inputs"]}, set(options["metrics"])


def _read(folder: Path) -> tuple[dict[Cell, None], set[str]]:
    """The cells of results.csv with the hash of their trace, each once, and the metrics NAME[:VARIANT] over all layers
    and heads."""
    cells, metrics = {}, set()
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows)
        cell_of = itemgetter(*map(header.index, (*LABELLED, "trace_hash")))
        name_of = itemgetter(*map(header.index, ("layer", "head", "metric", "variant")))
        role = header.index("role")
        for row in rows:
            layer, head, metric, variant = name_of(row)
            if layer == head == "all" and row[role] != "trace":
                cells[cell_of(row)] = None
                metrics.add(f"{metric}:{variant}" if variant else metric)
    if any(policy == TWIN for _, policy, *_ in cells):
        metrics.add(SKILL["name"])
    return cells, metrics


def check_names(
    runs: Sequence[Path],
    *,
    policies: Sequence[str] = (),
    baseline: str = "",
    budgets: Sequence[str] = (),
    traces: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> None:
    """Rejects names of -p, --baseline, -b, --trace and --metric that no cell of the runs has, in the words of
    `chosen_labels`, `pick` and `pick_metrics`. Reads results.csv only for a name that run.json, which describes the
    last replay into the folder, does not list. Files that cannot be read are left to the commands."""
    every = [*policies, *filter(None, [baseline])], budgets, traces, [metric_of_title(name) for name in metrics]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = [_listed(folder) for folder in runs]
        if all(
            set(asked) <= set().union(*known) for asked, known in zip(every, zip(*listed, strict=True), strict=True)
        ):
            return
    try:
        found = [_read(folder) for folder in runs]
    except (OSError, ValueError, StopIteration, IndexError, csv.Error):
        return
    cells = dict.fromkeys(cell for cells, _ in found for cell in cells)
    if not cells:
        return
    # `compare` labels cells by the hash of their trace, which has two names in two runs.
    labels = labels_of(cell[:-1] for cell in cells) | labels_of((cell[-1], *cell[1:-1]) for cell in cells)
    of_cells = sorted({(label, cell[1], cell[2]) for cell, label in labels.items()})
    known = sorted({name for label, policy, _ in of_cells for name in (label, policy)})
    _chosen("-p", of_cells, policies, known)
    _chosen("--baseline", of_cells, [baseline] if baseline else [], known)
    pick("-b", "budget", budgets, sorted({cell[3] for cell in cells}))
    pick("--trace", "trace", traces, sorted({cell[0] for cell in cells}))
    known = set().union(*(metrics for _, metrics in found))
    # The command chooses a variant of NAME, and reads live.csv.
    later = {name.partition(":")[0] for name in known}
    asked = [name for name in every[3] if name not in later]
    if any((folder / "live.csv").exists() for folder in runs):
        asked = [name for name in asked if not is_live(name)]
    pick_metrics(asked, sorted(known))
