"""Commands that a page shows with their output: run, compared, or written anew.

A page holds blocks of the form

    ```console
    $ command
    what it prints
    ```

and, between `<!-- COMMAND -->` and `<!-- end -->`, text that COMMAND prints. Run as a program with page names, this
file replaces both by what the commands print now.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
GENERATED = re.compile(r"(<!-- (kvreplay [^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PROGRAM_FOLDER = ROOT / "build" / "release"


def run(command: str) -> str:
    """Standard output and error of a command, run by a shell in the project's root with the program on PATH."""
    path = f"{PROGRAM_FOLDER}:{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": path, "HOME": str(Path.home()), "LANG": "C.UTF-8", "MPLBACKEND": "Agg", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


def commands(block: str) -> list[str]:
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def replayed(block: str) -> str:
    """The block with what its commands print now, in folders that are not there yet: a folder keeps its older rows."""
    for folder in re.findall(r" -o (out/\S+)", block):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    return "".join(f"$ {command}\n{run(command)}" for command in commands(block))


def without_times(text: str) -> str:
    """Durations differ from run to run, and the columns that hold them; nothing else may."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)? ?(us|ms|s|min)\b\*?", "TIME", text)
    return re.sub(r"[ \t]+", " ", text)


def refresh(page: Path) -> None:
    text = page.read_text()
    text = CONSOLE.sub(lambda found: f"```console\n{replayed(found[1])}```", text)
    text = GENERATED.sub(lambda found: f"{found[1]}{run(found[2])}{found[4]}", text)
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
