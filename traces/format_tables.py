#!/usr/bin/env python3
"""Writes the tables of FORMAT.md from core/trace/schema.json, the list that reader and writers obey.

python3 traces/format_tables.py           rewrites what stands between the markers
python3 traces/format_tables.py --check   exits with 1 where that would change something
"""

import argparse
import json
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("FORMAT.md")
SCHEMA = Path(__file__).parents[1] / "core" / "trace" / "schema.json"
BEGIN = "<!-- tables: made by traces/format_tables.py -->"
END = "<!-- end of tables -->"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shape(rule: dict) -> str:
    """[Hq, Tq, d], or scalar."""
    return "[" + ", ".join(map(str, rule["shape"])) + "]" if rule["shape"] else "scalar"


def limits(rule: dict) -> str:
    """Every rule that the value obeys by itself, in words."""
    low, high = rule.get("min"), rule.get("max")
    words = []
    if "equals" in rule:
        words.append(f"`{rule['equals']}`")
    if "one_of" in rule:
        words.append(" or ".join(f"`{word}`" for word in rule["one_of"]))
    if low is not None and high is not None:
        words.append(str(low) if low == high else f"{low} to {high}")
    elif low is not None:
        words.append(f"at least {low}")
    elif high is not None:
        words.append(f"at most {high}")
    for key, text in (
        ("above", "above {}"),
        ("at_most", "at most {}"),
        ("below", "below {}"),
        ("divides", "divides {}"),
        ("with", "exactly when `{}` is there"),
        ("unless", "absent when `{}` is there"),
    ):
        if key in rule:
            words.append(text.format(rule[key]))
    if rule.get("of_source"):
        words.append("absent if `/model/kv_source` names another layer")
    if rule.get("ascending"):
        words.append("strictly ascending")
    if rule.get("minus_infinity"):
        words.append("finite or -infinity")
    return ", ".join(words)


def presence(rule: dict) -> str:
    """Whether the object has to be there."""
    words = "required" if rule["required"] else "optional"
    return words + (f", version {rule['since']}" if "since" in rule else "")


def tables(schema: dict) -> str:
    """All of them, with their headings."""
    attributes = [
        (f"`{a['object']}@{a['name']}`", a["type"], presence(a), limits(a), a["help"]) for a in schema["attributes"]
    ]
    datasets = [(f"`{d['path']}`", d["type"], shape(d), presence(d), limits(d), d["help"]) for d in schema["datasets"]]
    parts = [
        ("Dimensions", table(("dimension", "meaning"), [(f"`{k}`", v) for k, v in schema["dimensions"].items()])),
        ("Groups", table(("group", "presence"), [(f"`{g['path']}`", presence(g)) for g in schema["groups"]])),
        ("Attributes", table(("attribute", "type", "presence", "value", "meaning"), attributes)),
        ("Datasets", table(("dataset", "type", "shape", "presence", "values", "meaning"), datasets)),
    ]
    for name, members in schema["compounds"].items():
        rows = [(f"`{m['name']}`", m["type"], m["help"]) for m in members]
        parts.append((f"Members of `{name}`", table(("member", "type", "meaning"), rows)))
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts)


def page_with_tables(page: str, schema: dict) -> str:
    """The page, with what stands between the markers made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name}: the markers {BEGIN} and {END} are not both there")
    return f"{before}{BEGIN}\n\n{tables(schema)}\n\n{END}{after}"


def main() -> int:
    """0: the page is as the schema says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say whether something would")
    check = parser.parse_args().check
    page = PAGE.read_text("utf-8")
    wanted = page_with_tables(page, json.loads(SCHEMA.read_text("utf-8")))
    if check and page != wanted:
        print(f"{PAGE.name}: its tables are not those of {SCHEMA.name}: run traces/format_tables.py", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
