"""Writes the C++ header with the options of the commands in Python, for the manual page and for completion.

The build runs `python_commands.py HEADER`. Options come from the argparse parsers of the commands, which need the
standard library alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS / "python"))
sys.dont_write_bytecode = True

import kvreplay  # noqa: E402
from kvreplay.program import Parser  # noqa: E402

kvreplay.__path__.append(str(TOOLS))  # of kvreplay.capture and kvreplay.live
MODULES = {
    "calibrate": "calibrate.command", "capture": "capture.command", "check": "conformance.command",
    "compare": "compare.command", "example": "example_trace", "export": "export", "live": "live.command",
    "plot": "plot.command", "predict": "predict.command", "regret": "bounds.command", "report": "report.command",
    "sql": "sql", "sweep": "sweep.command", "tune": "tune.command", "why": "why",
}  # fmt: skip
OF_EVERY_COMMAND = ("help", "quiet", "version")


def literal(text: str) -> str:
    return json.dumps(text.replace("…", "..."), ensure_ascii=False)


def value_of(action: argparse.Action) -> str:
    """As help shows it; empty for a flag."""
    if action.nargs == 0:
        return ""
    return action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())


def options_of(parser: Parser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings or action.dest in OF_EVERY_COMMAND:
            continue
        letter = next((name[1] for name in action.option_strings if len(name) == 2), "")
        name = next((name[2:] for name in action.option_strings if len(name) > 2), "")
        help_text = action.help % {"default": action.default}
        fields = (literal(name), f"'{letter}'" if letter else "0", literal(value_of(action)), '""', literal(help_text))
        yield "{" + ", ".join(fields) + "}"


def operands_of(parser: Parser) -> str:
    if parser.usage:
        return parser.usage.removeprefix(parser.prog).partition(" [options]")[0].partition(" -")[0].strip()
    endings = {"?": ("[", "]"), "+": ("", "..."), "*": ("[", "...]"), None: ("", "")}
    operands = [action for action in parser._actions if not action.option_strings]
    return " ".join(value_of(one).join(endings[one.nargs]) for one in operands)


def header() -> str:
    lines = ["// Written by python_commands.py.", "#pragma once", '#include "command.h"', "namespace kvreplay {"]
    for name, module in MODULES.items():
        parser = import_module(f"kvreplay.{module}").parser()
        lines += [f"inline constexpr Option {name}_options[] = {{", ",\n".join(options_of(parser)), "};"]
        lines += [f"inline constexpr const char* {name}_operands = {literal(operands_of(parser))};"]
        examples = "".join(f"{example}\n" for example in parser.examples)
        lines += [f"inline constexpr const char* {name}_examples = {literal(examples)};"]
    return "\n".join([*lines, "}", ""])


def main(path: Path) -> None:
    content = header()
    if not path.exists() or path.read_text("utf-8") != content:  # a new time compiles commands.cpp
        path.write_text(content, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
