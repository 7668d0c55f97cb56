#!/usr/bin/env python3
"""Writes the generated part of docs/gpu.md from what `gpu-check run` found.

tools/bench/gpu_page.py RESULTS [DOCUMENT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from goals import NONE, Goal  # noqa: E402
from performance_page import number, replaced, table, verdict  # noqa: E402

BEGIN = "<!-- tools/bench/gpu_page.py -->\n"
MISSING = "not measured yet"

Line = dict[str, Any]
Parts = dict[str, list[Line]]

# Shares: of the highest rate of products in the type, by kernels like ours or PyTorch; of copying on the device.
PRODUCTS = {64: Goal(least=0.35), 128: Goal(least=0.5)}
LONG = 32768
COPIES = Goal(least=0.6)
# Whole replays: over the larger of copy time and arithmetic, and PyTorch's time over ours.
BOUND = Goal(most=2)
PYTORCH = Goal(least=10)
EAGER, HEAD_BY_HEAD, SNAPKV = "H2O, all heads at once", "H2O, head by head", "SnapKV"

# The goal of each case, and the rate of which it is a share.
WANTED = [
    *(
        (f"cumulative_attention/{shape}/n:{tokens}/{dtype}", PRODUCTS[int(shape.rpartition("-")[2])], "products")
        for shape, tokens in (("32-8-128", 32768), ("4-1-128", 131072), ("9-3-64", 32768), ("3-1-64", 131072))
        for dtype in ("bfloat16", "float16")
    ),
    *(
        (f"{subject}/32-8-128/n:32768/{dtype}", COPIES, "copying")
        for subject in ("window_attention", "kept_moments")
        for dtype in ("bfloat16", "float16")
    ),
]

GOAL_COLUMNS = ("case", "goal", "measured")
PARITY_COLUMNS = ("trace", "checked", "differences, CUDA and CPU", "two runs on CUDA")
SUITE_COLUMNS = ("products of", "tests", "failed")
SANITIZER_COLUMNS = ("tool", "tests", "result", "time")
RATE_COLUMNS = ("operation", "rate")
OBSERVABLE_COLUMNS = ("case", "goal", "share", "rate", "time on the device", "time with copies", "largest error")
REPLAY_COLUMNS = ("replay", "trace", "CUDA", "bound", "goal", "measured", "CPU", "CPU / CUDA")
PYTORCH_COLUMNS = ("one layer", "PyTorch", "memory")


def read(folder: Path) -> Parts:
    """The lines of each part."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    scale, unit = (1, " s") if value >= 1 else (1e3, " ms") if value >= 1e-3 else (1e6, " us")
    return number(scale * value, unit)


def share(goal: Goal, value: float | None, of: str) -> tuple[str, str]:
    """The goal and the measured share, in percent."""
    wanted = Goal(*(None if bound is None else 100 * bound for bound in (goal.least, goal.most)))
    unit = f" % of {of}"
    return wanted.text(unit), MISSING if value is None else verdict(wanted, 100 * value, unit)


def lines_of(parts: Parts, part: str, key: str) -> list[Line]:
    return [line for line in parts.get(part, [])[1:] if key in line]


def rates(parts: Parts) -> dict[str, float]:
    """Operations or bytes a second by name, without cases whose results were wrong."""
    ours = {line["case"]: line["rate"] for line in lines_of(parts, "observables", "rate") if not line["problem"]}
    return ours | {line["product"]: line["rate"] for line in lines_of(parts, "pytorch", "product")}


def peak(parts: Parts, dtype: str) -> float | None:
    """The highest rate of products in a type. PyTorch's float32 may be TF32: plain arithmetic alone counts."""
    if dtype == "float32":
        return rates(parts).get("products/plain/float32")
    return max((rate for name, rate in rates(parts).items() if name.endswith(f"/{dtype}")), default=None)


def parity_rows(parts: Parts) -> list[tuple[str, ...]]:
    rows = []
    for line in parts.get("parity", [])[1:]:
        problem = f"**{line['problem'].splitlines()[0]}**" if line.get("problem") else ""
        if "trace" in line:
            checked = f"{len(line['policies'])} policies at {line['budgets'].replace(',', ' and ')}"
            found, again = problem, ""
            if "differences" in line:
                by_policy = ", ".join(f"{policy} {count}" for policy, count in line["differing"].items())
                found = f"**{line['differences']}**: {by_policy}" if line["differences"] else "none"
                again = f"**{line['of_two_runs']} differences**" if line["of_two_runs"] else "the same bits"
            rows.append((line["trace"], checked, found, again))
        else:
            rows.append(("", "", problem, ""))
    return rows


def suite_rows(parts: Parts) -> list[tuple[str, ...]]:
    rows = []
    for line in lines_of(parts, "suites", "suites"):
        tests = f"{line['tests']} in {seconds(line['seconds'])}" if "tests" in line else ""
        if line.get("left_out"):
            tests += f" without {line['left_out']}"
        problem = f"**{line['problem'].splitlines()[0]}**" if line.get("problem") else ""
        rows.append((line["suites"], tests, line.get("skipped") or problem or "none"))
    return rows


def sanitizer_rows(parts: Parts) -> list[tuple[str, ...]]:
    rows = []
    for line in lines_of(parts, "sanitizer", "tool"):
        if "skipped" in line:
            rows.append((line["tool"], "", f"{MISSING}: {line['skipped']}", ""))
            continue
        problem = line["problem"].splitlines()[0] if line["problem"] else ""
        said = f"**{line['summary'] or problem}**" if problem else line["summary"]
        rows.append((line["tool"], str(line["tests"] or ""), said, seconds(line["seconds"])))
    return rows


def is_rate(line: Line) -> bool:
    return line["case"].startswith(("products/", "copies/"))


def rate_rows(parts: Parts) -> list[tuple[str, ...]]:
    found = rates(parts)
    rows = []
    for name, rate in found.items():
        scale, unit = (1e-9, " GB/s") if name.startswith("copies/") else (1e-12, " TFLOP/s")
        rows.append((name, number(scale * rate, unit)))
    wrong = [line for line in lines_of(parts, "observables", "case") if is_rate(line) and line["problem"]]
    return rows + [(line["case"], f"**{line['problem']}**") for line in wrong]


def observable_row(parts: Parts, line: Line) -> tuple[str, ...]:
    case = f"`{line['case']}`" + (f", {line['level']}" if line["level"] else "")
    if "observable" not in line or line["problem"]:
        return (case, "", f"**{line['problem']}**", "", "", "", f"{line['error']}" if line.get("error") else "")
    taken, name = line["seconds"], line["observable"]
    goal, measured, rate = "", "", ""
    if name == "window_attention" or name.startswith("kept_moments"):
        copies = rates(parts).get("copies/device")
        wanted = COPIES if line["dtype"] != "float32" else NONE
        goal, measured = share(wanted, copies and line["bytes"] / taken / copies, "copying")
        rate = number(1e-9 * line["bytes"] / taken, " GB/s")
    elif line["operations"]:
        best = peak(parts, line["dtype"])
        long = line["tokens"] >= LONG and line["dtype"] != "float32" and not line["level"]
        wanted = PRODUCTS[line["dim"]] if long and name == "cumulative_attention" else NONE
        goal, measured = share(wanted, best and line["operations"] / taken / best, "products")
        rate = number(1e-12 * line["operations"] / taken, " TFLOP/s")
    times = (f"{seconds(taken)} ± {50 * line['spread']:.0f} %", seconds(line["seconds_with_copies"]))
    return (case, goal, measured, rate, *times, f"{line['error']:.1e}")


def observable_rows(parts: Parts) -> list[tuple[str, ...]]:
    lines = lines_of(parts, "observables", "case")
    return [observable_row(parts, line) for line in lines if not is_rate(line)]


def goal_rows(parts: Parts) -> list[tuple[str, ...]]:
    """The goals and the measured figures; a missing figure is named as such."""
    measured = {row[0]: row for row in observable_rows(parts)}
    rows = []
    for case, goal, of in WANTED:
        row = measured.get(f"`{case}`")
        rows.append((f"`{case}`", share(goal, None, of)[0], row[2] if row else MISSING))
    replays = [row for row in replay_rows(parts) if row[5]]
    of = f" of {replays[0][1]}" if replays else ""
    rows.append((f"whole replay{of}", BOUND.text(" x the bound"), replays[0][5] if replays else MISSING))
    rows.append(("H2O and SnapKV by PyTorch over the whole replay", PYTORCH.text(" x"), pytorch_ratio(parts)[0]))
    return rows


def bound(parts: Parts, line: Line) -> float | None:
    """The larger of two times: the copy of the trace to the device, and its products."""
    copies, products = rates(parts).get("copies/to_device"), peak(parts, "bfloat16")
    if copies is None or products is None:
        return None
    return max(line["trace_bytes"] / copies, line["operations"] / products)


def replay_rows(parts: Parts) -> list[tuple[str, ...]]:
    lines = lines_of(parts, "replay", "replay")
    by_cpu = {one["replay"]: one for one in lines if one["device_used"] == "cpu" and "seconds" in one}
    rows = []
    for line in lines:
        if line.get("problem"):
            problem = f"**{line['device_used']}: {line['problem']}**"
            rows.append((line["replay"], line.get("shape", ""), problem, "", "", "", "", ""))
            continue
        if line["device_used"] != "cuda":
            continue
        least = bound(parts, line)
        measured = MISSING if least is None else verdict(BOUND, line["seconds"] / least, " x the bound")
        on_cpu = by_cpu.get(line["replay"])
        scaled, ratio = MISSING, MISSING
        if on_cpu:
            whole = on_cpu["seconds"] * line["layers"] / on_cpu["layers"]
            ratio = number(whole / line["seconds"], " x")
            scaled = number(whole, " s")
            if on_cpu["layers"] != line["layers"]:
                scaled += f" ({number(on_cpu['seconds'], ' s')} for {on_cpu['layers']} layers, scaled)"
        trace = f"{line['layers']} layers, {line['shape']}, {line['trace_bytes'] / 2**30:.1f} GiB"
        took = seconds(line["seconds"])
        rows.append((line["replay"], trace, took, seconds(least), BOUND.text(" x the bound"), measured, scaled, ratio))
    return rows


def pytorch_rows(parts: Parts) -> list[tuple[str, ...]]:
    rows = []
    for line in lines_of(parts, "pytorch", "form"):
        if "skipped" in line or line.get("problem"):
            rows.append((line["form"], line.get("skipped") or f"**{line['problem']}**", ""))
            continue
        shape = f"{line['query_heads']}/{line['kv_heads']} heads, d = {line['dim']}, {line['tokens']:,} tokens"
        took = "out of memory" if "out_of_memory" in line else seconds(line["seconds"])
        memory = f"{line['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in line else line["out_of_memory"]
        rows.append((f"{line['form']}; {shape}, {line['dtype']}", took, memory))
    return rows


def pytorch_ratio(parts: Parts) -> tuple[str, str]:
    """PyTorch's time for its two policies over all layers divided by the replay's, and a sentence about it."""
    forms = {line["form"]: line for line in lines_of(parts, "pytorch", "form") if "seconds" in line}
    replays = [one for one in lines_of(parts, "replay", "replay") if one["device_used"] == "cuda" and "seconds" in one]
    h2o = EAGER if EAGER in forms else HEAD_BY_HEAD
    if not replays or h2o not in forms or SNAPKV not in forms:
        return MISSING, ""
    layers, ours = replays[0]["layers"], replays[0]["seconds"]
    theirs = layers * (forms[h2o]["seconds"] + forms[SNAPKV]["seconds"])
    words = f'{layers} layers of "{h2o}" and "{SNAPKV}" take PyTorch {seconds(theirs)}, '
    words += f"the whole replay {seconds(ours)}."
    if h2o != EAGER:
        words += f' "{EAGER}" did not fit.'
    return verdict(PYTORCH, theirs / ours, " x"), words


def page(parts: Parts) -> str:
    """All tables; a part without results has a line that names it."""
    text = "Figures in bold miss their goal or are wrong.\n"

    def section(title: str, part: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        heading = f"\n## {title}\n\n"
        if not parts.get(part):
            return heading + f"`gpu-check run {part}`: {MISSING}.\n"
        begun = parts[part][0]
        on = f"{begun['device']} ({begun['capability']}), driver for CUDA {begun['driver']}, runtime {begun['runtime']}"
        when = f"`{begun['command']}`: {begun['date']}, {on}, commit {begun['commit']}."
        return heading + when + "\n\n" + (table(columns, rows) if rows else f"{MISSING.capitalize()}.\n")

    text += "\n" + table(GOAL_COLUMNS, goal_rows(parts))
    text += section("Parity", "parity", PARITY_COLUMNS, parity_rows(parts))
    text += section("Test suites", "suites", SUITE_COLUMNS, suite_rows(parts))
    text += section("Sanitizers", "sanitizer", SANITIZER_COLUMNS, sanitizer_rows(parts))
    text += section("The device", "observables", RATE_COLUMNS, rate_rows(parts))
    text += section("Observables", "observables", OBSERVABLE_COLUMNS, observable_rows(parts))
    text += section("Whole replays", "replay", REPLAY_COLUMNS, replay_rows(parts))
    text += section("PyTorch on the same GPU", "pytorch", PYTORCH_COLUMNS, pytorch_rows(parts))
    words = pytorch_ratio(parts)[1]
    return text + (f"\n{words}\n" if words else "")


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    document = Path(sys.argv[2] if len(sys.argv) == 3 else Path(__file__).resolve().parents[2] / "docs" / "gpu.md")
    document.write_text(replaced(document.read_text(), page(read(Path(sys.argv[1]))), BEGIN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
