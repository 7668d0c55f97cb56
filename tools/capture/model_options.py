"""The options that choose a model and where it runs: one list for every command that runs a model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreplay.capture.source import Source
from kvreplay.errors import Error, Refusal
from kvreplay.program import on_terminal, say_notes

DTYPES = ("float16", "bfloat16", "float32")
LOADS = ("8bit", "4bit")
LATENT_QUERIES = 64  # of the prompt, stored by default where queries of latent attention have hundreds of components


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda[:N] or mps, found {text!r}")
    return text


def count(text: str, least: int = 1) -> int:
    """The type of an option."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, found {text!r}")
    return int(text)


def natural(text: str) -> int:
    """The type of an option."""
    return count(text, 0)


def members(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are named as fields of a data class."""
    return {name: value for name, value in vars(arguments).items() if name in kind.__dataclass_fields__}


@dataclass(frozen=True)
class ModelChoices:
    """Which model, and how it is loaded."""

    model: str  # a hub name, a folder or a GGUF file
    dtype: str = "auto"
    device: str | None = None  # None: cpu
    device_map: str | None = None  # auto, or a JSON file; instead of a device
    load: str | None = None  # 8bit or 4bit
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ModelChoices:
        """The choices from the parsed options."""
        return cls(**members(cls, arguments))

    @property
    def source(self) -> Source:
        """The place of the model."""
        return Source.parse(self.model, self.revision)

    def check(self) -> None:
        """Rejects missing files, files that are no model, and missing packages, without reading any weights."""
        self.source.require_model()
        if self.load and "gguf_file" in self.source.options:
            raise Error("--load", "not supported for GGUF files", "another model format", self.model, Refusal.USAGE)
        if self.load and importlib.util.find_spec("bitsandbytes") is None:
            raise Error("--load", "missing package", "pip install bitsandbytes", "", Refusal.CAPABILITY)
        if self.device_map:
            self.places()

    def places(self) -> str | dict[str, Any]:
        """The places of the modules: auto, or the content of the JSON file of --device-map."""
        wanted = self.device_map
        if wanted == "auto":
            return wanted
        try:
            places = json.loads(Path(wanted).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise Error("--device-map", wanted, "auto, or a JSON file", str(error)) from error
        if not isinstance(places, dict) or not all(isinstance(place, (int, str)) for place in places.values()):
            raise Error("--device-map", wanted, 'an object as {"model.layers.0": "disk"}', "other JSON")
        return places


def add_model_options(build: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds the options for the model and its loading: members of ModelChoices."""
    add: Callable[..., Any] = build.add_argument_group("model").add_argument
    add(
        "--model",
        required=required,
        metavar="NAME|DIR|FILE.gguf",
        help="name on the Hugging Face hub, folder, or GGUF file of the model",
    )
    add("--revision", metavar="NAME", help="branch, tag or commit on the hub (default: the main branch)")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code of the model's repository, for models that are not part of transformers (default: off)",
    )
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="data type of the computation (default: auto, that of the model)",
    )
    add("--load", choices=LOADS, help="quantise the weights on loading (default: none; needs bitsandbytes)")


def add_device_options(build: argparse.ArgumentParser) -> None:
    """Adds the options for the device (the other members of ModelChoices), the threads and the progress bar."""
    execution = build.add_argument_group("execution")
    place = execution.add_mutually_exclusive_group()
    place.add_argument(
        "--device",
        type=_device,
        metavar="auto|cpu|cuda[:N]|mps",
        help="device of the model; auto: cuda, else mps, else cpu (default: cpu)",
    )
    place.add_argument(
        "--device-map",
        metavar="auto|FILE",
        help="distribute the model over devices; auto: GPUs, then memory, then disk; FILE: JSON that maps modules "
        'to devices, as {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": "disk", ...}',
    )
    execution.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: all cores)")
    execution.add_argument(
        "--progress",
        choices=("auto", "always", "never"),
        default="auto",
        help="progress bar on stderr (default: auto, only on a terminal)",
    )


def take_user_defaults(command: str, arguments: argparse.Namespace) -> None:
    """Sets --device and --threads, if not given, to the values of the user's kvreplay.yaml, and prints these."""
    from kvreplay._engine import user_defaults

    taken, file = "", ""
    for option, read in (("device", _device), ("threads", count)):
        text, place = user_defaults().get(option, ("", ""))
        if not text or getattr(arguments, option) or (option == "device" and arguments.device_map):
            continue
        try:
            setattr(arguments, option, read(text))
        except argparse.ArgumentTypeError as problem:
            raise Error(f"{place}: {option}", str(problem), exit_code=Refusal.USAGE) from problem
        taken, file = f"{taken} --{option} {text}", place.rpartition(":")[0]
    say_notes(command, [f"defaults from {file}:{taken}"] if taken else [], arguments.quiet)


def say_loading(command: str, source: Source, arguments: argparse.Namespace) -> None:
    """Prints the name of the model, in a pipe as well: packages and weights take seconds to load."""
    say_notes(command, [f"loading {source.title}"], arguments.progress == "never")


def shows_progress(arguments: argparse.Namespace) -> bool:
    """Whether --progress, or the terminal, enables the progress bar."""
    return arguments.progress == "always" or (arguments.progress == "auto" and on_terminal())
