"""Draws the pictures of docs/concepts, as SVG with a light panel of their own, which dark pages show as well.

python docs/concept_drawings.py    writes docs/figures/concept-*.svg
"""

from html import escape
from pathlib import Path

FIGURES = Path(__file__).with_name("figures")
INK, LINE, PANEL = "#263238", "#78909c", "#fafafa"
EVICTED, KEPT, SINK, RECENT, LATER = "#e3e8ea", "#ff8a50", "#90a4ae", "#4db6ac", "#90caf9"


class Drawing:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.items: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", weight: str = "normal"
    ) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        self.items.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, words: str = "", line: str = LINE
    ) -> None:
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="3"'
        self.items.append(f'<rect {shape} fill="{fill}" stroke="{line}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, anchor="middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.items.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.items.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}"{dash}/>')

    def brace(self, x1: float, x2: float, y: float, words: str) -> None:
        """A bracket above y, from x1 to x2, with its label."""
        self.items.append(
            f'<polyline points="{x1},{y} {x1},{y - 6} {x2},{y - 6} {x2},{y}" fill="none" stroke="{INK}"/>'
        )
        self.text((x1 + x2) / 2, y - 12, words, 13, "middle")

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        for fill, words in entries:
            self.box(x, y - 12, 14, 14, fill)
            self.text(x + 20, y, words, 13)
            x += 44 + 7 * len(words)

    def write(self, name: str) -> None:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        tip = f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
        shape = 'markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
        marker = f'<defs><marker id="tip" {shape}>{tip}</marker></defs>'
        panel = (
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PANEL}" stroke="{LINE}"/>'
        )
        lines = [
            f'{head} font-family="sans-serif" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            marker,
            panel,
        ]
        (FIGURES / f"concept-{name}.svg").write_text("\n".join([*lines, *self.items, "</svg>", ""]))


def loops() -> None:
    drawing = Drawing(
        760, 390, "Open loop: every layer reads captured tensors. Closed loop: errors reach the next layer"
    )
    drawing.text(190, 32, "Open loop: kvreplay replay", 16, "middle", "bold")
    drawing.text(570, 32, "Closed loop: kvreplay live", 16, "middle", "bold")
    drawing.line(380, 20, 380, 370, dashed=True)
    drawing.box(24, 60, 96, 290, "#eceff1")
    for y, words in ((195, "trace:"), (213, "captured"), (231, "Q, K, V")):
        drawing.text(72, y, words, 14, "middle")
    for index, layer in enumerate(("layer l + 1", "layer l", "layer l − 1")):
        y = 70 + 100 * index
        drawing.arrow((120, y + 35), (158, y + 35))
        drawing.box(160, y, 110, 70, "#ffe0b2")
        drawing.text(215, y + 30, layer, 14, "middle", "bold")
        drawing.text(215, y + 50, "evict", 14, "middle")
        drawing.arrow((270, y + 35), (296, y + 35))
        drawing.text(300, y + 31, "error of", 13)
        drawing.text(300, y + 47, "this layer", 13)
        drawing.box(460, y, 110, 70, "#ffe0b2")
        drawing.text(515, y + 30, layer, 14, "middle", "bold")
        drawing.text(515, y + 50, "evict", 14, "middle")
    for y in (270, 170):
        drawing.arrow((515, y), (515, y - 28))
        drawing.text(523, y - 11, "output with its error", 13)
    drawing.arrow((515, 70), (515, 50), (690, 50), (690, 180))
    drawing.box(626, 182, 128, 52, "#eceff1")
    drawing.text(690, 204, "next token,", 14, "middle")
    drawing.text(690, 222, "maybe another", 14, "middle")
    drawing.arrow((690, 234), (690, 362), (515, 362), (515, 342))
    drawing.write("loops")


def row(drawing: Drawing, x: float, y: float, fills: list[str], width: float = 22, height: float = 26) -> None:
    for index, fill in enumerate(fills):
        drawing.box(x + index * width, y, width - 2, height, fill)


def budget() -> None:
    drawing = Drawing(760, 262, "A budget counts the kept tokens of the prompt; later tokens come on top")
    kept = {0, 1, 5, 9, 10, 14, 18, 19}
    fills = [KEPT if position in kept else EVICTED for position in range(20)]
    drawing.brace(24, 462, 50, "P = 20 prompt tokens")
    drawing.brace(486, 594, 50, "")
    drawing.text(486, 38, "G = 5 tokens of the continuation", 13)
    row(drawing, 24, 62, [LATER] * 20)
    row(drawing, 486, 62, [LATER] * 5)
    drawing.text(612, 80, "full cache", 14)
    drawing.line(473, 44, 473, 170, dashed=True)
    drawing.text(473, 186, "boundary", 13, "middle")
    row(drawing, 24, 122, fills)
    row(drawing, 486, 122, [LATER] * 5)
    drawing.text(612, 132, "after eviction", 14)
    drawing.text(612, 150, "with -b 0.4", 14)
    drawing.text(24, 176, "B = 0.4 · P = 8 kept tokens in each layer and head, on average", 13)
    drawing.text(486, 206, "resident, and read by the", 13)
    drawing.text(486, 222, "eval queries: not in B", 13)
    drawing.legend(24, 244, [(KEPT, "kept"), (EVICTED, "evicted"), (LATER, "resident in any case")])
    drawing.write("budget")


def protected() -> None:
    drawing = Drawing(760, 286, "Sinks and recent tokens are kept first; the others compete by their scores")
    heights = [64, 30, 12, 22, 8, 44, 10, 18, 52, 60, 14, 9, 26, 12, 38, 16, 7, 20, 11, 28, 34, 40]
    best = {5, 8, 9, 14}
    x, width, base = 24, 32, 170
    for position, height in enumerate(heights):
        fill = SINK if position < 2 else RECENT if position >= 18 else KEPT if position in best else EVICTED
        drawing.box(x + position * width, base - height, width - 4, height, fill)
        drawing.box(x + position * width, base + 12, width - 4, 24, fill)
        drawing.text(x + position * width + 14, base + 30, str(position), 12, "middle")
    drawing.brace(x, x + 2 * width - 4, 74, "sinks: 2")
    drawing.brace(x + 2 * width, x + 18 * width - 4, 74, "tokens that compete: the best B − 2 − 4 = 4 are kept")
    drawing.brace(x + 18 * width, x + 22 * width - 4, 74, "recent window: 4")
    drawing.text(24, 34, "score of each prompt token", 14, weight="bold")
    drawing.text(24, 232, "kept set with B = 10: positions 0, 1, 5, 8, 9, 14, 18, 19, 20, 21", 14)
    entries = [(SINK, "attention sink"), (KEPT, "kept by its score"), (RECENT, "recent token"), (EVICTED, "evicted")]
    drawing.legend(24, 264, entries)
    drawing.write("protected")


def granularity() -> None:
    drawing = Drawing(760, 360, "One set for each query head, for each KV head, for the layer; tokens or chunks")
    kept = [{0, 3, 7, 11}, {0, 4, 7, 10}, {1, 3, 8, 11}, {0, 5, 9, 11}]
    panels = [
        ("heads=query: a set for each query head", [kept[0], kept[1], kept[2], kept[3]]),
        ("heads=kv: a set for each KV head", [{0, 3, 7, 11}] * 2 + [{1, 5, 8, 11}] * 2),
        ("heads=layer: one set for the layer", [{0, 3, 7, 11}] * 4),
        ("chunks of 4 tokens, one set for the layer", [{4, 5, 6, 7}] * 4),
    ]
    for index, (title, rows) in enumerate(panels):
        x, y = 24 + 372 * (index % 2), 34 + 158 * (index // 2)
        drawing.text(x, y, title, 14, weight="bold")
        for head, positions in enumerate(rows):
            top = y + 12 + 28 * head
            drawing.text(x, top + 18, f"q{head} · kv{head // 2}", 12)
            row(drawing, x + 62, top, [KEPT if position in positions else EVICTED for position in range(12)], 23, 24)
    drawing.legend(24, 344, [(KEPT, "kept, 4 tokens in each row"), (EVICTED, "evicted")])
    drawing.write("granularity")


if __name__ == "__main__":
    loops()
    budget()
    protected()
    granularity()
