"""Writes queries, keys and values of MLX-LM in the staging format (docs/staging.md).

    python tools/engines/mlx_lm_adapter.py MODEL PROMPT.txt FOLDER
    kvreplay convert FOLDER -o trace.h5

Interface: `use_attention_backend(backend)` and `backend.run(queries, *, keys, values, cache, scale, mask, sinks)` of
mlx_lm/models/base.py, ml-explore/mlx-lm, commit 0d3ec31. `queries` are [1, Hq, n, d] after RoPE. `keys` and `values`
are those of the cache after its update, [1, Hkv, T, d], of which the last n tokens are new. A pass calls it once for
each layer, in order. Rotating, quantised and batched caches are rejected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import use_attention_backend
from mlx_lm.models.cache import make_prompt_cache

from kvreplay.errors import Error
from kvreplay.staging import StagingWriter

CHUNK = 2048  # tokens of a pass


def to_numpy(array: Any) -> np.ndarray:
    """[heads, n, d], whose bfloat16 numpy receives by its bits."""
    import ml_dtypes

    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


class StagingBackend:
    """The attention of MLX, whose inputs are written."""

    def __init__(self, staged: StagingWriter, layers: int) -> None:
        self._staged = staged
        self._layers = layers
        self._calls = 0

    def run(self, queries: Any, *, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any) -> Any:
        new, total = queries.shape[2], keys.shape[2]
        if queries.shape[0] != 1 or sinks is not None or total != cache.offset:
            raise Error("MLX-LM", "attention", "one sequence in a cache that keeps all tokens, without sink logits",
                        f"queries {queries.shape}, keys {keys.shape}")  # fmt: skip
        layer = self._calls % self._layers
        self._calls += 1
        begin = total - new
        for name, tensor in (("q", queries[0]), ("k", keys[0, :, begin:]), ("v", values[0, :, begin:])):
            self._staged.add(layer, name, begin, to_numpy(tensor))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def stage(model: Any, config: dict[str, Any], name: str, ids: Sequence[int], folder: Path) -> None:
    """Writes a pass over `ids`, in chunks."""
    with StagingWriter(folder) as staged:
        backend = StagingBackend(staged, len(model.layers))
        cache = make_prompt_cache(model)
        dtype = "float32"
        with use_attention_backend(backend):
            for begin in range(0, len(ids), CHUNK):
                logits = model(mx.array(ids[begin : begin + CHUNK])[None], cache=cache)
                mx.eval(logits)
                dtype = str(logits.dtype).removeprefix("mlx.core.")
        staged.attributes("/", producer="mlx-lm")
        staged.model(config, name, dtype)
        staged.tokens(ids, len(ids))


def main() -> None:
    from mlx_lm import load

    model_path, prompt, folder = sys.argv[1:]
    model, tokenizer = load(model_path)
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    stage(
        model, config, Path(model_path).name, tokenizer.encode(Path(prompt).read_text(encoding="utf-8")), Path(folder)
    )


if __name__ == "__main__":
    main()
