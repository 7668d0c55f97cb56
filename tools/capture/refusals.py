"""Models whose attention a trace cannot describe. Each is rejected with the reason before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvreplay.errors import Error, Refusal

# A choice of layers: by the model's own numbers, those with full attention, or all (None).
Layers = frozenset[int] | Literal["full"] | None


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


def _additive_bias(config: Any) -> bool:
    always = {"bloom", "mpt"}  # their configurations need not say so
    named = _has(config, "alibi", "use_alibi", "position_bias_num_buckets", "relative_attention_num_buckets",
                 "keep_window_size")  # fmt: skip # the last one of Doge, whose bias depends on the values
    return named or getattr(config, "model_type", "") in always


def _shared_keys(config: Any) -> bool:
    of_loops = ("recurrent_kv_cache_mode", "last_loop") in _settings(config)
    return of_loops or _has(config, "use_cla", "cla_share_factor")


def _other_cache(config: Any) -> bool:
    return getattr(config, "model_type", "").endswith("_assistant")


def _compressed(config: Any) -> bool:
    return _has(config, "compress_rates")


def _patches(config: Any) -> bool:
    return _has(config, "patching_mode")


@dataclass(frozen=True)
class Obstacle:
    """A property of a model that a trace cannot represent, and the expected one."""

    name: str
    expected: str
    in_config: Callable[[Any], bool]


OBSTACLES = (
    Obstacle("encoder-decoder", "a decoder-only model", _encoder_decoder),
    Obstacle("ALiBi or other additive bias", "attention logits without additive bias", _additive_bias),
    Obstacle("keys and values shared between layers", "a separate KV cache for every layer", _shared_keys),
    Obstacle("keys and values of another model", "a model with its own KV cache", _other_cache),
    Obstacle("compressed entries", "a key and a value of each token", _compressed),
    Obstacle("keys of patches of tokens", "a key of each token", _patches),
)

ATTENTION_SINKS = "attention sinks"
NO_INTERFACE, INTERFACE = "no attention interface", "attention through transformers' AttentionInterface"


def is_sink(parameter: str) -> bool:
    """Whether a parameter of this name has sink logits."""
    return parameter in ("sinks", "sink", "attention_sink", "attention_sink_bias") or parameter.endswith("_sinks")


def refused(model: str, name: str, expected: str) -> Error:
    return Error(model, "model cannot be captured", expected, name, Refusal.INPUT)


def refuse_by_config(model: str, config: Any) -> None:
    """Raises for the first obstacle that the configuration shows."""
    for obstacle in OBSTACLES:
        if obstacle.in_config(config):
            raise refused(model, obstacle.name, obstacle.expected)


def refuse_missing_layers(asked: Layers, attending: Collection[int], numbers: str = "") -> None:
    """Raises where layers of --layers are none of those with attention; `numbers` are those of the model's layers."""
    if asked == "full" and not attending:
        raise Error("--layers full", "no such layer", "a model with full attention", "", Refusal.USAGE)
    if isinstance(asked, frozenset) and (missing := sorted(asked.difference(attending))):
        expected, more = "layers of this model with attention", missing[4:]
        raise Error(
            "--layers",
            "no such layer",
            expected + numbers,
            ", ".join(map(str, missing[:4])) + (f" and {len(more)} more" if more else ""),
            Refusal.USAGE,
        )


def refuse_by_structure(model: str, skeleton: Any) -> None:
    """Raises for obstacles that only the modules show; `skeleton` may be without weights."""
    if not skeleton._can_set_attn_implementation():
        raise refused(model, NO_INTERFACE, INTERFACE)
