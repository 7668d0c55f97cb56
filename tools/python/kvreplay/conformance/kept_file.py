"""Kept positions of another program: a safetensors or npz file with `positions` [L,H,B], -1 padded, and metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvreplay.conformance import KEPT_SUFFIXES
from kvreplay.errors import Error
from kvreplay.kept_rows import Rows

POSITIONS = "positions"
METADATA = "metadata"  # of npz: a JSON object as text
PADDING = -1


@dataclass(frozen=True)
class KeptFile:
    """`rows` [n][H] in the order of the treated layers and of the heads of the trace, each as the file orders it."""

    rows: Rows
    metadata: dict[str, Any]


def read_kept(path: Path, layers: Sequence[int], rows: int, prompt: int) -> KeptFile:
    """The kept positions in a file. `layers`: the model's own numbers of the treated layers, which are expected in this
    order unless the metadata has another; `rows`: rows of a layer in the trace's replay; `prompt`: positions are below.
    Metadata may list `layers`, the model's own numbers along the first axis, and `heads`, the head of each row."""
    positions, metadata = _contents(path)
    if positions.ndim != 3 or not np.issubdtype(positions.dtype, np.integer):
        found = f"{positions.dtype} {list(positions.shape)}"
        raise Error(f"{path}:{POSITIONS}", "array", "int32 [layers, heads, slots]", found)
    own = _numbers(path, metadata, "layers", positions.shape[0], layers)
    heads = _numbers(path, metadata, "heads", positions.shape[1], range(positions.shape[1]))
    if missing := [layer for layer in layers if layer not in own]:
        expected = f"the treated layers {_listed(layers)}"
        raise Error(f"{path}:layers", "layers", expected, f"no layer {missing[0]}")
    if sorted(heads) != list(range(len(heads))):
        raise Error(f"{path}:heads", "heads", f"each of 0 to {len(heads) - 1} once", _listed(heads))
    if len(heads) % rows:
        raise Error(f"{path}:{POSITIONS}", "rows of a layer", f"{rows}, or a multiple", str(len(heads)))
    found = [
        [_row(path, positions, own.index(layer), heads.index(head), prompt) for head in range(len(heads))]
        for layer in layers
    ]
    return KeptFile(found, metadata)


def _contents(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The array of positions and the metadata."""
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            text = arrays.get(METADATA, np.array("{}")).item()
            metadata = json.loads(text)
        else:
            from safetensors import safe_open

            with safe_open(path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}
                metadata = {name: _json(text) for name, text in (file.metadata() or {}).items()}
    except ModuleNotFoundError:
        raise
    except Exception as problem:  # the readers of both formats raise many kinds
        raise Error(str(path), "unreadable", f"a file of {' or '.join(KEPT_SUFFIXES)}", str(problem)) from problem
    if POSITIONS not in arrays:
        raise Error(str(path), "arrays", POSITIONS, ", ".join(arrays) or "none")
    if not isinstance(metadata, Mapping):
        raise Error(f"{path}:{METADATA}", "kind", "a JSON object", type(metadata).__name__)
    return arrays[POSITIONS], dict(metadata)


def _json(text: str) -> Any:
    """The value of a JSON text; another text as it is: safetensors has texts alone."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _numbers(path: Path, metadata: Mapping[str, Any], name: str, count: int, otherwise: Sequence[int]) -> list[int]:
    """The list `name` of the metadata, one number for each entry of an axis of length `count`."""
    listed = metadata.get(name, list(otherwise))
    is_list = isinstance(listed, list) and all(type(one) is int for one in listed)
    if not is_list or len(listed) != count or len(set(listed)) != count:
        expected = f"{count} different numbers, one for each entry of positions"
        raise Error(f"{path}:{name}", "metadata", expected, _listed(listed) if is_list else json.dumps(listed)[:60])
    return listed


def _listed(numbers: Sequence[int]) -> str:
    more = " …" if len(numbers) > 12 else ""
    return ", ".join(map(str, list(numbers)[:12])) + more


def _row(path: Path, positions: np.ndarray, layer: int, head: int, prompt: int) -> np.ndarray:
    """The positions of a row without padding, in the order of the file."""
    row = positions[layer, head]
    row = row[row != PADDING].astype(np.int64)
    where = f"{path}:{POSITIONS}[{layer}, {head}]"
    if len(outside := row[(row < 0) | (row >= prompt)]):
        raise Error(where, "position", f"0 to {prompt - 1}, or {PADDING} as padding", str(outside[0]))
    values, counts = np.unique(row, return_counts=True)
    if (counts > 1).any():
        raise Error(where, "positions", "each once", f"{values[counts > 1][0]} twice")
    return row
