"""Tiny language models with random weights, saved to folders as transformers saves any model."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

transformers.logging.disable_progress_bar()  # of saving: tests read what the programs under test say on stderr

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=16),
    "llama_yarn": transformers.LlamaConfig(
        **SIZES,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "one_kv_head": transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, head_dim=16),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=24),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=24, layer_types=LOCAL_AND_GLOBAL, attn_logit_softcapping=5.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "phi3": transformers.Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
    "glm": transformers.GlmConfig(
        **SIZES,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "smollm3": transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),
    "gpt_bigcode": transformers.GPTBigCodeConfig(
        vocab_size=128,
        n_positions=256,
        n_embd=48,
        n_layer=4,
        n_head=4,
        multi_query=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
}

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
LATENT = {**SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 10}  # fmt: skip
# Models whose traces need version 2 of the format.
VERSION_2: dict[str, transformers.PretrainedConfig] = {
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=24
    ),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT, **EXPERTS, first_k_dense_replace=2),
    "deepseek_v3_halves": transformers.DeepseekV3Config(
        **LATENT, **EXPERTS, first_k_dense_replace=2, rope_interleave=False
    ),
    "minicpm3": transformers.MiniCPM3Config(**LATENT),
    "llama4": transformers.Llama4TextConfig(
        **SIZES,
        head_dim=16,
        attention_chunk_size=32,
        intermediate_size_mlp=64,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0] * 2,
    ),
}


def character_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character, so that encoding is the exact inverse of decoding; the last ones stand in for any id."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *string.printable[:95], "\n"]
    vocabulary += [chr(0x3B1 + extra) for extra in range(SIZES["vocab_size"] - len(vocabulary))]
    words = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for message in messages %}[user] {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[reply] {% endif %}"
    )
    return fast


def build(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A model of this configuration in evaluation mode, with weights large enough for attention to have a shape.

    A multimodal model is whole, as on the hub.
    """
    torch.manual_seed(seed)
    multimodal = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    loader = transformers.AutoModelForMultimodalLM if multimodal else transformers.AutoModelForCausalLM
    model = loader.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5 if "emb" not in name else 1.0)
            if name.endswith("sinks"):
                weight.normal_()
    return model


def save(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A folder that `--model` takes."""
    model = build({**CONFIGS, **VERSION_2}[name]).to(dtype)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
