"""Traces of arrays in memory: the engine reads tensors of a model without a file.

L layers, Hq query heads, Hkv KV heads, T tokens, Tq stored queries of a layer, d components of a head.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvreplay import _engine
from kvreplay.engine import Trace
from kvreplay.errors import Error, Refusal
from kvreplay.trace import REAL_TYPES, stored_text

INT32_MAX = int(np.iinfo(np.int32).max)
FOLDER = "memory:"  # of the paths by which messages and results know such traces

# Arguments, and what they are in a file: for the engine on the way there, for messages on the way back.
OBJECTS = {
    "model": "/model@name",
    "architecture": "/model@architecture",
    "source_hash": "/model@source_hash",
    "synthetic": "/@synthetic",
    "dtype": "/model@dtype",
    "softmax_scale": "/model@softmax_scale",
    "softcap": "/model@logit_softcap",
    "sliding_window": "/model/sliding_window",
    "layer_index": "/model/layer_index",
    "rope.style": "/model/rope@style",
    "rope.inv_freq": "/model/rope/inv_freq",
    "rope.attention_scaling": "/model/rope/attention_scaling",
    "prompt": "/tokens@prefill",
    "value_is_key": "/model@value_is_key",
    "kv_source": "/model/kv_source",
    "visible_block": "/model@visible_block",
    "sinks": "/model/sinks",
    "chunk": "/model/chunk",
    "rope.offset": "/model/rope@offset",
    "ids": "/tokens/ids",
    "offsets": "/tokens/offsets",
    "text": "/tokens/text",
    "spans": "/spans",
}
# Numbers that the shapes of the tensors say.
SHAPES = {"/model@n_layers": "k", "/model@n_query_heads": "q", "/model@n_kv_heads": "k", "/model@head_dim": "k",
          "/model@value_dim": "v", "/model/heads": "q, k", "/model/head_dims": "k, v",
          "/model/rope/pairs": "rope.inv_freq"}  # fmt: skip
ARGUMENTS = {place: argument for argument, place in OBJECTS.items()} | SHAPES
IN_LAYER = {"q": "q", "k": "k", "v": "v", "wo": "wo", "q_positions": "query_positions", "visible": "visible"}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding for `kv.from_arrays`: pair i of a head's components is rotated by position *
    inv_freq[i] radians."""

    inv_freq: Any  # [r], or L rows [r], also of different length; a row of zeros: that layer has no RoPE
    attention_scaling: Any = 1.0  # a number, or [L]: factor on cosine and sine, contained in queries and keys
    style: str = "halves"  # pairs (i, i+r); interleaved: (2i, 2i+1)
    offset: int = 0  # number of the first component that is rotated


def from_arrays(
    q: Sequence[Any],
    k: Sequence[Any | None],
    v: Sequence[Any | None] | None,
    *,
    prompt: int,
    ids: Any = None,
    text: str | None = None,
    offsets: Any = None,
    spans: Iterable[tuple[str, str, int, int]] = (),
    rope: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: Any = 0,
    chunk: Any = 0,
    sinks: Any = None,
    value_is_key: int = 0,
    kv_source: Sequence[int] | None = None,
    query_positions: Any = None,
    visible: Sequence[Any | None] | None = None,
    visible_block: int = 1,
    wo: Sequence[Any] | None = None,
    dtype: str | None = None,
    layer_index: Any = None,
    model: str = "arrays",
    architecture: str = "arrays",
    source_hash: str = "",
    synthetic: bool = False,
    name: str = "arrays",
) -> Trace:
    """Returns a trace of arrays in memory. Every function that accepts a trace accepts it.

    `q`, `k` and `v` are lists over layers of arrays [Hq, Tq, d], [Hkv, T, d] and [Hkv, T, dv] in float16, bfloat16
    (ml_dtypes) or float32: numpy arrays, CPU tensors of PyTorch, or other objects that numpy reads. Layers may differ
    in heads and dimensions. Queries and keys are those after RoPE, of `prompt` prompt tokens and their continuation. An
    array is copied only where its elements are not contiguous or in another byte order. Arrays must not change while
    the trace is in use.

    `ids` [T]: token numbers (default: 0 each); `text` with `offsets` [T, 2]; `spans`: (name, kind, begin, end).
    `rope`: a `kv.Rope`, or any object with its attributes. `softmax_scale`: default d ** -0.5. `sliding_window`: a
    number of tokens or one for each layer, 0 for none; `chunk` likewise: query t sees keys from floor(t / C) C on.
    `sinks` [L, Hq]: sink logits, -infinity for none. `value_is_key` n: values are the first n components of the
    keys, and `v` is None, as in latent attention. `kv_source`: for each layer the layer whose keys and values it reads,
    itself or an earlier one; `k` and `v` of a layer that reads those of another are None. `query_positions`: positions
    of the queries in `q`, for all layers or a list over layers (default: all T). `visible`: a list over layers of int
    arrays [Hkv, Tq, u], or None: the units of `visible_block` tokens that the model itself selects for each query,
    ascending, then -1, as the policy `native` reads them. `wo`: output projections [hidden, Hq*d]. `dtype`: the type
    that the model computed in (default: that of the keys). `name`: what results call the trace.

    Raises Error, with the name of the argument, if `kvreplay validate` would reject a file of such a trace.
    """
    arrays = {"q": list(q), "k": list(k)}
    if (v is None) != bool(value_is_key):
        raise Error("v", "values", "None beside value_is_key, else a list over layers", type(v).__name__)
    layers = len(arrays["k"])
    arrays["v"] = [None] * layers if v is None else list(v)
    if wo is not None:
        arrays["wo"] = list(wo)
    if not layers:
        raise Error("k", "layers", "at least 1", "0")
    for argument, of_layers in arrays.items():
        if len(of_layers) != layers:
            raise Error(argument, "layers", str(layers), str(len(of_layers)))
    sources = _sources(kv_source, layers)
    readers = {layer for layer, source in enumerate(sources) if source != layer}
    for layer, argument in itertools.product(readers, ("k", "v")):
        if arrays[argument][layer] is not None:
            expected = f"None, because layer {sources[layer]} has them (kv_source)"
            raise Error(f"{argument}[{layer}]", "array", expected, "an array")
    every = set(range(layers))
    absent = {"q": set(), "k": readers, "v": every if v is None else readers, "wo": every}
    tensors = {
        argument: [None if one is None and layer in absent[argument] else _tensor(f"{argument}[{layer}]", one)
                   for layer, one in enumerate(of_layers)]
        for argument, of_layers in arrays.items()
    }  # fmt: skip
    queries = [_three(f"q[{layer}]", "[Hq, Tq, d]", one) for layer, one in enumerate(tensors["q"])]
    keys = [_three(f"k[{layer}]", "[Hkv, T, d]", tensors["k"][layer]) for layer in sources]
    widths = [value_is_key if v is None else _three(f"v[{layer}]", "[Hkv, T, dv]", tensors["v"][layer])[2]
              for layer in sources]  # fmt: skip
    heads = [(query[0], key[0]) for query, key in zip(queries, keys, strict=True)]
    dims = [(key[2], width) for key, width in zip(keys, widths, strict=True)]
    tokens, dim, value_dim = keys[0][1], max(dims)[0], max(widths)
    positions = _positions(query_positions, layers)
    indices = range(layers) if layer_index is None else layer_index
    values: dict[str, Any] = {
        "/@synthetic": int(bool(synthetic)),
        "/model@n_layers": layers,
        "/model@n_query_heads": max(of_layer[0] for of_layer in heads),
        "/model@n_kv_heads": max(of_layer[1] for of_layer in heads),
        "/model@head_dim": dim,
        "/model@softmax_scale": _number("softmax_scale", dim**-0.5 if softmax_scale is None else softmax_scale),
        "/model@logit_softcap": _number("softcap", softcap),
        "/model/sliding_window": _integers("sliding_window", sliding_window, (layers,)),
        "/model/layer_index": _integers("layer_index", indices, (layers,)),
        "/tokens@prefill": _whole("prompt", prompt),
        "/tokens/ids": _integers("ids", np.zeros(tokens, np.int32) if ids is None else ids, (tokens,)),
        "/spans": _spans(spans),
    }
    if value_is_key:
        values["/model@value_is_key"] = _whole("value_is_key", value_is_key)
    elif value_dim != dim:
        values["/model@value_dim"] = value_dim
    for name_, of_layers in (("heads", heads), ("head_dims", dims)):
        if len(set(of_layers)) > 1:
            values[f"/model/{name_}"] = [number for of_layer in of_layers for number in of_layer]
    if sources != list(range(layers)):
        values["/model/kv_source"] = sources
    units = [None] * layers if visible is None else list(visible)
    if len(units) != layers:
        raise Error("visible", "layers", str(layers), str(len(units)))
    units = [None if one is None else _units(f"visible[{layer}]", one) for layer, one in enumerate(units)]
    if any(units):
        values["/model@visible_block"] = _whole("visible_block", visible_block)
    if sinks is not None:
        values["/model/sinks"] = _floats("sinks", sinks, (layers, values["/model@n_query_heads"]))
    if any(chunks := _integers("chunk", chunk, (layers,))):
        values["/model/chunk"] = chunks
    words = {"model": model, "architecture": architecture, "source_hash": source_hash, "text": text or ""}
    words["dtype"] = tensors["k"][0][1] if dtype is None else dtype
    for argument, word in words.items():
        if word or argument not in ("source_hash", "text"):
            values[OBJECTS[argument]] = _text(argument, word)
    if offsets is not None:
        values["/tokens/offsets"] = _integers("offsets", offsets, (tokens, 2))
    if rope is not None:
        values["/model/rope@style"] = _text("rope.style", rope.style)
        pairs, values["/model/rope/inv_freq"] = _inverse_frequencies(rope.inv_freq, layers)
        if len(set(pairs)) > 1:
            values["/model/rope/pairs"] = pairs
        if offset := _whole("rope.offset", getattr(rope, "offset", 0)):
            values["/model/rope@offset"] = offset
        values["/model/rope/attention_scaling"] = _floats("rope.attention_scaling", rope.attention_scaling, (layers,))
    if not isinstance(name, str) or not name or set(name) & set("/*?["):
        raise Error("name", "value", "a text without / * ? [", repr(name), Refusal.USAGE)
    path = f"{FOLDER}/{name}"
    of_layers = zip(*(tensors[one] for one in "qkv"), tensors.get("wo", [None] * layers), positions, units, strict=True)
    try:
        return Trace.of(_engine.trace_of_arrays(path, values, list(of_layers)))
    except Error as problem:
        raise _at_argument(problem, path) from None


def _at_argument(problem: Error, path: str) -> Error:
    """A message of the engine with the names of arguments instead of a file's objects."""
    where = problem.where.removeprefix(path + ":")
    in_layer = re.fullmatch(r"/layers/(\d+)/(\w+)", where)
    where = f"{IN_LAYER[in_layer[2]]}[{int(in_layer[1])}]" if in_layer else ARGUMENTS.get(where, where)
    expected = re.sub(r"/[\w/@]+", lambda found: ARGUMENTS.get(found[0], found[0]), problem.expected)
    return Error(where, problem.what, expected, problem.found, problem.exit_code)


Tensor = tuple[np.ndarray, str, tuple[int, ...]]


def _tensor(where: str, one: Any) -> Tensor:
    """The bytes of an array, its type and its shape."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(one, torch.Tensor):
        if one.device.type != "cpu":
            raise Error(where, "device", "a tensor on the CPU, as .cpu() gives it", str(one.device))
        one = one.detach()
        if one.dtype == torch.bfloat16:  # numpy itself has no such type
            array = one.view(torch.int16).numpy().view(REAL_TYPES["bfloat16"])
        else:
            array = one.numpy()
    else:
        array = _read(where, one)
    kind = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    names = [name for name, known in REAL_TYPES.items() if known == kind]
    if not names:
        raise Error(where, "type", "float16, bfloat16 or float32", str(array.dtype))
    elements = np.ascontiguousarray(array if array.dtype.isnative else array.astype(kind))
    return elements.reshape(-1).view(np.uint8), names[0], array.shape


def _read(where: str, one: Any) -> np.ndarray:
    try:
        return np.asarray(one)
    except (TypeError, ValueError) as problem:
        raise Error(where, "type", "an array", str(problem)) from None


def _three(where: str, expected: str, tensor: Tensor) -> tuple[int, ...]:
    shape = tensor[2]
    if len(shape) != 3:
        raise Error(where, "shape", expected, str(list(shape)))
    return shape


def _sources(given: Any, layers: int) -> list[int]:
    """The layer whose keys and values each layer reads."""
    sources = _integers("kv_source", range(layers) if given is None else list(given), (layers,))
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer or sources[source] != source:
            expected = f"{layer} or an earlier layer with keys and values"
            raise Error(f"kv_source[{layer}]", "value", expected, str(source))
    return sources


def _units(where: str, given: Any) -> tuple[list[int], tuple[int, ...]]:
    """Selected units of a layer and their shape."""
    array = _read(where, given)
    if array.ndim != 3 or not array.size:
        raise Error(where, "shape", "[Hkv, Tq, u]", str(list(array.shape)))
    return _integers(where, array, array.shape), array.shape


def _shaped(where: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One number stands for a list of equal ones."""
    if array.ndim == 0:
        return np.full(shape, array)
    if array.shape != shape:
        raise Error(where, "shape", str(list(shape)), str(list(array.shape)))
    return array


def _integers(where: str, given: Any, shape: tuple[int, ...]) -> list[int]:
    array = _read(where, given)
    if not np.issubdtype(array.dtype, np.integer):
        raise Error(where, "type", "whole numbers", str(array.dtype))
    array = _shaped(where, array, shape).reshape(-1)
    for outside in array[(array < -INT32_MAX) | (array > INT32_MAX)][:1]:
        raise Error(where, "value", f"at most {INT32_MAX}", str(outside))
    return array.tolist()


def _floats(where: str, given: Any, shape: tuple[int, ...]) -> list[float]:
    array = _read(where, given)
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise Error(where, "type", "numbers", str(array.dtype))
    return _shaped(where, array.astype(np.float64), shape).reshape(-1).tolist()


def _inverse_frequencies(given: Any, layers: int) -> tuple[list[int], list[float]]:
    """The pairs of each layer and [L, r], of [r] or of L rows; shorter rows are filled with zeros."""
    given = given if isinstance(given, list | tuple) else _read("rope.inv_freq", given)
    rows = list(given) if isinstance(given, list | tuple) or given.ndim else []
    if rows and all(np.ndim(row) == 0 for row in rows):
        rows = [rows] * layers
    if len(rows) != layers or not all(np.ndim(row) == 1 and len(row) for row in rows):
        raise Error("rope.inv_freq", "shape", f"[{layers}, r] or [r]", str([np.shape(row) for row in rows]))
    pairs = [len(row) for row in rows]
    filled = [np.pad(np.asarray(row, np.float64), (0, max(pairs) - len(row))) for row in rows]
    return pairs, _floats("rope.inv_freq", np.stack(filled), (layers, max(pairs)))


def _positions(given: Any, layers: int) -> list[list[int]]:
    """The query positions of each layer; one list for all layers is repeated."""
    if given is None:
        return [[]] * layers
    of_layers = list(given)
    if all(np.ndim(one) == 0 and one is not None for one in of_layers):
        of_layers = [of_layers] * layers
    if len(of_layers) != layers:
        raise Error("query_positions", "layers", str(layers), str(len(of_layers)))
    named = [(f"query_positions[{layer}]", one) for layer, one in enumerate(of_layers)]
    return [[] if one is None else _integers(where, one, (len(one),)) for where, one in named]


def _spans(given: Iterable[tuple[str, str, int, int]]) -> list[tuple[bytes, bytes, int, int]]:
    spans = []
    for number, span in enumerate(given):
        where = f"spans[{number}]"
        if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 4:
            raise Error(where, "kind", "(name, kind, begin, end)", repr(span))
        name, kind, begin, end = span
        spans.append((_text(where, name), _text(where, kind), _whole(where, begin), _whole(where, end)))
    return spans


def _text(where: str, given: Any) -> bytes:
    if not isinstance(given, str):
        raise Error(where, "type", "a text", type(given).__name__)
    return stored_text(given)


def _whole(where: str, given: Any) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise Error(where, "type", "a whole number", type(given).__name__) from None
    if abs(number) > INT32_MAX:
        raise Error(where, "value", f"at most {INT32_MAX}", str(number))
    return number


def _number(where: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise Error(where, "type", "a number", repr(given)) from None
