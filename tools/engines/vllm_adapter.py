"""Writes queries, keys and values of vLLM in the staging format (docs/staging.md).

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    import vllm_adapter
    staged = StagingWriter("staged")  # kvreplay.staging
    vllm_adapter.register(staged)
    llm = LLM(model, attention_backend="CUSTOM", enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1)
    request = llm.generate(prompt, SamplingParams(max_tokens=32))[0]
    ids = [*request.prompt_token_ids, *request.outputs[0].token_ids[:-1]]
    staged.attributes("/", producer="vllm")
    staged.model(llm.llm_engine.model_config.hf_config.to_dict(), "MODEL", "bfloat16")
    staged.tokens(ids, len(request.prompt_token_ids))
    staged.finish()

Interface (vllm-project/vllm): `register_backend(AttentionBackendEnum.CUSTOM, PATH)` of
vllm/v1/attention/backends/registry.py, commit 0033bf0; a backend's `get_impl_cls()` is a class whose
`forward(layer, query, key, value, kv_cache, attn_metadata, output, ...)` receives [tokens, heads, d] after RoPE
(vllm/v1/attention/backends/flash_attn.py, commit 0084b78). `attn_metadata` has num_actual_tokens, without padding, and
seq_lens, with the tokens of this pass; it is None while vLLM measures memory. `layer.layer_name` has the layer's
number.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvreplay.errors import Error
from kvreplay.staging import StagingWriter
from kvreplay.trace import REAL_TYPES

_staged: StagingWriter | None = None


def by_heads(rows: Any) -> np.ndarray:
    """[heads, n, d] of a tensor [n, heads, d]."""
    import torch

    tensor = rows.detach().transpose(0, 1).contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(REAL_TYPES["bfloat16"])
    return tensor.numpy()


def recording(implementation: type) -> type:
    """A subclass of a backend's implementation that writes its inputs."""

    class Recording(implementation):
        def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
                    *others: Any, **named: Any) -> Any:  # fmt: skip
            if attn_metadata is not None and _staged is not None:
                record(_staged, layer.layer_name, query, key, value, attn_metadata)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *others, **named)

    return Recording


def record(staged: StagingWriter, name: str, query: Any, key: Any, value: Any, metadata: Any) -> None:
    """Writes the tokens of a pass of one request."""
    if len(metadata.seq_lens) != 1:
        raise Error("vLLM", "requests", "one in a pass: max_num_seqs=1", str(len(metadata.seq_lens)))
    number = re.search(r"layers\.(\d+)\.", name)
    if number is None:
        raise Error("vLLM", "layer", "a name with layers.NUMBER", name)
    n = int(metadata.num_actual_tokens)
    begin = int(metadata.seq_lens[0]) - n
    for tensor, rows in (("q", query), ("k", key), ("v", value)):
        staged.add(int(number[1]), tensor, begin, by_heads(rows[:n]))


def register(staged: StagingWriter) -> None:
    """Makes CUSTOM the platform's usual backend with recording."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    global _staged
    _staged = staged
    usual = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.FLASH_ATTN
    base = usual.get_class()
    implementation = recording(base.get_impl_cls())

    class StagingBackend(base):
        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

    globals()["StagingBackend"] = StagingBackend
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.StagingBackend")
