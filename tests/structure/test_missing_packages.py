"""A configuration without libraries names all missing Debian packages in one line, with the command."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def missing(folder: Path, *options: str, **environment: str) -> set[str]:
    command = [shutil.which("cmake"), "-G", "Ninja", "-S", ROOT, "-B", folder / "build", "-DKVREPLAY_TESTS=OFF",
               "-DKVREPLAY_CUDA=OFF", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}", *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode != 0
    said = re.search(r"^ *kvreplay: missing Debian packages: run apt-get install (.*)$", done.stderr, re.MULTILINE)
    assert said and done.stderr.count("CMake Error") == 1, done.stderr
    return set(said[1].split())


def test_all_missing_libraries_are_named_at_once(tmp_path: Path) -> None:
    without = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("fmt", "Boost")]
    found = missing(tmp_path, *without, PKG_CONFIG_LIBDIR=str(tmp_path))
    assert found == {"libfmt-dev", "libboost-program-options-dev", "libxxhash-dev", "libhwy-dev"}


def test_without_a_compiler_all_packages_are_named(tmp_path: Path) -> None:
    setup = (ROOT / "tools/setup").read_text()
    wanted = set(re.search(r"build_packages=\((.*?)\)", setup, re.DOTALL)[1].split())
    tools = {"cmake", "ninja-build", "ccache", "git", "libboost-context-dev"}  # the last: for tests
    assert missing(tmp_path, "-DKVREPLAY_COMPILER=OFF") == wanted - tools
