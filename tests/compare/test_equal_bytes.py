"""Has docs/equal-bytes.md the tables of its script, and do these compare methods at equal bytes?"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("pyarrow", reason="the file of the study needs tools/setup build python")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "notebooks")]

import equal_bytes  # noqa: E402
import study  # noqa: E402

FULL = 1600.0  # bytes
# Label, budget, bytes, kld of the first prompt.
CELLS = (
    ("full", "0.5", FULL, 0.0),
    ("full:store=q4_0,residual=0,skip_layers=none,hadamard=false", "0.5", 450.0, 0.2),
    ("full:store=q4_0,residual=0,skip_layers=none,hadamard=true", "0.5", 450.0, 0.1),
    ("full:store=kv,residual=0,keys=q8_0,values=q4_0", "0.5", 650.0, 0.15),
    ("full:store=turboquant,residual=0,hadamard=false,bits=3,form=product,seed=0", "0.5", 350.0, 0.9),
    ("chunkkv", "0.1875", 300.0, 0.5),
    ("chunkkv", "0.375", 600.0, 0.3),
    ("chunkkv:store=q4_0,residual=0,skip_layers=none,hadamard=false", "0.6667", 300.2, 0.4),
    ("random:store=q4_0,residual=0,skip_layers=none,hadamard=false", "0.6667", 300.2, 0.05),
)


def cells_of(prompts: int) -> pd.DataFrame:
    """Every cell on each prompt; the numbers of a prompt differ from the first one's by a factor."""
    rows = [
        {"prompt": f"p-{i}", "kind": "p", "tokens": 100 * (1 + i % 3), "label": label, "budget": budget,
         "kv_bytes": size * (1 + i % 3), "kld": kld * (1 + 0.1 * i), "output_error:pooled": kld}
        for i in range(prompts) for label, budget, size, kld in CELLS
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.setattr(study, "DATA", tmp_path)
    study.write(study.file_of("equal-bytes"), cells_of(12), {"offline": ["output_error:pooled"], "live": ["kld"]})
    return equal_bytes.measured("equal-bytes")


def test_methods_have_short_names_and_bits_of_the_full_cache(measured: pd.DataFrame) -> None:
    found = dict(measured[["method", "bits"]].drop_duplicates("method").to_numpy())
    assert found == {"full": 16, "q4_0": 4.5, "q4_0(hadamard)": 4.5, "kv(q8_0,q4_0)": 6.5, "chunkkv": 3,
                     "turboquant(bits=3,product)": 3.5, "chunkkv+q4_0": 3.002, "random+q4_0": 3.002}  # fmt: skip


def test_the_front_has_neither_controls_nor_methods_that_another_beats(measured: pd.DataFrame) -> None:
    points = equal_bytes.points_of(measured, "kld")
    front = points[points["on_front"]]
    found = dict(zip(front["method"], front["bits"], strict=True))
    assert found == pytest.approx({"chunkkv+q4_0": 3.002, "q4_0(hadamard)": 4.5})
    means = points.set_index(["method", "budget"])["mean"]
    assert means["chunkkv", "0.375"] == pytest.approx(0.3 * np.mean(1 + 0.1 * np.arange(12)))


def test_comparisons_are_paired_by_prompt_and_resolved_with_twelve_prompts_alone(measured: pd.DataFrame) -> None:
    lines = equal_bytes.compared(measured)
    kld = lines[lines["name"] == "kld"].set_index("budget")
    factor = np.mean(1 + 0.1 * np.arange(12))
    for words, difference, verdict in (
        ("both, and eviction alone: `chunkkv+q4_0` at 3, `chunkkv` at 3", -0.1, "lower"),
        ("a format, and eviction alone: `q4_0` at 4.5, `chunkkv` at 6", -0.1, "lower"),
        ("two formats: `q4_0(hadamard)` at 4.5, `q4_0` at 4.5", -0.1, "lower"),
        ("matched control: `chunkkv+q4_0` at 3, `random+q4_0` at 3", 0.35, "higher"),
    ):
        assert kld.loc[words, "difference"] == pytest.approx(difference * factor, abs=1e-6)
        assert equal_bytes.verdict(kld.loc[words]) == verdict
    few = equal_bytes.compared(measured[measured["prompt"].isin(["p-0", "p-1", "p-2", "p-3"])])
    assert {equal_bytes.verdict(line) for _, line in few.iterrows()} == {"not resolved"}


def test_a_figure_is_drawn_of_each_metric(measured: pd.DataFrame) -> None:
    for metric in equal_bytes.METRICS:
        figure = equal_bytes.draw(measured, metric)
        assert [axes.get_title(loc="left") for axes in figure.axes] == list(equal_bytes.PANELS)
        names = {text.get_text() for text in figure.axes[1].texts}
        assert names >= {"q4_0", "q4_0(hadamard)", "kv(q8_0,q4_0)"}


def test_the_page_has_the_tables_of_the_stored_numbers() -> None:
    page = (ROOT / "docs/equal-bytes.md").read_text("utf-8")
    shown = dict(re.findall(r"<!-- docs/equal_bytes.py (\S+) -->\n(.*?)<!-- end -->", page, re.DOTALL))
    assert set(shown) == {name for name in equal_bytes.PARTS if study.file_of(name).exists()} >= {"equal-bytes"}
    for name, text in shown.items():
        assert text == "\n".join(equal_bytes.section(name, equal_bytes.measured(name)))
