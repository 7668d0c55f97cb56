"""A small trace writer of the tests' own, so that reader and writer of the program are not checked by each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np

NUMPY_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass
class Content:
    """What a trace file holds: q[layer] [Hq,Tq,d], k[layer] and v[layer] [Hkv,T,d], and what describes them."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    prompt: int
    dtype: str = "float32"
    scale: float = 0.5
    softcap: float = 0.0
    windows: list[int] | None = None
    layer_index: list[int] | None = None
    spans: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # name: kind, begin, end
    q_positions: np.ndarray | None = None
    rope: bool = False
    interleaved: bool = False
    rotated: float = 1.0  # share of the components that RoPE turns
    attention_scaling: float = 1.0
    unrotated_layers: tuple[int, ...] = ()
    wo: list[np.ndarray] | None = None  # [layer] [hidden, Hq*d]
    input_norm: list[np.ndarray] | None = None  # [layer] [T]
    passes: list[tuple[int, int, int]] | None = None  # end in q_passes, first and end of the prompt tokens repeated
    q_passes: list[np.ndarray] | None = None  # [layer] [Hq,R,d], of all passes
    k_passes: list[np.ndarray] | None = None  # [layer] [Hkv,R,d]


def stored_type(dtype: str) -> h5py.h5t.TypeFloatID:
    """The HDF5 float type; bfloat16 is made by hand: 1 sign, 8 exponent, 7 mantissa bits."""
    if dtype == "float32":
        return h5py.h5t.IEEE_F32LE
    half = h5py.h5t.IEEE_F16LE.copy()
    if dtype == "bfloat16":
        half.set_fields(15, 7, 8, 0, 7)
        half.set_ebias(127)
    return half


def text(value: str) -> np.ndarray:
    """A fixed-length UTF-8 string."""
    encoded = value.encode()
    return np.array(encoded, h5py.string_dtype("utf-8", max(1, len(encoded))))


def write_tensor(group: h5py.Group, name: str, values: np.ndarray, dtype: str) -> None:
    """A contiguous dataset, allocated early, without fill values and times."""
    raw = np.ascontiguousarray(values.astype(NUMPY_TYPES[dtype]))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    kind = stored_type(dtype)
    dataset = h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(raw.shape), dcpl=creation)
    bits = raw.view(np.uint32 if dtype == "float32" else np.uint16)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=kind)


def write_trace(path: Path, content: Content) -> None:
    """Write `content` as a trace of version 1."""
    n_layers, (kv_heads, tokens, dimension) = len(content.k), content.k[0].shape
    with h5py.File(path, "w", libver=("v108", "v110"), alignment_threshold=65536, alignment_interval=4096) as file:

        def array(where: h5py.Group, name: str, values: np.ndarray) -> None:
            where.create_dataset(name, data=values, track_times=False)

        model, token_group = file.create_group("model"), file.create_group("tokens")
        for where, attributes in (
            (file, {"format": "kvtrace", "producer": "tests/reference", "created": "2025-01-01T00:00:00Z"}),
            (model, {"name": path.stem, "architecture": "Random", "dtype": content.dtype}),
        ):
            for name, value in attributes.items():
                where.attrs[name] = text(value)
        for name, number in (("version", 1), ("complete", 1), ("synthetic", 1)):
            file.attrs[name] = np.int64(number)
        model.attrs["n_layers"] = np.int64(n_layers)
        model.attrs["n_query_heads"] = np.int64(content.q[0].shape[0])
        model.attrs["n_kv_heads"] = np.int64(kv_heads)
        model.attrs["head_dim"] = np.int64(dimension)
        model.attrs["softmax_scale"] = np.float64(content.scale)
        model.attrs["logit_softcap"] = np.float64(content.softcap)
        array(model, "sliding_window", np.array(content.windows or [0] * n_layers, np.int32))
        array(model, "layer_index", np.array(content.layer_index or range(n_layers), np.int32))
        if content.rope:
            rope = model.create_group("rope")
            rope.attrs["style"] = text("interleaved" if content.interleaved else "halves")
            pairs = max(1, int(content.rotated * dimension) // 2)
            frequencies = np.tile(10000.0 ** -np.linspace(0, 1, pairs, endpoint=False), (n_layers, 1))
            frequencies[list(content.unrotated_layers)] = 0
            array(rope, "inv_freq", frequencies)
            array(rope, "attention_scaling", np.full(n_layers, content.attention_scaling))
        token_group.attrs["prefill"] = np.int64(content.prompt)
        array(token_group, "ids", np.arange(tokens, dtype=np.int32))
        if content.spans:
            string = h5py.string_dtype("utf-8", 24)
            span = np.dtype([("name", string), ("kind", string), ("begin", np.int32), ("end", np.int32)])
            rows = [(name.encode(), kind.encode(), begin, end) for name, (kind, begin, end) in content.spans.items()]
            array(file, "spans", np.array(rows, span))
        if content.passes:
            ids = np.full(content.passes[-1][0], tokens, np.int32)  # of the instruction
            for end, first, last in content.passes:
                ids[end - (last - first) : end] = np.arange(first, last)
            reconstruction = file.create_group("reconstruction")
            reconstruction.attrs["boundary"] = np.int64(content.prompt)
            array(reconstruction, "ids", ids)
            array(reconstruction, "passes", np.array(content.passes, np.int32))
        layers = file.create_group("layers")
        for index in range(n_layers):
            layer = layers.create_group(f"{index:03d}")
            write_tensor(layer, "q", content.q[index], content.dtype)
            write_tensor(layer, "k", content.k[index], content.dtype)
            write_tensor(layer, "v", content.v[index], content.dtype)
            if content.wo is not None:
                write_tensor(layer, "wo", content.wo[index], content.dtype)
            if content.input_norm is not None:
                array(layer, "input_norm", content.input_norm[index].astype(np.float32))
            if content.passes:
                write_tensor(layer, "q_reconstruction", content.q_passes[index], content.dtype)
                write_tensor(layer, "k_reconstruction", content.k_passes[index], content.dtype)
            if content.q_positions is not None:
                array(layer, "q_positions", content.q_positions.astype(np.int32))
