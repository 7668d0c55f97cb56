"""Captures a tiny random model of every causal type of transformers, and writes the results into docs/models.md.

    python tests/capture/model_types.py [TYPE...]    # only these types, without writing the page

Results are kept in out/models/VERSION and are not computed again. Remove a file to repeat its type.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import build, character_tokenizer

from kvreplay.capture.command import main as capture
from kvreplay.capture.refusals import refuse_by_config
from kvreplay.errors import Error

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
GENERATED = re.compile(r"(<!-- table -->\n).*(<!-- end of table -->)", re.DOTALL)
SECONDS = 300  # limit of one type
PROMPT = "The heron stood in the shallow water all the morning."
LAYERS = 4

# Replacements in default configurations, nested configurations included.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 24,
}
# The same of configurations with latent attention, whose head dimensions are sums of others.
LATENT: dict[str, int] = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
                          "qk_head_dim": 20, "v_head_dim": 10, "head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER: dict[str, int] = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
                           "indexer_compress_ratio": 4}  # fmt: skip
# Settings that the sizes above require, or that a checkpoint has and the defaults lack, by type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts_per_token": 2, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 121}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 24},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "inkling_text": {"unpadded_vocab_size": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "mistral4": {"head_dim": 16},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": (16, 48)},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def _tiny(defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings of a default configuration that a tiny model replaces."""
    settings: dict[str, Any] = {}
    sizes = {**SIZES, **(LATENT if defaults.get("kv_lora_rank") else {})}
    for key, value in defaults.items():
        if isinstance(value, dict) and "model_type" in value:
            settings[key] = {"model_type": value["model_type"], **_tiny(value)}
        elif key in sizes and (value is None or isinstance(value, int)):
            settings[key] = sizes[key]
        elif key in PER_LAYER and value:
            kinds = list(dict.fromkeys(value))
            settings[key] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    if "is_decoder" in defaults and not defaults.get("is_encoder_decoder"):
        settings["is_decoder"] = True
    return settings


def _merged(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings with others in their place, nested ones too."""
    merged = dict(settings)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(settings.get(key), dict)
        merged[key] = _merged(settings[key], value) if nested else value
    return merged


def configuration(kind: str) -> transformers.PretrainedConfig:
    """A type's default configuration, scaled down."""
    if kind == "gemma4_assistant":  # rejects its own default configuration
        defaults = {"text_config": transformers.AutoConfig.for_model("gemma4_text").to_dict()}
    else:
        defaults = transformers.AutoConfig.for_model(kind).to_dict()
    return transformers.AutoConfig.for_model(kind, **_merged(_tiny(defaults), OVERRIDES.get(kind, {})))


def _attempt(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and message of a capture."""
    words = ["--model", str(folder), "--prompt", PROMPT, "--generate", "4", "--verify", "--dtype", "float32"]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        code = capture([*words, "-o", str(folder / "trace.h5"), "--progress", "never", *options])
    return code, printed.getvalue().strip()


def _rule(message: str) -> str:
    """The found property in a message, without the layer in which it was found; of other errors, the exception."""
    if "internal error" in message:
        return message.splitlines()[-2].split(" - ")[0][:120]
    found = re.sub(
        r".*, found |^kvreplay: |layer \d+: | \([^()]*\)| in layer \d+",
        "",
        message.splitlines()[-1] if message else "no message",
    )
    return re.sub(r": [\d/.]+$", "", found)


def result_of(kind: str) -> str:
    """`captured`, `captured with --layers full`, `rejected: RULE` or `failed: REASON`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        not_built = ""
        config = None
        try:
            config = configuration(kind)
            refuse_by_config(kind, config)
            build(copy.deepcopy(config)).save_pretrained(folder)
        except Error as error:
            return f"rejected: {_rule(str(error))}"
        except Exception as error:  # the type, not kvreplay, decides what it raises
            not_built = f"not built: {type(error).__name__}: {' '.join(str(error).split()).split(' but ')[0][:100]}"
        if config is None:
            return not_built
        config.save_pretrained(folder)  # the default one: a decoder without its encoder would save another
        character_tokenizer().save_pretrained(folder)
        code, message = _attempt(folder)
        if not_built and "model cannot be captured" not in message:  # its configuration may suffice to reject it
            return not_built
        if code == 3 and "differ" in message and _attempt(folder, "--layers", "full")[0] == 0:
            return "captured with --layers full"
        if code == 0:
            return "captured"
        return f"{'rejected' if code == 3 else 'failed'}: {_rule(message)}"


def _child(kind: str, path: Path) -> None:
    transformers.logging.set_verbosity_error()
    try:
        result = result_of(kind)
    except BaseException as error:
        result = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    path.write_text(json.dumps(result))


def results(kinds: Sequence[str], folder: Path) -> dict[str, str]:
    """Captures each type in a separate process, so that a crash ends one type alone."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        path = folder / f"{kind}.json"
        if path.exists():
            continue
        child = context.Process(target=_child, args=(kind, path))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        if not path.exists():
            path.write_text(json.dumps(f"failed: no result after {SECONDS} s, or exit code {child.exitcode}"))
        print(kind, json.loads(path.read_text()), flush=True)
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


def table(found: dict[str, str]) -> str:
    counts = Counter(re.sub(r"(failed|not built):.*", r"\1", result) for result in found.values())
    captured = sum(count for result, count in counts.items() if result.startswith("captured"))
    lines = [f"transformers {transformers.__version__}: {captured} of {len(found)} types are captured.", ""]
    lines += ["| result | types |", "| --- | --- |"]
    lines += [f"| {result} | {count} |" for result, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    lines += ["", "| type | result |", "| --- | --- |"]
    return "\n".join(lines + [f"| `{kind}` | {result} |" for kind, result in sorted(found.items())]) + "\n"


def main(kinds: Sequence[str]) -> None:
    every = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = results(kinds or list(every), ROOT / "out" / "models" / transformers.__version__)
    if not kinds:
        PAGE.write_text(GENERATED.sub(lambda part: part[1] + table(found) + part[2], PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
