"""The page as bytes: a skeleton with style, script and data inside. It loads nothing and runs its own script alone."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from kvreplay.errors import Error, Refusal
from kvreplay.report.content import Page

MOST_BYTES = 8_000_000
SCRIPTS = ("data.js", "address.js", "table.js", "charts.js", "heatmaps.js", "tokens.js", "map.js", "traces.js",
           "writing.js", "save.js", "main.js")  # fmt: skip
LEAST_ROOM = 200_000  # below it no trace of any size has its sets


def part(name: str) -> str:
    """One of the page's own files."""
    return (files("kvreplay.report") / "page" / name).read_text(encoding="utf-8")


def source(text: str) -> str:
    """The source expression of an inline style or script in a Content-Security-Policy (CSP level 3, section 2.3.1)."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"


def as_json(content: dict[str, Any]) -> str:
    """JSON that ends no script element and opens none, whatever texts are in it (HTML, section 4.12.1.3)."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def written(page: Page) -> bytes:
    """The file, of at most `MOST_BYTES`: planes that do not fit are omitted, and a note on the page lists them."""
    style, script = part("page.css"), "\n".join(part(name) for name in SCRIPTS)
    pieces = {
        "title": html.escape(f"{page.content['title']} · kvreplay"),
        "policy": f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
    }
    skeleton = part("page.html")

    def filled(data: str) -> bytes:
        # One pass: what was put in is not searched again.
        values = pieces | {"data": data}
        return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], skeleton).encode()

    room = MOST_BYTES - len(filled(as_json(page.content)))
    if room < LEAST_ROOM:
        found = f"{MOST_BYTES - room:,} of {MOST_BYTES:,} bytes without any sets"
        raise Error("report", "results too large for a page", "fewer traces, policies or budgets", found, Refusal.USAGE)
    page.fill(room - 10_000)  # for the notes on what is left out
    return filled(as_json(page.content))
