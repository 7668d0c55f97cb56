"""Loading a model and its tokenizer: by hub name, from a folder, or from a GGUF file; onto one device or several."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache

from kvreplay.capture.model_options import ModelChoices
from kvreplay.capture.refusals import refuse_by_config, refuse_by_structure
from kvreplay.errors import Error, Refusal

# Where transformers looks for weights, in its order; an index lists shards.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
READ_AT_ONCE = 1 << 20  # bytes


@dataclass(frozen=True)
class Source:
    """Where a model comes from, as transformers' loaders take it."""

    name: str  # as it was asked for
    title: str  # what traces call it: no folder of anybody's
    location: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, model: str, revision: str | None = None) -> Source:
        path = Path(model)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise Error("--model", model, "a GGUF file", "no such file")
            return cls(model, path.stem, str(path.parent), {"gguf_file": path.name})
        if path.is_dir():
            return cls(model, path.resolve().name, model, {})
        if path.exists():
            raise Error("--model", model, "a hub name, a folder or a .gguf file", "another file")
        return cls(model, model, model, {"revision": revision} if revision else {})

    def _file(self, name: str) -> Path | None:
        """A file of the model, if it is on this machine."""
        if (path := Path(self.location)).is_dir():
            return path / name if (path / name).is_file() else None
        cached = try_to_load_from_cache(self.location, name, revision=self.options.get("revision"))
        return Path(cached) if isinstance(cached, str) else None

    def weights(self) -> list[Path]:
        """The files with the weights, by name; none for a hub model that has not been loaded yet."""
        names = [self.options["gguf_file"]] if "gguf_file" in self.options else WEIGHTS
        first = next((path for name in names if (path := self._file(name))), None)
        if first is None or first.suffix != ".json":
            return [first] if first else []
        return [
            first.parent / name for name in sorted(set(json.loads(first.read_text("utf-8"))["weight_map"].values()))
        ]

    def hash(self) -> str:
        """SHA-256 of the weights files, one after the other by name, hexadecimal; empty where none is at hand."""
        digest = hashlib.sha256()
        files = self.weights()
        for path in files:
            with open(path, "rb") as file:
                while piece := file.read(READ_AT_ONCE):
                    digest.update(piece)
        return digest.hexdigest() if files else ""


def _loading(source: Source, load: Any, **options: Any) -> Any:
    """Calls a loader of transformers; what it cannot load is one line."""
    try:
        return load(source.location, **source.options, **options)
    except ImportError as error:
        expected = "the packages of tools/setup build python"
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


def _device_map(wanted: str) -> str | dict[str, Any]:
    """auto, or the content of the JSON file."""
    if wanted == "auto":
        return wanted
    try:
        places = json.loads(Path(wanted).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Error("--device-map", wanted, "auto, or a JSON file", str(error)) from error
    if not isinstance(places, dict) or not all(isinstance(place, (int, str)) for place in places.values()):
        raise Error("--device-map", wanted, 'an object as {"model.layers.0": "disk"}', "other JSON")
    return places


def _quantisation(source: Source, choices: ModelChoices, config: Any) -> Any:
    """The configuration of --load for bitsandbytes; None: weights as stored."""
    if "gguf_file" in source.options:
        if choices.load:
            raise Error("--load", "not supported for GGUF files", "another model format", source.name, Refusal.USAGE)
        # Plain weights: packed ones would be computed in float32 whatever `dtype` says.
        return transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else None
    if not choices.load:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Error("--load", "missing package", "pip install bitsandbytes", "", Refusal.CAPABILITY)
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
        source = Source.parse(choices.model, choices.revision)
        trusted = {"trust_remote_code": choices.trust_remote_code}
        config = _loading(source, transformers.AutoConfig.from_pretrained, **trusted)
        dtype = str(config.get_text_config().dtype or "").removeprefix("torch.")
    return (_device(choices.device or "cpu").partition(":")[0], dtype) if dtype else None


def load_tokenizer(source: Source, **options: Any) -> Any:
    return _loading(source, transformers.AutoTokenizer.from_pretrained, **options)


def load(choices: ModelChoices) -> tuple[Any, Any]:
    """(model, tokenizer), the model in evaluation mode.

    Refused before any weights are read, wherever configuration or modules show that a trace cannot describe it.
    """
    source = Source.parse(choices.model, choices.revision)
    trusted = {"trust_remote_code": choices.trust_remote_code}
    device = _device(choices.device or "cpu")
    config = _loading(source, transformers.AutoConfig.from_pretrained, **trusted)
    refuse_by_config(source.name, config)
    try:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config, **trusted)
    except ValueError as error:
        raise Error(source.name, "model", "a decoder language model", type(config).__name__) from error
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
        options |= {"device_map": _device_map(choices.device_map), "offload_folder": offloaded.name}
    elif device != "cpu" or choices.load:
        options["device_map"] = {"": device}
    tokenizer = load_tokenizer(source, **trusted)
    model = _loading(source, transformers.AutoModelForCausalLM.from_pretrained, config=config, **options, **trusted)
    model.kvreplay_offloaded = offloaded  # removed with the model
    return model.eval(), tokenizer


def input_device(model: Any) -> torch.device:
    """Where token ids go: accelerate takes them from the CPU to a first layer that is on disk."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def decoder(model: Any) -> Any:
    """The base model: all layers, without the output head."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    return model.base_model if found is model else found


def head_dim(config: Any) -> int:
    """Of a decoder's configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
