"""Draws the includes between folders, from the sources: .venv/bin/python docs/include_graph.py

Each folder is drawn above all folders that it includes; a cycle is an error. Arrows that follow from others are left
out. Writes docs/figures/includes.svg.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *(
        "core",
        "core/attention",
        "core/cpu",
        "core/hdf5",
        "core/observables",
        "core/policies",
        "core/replay",
        "core/trace",
    ),
    *("analysis", "analysis/metrics", "cuda", "tools/cli", "tools/python/engine", "tools/bench"),
)


def folder_of(path: Path) -> str | None:
    inside = [folder for folder in FOLDERS if path.is_relative_to(folder)]
    return max(inside, key=len) if inside else None


def arrows() -> Counter[tuple[str, str]]:
    """(folder, included folder): the number of include lines."""
    found: Counter[tuple[str, str]] = Counter()
    tracked = subprocess.run(
        ["git", "ls-files", "*.h", "*.cpp", "*.cu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in map(Path, tracked.stdout.splitlines()):
        source = folder_of(path)
        for name in re.findall(r'^#include "([^"]+)"', (ROOT / path).read_text(), re.MULTILINE):
            for base in (path.parent, Path("core"), Path()):
                if (ROOT / base / name).is_file():
                    target = folder_of(base / name)
                    if source and target and source != target:
                        found[source, target] += 1
                    break
    return found


def levels(edges: Counter[tuple[str, str]]) -> dict[str, int]:
    """0 for folders that include no other; each folder one above the highest that it includes."""
    level: dict[str, int] = {}

    def visit(folder: str, above: tuple[str, ...]) -> int:
        if folder in above:
            raise SystemExit(f"a cycle: {' -> '.join((*above, folder))}")
        if folder not in level:
            below = [visit(target, (*above, folder)) for source, target in edges if source == folder]
            level[folder] = 1 + max(below, default=-1)
        return level[folder]

    for folder in {folder for edge in edges for folder in edge}:
        visit(folder, ())
    return level


def reaches(edges: Counter[tuple[str, str]], source: str, target: str) -> bool:
    """Whether a path of two or more arrows leads from one folder to the other."""
    below = [folder for begin, folder in edges if begin == source and folder != target]
    return any((folder, target) in edges or reaches(edges, folder, target) for folder in below)


def main() -> None:
    edges = arrows()
    level = levels(edges)
    rows: dict[int, list[str]] = {}
    for folder in sorted(level):
        rows.setdefault(level[folder], []).append(folder)
    place = {
        folder: ((i + 0.5) / len(row) + (0.03 if number % 2 else -0.03), number)
        for number, row in rows.items()
        for i, folder in enumerate(row)
    }
    plt.rcParams["svg.hashsalt"] = "kvreplay"
    figure, axes = plt.subplots(figsize=(10, 8))
    for (source, target), count in sorted(edges.items()):
        if reaches(edges, source, target):
            continue
        (x0, y0), (x1, y1) = place[source], place[target]
        axes.annotate(
            "",
            (x1, y1 + 0.17),
            (x0, y0 - 0.17),
            arrowprops={"arrowstyle": "-|>", "color": "0.45", "linewidth": 0.5 + min(count, 60) / 30},
        )
    for folder, (x, y) in place.items():
        axes.text(x, y, folder, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.2"})
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, max(rows) + 0.5)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(ROOT / "docs/figures/includes.svg", metadata={"Date": None})
    print(f"{len(level)} folders, {len(edges)} arrows, all downwards")


if __name__ == "__main__":
    main()
