"""Runs that the tests of the report share, and the browser that looks at their pages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("plot", "cli")]

from program import done  # noqa: E402
from run_pages import POLICIES, TRACE  # noqa: E402


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the shipped trace with its scores, and the table that it printed: every granularity, sets that change
    with time, sets of everything, and policies that no budget binds, above and below it; random twins where there are
    such."""
    folder = tmp_path_factory.mktemp("report")
    words = ["replay", TRACE, "-p", POLICIES, "-b", "0.1,160", "--controls", "twins", "--save", "scores", "-o", "real"]
    return folder / "real", done(*words, "--all", "--wide", folder=folder)


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """Debian's Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install -e .[test]")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium: tools/setup checks installs it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
