"""Runs, traces and kept sets as HTML for notebooks: self-contained, and readable on light and on dark pages."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvreplay.results import Run, Selection
    from kvreplay.trace import Trace

MOST_ROWS = 40
MOST_COLUMNS = 480  # of a map: positions of longer prompts are averaged
MAP_COLOUR = (44, 133, 189)
TEXT_SHOWN = 240  # characters
TABLE = "border-collapse:collapse;max-width:60em;font-variant-numeric:tabular-nums"
CELL = "padding:2px 10px 2px 0;vertical-align:top;border-bottom:1px solid rgba(128,128,128,.3)"


def trace_html(trace: Trace) -> str:
    """The facts of a trace, its spans and the end of its prompt."""
    text = trace.text
    spans = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in trace.spans)
    shown = text[:TEXT_SHOWN] + ("…" if len(text) > TEXT_SHOWN else "")
    return titled(
        f"trace {trace.name}",
        facts(
            ("model", trace.model + (" (synthetic)" if trace.synthetic else "")),
            ("tokens", f"{trace.prompt:,} prompt + {trace.tokens - trace.prompt:,} continuation"),
            ("layers", f"{trace.layers}"),
            ("heads", f"{trace.query_heads} query, {trace.kv_heads} KV, {trace.head_dim} components"),
            ("data type", trace.dtype),
            ("spans", spans),
            ("text", shown),
        ),
    )


def run_html(run: Run) -> str:
    """The table of `kvreplay show --all`, with the best policies of each budget in bold."""
    lines = [line for line in run.table(all=True, format="markdown").splitlines() if line.startswith("|")]
    header, rule, *rows = ([markdown_cell(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    traces = run.stored_traces
    title = f"run of {len(traces)} traces" if len(traces) > 1 else f"run on {traces[0]}"
    note = "open loop; bold: best policy at this budget and equal memory; in parentheses: controls"
    if len(rows) > MOST_ROWS:
        note += f"; {len(rows) - MOST_ROWS} more rows in run.results"
    return titled(title, table(header, rows[:MOST_ROWS], rule.count("---")), note)


def markdown_cell(text: str) -> str:
    """A cell of a Markdown table."""
    return re.sub(r"^\*\*(.*)\*\*$", r"<b>\1</b>", escape(text.strip().replace("\\|", "|")))


def selection_html(selection: Selection) -> str:
    """The share of heads that keep each token, layer × position, and the counts of kept and protected tokens."""
    kept = selection.kept
    share = selection.mask().mean(axis=1)
    width = min(MOST_COLUMNS, selection.boundary)
    starts = np.arange(width) * selection.boundary // width
    columns = np.add.reduceat(share, starts, axis=1) / np.diff([*starts, selection.boundary])
    picture = base64.b64encode(palette_png(np.round(255 * columns).astype(np.uint8))).decode()
    first, last = selection.numbers[[0, -1]]
    style = (
        f"display:block;width:{width * 1.5:.0f}px;max-width:100%;height:{len(share) * 5}px;image-rendering:pixelated;"
        "border:1px solid rgba(128,128,128,.5)"
    )
    image = f'<img alt="kept tokens" src="data:image/png;base64,{picture}" style="{style}">'
    return titled(
        f"kept tokens of {selection.boundary:,}",
        image
        + facts(
            ("map", f"layers {first} to {last} from top to bottom, positions from left to right; colour: share of the "
             f"{kept.shape[1]} kept sets of a layer"),
            ("kept", f"{kept.mean():.1f} on average, {kept.min()} to {kept.max()}"),
            ("protected", f"{extent(selection.sinks)} sinks, {extent(selection.recent)} recent tokens"),
        ),
    )  # fmt: skip


def extent(counts: np.ndarray) -> str:
    """The range of counts, or the only one."""
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def titled(title: str, body: str, note: str = "") -> str:
    """A block with a heading, and a note below."""
    below = f'<div style="opacity:.75;font-size:smaller">{escape(note)}</div>' if note else ""
    return f"<div><b>kvreplay {escape(title)}</b>{body}{below}</div>"


def facts(*rows: tuple[str, str]) -> str:
    """A table of names and texts; empty texts are left out."""
    return table([], [[escape(name), escape(text)] for name, text in rows if text], 2)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table of escaped cells. The first `words` columns are aligned to the left, the others to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        nowrap = ";white-space:nowrap"
        left = [f"text-align:left{nowrap if header or place == 0 else ''}" for place in range(words)]
        aligned = [*left, *["text-align:right"] * (len(cells) - words)]
        return "".join(
            f'<{tag} style="{CELL};{style}">{cell}</{tag}>' for cell, style in zip(cells, aligned, strict=True)
        )

    head = f"<thead><tr>{line(header, 'th')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<table style="{TABLE}">{head}<tbody>{body}</tbody></table>'


def palette_png(opacity: np.ndarray) -> bytes:
    """A PNG file in one colour: uint8 [rows, columns], 0 transparent, 255 opaque. matplotlib is optional here."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns = opacity.shape
    lines = np.pad(opacity, ((0, 0), (1, 0)))  # each line begins with its filter: 0, none
    return b"\x89PNG\r\n\x1a\n" + b"".join((
        chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", bytes(MAP_COLOUR) * 256),
        chunk(b"tRNS", bytes(range(256))),
        chunk(b"IDAT", zlib.compress(lines.tobytes())),
        chunk(b"IEND", b""),
    ))  # fmt: skip
