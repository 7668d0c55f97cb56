"""Executes notebooks on the corpus or on the numbers of the study. `tools/figures` installs and builds all of it first.

A notebook is a file of this folder that begins with a percent cell (https://jupytext.readthedocs.io). Each notebook
writes its figures, its tables and itself with its outputs (NAME.ipynb and NAME.html) into OUTPUT/NAME.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.program import Parser, exit_code

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = (ROOT / "docs" / "papers.md", ROOT / "docs" / "closed-loop.md")
OF_STUDY = "closed_loop"  # the notebook of the study
QUICKSTART = "quickstart"  # the notebook of the shipped trace
WITHOUT_CORPUS = (OF_STUDY, QUICKSTART)  # committed with their outputs, beside their percent files
SHOWN = re.compile(r"(<!-- tools/figures (\w+)/([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"\]\((figures/(\w+?)-([\w-]+)\.png)\)")
PICTURE_WIDTH = 900  # pixels
PICTURE_COLOURS = 128


def notebooks() -> dict[str, Path]:
    """Names and files."""
    return {path.stem: path for path in sorted(HERE.glob("*.py")) if path.read_text().startswith("# %%")}


def execute(notebook: Path, folder: Path, working_folder: Path = HERE) -> None:
    """Runs all cells in a new process; writes NAME.ipynb and NAME.html. The error of a failed cell names the cell."""
    import jupytext
    import nbconvert
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    folder.mkdir(parents=True, exist_ok=True)
    page = jupytext.read(notebook, fmt="py:percent")
    quiet = ["--IPKernelApp.log_level=ERROR"]  # else it warns that its messages, signed, are not encrypted
    here = {"metadata": {"path": str(working_folder)}}
    client = NotebookClient(page, timeout=None, kernel_name="python3", extra_arguments=quiet, resources=here,
                            record_timing=False)  # fmt: skip
    try:
        client.execute()
    except CellExecutionError as error:
        cells = [cell for cell in page.cells if cell.cell_type == "code"]
        number = max(i for i, cell in enumerate(cells, 1) if cell.execution_count)
        first = cells[number - 1].source.strip().partition("\n")[0]
        what = f"{error.ename}: {error.evalue}"
        raise Error(f"{notebook.stem}, code cell {number} of {len(cells)} ({first})", what, exit_code=1) from error
    for number, cell in enumerate(page.cells):
        cell.id = f"cell-{number}"  # else random
    page.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    html, _ = nbconvert.HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True).from_notebook_node(page)
    html = re.sub(r"<script\b.*?</script>", "", html, flags=re.DOTALL)  # they fetch from the network; none is needed
    nbformat.write(page, folder / f"{notebook.stem}.ipynb")
    (folder / f"{notebook.stem}.html").write_text(html, encoding="utf-8")


def refresh(figures: Path, names: list[str]) -> None:
    """Updates the tables and pictures of these notebooks in the documentation, and the committed notebooks."""
    from PIL import Image

    def table(found: re.Match[str]) -> str:
        if found[2] not in names:
            return found[0]
        return found[1] + (figures / found[2] / f"{found[3]}.md").read_text(encoding="utf-8") + found[5]

    for name in set(names) & set(WITHOUT_CORPUS):
        shutil.copyfile(figures / name / f"{name}.ipynb", HERE / f"{name}.ipynb")
    for page in PAGES:
        text = SHOWN.sub(table, page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
        for target, name, figure in PICTURE.findall(text):
            if name in names:
                picture = Image.open(figures / name / f"{figure}.png").convert("RGB")
                picture.thumbnail((PICTURE_WIDTH, 10 * PICTURE_WIDTH))
                reduced = picture.quantize(PICTURE_COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                reduced.save(page.parent / target, optimize=True)


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(prog="tools/figures", description=__doc__, allow_abbrev=False)
    add = found.add_argument
    add("names", metavar="NAME", nargs="*", help=f"notebooks to execute (default: all): {', '.join(notebooks())}")
    add("--small", action="store_true", help="use the small corpus and write into out/figures-small (minutes)")
    add("--corpus", metavar="DIR", type=Path, help="read traces and corpus.csv, as tools/corpus writes them, from DIR")
    add("-o", "--output", metavar="DIR", type=Path, help="output folder (default: out/figures)")
    add("--docs", action="store_true", help="also update tables and pictures of docs/, and committed notebooks")
    return found


def run(arguments: argparse.Namespace) -> None:
    """Corpus, notebooks, page."""
    known = notebooks()
    for name in arguments.names:
        if name not in known:
            raise Error("figures", "no such notebook", nearest(name, known), name, Refusal.USAGE)
    names = [name for name in known if not arguments.names or name in arguments.names]
    suffix = "-small" if arguments.small else ""
    corpus = (arguments.corpus or ROOT / "build" / f"corpus{suffix}").resolve()
    reads_corpus = bool(set(names) - set(WITHOUT_CORPUS))
    if reads_corpus and not arguments.corpus:
        done = subprocess.run([ROOT / "tools" / "corpus", *(["--small"] if arguments.small else [])])
        if done.returncode:
            raise Error("tools/corpus", "failed", exit_code=done.returncode)
    if reads_corpus and not (corpus / "corpus.csv").is_file():
        raise Error(str(corpus), "no corpus", "corpus.csv and the traces in it, as tools/corpus writes them", "neither")
    figures = (arguments.output or ROOT / "out" / f"figures{suffix}").resolve()
    os.environ |= {"KVREPLAY_CORPUS": str(corpus), "KVREPLAY_FIGURES": str(figures)}
    for name in names:
        start = time.monotonic()
        folder = figures / name
        execute(known[name], folder, folder if name == QUICKSTART else HERE)  # the quickstart writes its trace there
        print(f"{figures / name}: {time.monotonic() - start:.0f} s", flush=True)
    if arguments.docs:
        refresh(figures, names)
        print(*PAGES, sep="\n")


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    return exit_code("figures", lambda: run(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
