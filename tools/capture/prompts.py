"""Prompts from text, .txt, .jsonl and .parquet files, as the model is to see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from kvreplay.errors import Error, Refusal

ROLES = ("system", "user", "assistant")
FIRST_MARK = 0xF0000  # the first of 65,534 characters of private use, which no chat template writes


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, as chat APIs have it."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One prompt: a context (or the whole text), a question after it, and the known facts about the answer.

    A conversation has `messages` in place of a context: the last is the question, those before it are the context.
    `continuation` is the true text after the prompt, with the space or line feed that it begins with.
    """

    name: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    needle: str = ""
    messages: tuple[Message, ...] = ()
    continuation: str = ""

    @classmethod
    def conversation(
        cls,
        name: str,
        messages: Sequence[Message],
        answers: tuple[str, ...] = (),
        needle: str = "",
        continuation: str = "",
    ) -> Prompt:
        return cls(name, "", messages[-1].content, answers, needle, tuple(messages), continuation)

    @property
    def text(self) -> str:
        return f"{self.context}\n\n{self.question}" if self.question else self.context

    @property
    def context_pieces(self) -> tuple[str, ...]:
        """The texts that make up the context, in their order."""
        return tuple(message.content for message in self.messages[:-1]) or (self.context,)

    def marked(self) -> Prompt:
        """A mark in place of every piece: the context's in their order, then the question's."""
        if self.messages:
            turns = (Message(turn.role, chr(FIRST_MARK + i)) for i, turn in enumerate(self.messages))
            return replace(self, messages=tuple(turns))
        return replace(self, context=chr(FIRST_MARK), question=chr(FIRST_MARK + 1) if self.question else "")


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
            raise Error(where, "prompt", "one JSON object per line", str(error)) from error
        if not isinstance(row, dict):
            raise Error(where, "prompt", "a JSON object", type(row).__name__)
        yield _from_row(row, where, f"{path.stem}-{number - 1:03d}")


def _parquet(path: Path) -> Iterator[Prompt]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        expected = "pyarrow (run pip install 'kvreplay[capture]')"
        raise Error(str(path), "missing package", expected, "", Refusal.CAPABILITY) from error
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


def _messages(value: Any, where: str) -> list[Message]:
    """A list of {role, content} that ends with the user's."""
    if not isinstance(value, list) or not value:
        raise Error(where, "messages", "a list of {role, content}", "an empty list" if value == [] else repr(value))
    for number, turn in enumerate(value):
        place = f"{where}: messages[{number}]"
        if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
            found = ", ".join(map(str, turn)) or "none" if isinstance(turn, dict) else repr(turn)
            raise Error(place, "keys", "role and content", found)
        if turn["role"] not in ROLES:
            raise Error(place, "role", " or ".join(ROLES), repr(turn["role"]))
        if not isinstance(turn["content"], str):
            raise Error(place, "content", "a text", repr(turn["content"]))
    if value[-1]["role"] != "user":
        raise Error(f"{where}: messages[{len(value) - 1}]", "role", "user in the last message", value[-1]["role"])
    if not value[-1]["content"].strip():
        place = f"{where}: messages[{len(value) - 1}]"
        raise Error(place, "content", "a non-empty text in the last message", repr(value[-1]["content"]))
    return [Message(turn["role"], turn["content"]) for turn in value]


def _from_row(row: dict[str, Any], where: str, name: str) -> Prompt:
    """A row of LongBench (context, input, answers), or with `prompt`, `text` or `messages`.

    Every form may have `needle` and `continuation`.
    """
    context = next((row[column] for column in ("context", "prompt", "text") if isinstance(row.get(column), str)), None)
    conversation = row.get("messages") is not None
    if context is None and not conversation:
        raise Error(where, "columns", "context, prompt, text or messages", ", ".join(sorted(row)) or "none")
    if conversation and (context is not None or row.get("input")):
        raise Error(where, "columns", "messages, or a context and its input", ", ".join(sorted(row)))
    answers = row.get("answers") or []
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise Error(where, "answers", "a text or a list of texts", repr(answers))
    for column in ("input", "needle", "continuation"):
        if not isinstance(row.get(column) or "", str):
            raise Error(where, column, "a text", repr(row[column]))
    needle, continuation = row.get("needle") or "", row.get("continuation") or ""
    if conversation:
        return Prompt.conversation(name, _messages(row["messages"], where), tuple(answers), needle, continuation)
    return Prompt(name, context, row.get("input") or "", tuple(answers), needle, continuation=continuation)


def read_prompts(path: Path, count: int | None) -> list[Prompt]:
    """The first `count` prompts of a file (all: None)."""
    if path.suffix not in READERS:
        raise Error(
            str(path),
            "unknown file format",
            "a file ending in " + ", ".join(READERS),
            path.suffix or "no ending",
            Refusal.USAGE,
        )
    try:
        prompts = []
        for prompt in READERS[path.suffix](path):
            if count is not None and len(prompts) == count:
                break
            prompts.append(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise Error(str(path), "cannot be read", "", getattr(error, "strerror", None) or str(error)) from error
    if not prompts:
        raise Error(str(path), "no prompt", "at least one", "")
    return prompts


def require_template(tokenizer: Any, prompt: Prompt, chat: bool) -> None:
    """Rejects a tokenizer without the chat template that --chat or a conversation needs."""
    if (chat or prompt.messages) and not getattr(tokenizer, "chat_template", None):
        where, other = (f"{prompt.name}: messages", "") if prompt.messages else ("--chat", ", or no --chat")
        raise Error(where, "chat template", f"a model with a chat template{other}", "none", Refusal.INPUT)


def render(tokenizer: Any, prompt: Prompt, chat: bool) -> str:
    """A prompt as the tokenizer is to see it, inside the model's chat template if asked; a conversation is always."""
    if not (chat or prompt.messages):
        return prompt.text
    require_template(tokenizer, prompt, chat)
    messages = [asdict(message) for message in prompt.messages or (Message("user", prompt.text),)]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        expected = "messages that the chat template of the model accepts"
        raise Error(prompt.name, "messages", expected, str(error), Refusal.INPUT) from error


def encode(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt. A chat template writes the special tokens itself."""
    special = not (chat or prompt.messages)
    return list(tokenizer(render(tokenizer, prompt, chat), add_special_tokens=special).input_ids)


def fit(tokenizer: Any, prompt: Prompt, chat: bool, max_tokens: int | None) -> tuple[Prompt, list[int]]:
    """A prompt and its token ids; one that is too long loses the middle of its context, as LongBench's do."""
    ids = encode(tokenizer, prompt, chat)
    if prompt.messages and max_tokens is not None and len(ids) > max_tokens:
        raise Error("--max-tokens", f"{prompt.name}: messages cannot be "
                                    "shortened", f"at least {len(ids)}", str(max_tokens),
                    Refusal.USAGE)  # fmt: skip
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
