"""The installed kit, and plug-ins that were built with it and nothing else of this source tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))

from program import PROGRAM, done  # noqa: E402

# Beside the policy that new-policy writes: a policy and a part of one file, names that are taken, no name, and a call
# of something that no program has.
SOURCES = {
    "pair": """
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct LastTokens {
  static constexpr Card card{.name = "last", .summary = "the last tokens", .paper = "", .score = "none"};
  void parameters(Parameters&) {}
  Plan plan() const { return {.protect = {.recent = Amount::fraction(1.0)}}; }
};
const Registered<LastTokens> registered;

const RegisteredFixedPart part(PartKind::score, "position", "later tokens first", [](Plan& plan) {
  plan.score = {.score = [](const LayerView& view, const Scoring& how) {
    Matrix scores(view.rows(how.grouping.heads), view.tokens());
    for (int row = 0; row < scores.rows(); ++row)
      for (int j = 0; j < scores.columns(); ++j) scores(row, j) = j;
    return scores;
  }};
});

}  // namespace
}  // namespace kvreplay
""",
    "taken": """
#include "policies/policy.h"

namespace kvreplay {
namespace {

template <char letter>
struct Named {
  static constexpr const char* name = letter == 'a' ? "aaa" : letter == 'l' ? "layers" : "snapkv";
  static constexpr Card card{.name = name, .summary = "nothing", .paper = "", .score = "none"};
  void parameters(Parameters&) {}
  Plan plan() const { return {}; }
};
const Registered<Named<'a'>> registered;
const Registered<Named<TAKEN>> also_registered;

}  // namespace
}  // namespace kvreplay
""",
    "nothing": "int nothing = 0;\n",
    "unresolved": """
#include "policies/policy.h"

namespace kvreplay {
Plan plan_of_nobody();
namespace {

struct Unresolved {
  static constexpr Card card{.name = "unresolved", .summary = "nothing", .paper = "", .score = "none"};
  void parameters(Parameters&) {}
  Plan plan() const { return plan_of_nobody(); }
};
const Registered<Unresolved> registered;

}  // namespace
}  // namespace kvreplay
""",
}
TUTORIAL = Path(__file__).resolve().parents[2] / "notebooks" / "tutorial.py"
CODE = re.compile(r"^# ```cpp\n((?:#.*\n)*?)# ```$", re.MULTILINE)
SOURCES["tutorial"] = re.sub(r"^# ?", "", CODE.findall(TUTORIAL.read_text())[0], flags=re.MULTILINE)
PROJECT = """
kvreplay_add_plugin(tutorial tutorial.cpp)
kvreplay_add_plugin(pair pair.cpp)
kvreplay_add_plugin(taken taken.cpp)
target_compile_definitions(taken PRIVATE TAKEN='s')
kvreplay_add_plugin(ranges taken.cpp)
target_compile_definitions(ranges PRIVATE TAKEN='l')
kvreplay_add_plugin(nothing nothing.cpp)
kvreplay_add_plugin(unresolved unresolved.cpp)
add_library(foreign MODULE nothing.cpp)
set_target_properties(foreign PROPERTIES PREFIX "")
"""


@pytest.fixture(scope="session")
def compiler() -> str:
    """The compiler of the program under test."""
    cache = (PROGRAM.parent / "CMakeCache.txt").read_text().splitlines()
    [found] = [line.partition("=")[2] for line in cache if line.startswith("CMAKE_CXX_COMPILER:")]
    return found


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix that the kit was installed into."""
    prefix = tmp_path_factory.mktemp("kit")
    command = ["cmake", "--install", PROGRAM.parent, "--component", "kit", "--prefix", prefix]
    subprocess.run(command, check=True, capture_output=True)
    return prefix


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory, kit: Path, compiler: str) -> Path:
    """The folder with mine.so, as `new-policy mine --plugin` begins it, and the plug-ins of SOURCES."""
    folder = tmp_path_factory.mktemp("project")
    done("new-policy", "mine", "--plugin", folder=folder)
    project = folder / "mine"
    for name, text in SOURCES.items():
        (project / f"{name}.cpp").write_text(text)
    with (project / "CMakeLists.txt").open("a") as lists:
        lists.write(PROJECT)
    build = project / "build"
    options = ["-G", "Ninja", f"-Dkvreplay_ROOT={kit}", f"-DCMAKE_CXX_COMPILER={compiler}"]
    for command in (["cmake", "-S", project, "-B", build, *options], ["cmake", "--build", build, "-j", "2"]):
        subprocess.run(command, check=True, capture_output=True)
    return build
