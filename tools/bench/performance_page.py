"""The generated part of docs/performance.md, from what was measured."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

import goals
from goals import UNITS, Goal, Row
from length import LEAST, LENGTHS
from replay_times import ALL, ALONE, EVERY, MEMORY, Replay

BEGIN, END = "<!-- tools/bench/run -->\n", "<!-- end -->"
BACKEND_COLUMNS = ("case", "goal", "measured", "rate", "extra memory", "largest error", "spread")
PYTORCH_COLUMNS = ("computation", "shape", "form in PyTorch", "PyTorch", "kvreplay", "goal", "measured")
REPLAY_COLUMNS = ("replay", "command", "goal", "measured", "of h2o alone", "adds", "selecting")
MEMORY_COLUMNS = ("trace", "command", "without a limit", "with the limit", "goal", "measured", "peak resident")
LENGTH_COLUMNS = (
    "policy",
    f"adds at {LENGTHS[1]:,} tokens",
    f"at {LENGTHS[-1]:,}",
    "exponent",
    "five budgets",
    "twice the layers",
)
LONG_COLUMNS = ("tokens", "policies", "seconds", "peak resident")
LIVE_COLUMNS = ("policy", "live, one budget", "live, five budgets, extrapolated", "recall, live", "recall, replayed")

TITLES = ("", "The backend against OpenBLAS", "On a real model's layers", "Against PyTorch", "Whole replays")
TITLES += ("Beyond memory", "Against length", "A million tokens", "Against the policies on a live model")


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
        cases = cases_of(row, list(found))
        if not cases and row.level in {"best", ""}:
            raise RuntimeError(f"{row.data}: wanted, and not measured")
        for case in cases:
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
                    f"{figure['extra_MB']:.0f} MB" if "extra_MB" in figure else "",
                    f"{figure['max_error']:.1e}",
                    f"{100 * figure['spread']:.0f} %",
                )
            )
    return lines


def pytorch_goal(subject: str, shape: str, form: str) -> Goal:
    if subject == "least redundant tokens":
        return next(goal for start, goal in goals.SELECTION.items() if form.startswith(start))
    return goals.PYTORCH.get((subject, shape, form), goals.NONE)


def operations(subject: str, shape: str) -> float:
    """Useful operations, as the page counts them; 0 where it does not."""
    sizes = [int(size.replace(",", "")) for size in re.findall(r"[0-9][0-9,]*(?![0-9,])", shape.replace(", ", " "))]
    if subject == "cumulative attention":
        heads, _, dim, tokens = sizes
        return heads * tokens**2 * dim
    if subject == "redundancy row maxima":
        tokens, dim = sizes
        return tokens**2 * dim
    return 0


def sgemm_rate(benchmarks: list[dict[str, Any]]) -> float:
    """GF/s of OpenBLAS with as many threads as any case has."""
    found = {name: one for name, one in figures(benchmarks).items() if one.get("of_sgemm") and "GF/s" in one}
    most = max(int(name.rsplit("threads:", 1)[1]) for name in found)
    some = [one for name, one in found.items() if name.endswith(f"threads:{most}")]
    return median(one["GF/s"] / one["of_sgemm"] for one in some)


def pytorch_rows(comparisons: list[dict[str, Any]], sgemm: float) -> list[tuple[str, ...]]:
    """A line for each form, and where there are many one more for the fastest that computes in float32. Where a goal is
    missed, what share of sgemm, GF/s, it would take."""
    lines = []
    compared = {(one["subject"], one["shape"], form) for one in comparisons for form in [*one["forms"], "best"]}
    if unused := goals.PYTORCH.keys() - compared:
        raise RuntimeError(f"wanted, and not measured: {unused}")
    for comparison in comparisons:
        subject, shape, ours = comparison["subject"], comparison["shape"], comparison["ours"]
        forms = [(name, seconds, pytorch_goal(subject, shape, name)) for name, seconds in comparison["forms"].items()]
        exact = [form for form in forms if "bfloat16" not in form[0]]
        if len(exact) > 2:
            name, seconds, _ = min(exact, key=lambda form: form[1])
            forms.append((f"the fastest of these: {name}", seconds, pytorch_goal(subject, shape, "best")))
        for name, seconds, goal in forms:
            times = (number(seconds, " s"), number(ours, " s"))
            found = verdict(goal, seconds / ours, " x")
            if not goal.met(seconds / ours) and (work := operations(subject, shape)):
                needed = work / (seconds / goal.least) * 1e-9 / sgemm
                found += f", {number(goal.least, ' x')} would need {needed:.2f} of sgemm"
            lines.append((subject, shape, name, *times, goal.text(" x"), found))
    return lines


def replay_rows(replays: list[dict[str, Any]], trace: str) -> list[tuple[str, ...]]:
    alone, whole = (next(one["seconds"] for one in replays if one["name"] == of.name) for of in (ALONE, ALL))
    ratios = {ALL.name: goals.WHOLE_REPLAY, EVERY: goals.EVERY_POLICY}
    lines = []
    for replay in replays:
        name, seconds = replay["name"], replay["seconds"]
        ratio, adding = ratios.get(name, goals.NONE), goals.ADDED.get(name, goals.NONE)
        selecting = goals.SELECTING if name == ALL.name else goals.NONE
        share = replay["select_seconds"] / replay["processor_seconds"]
        command = Replay(*(replay[key] for key in ("name", "policies", "budgets", "metrics"))).command(trace)
        added = seconds - whole
        adds = f"{added:.2f} s, {verdict(adding, added / alone, ' x')}" if name.startswith("...") else ""
        wanted = [ratio.text(" x h2o alone"), adding.text(" x added")]
        if name == ALL.name:
            wanted.append(f"selecting ≤ {100 * selecting.most:.0f} %")
        lines.append(
            (
                name,
                f"`{command}`",
                ", ".join(filter(None, wanted)),
                number(seconds, " s"),
                verdict(ratio, seconds / alone, " x"),
                adds,
                f"{100 * share:.1f} %" if selecting.met(share) else f"**{100 * share:.1f} %**",
            )
        )
    return lines


def memory_rows(memory: dict[str, Any]) -> list[tuple[str, ...]]:
    free, limited = memory["free"], memory["limited"]
    command = Replay(*(free[key] for key in ("name", "policies", "budgets", "metrics"))).command("random.h5")
    peaks = " / ".join(f"{one['peak_bytes'] * 1e-6:.0f} MB" for one in (free, limited))
    return [
        (
            f"12 layers, {memory['trace_bytes'] * 1e-6:.0f} MB",
            f"`{command} --memory {MEMORY}M`",
            number(free["seconds"], " s"),
            number(limited["seconds"], " s"),
            goals.BEYOND_MEMORY.text(" of the rate"),
            verdict(goals.BEYOND_MEMORY, free["seconds"] / limited["seconds"], " of the rate"),
            peaks,
        )
    ]


def length_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each policy, the most expensive first; ratios and exponents of what is above the noise."""

    def ratio(value: float | None, unit: str = "") -> str:
        return "" if value is None else f"{value:.2f}{unit}"

    def seconds(value: float) -> str:
        return f"{value:.2f} s" if value >= LEAST else f"< {LEAST} s"

    return [
        (
            f"`{row['policy']}`",
            seconds(row["seconds"][1]),
            seconds(row["seconds"][-1]),
            ratio(row["exponent"]),
            ratio(row.get("of_five_budgets"), " x"),
            ratio(row.get("of_twice_the_layers"), " x"),
        )
        for row in sorted(rows, key=lambda row: -row["seconds"][-1])
    ]


def long_rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    lines = []
    for run in runs:
        policies = ", ".join(f"`{policy}`" for policy in run["policies"].split(","))
        peak = f"{run['peak_bytes'] / 2**30:.1f} GiB"
        lines.append((f"{run['tokens']:,}", policies, number(run["seconds"], " s"), peak))
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
                number((1 if run["policy"] == "full" else 5) * seconds, " s"),
                f"{run['recall']:.3f}",
                "" if replayed is None else f"{replayed:.3f}",
            )
        )
    return lines


def live_sentence(live: dict[str, Any]) -> str:
    whole = sum((1 if run["policy"] == "full" else 5) * run["seconds"] for run in live["runs"])
    replay, capture = live["replay_seconds"], live["capture_seconds"]
    return (
        f"P = {live['prompt']:,}: {number(whole, ' s')} live (`full` once, nine policies at five budgets, "
        f"extrapolated from one), {number(replay, ' s')} "
        f"for one `kvreplay replay` of the same policies and budgets: **{number(whole / replay, ' x')}** faster. "
        f"Capturing the trace, once for all replays, took {number(capture, ' s')}; including it, "
        f"the replay is {number(whole / (replay + capture))} x faster."
    )


def page(parts: dict[str, Any]) -> str:
    """The tables of what tools/bench/run has measured: a line on the machine, and a section for each part."""
    layers = ",".join(str(layer) for layer in goals.REAL_LAYERS)
    on_layers = f"`kvreplay_bench --trace FILE --layers {layers} --benchmark_filter=CASE`"
    text = ""
    if machine := parts.get("machine"):
        text = (
            f"Measured on {machine['cpu']}, {machine['cores']} cores, {machine['memory']}; "
            f"{machine['compiler']}, Release; {machine['blas']}; PyTorch {machine['torch']}; SIMD levels "
            f"{', '.join(machine['levels'])}. Numbers in bold miss their goal.\n"
        )

    def section(part: str, title: str, command: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        begun = parts["begun"][part]
        when = f"{begun['date']}, commit {begun['commit']}, load before the start {begun['load']}"
        return f"\n## {title}\n\n{command}: {when}.\n\n" + table(columns, rows)

    if found := parts.get("backend"):
        rows, command = backend_rows(goals.BACKEND, found), "`kvreplay_bench --benchmark_filter=CASE`"
        text += section("backend", "The backend against OpenBLAS", command, BACKEND_COLUMNS, rows)
    if found := parts.get("real"):
        rows = backend_rows(real_rows(parts["traces"]), found)
        text += section("real", "On a real model's layers", on_layers, BACKEND_COLUMNS, rows)
    if (found := parts.get("pytorch")) and "backend" in parts:
        rows = pytorch_rows(found, sgemm_rate(parts["backend"]))
        text += section("pytorch", "Against PyTorch", "`tools/bench/run pytorch`", PYTORCH_COLUMNS, rows)
    if found := parts.get("replay"):
        rows = replay_rows(found, parts["traces"]["8000"] + ".h5")
        text += section("replay", "Whole replays", "`tools/bench/run replay`", REPLAY_COLUMNS, rows)
    if found := parts.get("memory"):
        text += section("memory", "Beyond memory", "`tools/bench/run memory`", MEMORY_COLUMNS, memory_rows(found))
    if found := parts.get("length"):
        rows = length_rows(found["rows"])
        text += section("length", "Against length", "`tools/bench/run length`", LENGTH_COLUMNS, rows)
        text += f"\nNot measured, as they reject the trace: {', '.join(f'`{name}`' for name in found['rejected'])}.\n"
        rows = long_rows(found["long"])
        text += section("length", "A million tokens", "`tools/bench/run length`", LONG_COLUMNS, rows)
    if found := parts.get("live"):
        title = "Against the policies on a live model"
        text += section("live", title, "`tools/bench/run live`", LIVE_COLUMNS, live_rows(found))
        text += "\n" + live_sentence(found) + "\n"
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


def sections(generated: str) -> dict[str, str]:
    """By title, in order; "" is what comes before the first."""
    head, *others = re.split(r"^## ", generated, flags=re.MULTILINE)
    return {"": head} | {text.split("\n", 1)[0]: f"## {text}" for text in others}


def updated(document: str, generated: str) -> str:
    """The document with new sections; those that were not measured again remain."""
    old, new = sections(document.split(BEGIN)[1].split(END)[0]), sections(generated)
    found = old | {title: text for title, text in new.items() if text.strip()}
    return replaced(document, "\n".join(found[title].rstrip("\n") + "\n" for title in TITLES if title in found))


def replaced(document: str, generated: str, begin: str = BEGIN) -> str:
    """The document with a new generated part."""
    before, rest = document.split(begin)
    return before + begin + generated + END + rest.split(END, 1)[1]
