"""The pictures of the report in docs/figures, from a page that `kvreplay report` wrote: needs Playwright and Chromium.

python docs/report_pictures.py REPORT.html
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FIGURES = Path(__file__).parent / "figures"
SIZE = {"width": 1400, "height": 860}
# Name, window, colour scheme, the uppermost element, the layer of the text and the map.
PICTURES = [
    ("report-table", SIZE, "light", "table", "-1"),
    ("report-light", SIZE, "light", "text", "12"),
    ("report-map", SIZE, "light", "map", "-1"),
    ("report-dark", SIZE, "dark", "curves", "-1"),
    ("report-narrow", {"width": 400, "height": 860}, "light", "panes", "-1"),
]


def show(window: Page, top: str, layer: str) -> None:
    """SnapKV and H2O, with which the page opens, and a token of the needle, scrolled to `top`."""
    window.select_option("#layer", layer)
    window.click("#jumps button:has-text('needle')")
    window.locator(f"#{top}").evaluate("(one) => one.scrollIntoView({ behavior: 'instant' })")
    window.wait_for_timeout(300)


def main(report: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, size, scheme, top, layer in PICTURES:
            window = browser.new_page(viewport=size, color_scheme=scheme)
            window.goto(report.resolve().as_uri())
            window.wait_for_selector("html[data-ready]")
            show(window, top, layer)
            window.screenshot(path=FIGURES / f"{name}.png")
            window.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
