"""The documentation site builds without warnings, and no link on it is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from language import commands
from shown_commands import ROOT, run

import kvreplay

BUILD = ROOT / "docs" / "site" / "build.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, BUILD, folder], text=True, capture_output=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_docs_is_in_the_navigation(site):
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    missing = [str(page) for page in pages if not (site / html_name(page)).is_file()]
    assert not missing
    home = (site / "index.html").read_text()
    assert not [str(page) for page in pages if f'href="{html_name(page)}" class="md-nav__link"' not in home]


def html_name(page: Path) -> Path:
    return page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")


def test_the_reference_has_every_policy(site):
    reference = (site / "reference" / "policies.html").read_text()
    names = run("kvreplay policies --names").split()
    assert names
    assert not [name for name in names if f'id="{name}"' not in reference]
    for fact in ("Granularity", "Needs", "Class", "Cost"):
        assert reference.count(f"<li>{fact}: ") == len(names)


def test_the_reference_has_every_command_and_every_public_name(site):
    command_line = (site / "reference" / "command-line.html").read_text()
    assert not [name for name in commands() if name != "help" and f'id="kvreplay-{name}"' not in command_line]
    api = (site / "reference" / "python.html").read_text()
    assert not [name for name in kvreplay.__all__ if f'id="kv{name.lower()}' not in api]
    assert "window_attention(" in api


@pytest.mark.parametrize(
    "html, problem",
    [
        ('<a href="missing.html">x</a>', "missing.html: no such file"),
        ('<a href="#missing">x</a>', "#missing: no such anchor"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from another host"),
    ],
)
def test_broken_links_are_found(tmp_path, html, problem):
    (tmp_path / "index.html").write_text(f"<html>{html}</html>")
    done = subprocess.run([sys.executable, BUILD, "--check", tmp_path], text=True, capture_output=True)
    assert done.returncode == 1 and problem in done.stderr


PURPOSE = "After this page you can "


def test_pages_open_with_their_purpose():
    """The first paragraph of a page says what the reader can do after it."""
    pages = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert not [page.name for page in pages if not opening(page).startswith(PURPOSE)]


def opening(page: Path) -> str:
    return page.read_text().split("\n\n", 2)[1]
