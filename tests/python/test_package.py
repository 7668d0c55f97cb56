"""Does the package say what it offers, to people, to notebooks and to editors?"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pandas as pd
import pytest

import kvreplay as kv
from kvreplay import _engine
from kvreplay.plot.style import Drawing

FOLDER = Path(kv.__file__).parent
PUBLIC = ["check", "example", "figure", "measure", "open", "parameter", "plan", "replay"]


def test_editors_read_its_types() -> None:
    assert (FOLDER / "py.typed").is_file()
    offered = {name.name for node in ast.walk(ast.parse((FOLDER / "__init__.py").read_text()))
               if isinstance(node, ast.ImportFrom) and node.module.startswith("kvreplay.")
               for name in node.names}  # fmt: skip
    assert {*offered, "example"} == set(kv.__all__) == {*kv._MODULES, "example"} and offered <= set(dir(kv))
    for name in kv.__all__:
        assert getattr(kv, name).__doc__, name


def test_editors_read_the_engines_types() -> None:
    stub = ast.parse((FOLDER / "_engine.pyi").read_text())
    said = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert said == {name for name in dir(_engine) if not name.startswith("_")}


@pytest.mark.parametrize("name", PUBLIC)
def test_functions_say_their_types(name: str) -> None:
    function = getattr(kv, name)
    types = {"Run": kv.Run, "Trace": kv.Trace, "pd": pd, "Path": Path, "Drawing": Drawing}
    hints = typing.get_type_hints(function, vars(inspect.getmodule(function)) | types)
    assert hints.keys() == {*inspect.signature(function).parameters, "return"}


def test_a_trace_says_what_it_has(small: Path) -> None:
    trace = kv.open(small)
    for name in set(kv.Trace.__annotations__):
        assert getattr(trace, name) is not None
    public = {name for name in dir(trace._trace) if not name.startswith("_")}
    public -= {"tensor", "layer", "spans", "value", "visible_units"}
    assert public == set(kv.Trace.__annotations__)


def test_unknown_names_are_refused_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'kvreplay' has no attribute 'replya'"):
        kv.replya  # noqa: B018


WITHOUT = """
import sys
sys.modules["kvreplay._engine"] = None
import kvreplay as kv
from kvreplay.results import Run
kv.Run, kv.Error
try:
    kv.open("trace.h5")
except kv.Error as error:
    print(error.exit_code, str(error).partition(": expected ")[0])

import h5py
from kvreplay.hdf5_file import open_to_read
for name, elsewhere in (
    ("link.h5", lambda file: file.update({"link": h5py.SoftLink("/")})),
    ("storage.h5", lambda file: file.create_dataset("numbers", (4,), "i4", external="other")),
):
    with h5py.File(name, "w") as file:
        elsewhere(file)
    try:
        open_to_read(name)
    except kv.Error as error:
        print(error.exit_code, error)
"""


def test_without_the_engine_results_can_be_read(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "4 kvreplay: the engine is not installed for this Python",
        "3 link.h5:/link: link: expected an object of this file, found a soft link",
        "3 storage.h5:/numbers: layout: expected stored in this file, found other files",
    ]
