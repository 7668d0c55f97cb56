"""Are the study's prompts independent, of the promised kinds and lengths, and are their continuations true?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the corpus needs tools/setup build python")

from kvreplay.capture.corpus_prompts import TEXTS, TURN, full_prompts, read
from kvreplay.capture.prompts import Prompt, encode
from kvreplay.capture.ruler import essay_names, sentences
from kvreplay.capture.study_prompts import GENERATED, KINDS, needle_prompts, study_prompts

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "model" / "smollm2-135m-instruct.gguf"
RUN = 20  # words
WITH_ANSWERS = ("niah-noise", "niah-essay", "niah-keys", "vt", "fwe")


def count_tokens(text: str) -> int:
    """Somewhat more than words, as tokenizers count."""
    return len(text.split()) * 6 // 5


PROMPTS = study_prompts(count_tokens)


def kind(prompt: Prompt) -> str:
    return prompt.name.rpartition("-")[0]


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    chosen = [prompt for prompt in PROMPTS if kind(prompt) in kinds]
    return pytest.mark.parametrize("prompt", chosen, ids=[prompt.name for prompt in chosen])


def own_text(prompt: Prompt) -> str:
    """All text of a prompt except the fixed wording of its task."""
    if kind(prompt) not in WITH_ANSWERS:
        return "\n".join([*prompt.context_pieces, prompt.question, prompt.continuation])
    return prompt.context.partition("coded words. " if kind(prompt) == "fwe" else "\n")[2]


def runs(text: str, length: int = RUN) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text)
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def sharing(prompts: Iterable[Prompt], length: int = RUN) -> set[tuple[str, str]]:
    """Pairs of prompts with a common run of words."""
    found = [(prompt.name, runs(own_text(prompt), length)) for prompt in prompts]
    return {(one, other) for (one, left), (other, right) in combinations(found, 2) if not left.isdisjoint(right)}


def test_kinds_and_names() -> None:
    counts = Counter(kind(prompt) for prompt in PROMPTS)
    assert tuple(counts) == KINDS and len(KINDS) >= 8 and min(counts.values()) >= 8 and len(PROMPTS) >= 64
    assert [prompt.name for prompt in PROMPTS] == [f"{one}-{i}" for one in KINDS for i in range(1, counts[one] + 1)]


def test_prompts_are_the_same_in_every_call() -> None:
    assert study_prompts(count_tokens) == PROMPTS


def test_no_text_is_in_two_prompts() -> None:
    assert sharing(PROMPTS) == set()
    assert all(len(runs(own_text(prompt))) > 100 for prompt in PROMPTS)


def test_further_needles_share_no_text() -> None:
    """Of many prompts some have a few sentences of noise in the same order by chance."""
    further = needle_prompts(count_tokens)
    assert sharing([*PROMPTS, *further], 2 * RUN) == set()
    assert len({prompt.name for prompt in [*PROMPTS, *further]}) == len(PROMPTS) + 24
    assert len({answer for prompt in [*PROMPTS, *further] for answer in prompt.answers}) == (
        sum(len(prompt.answers) for prompt in PROMPTS) + 24
    )
    assert all(300 < count_tokens(prompt.text) <= 800 for prompt in further)


def test_shared_text_would_be_found() -> None:
    """Haystacks of the corpus of `tools/corpus` repeat essays; a prompt shares text with a part of itself."""
    assert sharing(prompt for prompt in full_prompts() if prompt.needle)
    part = Prompt("text-99", " ".join(PROMPTS[-1].context.split()[40:80]))
    assert sharing([*PROMPTS, part]) == {(PROMPTS[-1].name, "text-99")}


def test_answers_differ() -> None:
    answers = [answer for prompt in PROMPTS for answer in prompt.answers]
    assert len(set(answers)) == len(answers)


def test_each_essay_is_in_one_prompt() -> None:
    contexts = [prompt.context for prompt in PROMPTS]
    for name in essay_names(0):
        first = sentences((name,))[0]
        assert sum(first in context for context in contexts) == 1, name


def test_lengths() -> None:
    """Mostly 500 to 2,000 tokens, a few of 4,000."""
    counts = [count_tokens(prompt.text) for prompt in PROMPTS if kind(prompt) in WITH_ANSWERS]
    assert all(count >= 400 for count in counts) and sum(3900 < count <= 4000 for count in counts) == 4
    assert sum(count <= 2000 for count in counts) == len(counts) - 4


@of_kinds(*WITH_ANSWERS)
def test_answers_are_the_continuation(prompt: Prompt) -> None:
    assert prompt.answers and prompt.continuation == " " + ", ".join(prompt.answers)
    assert all(answer in prompt.context for answer in prompt.answers)


@of_kinds("code")
def test_code_goes_on_as_its_file_does(prompt: Prompt) -> None:
    """The prompt and its continuation are one whole file, cut after an indented line."""
    whole = prompt.text + prompt.continuation
    [path] = [path for path in (TEXTS / "code").iterdir() if path.read_text("utf-8").strip() == whole]
    assert prompt.continuation.startswith("\n") and prompt.question.splitlines()[-1].startswith(" ")
    others = [other.read_text("utf-8") for other in (TEXTS / "code").iterdir() if other != path]
    assert all(runs(whole).isdisjoint(runs(other)) for other in others)


@of_kinds("chat")
def test_chat_goes_on_with_the_next_turn(prompt: Prompt) -> None:
    """Turns and continuation are consecutive in one dialogue, the user's last, the assistant's next."""
    roles = [message.role for message in prompt.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] and len(roles) >= 5
    spoken = [*(message.content for message in prompt.messages), prompt.continuation]
    places = []
    for path in (TEXTS / "dialogues").glob("*.txt"):
        _, *pieces = TURN.split(read(f"dialogues/{path.stem}"))
        turns = [piece.strip() for piece in pieces[1::2]]
        places += [i for i in range(len(turns)) if turns[i : i + len(spoken)] == spoken]
    assert len(places) == 1 and places[0] % 2 == 0


@of_kinds("text")
def test_text_goes_on_for_a_hundred_words(prompt: Prompt) -> None:
    assert len(prompt.continuation.split()) == 100 and prompt.continuation[0].isspace()
    whole = prompt.context + prompt.continuation
    folders = ("articles", "documents")
    sources = [path.read_text("utf-8").strip() for folder in folders for path in (TEXTS / folder).iterdir()]
    sources += read("problems").split("\n\n")
    parts = sorted((source for source in sources if source in whole), key=whole.index)
    assert "\n\n".join(parts) == whole


def test_lengths_in_tokens_of_smollm2() -> None:
    """Also that 64 tokens have room for all answers, and that other continuations have as many."""
    if not MODEL.exists():
        pytest.skip("the tokenizer of SmolLM2 needs tools/setup model")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    prompts = study_prompts(count)
    lengths = [len(encode(tokenizer, prompt, chat=False)) for prompt in prompts]
    assert sum(500 <= length <= 2000 for length in lengths) >= 56 and sum(length > 3900 for length in lengths) == 4
    assert min(lengths) >= 450 and max(lengths) <= 4000
    for prompt in prompts:
        continued = count(prompt.continuation)
        assert continued <= GENERATED if prompt.answers else continued >= GENERATED, prompt.name
    assert sharing(prompts) == set()
