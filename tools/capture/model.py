"""Loading a model and its tokenizer: by hub name, from a folder, or from a GGUF file; onto one device or several."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers

from kvreplay.capture.model_options import ModelChoices
from kvreplay.capture.refusals import Layers, refuse_by_config, refuse_by_structure, refuse_missing_layers
from kvreplay.capture.source import Source
from kvreplay.errors import Error, Refusal


def _loading(source: Source, load: Any, **options: Any) -> Any:
    """Calls a loader of transformers; what it cannot load is one line."""
    try:
        return load(source.location, **source.options, **options)
    except ImportError as error:
        expected = "the packages of pip install 'kvreplay[capture]'"
        raise Error(source.name, "missing package", expected, str(error).splitlines()[0], Refusal.CAPABILITY) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "trust_remote_code" in str(error):
            expected = "a model of transformers; use --trust-remote-code to run code of the repository"
            raise Error(source.name, "model", expected, "a model with custom code") from error
        raise Error(
            source.name,
            "model cannot be loaded",
            "a hub name or folder of a model that transformers supports",
            reason,
            Refusal.INPUT,
        ) from error


def _device(wanted: str) -> str:
    """The device of --device; a device that is not there is one line."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, number = wanted.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(number or 0) >= count:
        raise Error(
            "--device", wanted, "a device that PyTorch detects", f"{count} devices of kind {kind}", Refusal.CAPABILITY
        )
    return wanted


def _quantisation(source: Source, choices: ModelChoices, config: Any) -> Any:
    """The configuration of --load for bitsandbytes; None: weights as stored."""
    if "gguf_file" in source.options:
        # Plain weights: packed ones would be computed in float32 whatever `dtype` says.
        return transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else None
    if not choices.load:
        return None
    if choices.load == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    computed = config.get_text_config().dtype if choices.dtype == "auto" else getattr(torch, choices.dtype)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed or torch.float32
    )


def placement(choices: ModelChoices) -> tuple[str, str] | None:
    """Kind of device and type that the loaded model will have; None if they are known only after loading."""
    if choices.device_map or choices.load:
        return None
    dtype = choices.dtype
    if dtype == "auto":
        source = choices.source
        trusted = {"trust_remote_code": choices.trust_remote_code}
        config = _loading(source, transformers.AutoConfig.from_pretrained, **trusted)
        dtype = str(config.get_text_config().dtype or "").removeprefix("torch.")
    return (_device(choices.device or "cpu").partition(":")[0], dtype) if dtype else None


def _skeleton(name: str, config: Any, trusted: dict[str, Any]) -> tuple[Any, Any]:
    """The model without weights, and the class that loads it. Multimodal models are taken for their text."""
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoModelForMultimodalLM):
        try:
            with torch.device("meta"):
                return loader.from_config(config, **trusted), loader
        except ValueError as error:
            reason = error
    raise Error(name, "model", "a decoder language model", type(config).__name__) from reason


def _media_tokens(config: Any) -> dict[int, str]:
    """The token ids that stand for images, videos and sound, each with its name in the configuration."""
    names = [f"{medium}_token_{kind}" for medium in ("image", "video", "audio") for kind in ("id", "index")]
    return {number: name for name in names if isinstance(number := getattr(config, name, None), int)}


def load_tokenizer(source: Source, **options: Any) -> Any:
    return _loading(source, transformers.AutoTokenizer.from_pretrained, **options)


def load(
    choices: ModelChoices, layers: Layers = None, check_tokenizer: Callable[[Any], None] = lambda tokenizer: None
) -> tuple[Any, Any]:
    """(model, tokenizer), the model in evaluation mode.

    Refused before any weights are read, wherever configuration or modules show that a trace cannot describe it or that
    it has fewer `layers`, or `check_tokenizer` rejects the tokenizer.
    """
    choices.check()
    source = choices.source
    trusted = {"trust_remote_code": choices.trust_remote_code}
    device = _device(choices.device or "cpu")
    config = _loading(source, transformers.AutoConfig.from_pretrained, **trusted)
    refuse_by_config(source.name, config)
    if isinstance(layers, frozenset):
        count = config.get_text_config().num_hidden_layers
        refuse_missing_layers(layers, range(count), f", of 0 to {count - 1}")
    skeleton, model_class = _skeleton(source.name, config, trusted)
    refuse_by_structure(source.name, skeleton)
    # sdpa has no softcap: transformers 5.0 would generate without it, and say nothing.
    softcapped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    options: dict[str, Any] = {
        "dtype": choices.dtype if choices.dtype == "auto" else getattr(torch, choices.dtype),
        "attn_implementation": "sdpa" if skeleton._supports_sdpa and not softcapped else "eager",
    }
    if quantisation := _quantisation(source, choices, config):
        options["quantization_config"] = quantisation
    offloaded = None
    if choices.device_map:
        offloaded = tempfile.TemporaryDirectory(prefix="kvreplay-")  # weights whose form on disk is another
        options |= {"device_map": choices.places(), "offload_folder": offloaded.name}
    elif device != "cpu" or choices.load:
        options["device_map"] = {"": device}
    tokenizer = load_tokenizer(source, **trusted)
    check_tokenizer(tokenizer)
    model = _loading(source, model_class.from_pretrained, config=config, **options, **trusted)
    model.kvreplay_offloaded = offloaded  # removed with the model
    model.kvreplay_media_tokens = _media_tokens(config)
    return model.eval(), tokenizer


def input_device(model: Any) -> torch.device:
    """Where token ids go: accelerate takes them from the CPU to a first layer that is on disk."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def decoder(model: Any) -> Any:
    """The base model: all layers, without the output head."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    is_model = isinstance(found, transformers.PreTrainedModel) and found is not model
    return found if is_model else model.base_model  # some have a projection of this name


def cache_name(base: Any) -> str:
    """The name of a decoder's cache in its arguments and its output."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer. A decoder whose layers differ has no common values: reading them raises."""
    return (
        list(config.per_layer_config)
        if getattr(config, "is_heterogeneous", False)
        else [config] * config.num_hidden_layers
    )


def head_dim(config: Any) -> int:
    """The largest head dimension of a decoder's layers."""
    return max(
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layer_configs(config)
    )


def generate(model: Any, ids: list[int], count: int, chunk: int | None = None) -> list[int]:
    """`count` tokens by greedy search, the prompt in chunks; the end-of-text token is not chosen before."""
    if count == 0:
        return []
    prompt = torch.tensor([ids], device=input_device(model))
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            min_new_tokens=count,
            max_new_tokens=count,
            repetition_penalty=1.0,
            prefill_chunk_size=chunk,
        )
    return output[0, len(ids) :].tolist()
