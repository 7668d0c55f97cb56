"""The pictures of the report in docs/figures, from a page that `kvreplay report` wrote: needs Playwright and Chromium.

python docs/report_pictures.py REPORT.html
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FIGURES = Path(__file__).parent / "figures"
SIZE = {"width": 1180, "height": 760}
# Name, window, colour scheme, the uppermost element, the second policy, the layer.
PICTURES = [
    ("report-light", SIZE, "light", "text", "h2o", "12"),
    ("report-dark", SIZE, "dark", "similarity", "", "-1"),
    ("report-narrow", {"width": 390, "height": 760}, "light", "panes", "", "-1"),
]


def show(window: Page, top: str, beside: str, layer: str) -> None:
    """SnapKV's kept set with a token of the needle selected, scrolled to `top`."""
    window.select_option("#first", "snapkv")
    window.select_option("#second", beside)
    window.select_option("#layer", layer)
    window.locator("#panes .outer-needle").nth(2).click()
    window.locator(f"#{top}").evaluate("(one) => one.scrollIntoView({ behavior: 'instant' })")
    window.wait_for_timeout(300)


def main(report: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, size, scheme, top, beside, layer in PICTURES:
            window = browser.new_page(viewport=size, color_scheme=scheme)
            window.goto(report.resolve().as_uri())
            window.wait_for_selector("html[data-ready]")
            show(window, top, beside, layer)
            window.screenshot(path=FIGURES / f"{name}.png")
            window.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
