"""Traces from Python: the engine's reader, and its writer for models that compute one layer after another.

P prompt tokens, T tokens in all, L layers, Hq query heads, Hkv KV heads, d components of a head. Tensors are float16,
bfloat16 (ml_dtypes) or float32.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from kvreplay import __version__
from kvreplay.errors import Error

if TYPE_CHECKING:
    from kvreplay import _engine
    from kvreplay._engine import View

PAGE = 4096  # bytes: tensors start on one, so that they can be mapped
PRODUCER = f"kvreplay {__version__}"
REAL_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

AnyPath = str | bytes | os.PathLike


class Span(NamedTuple):
    """A named range of tokens [begin, end)."""

    name: str
    kind: str
    begin: int
    end: int


class Trace:
    """An open trace, checked when it was opened. Tensors are not copied: they are views of the mapped file or, after
    `kv.from_arrays`, of the arrays in memory.

    `trace["/layers/000/k"]`, `trace["/tokens/ids"]` and other paths return the objects of the file.
    """

    path: Path
    in_memory: bool  # made by kv.from_arrays: `path` is not the path of a file
    name: str
    hash: str
    model: str
    synthetic: bool
    dtype: str  # float16 | bfloat16 | float32
    layers: int  # L
    query_heads: int  # these four: the largest of a layer
    kv_heads: int
    head_dim: int  # d, of queries and keys
    value_dim: int  # dv, of values
    prompt: int  # P
    tokens: int  # T
    text: str  # the prompt and its continuation; empty: the trace has none
    ids: np.ndarray  # int32 [T]
    offsets: np.ndarray  # int32 [T,2]: characters of each token
    query_positions: Callable[[int], np.ndarray]  # of a layer: int32 [Tq] if the file contains only some queries
    treated_layers: Callable[[bool], list[int]]  # stored layers that policies treat; argument: also sliding-window ones
    problems: Callable[[], list[str]]  # findings of `kvreplay validate --deep`; reads the whole trace

    def __init__(self, path: AnyPath) -> None:
        from kvreplay.engine import _engine

        file = Path(os.fsdecode(path))
        if (file / "run.json").exists():
            raise Error(str(file), "a run and not a trace", f"kv.Run({str(file)!r})", "")
        self._trace = _engine.Trace(file)

    @classmethod
    def of(cls, opened: _engine.Trace) -> Trace:
        """The trace of an object of the engine."""
        trace = cls.__new__(cls)
        trace._trace = opened
        return trace

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        del self._trace  # what it has given keeps the file open

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._trace, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(one for one in dir(self._trace) if not one.startswith("_"))})

    def __repr__(self) -> str:
        return (
            f"<kvreplay trace {self.name}: P {self.prompt} + G {self.tokens - self.prompt}, {self.layers} layers, "
            f"{self.query_heads} query / {self.kv_heads} KV heads of {self.head_dim}, {self.dtype}>"
        )

    def _repr_html_(self) -> str:
        from kvreplay.notebook_views import trace_html

        return trace_html(self)

    @property
    def heads(self) -> np.ndarray:
        """int [L,2]: query and KV heads of each layer."""
        of_layers = self._trace.value("/model/heads")
        return np.tile([self.query_heads, self.kv_heads], (self.layers, 1)) if of_layers is None else of_layers

    @property
    def spans(self) -> list[Span]:
        return [Span(*one) for one in self._trace.spans]

    def q(self, layer: int) -> np.ndarray:
        """[Hq, Tq, d] queries of a stored layer, after RoPE, in the type of the file: read-only, not copied."""
        return self._tensor("q", layer)

    def k(self, layer: int) -> np.ndarray:
        """[Hkv, T, d] keys, after RoPE."""
        return self._tensor("k", self._source(layer))

    def v(self, layer: int) -> np.ndarray:
        """[Hkv, T, value_dim] values; where they are components of the keys, a part of `k`."""
        stored = self._tensor("v", self._source(layer))
        return self.k(layer)[..., : self.value_dim] if stored is None else stored

    def layer(
        self, layer: int, boundary: int | str = "prompt", eval: str = "continuation", device: str = "cpu"
    ) -> View:
        """A stored layer as a policy sees it at the end of the prompt: `view.window_attention(32)` and others."""
        return self._trace.layer(layer, str(boundary), eval, device)

    def attribute(self, path: str, name: str) -> Any:
        """An attribute of a group: trace.attribute("/model", "n_layers")."""
        return self[f"{path}@{name}"]

    def __getitem__(self, path: str) -> Any:
        found = self._find(path)
        if found is None:
            raise KeyError(path)
        return found

    def __contains__(self, path: str) -> bool:
        return self._find(path) is not None

    def _find(self, path: str) -> Any:
        in_layer = re.fullmatch(r"/layers/(\d+)/(\w+)", path)
        if in_layer is None:
            return self._trace.value(path)
        layer, name = int(in_layer[1]), in_layer[2]
        if layer >= self.layers:
            return None
        if name == "q_positions":
            positions = self.query_positions(layer)
            return positions if len(positions) else None
        if name == "visible":
            units = self._trace.visible_units(layer)
            queries = len(self.query_positions(layer)) or self.tokens
            return units.reshape(self.heads[layer, 1], queries, -1) if len(units) else None
        return self._tensor(name, layer)

    def _source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        sources = self._trace.value("/model/kv_source")
        return layer if sources is None else int(sources[layer])

    def _tensor(self, name: str, layer: int) -> np.ndarray | None:
        found = self._trace.tensor(name, layer)
        if found is None:
            return None
        data, kind, shape = found
        return data.view(REAL_TYPES[kind]).reshape(shape)


def refuse_existing(path: Path, force: bool) -> None:
    """A finished trace is replaced only on request."""
    if path.exists() and not force:
        raise Error(str(path), "exists", "another name, or --force to overwrite", "a file")


class TraceWriter:
    """Writes PATH.partial and renames it to PATH when the trace is complete; an exception deletes the partial file.

    `producer`: name and version of the writing program, an attribute of the trace.

    with TraceWriter(path) as trace:
        trace.attributes("/model", n_layers=2, ...)
        trace.dataset("/tokens/ids", ids)
        trace.layer(0, q, k, v)
    """

    def __init__(self, path: str | Path, force: bool = False, producer: str = PRODUCER) -> None:
        from kvreplay.engine import _engine

        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        refuse_existing(self.path, force)
        self._writer = _engine.TraceWriter(self.path)
        self._tensors: dict[str, tuple[np.dtype, int, tuple[int, ...]]] = {}  # type, place in the file, shape
        self.attributes("/", producer=producer)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if kind is None:
                self._writer.finish()
        finally:
            del self._writer  # removes what is not finished

    def attributes(self, path: str, **values: Any) -> None:
        """Attributes of a group, each checked."""
        for name, value in values.items():
            self._writer.write(f"{path}@{name}", stored_text(value) if isinstance(value, str) else value, ())

    def dataset(self, path: str, data: np.ndarray | str | Sequence[Span]) -> None:
        """A dataset of the schema, whole."""
        if isinstance(data, str):
            self._writer.write(path, stored_text(data), ())
        elif path == "/spans":
            spans = [(stored_text(name), stored_text(kind), begin, end) for name, kind, begin, end in data]
            self._writer.write(path, spans, (len(spans),))
        elif path.startswith("/layers/") and not path.endswith(("/q_positions", "/visible")):
            self.begin_tensor(path, data.dtype, data.shape)
            self.write_tokens(path, 0, data)
        else:
            self._writer.write(path, data.reshape(-1).tolist(), data.shape)

    def begin_tensor(self, path: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """A tensor of a layer that is written in pieces: `write_tokens()` fills it."""
        self._tensors[path] = dtype, self._writer.begin_tensor(path, dtype.name, shape), shape

    def write_tokens(self, path: str, begin: int, piece: np.ndarray) -> None:
        """The tokens from `begin` on of a begun tensor [H,T,d] or [T]: [H,n,d] or [n]."""
        self._writer.write_tokens(path, begin, np.ascontiguousarray(piece).reshape(-1).view(np.uint8))

    def layer(self, number: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, **others: np.ndarray | None) -> None:
        """One layer, whole: q [Hq,Tq,d], k and v [Hkv,T,d]; by name q_positions [Tq], visible [Hkv,Tq,u], wo
        [hidden, Hq*d], input_norm [T] and x [T, hidden]."""
        for name, array in {**others, "q": q, "k": k, "v": v}.items():
            if array is not None:
                self.dataset(f"/layers/{number:03d}/{name}", array)

    def read_back(self, path: str) -> np.ndarray:
        """A tensor of the file, mapped; elements that are not written yet have arbitrary values."""
        try:
            return np.memmap(self.partial, self._tensors[path][0], "r", *self._tensors[path][1:])
        except OSError as error:
            raise Error(str(self.partial), "output", "the file that is being written", str(error)) from error


def stored_text(text: str) -> bytes:
    """A text as bytes of a trace. A null would end a string, so it is replaced. The engine rejects invalid UTF-8."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "surrogatepass")


def expected_bytes(shapes: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """Bytes of tensors given as (shape, type name), each rounded up to a page."""
    sizes = (int(np.prod(shape)) * REAL_TYPES[name].itemsize for shape, name in shapes)
    return sum(-(-size // PAGE) * PAGE for size in sizes)
