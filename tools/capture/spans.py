"""Token offsets in the decoded text, and named spans found in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvreplay.capture.prompts import Prompt
from kvreplay.errors import Error, Refusal
from kvreplay.trace import Span

LONGEST_CHARACTER = 4  # bytes of a UTF-8 character: byte tokens beyond that are no character


def decode_with_offsets(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of tokens, and the character range [begin, end) of each, in linear time.

    Tokens are decoded with their predecessors, since a tokenizer may write a token differently at the start. A
    character spread over several byte tokens belongs to each of them; a token without text has an empty range.
    """
    text = ""
    offsets: list[tuple[int, int]] = []
    context, pending = 0, 0  # ids[context:pending] are written, and decoded again with what follows
    for end in range(1, len(ids) + 1):
        before = decode(ids[context:pending])
        after = decode(ids[context:end])
        unfinished = after.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids)
        if unfinished and end - pending < LONGEST_CHARACTER:
            continue
        written = after[len(before) :] if len(after) >= len(before) else ""
        offsets += [(len(text), len(text) + len(written))] * (end - pending)
        text += written
        context, pending = pending, end
    return text, offsets


def token_range(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """The tokens that share a character with text[begin:end]; empty if none does."""
    inside = [token for token, (b, e) in enumerate(offsets) if b < end and e > begin and e > b]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


@dataclass(frozen=True)
class SpanRequest:
    """`NAME[:KIND]=TEXT`, or `=/REGEX/` (its first group if it has one). Without a kind the name is the kind."""

    name: str
    kind: str
    pattern: re.Pattern[str]

    @classmethod
    def parse(cls, argument: str) -> SpanRequest:
        label, separator, wanted = argument.partition("=")
        name, _, kind = label.partition(":")
        if not (separator and name and wanted):
            raise Error("--span", "value", "NAME[:KIND]=TEXT or NAME[:KIND]=/REGEX/", argument, Refusal.USAGE)
        is_regex = len(wanted) > 2 and wanted.startswith("/") and wanted.endswith("/")
        try:
            pattern = re.compile(wanted[1:-1] if is_regex else re.escape(wanted), re.DOTALL)
        except re.error as error:
            raise Error("--span", f"regular expression {wanted}", "a valid one", str(error), Refusal.USAGE) from error
        return cls(name, kind or name, pattern)

    def find(self, text: str) -> tuple[int, int]:
        """The first match, in characters; a question stands at the end of a prompt, so there the last."""
        matches = list(self.pattern.finditer(text))
        if not matches:
            raise Error("--span", self.name, f"{self.pattern.pattern!r} in the text", "no match", Refusal.USAGE)
        match = matches[-1] if self.kind == "question" else matches[0]
        return match.span(1 if self.pattern.groups else 0)


def prompt_spans(prompt: Prompt, text: str, prompt_end: int) -> list[tuple[str, int, int]]:
    """Where a prompt's own pieces are in the decoded text, in characters: context, needle, question, answer.

    `prompt_end` is where the continuation begins. A piece that the tokenizer did not give back as written is left
    out. The answer is sought in the needle, else in the context.
    """
    places: dict[str, tuple[int, int]] = {}

    def look(kind: str, piece: str, begin: int, end: int, last: bool = False) -> None:
        position = (text.rfind if last else text.find)(piece, begin, end) if piece else -1
        if position >= 0:
            places[kind] = (position, position + len(piece))

    if prompt.question:
        look("question", prompt.question.strip(), 0, prompt_end, last=True)
        look("context", prompt.context.strip(), 0, prompt_end)
    look("needle", prompt.needle.strip(), *places.get("context", (0, prompt_end)))
    home = places.get("needle", places.get("context", (0, prompt_end)))
    for answer in prompt.answers:
        if "answer" not in places:
            look("answer", answer.strip(), *home)
    return [(kind, *places[kind]) for kind in ("context", "needle", "question", "answer") if kind in places]


def find_spans(
    prompt: Prompt,
    requests: Sequence[SpanRequest],
    text: str,
    offsets: Sequence[tuple[int, int]],
    prompt_tokens: int,
) -> list[Span]:
    """All spans as token ranges; one asked for by name replaces the prompt's own of that name."""
    prompt_end = offsets[prompt_tokens - 1][1]
    asked = {request.name for request in requests}
    found = [
        (kind, kind, begin, end) for kind, begin, end in prompt_spans(prompt, text, prompt_end) if kind not in asked
    ]
    found += [(request.name, request.kind, *request.find(text)) for request in requests]
    spans = []
    for name, kind, begin, end in found:
        first, last = token_range(offsets, begin, end)
        if first == last:
            raise Error("--span", name, "at least one token", f"characters [{begin}, {end}) hold none", Refusal.USAGE)
        spans.append(Span(name, kind, first, last))
    return spans
