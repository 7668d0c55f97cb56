"""`tools/corpus`: captures the corpus's prompts or RULER's tasks, one trace each, and lists the traces.

Existing traces are kept.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kvreplay.capture import ruler
from kvreplay.capture.command import finished, quiet_libraries
from kvreplay.capture.corpus_prompts import KINDS, full_prompts, small_prompts
from kvreplay.capture.prompts import Prompt, encode
from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, names, on_terminal
from kvreplay.trace import PRODUCER, Trace

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "model" / "smollm2-135m-instruct.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
COMPUTED_IN = "float32"  # CPUs without bfloat16 products take a hundred times as long in that
STORED_IN = "bfloat16"
GENERATED = 32  # tokens of every continuation
RULER_GENERATED = 64  # with --ruler: the answers, then greedy text
RULER_LENGTHS = (500, 1000, 2000, 4000)
COLUMNS = (
    "name", "kind", "prompt_tokens", "continuation_tokens", "needle_depth", "source", "trace_hash", "file_hash", "bytes"
)  # fmt: skip
WRITTEN_BY_US = re.compile(r"kvreplay \S+, tools/corpus ([0-9a-f]{32})")  # the producer of a trace, and its source
DESCRIPTION = f"""Captures {MODEL_NAME} on prompts of six kinds, made from the texts in traces/corpus, or on RULER's
synthetic tasks, and lists the traces in corpus.csv. Existing traces are kept."""


@dataclass(frozen=True)
class Settings:
    """How the prompts of a call become traces."""

    chat: bool  # inside the model's chat template
    generated: int  # tokens of every continuation


def say(line: str) -> None:
    print(f"corpus: {line}", file=sys.stderr, flush=True)


def lengths(text: str) -> tuple[int, ...]:
    """1000,2000 -> (1000, 2000)."""
    words = names(text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers of tokens like 1000,2000, found {text!r}")
    return tuple(sorted({int(word) for word in words}))


def parser() -> Parser:
    build = Parser(prog="tools/corpus", description=DESCRIPTION, allow_abbrev=False)
    add = build.add_argument
    add(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"some kinds of prompts: {', '.join(KINDS)}; with --ruler some tasks: {', '.join(ruler.TASKS)} "
        "(default: all)",
    )
    corpora = build.add_mutually_exclusive_group()
    corpora.add_argument(
        "--small", action="store_true", help="prompts of some 250 to 500 tokens, not of 1,000 to 4,000"
    )
    corpora.add_argument(
        "--ruler",
        action="store_true",
        help=f"RULER's synthetic tasks as plain text, continued by {RULER_GENERATED} tokens: the answers, then greedy "
        "text; answers.jsonl lists the answers",
    )
    add(
        "--tokens",
        type=lengths,
        metavar="N,...",
        help=f"lengths of the prompts of --ruler, in tokens (default: {','.join(map(str, RULER_LENGTHS))})",
    )
    add(
        "-o",
        dest="output",
        type=Path,
        metavar="DIR",
        help="the folder of the traces (default: build/corpus, with --small build/corpus-small, with --ruler "
        "build/corpus-ruler)",
    )
    return build


def kind(prompt: Prompt) -> str:
    return prompt.name.partition("-")[0]


def chosen(kinds: Sequence[str], small: bool) -> list[Prompt]:
    """The prompts of these kinds; of all if none is named."""
    for name in kinds:
        if name not in KINDS:
            raise Error("corpus", "kind", f"one of {', '.join(KINDS)}", name, Refusal.USAGE)
    return [prompt for prompt in (small_prompts() if small else full_prompts()) if not kinds or kind(prompt) in kinds]


def ruler_chosen(tasks: Sequence[str], tokens: Sequence[int]) -> list[Prompt]:
    """The prompts of these tasks at these lengths of the model's tokenizer; of all tasks if none is named."""
    for name in tasks:
        if name not in ruler.TASKS:
            raise Error("corpus", "task", f"one of {', '.join(ruler.TASKS)}", name, Refusal.USAGE)
    quiet_libraries(on_terminal())
    from kvreplay.capture.model import load_tokenizer
    from kvreplay.capture.source import Source

    tokenizer = load_tokenizer(Source.parse(str(MODEL)))
    return ruler.ruler_prompts(tokens, tasks or list(ruler.TASKS), lambda text: len(tokenizer(text).input_ids))


def source_digest(prompt: Prompt, model_hash: str, settings: Settings) -> str:
    """XXH3-128 of all that a trace is made from: the prompt's parts, the model's weights and the settings."""
    made_from = [asdict(prompt), model_hash, MODEL_NAME, COMPUTED_IN, STORED_IN, settings.generated]
    if not settings.chat:
        made_from.append("plain text")
    return xxhash.xxh3_128_hexdigest(json.dumps(made_from).encode())


def producer(source: str) -> str:
    """The producer attribute of a trace. It contains the trace's source, which identifies a trace that no list has."""
    return f"{PRODUCER}, tools/corpus {source}"


def written_source(path: Path) -> str | None:
    """The source of a trace that this program wrote, of any version; None: the file is no such trace."""
    try:
        with Trace(path) as trace:
            found = WRITTEN_BY_US.fullmatch(trace.attribute("/", "producer"))
    except Error:
        return None
    return found and found.group(1)


def file_hash(path: Path) -> str:
    """XXH3-128 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def unchanged(path: Path, row: dict[str, str]) -> bool:
    """Whether the file matches its row."""
    try:
        return row["bytes"] == str(path.stat().st_size) and row["file_hash"] == file_hash(path)
    except OSError:
        return False


def needle_depth(trace: Trace) -> str:
    """Where in the context the needle begins, in tokens, as a fraction; empty without a needle."""
    spans = {span.kind: span for span in trace.spans}
    if "needle" not in spans:
        return ""
    context = spans["context"]
    return f"{(spans['needle'].begin - context.begin) / (context.end - context.begin):.3f}"


def manifest_row(path: Path, prompt: Prompt, source: str) -> dict[str, str]:
    """One line of the list."""
    with Trace(path) as trace:
        values = (
            prompt.name,
            kind(prompt),
            trace.prompt,
            trace.tokens - trace.prompt,
            needle_depth(trace),
            source,
            trace.hash,
            file_hash(path),
            path.stat().st_size,
        )
    return dict(zip(COLUMNS, map(str, values), strict=True))


class Manifest:
    """corpus.csv: a row for each trace that the folder holds, at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "corpus.csv"
        self.listed = self._read()
        self.rows = {
            name: row
            for name, row in self.listed.items()
            if row["source"] and row["trace_hash"] and unchanged(self.path(name), row)
        }
        self.written = self.rows == self.listed

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.h5"

    def holds(self, name: str, source: str) -> bool:
        return name in self.rows and self.rows[name]["source"] == source

    def unlisted(self, name: str) -> bool:
        """Whether the file exists without a row, as after a call that was killed between the trace and its row."""
        return name not in self.listed and self.path(name).exists()

    def refuse_foreign(self, name: str) -> None:
        """Rejects a file that is neither listed nor written by this program: another program's file."""
        if self.unlisted(name) and written_source(self.path(name)) is None:
            expected = f"no file of this name, or a file listed in {self.place} or written by this program"
            raise Error(str(self.path(name)), "output", expected, "another file", Refusal.USAGE)

    def adopt(self, prompt: Prompt, source: str) -> None:
        """A trace without a row gets one if it is whole and of this source."""
        path = self.path(prompt.name)
        if not self.unlisted(prompt.name) or written_source(path) != source:
            return
        with Trace(path) as trace:
            if trace.problems():
                return
        self.add(prompt, source)
        say(f"{path.name} exists, is complete and matches its prompt: listed, not captured again")

    def drop(self, name: str) -> None:
        """Deletes the row of a trace, then the trace."""
        self.rows.pop(name, None)
        self.write()
        self.path(name).unlink(missing_ok=True)

    def add(self, prompt: Prompt, source: str) -> None:
        self.rows[prompt.name] = manifest_row(self.path(prompt.name), prompt, source)
        self.write()

    def write(self) -> None:
        """Writes the rows in the order of the corpus, then those of RULER."""
        order = [prompt.name for small in (False, True) for prompt in chosen((), small)]
        names = [*filter(self.rows.__contains__, order), *sorted(self.rows.keys() - set(order), key=ruler.place)]
        partial = self.place.with_name(self.place.name + ".partial")
        with open(partial, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(self.rows[name] for name in names)
        os.replace(partial, self.place)
        self.written = True

    def _read(self) -> dict[str, dict[str, str]]:
        """The rows by name. A missing column is empty; there are no rows without a column of names."""
        try:
            with open(self.place, newline="", encoding="utf-8") as file:
                table = csv.DictReader(file)
                names = "name" in (table.fieldnames or ())
                return {row["name"]: {column: row.get(column) or "" for column in COLUMNS} for row in table if names}
        except (OSError, UnicodeDecodeError, csv.Error):
            return {}


def expected_size(config: Any, tokens: int) -> int:
    """Bytes of q, k and v of `tokens` tokens in 16 bits."""
    from kvreplay.capture.model import head_dim, layer_configs

    heads = sum(layer.num_attention_heads + 2 * layer.num_key_value_heads for layer in layer_configs(config))
    return 2 * tokens * heads * head_dim(config)


def write_answers(folder: Path, prompts: Sequence[Prompt]) -> None:
    """answers.jsonl for `kvreplay live --answers`: names and answers of these prompts and of earlier calls'."""
    place = folder / "answers.jsonl"
    try:
        before = place.read_text("utf-8") if place.exists() else ""
        answers = {row["name"]: row["answers"] for row in map(json.loads, before.splitlines())}
    except (OSError, ValueError, LookupError, TypeError) as error:
        expected = "no file of this name, or a file written by this program"
        raise Error(str(place), "output", expected, "another file", Refusal.USAGE) from error
    answers |= {prompt.name: list(prompt.answers) for prompt in prompts}
    names = sorted(answers, key=ruler.place)
    lines = "".join(json.dumps({"name": name, "answers": answers[name]}) + "\n" for name in names)
    if lines != before:
        partial = place.with_name(place.name + ".partial")
        partial.write_text(lines, "utf-8")
        os.replace(partial, place)


def capture_all(
    prompts: Sequence[Prompt], sources: Mapping[str, str], manifest: Manifest, model_source: Any, settings: Settings
) -> None:
    """One trace each, listed as soon as it is written; the model is loaded once."""
    show = on_terminal()
    quiet_libraries(show)
    from tqdm import tqdm

    from kvreplay.capture.capture import Choices, capture
    from kvreplay.capture.model import load
    from kvreplay.capture.model_options import ModelChoices

    say(f"loading {MODEL_NAME}")
    model, tokenizer = load(ModelChoices(str(MODEL), dtype=COMPUTED_IN))
    tokens = sum(len(encode(tokenizer, prompt, settings.chat)) + settings.generated for prompt in prompts)
    size, free = expected_size(model.config, tokens), shutil.disk_usage(manifest.folder).free
    if size > free:
        found = f"{free / 1e6:,.0f} MB"
        raise Error(str(manifest.folder), "too little disk space", f"{size / 1e6:,.0f} MB", found, Refusal.RESOURCES)
    say(f"{len(prompts)} traces to capture: {tokens:,} tokens, {size / 1e6:,.0f} MB of {free / 1e6:,.0f} MB free")
    choices = Choices(MODEL_NAME, settings.chat, generate=settings.generated, store_dtype=STORED_IN,
                      source_hash=model_source.hash())  # fmt: skip

    def progress(layers: int) -> Any:
        return tqdm(total=layers, unit=" layers", leave=False, disable=not show, file=sys.stderr)

    for prompt in prompts:
        if manifest.path(prompt.name).exists():
            say(f"{prompt.name}.h5 is incomplete, or has another prompt, model or setting: captured again")
            manifest.drop(prompt.name)
    for number, prompt in enumerate(prompts, start=1):
        path = manifest.path(prompt.name)
        begin = time.monotonic()
        named = replace(choices, producer=producer(sources[prompt.name]))
        captured = capture(model, tokenizer, prompt, path, named, progress)
        manifest.add(prompt, sources[prompt.name])
        say(
            f"{number:2d} of {len(prompts)}  {prompt.name:18s} {captured.prompt_tokens:5,d} + {settings.generated} "
            f"tokens  {path.stat().st_size / 1e6:5.1f} MB  {time.monotonic() - begin:5.1f} s"
        )


def run(arguments: argparse.Namespace) -> None:
    """Everything after the options are read."""
    if arguments.tokens and not arguments.ruler:
        raise Error("corpus", "--tokens", "--ruler, whose prompts have these lengths", "no --ruler", Refusal.USAGE)
    if arguments.ruler:
        prompts = ruler_chosen(arguments.kinds, arguments.tokens or RULER_LENGTHS)
        settings = Settings(chat=False, generated=RULER_GENERATED)
    else:
        prompts = chosen(arguments.kinds, arguments.small)
        settings = Settings(chat=True, generated=GENERATED)
    name = "corpus-ruler" if arguments.ruler else "corpus-small" if arguments.small else "corpus"
    folder = arguments.output or ROOT / "build" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error("-o", str(folder), "a writable folder", str(error), Refusal.USAGE) from error
    from kvreplay.capture.source import Source

    model_source = Source.parse(str(MODEL))
    model_source.require_model()
    model_hash = model_source.hash()
    sources = {prompt.name: source_digest(prompt, model_hash, settings) for prompt in prompts}
    manifest = Manifest(folder)
    for prompt in prompts:
        manifest.refuse_foreign(prompt.name)
    if arguments.ruler:
        write_answers(folder, prompts)
    for prompt in prompts:
        manifest.adopt(prompt, sources[prompt.name])
    missing = [prompt for prompt in prompts if not manifest.holds(prompt.name, sources[prompt.name])]
    say(f"{len(prompts) - len(missing)} of {len(prompts)} traces are in {folder}")
    if missing:
        capture_all(missing, sources, manifest, model_source, settings)
    elif manifest.written:
        return
    manifest.write()
    size = sum(int(row["bytes"]) for row in manifest.rows.values())
    say(f"list: {manifest.place}, {len(manifest.rows)} traces, {size / 1e6:,.0f} MB")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; the value is its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return finished(parser(), run, words, "finished traces are kept; run the same command to continue")


if __name__ == "__main__":
    sys.exit(main())
