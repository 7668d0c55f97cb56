"""Commands and code that a page shows: run, compared, or updated.

A page holds blocks of the form

    ```console
    $ command
    output of the command
    ```

and, between `<!-- COMMAND -->` and `<!-- end -->`, text that COMMAND prints. A block of C++ that begins with `struct
NAME` shows this type of core/policies. A block of Python (`py`) shows docs/value_attention.py. Run as a program with
names of pages, this file updates all of them.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
GENERATED = re.compile(r"(<!-- (kvreplay [^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"```cpp\n(struct (\w+) \{\n.*?)```", re.DOTALL)
POLICY_IN_PYTHON = re.compile(r"```py\n(.*?)```", re.DOTALL)
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


def tracked(*patterns: str) -> list[str]:
    """Names of the repository's files, new ones that git does not ignore included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).exists())


def commands(block: str) -> list[str]:
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def replayed(block: str) -> str:
    """The block with the present output of its commands. Output folders are deleted before: they keep older rows."""
    for folder in re.findall(r" -o (out/\S+)", block):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    return "".join(f"$ {command}\n{run(command)}" for command in commands(block))


def without_times(text: str) -> str:
    """Durations, and the widths of their columns, differ between runs. Other text must not."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)? ?(us|ms|s|min)\b\*?", "TIME", text)
    return re.sub(r"[ \t]+", " ", text)


def code_of_the_tree(struct: str) -> str:
    """The definition of a type in core/policies."""
    definition = re.compile(rf"^struct {struct} \{{\n.*?^\}};\n", re.DOTALL | re.MULTILINE)
    for source in sorted((ROOT / "core" / "policies").rglob("*.cpp")):
        found = definition.search(source.read_text())
        if found:
            return found[0]
    raise LookupError(f"core/policies: {struct}: expected a definition, found none")


def refresh(page: Path) -> None:
    text = page.read_text()
    text = CODE.sub(lambda found: f"```cpp\n{code_of_the_tree(found[2])}```", text)
    python = (ROOT / "docs" / "value_attention.py").read_text()
    text = POLICY_IN_PYTHON.sub(lambda _: f"```py\n{python}```", text)
    text = CONSOLE.sub(lambda found: f"```console\n{replayed(found[1])}```", text)
    text = GENERATED.sub(lambda found: f"{found[1]}{run(found[2])}{found[4]}", text)
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
