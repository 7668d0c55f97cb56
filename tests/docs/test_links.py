"""Links and pictures of every page exist in this repository, headings included. Web addresses are not visited."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from shown_commands import ROOT, tracked

FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def pages() -> list[Path]:
    quotes = "tests/docs/read_twice.md"  # sentences of other pages, with their links
    return [ROOT / name for name in tracked("*.md") if name != quotes]


def slug(heading: str) -> str:
    """The anchor of a heading, by GitHub's rule: link text alone, lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set(HTML_ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        anchor, number = slug(heading), 0
        while (anchor if number == 0 else f"{anchor}-{number}") in found:
            number += 1
        found.add(anchor if number == 0 else f"{anchor}-{number}")
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """Line and target of each local link."""
    text = page.read_text(encoding="utf-8")
    # Code keeps its line feeds, so that line numbers are those of the page.
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    text = INLINE_CODE.sub("code", text)
    found = [(text.count("\n", 0, match.start()) + 1, match[1]) for match in LINK.finditer(text)]
    return [(line, target) for line, target in found if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def broken(page: Path) -> list[str]:
    problems = []
    for line, target in links(page):
        name, _, anchor = unquote(target).partition("#")
        file = page if not name else page.parent / name
        if not file.exists():
            problems.append(f"{page.relative_to(ROOT)}:{line}: {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            problems.append(f"{page.relative_to(ROOT)}:{line}: {target}: no such heading")
    return problems


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page):
    problems = broken(page)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "heading, expected",
    [
        ("Presets of published code", "presets-of-published-code"),
        ("`kvreplay live`: what it adds", "kvreplay-live-what-it-adds"),
        ("[Parts](x.md) & pages", "parts--pages"),
    ],
)
def test_anchors_of_headings(heading, expected):
    assert slug(heading) == expected


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#none) [c](none.md) `[d](none.md)` [e](https://example.org/x)\n")
    assert broken(page) == ["page.md:2: #none: no such heading", "page.md:2: none.md: no such file"]
