"""Reads a finished run folder: `results.csv`, `cells/TRACE.h5` and `run.json`.

L stored layers, H sets a layer (1, KV heads or query heads), P prompt tokens. All commands that show a run read it with
this module, so that a policy has the same label everywhere.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from kvreplay import notebook_views
from kvreplay.errors import Error, Refusal
from kvreplay.export import write_table
from kvreplay.hdf5_file import open_to_read
from kvreplay.live_metrics import METRICS as LIVE_METRICS
from kvreplay.nearest import nearest
from kvreplay.parameters import of_policy
from kvreplay.run_folder import require_run
from kvreplay.run_names import LABELLED, SELECT_SECONDS, labels_of
from kvreplay.skill import SKILL, Policy, is_recall, skill_rows, twins_of
from kvreplay.trace import Span, Trace

MOST_OPEN = 8  # files of cells/ at a time
COLUMNS = (
    "trace trace_hash model role policy params heads agg budget budget_tokens kept_tokens boundary eval n_queries "
    "layer head metric variant value unit open_loop synthetic backend seed cell"
).split()
OF_SAMPLES = ["sample", "half_width"]  # further columns where a trace is sampled
NUMBERS = ["budget_tokens", "kept_tokens", "value", "half_width"]
OF_ROWS = "layer head metric variant value unit".split()  # the other columns are those of a cell, or of a trace
MEASURED = ("decisions", "device", "dtype", "model_hash")  # further columns of live.csv: part of a row's key
DECIDED_LIVE = "during-prefill"  # of "decisions": by the live model, which read no token that was evicted before
TEXT = "text"  # and the last one: what the model wrote, as JSON
PIECE = 50_000  # rows of results.csv read at a time: only some of them are kept
CELL = (
    "cell trace model role policy params heads budget budget_tokens kept_tokens boundary eval backend seed synthetic"
).split()


class TableText(str):
    """A table as text, which sessions and notebooks show as it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Selection:
    """The kept tokens of one cell, rows [L,H] as stored; `layers` are the stored layers that were treated. H is the
    number of rows of the layer that has most; where layers differ, arrays of rows are masked arrays.

    With a schedule they are the resident tokens after the last eviction of the prompt.
    """

    layers: np.ndarray  # int [n], ascending
    numbers: np.ndarray  # int [n], the model's own numbers of these layers: what figures and tables show
    offsets: np.ndarray  # int [L*H+1]
    positions: np.ndarray  # int [offsets[-1]]
    granted: np.ndarray  # int [L,H], tokens
    sinks: np.ndarray  # int [L,H], first tokens that are protected
    recent: np.ndarray  # int [L,H], last tokens that are protected
    jaccard: dict[str, np.ndarray]  # first, mean, union: float [n,n]
    boundary: int  # P where the whole prompt is compressed
    # int [L,H,T] of schedules: position of the query after which a token was evicted; -1: never, or a one-shot layer
    evicted_at: np.ndarray | None = None
    rows: np.ndarray | None = None  # int [n], rows of the treated layers where they differ; None: H each

    @property
    def kept(self) -> np.ndarray:
        """Kept tokens [n,H] of the treated layers."""
        return self._of_own_rows(np.diff(self.offsets).reshape(self.granted.shape)[self.layers])

    def mask(self) -> np.ndarray:
        """Whether a token is kept: bool [n,H,boundary]."""
        rows = np.zeros((self.granted.size, self.boundary), dtype=bool)
        rows[np.repeat(np.arange(self.granted.size), np.diff(self.offsets)), self.positions] = True
        return self._of_own_rows(rows.reshape(*self.granted.shape, self.boundary)[self.layers])

    def _of_own_rows(self, rows: np.ndarray) -> np.ndarray:
        """The array [n,H,...], without the rows that a layer does not have."""
        if self.rows is None:
            return rows
        missing = np.arange(rows.shape[1]) >= self.rows[:, None]
        missing = missing.reshape(*missing.shape, *[1] * (rows.ndim - 2))
        return np.ma.array(rows, mask=np.broadcast_to(missing, rows.shape))

    def __repr__(self) -> str:
        kept = self.kept.mean() if self.layers.size else 0
        return (
            f"<kvreplay selection of {self.layers.size} layers: {kept:.1f} of {self.boundary} tokens kept on average>"
        )

    def _repr_html_(self) -> str:
        return notebook_views.selection_html(self)

    def unprotected(self) -> np.ndarray:
        """Whether a token is neither a protected sink nor a protected recent token: bool [n,H,boundary]."""
        position = np.arange(self.boundary)
        first = self.sinks[self.layers][..., None]
        last = self.boundary - self.recent[self.layers][..., None]
        return (position >= first) & (position < last)


@dataclass(frozen=True)
class StoredLayer:
    """Keys and values of a layer to which queries after the prompt attend: Hkv KV heads, T tokens, d components, and H
    rows, one for each set of the policy. Evicted tokens, and those after the prompt, are as captured."""

    keys: np.ndarray  # float32 [Hkv,T,d]; [Hq,T,d] where kept keys move and each query head has a separate set
    values: np.ndarray  # float32 [Hkv,T,d]
    positions: list[np.ndarray]  # H of int32 [n]: kept positions in the order of their slots 0 ... n-1
    stands_at: list[np.ndarray]  # H of int32 [n]: where their keys stand by RoPE; P-n ... P-1 where they move to slots
    bytes: float  # that the kept tokens take, all heads


class Stored:
    """Keys and values from the store of one cell, computed layer by layer on the CPU."""

    def __init__(self, folder: Path, name: str, cell: str, trace: Trace) -> None:
        from kvreplay import _engine

        self._cell = _engine.StoredCell(folder, name, cell, trace._trace)

    def layer(self, layer: int) -> StoredLayer:
        """Keys and values of a stored layer, which must be treated."""
        return StoredLayer(*self._cell.layer(layer))


@dataclass(frozen=True)
class TraceFacts:
    """Facts about a trace that a run contains."""

    name: str
    model: str
    prompt: int  # P
    boundary: int  # tokens under compression
    tokens: int  # T
    layers: int  # L
    layer_numbers: np.ndarray  # int [L], the model's own numbers
    treated: np.ndarray  # int, the stored layers that were treated, ascending
    query_heads: int  # the largest number of a treated layer
    kv_heads: int
    heads: np.ndarray  # int [L,2], query and KV heads of each stored layer
    reading_layers: int  # layers that read the keys and values of another
    hash: str  # of the trace; empty: not known
    dtype: str  # empty: the run does not say
    sample: str  # "256 of 2048 eval queries" that metrics are estimated from; empty: all was measured
    synthetic: bool
    spans: list[Span]
    redundancy: dict[str, np.ndarray]  # key, value: float [L,boundary], NaN where not treated


class Run:
    """The results of a replay, read from its folder. Files are checked when they are first read; an Error names the
    invalid file and object."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, h5py.File] = {}  # by trace, the oldest first
        require_run(self.folder)

    def __repr__(self) -> str:
        names = self.stored_traces
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"<kvreplay run of {', '.join(names[:3])}{more}>"

    def _repr_html_(self) -> str:
        return notebook_views.run_html(self)

    @property
    def figures(self) -> Path:
        """The default folder of its figures."""
        return self.folder / "figures"

    @cached_property
    def about(self) -> dict:
        """run.json."""
        path = self.folder / "run.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise Error(str(path), "unreadable", "JSON", str(problem)) from problem
        schema = about.get("schema") if isinstance(about, dict) else None
        if schema != "kvreplay-run/1":
            raise Error(str(path), "schema", "kvreplay-run/1", str(schema))
        check_about(path, about)
        return about

    @cached_property
    def results(self) -> pd.DataFrame:
        """All numbers: the rows of results.csv over all heads (`head` = all), with the column `label`.

        Numbers are floats, NaN where undefined; other columns are texts as in the file. Rows of single heads, often
        most of the file, are omitted. A run with a sampled trace has the columns `sample` and `half_width`: half the
        width of the 95 % interval of an estimate over all layers and heads, NaN for other values."""
        table = self._read(every_row)
        return table.assign(label=labels(table))

    @cached_property
    def overall(self) -> pd.DataFrame:
        """The rows of `results` over all layers (`layer` = all).

        Uses `results` if it was read before; else the other rows are not kept in memory, which matters in a run of
        many traces."""
        if "results" in vars(self):
            return self.results[self.results["layer"] == "all"].reset_index(drop=True)
        rows = self._read(lambda rows: rows["layer"] == "all")
        return rows.assign(label=labels(rows))

    @cached_property
    def live(self) -> pd.DataFrame:
        """The rows of live.csv, as `kvreplay live` wrote it, with numbers as floats and columns for the way of
        measuring; no rows without this file. `results` contains these rows as well."""
        path = self._file("live.csv")
        if path is None:
            return pd.DataFrame(columns=[*COLUMNS, *MEASURED])
        columns = [*COLUMNS, *MEASURED]
        return chosen(path, rows_of(path), columns, every_row)[columns]

    def written(self, trace: str) -> dict[str, str]:
        """By cell, the text that the live model generated for this trace (`kvreplay live --generate`)."""
        path = self._file(f"live/{trace}.csv")
        if path is None:
            return {}
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows = rows[rows[TEXT] != ""]
        return dict(zip(rows["cell"], map(json.loads, rows[TEXT]), strict=True))

    def rows(self, wanted: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
        """The rows of cells in `results` for which `wanted` is true; `wanted` receives columns of texts. Other rows are
        not kept in memory."""
        found = self._read(lambda rows: (rows["role"] != "trace") & wanted(rows), self.cells)
        # As all cells have them: of some rows alone, fewer parameters may differ.
        named = self.cells[["trace", "cell", "label"]]
        return found.merge(named, on=["trace", "cell"], validate="many_to_one")

    def _read(
        self, wanted: Callable[[pd.DataFrame], pd.Series], cells: pd.DataFrame | None = None
    ) -> pd.DataFrame:  # fmt: skip
        """The wanted rows, followed by the wanted rows of skill. `cells` must contain all policies of the run (default:
        the cells that were read)."""
        table = chosen(*self._result_rows(), COLUMNS, wanted)
        if live := self._file("live.csv"):
            measured = chosen(live, rows_of(live), [*COLUMNS, *MEASURED, TEXT], wanted)
            table = pd.concat([table, told_apart(measured)])
        failed = [(cell.get("trace"), cell.get("cell")) for cell in self.failed]
        if failed:
            table = table[~pd.MultiIndex.from_frame(table[["trace", "cell"]]).isin(failed)]
        recalls = table[table["for_skill"]].drop(columns=["wanted", "for_skill"])
        skill = skill_rows(recalls, twins_of(recalls if cells is None else cells, self._labels))
        if "half_width" in skill:
            skill["half_width"] = np.nan
        return pd.concat([table.loc[table["wanted"], recalls.columns], skill], ignore_index=True)

    def _file(self, name: str) -> Path | None:
        """An optional file of the folder; None: it does not exist."""
        path = self.folder / name
        return path if path.is_file() else None

    def _result_rows(self) -> tuple[Path, Iterator[pd.DataFrame]]:
        """The rows of results.csv in pieces, and their place for messages."""
        path = self.folder / "results.csv"
        return path, rows_of(path)

    @property
    def _labels(self) -> dict[Policy, str]:
        """The labels of the policies on the last call's command line."""
        listed = [one for one in self.about.get("policies", []) if isinstance(one.get("parameters"), dict)]
        params = [",".join(f"{name}={value}" for name, value in one["parameters"].items()) for one in listed]
        return {(one.get("name"), values): str(one.get("label")) for one, values in zip(listed, params, strict=True)}

    @property
    def better(self) -> dict[str, str]:
        """By metric and by METRIC:VARIANT, which values are better: higher, lower or neither."""
        return {one["name"]: one["better"] for one in self._declared}

    def better_of(self, name: str) -> str | None:
        """The entry of `better` for NAME[:VARIANT]; a variant without an entry, such as a span's, has its metric's."""
        return self.better.get(name, self.better.get(name.partition(":")[0]))

    @property
    def units(self) -> dict[str, str]:
        """The unit by metric and by METRIC:VARIANT, if the run records it."""
        return {one["name"]: one["unit"] for one in self._declared if "unit" in one}

    def unit_of(self, name: str) -> str | None:
        """The entry of `units` for NAME[:VARIANT]; a variant without an entry has its metric's."""
        return self.units.get(name, self.units.get(name.partition(":")[0]))

    @property
    def _declared(self) -> list[dict]:
        """The entries of run.json for variants and metrics; a variant without a name has the name of its metric."""
        metrics = self.about.get("metrics", [])
        live = [{"name": one.name, "unit": one.unit, "better": one.better} for one in LIVE_METRICS]
        return [*(variant for metric in metrics for variant in metric.get("variants", [])), *metrics, SKILL, *live]

    @property
    def prompt_hashes(self) -> dict[str, str]:
        """The hash of the prompt's token ids, by the hash of the trace."""
        inputs = self.about.get("inputs", [])
        return {one["trace_hash"]: one["prompt_hash"] for one in inputs if {"trace_hash", "prompt_hash"} <= set(one)}

    @property
    def failed(self) -> list[dict[str, str]]:
        """The failed cells of run.json. Their numbers are not read."""
        return [cell for cell in self.about.get("cells", []) if cell.get("state") == "failed"]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row a cell: trace, policy with its parameters and `label`, budget; in the order of results.csv."""
        rows = self.overall[self.overall["role"] != "trace"]
        return rows[[*CELL, "label"]].drop_duplicates(["trace", "cell"]).reset_index(drop=True)

    @property
    def replayed_last(self) -> list[dict]:
        """The inputs of the last call, which run.json describes; other traces are from earlier calls."""
        return self.about.get("inputs", [])

    def _fact(self, name: str, missing: Callable[[Any], bool], unsaid: bool | None = None) -> set[tuple[str, str]]:
        """(trace, cell) of the cells with a fact: of the last call as run.json says, of earlier calls as the files of
        cells say; for a row of `cells` that neither describes, `missing` says. `unsaid`: the fact of an entry of
        run.json that lacks it; None: the files say."""
        listed = {(one.get("trace"), one.get("cell")): one.get(name, unsaid) for one in self.about.get("cells", [])}
        found = set()
        for row in self.cells.itertuples():
            has = listed.get((row.trace, row.cell))
            if has is None:
                with contextlib.suppress(Error, KeyError):
                    has = self.cells_file(row.trace)[f"/cells/{row.cell}"].attrs[name]
            if missing(row) if has is None else has:
                found.add((row.trace, row.cell))
        return found

    @cached_property
    def own_memory(self) -> set[tuple[str, str]]:
        """(trace, cell) of the cells that ignore the budget. Without run.json and files of cells, of those that keep
        more tokens than their budget."""
        return self._fact("own_memory", lambda row: row.kept_tokens > row.budget_tokens + 1e-9)

    @cached_property
    def protected_fill_budget(self) -> set[tuple[str, str]]:
        """(trace, cell) of the cells whose policies select no token, as protected tokens fill the budget."""
        return self._fact("protected_fill_budget", lambda row: False, unsaid=False)

    @cached_property
    def fails_twin(self) -> set[tuple[str, str]]:
        """(trace, cell) of the cells whose recall is at most that of their random twin: their skill is 0 or less."""
        rows = self.overall[(self.overall["metric"] == SKILL["name"]) & (self.overall["value"] <= 0)]
        return set(zip(rows["trace"], rows["cell"], strict=True))

    @cached_property
    def select_seconds(self) -> dict[tuple[str, str], float]:
        """Seconds of selection, summed over the layers of a cell, by (trace, cell); empty without seconds.csv."""
        path = self._file("seconds.csv")
        if path is None:
            return {}
        try:
            times = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
            chosen = times[(times["metric"] == SELECT_SECONDS) & (times["variant"] == "")]
            values = pd.to_numeric(chosen["value"]).groupby([chosen["trace"], chosen["cell"]]).sum()
        except (OSError, ValueError, KeyError) as problem:
            raise Error(str(path), "unreadable", "trace, cell, metric, variant, value", str(problem)) from problem
        return {(str(trace), str(cell)): float(value) for (trace, cell), value in values.items()}

    def cells_path(self, trace: str) -> Path:
        """The file that contains the trace's facts and its cells."""
        return self.folder / "cells" / f"{trace}.h5"

    @property
    def stored_traces(self) -> list[str]:
        """The traces for which the run contains cells, attention or spans."""
        return sorted(path.stem for path in (self.folder / "cells").glob("*.h5"))

    def cells_file(self, trace: str) -> h5py.File:
        """The file of `cells_path`, open for reading: /traces/TRACE and /cells/ID. The last MOST_OPEN remain open."""
        if trace not in self._open:
            file = self._open_cells(trace)
            if len(self._open) == MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[trace] = file
        return self._open[trace]

    def _open_cells(self, trace: str) -> h5py.File:
        path = self.cells_path(trace)
        if not path.is_file():
            raise Error(str(path), "missing", "a file of cells", "nothing")
        try:
            file = open_to_read(path)
        except OSError as problem:
            raise Error(str(path), "unreadable", "an HDF5 file", str(problem)) from problem
        found = (text(file.attrs.get("format", "none")), int(file.attrs.get("version", 0)))
        if found != ("kvcells", 1):
            raise Error(str(path), "format", "kvcells version 1", "{} version {}".format(*found))
        return file

    @cached_property
    def _trace_of(self) -> dict[str, str]:
        """The trace of each cell. Traces that share cells differ in their names only."""
        return dict(zip(self.cells["cell"], self.cells["trace"], strict=True))

    def table(
        self,
        policies: str | Iterable[str] = (),
        budgets: float | str | Iterable[float | str] = (),
        traces: str | Iterable[str] = (),
        columns: str | Iterable[str] = (),
        *,
        wide: bool = False,
        all: bool = False,
        each: bool = False,
        format: str = "text",
    ) -> TableText:
        """Returns the table that `kvreplay show` prints. Arguments are its options; `format`: text, markdown, latex or
        csv. One trace, or means over the traces with 95 % intervals."""
        from kvreplay import _engine

        formats = ("text", "markdown", "latex", "csv")
        if format not in formats:
            raise Error("format", "unknown format", ", ".join(formats), format, Refusal.USAGE)
        words = [str(self.folder)]
        for option, values in (("policies", policies), ("budgets", budgets), ("traces", traces), ("columns", columns)):
            for value in [values] if isinstance(values, str | numbers.Real) else values:
                words += [f"--{option}", str(value)]
        flags = {"wide": wide, "all": all, "each": each, format: format != "text"}
        words += [f"--{flag}" for flag, given in flags.items() if given]
        return TableText(_engine.table(words, isinstance(self, MemoryRun)))

    def write_parquet(self, path: str | Path) -> None:
        """Writes every row of results.csv as Parquet, with typed columns; undefined numbers are null. Requires pyarrow,
        and the memory of some thousand rows, whatever their number."""
        write_table(self.folder / "results.csv", Path(path))

    def selection(self, policy: str, budget: float | str, trace: str = "") -> Selection | None:
        """Returns the kept tokens of a policy at a budget; None if the policy has no kept set.

        `policy`: its name, with the parameters that distinguish it from others of this name. `budget`: as on the
        command line, or in tokens. `trace`: its name; optional if the run has a single trace.
        """
        found = self._cell(str(policy), str(budget), trace)
        return self.selection_of(found["cell"], self.trace(found["trace"]).boundary)

    def _cell(self, policy: str, budget: str, trace: str) -> pd.Series:
        """The cell that matches the arguments; raises Error with similar cells if there is none, or several."""
        rows = self.cells[self.cells["trace"] == trace] if trace else self.cells
        meant = np.array(of_policy(zip(rows["policy"], rows["params"], strict=True), policy), dtype=bool)
        of_budget = (rows["budget"] == budget) | (rows["budget_tokens"].map("{:.0f}".format) == budget)
        of_label = rows["label"] == policy  # what tables and figures call it: of cells that all fit, the one meant
        found = rows[of_label & of_budget] if (of_label & of_budget).any() else rows[meant & of_budget]
        if len(found) == 1:
            return found.iloc[0]
        name = policy.partition(":")[0]
        of_name = rows["policy"] == name
        if len(rows) and not len(found) and not of_name.any():
            raise Error("policy", "not in this run", nearest(name, rows["policy"]), policy, Refusal.USAGE)
        near = found if len(found) else rows[of_name]
        known = (near["trace"] + ": " + near["label"] + " at " + near["budget"]).head(8)
        what = "several cells are meant" if len(found) else "no such cell"
        asked = f"{policy} at {budget}" + (f" of {trace}" if trace else "")
        raise Error(str(self.folder), what, "; ".join(known), asked, Refusal.USAGE)

    def selection_of(self, cell: str, boundary: int) -> Selection | None:
        """The kept tokens of a cell that compresses `boundary` tokens; None if the policy has no kept set.

        A policy that keeps every token in changed form stores no rows, but `sets` = all: each row has all tokens.
        """
        group = self._cell_group(cell)
        if "offsets" not in group:
            return None
        granted = array(group, "budget")
        offsets, positions = array(group, "offsets"), array(group, "positions")
        where = place(group)
        if "layers" not in group.attrs:
            raise Error(where, "attribute layers", "the treated layers", "none")
        layers = np.asarray(group.attrs["layers"], dtype=int).ravel()
        if granted.ndim != 2 or offsets.shape != (granted.size + 1,) or (np.diff(offsets) < 0).any():
            raise Error(where, "offsets", f"{granted.size + 1} ascending", str(list(offsets.shape)))
        if len(positions) != offsets[-1]:
            raise Error(where, "positions", f"{offsets[-1]} positions", str(len(positions)))
        if ((positions < 0) | (positions >= boundary)).any():
            raise Error(where, "positions", f"0 to {boundary - 1}", f"{positions.min()} to {positions.max()}")
        evicted_at = group["evicted_at"][()] if "evicted_at" in group else None
        if evicted_at is not None and evicted_at.shape[:-1] != granted.shape:
            raise Error(where, "evicted_at", f"{list(granted.shape)} rows of tokens", str(list(evicted_at.shape)))
        if text(group.attrs.get("sets", "fixed")) == "all":
            rows = np.zeros(granted.shape, dtype=int)
            rows[layers] = boundary
            offsets = np.concatenate([[0], np.cumsum(rows)])
            positions = np.tile(np.arange(boundary), offsets[-1] // boundary)
        trace = self._trace_group(text(group.attrs["trace"]))
        own = heads_of_layers(trace, len(granted))[layers][:, int(text(group.attrs.get("heads", "")) == "kv")]
        return Selection(
            layers=layers,
            numbers=layer_numbers(trace, len(granted))[layers],
            rows=own if granted.shape[1] > 1 and (own < granted.shape[1]).any() else None,
            offsets=offsets,
            positions=positions,
            granted=granted,
            sinks=array(group, "sinks"),
            recent=array(group, "recent"),
            jaccard={variant: array(group, "jaccard_" + variant) for variant in ("first", "mean", "union")},
            boundary=boundary,
            evicted_at=evicted_at,
        )

    def stored(self, policy: str, budget: float | str, trace: str | Trace = "") -> Stored:
        """Returns the keys and values from the store of a policy at a budget, layer by layer.

        `policy` and `budget`: as for `selection`. `trace`: its name, or the open `Trace`, which is required if the
        trace is in memory or its file was moved; optional if the run has a single trace.
        """
        cell = self._cell(str(policy), str(budget), trace.name if isinstance(trace, Trace) else trace)
        name = str(cell["trace"])
        opened = trace if isinstance(trace, Trace) else Trace(self.captured(name))
        return Stored(self.folder, name, str(cell["cell"]), opened)

    def trace(self, name: str) -> TraceFacts:
        """Facts about the trace `name` that the run contains."""
        group = self._trace_group(name)
        where = place(group)
        missing = [key for key in "model prompt tokens layers query_heads kv_heads".split() if key not in group.attrs]
        if missing:
            raise Error(where, "attributes", "model, prompt, tokens, …", "no " + ", ".join(missing))
        spans = group["spans"][()] if "spans" in group else []
        return TraceFacts(
            name=name,
            model=text(group.attrs["model"]),
            boundary=int(group.attrs.get("boundary", group.attrs["prompt"])),
            spans=[Span(text(s["name"]), text(s["kind"]), int(s["begin"]), int(s["end"])) for s in spans],
            redundancy={
                kind: group["redundancy_" + kind][()] for kind in ("key", "value") if "redundancy_" + kind in group
            },
            layer_numbers=layer_numbers(group, int(group.attrs["layers"])),
            heads=heads_of_layers(group, int(group.attrs["layers"])),
            reading_layers=int(group.attrs.get("reading_layers", 0)),
            treated=np.asarray(group.attrs.get("treated", np.arange(int(group.attrs["layers"]))), dtype=int),
            hash=text(group.attrs.get("trace_hash", "")),
            dtype=text(group.attrs.get("dtype", "")),
            sample=text(group.attrs.get("sample_text", "")),
            synthetic=bool(group.attrs.get("synthetic", 0)),
            **{key: int(group.attrs[key]) for key in "prompt tokens layers query_heads kv_heads".split()},
        )

    def captured(self, name: str) -> Path:
        """The file of the trace `name`, at the path that the replay read."""
        where = str(self.folder / "run.json")
        paths = [one["path"] for one in self.about.get("inputs", []) if one.get("trace") == name and "path" in one]
        if not paths:
            raise Error(where, f"path of trace {name}", "an entry of inputs", "none")
        path = Path(paths[0])
        if path.parts[0] == "memory:":
            raise Error(where, f"trace {name} was in memory", "the Trace object", "its name", Refusal.USAGE)
        if not path.is_file():
            raise Error(
                where, f"trace {name} not found", "its file at this path, or TRACE.h5 in place of the run", str(path)
            )
        return path

    def eval_attention(self, name: str, layer: int, head: int | None = None) -> np.ndarray:
        """Attention to each prompt token, mean over the eval queries: float [boundary].

        `layer` counts stored layers. `head`: a query head; None: the mean over the heads. NaN if the layer was not
        treated.
        """
        group = self._trace_group(name)
        where = place(group)
        if head is not None and "eval_attention_heads" not in group:
            found = "the mean over heads alone"
            raise Error(where, "attention by head was not saved", "a run with replay --save attention", found)
        if "eval_attention" not in group or "n_queries" not in group.attrs:
            raise Error(
                where, "attention of evaluation queries was not measured", "eval_attention and n_queries", "not both"
            )
        sums = group["eval_attention"][layer] if head is None else group["eval_attention_heads"][layer, head]
        return np.asarray(sums, dtype=float) / int(group.attrs["n_queries"])

    def has_attention_of_heads(self, name: str) -> bool:
        """Whether `eval_attention` of single heads was saved for a trace."""
        return "eval_attention_heads" in self._trace_group(name)

    def texts(self, name: str) -> tuple[list[str], list[str]] | None:
        """Two texts for each of the T tokens of a trace: the text before it that belongs to no token, and its own text.

        None without text. If tokens share characters (pieces of one character), the first token has them.
        """
        group = self._trace_group(name)
        if "tokens/text" not in group or "tokens/offsets" not in group:
            return None
        where = f"{place(group)}/tokens/offsets"
        try:
            whole = text(group["tokens/text"][()])
        except UnicodeDecodeError as problem:
            raise Error(where.replace("offsets", "text"), "unreadable", "UTF-8", str(problem)) from problem
        before, own, shown = [], [], 0
        for begin, end in group["tokens/offsets"][()].tolist():
            if not 0 <= begin <= end <= len(whole):
                raise Error(where, "range", f"0 to {len(whole)}, ascending", f"{begin} to {end}")
            begin = max(begin, shown)
            before.append(whole[shown:begin])
            own.append(whole[begin:end])
            shown = max(shown, end)
        return before, own

    def eval_attention_sums(self, name: str) -> np.ndarray | None:
        """Attention to each prompt token, summed over the eval queries, mean over query heads.

        float [L,boundary], NaN in layers that are not treated; None if the run does not contain it.
        """
        group = self._trace_group(name)
        return group["eval_attention"][()] if "eval_attention" in group else None

    def scores(self, cell: str) -> np.ndarray | None:
        """Scores by which a cell ranked tokens: float [L,H,boundary], NaN in layers without scores; None: not saved."""
        group = self._cell_group(cell)
        return group["scores"][()] if "scores" in group else None

    def _trace_group(self, name: str) -> h5py.Group:
        return self._group(name, f"/traces/{name}")

    def _cell_group(self, cell: str) -> h5py.Group:
        if cell not in self._trace_of:
            raise Error(str(self.folder / "results.csv"), "missing", f"cell {cell}", "no row")
        return self._group(self._trace_of[cell], f"/cells/{cell}")

    def _group(self, trace: str, path: str) -> h5py.Group:
        file = self.cells_file(trace)
        if path not in file:
            raise Error(f"{file.filename}:{path}", "missing", "a group", "nothing")
        return file[path]


class MemoryRun(Run):
    """Results of `kv.replay` in memory. `folder` writes them into a temporary folder, deleted with this object."""

    def __init__(self, about: str, detail: str, files: dict[str, bytes], columns: Sequence) -> None:
        self._open, self._files, self._columns, self._detail = {}, files, columns, detail
        self._about = about
        self.about = json.loads(about)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "folder"} | {"_open": {}}

    @cached_property
    def folder(self) -> Path:
        """A temporary results folder with the files that `kvreplay replay` writes."""
        from kvreplay import _engine

        folder = Path(tempfile.mkdtemp(prefix="kvreplay-"))
        weakref.finalize(self, delete_folder, folder, os.getpid())
        (folder / "cells").mkdir()
        for name, file in self._files.items():
            (folder / "cells" / f"{name}.h5").write_bytes(file)
        _engine.assemble(folder, self._detail)
        (folder / "run.json").write_text(self._about, encoding="utf-8")
        return folder

    def _file(self, name: str) -> Path | None:
        return super()._file(name) if "folder" in vars(self) else None

    def _result_rows(self) -> tuple[Path, Iterator[pd.DataFrame]]:
        return Path("results.csv"), self._rows()

    def _rows(self) -> Iterator[pd.DataFrame]:
        owners, metrics, numbers, values, half_widths = self._columns
        of_owners = [*(name for name in COLUMNS if name not in OF_ROWS), "sample"]
        shared = pd.DataFrame(owners, columns=of_owners, dtype=object)
        columns = [*COLUMNS, *(OF_SAMPLES if (shared["sample"] != "").any() else [])]
        named = np.array(metrics, dtype=object).reshape(-1, 3)
        for begin in range(0, len(values), PIECE):
            owner, layer, head, metric = (column[begin : begin + PIECE] for column in numbers)
            value = values[begin : begin + PIECE]
            rows = shared.take(owner).set_axis(range(begin, begin + len(owner)))
            for name, number in (("layer", layer), ("head", head)):
                rows[name] = np.where(number < 0, "all", number.astype(str))
            rows[["metric", "variant", "unit"]] = named[metric]
            rows["value"] = np.where(np.isfinite(value), value, np.nan)
            rows["half_width"] = half_widths[begin : begin + PIECE]
            yield rows[columns]

    @cached_property
    def select_seconds(self) -> dict[tuple[str, str], float]:
        keys = zip(self.cells["trace"], self.cells["cell"], strict=True)
        return {(trace, cell): float(self.cells_file(trace)[f"seconds/{cell}"][()].sum()) for trace, cell in keys}

    @property
    def stored_traces(self) -> list[str]:
        return sorted(self._files)

    def _open_cells(self, trace: str) -> h5py.File:
        if trace not in self._files:
            raise Error(f"memory:/{trace}", "missing", "a trace of this replay", ", ".join(self._files))
        return h5py.File(h5py.h5f.open_file_image(self._files[trace]))


def heads_of_layers(group: h5py.Group, layers: int) -> np.ndarray:
    """Query and KV heads of each stored layer, int [L,2]. Untreated layers have those of the file's other layers."""
    columns = [
        group.attrs.get(f"layer_{kind}_heads", np.full(layers, group.attrs.get(f"{kind}_heads", 1)))
        for kind in ("query", "kv")
    ]
    return np.stack(columns, axis=1).astype(int)


def rows_of(path: Path) -> Iterator[pd.DataFrame]:
    """Yields the rows of a CSV file in pieces, as Python objects: faster to create than strings; few rows are used."""
    yield from pd.read_csv(path, dtype=object, keep_default_na=False, encoding="utf-8", chunksize=PIECE)


def every_row(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(True, rows.index)


def chosen(
    path: Path,
    pieces: Iterable[pd.DataFrame],
    columns: Sequence[str],
    wanted: Callable[[pd.DataFrame], pd.Series],
) -> pd.DataFrame:
    """The rows over all heads that are `wanted` or required for skill, with the boolean columns `wanted` and
    `for_skill`; numbers are floats. Errors name `path`."""
    found = []
    try:
        for rows in pieces:
            missing = [name for name in columns if name not in rows.columns]
            if missing:
                raise Error(str(path), "columns", ", ".join(columns), "no " + ", ".join(missing))
            rows = rows[rows["head"] == "all"]
            for_skill = is_recall(rows) & wanted(rows.assign(metric=SKILL["name"], variant=""))
            rows = rows.assign(wanted=wanted(rows), for_skill=for_skill)
            texts = [name for name in columns if rows[name].dtype == object]
            found.append(rows[rows["wanted"] | for_skill].astype(dict.fromkeys(texts, str)))
    except (OSError, ValueError) as problem:
        raise Error(str(path), "unreadable", "CSV with a header", str(problem)) from problem
    table = pd.concat(found)
    for name in NUMBERS:
        if name not in table.columns or table[name].dtype == float:
            continue
        number = pd.to_numeric(table[name], errors="coerce")
        wrong = table[name][number.isna() & (table[name] != "")]
        if len(wrong):
            where = f"{path}:{wrong.index[0] + 2}"
            raise Error(where, name, "a number, or empty", wrong.iloc[0])
        # pandas before 3.1 is off by one in the last place of some.
        table[name] = table[name].where(number.notna(), "nan").to_numpy(object).astype(float)
    return table


def delete_folder(folder: Path, process: int) -> None:
    """Deletes a folder in the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


OBJECTS = ("backend", "build", "options", "self_check")  # of run.json
LISTS = ("inputs", "policies", "metrics", "cells")  # of objects
ENTRIES = {  # texts that an entry of a list must have
    "inputs": ("trace",),
    "metrics": ("name", "better"),
}


def check_about(path: Path, about: dict) -> None:
    """Checks the types of the entries of run.json that its readers require."""

    def refuse(what: str, expected: str, found: object) -> None:
        raise Error(str(path), what, expected, json.dumps(found)[:60])

    for name in OBJECTS:
        if not isinstance(about.get(name, {}), dict):
            refuse(name, "an object", about[name])
    for name in ("argv", "warnings", *LISTS):
        if not isinstance(about.get(name, []), list):
            refuse(name, "a list", about[name])
    for name in LISTS:
        for i, one in enumerate(about.get(name, [])):
            if not isinstance(one, dict):
                refuse(f"{name}[{i}]", "an object", one)
            for key in ENTRIES.get(name, ()):
                if not isinstance(one.get(key), str):
                    refuse(f"{name}[{i}].{key}", "a text", one.get(key))


def untold_note(metrics: Iterable[str], better: dict[str, str]) -> list[str]:
    """A note on metrics whose direction (higher or lower is better) is missing in a run."""
    untold = sorted(set(metrics) - set(better))
    if not untold:
        return []
    return [f"run.json does not say whether higher or lower is better for {', '.join(untold)}; run the same replay "
            "again to record it (finished cells are reused)"]  # fmt: skip


def place(group: h5py.Group) -> str:
    """The file and the name of a group, as in messages."""
    return f"{group.file.filename}:{group.name}"


def array(group: h5py.Group, name: str) -> np.ndarray:
    """A dataset of the group, whole."""
    if name not in group:
        raise Error(f"{place(group)}/{name}", "missing", "a dataset", "nothing")
    return group[name][()]


def layer_numbers(trace: h5py.Group, layers: int) -> np.ndarray:
    """The model's own number of each stored layer: int [L]."""
    return np.asarray(trace.attrs.get("layer_index", np.arange(layers)), dtype=int)


def text(value: object) -> str:
    """An HDF5 string, which h5py gives as str or as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def told_apart(live: pd.DataFrame) -> pd.DataFrame:
    """Rows of live.csv as rows of results.csv. The variant of sets that were decided live contains DECIDED_LIVE. If a
    number was measured in several ways, for example on two devices, the variant contains the way."""
    if live.empty:
        return live.drop(columns=[*MEASURED, TEXT])
    decided = live["decisions"] == DECIDED_LIVE
    live = live.assign(
        variant=(live["variant"].where(~decided, live["variant"] + ":" + DECIDED_LIVE)).str.removeprefix(":"),
        decisions=live["decisions"].where(~decided, ""),
    )
    twice = live.duplicated(["trace", "cell", "metric", "variant", "layer"], keep=False)
    ways = live[["variant", "decisions", "device", "dtype", "model_hash"]].agg(
        lambda row: " ".join(filter(None, row)), axis=1
    )  # fmt: skip
    return live.assign(variant=ways.where(twice, live["variant"])).drop(columns=[*MEASURED, TEXT])


def labels(table: pd.DataFrame) -> pd.Series:
    """The label of each row's policy, as `run_names.labels_of`."""
    cells = list(table[list(LABELLED)].astype(object).itertuples(index=False, name=None))  # str columns iterate slowly
    names = labels_of(cells)
    return pd.Series([names[cell] for cell in cells], index=table.index, dtype=str)
