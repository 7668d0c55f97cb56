"""Token offsets in the decoded text, and named spans found in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvreplay.capture.prompts import FIRST_MARK, Prompt
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
            raise Error("--span", "not a span", "NAME[:KIND]=TEXT or NAME[:KIND]=/REGEX/", argument, Refusal.USAGE)
        is_regex = len(wanted) > 2 and wanted.startswith("/") and wanted.endswith("/")
        try:
            pattern = re.compile(wanted[1:-1] if is_regex else re.escape(wanted), re.DOTALL)
        except re.error as error:
            raise Error("--span", f"not a regular expression: {error}", "", wanted, Refusal.USAGE) from error
        return cls(name, kind or name, pattern)

    def find(self, text: str) -> tuple[int, int]:
        """The first match, in characters; a question stands at the end of a prompt, so there the last."""
        matches = list(self.pattern.finditer(text))
        if not matches:
            raise Error("--span", self.name, f"{self.pattern.pattern!r} in the text", "no match", Refusal.USAGE)
        match = matches[-1] if self.kind == "question" else matches[0]
        return match.span(1 if self.pattern.groups else 0)


def _spaced(frame: str) -> re.Pattern[str]:
    """Matches text of a template. A tokenizer may return it with other white space, above all at special tokens."""
    return re.compile(r"\s*".join(map(re.escape, "".join(frame.split()))))


def _after(frame: str, piece: str, text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Where the piece is that follows the frame, which nothing but white space separates from it."""
    match = _spaced(frame).search(text, begin, end)
    place = text.find(piece, match.end(), end) if match else -1
    # An empty frame may follow tokens that the tokenizer adds.
    if match is None or place < 0 or (match.group() and text[match.end() : place].strip()):
        return None
    return place, place + len(piece)


def _before(frame: str, piece: str, text: str, end: int) -> tuple[int, int] | None:
    """Where the piece is that the frame follows; the last such place."""
    matches = list(re.finditer(rf"(?=({re.escape(piece)})\s*{_spaced(frame).pattern})", text[:end]))
    return matches[-1].span(1) if matches else None


def template_frames(marked: str) -> list[str]:
    """The texts before, between and behind the marks of a rendered `Prompt.marked()`: those of the chat template."""
    return re.split("[\U000f0000-\U000ffffd]", marked)


def piece_places(prompt: Prompt, marked: str, text: str, prompt_end: int) -> dict[str, tuple[int, int]]:
    """Where context and question are. `marked` is the prompt in its template with a mark in place of each piece, so
    that what stands between the marks is the template's, which short pieces may match too.
    """
    parts = re.split("([\U000f0000-\U000ffffd])", marked)
    frames, numbers = parts[::2], [ord(mark) - FIRST_MARK for mark in parts[1::2]]
    pieces = [*map(str.strip, prompt.context_pieces), prompt.question.strip()]
    places: dict[str, tuple[int, int]] = {}
    question = _before(frames[-1], pieces[-1], text, prompt_end)
    if pieces[-1] and question:
        places["question"] = question
    context, end = [], 0
    for frame, number in zip(frames[:-1], numbers, strict=True):
        if number < len(pieces) - 1:
            place = _after(frame, pieces[number], text, end, prompt_end)
            if place is None:
                return places
            end = place[1]
            context += [place] if pieces[number] else []
    if context:
        places["context"] = (context[0][0], context[-1][1])
    return places


def prompt_spans(prompt: Prompt, marked: str, text: str, prompt_end: int) -> list[tuple[str, int, int]]:
    """Where a prompt's own pieces are in the decoded text, in characters: context, needle, question, answer.

    `prompt_end` is where the continuation begins. A piece that the tokenizer did not return as written is
    omitted. The answer is searched for in the needle, else in the context.
    """
    places = piece_places(prompt, marked, text, prompt_end) if prompt.question else {}

    def look(kind: str, piece: str, begin: int, end: int) -> None:
        position = text.find(piece, begin, end) if piece else -1
        if position >= 0:
            places[kind] = (position, position + len(piece))

    look("needle", prompt.needle.strip(), *places.get("context", (0, prompt_end)))
    home = places.get("needle", places.get("context", (0, prompt_end)))
    for answer in prompt.answers:
        if "answer" not in places:
            look("answer", answer.strip(), *home)
    return [(kind, *places[kind]) for kind in ("context", "needle", "question", "answer") if kind in places]


def find_spans(
    prompt: Prompt,
    marked: str,
    requests: Sequence[SpanRequest],
    text: str,
    offsets: Sequence[tuple[int, int]],
    prompt_tokens: int,
) -> list[Span]:
    """All spans as token ranges; a span of the command line replaces the prompt's span of the same name.

    `marked` is the rendered `prompt.marked()`.
    """
    prompt_end = offsets[prompt_tokens - 1][1]
    asked = {request.name for request in requests}
    found = [
        (kind, kind, begin, end)
        for kind, begin, end in prompt_spans(prompt, marked, text, prompt_end)
        if kind not in asked
    ]
    found += [(request.name, request.kind, *request.find(text)) for request in requests]
    spans = []
    for name, kind, begin, end in found:
        first, last = token_range(offsets, begin, end)
        if first == last:
            raise Error(
                "--span", name, "at least one token", f"characters [{begin}, {end}) contain no token", Refusal.USAGE
            )
        spans.append(Span(name, kind, first, last))
    return spans
