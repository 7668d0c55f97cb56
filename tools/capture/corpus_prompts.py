"""The prompts of the corpus, assembled from the texts in traces/corpus: six kinds, the same in every call.

A prompt's name begins with its kind and a hyphen. Lengths are chosen in words, paragraphs and pieces, so that no
tokenizer is needed; traces/corpus/README.md lists their lengths in tokens of SmolLM2.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate, chain
from pathlib import Path

from kvreplay.capture.prompts import Message, Prompt

TEXTS = Path(__file__).resolve().parents[2] / "traces" / "corpus"
KINDS = ("needle", "question", "arithmetic", "summary", "code", "chat")

# Tokens of a needle prompt -> words of its haystack: 1.17 tokens a word, and 60 for needle, question and chat template.
HAYSTACK_WORDS = {300: 180, 450: 320, 1000: 820, 2000: 1630, 4000: 3300}
DEPTHS = (10, 50, 90)  # percent of the haystack before the needle

END_OF_SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z])")
TURN = re.compile(r"^(User|Assistant): ", re.MULTILINE)


def read(place: str) -> str:
    """A text of the corpus, by its path without the ending .txt."""
    return (TEXTS / f"{place}.txt").read_text("utf-8").strip()


def rows(name: str) -> list[dict]:
    """The rows of a .jsonl file of the corpus."""
    return [json.loads(line) for line in (TEXTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def dialogue(name: str) -> list[Message]:
    """The turns of a dialogue."""
    _, *pieces = TURN.split(read(f"dialogues/{name}"))
    return [Message(role.lower(), content.strip()) for role, content in zip(pieces[::2], pieces[1::2], strict=True)]


def essay_names(first: int) -> list[str]:
    """All essays of the corpus, beginning with number `first`."""
    names = sorted(path.stem for path in (TEXTS / "essays").glob("*.txt"))
    return [names[(first + place) % len(names)] for place in range(len(names))]


def haystack(first: int, words: int, needle: str, depth: float) -> str:
    """Essays one after another from number `first` on, some `words` long; the needle is a separate sentence.

    Cut after a sentence. The needle stands before the sentence whose beginning is nearest to `depth` of all words, and
    never before a title.
    """
    paragraphs = chain.from_iterable(read(f"essays/{name}").split("\n\n") for name in essay_names(first))
    sentences: list[tuple[str, str]] = []  # (what stands before it, sentence)
    length = 0
    for paragraph in paragraphs:
        for number, sentence in enumerate(END_OF_SENTENCE.split(paragraph)):
            if length < words:
                sentences.append((" " if number else "\n\n", sentence))
                length += len(sentence.split())
    begins = [0, *accumulate(len(sentence.split()) for _, sentence in sentences)]
    in_text = [place for place, (_, sentence) in enumerate(sentences) if sentence[-1] in ".?!"]
    place = min(in_text, key=lambda place: abs(begins[place] - depth * length))
    before, after = sentences[place]
    sentences[place : place + 1] = [(before, needle), (" ", after)]
    return "".join(chain.from_iterable(sentences)).strip()


def needle_prompt(number: int, tokens: int, depth: int) -> Prompt:
    """Each prompt has another needle, and its haystack begins with another essay."""
    row = rows("needles")[number]
    context = haystack(number, HAYSTACK_WORDS[tokens], row["needle"], depth / 100)
    return Prompt(f"needle-{tokens}-d{depth}", context, row["question"], (row["answer"],), row["needle"])


def question_prompt(number: int | str, row: dict, paragraphs: int | None = None) -> Prompt:
    """Several documents, of which one holds the answer; the first `paragraphs` of each (all: None)."""
    documents = ["\n\n".join(read(f"documents/{name}").split("\n\n")[:paragraphs]) for name in row["documents"]]
    return Prompt(f"question-{number}", "\n\n".join(documents), row["question"], (row["answer"],))


def arithmetic_prompt(number: int | str, first: int, examples: int) -> Prompt:
    """Problems with worked solutions, then one without. Its answer is no span: the context does not hold it."""
    problems = read("problems").split("\n\n")[first : first + examples + 1]
    asked = problems[-1].partition("Answer:")[0] + "Answer:"
    return Prompt(f"arithmetic-{number}", "\n\n".join(problems[:-1]), asked)


def summary_prompt(
    number: int | str, places: tuple[str, ...], instruction: str, paragraphs: int | None = None
) -> Prompt:
    texts = ["\n\n".join(read(place).split("\n\n")[:paragraphs]) for place in places]
    return Prompt(f"summary-{number}", "\n\n".join(texts), instruction)


def code_prompt(number: int | str, name: str, language: str) -> Prompt:
    """A file that ends in the middle of a function: what follows its last empty line is to be continued."""
    before, _, unfinished = read(f"code/{name}").rpartition("\n\n")
    return Prompt(f"code-{number}", f"Continue this {language} file where it ends.\n\n{before}", unfinished)


def chat_prompt(number: int | str, name: str, turns: int | None = None) -> Prompt:
    """A dialogue up to one of the user's messages: its first `turns` (all: None)."""
    return Prompt.conversation(f"chat-{number}", dialogue(name)[:turns])


def full_prompts() -> list[Prompt]:
    """1,000 to 4,000 tokens each."""
    grid = [(tokens, depth) for tokens in (1000, 2000, 4000) for depth in DEPTHS]
    essays = [("hallbridge", "clocks"), ("bees", "salt", "tides", "rivers")]
    return [
        *(needle_prompt(number, tokens, depth) for number, (tokens, depth) in enumerate(grid)),
        *(question_prompt(number, row) for number, row in enumerate(rows("questions")[:4], start=1)),
        arithmetic_prompt(1, 0, 10),
        arithmetic_prompt(2, 10, 18),
        arithmetic_prompt(3, 0, 33),
        summary_prompt(1, ("articles/capture.md",), "Summarise this page in three sentences for a new user."),
        summary_prompt(2, ("articles/mill-trust",), "Summarise the report above in one paragraph."),
        *(
            summary_prompt(number, tuple(f"essays/{name}" for name in names), "Summarise each of these essays briefly.")
            for number, names in enumerate(essays, start=3)
        ),
        code_prompt(1, "apportion.cpp", "C++"),
        code_prompt(2, "rope.py", "Python"),
        code_prompt(3, "trace.py", "Python"),
        chat_prompt(1, "garden"),
        chat_prompt(2, "fair"),
        chat_prompt(3, "story"),
    ]


def small_prompts() -> list[Prompt]:
    """Some 250 to 500 tokens each; each has other names."""
    return [
        needle_prompt(9, 300, 25),
        needle_prompt(10, 450, 75),
        *(question_prompt(f"small-{number}", row, 4) for number, row in enumerate(rows("questions")[4:], start=1)),
        arithmetic_prompt("small-1", 28, 3),
        summary_prompt("small-1", ("essays/glass",), "Summarise the text above in one sentence.", 4),
        code_prompt("small-1", "pyramid_infer.cpp", "C++"),
        chat_prompt("small-1", "garden", 5),
    ]
