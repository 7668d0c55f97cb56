#!/usr/bin/env python3
"""Small traces of model families, for tests of policies on their attention: two layers with random weights.

    traces/families.py [FAMILY...] -o DIR    # default: all families

A model has the default configuration of its type in transformers, which has the attention of a published checkpoint,
with fewer layers and experts, and a vocabulary of bytes. Its weights are random, so a trace says how policies treat
such shapes, and nothing about a model's text: it is marked synthetic. A trace has 512 prompt tokens, 16 more, and the
queries of the last 32 prompt tokens and of the continuation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvreplay.capture.capture import Choices, capture
from kvreplay.capture.prompts import Prompt

TEXT = "The narrowboat lay under the willows, and the log of the day was short: wind from the east, no rain. " * 6
PROMPT = TEXT[:512]
FULL, SLIDING, CHUNKED, LINEAR = (f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear"))
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
          "intermediate_size": 64, "first_k_dense_replace": 2}  # fmt: skip
# By name: type in transformers, and the settings that differ from its defaults.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8, "intermediate_size": 64}),  # Llama 3 8B
    "qwen3": ("qwen3", {"num_key_value_heads": 8, "intermediate_size": 64}),
    "gemma3": ("gemma3_text", {"layer_types": [SLIDING, FULL], "sliding_window": 128, "intermediate_size": 64}),
    "gemma4": ("gemma4_text", {"layer_types": [SLIDING, FULL], "sliding_window": 128, "intermediate_size": 64,
                               "vocab_size_per_layer_input": 256}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "layer_types": [SLIDING, FULL]}),  # 120b
    "llama4": ("llama4_text", {**EXPERTS, "intermediate_size_mlp": 64, "layer_types": [CHUNKED, FULL],
                               "no_rope_layers": [1, 0], "attention_chunk_size": 256}),
    "deepseek-v3": ("deepseek_v3", ROUTED),
    "deepseek-v3.2": ("deepseek_v32", {**ROUTED, "index_topk": 128}),
    "minicpm3": ("minicpm3", {"intermediate_size": 64}),
    "mimo-v2": ("mimo_v2_flash", {**ROUTED, "layer_types": [FULL, FULL]}),
    "qwen3-next": ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 1, "layer_types": [LINEAR, FULL],
                                  "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
}  # fmt: skip
SIZES = {"num_hidden_layers": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokenizer() -> Any:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def model_of(kind: str, settings: dict[str, Any]) -> Any:
    """A model with random weights in bfloat16."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # large enough for attention to differ between tokens
                weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
            elif name.endswith("sinks"):
                weight.normal_()
    return model


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    options.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    asked = options.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    for name in asked.families or FAMILIES:
        choices = Choices(f"{name} with random weights", generate=16, queries=32, force=True, synthetic=True)
        path = asked.output / f"{name}.h5"
        captured = capture(model_of(*FAMILIES[name]), tokenizer(), Prompt(name, PROMPT), path, choices, silent)
        print(f"{path}  {captured.layers} layers  {captured.query_heads} query / {captured.kv_heads} KV heads  "
              f"{path.stat().st_size / 1e6:.1f} MB", flush=True)  # fmt: skip
    return 0


class silent:  # noqa: N801 - a bar that shows nothing
    def __init__(self, layers: int) -> None: ...
    def update(self) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    sys.exit(main())
