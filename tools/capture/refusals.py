"""Models whose attention a trace cannot describe. Each is rejected with the reason before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvreplay.errors import Error, Refusal


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of a configuration, nested ones too."""
    values = config.to_dict() if hasattr(config, "to_dict") else config
    for key, value in values.items():
        yield key, value
        if isinstance(value, dict):
            yield from _settings(value)


def _has(config: Any, *names: str) -> bool:
    """Whether any of these settings is set to something."""
    return any(key in names and value not in (None, False, 0, [], {}) for key, value in _settings(config))


def _encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _latent_attention(config: Any) -> bool:
    return _has(config, "kv_lora_rank")


def _additive_bias(config: Any) -> bool:
    always = {"bloom", "mpt"}  # their configurations need not say so
    named = _has(config, "alibi", "use_alibi", "position_bias_num_buckets", "relative_attention_num_buckets")
    return named or getattr(config, "model_type", "") in always


def _chunked(config: Any) -> bool:
    types = [value for key, value in _settings(config) if key == "layer_types" and value]
    named = any("chunked_attention" in kinds for kinds in types)
    return named or (_has(config, "attention_chunk_size") and not types)


def _shared_keys(config: Any) -> bool:
    return _has(config, "num_kv_shared_layers", "use_cla", "cla_share_factor")


def _multimodal_rope(config: Any) -> bool:
    return _has(config, "mrope_section") or any(
        key in ("type", "rope_type") and value == "mrope" for key, value in _settings(config)
    )


def _varying_heads(config: Any) -> bool:
    heads = [
        v for k, v in _settings(config) if k in ("num_attention_heads", "num_key_value_heads") and isinstance(v, list)
    ]
    return any(len(set(counts)) > 1 for counts in heads)


@dataclass(frozen=True)
class Obstacle:
    """A property of a model that a trace cannot represent, and the expected one."""

    name: str
    expected: str
    in_config: Callable[[Any], bool]


OBSTACLES = (
    Obstacle("encoder-decoder", "a decoder-only model", _encoder_decoder),
    Obstacle("multi-head latent attention (MLA)", "separate keys and values for every KV head", _latent_attention),
    Obstacle("ALiBi or other additive bias", "attention logits without additive bias", _additive_bias),
    Obstacle("chunked attention", "full attention or a sliding window", _chunked),
    Obstacle("keys and values shared between layers", "a separate KV cache for every layer", _shared_keys),
    Obstacle("multimodal RoPE", "one position per token", _multimodal_rope),
    Obstacle("head counts that differ by layer", "the same heads in every layer", _varying_heads),
)

ATTENTION_SINKS = "attention sinks"
NO_INTERFACE = "no attention interface"


def refused(model: str, name: str, expected: str) -> Error:
    return Error(model, "model cannot be captured", expected, name, Refusal.INPUT)


def refuse_by_config(model: str, config: Any) -> None:
    """Raises for the first obstacle that the configuration shows."""
    for obstacle in OBSTACLES:
        if obstacle.in_config(config):
            raise refused(model, obstacle.name, obstacle.expected)


def refuse_by_structure(model: str, skeleton: Any) -> None:
    """Raises for obstacles that only the modules show; `skeleton` may be without weights."""
    if not skeleton._can_set_attn_implementation():
        raise refused(model, NO_INTERFACE, "attention through transformers' AttentionInterface")
    for name, _ in skeleton.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("sinks", "sink", "attention_sink", "attention_sink_bias") or leaf.endswith("_sinks"):
            raise refused(model, f"{ATTENTION_SINKS} ({name})", "a softmax over tokens alone")
