"""The generated part of docs/performance.md, from what was measured."""

from __future__ import annotations

import re
from typing import Any

import goals
from goals import UNITS, Goal, Row
from replay_times import ALL, ALONE

BEGIN, END = "<!-- tools/bench/run -->\n", "<!-- end -->"
BACKEND_COLUMNS = ("case", "goal", "measured", "rate", "extra memory", "largest error", "spread")
PYTORCH_COLUMNS = ("what", "on", "in PyTorch", "PyTorch", "kvreplay", "goal", "measured")
REPLAY_COLUMNS = ("replay", "command", "goal", "measured", "of h2o alone", "selecting")
LIVE_COLUMNS = ("policy", "live, one budget", "live, five budgets", "recall live", "recall replayed")


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float, unit: str = "") -> str:
    """Three digits that count, no more than people read."""
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return text + unit


def verdict(goal: Goal, value: float, unit: str = "") -> str:
    """The figure, in bold where it misses its goal."""
    text = number(value, unit)
    return text if goal.met(value) else f"**{text}**"


def cases_of(row: Row, names: list[str]) -> list[str]:
    """The names that a row stands for. They come best level first, threads ascending."""
    some = [name for name in names if name.startswith(row.data + "/")]
    levels = list(dict.fromkeys(name.split("/")[-2] for name in some))
    level = row.level or (some[0].split("/")[-2] if some else "")
    if level == "best":
        level = levels[0] if levels else ""
    some = [name for name in some if name.split("/")[-2] == level]
    wanted = []
    for threads in row.threads:
        fits = some[-1:] if threads == "all" else [name for name in some if name.endswith(f"threads:{threads}")]
        wanted += [name for name in fits if name not in wanted]
    return wanted


def figures(benchmarks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Google Benchmark's results by case, in seconds."""
    found = {}
    for benchmark in benchmarks:
        name = re.sub(r"/iterations:.*$", "", benchmark["name"])
        found[name] = {**benchmark, "seconds": benchmark.get("real_time", 0.0) * 1e-3}
    return found


def backend_rows(rows: list[Row], benchmarks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    found = figures(benchmarks)
    lines = []
    for row in rows:
        for case in cases_of(row, list(found)):
            figure = found[case]
            if figure.get("error_occurred"):
                raise RuntimeError(f"{case}: {figure['error_message']}")
            unit = UNITS[row.figure]
            rate = f"{figure['GF/s']:.0f} GF/s" if "GF/s" in figure else f"{figure['GB/s']:.1f} GB/s"
            lines.append(
                (
                    f"`{case}`",
                    row.goal.text(unit),
                    verdict(row.goal, figure[row.figure], unit),
                    rate,
                    f"{figure['extra_MB']:.0f} MB",
                    f"{figure['max_error']:.1e}",
                    f"{100 * figure['spread']:.0f} %",
                )
            )
    return lines


def pytorch_goal(subject: str, shape: str, form: str) -> Goal:
    if subject == "least redundant tokens":
        return next(goal for start, goal in goals.SELECTION.items() if form.startswith(start))
    return goals.PYTORCH.get((subject, shape, form), goals.NONE)


def pytorch_rows(comparisons: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each form, and where there are many one more for the fastest that computes in float32."""
    lines = []
    for comparison in comparisons:
        subject, shape, ours = comparison["subject"], comparison["shape"], comparison["ours"]
        forms = [(name, seconds, pytorch_goal(subject, shape, name)) for name, seconds in comparison["forms"].items()]
        exact = [form for form in forms if "bfloat16" not in form[0]]
        if len(exact) > 2:
            name, seconds, _ = min(exact, key=lambda form: form[1])
            forms.append((f"the best of these: {name}", seconds, pytorch_goal(subject, shape, "best")))
        for name, seconds, goal in forms:
            times = (number(seconds, " s"), number(ours, " s"))
            lines.append((subject, shape, name, *times, goal.text(" x"), verdict(goal, seconds / ours, " x")))
    return lines


def replay_rows(replays: list[dict[str, Any]], trace: str) -> list[tuple[str, ...]]:
    alone = next(replay["seconds"] for replay in replays if replay["name"] == ALONE.name)
    lines = []
    for replay in replays:
        is_whole = replay["name"] == ALL.name
        goal, selecting = (goals.WHOLE_REPLAY, goals.SELECTING) if is_whole else (goals.NONE, goals.NONE)
        share = replay["select_seconds"] / replay["seconds"]
        command = (
            f"kvreplay replay {trace} -p {replay['policies']} -b {replay['budgets']} --metrics {replay['metrics']}"
        )
        wanted = f"{goal.text(' x h2o alone')}, selecting ≤ {100 * goals.SELECTING.most:.0f} %" if is_whole else ""
        lines.append(
            (
                replay["name"],
                f"`{command}`",
                wanted,
                number(replay["seconds"], " s"),
                verdict(goal, replay["seconds"] / alone, " x"),
                f"{100 * share:.1f} %" if selecting.met(share) else f"**{100 * share:.1f} %**",
            )
        )
    return lines


def live_rows(live: dict[str, Any]) -> list[tuple[str, ...]]:
    lines = []
    for run in live["runs"]:
        replayed = live["replayed_recall"].get(run["policy"])
        seconds = run["seconds"]
        lines.append(
            (
                run["policy"],
                number(seconds, " s"),
                number(5 * seconds, " s"),
                f"{run['recall']:.3f}",
                "" if replayed is None else f"{replayed:.3f}",
            )
        )
    return lines


def live_sentence(live: dict[str, Any]) -> str:
    whole = 5 * sum(run["seconds"] for run in live["runs"])
    replay, capture = live["replay_seconds"], live["capture_seconds"]
    return (
        f"P = {live['prompt']:,}: {number(whole, ' s')} live (ten policies at five budgets, one after the other), "
        f"{number(replay, ' s')} for one `kvreplay replay` of the same, **{number(whole / replay, ' x')}**. "
        f"Capturing the trace, once for all replays, took {number(capture, ' s')}; with it, "
        f"{number(whole / (replay + capture))} x."
    )


def page(parts: dict[str, Any]) -> str:
    """All tables. `parts` is what tools/bench/run has measured: machine, backend, real, pytorch, replay, live."""
    machine = parts["machine"]
    text = (
        f"Measured {machine['date']} on {machine['cpu']}, {machine['cores']} cores, {machine['memory']}; "
        f"{machine['compiler']}, Release; {machine['blas']}; PyTorch {machine['torch']}; SIMD levels "
        f"{', '.join(machine['levels'])}; commit {machine['commit']}; load before the start {machine['load']}. "
        "Figures in bold miss their goal.\n"
    )
    text += "\n## The backend against OpenBLAS\n\n`kvreplay_bench --benchmark_filter=CASE`\n\n"
    text += table(BACKEND_COLUMNS, backend_rows(goals.BACKEND, parts["backend"]))
    text += "\n## On a real model's layers\n\n`kvreplay_bench --trace FILE --layers "
    text += ",".join(str(layer) for layer in goals.REAL_LAYERS) + " --benchmark_filter=CASE`\n\n"
    text += table(BACKEND_COLUMNS, backend_rows(real_rows(parts["traces"]), parts["real"]))
    text += "\n## Against PyTorch\n\n`tools/bench/run pytorch`\n\n"
    text += table(PYTORCH_COLUMNS, pytorch_rows(parts["pytorch"]))
    text += "\n## Whole replays\n\n`tools/bench/run replay`\n\n"
    text += table(REPLAY_COLUMNS, replay_rows(parts["replay"], parts["traces"]["8000"] + ".h5"))
    text += "\n## Against the policies on a live model\n\n`tools/bench/run live`\n\n"
    text += table(LIVE_COLUMNS, live_rows(parts["live"])) + "\n" + live_sentence(parts["live"]) + "\n"
    return text


def real_rows(traces: dict[str, str]) -> list[Row]:
    """`goals.REAL` with the names of the traces."""
    rows = []
    for row in goals.REAL:
        data = row.data
        for tokens, name in traces.items():
            data = data.replace("{" + tokens + "}", name)
        rows.append(Row(data, row.figure, row.goal, row.level, row.threads))
    return rows


def replaced(document: str, generated: str) -> str:
    """The document with a new generated part."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + generated + END + rest.split(END, 1)[1]
