"""tools/demo takes a wheel in place of a build. Its programs are stand-ins that record their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = """#!/bin/sh
echo "setup $* ${KVREPLAY_WHEEL:-}" >>calls
mkdir -p build/demo-venv/bin
cp kvreplay build/demo-venv/bin
"""
KVREPLAY = '#!/bin/sh\necho "kvreplay $1" >>calls\n[ "$1" != policies ] || echo snapkv\n'
CMAKE = '#!/bin/sh\necho "cmake" >>calls\n'
WHEEL = "dist/kvreplay-1-cp{}{}-x-manylinux_x.whl".format(*sys.version_info[:2])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("tools/setup", SETUP), ("kvreplay", KVREPLAY), ("bin/cmake", CMAKE)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    shutil.copy(ROOT / "tools/demo", tmp_path / "tools/demo")
    return tmp_path


def demo(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    path = f"{tree}/bin:{os.environ['PATH']}"
    return subprocess.run([tree / "tools/demo"], capture_output=True, text=True, env={"PATH": path, **environment})


def calls(tree: Path) -> list[str]:
    return (tree / "calls").read_text().splitlines()


@pytest.mark.parametrize("name", [WHEEL, "elsewhere.whl"])
def test_a_wheel_takes_the_place_of_the_build(tree: Path, name: str) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).touch()
    done = demo(tree, **({} if name == WHEEL else {"KVREPLAY_WHEEL": name}))
    assert done.returncode == 0, done.stderr
    assert calls(tree)[0] == f"setup demo {name}"
    assert "kvreplay report" in calls(tree) and "cmake" not in calls(tree)


def test_without_a_wheel_it_builds(tree: Path) -> None:
    (tree / "dist").mkdir()
    (tree / "dist/kvreplay-1-cp30-x-manylinux_x.whl").touch()  # for another Python
    demo(tree)
    assert calls(tree)[:2] == ["setup build python ", "cmake"]


def test_a_wheel_older_than_a_source_is_not_used(tree: Path) -> None:
    for name in (WHEEL, "core/policy.cpp"):
        (tree / name).parent.mkdir()
        (tree / name).touch()
    os.utime(tree / WHEEL, (0, 0))
    demo(tree)
    assert calls(tree)[:2] == ["setup build python ", "cmake"]


def test_a_missing_wheel_is_named(tree: Path) -> None:
    done = demo(tree, KVREPLAY_WHEEL="none.whl")
    assert (done.returncode, done.stderr) == (
        3, 'demo: KVREPLAY_WHEEL: expected a file, found "none.whl"; run tools/wheel build\n'
    )  # fmt: skip
    assert not (tree / "calls").exists()
