"""Prints the attention recall of every policy with and without pages: python docs/structure_table.py TRACE."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvreplay.results import Run

BUDGETS = ("0.1", "0.3")
# Values of --structure by column. Pages of one token are single tokens.
STRUCTURES = {"plain": (), "one set": ("page=1,heads=layer",), "pages": ("page=16,heads=layer",)}


def replay(trace: str, policies: list[str], structure: tuple[str, ...], *more: str) -> subprocess.CompletedProcess:
    command = ["kvreplay", "replay", trace, "-p", ",".join(policies), "-b", ",".join(BUDGETS), *more]
    command += [word for one in structure for word in ("--structure", one)]
    return subprocess.run(command, capture_output=True, text=True)


def main(trace: str) -> None:
    names = [one["name"] for one in json.loads(subprocess.check_output(["kvreplay", "policies", "--json"]))]
    tried = {name: replay(trace, [name], STRUCTURES["pages"], "--dry-run") for name in names}
    served = [name for name in names if tried[name].returncode == 0]
    recall = {}
    with tempfile.TemporaryDirectory() as folder:
        for heading, structure in STRUCTURES.items():
            out = Path(folder) / heading
            replay(trace, served, structure, "--metrics", "attention_recall", "-o", str(out)).check_returncode()
            rows = Run(out).overall
            rows = rows[(rows["metric"] == "attention_recall") & (rows["variant"] == "") & (rows["role"] == "asked")]
            for policy, budget, value in rows[["policy", "budget", "value"]].itertuples(index=False):
                recall[policy, budget, heading] = value
    width = max(map(len, served))
    print(" " * width + "".join(f"  {'budget ' + budget:<23}" for budget in BUDGETS).rstrip())
    print(f"{'policy':<{width}}" + "".join(f"  {heading:>7}" for _ in BUDGETS for heading in STRUCTURES))
    for name in served:
        values = [recall[name, budget, heading] for budget in BUDGETS for heading in STRUCTURES]
        print(f"{name:<{width}}" + "".join(f"  {value:7.3f}" for value in values))
    for name in names:
        if name not in served:
            reason = tried[name].stderr.strip().removeprefix("kvreplay: ").removeprefix(f"{name}: ")
            print(f"not supported: {name}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1])
