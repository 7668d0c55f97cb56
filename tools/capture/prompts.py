"""Prompts from text, .txt, .jsonl and .parquet files, as the model is to see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvreplay.errors import Error, Refusal


@dataclass(frozen=True)
class Prompt:
    """One prompt: a context (or the whole text), a question after it, and what is known about the answer."""

    name: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    needle: str = ""

    @property
    def text(self) -> str:
        return f"{self.context}\n\n{self.question}" if self.question else self.context


def _one_file(path: Path) -> Iterator[Prompt]:
    yield Prompt(path.stem, path.read_text("utf-8").rstrip("\n"))


def _json_lines(path: Path) -> Iterator[Prompt]:
    # Not splitlines: U+2028 and its like end no line of JSON.
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise Error(where, "prompt", "one JSON object a line", str(error)) from error
        if not isinstance(row, dict):
            raise Error(where, "prompt", "a JSON object", type(row).__name__)
        yield _from_row(row, where, f"{path.stem}-{number - 1:03d}")


def _parquet(path: Path) -> Iterator[Prompt]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        expected = "pyarrow (tools/setup build python installs it)"
        raise Error(str(path), "parquet", expected, "no such package", Refusal.CAPABILITY) from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise Error(str(path), "prompts", "a parquet file", str(error)) from error
    number = 0
    for batch in table.iter_batches(batch_size=16):
        for row in batch.to_pylist():
            yield _from_row(row, f"{path}: row {number}", f"{path.stem}-{number:03d}")
            number += 1


READERS: dict[str, Callable[[Path], Iterator[Prompt]]] = {
    ".txt": _one_file,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}


def _from_row(row: dict[str, Any], where: str, name: str) -> Prompt:
    """A row of LongBench (context, input, answers; needle if it is there), or one with `prompt` or `text`."""
    context = next((row[column] for column in ("context", "prompt", "text") if isinstance(row.get(column), str)), None)
    if context is None:
        raise Error(where, "columns", "context, prompt or text", ", ".join(sorted(row)) or "none")
    answers = row.get("answers") or []
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise Error(where, "answers", "a text or a list of texts", repr(answers))
    for column in ("input", "needle"):
        if not isinstance(row.get(column) or "", str):
            raise Error(where, column, "a text", repr(row[column]))
    return Prompt(name, context, row.get("input") or "", tuple(answers), row.get("needle") or "")


def read_prompts(path: Path, count: int | None) -> list[Prompt]:
    """The first `count` prompts of a file (all: None)."""
    if path.suffix not in READERS:
        raise Error(
            str(path), "prompts", "a file ending in " + ", ".join(READERS), path.suffix or "no ending", Refusal.USAGE
        )
    try:
        prompts = []
        for prompt in READERS[path.suffix](path):
            if count is not None and len(prompts) == count:
                break
            prompts.append(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise Error(str(path), "prompts", "a file that can be read", str(error)) from error
    if not prompts:
        raise Error(str(path), "prompts", "at least one", "none")
    return prompts


def encode(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt, inside the model's chat template if asked."""
    if not chat:
        return list(tokenizer(prompt.text).input_ids)
    if not getattr(tokenizer, "chat_template", None):
        raise Error("--chat", "chat template", "a tokenizer with one", "none in this model", Refusal.INPUT)
    messages = [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def fit(tokenizer: Any, prompt: Prompt, chat: bool, max_tokens: int | None) -> tuple[Prompt, list[int]]:
    """A prompt and its token ids; one that is too long loses the middle of its context, as LongBench's do."""
    ids = encode(tokenizer, prompt, chat)
    context = tokenizer(prompt.context, add_special_tokens=False).input_ids
    kept = len(context)
    cut = prompt
    while max_tokens is not None and len(ids) > max_tokens:
        kept -= len(ids) - max_tokens
        if kept < 2:
            raise Error("--max-tokens", prompt.name, f"at least {len(ids) - kept + 2}", str(max_tokens), Refusal.USAGE)
        head, tail = context[: (kept + 1) // 2], context[len(context) - kept // 2 :]
        cut = replace(prompt, context=tokenizer.decode(head) + tokenizer.decode(tail))
        ids = encode(tokenizer, cut, chat)
    if not ids:
        raise Error(prompt.name, "prompt", "at least one token", "none", Refusal.INPUT)
    return cut, ids
