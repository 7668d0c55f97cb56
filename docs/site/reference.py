"""Generates the reference pages of the site from the registry, the --help texts and the docstrings."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

ANNOTATION = re.compile(r"(: |-> )'([^']*)'")  # in signatures of modules with postponed annotations
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVREPLAY", ROOT / "build" / "release" / "kvreplay"))


@cache
def run(*words: str) -> str:
    """Standard output of kvreplay, with the Python commands of this environment on PATH."""
    path = os.pathsep.join([str(PROGRAM.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run([PROGRAM, *words], text=True, capture_output=True, env=environment)
    if done.returncode:
        raise SystemExit(f"kvreplay {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def cell(text: object) -> str:
    return escape(str(text), quote=False).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")


def code(text: object) -> str:
    return f"<code>{escape(str(text), quote=False).replace('|', '&#124;')}</code>" if str(text) else ""


def sentence(text: str) -> str:
    """A summary of the registry with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = ["", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def policies_page() -> list[str]:
    lines = [
        "# Policies",
        "",
        "After this page you can choose a policy, and set each of its parameters in `-p NAME:PARAMETER=VALUE,...`.",
        "The page is generated from the registry; `kvreplay policies NAME` prints the same.",
        "[All policies on the shipped trace](../docs/policies.md) compares them, and",
        "[Choices and presets](../docs/readings.md) explains the parameters that stand for choices of the papers.",
    ]
    for family, members in groupby(json.loads(run("policies", "--json")), key=lambda policy: policy["family"]):
        lines += ["", f"## {family[:1].upper()}{family[1:]}"]
        for policy in members:
            lines += ["", f"### {policy['name']}", "", cell(sentence(policy["summary"])), ""]
            if policy["paper"]:
                lines += [f"- Paper: {cell(policy['paper'])}"]
            lines += [f"- Score: {code(policy['score'])}"]
            facts = ("granularity", "needs", "class", "cost")
            lines += [f"- {fact.capitalize()}: {cell(policy[fact])}" for fact in facts]
            if policy["parameters"]:
                columns = ("name", "default", "range", "help")
                rows = [
                    [code(p["name"]), code(p["default"]), code(p["range"]), cell(p["help"])]
                    for p in policy["parameters"]
                ]
                lines += table(("parameter", *columns[1:3], "meaning"), rows)
            for preset in policy["presets"]:
                lines += [f"- Preset {code(describe_preset(preset))}"]
    return lines


def describe_preset(preset: object) -> str:
    if isinstance(preset, dict):
        return ", ".join(f"{key}: {value}" for key, value in preset.items() if value)
    return str(preset)


def metrics_page() -> list[str]:
    lines = [
        "# Metrics",
        "",
        "After this page you can read every column of a run's tables. The page is generated from the registry;",
        "`kvreplay metrics NAME` prints the same.",
        "[Conventions](../docs/conventions.md#metrics) has the notes on interpretation.",
    ]
    for metric in json.loads(run("metrics", "--json")):
        lines += ["", f"## {metric['name']}", "", cell(sentence(metric["summary"])), ""]
        for label, key in (("Unit", "unit"), ("Better", "better"), ("Source", "source"), ("Edge cases", "edges")):
            if metric.get(key):
                lines += [f"- {label}: {cell(metric[key])}"]
        if metric.get("formula"):
            lines += [f"- Formula: {code(metric['formula'])}"]
        rows = []
        for variant in metric.get("variants", []):
            default = "yes" if variant["by_default"] else "no"
            rows.append([code(variant["name"]), cell(variant["summary"]), default, cell(variant.get("unit", ""))])
        if len(rows) > 1:
            lines += table(("variant", "meaning", "by default", "unit"), rows)
    return lines


def parts_page() -> list[str]:
    lines = [
        "# Parts",
        "",
        "After this page you can combine the parts of policies, as in `-p h2o:select=chunks,chunk=10`.",
        "The page is generated from the registry; `kvreplay policies --parts` prints the same.",
        "[Write a policy in C++](../core/policies/README.md#writing-a-part) explains how a part is written.",
    ]
    for kind, members in groupby(json.loads(run("policies", "--parts", "--json")), key=lambda part: part["kind"]):
        rows = []
        for part in members:
            excluded = " ".join(code(other) for other in part.get("not_with", []))
            name = part["name"] if "=" in part["name"] else f"{kind}={part['name']}"
            rows.append([code(name), cell(part["summary"]), code(part["parameters"]), excluded])
        lines += ["", f"## {kind.capitalize()}"]
        lines += table(("part", "meaning", "parameters and defaults", "not supported together with"), rows)
    return lines


def command_names() -> list[str]:
    """Commands in the overview: lines of two blanks, a name, and a description, up to the exit codes."""
    lines = run("--help").partition("exit codes")[0].splitlines()
    indented = [line.split() for line in lines if line.startswith("  ") and line[2:3].isalpha()]
    return [words[0] for words in indented if words[0] != "kvreplay" and words[0] != "help"]


def command_line_page() -> list[str]:
    lines = [
        "# Command line",
        "",
        "After this page you can look up every command, option and exit code.",
        "The page shows the `--help` texts of this version.",
        "",
        "```text",
        run("--help").rstrip(),
        "```",
    ]
    for name in command_names():
        lines += ["", f"## kvreplay {name}", "", "```text", run(name, "--help").rstrip(), "```"]
    return lines


def document(name: str, thing: object, level: int) -> list[str]:
    """The signature and the docstring of a function, a class or a method; of a class also its public members."""
    try:
        signature = ANNOTATION.sub(r"\1\2", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        signature = ""
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or signature in ("(*args, **kwargs)", "()")):
        signature = ""
    lines = ["", f"{'#' * level} {name}", ""]
    if signature:
        lines += ["```python", wrapped(f"{name}{signature}"), "```", ""]
    text = inspect.getdoc(thing) or ""
    if text:
        lines += ["```text", text, "```"] if is_preformatted(text) else [escape_markdown(text)]
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            inner = member.fget if isinstance(member, property) else member
            inner = getattr(inner, "__func__", inner)
            if key.startswith("_") or not getattr(inner, "__doc__", None) or inspect.isclass(inner):
                continue
            if isinstance(member, property) or type(member).__name__ in ("nb_method", "cached_property"):
                lines += ["", f"{'#' * (level + 1)} {name}.{key}", "", escape_markdown(inspect.getdoc(member) or "")]
            elif callable(inner):
                lines += document(f"{name}.{key}", inner, level + 1)
    return lines


def wrapped(call: str) -> str:
    """A long signature, with a line for each parameter."""
    if len(call) <= 100:
        return call
    name, _, rest = call.partition("(")
    parameters, _, result = rest.rpartition(")")
    pieces, depth = [""], 0
    for character in parameters:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return "\n".join([f"{name}(", *(f"    {piece.strip()}," for piece in pieces), f"){result}"])


def is_preformatted(text: str) -> bool:
    return any(line.startswith("  ") for line in text.splitlines())


def escape_markdown(text: str) -> str:
    """Escapes Markdown syntax outside code spans."""
    pieces = text.split("`")
    for index in range(0, len(pieces), 2):
        plain = escape(pieces[index], quote=False)
        pieces[index] = plain.replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
    return "`".join(pieces)


def python_page() -> list[str]:
    import kvreplay

    lines = [
        "# Python API",
        "",
        "After this page you can look up every public function and class of `import kvreplay as kv`.",
        "The page is generated from the docstrings; [Write a policy in Python](../docs/python.md) shows them in use.",
    ]
    for name in sorted(kvreplay.__all__, key=str.lower):
        thing = getattr(kvreplay, name)
        if inspect.ismodule(thing):
            lines += ["", f"## kv.{name}", "", escape_markdown(inspect.getdoc(thing) or "")]
        else:
            lines += document(f"kv.{name}", thing, 2)
    return lines + view_section()


def view_section() -> list[str]:
    """The view that policies receive: its properties and methods in one table."""
    from kvreplay._engine import View

    rows = []
    for name, member in vars(View).items():
        if name.startswith("_"):
            continue
        text = inspect.getdoc(member) or ""
        if not isinstance(member, property):  # the first paragraph is the signature
            call, _, text = text.partition("\n\n")
            name = re.sub(r": [\w.\[\]]+", "", call.partition(" -> ")[0].replace("self, ", "").replace("self", ""))
        rows.append([code(name), cell(" ".join(text.split()))])
    return ["", "## View", "", escape_markdown(inspect.getdoc(View) or ""), *table(("member", "value"), rows)]


def write(folder: Path) -> None:
    """Writes every reference page into a folder."""
    pages = {
        "policies": policies_page,
        "metrics": metrics_page,
        "parts": parts_page,
        "command-line": command_line_page,
        "python": python_page,
    }
    folder.mkdir(parents=True)
    for name, make in pages.items():
        (folder / f"{name}.md").write_text("\n".join(make()) + "\n")
