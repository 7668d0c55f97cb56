"""Figures as PGF, LaTeX code whose texts the document sets in its own font. Needs no LaTeX to write them.

Matplotlib's own writer asks a running LaTeX for the size of every text. Here the sizes are those of matplotlib's font:
they affect the place of some texts, never their font.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.backends.backend_pgf import RendererPgf
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image

from kvreplay.program import writing

# Of LaTeX's special characters % is absent: matplotlib's writer escapes it.
ESCAPED = {ord(letter): "\\" + letter for letter in "_&#${}"} | {
    ord("\\"): r"\textbackslash{}", ord("~"): r"\textasciitilde{}", ord("^"): r"\textasciicircum{}",
    ord("→"): r"$\to$", ord("←"): r"$\gets$", ord("×"): r"$\times$", ord("†"): r"$\dagger$", 0xA0: "~",
}  # fmt: skip


class Renderer(RendererPgf):
    """Writes PGF code. Images become PNG files: `images` has their bytes by name."""

    def __init__(self, figure: Figure, code: io.StringIO, stem: str) -> None:
        super().__init__(figure, code)
        self.stem = stem
        self.images: dict[str, bytes] = {}
        self._agg = RendererAgg(1, 1, figure.dpi)

    def get_text_width_height_descent(self, s: str, prop: FontProperties, ismath: Any) -> tuple[float, float, float]:
        return self._agg.get_text_width_height_descent(s, prop, ismath)

    def draw_text(self, gc: Any, x: float, y: float, s: str, prop: FontProperties, angle: float,
                  ismath: Any = False, mtext: Any = None) -> None:  # fmt: skip
        super().draw_text(gc, x, y, s if ismath else s.translate(ESCAPED), prop, angle, ismath, mtext)

    def option_scale_image(self) -> bool:
        return False

    def draw_image(self, gc: Any, x: float, y: float, im: np.ndarray, transform: Any = None) -> None:
        name = f"{self.stem}-image{len(self.images)}.png"
        page = io.BytesIO()
        Image.fromarray(im[::-1]).save(page, format="png")
        self.images[name] = page.getvalue()
        height, width = (size / self.dpi for size in im.shape[:2])
        self.fh.write(f"\\pgftext[left,bottom,x={x / self.dpi:f}in,y={y / self.dpi:f}in]"
                      f"{{\\includegraphics[width={width:f}in,height={height:f}in]{{{name}}}}}%\n")  # fmt: skip


def save_pgf(figure: Figure, path: Path) -> list[Path]:
    """Writes the figure, and a PNG file beside it for each of its images. Returns the files."""
    code = io.StringIO()
    renderer = Renderer(figure, code, path.stem)
    width, height = figure.get_size_inches()
    code.write("% needs \\usepackage{pgf}; with images also \\usepackage{graphicx}, in the folder of the document\n"
               "\\begingroup\\makeatletter\\def\\mathdefault#1{#1}%\n\\begin{pgfpicture}%\n"
               f"\\pgfpathrectangle{{\\pgfpointorigin}}{{\\pgfqpoint{{{width:f}in}}{{{height:f}in}}}}%\n"
               "\\pgfusepath{use as bounding box, clip}%\n")  # fmt: skip
    figure.draw(renderer)
    code.write("\\end{pgfpicture}%\n\\makeatother\\endgroup%\n")
    with writing(path):
        path.write_text(code.getvalue(), encoding="utf-8")
        for name, image in renderer.images.items():
            path.with_name(name).write_bytes(image)
    return [path, *(path.with_name(name) for name in renderer.images)]
