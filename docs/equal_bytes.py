"""Prints the tables of docs/equal-bytes.md: python docs/equal_bytes.py. --write also updates the page and its figures.

The numbers are those of the parts equal-bytes and equal-bytes-qwen of tools/study. Differences are paired by prompt;
Holm's correction is over all comparisons and metrics of a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kvreplay.compare.statistics import paired
from kvreplay.pareto_front import on_front
from kvreplay.plot.colours import COLOURS, looks_of
from kvreplay.plot.lines import draw_mean, mean_over_traces
from kvreplay.plot.style import Sheet, label_ends, logarithmic_axis, quiet_frame, save, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
from published_orders import SIGNIFICANT  # noqa: E402
from study import EVICTIONS, FEW_EVICTIONS, FULL_BITS, STUDIES, file_of, read  # noqa: E402

PAGE = Path(__file__).with_name("equal-bytes.md")
PARTS = ("equal-bytes", "equal-bytes-qwen")
METRICS = ("kld", "output_error:pooled")  # of the comparisons and figures
ANSWERS = "contains"
BETTER = dict.fromkeys(METRICS, "lower") | {ANSWERS: "higher"}
NEAR = 0.02  # relative: cells of this distance from a number of bits have it
TARGETS = (2, 3, 4, 6, 8, 12)  # bits per number of the full cache
CONTROLS = ("oracle", "random")
PANELS = {"eviction alone": "eviction", "formats alone": "quantisation", "both": "both"}  # heading, kind
HEIGHT = 3.4  # inches of a panel
FRONT = "#c4c4c4"
DASHES = ("solid", (0, (4, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 1, 1, 1, 1, 1)))  # by format
# Method and bits per number, and what it is compared with. None: the format's own bits.
Side = tuple[str, float | None]
COMPARISONS: dict[str, tuple[tuple[Side, Side], ...]] = {
    "both, and eviction alone": (
        (("chunkkv+q4_0", 3), ("chunkkv", 3)),
        (("chunkkv+q8_0", 4), ("chunkkv", 4)),
    ),
    "both, and a format alone": (
        (("chunkkv+q4_0", 3), ("quantised(bits=2)", None)),
        (("chunkkv+turboquant(bits=4)", 3), ("turboquant(bits=3)", None)),
    ),
    "a format, and eviction alone": (
        (("turboquant(bits=3)", None), ("chunkkv", 4)),
        (("q4_0", None), ("chunkkv", 6)),
        (("fp8_e4m3", None), ("chunkkv", 8)),
    ),
    "two formats": (
        (("q4_0(hadamard)", None), ("q4_0", None)),
        (("turboquant(bits=4)", None), ("q4_0", None)),
        (("turboquant(bits=4,product)", None), ("turboquant(bits=4)", None)),
        (("kv(q8_0,q4_0)", None), ("kv(q4_0,q8_0)", None)),
    ),
    "matched control": ((("chunkkv+q4_0", 3), ("random+q4_0", 3)),),
}


def store_of(values: dict[str, str]) -> str:
    """The format of a cell in short: without default values, and without what all cells of the study have."""
    store = values.get("store", "")
    words = [f"bits={values['bits']}"] if store in ("quantised", "turboquant") else []
    if store == "kv":
        words = [values["keys"], values["values"]]
    if values.get("form") == "product":
        words.append("product")
    if values.get("hadamard") == "true":
        words.append("hadamard")
    return store + (f"({','.join(words)})" if words else "")


def method_of(label: str) -> str:
    """policy, format, or policy+format; `full` is the uncompressed cache."""
    policy, _, parameters = label.partition(":")
    store = store_of(dict(one.split("=") for one in parameters.split(",") if "=" in one))
    if not store:
        return policy
    return store if policy == "full" else f"{policy}+{store}"


def measured(name: str) -> pd.DataFrame:
    """The cells of a part of the study, with `method` and `bits` per number of the full cache."""
    cells, _ = read(file_of(name))
    full = cells[cells["label"] == "full"].set_index("prompt")["kv_bytes"]
    bits = FULL_BITS * cells["kv_bytes"] / cells["prompt"].map(full)
    names = {"trace_hash": cells["prompt"], "model": STUDIES[name].title}
    return cells.assign(method=cells["label"].map(method_of), bits=bits, **names)


def kind_of(method: str) -> str:
    policy, _, store = method.partition("+")
    if policy == "full":
        return "full cache"
    if store:
        return "both"
    return "eviction" if policy in (*EVICTIONS, *FEW_EVICTIONS) else "quantisation"


def points_of(cells: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row for each method and budget: mean with its interval over prompts, bits, and whether it is on the front."""
    rows = cells.rename(columns={metric: "value"}).dropna(subset="value")
    prompts = pd.Series(range(rows["prompt"].nunique()), rows["prompt"].unique())
    points = mean_over_traces(rows, ["method", "budget"], prompts)
    points["bits"] = rows.groupby(["method", "budget"])["bits"].mean().to_numpy()
    points["kind"] = points["method"].map(kind_of)
    is_control = points["method"].str.split("+").str[0].isin([*CONTROLS, "full"])
    cost = points["mean"] * (1 if BETTER[metric] == "lower" else -1)
    points["on_front"] = on_front(points["bits"].round(1), cost, ~is_control)
    return points.sort_values(["kind", "method", "bits"], kind="stable")


def near(bits: pd.Series, wanted: float) -> pd.Series:
    return (bits / wanted - 1).abs() <= NEAR


def compared(cells: pd.DataFrame) -> pd.DataFrame:
    """The lines of `paired`, one for each comparison and metric whose two sides were measured."""
    rows = []
    for group, pairs in COMPARISONS.items():
        for sides in pairs:
            found = [cells[(cells["method"] == method) & (near(cells["bits"], bits) if bits else True)]
                     for method, bits in sides]  # fmt: skip
            if any(some.empty for some in found):
                continue
            words = ", ".join(f"`{method}` at {some['bits'].mean():.3g}"
                                     for (method, _), some in zip(sides, found, strict=True))  # fmt: skip
            for label, some in zip(("first", "second"), found, strict=True):
                for metric in METRICS:
                    rows.append(pd.DataFrame({"trace": some["prompt"], "name": metric, "budget": f"{group}: {words}",
                                              "label": label, "value": some[metric]}))  # fmt: skip
    rows = pd.concat(rows, ignore_index=True)
    cluster = pd.Series(range(rows["trace"].nunique()), rows["trace"].unique())
    lines = paired(rows, cluster, "second", BETTER, seed=0)
    return lines[lines["label"] == "first"]


def verdict(line: pd.Series) -> str:
    if not line["p_holm"] < SIGNIFICANT:
        return "not resolved"
    return "lower" if line["difference"] < 0 else "higher"


def interval(low: float, high: float, sign: str = "") -> str:
    return f"[{low:{sign}.3f}, {high:{sign}.3f}]"


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown, and an empty line."""
    return ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows)] + [""]


def mean_texts(points: pd.DataFrame) -> list[str]:
    """Mean and interval of each point, with `*` on the front."""
    numbers = points[["mean", "low", "high", "on_front"]].itertuples(index=False, name=None)
    return [f"{mean:.3f} {interval(low, high)}{' *' if star else ''}" for mean, low, high, star in numbers]


def tables_of_methods(points: pd.DataFrame, metric: str) -> list[str]:
    """Evictions and combinations by target, then formats without eviction at their own bits."""
    rows = []
    for (kind, method), some in points.groupby(["kind", "method"], sort=False):
        if kind in ("eviction", "both"):
            at = ["".join(mean_texts(some[near(some["bits"], target)])) for target in TARGETS]
            rows.append([kind, f"`{method}`", *at])
    lines = table(["kind", f"{metric} of", *(f"{target} bits" for target in TARGETS)], rows) if rows else []
    formats = points[points["kind"] == "quantisation"].sort_values("bits", kind="stable")
    texts = zip(formats["method"], formats["bits"], mean_texts(formats), strict=True)
    return lines + table(["format alone", "bits per number", metric],
                         [[f"`{name}`", f"{bits:.2f}", text] for name, bits, text in texts])  # fmt: skip


def table_of_comparisons(lines: pd.DataFrame) -> list[str]:
    by_metric = {metric: lines[lines["name"] == metric].set_index("budget") for metric in METRICS}
    rows = []
    for budget in lines["budget"].drop_duplicates():
        texts = []
        for one in (by_metric[metric].loc[budget] for metric in METRICS):
            between = interval(one["difference_low"], one["difference_high"], "+")
            texts.append(f"{one['difference']:+.3f} {between} {verdict(one)}")
        rows.append([*budget.split(": ", 1), *texts])
    titles = ["compared", "first, second (bits per number)", *(f"{metric}, first minus second" for metric in METRICS)]
    return table(titles, rows)


def answered(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of prompts that the full cache answers; without generated text, none."""
    if ANSWERS not in cells:
        return cells.iloc[:0]
    return cells[cells["prompt"].isin(cells["prompt"][(cells["label"] == "full") & (cells[ANSWERS] == 1)])]


def draw(cells: pd.DataFrame, metric: str) -> Figure:
    """A panel for each kind of methods; formats alone, as squares, and the Pareto front are in all."""
    points = points_of(cells, metric)
    points = points[points["mean"] > 0]  # the others have no place on a logarithmic axis
    panels = {name: kind for name, kind in PANELS.items() if (points["kind"] == kind).any()}
    front = points[points["on_front"]].sort_values("bits")
    formats = points[points["kind"] == "quantisation"]
    low, high = points["mean"].min() / 1.5, points["mean"].max() * 1.5
    with settings():
        sheet = Sheet(
            len(panels), (2.3, HEIGHT), min(2, len(panels)), left=0.75, right=2.0, gap=(2.7, 0.7), above=0.3,
            title=f"{metric} at equal bytes",
            subtitle="squares: formats alone; grey steps: Pareto front, controls excluded",
            caption=f"{cells['model'].iloc[0]}. Means over {cells['prompt'].nunique()} prompts, 95 % intervals "
                    "over prompts; one that includes 0 has no lower end on this axis.",
        )  # fmt: skip
        for axis, (heading, kind) in zip(sheet.axes, panels.items(), strict=True):
            axis.set(xscale="log", yscale="log", xlim=(1.8, 14), ylim=(low, high), ylabel=metric,
                     xlabel="bits per number (full cache: 16)")  # fmt: skip
            logarithmic_axis(axis, "x")
            logarithmic_axis(axis, "y")
            axis.set_title(heading, loc="left", weight="bold")
            quiet_frame(axis)
            axis.step(front["bits"], front["mean"], where="post", color=FRONT, linewidth=3, zorder=1)
            axis.vlines(formats["bits"], formats["low"], formats["high"], color="black", linewidth=0.8)
            axis.plot(formats["bits"], formats["mean"], "s", color="black", markersize=3, zorder=3)
            some = points[points["kind"] == kind]
            looks = looks_of_methods(list(dict.fromkeys(some["method"])))
            ends = [draw_mean(axis, some[some["method"] == one], "bits", look, one) for one, look in looks.items()]
            label_ends(axis, ends, HEIGHT)
    return sheet.figure


def looks_of_methods(methods: list[str]) -> dict[str, dict[str, object]]:
    """Colour and marker by policy; if formats are combined with it, dash and colour by format. Formats alone: black."""
    parts = {method: method.partition("+")[::2] for method in methods}
    policies = list(dict.fromkeys(policy for policy, _ in parts.values()))
    stores = list(dict.fromkeys(store for _, store in parts.values()))
    if not set(policies) & {*EVICTIONS, *FEW_EVICTIONS}:
        return dict.fromkeys(methods, {"color": "black", "marker": "s", "markersize": 3})
    looks = looks_of(policies, [one for one in policies if one in CONTROLS])
    found = {}
    for method, (policy, store) in parts.items():
        place = stores.index(store)
        is_combined = store and policy not in CONTROLS
        found[method] = (
            looks[policy] | {"linestyle": DASHES[place]} | ({"color": COLOURS[place]} if is_combined else {})
        )
    return found


def section(name: str, cells: pd.DataFrame) -> list[str]:
    """The tables of a part of the study."""
    tokens, prompts, kinds = cells["tokens"], cells["prompt"].nunique(), cells["kind"].nunique()
    model = cells["model"].iloc[0]
    lines = [f"{model}, {prompts} prompts of {kinds} kinds, {tokens.min()} to {tokens.max()} tokens:", ""]
    for metric in METRICS:
        lines += tables_of_methods(points_of(cells, metric), metric)
    found = compared(cells)
    lines += [*table_of_comparisons(found), f"{found['p'].notna().sum()} tests.", ""]
    if len(some := answered(cells)):
        lines += [
            f"Share of answers in the text, on the {some['prompt'].nunique()} prompts that the full cache answers:",
            "",
        ]
        lines += tables_of_methods(points_of(some, ANSWERS), ANSWERS)
    return lines


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="update docs/equal-bytes.md and its figures")
    asked = options.parse_args(argv)
    for name in PARTS:
        if not file_of(name).exists():
            continue
        cells = measured(name)
        lines = section(name, cells)
        print("\n".join(lines))
        if asked.write:
            begin, end = f"<!-- docs/equal_bytes.py {name} -->\n", "<!-- end -->"
            before, _, rest = PAGE.read_text("utf-8").partition(begin)
            PAGE.write_text(before + begin + "\n".join(lines) + end + rest.partition(end)[2], "utf-8")
            for metric in METRICS:
                save(draw(cells, metric), PAGE.parent / "figures" / f"{name}-{metric.partition(':')[0]}.png")


if __name__ == "__main__":
    main()
