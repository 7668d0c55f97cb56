"""Are the prompts of the corpus what they promise: kinds, lengths, needles, answers, right sums, spans?"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the corpus needs tools/setup build python")

from kvreplay.capture import corpus_prompts
from kvreplay.capture.corpus_prompts import END_OF_SENTENCE, HAYSTACK_WORDS, KINDS, full_prompts, read, small_prompts
from kvreplay.capture.prompts import Prompt, encode, render
from kvreplay.capture.spans import decode_with_offsets, find_spans

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "model" / "smollm2-135m-instruct.gguf"
PROMPTS = [*full_prompts(), *small_prompts()]
NAMES = [*(prompt.name for prompt in full_prompts()), *(f"small {prompt.name}" for prompt in small_prompts())]

every_prompt = pytest.mark.parametrize("prompt", PROMPTS, ids=NAMES)


def of_kind(kind: str) -> pytest.MarkDecorator:
    chosen = [(prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True) if prompt.name.startswith(f"{kind}-")]
    return pytest.mark.parametrize("prompt", [prompt for prompt, _ in chosen], ids=[name for _, name in chosen])


def occurrences(piece: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(piece)}(?!\w)", text))


@pytest.mark.parametrize(
    ("prompts", "least", "least_of_a_kind"), [(full_prompts, 24, 3), (small_prompts, 8, 1)], ids=["full", "small"]
)
def test_kinds_and_counts(prompts: Callable[[], list[Prompt]], least: int, least_of_a_kind: int) -> None:
    names = [prompt.name for prompt in prompts()]
    assert len(set(names)) == len(names) >= least
    counts = Counter(name.partition("-")[0] for name in names)
    assert tuple(counts) == KINDS
    assert min(counts.values()) >= least_of_a_kind
    assert len({(prompt.context_pieces, prompt.question) for prompt in prompts()}) == len(names)


def test_needles_are_a_grid_of_lengths_and_depths() -> None:
    grid = {f"needle-{tokens}-d{depth}" for tokens in (1000, 2000, 4000) for depth in (10, 50, 90)}
    assert {prompt.name for prompt in full_prompts() if prompt.name.startswith("needle")} == grid


def test_no_two_prompts_have_a_name() -> None:
    """Of both corpora: their traces may share a folder or a comparison."""
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)


def test_prompts_are_the_same_in_every_call() -> None:
    assert [*full_prompts(), *small_prompts()] == PROMPTS


@of_kind("needle")
def test_needles(prompt: Prompt) -> None:
    """Once in the context as a sentence of its own, where the name says; the answer once, and in the needle."""
    _, tokens, depth = prompt.name.split("-")
    assert prompt.context.count(prompt.needle) == 1
    assert prompt.needle in [s for paragraph in prompt.context.split("\n\n") for s in END_OF_SENTENCE.split(paragraph)]
    [answer] = prompt.answers
    assert answer in prompt.needle and occurrences(answer, prompt.context) == 1
    assert answer not in prompt.question
    words = prompt.context.replace(prompt.needle, "").split()
    before = prompt.context.partition(prompt.needle)[0].split()
    assert HAYSTACK_WORDS[int(tokens)] <= len(words) < HAYSTACK_WORDS[int(tokens)] + 60
    # A sentence is some 20 words long, and the nearest end of one is taken.
    assert abs(len(before) - int(depth.removeprefix("d")) / 100 * len(words)) <= 30


@of_kind("needle")
def test_haystacks_repeat_nothing(prompt: Prompt) -> None:
    paragraphs = prompt.context.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    titles = {read(f"essays/{path.stem}").split("\n")[0] for path in (corpus_prompts.TEXTS / "essays").glob("*.txt")}
    assert prompt.context.endswith(".") and paragraphs[0] in titles and paragraphs[-1] not in titles


def test_needles_and_haystacks_differ() -> None:
    needles = [prompt for prompt in PROMPTS if prompt.needle]
    for values in ({p.needle for p in needles}, {p.question for p in needles}, {p.answers for p in needles}):
        assert len(values) == len(needles)
    for prompts in (full_prompts(), small_prompts()):
        beginnings = [prompt.context.split("\n")[0] for prompt in prompts if prompt.needle]
        assert len(set(beginnings)) == len(beginnings)


@of_kind("question")
def test_answers_are_once_in_the_documents(prompt: Prompt) -> None:
    [answer] = prompt.answers
    assert occurrences(answer, prompt.context) == 1 and answer not in prompt.question
    assert prompt.question.endswith("?")


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
WORDS = {"Two": 2, "two": 2, "Three": 3, "half": 2, "third": 3, "quarter": 4, "first hour": 1, "3 out of every 4": 4}
WORDS |= {"each weekday": 5, "kilograms": 1000}
PROBLEMS = read("problems").split("\n\n")


@pytest.mark.parametrize("problem", PROBLEMS, ids=range(len(PROBLEMS)))
def test_sums_are_right(problem: str) -> None:
    """Every equation holds, starts from numbers that are given or were found before, and the last is the answer."""
    question, separator, solution = problem.partition("\nAnswer: ")
    assert question.startswith("Question: ") and separator and "\n" not in solution
    given = {Fraction(number) for number in re.findall(r"\d+", question)}
    given |= {Fraction(value) for word, value in WORDS.items() if word in question}
    equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", solution)
    assert len(equations) == solution.count("=") > 0
    for left, sign, right, result in equations:
        assert OPERATIONS[sign](Fraction(left), Fraction(right)) == Fraction(result), f"{left} {sign} {right}"
        assert {Fraction(left), Fraction(right)} <= given, f"{left} {sign} {right} of {sorted(given)}"
        given.add(Fraction(result))
    assert solution.endswith(f" The answer is {equations[-1][3]}.")


@of_kind("arithmetic")
def test_the_problem_asked_is_none_of_the_examples(prompt: Prompt) -> None:
    assert prompt.question.endswith("\nAnswer:") and prompt.question not in prompt.context
    examples = prompt.context.split("\n\n")
    assert len(set(examples)) == len(examples) >= 3 and set(examples) < set(PROBLEMS)


@of_kind("code")
def test_code_breaks_off_inside_a_function(prompt: Prompt) -> None:
    instruction, _, context = prompt.context.partition("\n\n")
    if "Python" in instruction:
        ast.parse(context)
        lines = prompt.question.splitlines()
        assert lines[0].lstrip().startswith("def ")
        assert all(line.startswith(" ") for line in lines[1:]) and "return" not in lines[-1]
    else:
        whole = f"{context}\n{prompt.question}"
        assert whole.count("{") > whole.count("}") + 1  # of the class and the function at least
        assert prompt.question.count("{") > prompt.question.count("}")


@of_kind("chat")
def test_conversations_take_turns(prompt: Prompt) -> None:
    roles = [message.role for message in prompt.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] and len(roles) >= 5
    assert prompt.question == prompt.messages[-1].content and all(message.content for message in prompt.messages)


@pytest.fixture(scope="module")
def tokenizer():
    if not MODEL.exists():
        pytest.skip("the tokenizer of SmolLM2 needs tools/setup model")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)


@every_prompt
def test_tokens_and_spans(prompt: Prompt, tokenizer, request: pytest.FixtureRequest) -> None:
    """Lengths are in the promised ranges, and each span's tokens are its text."""
    ids = encode(tokenizer, prompt, chat=True)
    small = "small" in request.node.name
    assert (250 if small else 1000) <= len(ids) <= (500 if small else 4000)
    if prompt.needle:
        assert abs(len(ids) / int(prompt.name.split("-")[1]) - 1) < 0.06

    def decode(some: list[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text, offsets = decode_with_offsets(decode, ids)
    spans = find_spans(prompt, render(tokenizer, prompt.marked(), True), (), text, offsets, len(ids))
    found = {span.name: text[offsets[span.begin][0] : offsets[span.end - 1][1]].strip() for span in spans}
    expected = {"question": prompt.question.strip()}
    if prompt.answers:
        expected["answer"] = prompt.answers[0]
    if prompt.needle:
        expected["needle"] = prompt.needle
    context = found.pop("context")
    pieces = [piece.strip() for piece in prompt.context_pieces]
    assert context.startswith(pieces[0]) and context.endswith(pieces[-1])
    assert prompt.messages or context == pieces[0]
    assert found.keys() == expected.keys()
    for name, piece in expected.items():
        # A token may reach over a piece's end: a quotation mark, a full stop.
        assert piece in found[name] and len(found[name]) <= len(piece) + 2, name
