"""The folder tree is the architecture: which folder may include what, as one table."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Third-party headers -> folders whose own files may include them.
ALLOWED = {
    "HDF5": (r"<(hdf5|H5\w*)\.h>", ("core/hdf5", "core/trace", "analysis", "tests/fuzz", "tests/unit")),
    "Eigen": (r"<Eigen/", ("core/observables", "analysis/metrics", "tools/bench", "tools/cli")),
    "YAML": (r"<yaml-cpp/", ("core/policies",)),
    "OpenMP": (r"<omp\.h>", ("core/cpu", "cuda", "tools/cli", "tools/bench", "tests/cuda/emulated")),
    "Highway": (r"[<\"]hwy/", ("core/cpu", "tools/cli")),
    "Boost": (r"<boost/", ("analysis", "tools/cli", "tests/cuda/emulated")),
    "fmt": (r"<fmt/", ("core", "analysis", "tools", "tests")),
    "JSON": (r"<nlohmann/", ("core/trace", "analysis", "tools/cli", "tests")),
    "zlib": (r"<zlib\.h>", ("core/hdf5",)),
    "xxHash": (r"<xxhash\.h>", ("core/hash.cpp",)),
    "CUDA": (r"[<\"](cuda|cublas|cub/|cutlass|cute/)", ("cuda", "tests/cuda", "tools/bench/device")),
    "nanobind": (r"<nanobind/", ("tools/python/engine",)),
    "GoogleTest": (r"<g(test|mock)/", ("tests",)),
    "Google Benchmark": (r"<benchmark/", ("tools/bench",)),
}

# Our own folders -> folders whose headers they may include.
LAYERS = {
    "core": ("core",),
    "core/hdf5": ("core", "core/hdf5"),
    "core/trace": ("core", "core/hdf5", "core/trace"),
    "core/attention": ("core", "core/attention"),
    "core/cpu": ("core", "core/attention", "core/cpu"),
    "core/observables": ("core", "core/attention", "core/cpu", "core/observables"),
    "core/policies": ("core", "core/attention", "core/observables", "core/policies"),
    "core/replay": (
        "core",
        "core/hdf5",
        "core/trace",
        "core/attention",
        "core/observables",
        "core/policies",
        "core/replay",
    ),
    "analysis": (
        "core",
        "core/hdf5",
        "core/trace",
        "core/attention",
        "core/observables",
        "core/policies",
        "core/replay",
        "analysis",
    ),
    "cuda": ("core", "core/attention", "cuda"),
}

# Packages of the Python tools -> packages whose modules they may import; "kvreplay" is what all share.
PACKAGES = {
    "kvreplay": ("kvreplay",),
    "kvreplay.sweep": ("kvreplay", "kvreplay.sweep"),
    "kvreplay.capture": ("kvreplay", "kvreplay.sweep", "kvreplay.capture"),
    "kvreplay.bounds": ("kvreplay", "kvreplay.bounds"),
    "kvreplay.calibrate": ("kvreplay", "kvreplay.calibrate"),
    "kvreplay.compare": ("kvreplay", "kvreplay.compare"),
    "kvreplay.conformance": ("kvreplay", "kvreplay.conformance"),
    "kvreplay.tune": ("kvreplay", "kvreplay.capture", "kvreplay.live", "kvreplay.compare", "kvreplay.tune"),
    "kvreplay.plot": ("kvreplay", "kvreplay.compare", "kvreplay.plot"),
    "kvreplay.command_line": ("kvreplay", "kvreplay.plot", "kvreplay.command_line"),
    "kvreplay.report": ("kvreplay", "kvreplay.compare", "kvreplay.plot", "kvreplay.report"),
    "kvreplay.live": ("kvreplay", "kvreplay.capture", "kvreplay.live"),
    "kvreplay.transformers": ("kvreplay", "kvreplay.capture", "kvreplay.live", "kvreplay.transformers"),
    "kvreplay.kvpress": ("kvreplay", "kvreplay.capture", "kvreplay.live", "kvreplay.kvpress"),
    "kvreplay.predict": ("kvreplay", "kvreplay.compare", "kvreplay.plot", "kvreplay.predict"),
}
PACKAGE_FOLDERS = {name: "tools/python/" + name.replace(".", "/") for name in PACKAGES}
PACKAGE_FOLDERS |= {"kvreplay.capture": "tools/capture", "kvreplay.live": "tools/live"}


def sources():
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.h", "*.cpp", "*.cu", "*.in"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in tracked.stdout.splitlines() if (ROOT / line).exists()]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*([<"][^>"]+[>"])', (ROOT / path).read_text(), re.MULTILINE)


def inside(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def own_folder(include: str) -> str | None:
    """The folder of an include of ours: relative to core/ or to the project's root."""
    name = include.strip('<>"')
    for base in ("core", "."):
        target = Path(base) / name
        if (ROOT / target).is_file():
            return str(target.parent)
    return None


def layer_of(folder: str) -> str | None:
    fits = [layer for layer in LAYERS if Path(folder).is_relative_to(layer)]
    return max(fits, key=len) if fits else None


def test_there_are_sources():
    assert len(sources()) > 30


@pytest.mark.parametrize("library", ALLOWED)
def test_third_party_headers_stay_where_they_belong(library):
    pattern, folders = ALLOWED[library]
    wrong = [
        f"{path}: {name}"
        for path in sources()
        for name in includes(path)
        if re.match(pattern, name) and not inside(path, folders)
    ]
    assert not wrong, f"{library} is included outside {', '.join(folders)}"


def test_data_walks_one_way():
    wrong = []
    for path in sources():
        layer = layer_of(str(path.parent))
        if layer is None:
            continue
        for include in includes(path):
            folder = own_folder(include)
            if folder is not None and layer_of(folder) not in LAYERS[layer]:
                wrong.append(f"{path}: {include}")
    assert not wrong


def imported_packages(module: Path) -> set[str]:
    """Packages of ours that a module imports from, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.partition(".")[0] == "kvreplay"}
    return {max((one for one in PACKAGES if f"{name}.".startswith(f"{one}.")), key=len) for name in ours}


@pytest.mark.parametrize("package", PACKAGES)
def test_python_imports_go_one_way(package):
    modules = sorted((ROOT / PACKAGE_FOLDERS[package]).glob("*.py"))
    assert modules
    if package == "kvreplay":  # lists the public names of all packages, and imports each at its first use
        modules.remove(ROOT / PACKAGE_FOLDERS[package] / "__init__.py")
    wrong = {module.name: found for module in modules if (found := imported_packages(module) - set(PACKAGES[package]))}
    assert not wrong


def test_every_python_package_has_its_place():
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tools/python").rglob("__init__.py")}
    assert folders | {"tools/capture", "tools/live"} == set(PACKAGE_FOLDERS.values())


def test_policies_are_one_file_each_and_see_policies_and_observables():
    papers = [path for path in sources() if inside(path, ("core/policies/papers",))]
    assert papers
    for path in papers:
        assert path.suffix == ".cpp", f"{path}: a policy has no header"
        for include in includes(path):
            name = include.strip('<>"')
            allowed = name == "random.h" or name.startswith(("policies/", "observables/"))
            assert allowed or own_folder(include) is None, f"{path}: {include}"


def test_below_tools_nothing_prints_or_exits():
    wrong = []
    for path in sources():
        if not inside(path, ("core", "analysis", "cuda")) or path.name == "registry.h":  # stops on a duplicate name
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            code = line.split("//")[0]
            if (
                re.search(r"\b(std::cout|std::cerr|printf|puts|std::exit|exit|abort|quick_exit)\s*(<<|\()", code)
                and "snprintf" not in code
            ):
                wrong.append(f"{path}:{number}: {line.strip()}")
    assert not wrong


def test_scripts_name_no_host():
    """Packages and sources come from where the user's own apt and pip take them."""
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    paths = [path for path in map(Path, tracked.stdout.splitlines()) if (ROOT / path).is_file()]
    scripts = [
        path
        for path in paths
        if path.suffix in (".cmake", ".json", ".toml")
        or path.name == "CMakeLists.txt"
        or (ROOT / path).read_bytes().startswith(b"#!")
    ]
    assert {Path("tools/setup"), Path("tests/run"), Path("pyproject.toml")} <= set(scripts)
    wrong = []
    for path in scripts:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if re.search(r"\w://[\w.]|\b[\w-]+\.(com|io|net|org)\b", line):
                wrong.append(f"{path}:{number}: {line.strip()}")
    assert not wrong


def test_no_folder_is_a_drawer():
    names = {part for path in sources() for part in path.parts[:-1]}
    assert not names & {"utils", "util", "common", "misc", "priv", "helpers", "lib"}


def blocks(path: Path) -> list[tuple[int, str]]:
    """(lines, first line) of what stands in braces, or in the parentheses of a call, that open at the end of a line."""
    found, begins = [], []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        code = re.sub(r"\"(\\.|[^\"])*\"|'(\\.|[^'])'|//.*", "", line)
        for brace in re.findall(r"[{}]", code):
            if brace == "{":
                begins.append((number, code.strip()))
            elif begins:
                begin, first = begins.pop()
                found.append((number - begin + 1, f"{path}:{begin}: {first}"))
    return found


def test_functions_and_classes_can_be_read_at_once():
    """At most 100 lines a function, lambdas included; at most 250 a class where the walk over a trace is."""
    own = [path for path in sources() if inside(path, ("core", "analysis", "cuda"))]
    function = re.compile(r"\d: (?!if|for|while|switch|} else).*\)[\w\s:<>*&-]*{$")
    lengths = {first: lines for path in own for lines, first in blocks(path) if function.search(first)}
    assert len(lengths) > 1000
    assert not {first: lines for first, lines in lengths.items() if lines > 100}
    walk = [path for path in own if inside(path, ("core/replay",))]
    classes = re.compile(r"\d: (class|struct) ")
    assert not [first for path in walk for lines, first in blocks(path) if lines > 250 and classes.search(first)]
