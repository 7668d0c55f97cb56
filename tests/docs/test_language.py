"""No text of the project contains a phrase of language.yaml. `python tests/docs/language.py` prints all hits."""

import re

import pytest
from language import KINDS, Text, hits, hits_of, marks_of_pages, report, rules_file

RULES = [entry for group in ("marks", "phrases", "constructions") for entry in rules_file()[group]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pages"])
def test_texts_have_no_banned_phrase(kind):
    found = hits(kind)
    assert not found, f"{len(found)} hits\n{report(found)}"


def test_pages_have_no_banned_phrase():
    found = [hit for hit in hits("pages") if not hit.rule.is_mark]
    assert not found, f"{len(found)} hits\n{report(found)}"


def test_marks_are_rare_in_pages():
    found = [hit for hit in hits("pages") if hit.rule.is_mark]
    most = rules_file()["most_lines"]
    lines = len(marks_of_pages(hits("pages")))
    assert lines <= most, f"expected at most {most} lines, found {lines}\n{report(found)}"


@pytest.mark.parametrize("entry", RULES, ids=[entry["example"] for entry in RULES])
def test_rules_find_their_examples(entry):
    flags = 0 if entry.get("case") else re.IGNORECASE
    assert re.search(entry["match"], entry["example"], flags)
    assert "not" not in entry or not re.search(entry["match"], entry["not"], flags)
    assert entry["write"]


def test_hits_name_their_lines():
    [hit] = hits_of(Text("page.md", 7, "A run ends.\nThe newest token\nstays here."))
    assert (hit.text.line, hit.found) == (9, "stays")


def test_long_sentences_are_found():
    words = "word " * (rules_file()["longest_sentence"] + 1)
    assert hits_of(Text("page.md", 1, words + ".")) and not hits_of(Text("page.md", 1, "A short one. A second one."))


def test_phrases_may_continue_on_the_next_line():
    [hit] = hits_of(Text("page.md", 1, "budgets as they are asked\nfor in the file"))
    assert hit.found == "asked for"
