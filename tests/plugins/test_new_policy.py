"""Is a policy's file, alone in the folder, all that a policy takes: in the program, its tests and its tables?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from program import PROGRAM, Answer, done, kvreplay

from kvreplay.report.command import main as report

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "smollm2-135m-needle.h5"
BUILT_FROM = ("CMakeLists.txt", "analysis", "core", "cuda", "tests", "tools")
USAGE = 2

# Compiles only what the build under test has not: new files, and batches with new files (the last word is the source).
LAUNCHER = """#!/bin/sh
compiled=
for word; do [ "$before" = -o ] && compiled=$word; before=$word; done
if [ -f "{build}/$compiled" ] && ! grep -q -e papers/my_policy.cpp -e papers/large_values.cpp "$word"; then
  exec cp "{build}/$compiled" "$compiled"
fi
echo "$compiled" >>"$0.log"
exec "$@"
"""

BY_HAND = """#include "policies/policy.h"

namespace kvreplay {
namespace {

struct LargeValues {
  static constexpr Card card{
      .name = "large-values",
      .summary = "the tokens whose values are largest",
      .paper = "",
      .score = "s[h,j] = the norm of v_j",
  };

  void parameters(Parameters&) {}

  Plan plan() const {
    return {.score = {.score = [](const LayerView& view, const Scoring&) { return view.value_norms(2.0); }}};
  }
};

const Registered<LargeValues> registered;

}  // namespace
}  // namespace kvreplay
"""


def source_folder(folder: Path) -> Path:
    """What new-policy takes for kvreplay's source folder."""
    (folder / "core/policies/papers").mkdir(parents=True)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def ran(*command: str | Path, folder: Path) -> str:
    answer = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_files_alone_in_the_folder_are_policies(compiler: str, tmp_path: Path) -> None:
    """A copy of the source tree with two new files is configured, and built but for what is not new."""
    source = tmp_path / "source"
    source.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    before = files(source)
    said = done("new-policy", "my-policy", folder=source)
    (source / "core/policies/papers/large_values.cpp").write_text(BY_HAND)
    new = files(source) - before
    papers = {"core/policies/papers/my_policy.cpp", "core/policies/papers/large_values.cpp"}
    assert new == {*papers, "tests/unit/my_policy_policy.cpp"}
    assert all(len((source / name).read_text().splitlines()) <= 30 for name in papers)
    assert said.splitlines()[:2] == sorted(new - {"core/policies/papers/large_values.cpp"})
    assert "ctest --preset release -R my_policy\n" in said and "-p my-policy -b 0.1\n" in said
    # tools/demo has configured without tests: what is printed configures with them.
    assert "&& cmake --preset release\n" in said
    assert 'KVREPLAY_TESTS="ON"' in ran("cmake", "-N", "--preset", "release", folder=ROOT)

    cache = dict(
        line.split("=", 1) for line in (PROGRAM.parent / "CMakeCache.txt").read_text().splitlines() if "=" in line
    )
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER.format(build=PROGRAM.parent))
    launcher.chmod(0o755)
    build = tmp_path / "build"
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}", "-DKVREPLAY_CUDA=OFF"]
    options += [f"-D{name}={cache[f'{name}:STRING']}" for name in ("CMAKE_BUILD_TYPE", "CMAKE_CXX_FLAGS")]
    options.append(f"-DKVREPLAY_UNITY={cache['KVREPLAY_UNITY:BOOL']}")
    ran("cmake", "-G", "Ninja", "-S", source, "-B", build, *options, folder=tmp_path)
    ran("cmake", "--build", build, "-j", "2", "--target", "kvreplay", "laws", "unit_tests", folder=tmp_path)

    # A new file changes one object: its own, or its batch.
    compiled = launcher.with_suffix(".log").read_text().splitlines()
    assert len([name for name in compiled if "kvreplay_policies.dir" in name]) <= 2

    program = build / "kvreplay"
    names = set(ran(program, "policies", "--names", folder=tmp_path).split())
    assert names - set(done("policies", "--names", folder=tmp_path).split()) == {"my-policy", "large-values"}
    words = ["-p", "my-policy,large-values", "-b", "0.1", "--metrics", "attention_recall", "-o", "out"]
    table = ran(program, "replay", TRACE, *words, folder=tmp_path)
    assert {"my-policy", "large-values"} < {line.split()[0] for line in table.splitlines() if line}
    assert "self-check full error 0 | budget ok | identities ok | oracle bound ok" in table
    assert report([str(tmp_path / "out"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "my-policy" in page and "large-values" in page
    law = "EveryPolicy.SpendsItsBudgetSortedAndUnique"
    passed = ran("ctest", "--test-dir", build, "-R", f"my_policy|{law}/large_values", folder=tmp_path)
    window = "ProtectedTokensOf.HaveAWindowThatCanEndWithTheQuestion/my_policy"
    assert all(
        name in passed for name in ("unit.my_policy.KeepsWhat", f"{law}/my_policy", f"{law}/large_values", window)
    )


def test_the_source_folder_is_found_from_below_or_named(tmp_path: Path) -> None:
    source = source_folder(tmp_path)
    below = source / "core/policies"
    assert done("new-policy", "one", folder=below).splitlines()[0] == "../../core/policies/papers/one.cpp"
    done("new-policy", "two", "--source", source, folder=tmp_path.parent)
    papers = {f"core/policies/papers/{name}.cpp" for name in ("one", "two")}
    assert files(source) == papers | {f"tests/unit/{name}_policy.cpp" for name in ("one", "two")}


def test_a_plugins_project_is_written_anywhere(tmp_path: Path) -> None:
    said = done("new-policy", "my-policy", "--plugin", folder=tmp_path)
    assert files(tmp_path) == {"my-policy/my_policy.cpp", "my-policy/CMakeLists.txt"}
    assert f"-Dkvreplay_ROOT='{PROGRAM.parent / 'kit'}'" in said
    assert "--plugin my-policy/build/my-policy.so -p my-policy" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "new-policy: missing argument: expected NAME"),
        ("Mine", 'new-policy: invalid policy name: expected RULE, found "Mine"'),
        ("2nd", 'new-policy: invalid policy name: expected RULE, found "2nd"'),
        ("mine-", 'new-policy: invalid policy name: expected RULE, found "mine-"'),
        ("../mine", 'new-policy: invalid policy name: expected RULE, found "../mine"'),
        ("snapkv", "new-policy: a policy with this name exists: expected another name, found snapkv"),
        ("layers", "new-policy: a policy with this name exists: expected another name, found layers"),
        ("there", "core/policies/papers/there.cpp: exists: expected another name"),
        ("tested", "tests/unit/tested_policy.cpp: exists: expected another name"),
        ("project --plugin", "project/CMakeLists.txt: exists: expected another name"),
        (
            "mine --source tests",
            "--source: not kvreplay's source folder: expected a folder with core/policies/papers, found tests",
        ),
        (
            "mine --source . --plugin",
            "new-policy: --source and --plugin are contradictory: expected one of the two",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(words: str, message: str, tmp_path: Path) -> None:
    source = source_folder(tmp_path)
    for name in ("core/policies/papers/there.cpp", "tests/unit/tested_policy.cpp", "project/CMakeLists.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("mine\n")
    before = files(source)
    rule = "lower-case letters, digits and hyphens, a letter first"
    answer = kvreplay("new-policy", *words.split(), folder=source)
    assert answer == Answer(USAGE, "", f"kvreplay: {message.replace('RULE', rule)}\n")
    assert files(source) == before


def test_outside_the_source_folder_something_must_be_said(tmp_path: Path) -> None:
    answer = kvreplay("new-policy", "mine", folder=tmp_path)
    expected = "--source DIR, or --plugin, or a policy in Python (-p FILE.py:NAME, docs/writing-policies.md)"
    line = f"new-policy: not in kvreplay's source folder: expected {expected}, found {tmp_path}"
    assert answer == Answer(USAGE, "", f"kvreplay: {line}\n")
    assert files(tmp_path) == set()
