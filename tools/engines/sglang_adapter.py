r"""Writes queries, keys and values of SGLang in the staging format (docs/staging.md).

    python -m sglang.launch_server --model-path MODEL --tp 1 --max-running-requests 1 --disable-cuda-graph \
      --disable-radix-cache --skip-server-warmup --forward-hooks "$(cat hooks.json)"

    hooks.json: [{"name": "kvreplay", "target_modules": ["model.layers.*.self_attn.attn"],
                  "hook_type": "forward_pre", "with_kwargs": true, "hook_factory": "sglang_adapter:staging_hook",
                  "config": {"folder": "staged", "layers": 30}}]

with the folder of this file on PYTHONPATH. Send one request. Its client then writes the metadata:

    metadata = StagedMetadata("staged")  # kvreplay.staging
    metadata.attributes("/", producer="sglang")
    metadata.model(config, "MODEL", "bfloat16")  # of config.json
    metadata.tokens(ids, prompt)  # of the prompt and of all generated tokens but the last
    metadata.finish()

Interface (sgl-project/sglang): python/sglang/srt/model_executor/hook_manager.py, commit 04d01a5, calls
`hook_factory(config)` and registers the hook with PyTorch; RadixAttention.forward(q, k, v, forward_batch, ...) of
python/sglang/srt/layers/radix_attention.py, commit 0088621, is called after RoPE with rows of tokens: q is
[n, Hq * d] or [n, Hq, d], k and v likewise. `forward_batch.positions` are the positions of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvreplay.errors import Error
from kvreplay.staging import StagingWriter
from kvreplay.trace import REAL_TYPES


def by_heads(rows: Any, heads: int) -> np.ndarray:
    """[heads, n, d] of a tensor [n, heads * d] or [n, heads, d]."""
    import torch

    tensor = rows.detach().reshape(rows.shape[0], heads, -1).transpose(0, 1).contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(REAL_TYPES["bfloat16"])
    return tensor.numpy()


def staging_hook(config: Mapping[str, Any]) -> Callable[[Any, tuple, dict], None]:
    """The hook of all layers. `config`: the folder, and the number of layers, after the last of which a file is
    written."""
    staged = StagingWriter(config["folder"])
    last = int(config["layers"]) - 1

    def hook(module: Any, arguments: tuple, keywords: dict) -> None:
        names = ("q", "k", "v", "forward_batch")
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        positions = given["forward_batch"].positions.tolist()
        begin = positions[0]
        if positions != list(range(begin, begin + len(positions))):
            raise Error("SGLang", "positions", "those of one sequence: --max-running-requests 1", str(positions[:8]))
        heads = {"q": module.tp_q_head_num, "k": module.tp_k_head_num, "v": module.tp_v_head_num}
        for name in ("q", "k", "v"):
            staged.add(module.layer_id, name, begin, by_heads(given[name][: len(positions)], heads[name]))
        if module.layer_id == last:
            staged.flush()

    return hook
