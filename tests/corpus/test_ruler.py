"""Do the synthetic tasks have the needles, answers, depths and lengths that RULER's definitions give them?"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest

pytest.importorskip("jinja2", reason="the corpus needs tools/setup build python")

from kvreplay.capture import ruler
from kvreplay.capture.corpus_prompts import read
from kvreplay.capture.prompts import Prompt
from kvreplay.capture.ruler import DEPTHS, NOISE, TASKS, essay_names, maker, ruler_prompt, ruler_prompts, sentences
from kvreplay.errors import Error

LENGTHS = (500, 1000, 4000)
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
NUMBER = re.compile(r"[1-9]\d{6}")
WORDS = re.compile(r"[a-z]+-[a-z]+")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

# RULER's table: haystack, key, value, keys, values of a key, queries.
NIAH = {
    "niah_single_1": ("noise", WORDS, NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", WORDS, NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", WORDS, UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", WORDS, NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needle", WORDS, NUMBER, 1, 1, 1),
    "niah_multikey_3": ("needle", UUID, UUID, 1, 1, 1),
    "niah_multivalue": ("essay", WORDS, NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", WORDS, NUMBER, 4, 1, 4),
}


def count_tokens(text: str) -> int:
    """Words, numbers and punctuation marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def occurrences(piece: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(piece)}(?!\w)", text))


PROMPTS = ruler_prompts(LENGTHS, list(TASKS), count_tokens)
CASES = [(prompt, *prompt.name.rsplit("-", 1)) for prompt in PROMPTS]


def of_tasks(*tasks: str) -> pytest.MarkDecorator:
    chosen = [pytest.param(prompt, task, id=prompt.name) for prompt, task, _ in CASES if task in tasks]
    return pytest.mark.parametrize(("prompt", "task"), chosen)


def test_names_in_the_order_of_tasks_and_lengths() -> None:
    assert [prompt.name for prompt in PROMPTS] == [
        f"{task}-{tokens}" for task in [*NIAH, "vt", "fwe"] for tokens in LENGTHS
    ]


def test_depths_are_forty_steps_from_0_to_100() -> None:
    assert len(DEPTHS) == 40 and DEPTHS[:4] == (0, 3, 5, 8) and DEPTHS[-2:] == (97, 100)
    assert all(abs(depth - 100 * i / 39) <= 0.5 for i, depth in enumerate(DEPTHS))


@of_tasks(*NIAH)
def test_needles(prompt: Prompt, task: str) -> None:
    """All keys with all their values, each needle once, and distinct values; the question names the asked keys."""
    haystack, key_form, value_form, keys, values, queries = NIAH[task]
    found = [(match[2], match[3]) for match in NEEDLE.finditer(prompt.context)]
    by_key: dict[str, list[str]] = {}
    for key, value in found:
        assert key_form.fullmatch(key) and value_form.fullmatch(value)
        by_key.setdefault(key, []).append(value)
    assert len({value for _, value in found}) == len(found)
    assert all(len(of_key) == values for of_key in by_key.values())
    assert len(by_key) > 5 if haystack == "needle" else len(by_key) == keys
    asked = [key for key in by_key if occurrences(key, prompt.question)]
    assert len(asked) == queries and all(occurrences(key, prompt.question) == 2 for key in asked)
    assert sorted(prompt.answers) == sorted(value for key in asked for value in by_key[key])
    assert len(prompt.answers) == queries * values
    for answer in prompt.answers:
        assert occurrences(answer, prompt.context) == 1 and answer not in prompt.question
    assert prompt.context.count(prompt.needle) == 1 and prompt.answers[0] in prompt.needle
    assert prompt.continuation == " " + ", ".join(prompt.answers)


@of_tasks("niah_single_2", "niah_multiquery")
def test_wording(prompt: Prompt, task: str) -> None:
    """RULER's template and answer prefix, in the singular for one answer."""
    keys = re.findall(r"[a-z]+-[a-z]+", prompt.question.partition("?")[0])
    instruction = prompt.context.partition("\n")[0]
    if task == "niah_single_2":
        [key] = keys
        assert instruction == (
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the number afterwards."
        )
        assert prompt.question == (
            f"What is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is"
        )
    else:
        query = f"{keys[0]}, {keys[1]}, {keys[2]}, and {keys[3]}"
        assert instruction == (
            "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the numbers afterwards."
        )
        assert prompt.question == (
            f"What are all the special magic numbers for {query} mentioned in the provided text? "
            f"The special magic numbers for {query} mentioned in the provided text are"
        )


@of_tasks("niah_single_1", "vt")
def test_noise(prompt: Prompt, task: str) -> None:
    """Lines of five sentences of the pool, none of them twice; beside them only needles or assignments."""
    lines = prompt.context.split("\n")[2 if task == "vt" else 1 :]
    noise = [line for line in lines if not re.match("One of the|VAR", line)]
    assert len(lines) - len(noise) == (5 if task == "vt" else 1)
    found = [sentence for line in noise for sentence in re.findall(r"[^.]+\.", line)]
    found = [sentence.strip() for sentence in found]
    assert len(found) == 5 * len(noise) and set(found) <= set(NOISE) and len(set(found)) == len(found)


def test_the_pool_of_noise() -> None:
    assert len(set(NOISE)) == len(NOISE) >= 60
    assert all(4 <= len(sentence.split()) <= 10 and sentence.count(".") == 1 for sentence in NOISE)


@of_tasks("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
def test_essays(prompt: Prompt, task: str) -> None:
    """Without the needles, the haystack is the beginning of the essays' sentences, each once, without titles."""
    text = NEEDLE.sub("", prompt.context.partition("\n")[2])
    [number] = [tokens * 10 + list(TASKS).index(task) for tokens in LENGTHS if prompt.name.endswith(f"-{tokens}")]
    names = essay_names(number)
    assert len(set(names)) == len(names) == 10
    whole = " ".join(" ".join(read(f"essays/{name}").split("\n\n", 1)[1].split()) for name in names)
    assert " ".join(whole.split()).startswith(" ".join(text.split()))


@pytest.mark.parametrize("task", [*NIAH, "vt"])
def test_needles_are_at_depths_of_the_list(task: str) -> None:
    """The units before a needle are a depth's share of all, rounded down; no depth is used twice."""
    for number in range(6):
        make, _ = maker(task, 1000, number)
        for size in (40, 100, 173):
            prompt = make(size)
            text = prompt.context.partition("\n\n" if task == "vt" else "\n")[2]
            if NIAH.get(task, " ")[0] == "essay":
                begins = [match.start() for match in NEEDLE.finditer(text)]
                units = sentences(essay_names(number))[:size]
                before = [sum(text.find(unit) < begin for unit in units) for begin in begins]
            else:
                lines = text.split("\n")
                own = [line for line in lines if line.startswith("VAR") or line == prompt.needle]
                before = [lines.index(line) - place for place, line in enumerate(own)]
                assert len(lines) == size + len(own)
            allowed = [size * depth // 100 for depth in DEPTHS]
            assert before == sorted(before) and not Counter(before) - Counter(allowed)


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("tokens", [500, 700, 2000])
def test_the_haystack_is_the_longest_that_fits(task: str, tokens: int) -> None:
    make, smallest = maker(task, tokens, 7)
    size, prompt = ruler.longest(make, smallest, tokens, count_tokens)
    assert prompt == make(size) == ruler_prompt(task, tokens, 7, count_tokens)
    assert count_tokens(prompt.text) <= tokens < count_tokens(make(size + 1).text)
    assert count_tokens(prompt.text) > tokens - 60


@of_tasks("vt")
def test_variables_of_the_chain(prompt: Prompt, task: str) -> None:
    """Assignments in the text's order give the variables with the asked value: all of them, and in this order."""
    values: dict[str, str] = {}
    for name, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", prompt.context):
        assert name not in values
        values[name] = values.get(value, value)
    [asked] = set(re.findall(r"\d{5}", prompt.question))
    assert prompt.answers == tuple(name for name, value in values.items() if value == asked)
    assert len(prompt.answers) == len(values) == 5 and "5 variables are assigned" in prompt.question
    assert [occurrences(name, prompt.context) for name in prompt.answers] == [2, 2, 2, 2, 1]
    assert prompt.context.count(prompt.needle) == 1 and prompt.needle == f"VAR {prompt.answers[0]} = {asked}"
    assert prompt.question.endswith("they are:") and prompt.continuation == " " + ", ".join(prompt.answers)


@of_tasks("fwe")
def test_frequent_words(prompt: Prompt, task: str) -> None:
    """The answers are the three most frequent words, by decreasing counts that differ; the dots are more frequent."""
    words = prompt.context.partition("coded words. ")[2].split(" ")
    (noise, most), *ranked = Counter(words).most_common()
    assert noise == "..." and most > ranked[0][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
    assert prompt.answers == tuple(word for word, _ in ranked[:3])
    counts = [most, *(count for _, count in ranked)]
    assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4] >= 1
    # Zipf with alpha = 2: the word of rank k has some 1/k^2 of the first one's count, each rounded down.
    assert all(most / k**2 - 1 < count < (most + 1) / k**2 + 1e-9 for k, count in enumerate(counts, 1))
    assert prompt.needle == "" and prompt.continuation == " " + ", ".join(prompt.answers)


def test_prompts_are_the_same_in_every_call_and_selection() -> None:
    assert ruler_prompts(LENGTHS, list(TASKS), count_tokens) == PROMPTS
    assert ruler_prompts((1000,), ["vt", "niah_single_3"], count_tokens) == [
        prompt for prompt in PROMPTS if prompt.name in ("niah_single_3-1000", "vt-1000")
    ]


def test_numbers_make_other_prompts() -> None:
    for task in TASKS:
        some = [ruler_prompt(task, 600, number, count_tokens) for number in range(5)]
        assert len({prompt.answers for prompt in some}) == len({prompt.context for prompt in some}) == 5


def test_no_haystack_of_random_text_is_contained_in_another() -> None:
    """No run of 20 words is in two of them, the instructions apart. Essays are the caller's to share out."""
    runs = []
    for prompt, task, _ in CASES:
        if NIAH.get(task, " ")[0] != "essay":
            words = prompt.context.partition("coded words. " if task == "fwe" else "\n")[2].split()
            words = [word for word in words if word != "..."]
            runs.append({tuple(words[i : i + 20]) for i in range(len(words) - 19)})
    assert all(one.isdisjoint(other) for one, other in combinations(runs, 2))


def test_given_essays_and_name() -> None:
    prompt = ruler_prompt("niah_single_2", 600, 3, count_tokens, "essay-1", ("salt",))
    assert prompt.name == "essay-1" and "\n".join(sentences(("salt",))[:2]).split("\n")[1] in prompt.context


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (40, r"x: length: expected at least \d+ tokens, found 40"),
        (3000, r"x: length: expected at most \d+ tokens, the length of all essays, found 3000"),
    ],
)
def test_lengths_that_no_haystack_has(tokens: int, message: str) -> None:
    with pytest.raises(Error, match=message) as refusal:
        ruler_prompt("niah_single_2", tokens, 0, count_tokens, "x", ("salt",))
    assert refusal.value.exit_code == 2


def test_order_of_names() -> None:
    """Tasks in the table's order, lengths as numbers, then other names."""
    names = ["niah_single_2-500", "niah_single_2-1000", "niah_multikey_1-500", "vt-4000", "fwe-500", "chat-1", "vt-x"]
    assert sorted(reversed(names), key=ruler.place) == names
