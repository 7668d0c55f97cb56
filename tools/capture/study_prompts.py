"""The prompts of the closed-loop study: 66 in eight kinds, no text in two of them, each with its true continuation.

Statistics over prompts treat each prompt as one observation, so prompts must not share text. Every essay, document,
source file and turn of a dialogue is in one prompt, and noise, keys, chains and coded words are drawn per prompt.

| kind | prompts | continuation |
| --- | --- | --- |
| niah-noise | niah_single_1 | the answers |
| niah-essay | niah_single_2 and 3, multikey_1, multivalue, multiquery; each prompt has its own essay | the answers |
| niah-keys | niah_multikey_2 and 3 | the answers |
| vt, fwe | the tasks of these names | the answers |
| code | a source file of this project | its next lines |
| chat | turns of a dialogue | the assistant's next turn |
| text | articles, pairs of documents, worked problems | the last 100 words |

Capture them as plain text (a conversation is always inside the chat template) with G = `GENERATED` tokens: the first
ones of the continuation, then greedy text where the continuation is shorter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvreplay.capture.corpus_prompts import dialogue, essay_names, read
from kvreplay.capture.prompts import Prompt
from kvreplay.capture.ruler import ruler_prompt

GENERATED = 64  # G
KINDS = ("niah-noise", "niah-essay", "niah-keys", "vt", "fwe", "code", "chat", "text")

LENGTHS = (500, 700, 1000, 1000, 1400, 1400, 2000, 4000)  # tokens of the prompts of a kind of drawn texts
NEEDLES = 24
NEEDLE_LENGTHS = (400, 500, 600, 800)  # in turn
ESSAY_LENGTH = 850  # tokens that each essay suffices for
ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
KEY_TASKS = ("niah_multikey_2", "niah_multikey_3")

SOURCES = ("layer_ranges.cpp", "open_file.cpp", "remedy.cpp", "rope.cpp", "probe.py", "skill.py", "texts.py",
           "verify.py")  # fmt: skip
CODE_WORDS = 50  # at least, of the true continuation
TURNS = (  # dialogue, first turn, the user's last turn; the next turn is the true continuation
    ("bakery", 0, 6), ("bakery", 8, 12), ("fair", 0, 8), ("fair", 10, 18), ("garden", 0, 8),
    ("story", 0, 8), ("story", 10, 14), ("story", 16, 20),
)  # fmt: skip
DOCUMENTS = (("expedition", "ferry"), ("library", "orchard"), ("pottery", "railway"), ("theatre", "weather"))
TEXT_WORDS = 100  # of the true continuation


def code_prompt(name: str, source: str) -> Prompt:
    """A source file up to the end of an indented line; the question is all after the last empty line before it."""
    text = read(f"code/{source}")
    ends = [match.start() for match in re.finditer("\n", text)]
    inside = (end for end in reversed(ends) if re.search(r"^ +\S.*\Z", text[:end], re.MULTILINE))
    end = next(end for end in inside if len(text[end:].split()) >= CODE_WORDS)
    context, _, unfinished = text[:end].rpartition("\n\n")
    return Prompt(name, context, unfinished, continuation=text[end:])


def chat_prompt(name: str, dialogue_name: str, first: int, last: int) -> Prompt:
    """The turns from `first` to `last` of a dialogue, counted from 0."""
    turns = dialogue(dialogue_name)
    return Prompt.conversation(name, turns[first : last + 1], continuation=turns[last + 1].content)


def text_prompt(name: str, text: str) -> Prompt:
    """A text without its last words, which are the true continuation."""
    end = [match.start() for match in re.finditer(r"\s+", text)][-TEXT_WORDS]
    return Prompt(name, text[:end], continuation=text[end:])


def texts() -> Iterator[str]:
    yield read("articles/capture.md")
    yield read("articles/mill-trust")
    for names in DOCUMENTS:
        yield "\n\n".join(read(f"documents/{name}") for name in names)
    problems = read("problems").split("\n\n")
    half = len(problems) // 2
    yield "\n\n".join(problems[:half])
    yield "\n\n".join(problems[half:])


def needle_prompts(count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Further prompts as of niah-noise, short ones, needle-1 ... needle-24: for answers, of which a prompt has one."""
    return [
        ruler_prompt(
            "niah_single_1", NEEDLE_LENGTHS[i % len(NEEDLE_LENGTHS)], 1000 + i, count_tokens, f"needle-{i + 1}", ()
        )
        for i in range(NEEDLES)
    ]


def study_prompts(count_tokens: Callable[[str], int]) -> list[Prompt]:
    """All prompts, named KIND-NUMBER, in the order of KINDS; `count_tokens` gives the lengths of drawn texts."""
    drawn = [("niah-noise", "niah_single_1", tokens, ()) for tokens in LENGTHS]
    tasks = [task for task in ESSAY_TASKS for _ in range(2)]
    drawn += [("niah-essay", task, ESSAY_LENGTH, (essay,)) for task, essay in zip(tasks, essay_names(0), strict=True)]
    drawn += [("niah-keys", KEY_TASKS[place % 2], tokens, ()) for place, tokens in enumerate(LENGTHS)]
    drawn += [(task, task, tokens, ()) for task in ("vt", "fwe") for tokens in LENGTHS]
    prompts: list[Prompt] = []

    def name(kind: str) -> str:
        return f"{kind}-{1 + sum(prompt.name.rpartition('-')[0] == kind for prompt in prompts)}"

    for number, (kind, task, tokens, essays) in enumerate(drawn):
        prompts.append(ruler_prompt(task, tokens, number, count_tokens, name(kind), essays))
    for source in SOURCES:
        prompts.append(code_prompt(name("code"), source))
    for turns in TURNS:
        prompts.append(chat_prompt(name("chat"), *turns))
    for text in texts():
        prompts.append(text_prompt(name("text"), text))
    return prompts
