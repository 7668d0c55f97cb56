"""The synthetic tasks of RULER, reimplemented: needles in a haystack, variable tracking, frequent words.

The tasks, their parameters and their wording are those of https://github.com/NVIDIA/RULER (Apache-2.0):
scripts/synthetic.yaml, scripts/data/synthetic/constants.py, niah.py, variable_tracking.py and
freq_words_extraction.py. No code is copied. RULER scores a text by `string_match_all`, the share of answers that it
contains; `contains` of `kvreplay live` is this number. RULER's cwe and qa tasks are left out.

Differences to RULER:

- Noise is lines of five sentences in a random order that each prompt draws. RULER repeats one line of five sentences,
  so its shorter haystacks are contained in its longer ones.
- Essays are those of traces/corpus/essays in whole sentences, never repeated. RULER reads Paul Graham's essays and
  cuts them after a word.
- Needles of every haystack, and the assignments of vt, are at depths of RULER's list. RULER uses that list for essays
  and draws a line for the other haystacks.
- Keys and values of one prompt are distinct, so an answer occurs as often as its task says. RULER may draw one twice.
- vt has no worked example before the task.
- The requested length is the prompt's. RULER's includes the tokens to generate.
- An empty line is before the question, and the answer prefix ends without a space; the continuation begins with it.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvreplay.capture.corpus_prompts import END_OF_SENTENCE, essay_names, read
from kvreplay.capture.prompts import Prompt
from kvreplay.errors import Error, Refusal

SEED = 42
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # percent of the haystack: linspace(0, 100, 40), rounded
SENTENCES_OF_A_LINE = 5  # of noise

THINGS = read("ruler/things").split()
PLACES = read("ruler/places").splitlines()
NOISE = tuple(f"The {thing} {place}." for thing in THINGS for place in PLACES)

ADJECTIVES = read("ruler/adjectives").split()
NOUNS = read("ruler/nouns").split()


@dataclass(frozen=True)
class Needles:
    """Parameters of a niah task: haystack noise, essay or needle; types words, numbers or uuids."""

    haystack: str
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys that the question names


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_type="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
TASKS = (*NEEDLES, "vt", "fwe")

# vt: assignments after the first, and letters of a variable.
HOPS = 4
VARIABLE_LETTERS = 5
# fwe: the word of rank k makes up k^-ALPHA / zeta(ALPHA) of the text, and rank 1 is noise.
ALPHA = 2.0
ZETA = math.pi**2 / 6  # of ALPHA
WORD_LETTERS = 6
TOKENS_OF_A_WORD = 50  # as many tokens of the prompt as this for each word of the vocabulary


def _draw(chance: random.Random, kind: str) -> str:
    if kind == "words":
        return f"{chance.choice(ADJECTIVES)}-{chance.choice(NOUNS)}"
    if kind == "numbers":
        return str(chance.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Yields the values of `draw`, without repetitions."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def _noise(chance: random.Random) -> Iterator[str]:
    """Lines of five sentences; none repeats a sentence before all have occurred."""
    while True:
        order = chance.sample(NOISE, len(NOISE))
        for first in range(0, len(order), SENTENCES_OF_A_LINE):
            yield " ".join(order[first : first + SENTENCES_OF_A_LINE])


def sentences(essays: Sequence[str]) -> list[str]:
    """The essays' sentences without titles."""
    paragraphs = [paragraph for name in essays for paragraph in read(f"essays/{name}").split("\n\n")]
    found = [sentence for paragraph in paragraphs for sentence in END_OF_SENTENCE.split(" ".join(paragraph.split()))]
    return [sentence for sentence in found if sentence[-1] in ".?!"]


def _inserted(haystack: Sequence[str], pieces: Sequence[str], depths: Sequence[int]) -> list[str]:
    """The pieces in their order, each after its depth's percentage of the haystack."""
    text: list[str] = []
    begin = 0
    for piece, depth in zip(pieces, sorted(depths), strict=True):
        end = len(haystack) * depth // 100
        text += [*haystack[begin:end], piece]
        begin = end
    return [*text, *haystack[begin:]]


def _continued(answers: Sequence[str]) -> str:
    return " " + ", ".join(answers)


def niah(name: str, task: Needles, size: int, number: int, essays: Sequence[str]) -> Prompt | None:
    """Needles in a haystack of `size` lines or sentences; None if the essays have fewer."""
    chance = random.Random(SEED + number)
    keys = _distinct(lambda: _draw(chance, task.key_type))
    values = _distinct(lambda: _draw(chance, task.value_type))

    def needle(key: str, value: str) -> str:
        return f"One of the special magic {task.value_type} for {key} is: {value}."

    pairs = [(key, list(islice(values, task.values))) for key in islice(keys, task.keys)]
    needles = [needle(key, value) for key, of_key in pairs for value in of_key]
    chance.shuffle(needles)
    depths = chance.sample(DEPTHS, len(needles))
    asked = chance.sample(pairs, task.queries)
    if task.haystack == "noise":
        haystack = list(islice(_noise(chance), size))
    elif task.haystack == "needle":
        haystack = [needle(next(keys), next(values)) for _ in range(size)]
    else:
        haystack = sentences(essays)[:size]
    if len(haystack) < size:
        return None
    text = (" " if task.haystack == "essay" else "\n").join(_inserted(haystack, needles, depths))
    answers = tuple(value for _, of_key in asked for value in of_key)
    names = [key for key, _ in asked]
    query = ", ".join(names[:-1]) + f", and {names[-1]}" if len(names) > 1 else names[0]
    if len(answers) == 1:
        kind = task.value_type.removesuffix("s")
        first, some, verb = f"A special magic {kind} is", f"the special magic {kind}", "is"
    else:
        kind = task.value_type
        first, some, verb = f"Some special magic {kind} are", f"all the special magic {kind}", "are"
    instruction = f"{first} hidden within the following text. Make sure to memorize it. "
    instruction += f"I will quiz you about the {kind} afterwards."
    question = f"What {verb} {some} for {query} mentioned in the provided text?"
    prefix = f"The special magic {kind} for {query} mentioned in the provided text {verb}"
    return Prompt(
        name,
        f"{instruction}\n{text}",
        f"{question} {prefix}",
        answers,
        needle(asked[0][0], answers[0]),
        continuation=_continued(answers),
    )


def vt(name: str, size: int, number: int) -> Prompt:
    """A chain of assignments in `size` lines of noise; all variables of the chain have the asked value."""
    chance = random.Random(SEED + number)
    letters = string.ascii_uppercase
    variables = list(islice(_distinct(lambda: "".join(chance.choices(letters, k=VARIABLE_LETTERS))), HOPS + 1))
    value = chance.randint(10000, 99999)
    chain = [f"VAR {variables[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in zip(variables, variables[1:], strict=False)]
    depths = chance.sample(DEPTHS, len(chain))
    text = "\n".join(_inserted(list(islice(_noise(chance), size)), chain, depths))
    instruction = "Memorize and track the chain(s) of variable assignment hidden in the following text."
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = "Answer: According to the chain(s) of variable assignment in the text above, "
    prefix += f"{len(variables)} variables are assigned the value {value}, they are:"
    return Prompt(
        name,
        f"{instruction}\n\n{text}",
        f"{question} {prefix}",
        tuple(variables),
        chain[0],
        continuation=_continued(variables),
    )


def fwe(name: str, size: int, number: int, tokens: int) -> Prompt:
    """Coded words with Zipf's frequencies, `size` before rounding down; the question is for the three most frequent."""
    chance = random.Random(SEED + number)
    letters = string.ascii_lowercase
    vocabulary = max(8, tokens // TOKENS_OF_A_WORD)
    coded = list(islice(_distinct(lambda: "".join(chance.choices(letters, k=WORD_LETTERS))), vocabulary - 1))
    ranked = ["...", *coded]
    words = [word for k, word in enumerate(ranked, 1) for _ in range(int(size * k**-ALPHA / ZETA))]
    chance.shuffle(words)
    answers = tuple(coded[:3])
    instruction = "Read the following coded text and track the frequency of each coded word. "
    instruction += "Find the three most frequently appeared coded words."
    question = "Question: Do not provide any explanation. Please ignore the dots '....'. "
    question += "What are the three most frequently appeared words in the above coded text?"
    prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
    context = f"{instruction} {' '.join(words)}"
    return Prompt(name, context, f"{question} {prefix}", answers, continuation=_continued(answers))


def longest(
    make: Callable[[int], Prompt | None], smallest: int, tokens: int, count_tokens: Callable[[str], int]
) -> tuple[int, Prompt]:
    """The largest size whose prompt has at most `tokens` tokens, and that prompt; None marks a size without text."""

    def fitting(size: int) -> Prompt | None:
        prompt = make(size)
        return prompt if prompt and count_tokens(prompt.text) <= tokens else None

    found = fitting(smallest)
    if found is None:
        shortest = make(smallest)
        assert shortest is not None  # every text has the smallest size
        least = f"at least {count_tokens(shortest.text)} tokens"
        raise Error(shortest.name, "length", least, str(tokens), Refusal.USAGE)
    low, step = smallest, smallest
    while (larger := fitting(low + step)) is not None:
        found, low, step = larger, low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        larger = fitting(middle)
        if larger is None:
            high = middle
        else:
            found, low = larger, middle
    if make(low + 1) is None:
        expected = f"at most {count_tokens(found.text)} tokens, the length of all essays"
        raise Error(found.name, "length", expected, str(tokens), Refusal.USAGE)
    return low, found


def maker(
    task: str, tokens: int, number: int, name: str = "", essays: Sequence[str] | None = None
) -> tuple[Callable[[int], Prompt | None], int]:
    """The prompts of a task by the size of their haystack, and the smallest size."""
    name = name or f"{task}-{tokens}"
    if task in NEEDLES:
        texts = essay_names(number) if essays is None else essays
        return lambda size: niah(name, NEEDLES[task], size, number, texts), 2
    if task == "vt":
        return lambda size: vt(name, size, number), 4
    return lambda size: fwe(name, size, number, tokens), 64


def ruler_prompt(
    task: str,
    tokens: int,
    number: int,
    count_tokens: Callable[[str], int],
    name: str = "",
    essays: Sequence[str] | None = None,
) -> Prompt:
    """The prompt of a task whose haystack is the longest with at most `tokens` tokens in the prompt.

    `number` selects keys, values, depths and order (the random seed is 42 plus it), and the first essay. `essays`
    names the essays to use instead. The prompt's name is TASK-TOKENS unless `name` is given.
    """
    return longest(*maker(task, tokens, number, name, essays), tokens, count_tokens)[1]


def place(name: str) -> tuple[int, int, str]:
    """Sorts names TASK-TOKENS by task and length, others after them by name."""
    task, _, tokens = name.rpartition("-")
    return (TASKS.index(task), int(tokens), "") if task in TASKS and tokens.isdecimal() else (len(TASKS), 0, name)


def ruler_prompts(lengths: Sequence[int], tasks: Sequence[str], count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Each task at each length. A prompt does not depend on the other requested tasks and lengths."""
    return [
        ruler_prompt(task, tokens, tokens * len(TASKS) + TASKS.index(task), count_tokens)
        for task in sorted(tasks, key=TASKS.index)
        for tokens in lengths
    ]
