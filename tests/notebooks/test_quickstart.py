"""Do notebooks use public names only, and does the quickstart run from any folder with the committed outputs?"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

import kvreplay as kv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

import execute  # noqa: E402

COMMITTED = ROOT / "notebooks" / f"{execute.QUICKSTART}.ipynb"
MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The quickstart, executed in an empty folder."""
    folder = tmp_path_factory.mktemp("quickstart")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    execute.execute(execute.notebooks()[execute.QUICKSTART], folder, elsewhere)
    assert [path.name for path in elsewhere.iterdir()] == ["example.h5"]
    return nbformat.read(folder / COMMITTED.name, as_version=4)


def structure(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[tuple[str, ...]]]]:
    """Kind and source of each cell, with the kinds of its outputs."""
    return [
        (cell.cell_type, cell.source, [tuple(sorted(output.get("data", ()))) for output in cell.get("outputs", ())])
        for cell in notebook.cells
    ]


def test_committed_outputs_have_the_structure_of_todays(executed: nbformat.NotebookNode) -> None:
    committed = nbformat.read(COMMITTED, as_version=4)
    nbformat.validate(committed)
    assert structure(committed) == structure(executed), "run tools/figures quickstart --docs"
    outputs = [output for cell in committed.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"execute_result"}  # no errors, no warnings
    assert sum("image/svg+xml" in output.data for output in outputs) >= 3
    assert all("text/html" in output.data or "image/svg+xml" in output.data for output in outputs)
    assert COMMITTED.stat().st_size < MOST_BYTES
    assert str(ROOT) not in COMMITTED.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", execute.WITHOUT_CORPUS)
def test_a_committed_notebook_has_the_cells_of_its_percent_file_and_outputs(name: str) -> None:
    path = ROOT / "notebooks" / f"{name}.ipynb"
    committed, percent = nbformat.read(path, as_version=4), jupytext.read(execute.notebooks()[name], fmt="py:percent")
    nbformat.validate(committed)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (committed, percent)]
    assert cells[0] == cells[1], f"run tools/figures {name} --docs"
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code")
    outputs = [output for cell in committed.cells for output in cell.get("outputs", ())]
    assert outputs and {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    assert path.stat().st_size < MOST_BYTES and str(ROOT) not in path.read_text(encoding="utf-8")


def test_every_committed_notebook_is_checked() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(execute.WITHOUT_CORPUS)


@pytest.mark.parametrize("name", execute.notebooks())
def test_notebooks_use_public_names_only(name: str) -> None:
    tree = ast.parse(execute.notebooks()[name].read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert not [module for module in modules if module.startswith("kvreplay.")]
    imports = {node.module: {alias.name for alias in node.names} for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [module for module in imports if module.startswith("kvreplay.")]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_kvreplay = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "kv"}
    assert of_kvreplay | imports.get("kvreplay", set()) <= set(kv.__all__)
    if name == execute.QUICKSTART:  # an installed package lacks the folder of the notebooks
        assert set(modules) == {"kvreplay", "pandas"} and not imports
