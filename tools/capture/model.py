"""Loading a model and its tokenizer: by hub name, from a folder, or from a GGUF file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvreplay.capture.refusals import refuse_by_config, refuse_by_structure
from kvreplay.errors import Error, Refusal


@dataclass(frozen=True)
class Source:
    """Where a model comes from, as transformers' loaders take it."""

    name: str  # as it was asked for
    title: str  # what traces call it: no folder of anybody's
    location: str
    options: dict[str, Any]
    weights: Path | None  # the one file that holds all weights, if there is one

    @classmethod
    def parse(cls, model: str) -> Source:
        path = Path(model)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise Error("--model", model, "a GGUF file", "no such file")
            return cls(model, path.stem, str(path.parent), {"gguf_file": path.name}, path)
        if path.is_dir():
            weights = sorted(path.glob("*.safetensors"))
            return cls(model, path.resolve().name, model, {}, weights[0] if len(weights) == 1 else None)
        if path.exists():
            raise Error("--model", model, "a hub name, a folder or a .gguf file", "another kind of file")
        return cls(model, model, model, {}, None)

    def hash(self) -> str:
        """SHA-256 of the weights file, hexadecimal; empty where the weights are not one file at hand."""
        if self.weights is None:
            return ""
        with open(self.weights, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _loading(source: Source, load: Any, **options: Any) -> Any:
    """Calls a loader of transformers; what it cannot load is one line."""
    try:
        return load(source.location, **source.options, **options)
    except ImportError as error:
        expected = "what tools/setup build python installs"
        raise Error(source.name, "package", expected, str(error).splitlines()[0], Refusal.CAPABILITY) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Error(source.name, "model", "one that transformers can load", reason, Refusal.INPUT) from error


def load(source: Source, dtype: str) -> tuple[Any, Any]:
    """(model, tokenizer), the model in evaluation mode; `dtype` is auto, float16, bfloat16 or float32.

    Refused before any weights are read, wherever configuration or modules show that a trace cannot describe it.
    """
    config = _loading(source, transformers.AutoConfig.from_pretrained)
    refuse_by_config(source.name, config)
    try:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise Error(source.name, "model", "a decoder language model", type(config).__name__) from error
    refuse_by_structure(source.name, skeleton)
    # sdpa has no softcap: transformers 5.0 would generate without it, and say nothing.
    softcapped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    options: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "attn_implementation": "sdpa" if skeleton._supports_sdpa and not softcapped else "eager",
    }
    if "gguf_file" in source.options and hasattr(transformers, "GgufConfig"):
        # Plain weights: packed ones would be computed in float32 whatever `dtype` says.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = _loading(source, transformers.AutoTokenizer.from_pretrained)
    model = _loading(source, transformers.AutoModelForCausalLM.from_pretrained, config=config, **options).eval()
    return model, tokenizer


def decoder(model: Any) -> Any:
    """The base model: all layers, without the output head."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    return model.base_model if found is model else found


def generate(model: Any, ids: list[int], count: int) -> list[int]:
    """`count` tokens by greedy search; the end-of-text token is not chosen before."""
    if count == 0:
        return []
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            min_new_tokens=count,
            max_new_tokens=count,
            repetition_penalty=1.0,
        )
    return output[0, len(ids) :].tolist()
