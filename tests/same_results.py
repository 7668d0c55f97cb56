#!/usr/bin/env python3
"""Whether two builds of kvreplay give the same bits: the guard of a change that must not change a number.

  tests/same_results.py OLD NEW [--shapes 30] [--folder DIR]

Both programs replay every policy of OLD's registry at five budgets on the shipped trace and on synthetic traces of
random shapes, on these also compositions of parts; `NEW diff` compares the runs with tolerance 0. DIR keeps OLD's runs,
so that the next comparison with the same OLD computes one side alone. Exit code 1: some run differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = "16,32,64,25%,50%"


def run(*words: str | Path, refused: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode and not refused:
        sys.exit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr}")
    return done


def policies(program: Path) -> tuple[list[str], list[str]]:
    """All registered ones; snapkv with each part, and with each two of different kinds that fit together."""
    parts = [
        part
        for part in json.loads(run(program, "policies", "--parts", "--json").stdout)
        if part["name"] != "list"  # needs a number for each layer
    ]
    names = [policy["name"] for policy in json.loads(run(program, "policies", "--json").stdout)]
    composed = []
    for number, part in enumerate(parts):
        base = f"snapkv:{part['kind']}={part['name']}"
        composed.append(base)
        for other in parts[number + 1 :]:
            name = f"{other['kind']}={other['name']}"
            if other["kind"] != part["kind"] and name not in part["not_with"]:
                composed.append(f"{base},{name}")
    names.remove("random-twin")  # --controls twins has that of each policy
    return names, [text for text in composed if run(program, "policies", text, refused=True).returncode == 0]


def random_shape(number: int) -> list[str]:
    draw = random.Random(number)
    kv_heads = draw.choice((1, 2, 3))
    shape = {
        "--layers": draw.choice((2, 3, 5)),
        "--query-heads": kv_heads * draw.choice((1, 2, 4)),
        "--kv-heads": kv_heads,
        "--head-dim": draw.choice((4, 8, 16)),
        "--prompt": draw.randrange(80, 260),
        "--continuation": draw.choice((1, 7, 20)),
        "--dtype": draw.choice(("float16", "bfloat16", "float32")),
        "--seed": number,
    }
    words = [draw.choice(("gaussian", "sinks", "needle", "repeat", "integer"))]
    words += [str(word) for option in shape.items() for word in option]
    if draw.random() < 0.25:
        words += ["--softcap", "20"]
    if draw.random() < 0.25:
        words += ["--rope-base", "0"]
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the program of before")
    parser.add_argument("new", type=Path, help="the program of now")
    parser.add_argument("--shapes", type=int, default=30, help="synthetic traces (default 30)")
    parser.add_argument("--folder", type=Path, help="where traces and runs of OLD are kept (default: nowhere)")
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = choices.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        traces = [ROOT / "traces/smollm2-135m-needle.h5"]
        for number in range(choices.shapes):
            traces.append(folder / f"shape-{number}.h5")
            if not traces[-1].exists():
                run(choices.old, "synth", *random_shape(number), "-o", traces[-1])
        accepted = folder / "policies.json"
        if not accepted.exists():
            accepted.write_text(json.dumps(policies(choices.old)))
        registered, composed = json.loads(accepted.read_text())
        differing = 0
        for number, trace in enumerate(traces):
            # Each composition on every fifth synthetic trace.
            asked = registered + (composed[number % 5 :: 5] if number else [])
            runs = {}
            for name, program in (("old", choices.old), ("new", choices.new)):
                runs[name] = folder / f"{trace.stem}.{name}"
                options = ("-b", BUDGETS, "--controls", "twins", "--progress", "never", "-o", runs[name])
                if name == "new" or not runs[name].exists():
                    force = ["--force"] if runs[name].exists() else []
                    done = run(program, "replay", trace, "-p", ",".join(asked), *options, *force, refused=True)
                    if done.returncode not in (0, 6):
                        sys.exit(f"{trace.name}: {name}: exit code {done.returncode}\n{done.stderr}")
            found = run(choices.new, "diff", runs["old"], runs["new"], "--lines", "5", refused=True)
            differing += found.returncode != 0
            print(f"{trace.stem}: {'equal' if found.returncode == 0 else 'DIFFERENT'}", flush=True)
            if found.returncode:
                print(found.stdout + found.stderr)
    print(f"{len(traces)} traces, {len(registered)} policies, {len(composed)} compositions: {differing} runs differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
