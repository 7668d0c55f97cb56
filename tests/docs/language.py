"""Texts of the project, and the phrases of language.yaml that they contain.

Run as a program, this file prints every hit: file, line, phrase and replacement. Arguments restrict it to kinds of text
(pages, help, cards, texts, docstrings) or to files.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import yaml
from shown_commands import GENERATED, ROOT, run, tracked
from test_links import FENCE, INLINE_CODE, pages

RULES = ROOT / "tests" / "docs" / "language.yaml"
# Texts that describe the past, and this file's own rules.
SKIPPED_PAGES = ("CHANGELOG.md",)
# Words between spaces that make a literal a text.
LEAST_WORDS = 3
CPP_FOLDERS = ("core", "analysis", "cuda", "tools/cli", "tools/python/engine")
PYTHON_FOLDERS = ("tools/capture", "tools/live", "tools/python")


@dataclass(frozen=True)
class Text:
    file: str
    line: int
    words: str


@dataclass(frozen=True)
class Rule:
    match: re.Pattern[str]
    write: str
    is_mark: bool
    kinds: frozenset[str]


@dataclass(frozen=True)
class Hit:
    text: Text
    found: str
    rule: Rule

    def __str__(self) -> str:
        words = " ".join(self.text.words.split())
        begin = max(0, words.find(self.found) - 40)
        place = f"{self.text.file}:{self.text.line}"
        return f'{place}: "{self.found}": write {self.rule.write}   ... {words[begin : begin + 100]}'


@cache
def rules_file() -> dict:
    return yaml.safe_load(RULES.read_text(encoding="utf-8"))


@cache
def rules() -> tuple[Rule, ...]:
    made = []
    for group in ("marks", "phrases", "constructions"):
        for entry in rules_file()[group]:
            flags = 0 if entry.get("case") else re.IGNORECASE
            kinds = frozenset(entry.get("kinds", KINDS))
            made.append(Rule(re.compile(entry["match"], flags), entry["write"], group == "marks", kinds))
    return tuple(made)


def blank(text: str) -> str:
    """The line feeds alone, so that later lines keep their numbers."""
    return "\n" * text.count("\n")


def page_texts() -> Iterator[Text]:
    """Paragraphs, list items and rows of tables. Code is skipped, and output of commands: other kinds contain it."""
    for page in pages():
        name = str(page.relative_to(ROOT))
        if name in SKIPPED_PAGES:
            continue
        text = page.read_text(encoding="utf-8")
        text = GENERATED.sub(lambda found: blank(found[0]), text)
        text = FENCE.sub(lambda found: blank(found[0]), text)
        text = INLINE_CODE.sub("`code`", text)
        text = re.sub(r"\]\([^)\s]*\)", "]", text)
        begin, lines = 1, []
        for number, line in enumerate([*text.split("\n"), ""], 1):
            begins = not line.strip() or re.match(r"\s*([-*+] |\d+\. |\||#|>)", line)
            if begins and lines:
                yield Text(name, begin, "\n".join(lines))
                lines = []
            if line.strip():
                if not lines:
                    begin = number
                lines.append(re.sub(r"^\s*([-*+] |\d+\. |[|#>]+)\s*", "", line) if begins else line)


def commands() -> list[str]:
    """Names in the overview, each indented and followed by two spaces and its summary."""
    names = set(re.findall(r"^ +([a-z][a-z-]*)  +\S", run("kvreplay help"), re.MULTILINE))
    assert {"replay", "policies", "live", "sweep"} <= names, names
    return sorted(names)


def help_texts() -> Iterator[Text]:
    for name in ["", *commands()]:
        shown = run(f"kvreplay help {name}")
        for number, line in enumerate(shown.split("\n"), 1):
            if line.strip():
                yield Text(f"kvreplay help {name}".strip(), number, line.strip())


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def card_texts() -> Iterator[Text]:
    for command in ("kvreplay policies --json", "kvreplay metrics --json", "kvreplay policies --parts --json"):
        for card in json.loads(run(command)):
            for text in strings(card):
                yield Text(f"{command}: {card['name']}", 1, text)


CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CPP_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')


def cpp_literals(name: str) -> Iterator[Text]:
    """String literals, adjacent ones joined."""
    text = (ROOT / name).read_text(encoding="utf-8")
    tokens = re.compile(f"(?P<comment>{CPP_COMMENT.pattern})|(?P<literal>{CPP_LITERAL.pattern})", re.DOTALL)
    for token in tokens.finditer(text):
        if token["literal"]:
            words = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', token["literal"])).replace("\\n", "\n")
            yield Text(name, text.count("\n", 0, token.start()) + 1, words)


DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            yield statement.value


def python_literals(name: str) -> Iterator[Text]:
    """String constants other than docstrings; parts of an f-string are joined."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    skipped = {id(constant) for constant in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            skipped |= {id(part) for part in node.values}
            yield Text(name, node.lineno, "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield Text(name, node.lineno, node.value)


def literal_texts() -> Iterator[Text]:
    """Errors, warnings, help and cards in the sources: every string literal of some words."""
    sources = [f"{folder}/**/*{end}" for folder in CPP_FOLDERS for end in (".h", ".cpp", ".cu", ".h.in")]
    sources += [f"{folder}/*{end}" for folder in CPP_FOLDERS for end in (".h", ".cpp", ".cu", ".h.in")]
    for name in tracked(*sources):
        yield from (text for text in cpp_literals(name) if len(text.words.split()) >= LEAST_WORDS)
    for name in tracked(*(f"{folder}/*.py" for folder in PYTHON_FOLDERS)):
        yield from (text for text in python_literals(name) if len(text.words.split()) >= LEAST_WORDS)


def docstring_texts() -> Iterator[Text]:
    for name in tracked(*(f"{folder}/*.py" for folder in PYTHON_FOLDERS)):
        for constant in docstrings(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            yield Text(name, constant.lineno, str(constant.value))


KINDS = {
    "pages": page_texts,
    "help": help_texts,
    "cards": card_texts,
    "literals": literal_texts,
    "docstrings": docstring_texts,
}


def is_allowed(text: Text) -> bool:
    return any(text.file == entry["file"] and entry["text"] in text.words for entry in rules_file()["allowed"])


def hits_of(text: Text, kind: str = "pages") -> list[Hit]:
    """Line feeds count as spaces. The line of a hit is that of its first character."""
    flat = text.words.replace("\n", " ")
    found = []
    for rule in (rule for rule in rules() if kind in rule.kinds):
        for match in rule.match.finditer(flat):
            line = text.line + text.words.count("\n", 0, match.start())
            found.append(Hit(Text(text.file, line, text.words), match[0].strip(), rule))
    return found + long_sentences(text) if kind == "pages" else found


def long_sentences(text: Text) -> list[Hit]:
    """Rows of tables are not sentences."""
    longest = rules_file()["longest_sentence"]
    rule = Rule(re.compile(""), f"sentences of at most {longest} words", False, frozenset({"pages"}))
    flat, found = text.words.replace("\n", " "), []
    for match in re.finditer(r"\S.*?(?:[.!?:](?=\s|$)|$)", flat):
        words = len(match[0].split())
        if words > longest and " | " not in flat:
            line = text.line + text.words.count("\n", 0, match.start())
            found.append(Hit(Text(text.file, line, text.words), " ".join(match[0].split()[:4]), rule))
    return found


@cache
def hits(kind: str) -> tuple[Hit, ...]:
    return tuple(hit for text in KINDS[kind]() if not is_allowed(text) for hit in hits_of(text, kind))


def marks_of_pages(lines_of: tuple[Hit, ...]) -> set[tuple[str, int]]:
    return {(hit.text.file, hit.text.line) for hit in lines_of if hit.rule.is_mark}


def report(found: tuple[Hit, ...] | list[Hit]) -> str:
    """Each hit in a line, then the number of hits of each file."""
    counts = Counter(hit.text.file for hit in found)
    lines = [str(hit) for hit in sorted(found, key=lambda hit: (hit.text.file, hit.text.line))]
    lines += ["", *(f"{count:5}  {file}" for file, count in counts.most_common()), f"{len(found):5}  all"]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    kinds = [name for name in arguments if name in KINDS] or list(KINDS)
    files = [name for name in arguments if name not in KINDS]
    print(report([hit for kind in kinds for hit in hits(kind) if not files or hit.text.file in files]))
