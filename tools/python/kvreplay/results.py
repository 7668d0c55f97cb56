"""A finished run folder, read: `results.csv`, `selections.h5` and `run.json`.

L stored layers, H sets a layer (1, KV heads or query heads), P prompt tokens. Whoever shows a run reads it through
here, so that a policy is called the same everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np
import pandas as pd

from kvreplay.errors import Error

RUN_FILES = "results.csv, selections.h5, run.json"
COLUMNS = (
    "trace trace_hash model role policy params heads agg budget budget_tokens kept_tokens boundary eval n_queries "
    "layer head metric variant value unit open_loop synthetic backend seed cell"
).split()
NUMBERS = ["budget_tokens", "kept_tokens", "value"]
CELL = "cell trace model role policy params heads budget budget_tokens boundary eval backend seed synthetic".split()


@dataclass(frozen=True)
class Selection:
    """The kept tokens of one cell, rows [L,H] as stored; `layers` are the stored layers that were treated.

    Of a schedule they are what is held when the prompt has been seen and its last eviction is done.
    """

    layers: np.ndarray  # int [n], ascending
    numbers: np.ndarray  # int [n], the model's own numbers of these layers: what figures and tables show
    offsets: np.ndarray  # int [L*H+1]
    positions: np.ndarray  # int [offsets[-1]]
    granted: np.ndarray  # int [L,H], tokens
    sinks: np.ndarray  # int [L,H], first tokens that a rule kept
    recent: np.ndarray  # int [L,H], last tokens that a rule kept
    jaccard: dict[str, np.ndarray]  # first, mean, union: float [n,n]
    boundary: int  # P where the whole prompt is compressed
    # int [L,H,T] of schedules: position of the query after which a token went; -1 never, and where a layer decides once
    evicted_at: np.ndarray | None = None

    @property
    def kept(self) -> np.ndarray:
        """Kept tokens [n,H] of the treated layers."""
        return np.diff(self.offsets).reshape(self.granted.shape)[self.layers]

    def mask(self) -> np.ndarray:
        """Whether a token is kept: bool [n,H,boundary]."""
        rows = np.zeros((self.granted.size, self.boundary), dtype=bool)
        rows[np.repeat(np.arange(self.granted.size), np.diff(self.offsets)), self.positions] = True
        return rows.reshape(*self.granted.shape, self.boundary)[self.layers]

    def unprotected(self) -> np.ndarray:
        """Whether a token was left to the policy, neither sink nor recent by rule: bool [n,H,boundary]."""
        position = np.arange(self.boundary)
        first = self.sinks[self.layers][..., None]
        last = self.boundary - self.recent[self.layers][..., None]
        return (position >= first) & (position < last)


@dataclass(frozen=True)
class Span:
    """A named range of tokens [begin, end)."""

    name: str
    kind: str
    begin: int
    end: int


@dataclass(frozen=True)
class TraceFacts:
    """What a run keeps of a trace."""

    name: str
    model: str
    prompt: int  # P
    boundary: int  # tokens under compression
    tokens: int  # T
    layers: int  # L
    layer_numbers: np.ndarray  # int [L], the model's own numbers
    query_heads: int
    kv_heads: int
    spans: list[Span]
    redundancy: dict[str, np.ndarray]  # key, value: float [L,boundary], NaN where not treated


class Run:
    """One run folder. Everything is checked where it is first read; what is refused says which file and object."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        for name in RUN_FILES.split(", "):
            if not (self.folder / name).is_file():
                raise Error(str(self.folder), "not a finished run", RUN_FILES, f"no {name}")

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
        return about

    @cached_property
    def table(self) -> pd.DataFrame:
        """results.csv with numbers as numbers (undefined: NaN), everything else as written, and the column `label`."""
        path = self.folder / "results.csv"
        try:
            table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
        except (OSError, ValueError) as problem:
            raise Error(str(path), "unreadable", "CSV with a header", str(problem)) from problem
        missing = [name for name in COLUMNS if name not in table.columns]
        if missing:
            raise Error(str(path), "columns", ", ".join(COLUMNS), "no " + ", ".join(missing))
        for name in NUMBERS:
            number = pd.to_numeric(table[name], errors="coerce")
            wrong = table[name][number.isna() & (table[name] != "")]
            if len(wrong):
                where = f"{path}:{wrong.index[0] + 2}"
                raise Error(where, name, "a number or nothing", wrong.iloc[0])
            table[name] = number
        failed = [(cell.get("trace"), cell.get("cell")) for cell in self.failed]
        table = table[~pd.MultiIndex.from_frame(table[["trace", "cell"]]).isin(failed)].reset_index(drop=True)
        table["label"] = labels(table)
        return table

    @property
    def failed(self) -> list[dict[str, str]]:
        """The cells that run.json calls failed: none of their numbers are read."""
        return [cell for cell in self.about.get("cells", []) if cell.get("state") == "failed"]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row a cell: trace, policy with its parameters and `label`, budget; in the order of results.csv."""
        rows = self.table[self.table["role"] != "trace"]
        return rows[[*CELL, "label"]].drop_duplicates(["trace", "cell"]).reset_index(drop=True)

    @cached_property
    def selections(self) -> h5py.File:
        """selections.h5, open for reading."""
        path = self.folder / "selections.h5"
        try:
            file = h5py.File(path, "r", locking=False)
        except OSError as problem:
            raise Error(str(path), "unreadable", "an HDF5 file", str(problem)) from problem
        found = (text(file.attrs.get("format", "none")), int(file.attrs.get("version", 0)))
        if found != ("kvselections", 1):
            raise Error(str(path), "format", "kvselections version 1", "{} version {}".format(*found))
        return file

    def selection(self, cell: str, boundary: int) -> Selection | None:
        """The kept tokens of a cell that compresses `boundary` tokens; None where a policy has no fixed set.

        A policy that keeps every token, changed, stores no rows and says `sets` = all: its rows are whole.
        """
        group = self._object("/cells/" + cell)
        if "offsets" not in group:
            return None
        granted = self._array(group, "budget")
        offsets, positions = self._array(group, "offsets"), self._array(group, "positions")
        where = f"{self.folder / 'selections.h5'}:{group.name}"
        if "layers" not in group.attrs:
            raise Error(where, "attribute layers", "the treated layers", "none")
        layers = np.asarray(group.attrs["layers"], dtype=int).ravel()
        if granted.ndim != 2 or offsets.shape != (granted.size + 1,) or (np.diff(offsets) < 0).any():
            raise Error(where, "offsets", f"{granted.size + 1} ascending", str(list(offsets.shape)))
        if len(positions) != offsets[-1]:
            raise Error(where, "positions", f"{offsets[-1]} of them", str(len(positions)))
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
        return Selection(
            layers=layers,
            numbers=layer_numbers(self._object("/traces/" + text(group.attrs["trace"])), len(granted))[layers],
            offsets=offsets,
            positions=positions,
            granted=granted,
            sinks=self._array(group, "sinks"),
            recent=self._array(group, "recent"),
            jaccard={variant: self._array(group, "jaccard_" + variant) for variant in ("first", "mean", "union")},
            boundary=boundary,
            evicted_at=evicted_at,
        )

    def trace(self, name: str) -> TraceFacts:
        """What the run keeps of the trace `name`."""
        group = self._object("/traces/" + name)
        where = f"{self.folder / 'selections.h5'}:{group.name}"
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
            **{key: int(group.attrs[key]) for key in "prompt tokens layers query_heads kv_heads".split()},
        )

    def _object(self, path: str) -> h5py.Group:
        if path not in self.selections:
            where = f"{self.folder / 'selections.h5'}:{path}"
            raise Error(where, "missing", "a group", "nothing")
        return self.selections[path]

    def _array(self, group: h5py.Group, name: str) -> np.ndarray:
        if name not in group:
            where = f"{self.folder / 'selections.h5'}:{group.name}/{name}"
            raise Error(where, "missing", "a dataset", "nothing")
        return group[name][()]


def layer_numbers(trace: h5py.Group, layers: int) -> np.ndarray:
    """The model's own number of each stored layer: int [L]."""
    return np.asarray(trace.attrs.get("layer_index", np.arange(layers)), dtype=int)


def text(value: object) -> str:
    """An HDF5 string, which h5py gives as str or as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def split_outside_parentheses(line: str) -> list[str]:
    """The pieces between commas that no parenthesis encloses; none for an empty line."""
    pieces, depth = [""], 0
    for letter in line:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces if line else []


def parameters(line: str) -> dict[str, str]:
    """Names and values of a canonical key=value list."""
    return dict(piece.partition("=")[::2] for piece in split_outside_parentheses(line))


def labels(table: pd.DataFrame) -> pd.Series:
    """What a policy is called in this run: its name, and behind it the parameters in which cells of that name differ.

    Boundary, eval queries, backend and seed count as parameters where two cells differ in nothing else. A row of a
    trace alone has no label.
    """
    distinct = table[CELL].drop_duplicates()
    same = distinct.groupby(["trace", "policy", "params", "budget"])
    beside = [name for name in ("boundary", "eval", "backend", "seed") if (same[name].nunique() > 1).any()]

    def values(row: pd.Series) -> dict[str, str]:
        return {name: row[name] for name in beside} | parameters(row["params"])

    names: dict[tuple[str, ...], str] = {}
    key = ["policy", "params", *beside]
    for policy, rows in distinct[key].drop_duplicates().groupby("policy"):
        known = [values(row) for _, row in rows.iterrows()]
        every = dict.fromkeys(name for one in known for name in one)
        differ = [name for name in every if len({one.get(name) for one in known}) > 1]
        for (_, row), one in zip(rows.iterrows(), known, strict=True):
            suffix = ",".join(f"{name}={one[name]}" for name in differ if name in one)
            names[tuple(row[key])] = f"{policy}:{suffix}" if suffix else str(policy)
    rows = table[key].itertuples(index=False, name=None)
    return pd.Series([names[row] for row in rows], index=table.index, dtype=str)
