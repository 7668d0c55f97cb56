"""Does the page work in a browser: right shades, all controls, no error, nothing loaded, no text of a run executed?"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import h5py
import numpy as np
import pandas as pd
import pytest
from make_run import CHUNKKV, H2O, SNAPKV, make_run
from make_special import HOSTILE, write_hostile, write_largest, write_live
from PIL import Image
from run_pages import cell_of, kept_by, opened, write_report

from kvreplay.compare.comparison import Comparison
from kvreplay.plot.command import main as plot
from kvreplay.results import Run

SHADES = 16
LONG = "window=32,kernel=5,pool=avg,heads=query"  # parameters
TRACE = "smollm2-135m-needle"


@pytest.fixture
def look(chromium) -> Iterator[object]:
    """Opens a page file in a window; in the end nothing may have been loaded and no error said."""
    contexts, requests, said = [], [], []

    def opened(page: Path, width: int = 1280, **options: object) -> object:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        window = context.new_page()
        window.on("request", lambda request: requests.append(request.url))
        window.on("console", lambda message: said.append(message.text))
        window.on("pageerror", lambda error: said.append(str(error)))
        window.goto(page.as_uri())
        window.wait_for_selector("html[data-ready]")
        contexts.append(page.as_uri())
        return window

    yield opened
    for context in contexts[::2]:
        context.close()
    assert said == []
    assert requests == contexts[1::2]


@pytest.fixture(scope="module")
def page(real) -> Path:
    return write_report(real[0])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return write_report(write_largest(tmp_path_factory.mktemp("browser") / "large", policies=2))


def shades(window, pane: int = 0) -> np.ndarray:
    """The shade of every token that is compressed."""
    names = window.evaluate(
        f"[...document.querySelectorAll('.prose')][{pane}].querySelectorAll('[role=option]:not(.after)')"
        ".values().map((one) => one.className).toArray()"
    )
    return np.array([int((re.search(r"\bk(\d+)", name) or [0, 0])[1]) for name in names])


def choose(window, **values: object) -> None:
    for name, value in values.items():
        window.select_option(f"#{name.replace('_', '-')}", str(value))
    window.wait_for_timeout(30)


def test_spans_are_outlined_and_named(page, real, look):
    window = look(page)
    choose(window, second="")
    spans = opened(real[0])[f"traces/{TRACE}/spans"][()]
    legend = window.inner_text("#legend")
    for name, kind, begin, end in spans:
        assert name.decode() in legend
        classes = f".prose .outer-{kind.decode()}, .prose .inner-{kind.decode()}"
        outlined = window.eval_on_selector_all(
            classes, "all => all.filter((one) => getComputedStyle(one).boxShadow !== 'none').map((one) => one.place)"
        )
        assert outlined == ([] if kind == b"context" else list(range(begin, end)))
    assert "needle, answer" in token_said(window, spans[spans["kind"] == b"answer"]["begin"][0])


def token_said(window, token: int) -> str:
    """What the page says of a token that is pointed at."""
    window.hover(f"#token-0-{token}")
    return window.inner_text("#token")


@pytest.mark.parametrize("policy, label, heads", [
    ("snapkv", "snapkv:heads=kv", "kv"), ("snapkv", "snapkv:heads=query", "query"), ("chunkkv", "chunkkv", "layer"),
    ("h2o-online", "h2o-online", "kv"),
])  # fmt: skip
def test_shades_are_the_sets_of_the_run(policy, label, heads, page, real, look):
    window = look(page)
    choose(window, first=label)
    for budget in ("0.1", "160"):
        choose(window, budget=budget)
        kept = kept_by(real[0], policy, heads, budget)
        share = kept.mean(axis=(0, 1))
        views = [(-1, -1, share), (7, -1, kept[7].mean(axis=0))]
        # The head that is chosen is one of nine query heads, of which three share a KV head.
        views += [(layer, head, kept[np.arange(30) if layer < 0 else [layer], head * kept.shape[1] // 9].mean(axis=0))
                  for layer, head in ((-1, 1), (29, 6))]  # fmt: skip
        for layer, head, share in views:
            choose(window, layer=layer, head=head)
            wanted = np.where(share > 0, np.maximum(1, np.floor(SHADES * np.sqrt(share) + 0.5)), 0)
            np.testing.assert_array_equal(shades(window), wanted)
            assert len(set(wanted)) > 1


def test_two_policies_stand_side_by_side_with_differences_marked(page, real, look):
    window = look(page)
    choose(window, first="snapkv:heads=kv", second="chunkkv", layer=12)
    a = kept_by(real[0], "snapkv", "kv", "0.1")[12].mean(axis=0)
    b = kept_by(real[0], "chunkkv", "layer", "0.1")[12].mean(axis=0)
    for pane, more in enumerate((a - b >= 0.25, b - a >= 0.25)):
        marked = window.evaluate(
            f"[...document.querySelectorAll('.prose')[{pane}].querySelectorAll('.more')].map((one) => one.place)"
        )
        assert marked == np.flatnonzero(more).tolist() and marked
        assert f"{len(marked)}" in window.text_content("#difference")
    assert window.evaluate("getComputedStyle(document.querySelector('.more')).textDecorationLine") == "underline"
    boxes = [pane.bounding_box() for pane in window.query_selector_all(".pane")]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert (
        window.text_content(".token h3").startswith("No token") is False if window.query_selector(".token h3") else True
    )


def test_a_token_tells_who_kept_it_its_rank_and_its_later_attention(page, real, look):
    window = look(page)
    choose(window, first="snapkv:heads=kv", layer=12)
    kept = kept_by(real[0], "snapkv", "kv", "0.1")
    file = opened(real[0])
    token = int(np.argmax((kept[12].sum(axis=0) == 2) & (np.arange(480) < 400)))
    assert kept[12, :, token].sum() == 2
    said = token_said(window, token)
    texts = file[f"traces/{TRACE}/tokens/text"][()].decode()
    begin, end = file[f"traces/{TRACE}/tokens/offsets"][token]
    assert f"Token {token}" in said and texts[begin:end].strip() in said
    assert "2 of 3 sets" in said
    scores = cell_of(real[0], "snapkv", "kv", "0.1")["scores"][12]
    rank = np.mean([np.sum((row > row[token]) | ((row == row[token]) & (np.arange(480) < token))) for row in scores])
    shown = float(re.search(r"top ([\d.]+)\s%", said)[1])
    assert shown == pytest.approx(100 * rank / 480, abs=0.8)
    attention = float(re.search(r"\nattention\s+([\d.]+)", said)[1])
    assert attention == pytest.approx(file[f"traces/{TRACE}/eval_attention"][12, token], rel=0.035)
    bars = dict(re.findall(r"^(\S+)\n(\d+/\d+)$", said, re.MULTILINE))
    assert bars["snapkv:heads=kv"] == "2/3"
    query = kept_by(real[0], "snapkv", "query", "0.1")[12, :, token].sum()
    assert bars["snapkv:heads=query"] == f"{query}/9" and bars["kivi"] == "3/3" and bars["(full)"] == "3/3"
    window.hover("h1")
    window.click(f"#token-0-{token}")
    window.hover("#token-0-3")
    assert f"Token {token}" in window.inner_text("#token")
    window.keyboard.press("Escape")


def test_the_table_sorts_and_marks_the_best(page, real, look):
    window = look(page)

    def column(title: str, group: str = "") -> list[str]:
        titles = window.eval_on_selector_all("#headline thead th", "all => all.map((one) => one.innerText)")
        at = [one.split()[0] for one in titles].index(title)
        bodies = f"#headline tbody:has(.group:has-text('{group}'))" if group else "#headline tbody"
        cells = window.locator(f"{bodies} tr[data-label] > :nth-child({at + 1})")
        return [text.strip() for text in cells.all_inner_texts()]

    results = pd.read_csv(real[0] / "results.csv", keep_default_na=False, dtype=str)
    rows = results[(results["layer"] == "all") & (results["metric"] == "attention_recall") & (results["variant"] == "")
                   & (results["head"] == "all") & (results["budget"] == "0.1")
                   & (results["policy"] != "random-twin")]  # fmt: skip
    # Three groups, of which none is compared with another: at equal memory, budget-free, controls.
    budget_free = rows["policy"].isin(["kivi", "sca"])
    groups = [rows[(rows["role"] == "asked") & ~budget_free], rows[budget_free], rows[rows["role"] == "control"]]
    wanted = [sorted((f"{float(value):.3f}" for value in one["value"]), reverse=True) for one in groups]
    assert column("recall") != sum(wanted, [])
    for expected, order in ((wanted, "descending"), ([one[::-1] for one in wanted], "ascending")):
        window.click("#headline thead button:has-text('recall')")
        assert [value.strip("*\xa0") for value in column("recall")] == sum(expected, [])
        assert window.get_attribute("#headline th:has(button:has-text('recall'))", "aria-sort") == order
    best = [value for value in column("recall") if value.endswith("*")]
    compared = rows[(rows["role"] == "asked") & ~rows["policy"].isin(["kivi", "sca"])]
    assert best == [f"{compared['value'].astype(float).max():.3f}*"]
    assert column("skill").count("-") == 6 and window.inner_text("#skill").startswith(
        "skill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = random, 1 = best"
    )
    assert set(column("policy", "controls")) == {"(full)", "(random)", "(oracle)"}
    assert [one.partition(":")[0] for one in column("policy", "not at equal memory")] == ["sca", "kivi"]  # ascending
    window.click("#headline thead button:has-text('recall')")
    assert column("policy", "chunks") == ["chunkkv"] and column("policy", "controls")[0] == "(full)"
    assert column("policy", "attention") == ["snapkv:heads=kv", "snapkv:heads=query", "h2o-online"]
    assert "OPEN LOOP" in window.inner_text("header")


def test_curves_layers_and_similarity_follow_their_controls(page, real, look):
    window = look(page)
    for kind in ("curve", "layer"):
        before = window.inner_html(f"#{kind}-chart svg[role]")
        choose(window, **{f"{kind}_metric": "att.cos"})
        assert window.inner_html(f"#{kind}-chart svg[role]") != before
        assert window.locator(f"#{kind}-chart g.series").count() == 9
        assert window.locator(f"#{kind}-chart g.series polyline").count() == 9
    window.click("#curve-chart button:has-text('kivi')")
    assert window.locator("#curve-chart g.series").count() == 8
    assert window.get_attribute("#curve-chart button:has-text('kivi')", "aria-pressed") == "false"
    choose(window, variant="union")
    canvas = window.locator("canvas[aria-label^=chunkkv]")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    window.mouse.move(box["x"] + box["width"] * 7.5 / 30, box["y"] + box["height"] * 3.5 / 30)
    wanted = cell_of(real[0], "chunkkv", "layer", "0.1")["jaccard_union"][3, 7]
    assert window.text_content("#pair") == f"chunkkv: layers 3 and 7 share {wanted:.3f}"
    assert "kivi" in window.text_content("#unlike") and window.locator("canvas[aria-label^=kivi]").count() == 0


def test_a_curve_has_units_and_says_whom_no_budget_binds(page, real, look):
    window = look(page)
    titles = window.evaluate("page.columns.map((column) => column.title)")
    written = "page.traces[0].budgets.flatMap((b) => b.cells.map((one) => [one.label, one.values[AT][1]]))"
    seconds = pd.read_csv(real[0] / "seconds.csv", keep_default_na=False)
    for title, unit in (("kept", "tokens"), ("recall", ""), ("select", "(s|ms|us)")):
        choose(window, curve_metric=title)
        axis = window.inner_text("#curve-chart .axis")
        assert re.search(rf" \({unit}\)$", axis) if unit else not axis.endswith(")")
        at = window.evaluate(f"page.traces[0].columns.indexOf({titles.index(title)})")
        cells = window.evaluate(written.replace("AT", str(at)))
        told = window.eval_on_selector_all("#curve-chart .series title", "all => all.map((one) => one.textContent)")
        assert sorted((one.split(": budget")[0], one.rpartition(", ")[2]) for one in told) == sorted(map(tuple, cells))
    marks = "#curve-chart svg[role] text[text-anchor=end]"
    ticks = window.eval_on_selector_all(marks, "all => all.map((one) => one.textContent)")
    chosen = seconds[(seconds["metric"] == "select_seconds") & (seconds["variant"] == "")]
    most = chosen.groupby("cell")["value"].sum().max()
    factor = {"s": 1, "ms": 1e3, "us": 1e6}[re.search(r" \((\w+)\)$", axis)[1]]
    assert 1 <= most * factor < 1000 and 0.4 * most * factor <= max(map(float, ticks)) <= 1.06 * most * factor
    for chart in ("curve-chart", "layer-chart"):
        if chart == "layer-chart":
            choose(window, layer_metric="recall")
        said = window.inner_text(f"#{chart} .free")
        assert said == "Dash and two dots: not at equal memory: kivi, sca, (full)."
        lines = f"#{chart} button:has([stroke-dasharray='2 3 9 3 2 3'])"
        dashed = window.eval_on_selector_all(lines, "all => all.map((one) => one.dataset.label)")
        assert sorted(dashed) == ["full", "kivi", "sca"]
    choose(window, layer_metric="kept")
    assert window.locator("#layer-chart .free").count() == 0


def test_the_pareto_front_of_memory_is_that_of_plot_tradeoff(page, real, look, tmp_path):
    """Rings of the page, and the points of the figure that are on the front, by policy and bytes."""
    window = look(page)
    for title, metric in (("recall", "attention_recall"), ("out.err", "output_error:pooled")):
        choose(window, tradeoff_metric=title)
        data = tmp_path / "points.csv"
        words = ["tradeoff", str(real[0]), "--metric", metric, "-o", str(tmp_path / "a.svg"), "--data", str(data)]
        assert plot([*words, "-q"]) == 0
        points = pd.read_csv(data)
        wanted = points[points["on_front"]]["policy"].value_counts()
        for label in window.evaluate("page.policies.map((policy) => policy.label)"):
            series = f"#tradeoff-chart g.series[data-label='{label}']"
            assert window.locator(f"{series} path.ring").count() == wanted.get(label, 0), (title, label)
        said = window.eval_on_selector_all("#tradeoff-chart .series title", "all => all.map((one) => one.textContent)")
        size = points[(points["policy"] == "h2o-online") & (points["budget"].astype(str) == "0.1")]["kv_bytes"].item()
        assert any(one.startswith(f"h2o-online: {size / 2**20:.3g} MiB, budget 0.1, ") for one in said), said
        corners = len(window.get_attribute("#tradeoff-chart .front", "points").split(" "))
        assert corners == 2 * len(points[points["on_front"]]) - 1
    names = window.eval_on_selector_all(
        "#tradeoff-chart svg[role] text[text-anchor=middle]", "all => all.map((one) => one.textContent)"
    )
    assert "bits per number (full cache: 16)" in names


def test_every_control_is_reached_by_keyboard_and_arrows_walk_the_text(page, look):
    window = look(page)
    choose(window, second="")
    window.focus("body")
    wanted = window.eval_on_selector_all(
        "select, [role=listbox], #theme, thead button", "all => all.filter((one) => one.checkVisibility()).length"
    )
    seen = set()
    for _ in range(160):
        window.keyboard.press("Tab")
        focused = window.evaluate(
            "(() => { const at = document.activeElement; at.dataset.seen = 1; return [at.tagName, "
            "getComputedStyle(at).outlineStyle, at.matches('select, [role=listbox], #theme, thead button')]; })()"
        )
        assert focused[0] == "BODY" or focused[1] != "none", focused
        seen.add(focused[0])
    assert window.locator(":is(select, [role=listbox], #theme, thead button)[data-seen]").count() == wanted > 20
    window.focus("[role=listbox]")

    def at() -> int:
        return int(window.get_attribute("[role=listbox]", "aria-activedescendant").split("-")[2])

    assert at() == 265  # the answer, with which the page opens
    window.keyboard.press("Home")
    for key, place in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 511),
        ("Home", 0),
        ("PageDown", 100),
    ):
        window.keyboard.press(key)
        assert at() == place and f"Token {place}" in window.inner_text("#token")
    # Of the tokens that begin on the next line the one nearest across.
    nearest = """(way) => {
      const boxes = [...document.querySelectorAll(".prose > span")].map((one) => one.getClientRects()[0]);
      const here = boxes[40], lines = [...new Set(boxes.map((box) => Math.round(box.top / 4)))];
      const line = lines[lines.indexOf(Math.round(here.top / 4)) + way];
      const across = boxes.map((box) => (Math.round(box.top / 4) === line ? Math.abs(box.left - here.left) : Infinity));
      return across.indexOf(Math.min(...across));
    }"""
    window.click("#token-0-40")
    for key, way in (("ArrowDown", 1), ("ArrowUp", -1)):
        window.click("#token-0-40")
        wanted = window.evaluate(nearest, way)
        window.keyboard.press(key)
        assert at() == wanted != 40
    assert window.locator("[aria-selected=true]").count() == 1
    assert window.evaluate("getComputedStyle(document.querySelector('[aria-selected=true]')).outlineStyle") == "solid"
    window.keyboard.press("Escape")
    assert "selected" not in window.inner_text("#token")
    window.keyboard.press("Enter")
    assert "selected" in window.inner_text("#token")
    names = window.eval_on_selector_all(
        "select, [role=listbox], canvas, svg[role], button, aside",
        "all => all.filter((one) => !(one.getAttribute('aria-label') || one.innerText || one.closest('label'))).length",
    )
    assert names == 0


CONTRAST = """
() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const light = (...colours) => {  // of translucent colours from the ground up
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = (one) => one ? [...grounds(one.parentElement), getComputedStyle(one).backgroundColor] : [];
  document.querySelectorAll(".prose > span").forEach((one, i) => i < 17 && (one.className = `k${i}`));
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node; (node = walker.nextNode()); ) {
    const one = node.parentElement;
    if (!node.data.trim() || !one.checkVisibility() || one.closest("script")) continue;
    const style = getComputedStyle(one), drawn = one.namespaceURI.endsWith("svg");
    const [a, b] = [light(drawn ? style.fill : style.color), light(...grounds(one))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), one.className.baseVal ?? one.className, node.data]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(scheme, page, look):
    window = look(page, color_scheme=scheme)
    window.hover("#token-0-40")
    found = window.evaluate(CONTRAST)
    assert len(found) > 700 and {f"k{i}" for i in range(17)} <= {one[1] for one in found}
    assert found[0][0] >= 4.5, found[:5]


def test_light_and_dark_follow_the_system_and_the_button(page, look):
    def ground(window) -> int:
        return sum(
            map(int, re.findall(r"\d+", window.evaluate("getComputedStyle(document.documentElement).backgroundColor")))
        )

    light, dark = look(page, color_scheme="light"), look(page, color_scheme="dark")
    assert ground(light) > 600 and ground(dark) < 150
    for window, pressed in ((light, "true"), (dark, "false")):
        before = ground(window)
        window.click("#theme")
        assert (ground(window) > 400) != (before > 400) and window.get_attribute("#theme", "aria-pressed") == pressed


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(width, page, look):
    window = look(page, width=width)
    choose(window, second="chunkkv")
    assert window.evaluate("document.documentElement.scrollWidth") <= width
    small = window.eval_on_selector_all(
        "p, td, th, dd, .prose, button, select, figcaption, li",
        "all => all.filter((one) => one.checkVisibility() && parseFloat(getComputedStyle(one).fontSize) < 12).length",
    )
    assert small == 0


@pytest.mark.parametrize("width", [400, 1200])
def test_the_token_panel_and_the_budget_are_shown_whole(width, tmp_path, look):
    run = make_run(tmp_path / "run", [SNAPKV, CHUNKKV, replace(SNAPKV, params=LONG)], budgets=["0.1"])
    window = look(write_report(run), width=width)
    window.hover("#token-0-40")
    cut = """all => all.filter((one) => (getComputedStyle(one).display !== "inline"
      && one.scrollWidth > one.clientWidth + 1) || one.getBoundingClientRect().right > innerWidth)
      .map((one) => one.outerHTML)"""
    assert window.locator("#token .name").count() == 6
    assert window.eval_on_selector_all("#token, #token *", cut) == []
    assert window.evaluate("document.getElementById('budget').offsetWidth") > 120


def test_a_narrow_page_has_room_for_two_panes_and_the_token(page, look):
    window = look(page, width=390)
    choose(window, second="chunkkv")
    window.click("#token-0-40")
    heights = "['nav', '#panes', '#token'].map((name) => document.querySelector(name).offsetHeight)"
    bar, *rest = window.evaluate(heights)
    assert bar <= 100 and bar + sum(rest) < window.viewport_size["height"]
    assert window.evaluate("(({scrollHeight, clientHeight}) => scrollHeight - clientHeight)($('token'))") == 0


def test_the_table_with_live_numbers_fits_1200_pixels(real, look, tmp_path):
    run = write_live(Path(shutil.copytree(real[0], tmp_path / "run")))
    kld = pd.read_csv(run / "live.csv", dtype=str, keep_default_na=False)
    names = ("kld", "same_top_p", "nll_increase", "contains")
    pd.concat(kld.assign(metric=name) for name in names).to_csv(run / "live.csv", index=False)
    window = look(write_report(run), width=1200)
    titles = window.eval_on_selector_all("#headline thead button", "all => all.map((one) => one.dataset.title)")
    assert "live.answer" in titles and len(titles) == 20
    assert window.evaluate("(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)($('headline').parentNode)") <= 0


def test_motion_is_only_for_those_who_want_it(page, look):
    still, moving = look(page, reduced_motion="reduce"), look(page, reduced_motion="no-preference")
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    assert (still.evaluate(behaviour), moving.evaluate(behaviour)) == ("auto", "smooth")


def test_four_thousand_tokens_are_shaded_anew_in_place(large, look):
    """No element is made again, which would take longer than a tenth of a second."""
    window = look(large)
    before = shades(window)
    assert len(before) == 4000
    assert window.evaluate("""() => {
        const tokens = () => [...document.querySelectorAll(".prose [role=option]")];
        const first = tokens();
        document.getElementById("layer").value = "3";
        document.getElementById("layer").dispatchEvent(new Event("change"));
        return first.length === tokens().length && first.every((one) => one.isConnected);
      }""")
    assert (shades(window) != before).any()


def test_generated_texts_have_a_link_and_visible_line_feeds(large, look):
    window = look(large)
    link = window.locator("a[href='#writing']")
    assert link.is_hidden()
    window.evaluate("""() => {
        const trace = page.traces[0], budget = trace.budgets[0];
        trace.written = "a\\n\\n\\nb";
        for (const cell of budget.cells) cell.written = "a\\n\\n\\nc";
        drawWriting(trace, budget);
      }""")
    assert link.is_visible()
    assert window.locator("#written dd").all_text_contents()[:2] == ["a↵↵↵\nb", "a↵↵↵\nc"]
    window.evaluate("""() => {
        page.traces[0].written = "";
        for (const cell of page.traces[0].budgets[0].cells) cell.written = "";
        drawWriting(page.traces[0], page.traces[0].budgets[0]);
      }""")
    ended = window.locator("#written dd").all_text_contents()[:2]
    assert ended == ["(nothing: the model ended its answer at once)"] * 2
    window.evaluate("for (const cell of page.traces[0].budgets[0].cells) cell.written = 'a\\n\\n\\nc'")
    window.evaluate("page.traces[0].written = null; chooseBudget()")
    window.wait_for_function("document.querySelector('#written dd').innerText.startsWith('not generated')")
    assert (
        window.locator("#written dd").all_text_contents()[1] == "a↵↵↵\nc"
        and not window.locator("#written mark").count()
    )


def test_a_hostile_prompt_runs_nothing(tmp_path, look):
    window = look(write_report(write_hostile(tmp_path / "hostile")))
    assert window.evaluate("typeof window.hacked") == "undefined"
    assert window.evaluate("[...document.scripts].length") == 2
    elements = "img, iframe, svg[onload], [onclick], [onerror], b:not(p b, figcaption b), object, embed, link"
    assert window.locator(elements).count() == 0
    shown = window.text_content(".prose")
    assert shown.startswith("</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2> {{script}} ")
    assert "&lt;b&gt;" in shown and "\u202e" not in shown and "caf\u00e9 \U0001f600 end" in shown
    for name in ("second", "variant", "shade", "head", "layer", "budget"):
        for option in window.eval_on_selector_all(f"#{name} option", "all => all.slice(0, 3).map((one) => one.value)"):
            choose(window, **{name: option})
    for i in range(0, 60, 7):
        window.hover(f"#token-0-{i}")
    assert window.evaluate("typeof window.hacked") == "undefined"
    assert "\u202e" not in window.inner_text("body")
    assert HOSTILE.split("\n")[0][:30] in window.text_content("#provenance")
    assert HOSTILE[:30] in window.text_content("#headline")


def test_even_a_script_that_got_in_could_not_run_or_call_home(page, chromium):
    refused, said = [], []
    window = chromium.new_page()
    window.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
    window.on("console", lambda message: said.append(message.text))
    window.goto(page.as_uri())
    window.wait_for_selector("html[data-ready]")
    window.evaluate("""async () => {
      document.body.append(Object.assign(document.createElement("script"), { textContent: "window.hacked = 1" }));
      document.body.insertAdjacentHTML("beforeend", "<img src=http://127.0.0.1:9/x onerror='window.hacked = 2'>");
      await fetch("http://127.0.0.1:9/y").catch(() => {});
      await new Promise((done) => setTimeout(done, 100));
    }""")
    assert window.evaluate("typeof window.hacked") == "undefined"
    assert sum("Content Security Policy" in line for line in said) >= 3
    assert refused == [("http://127.0.0.1:9/x", "csp")]
    window.close()


def test_a_page_without_text_shows_positions(real, look):
    window = look(write_report(real[0], "--no-text"))
    assert window.inner_text("#token-0-123").strip() == "123"
    choose(window, first="chunkkv", layer=3)
    np.testing.assert_array_equal(shades(window), 16 * kept_by(real[0], "chunkkv", "layer", "0.1")[3, 0])
    assert "Token 7" in token_said(window, 7)


def test_traces_can_be_switched(tmp_path, look):
    traces = [("short", 200, 0.4), ("long", 480, 0.4)]
    run = make_run(tmp_path / "many", [SNAPKV, H2O, CHUNKKV], traces=traces, budgets=["0.1", "0.5"])
    for name, _, _ in traces:
        with h5py.File(run / f"cells/{name}.h5", "r+") as file:
            del file[f"traces/{name}/eval_attention"]
    window = look(write_report(run, "--trace", "short", "--trace", "long"))
    assert window.locator("[role=option]").count() == 2 * (480 + 32)  # two policies
    choose(window, trace="short", budget="0.5")
    assert window.locator("[role=option]").count() == 2 * (200 + 32)
    assert "short" in window.text_content("#line") and "100 tokens" in window.text_content("#budget-line")
    assert window.text_content("#shade") == "share of sets"  # no scores, no later attention in this run


def test_nothing_of_another_trace_stays_where_a_trace_has_no_budget(tmp_path, look):
    run = make_run(tmp_path / "run", [SNAPKV], traces=[("a", 200, 0.4), ("b", 480, 0.4)], budgets=["0.1"])
    page = write_report(run, "--trace", "a", "--trace", "b")
    before, mark, rest = page.read_text().partition('<script type="application/json" id="data">')
    data, end, after = rest.partition("</script>")
    content = json.loads(data)
    content["traces"][1]["budgets"] = []
    page.write_text(before + mark + json.dumps(content).replace("<", "\\u003c") + end + after)
    window = look(page)
    assert "snapkv" in window.inner_text("#headline")
    choose(window, trace="b", variant="union", layer=1)
    assert "b" in window.inner_text("#line")
    for name in ("headline", "panes", "curve-chart", "layer-chart", "heatmaps", "budget-line", "legend"):
        assert window.text_content(f"#{name}") == ""
    choose(window, trace="a")
    assert "snapkv" in window.inner_text("#headline")


def test_failed_cells_and_policies_without_sets_are_said(tmp_path, look):
    run = make_run(tmp_path / "run", [SNAPKV, H2O, CHUNKKV], budgets=["0.1"])
    with h5py.File(run / "cells/demo.h5", "a") as file:
        cells = {cell.attrs["policy"]: (name, cell) for name, cell in file["cells"].items()}
        del cells["chunkkv"][1]["offsets"]
    failed = {"trace": "demo", "cell": cells["h2o"][0], "policy": "h2o", "params": "a=1", "budget": "0.1",
              "state": "failed", "error": "scores: not a number"}  # fmt: skip
    (run / "run.json").write_text(json.dumps({"schema": "kvreplay-run/1", "cells": [failed]}))
    window = look(write_report(run))
    assert "h2o:a=1" in window.inner_text("#headline .failed") and "not a number" in window.inner_text(".failed")
    assert "1 failed cells, listed in the table" in window.inner_text("#notes").splitlines()
    choose(window, first="chunkkv")
    assert "no static set" in window.inner_text(".pane h3") and set(shades(window)) == {0}
    assert "No static set: chunkkv." in window.inner_text("#unlike")
    choose(window, first="snapkv", second="chunkkv")
    assert set(shades(window)) > {0} and window.locator(".more").count() == 0
    assert "no ranks in this run; use kvreplay replay --save scores" in window.inner_text("#legend")


def test_what_a_policy_lacks_is_said(page, look):
    window = look(page)
    choose(window, first="h2o-online", shade="rank")
    assert "--save scores" in window.inner_text(".pane h3")
    choose(window, shade="kept")
    assert "tokens resident at the end of the prompt" in window.inner_text(".pane h3")
    choose(window, first="kivi")
    assert set(shades(window)) == {16}


def first_and_second(window) -> tuple[str, str]:
    return window.input_value("#first"), window.input_value("#second")


def selected(window, views: str) -> list[str]:
    """The labels that the parts of a view mark as first."""
    return window.eval_on_selector_all(f"{views}.first", "all => [...new Set(all.map((one) => one.dataset.label))]")


def test_the_page_opens_on_two_policies_at_the_answer(page, real, look):
    window = look(page)
    assert first_and_second(window) == ("snapkv:heads=kv", "chunkkv")
    spans = opened(real[0])[f"traces/{TRACE}/spans"][()]
    [answer] = spans["begin"][spans["kind"] == b"answer"]
    assert f"Token {answer}" in window.inner_text("#token")
    frame = window.locator(".prose").first.bounding_box()
    token = window.locator(f"#token-0-{answer}").bounding_box()
    assert frame["y"] <= token["y"] <= frame["y"] + frame["height"]
    window.hover("#token-0-300")  # the opening token is not held
    assert "Token 300" in window.inner_text("#token")


def test_a_policy_selected_in_one_view_is_selected_in_all(page, look):
    window = look(page)
    window.click("#headline button:has-text('h2o-online')")
    assert first_and_second(window) == ("h2o-online", "chunkkv")
    views = ("#headline tr", "#curve-chart g.series", "#layer-chart g.series", "#heatmaps figure")
    assert [selected(window, one) for one in views] == [["h2o-online"]] * 4
    assert window.inner_text(".pane h3 >> nth=0").startswith("h2o-online")
    headings = [one.text_content() for one in window.query_selector_all("#map-chart .heading")]
    assert headings[:2] == ["h2o-online", "chunkkv"]
    assert "h2o-online" in window.inner_text("#token dl")
    window.click("#headline button:has-text('heads=query')", modifiers=["Shift"])
    assert first_and_second(window) == ("h2o-online", "snapkv:heads=query")
    window.locator("#heatmaps figure[data-label='snapkv:heads=query'] canvas").click()  # the second: they swap
    assert first_and_second(window) == ("snapkv:heads=query", "h2o-online")
    window.locator("#curve-chart g.series[data-label='chunkkv'] path").first.click()
    assert first_and_second(window) == ("chunkkv", "h2o-online")
    assert [selected(window, one) for one in views[:3]] == [["chunkkv"]] * 3
    assert window.get_attribute("#headline button:has-text('h2o-online')", "aria-pressed") == "true"


def test_the_map_shows_the_kept_sets_and_selects_token_and_layer(page, real, look):
    window = look(page)
    kept = kept_by(real[0], "snapkv", "kv", "0.1")
    for head, share in ((-1, kept.mean(axis=1)), (4, kept[:, 1])):  # query head 4 of 9 has the set of KV head 1 of 3
        choose(window, head=head)
        opacity = window.evaluate("""async () => {
          const image = new Image();
          image.src = document.querySelector("#map-chart image").getAttribute("href");
          await image.decode();
          const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
          context.drawImage(image, 0, 0);
          const { data } = context.getImageData(0, 0, image.width, image.height);
          return [image.width, image.height, Array.from(data).filter((_, i) => i % 4 === 3)];
        }""")
        assert opacity[:2] == [480, 30]
        np.testing.assert_allclose(np.reshape(opacity[2], (30, 480)), 255 * np.sqrt(share), atol=1)
    choose(window, head=-1)
    layer, token = map(int, np.argwhere(kept.sum(axis=1) == 1)[5])
    window.locator("#map-chart image").first.scroll_into_view_if_needed()
    box = window.locator("#map-chart image").first.bounding_box()
    at = (box["x"] + (token + 0.5) / 480 * box["width"], box["y"] + (layer + 0.5) / 30 * box["height"])
    window.mouse.move(*at)
    said = window.text_content("#map-place")
    assert said.startswith(f"snapkv:heads=kv, layer {layer}, token {token} ")
    assert said.endswith("1 of 3 sets")
    window.mouse.click(*at)
    assert window.input_value("#layer") == str(layer)
    assert window.inner_text("#token h3").startswith(f"Token {token}") and "selected" in window.inner_text("#token h3")
    assert window.locator("#cursor .chosen-layer").count() == 2 and window.locator("#cursor .chosen-token").count() == 3


def test_the_profile_tells_who_keeps_each_token(page, real, look):
    window = look(page)
    choose(window, first="snapkv:heads=kv", second="chunkkv", layer=12)
    a = kept_by(real[0], "snapkv", "kv", "0.1")[12].mean(axis=0) >= 0.5
    b = kept_by(real[0], "chunkkv", "layer", "0.1")[12].mean(axis=0) >= 0.5
    attention = opened(real[0])[f"traces/{TRACE}/eval_attention"][12]
    bars = attention > 1.5e-4 * attention.max()  # of four decades
    wanted = {"both": a & b, "first": a & ~b, "second": b & ~a, "neither": ~a & ~b}
    for name, tokens in wanted.items():
        drawn = (window.get_attribute(f"#map-chart path.profile.{name}", "d") or "").count("M")
        assert (tokens & bars).sum() <= drawn <= tokens.sum(), name
    assert sum(tokens.any() for tokens in wanted.values()) == 4

    def colours(kind: str) -> list[str]:
        paths = f"#map-chart path.profile.{kind}"
        return window.eval_on_selector_all(paths, "all => all.map((one) => one.getAttribute('stroke'))")

    assert colours("both") == [*colours("first"), *colours("second")], "bars of both have two parts"


def test_policies_are_filtered_by_name_and_family_in_every_view(page, look):
    window = look(page)

    def labels(view: str) -> set[str]:
        found = window.eval_on_selector_all(f"{view}[data-label]", "all => all.map((one) => one.dataset.label)")
        return {one.partition(":")[0] for one in found}

    views = ("#headline tr", "#curve-chart g.series", "#layer-chart button", "#heatmaps figure")
    everything = labels("#headline tr")
    window.fill("#policies", "chunkkv, attention")
    assert [labels(view) for view in views] == [{"chunkkv", "snapkv", "h2o-online"}] * 4
    assert window.locator("#token .bars li").count() == 4
    window.fill("#policies", "")
    assert labels("#headline tr") == everything
    window.click("#curve-chart .family button:has-text('attention')")
    assert labels("#curve-chart g.series") == everything - {"snapkv", "h2o-online"}
    window.click("#curve-chart .family button:has-text('attention')")
    assert labels("#curve-chart g.series") == everything


def test_tokens_are_filtered_by_text_and_by_policy(page, real, look):
    window = look(page)
    choose(window, first="snapkv:heads=kv", second="chunkkv", layer=12)

    def passing() -> list[int]:
        tokens = "#panes .pane:first-child [role=option]:not(.dim)"
        return window.eval_on_selector_all(tokens, "all => all.map((one) => one.place)")

    a = kept_by(real[0], "snapkv", "kv", "0.1")[12].mean(axis=0)
    b = kept_by(real[0], "chunkkv", "layer", "0.1")[12].mean(axis=0)
    for kind, wanted in (("first", a >= 0.5), ("second", b >= 0.5), ("more-first", a - b >= 0.25),
                         ("more-second", b - a >= 0.25), ("evicted", (a < 0.5) & (b < 0.5))):  # fmt: skip
        choose(window, tokens=kind)
        assert passing() == np.flatnonzero(wanted).tolist() != []
        assert window.text_content("#found") == f"{wanted.sum()} of 512 tokens"
    choose(window, tokens="")
    file = opened(real[0])[f"traces/{TRACE}/tokens"]
    text, offsets = file["text"][()].decode().lower(), file["offsets"][()]
    window.fill("#find", "Blue TEAPOT")
    places = [found.span() for found in re.finditer("blue teapot", text)]
    wanted = [
        i for i, (begin, end) in enumerate(offsets) if any(begin < last and end > first for first, last in places)
    ]
    assert passing() == wanted and len(wanted) >= 2
    window.keyboard.press("Home")
    seen = []
    for _ in range(len(wanted) + 1):
        window.click("#next")
        seen.append(int(re.match(r"Token (\d+)", window.inner_text("#token h3"))[1]))
    assert sorted(set(seen)) == wanted and seen[0] == seen[-1]
    window.focus("#find")
    window.keyboard.press("Enter")
    assert f"Token {seen[1]} " in window.inner_text("#token h3")
    choose(window, tokens="evicted")
    assert passing() == [i for i in wanted if i < 480 and a[i] < 0.5 and b[i] < 0.5]
    window.fill("#find", "in no prompt")
    assert passing() == [] and window.is_disabled("#next")


def test_buttons_jump_to_needle_question_and_answer(page, real, look):
    window = look(page)
    for _, kind, begin, _ in opened(real[0])[f"traces/{TRACE}/spans"][()]:
        button = f"#jumps button:has-text('{kind.decode()}')"
        assert window.locator(button).count() == (kind != b"context")
        if kind != b"context":
            window.click(button)
            assert window.inner_text("#token h3").startswith(f"Token {begin}")
            frame, token = (window.locator(one).first.bounding_box() for one in (".prose", f"#token-0-{begin}"))
            assert frame["y"] <= token["y"] <= frame["y"] + frame["height"]


def test_a_jump_brings_the_text_into_the_window(page, look):
    window = look(page)
    window.set_viewport_size({"width": 1200, "height": 400})
    window.evaluate("document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 0)")
    window.evaluate("document.querySelector('#jumps button').click()")
    pane = window.locator(".prose").first.bounding_box()
    assert pane["y"] < 400 and pane["y"] + pane["height"] > 0


def test_a_click_with_shift_selects_no_text_and_pointing_keeps_the_colour_of_the_chosen_row(page, look):
    window = look(page)
    window.click("#headline tr[data-label='h2o-online'] td >> nth=2")
    window.click("#headline tr[data-label='chunkkv'] td >> nth=2", modifiers=["Shift"])
    assert first_and_second(window) == ("h2o-online", "chunkkv") and window.evaluate("getSelection().toString()") == ""
    colour = "getComputedStyle(document.querySelector('#headline tr.first td')).backgroundColor"
    window.hover("h1")
    chosen = window.evaluate(colour)
    window.hover("#headline tr.first td >> nth=1")
    assert window.evaluate(colour) == chosen
    window.hover("#headline tr[data-label='kivi'] td >> nth=1")
    pointed = "getComputedStyle(document.querySelector('#headline tr[data-label=kivi] td')).backgroundColor"
    assert window.evaluate(pointed) != chosen


def test_charts_open_on_the_metric_that_ranks_the_table(page, look):
    window = look(page)
    assert {window.input_value(f"#{one}-metric") for one in ("curve", "tradeoff")} == {"out.err"}


def test_the_address_restores_the_page(page, look):
    window = look(page)
    choose(window, budget="160", first="chunkkv", second="", layer=12, head=1, shade="rank", curve_metric="att.cos",
           layer_metric="kept", variant="union", tokens="first")  # fmt: skip
    window.click("#curve-chart .series-legend [data-label=chunkkv]")  # hides its line
    window.fill("#policies", "chunk,snap")
    window.fill("#find", "the")
    window.click("#headline thead button:has-text('recall')")
    window.click("#token-0-120")
    address = window.url
    state = """() => [[...document.querySelectorAll("[data-remember]")].map((one) => one.value),
      document.getElementById("headline").innerText, document.querySelector("#token h3").innerText,
      document.querySelectorAll(".dim").length, document.querySelectorAll("#curve-chart g.series").length,
      document.querySelector("#map-chart").innerHTML.length]"""
    wanted = window.evaluate(state)
    other = look(page)
    assert other.evaluate(state) != wanted
    other.evaluate("(address) => { location.href = address; }", address)  # changes the fragment alone
    other.wait_for_timeout(300)
    assert other.evaluate(state) == wanted and other.url == address
    other.evaluate("location.hash = '#budget=no&first=no&layer=99&token=9999&shade=no'")  # names that do not exist
    other.wait_for_timeout(300)
    assert other.input_value("#first") == "chunkkv" and other.input_value("#layer") == "12"


def copied_table(window, table: str, kind: str) -> str:
    window.click(f"[data-copy={table}] button:has-text('{kind}')")
    window.wait_for_selector(f"[data-copy={table}] >> text=copied as {kind}")
    return window.evaluate("navigator.clipboard.readText()")


def test_tables_are_copied_as_markdown_latex_and_csv(page, real, look):
    window = look(page)
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])

    def copied(name: str) -> str:
        return copied_table(window, "headline", name)

    table = pd.read_csv(io.StringIO(copied("CSV"))).set_index("policy")
    results = pd.read_csv(real[0] / "results.csv", keep_default_na=False, dtype=str)
    whole = results[(results["layer"] == "all") & (results["head"] == "all") & (results["budget"] == "0.1")]
    recall = (
        whole[(whole["metric"] == "attention_recall") & (whole["variant"] == "")]
        .set_index("policy")["value"]
        .astype(float)
    )
    for label, value in table["attention_recall"].items():
        policy = label.partition(":")[0]
        assert value in recall.loc[[policy]].to_list()  # in full precision
    assert len(table) == 9
    *lines, blank, about = copied("Markdown").splitlines()
    assert blank == "" and TRACE in about and "open loop" in about and "Budget: 0.1 of " in about
    assert about.endswith("Not at equal memory: kivi, sca") and "equal memory" not in copied("CSV")
    assert lines[0].startswith("| policy | heads | kept |") and re.fullmatch(r"\| --- \| ---( \| ---:)+ \|", lines[1])
    assert len(lines) == 2 + 9 and len({line.count("|") - line.count("\\|") for line in lines}) == 1
    best = window.inner_text("#headline td.best >> nth=0").strip("*\xa0")
    assert f"**{best}**" in "\n".join(lines)
    latex = copied("LaTeX")
    assert f"\\textbf{{{best}}}" in latex and latex.count("\\\\") == 10
    assert latex.startswith(f"% {about}\n\\begin{{tabular}}{{ll" + "r" * (len(table.columns) - 1) + "}\n\\toprule\n")
    window.fill("#policies", "kivi")
    assert len(copied("Markdown").splitlines()) == 3 + 2  # the rows that are shown, and what they are


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_saved_as_svg_and_png(scheme, page, look, tmp_path):
    window = look(page, color_scheme=scheme)
    window.click("#curve-chart button:has-text('kivi')")
    for chart, name in (("map-chart", "kept-map"), ("curve-chart", "metric-by-budget"),
                        ("layer-chart", "metric-by-layer"), ("heatmaps", "similarity")):  # fmt: skip
        for kind in ("SVG", "PNG"):
            with window.expect_download() as download:
                window.click(f"[data-save={chart}] button:has-text('{kind}')")
            assert download.value.suggested_filename == f"{name}.{kind.lower()}"
            download.value.save_as(tmp_path / f"{name}.{kind}")
        drawing = ElementTree.parse(tmp_path / f"{name}.SVG").getroot()
        texts = [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
        budgets = "all budgets" if chart == "curve-chart" else "budget 0.1"
        model = window.evaluate("shown.trace.model")
        assert f"{TRACE}, {model}, {budgets}, open loop" in "".join(texts) and "snapkv:heads=kv" in texts
        assert chart != "map-chart" or texts[0] == window.inner_text("#map h2")
        assert "kivi" not in texts  # hidden in the legends of both charts; it has no square
        styles = (tmp_path / f"{name}.SVG").read_text()
        assert not re.search(r"var\(|oklch|class=|light-dark", styles)
        assert "opacity" not in styles  # of policies that are not selected
        with Image.open(tmp_path / f"{name}.PNG") as image:
            size = [2 * float(drawing.get(side)) for side in ("width", "height")]
            assert np.allclose(image.size, size, atol=1)
            ground = image.convert("RGB").getpixel((1, 1))
            assert sum(ground) > 600 and len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert window.evaluate("isDark()") == (scheme == "dark")


def test_a_saved_figure_has_the_same_light_colours_on_a_dark_page(page, look, tmp_path):
    for chart in ("map-chart", "curve-chart", "heatmaps"):
        for scheme in ("light", "dark"):
            window = look(page, color_scheme=scheme)
            with window.expect_download() as download:
                window.click(f"[data-save={chart}] button:has-text('SVG')")
            download.value.save_as(tmp_path / scheme)
        assert (tmp_path / "light").read_text() == (tmp_path / "dark").read_text()


def test_saved_similarities_have_a_heading_a_scale_and_captions_below_their_squares(page, look, tmp_path):
    window = look(page)
    scale = window.inner_text("#scale").splitlines()
    with window.expect_download() as download:
        window.click("[data-save=heatmaps] button:has-text('SVG')")
    download.value.save_as(tmp_path / "figure.svg")
    drawing = ElementTree.parse(tmp_path / "figure.svg").getroot()
    texts = list(drawing.iter("{http://www.w3.org/2000/svg}text"))
    bar, *squares = drawing.iter("{http://www.w3.org/2000/svg}image")
    assert texts[0].text.startswith("Jaccard similarity of the kept tokens")
    words = " ".join(one.text for one in texts)
    assert all(piece in words for piece in scale) and "sets: mean over heads" in words
    top = float(squares[0].get("y"))
    assert float(bar.get("y")) + float(bar.get("height")) < top
    captions = [one for one in texts if float(one.get("x")) > 10 and float(one.get("y")) > top]
    assert len(captions) > 4
    assert max(len(one.text.strip()) for one in captions) * 7 < float(squares[0].get("width"))


def test_a_saved_figure_has_its_whole_heading_and_note(page, look, tmp_path):
    window = look(page, width=400)
    window.select_option("#curve-metric", index=1)
    heading, note = (window.inner_text(f"#curve-chart .{name}") for name in ("axis", "free"))
    with window.expect_download() as download:
        window.click("[data-save=curve-chart] button:has-text('SVG')")
    download.value.save_as(tmp_path / "figure.svg")
    drawing = ElementTree.parse(tmp_path / "figure.svg").getroot()
    texts = [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {heading, note} <= {"".join(texts[i:j]) for i in range(len(texts)) for j in range(i + 1, i + 6)}
    assert max(len(one) for one in texts if one in heading or one in note) * 7 < float(drawing.get("width"))


@pytest.mark.parametrize("width", [400, 1200])
def test_a_link_shows_the_heading_of_its_section_below_the_controls(width, page, many, look):
    for file, names in ((page, ["text", "map"]), (write_report(many), ["traces", "curves"])):
        window = look(file, width=width, reduced_motion="reduce")
        assert window.locator("[href='#traces']").is_visible() == (file != page)
        for name in names:
            window.click(f".links [href='#{name}']")
            controls = window.locator("nav").bounding_box()
            heading = window.locator(f"#{name} h2").bounding_box()
            assert 0 <= heading["y"] - controls["y"] - controls["height"] <= 60


def test_a_table_wider_than_the_window_has_a_shadow_until_its_end_is_reached(page, look):
    window = look(page, width=400, color_scheme="light")

    def darkest_ground() -> int:
        """At the right edge of the rows that are not selected."""
        box = window.locator("#table .scroll").bounding_box()
        shot = io.BytesIO(window.screenshot(clip=box | {"x": box["x"] + box["width"] - 6, "width": 4}))
        return int(np.median(np.asarray(Image.open(shot).convert("L")).min(axis=1)))

    window.locator("#table").scroll_into_view_if_needed()
    assert darkest_ground() < 225
    window.evaluate("document.querySelector('#table .scroll').scrollLeft = 1e6")
    window.wait_for_timeout(50)
    assert darkest_ground() > 240


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A run of twelve traces with numbers of the live model."""
    traces = [(f"t{i}", 400 + 7 * i, 0.2 + 0.05 * i) for i in range(12)]
    twins = {"snapkv": 0.3, "h2o": 0.3}
    folder = tmp_path_factory.mktemp("many") / "run"
    return write_live(make_run(folder, [SNAPKV, H2O, CHUNKKV], traces=traces, twins=twins))


def test_means_over_traces_have_the_verdicts_of_compare(many, look):
    window = look(write_report(many))
    comparison = Comparison([Run(many)], "snapkv")
    assert {line.metric for line in comparison.lines.itertuples()} == {"attention_recall", "skill"}
    for metric in ("attention_recall", "skill"):
        choose(window, mean_metric=metric, budget="0.2")
        shown = {row[0]: row[1:] for row in rows_shown(window, "means")}
        lines = [line for line in comparison.lines.itertuples() if (line.metric, line.budget) == (metric, "0.2")]
        assert shown == {line.policy: [text.strip() for text in comparison.line_texts(line)[1:]] for line in lines}
        assert shown["snapkv"][4] == "baseline"
        assert metric == "skill" or any("*" in texts[7] for texts in shown.values())
    choose(window, mean_metric="attention_l1")  # compare's default has no verdict on it
    assert "95 % interval" in window.inner_text("#means thead") and "p Holm" not in window.inner_text("#means thead")
    assert "Baseline: snapkv." in window.inner_text("#compared") and "12 traces" in window.inner_text("#compared")
    window.click("#means button:has-text('chunkkv')")
    assert window.input_value("#first") == "chunkkv"
    other = look(write_report(many, "--baseline", "h2o"))
    assert "Baseline: h2o." in other.inner_text("#compared")


def test_means_over_traces_are_sorted_and_the_address_restores_their_order(many, look):
    page = write_report(many)
    window, other = look(page), look(page)
    choose(window, mean_metric="attention_recall", budget="0.2")
    headings = window.eval_on_selector_all("#means thead th", "all => all.map((one) => one.innerText)")
    assert len(set(headings)) == len(headings)
    lines = Comparison([Run(many)], "snapkv").lines
    lines = lines[(lines["metric"] == "attention_recall") & (lines["budget"] == "0.2")].set_index("policy")
    for column, ascending in (("mean", False), ("mean", True), ("p", True)):  # the best value first
        window.click(f"#means thead button[data-title='{column}']")
        wanted = list(lines[column].sort_values(ascending=ascending).index)  # undefined values last
        assert [row[0] for row in rows_shown(window, "means")] == wanted
    other.evaluate("(address) => { location.href = address; }", window.url)
    other.wait_for_timeout(300)
    assert [row[0] for row in rows_shown(other, "means")] == wanted
    assert other.get_attribute("#means th:has([data-title=p])", "aria-sort") == "ascending"
    assert other.locator("#headline [aria-sort=ascending]").count() == 0


def test_means_over_traces_are_copied_in_full_precision(many, look):
    window = look(write_report(many))
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(window, mean_metric="attention_recall", budget="0.2")
    copied = pd.read_csv(io.StringIO(copied_table(window, "means", "CSV")), float_precision="round_trip")
    lines = Comparison([Run(many)], "snapkv").lines
    lines = lines[(lines["metric"] == "attention_recall") & (lines["budget"] == "0.2")].set_index("policy")
    assert len(set(copied.columns)) == len(copied.columns) == 14
    lines = lines.loc[copied["policy"]].reset_index()
    pd.testing.assert_frame_equal(copied, lines[copied.columns], check_dtype=False, check_exact=True)
    assert copied_table(window, "means", "Markdown").splitlines()[0].count("|") == 11
    assert "equal memory" not in copied_table(window, "means", "Markdown")
    window.evaluate("shown.budget.cells.find((cell) => cell.label === 'h2o').own_memory = true")
    assert copied_table(window, "means", "Markdown").splitlines()[-1].endswith(". Not at equal memory: h2o")


def test_a_filter_without_a_match_is_said(page, look):
    window = look(page)
    window.fill("#policies", "no such policy")
    for chart in ("curve-chart", "layer-chart"):
        assert window.inner_text(f"#{chart}") == "No policy with this metric matches the filter."
    assert window.inner_text("#headline tbody") == "No policy matches the filter."
    window.fill("#policies", "kivi")
    assert "kivi" in window.inner_text("#own-memory")
    window.fill("#policies", "h2o")
    assert window.inner_text("#own-memory") == "" and "kivi" not in window.inner_text("#unlike")


def test_a_row_of_the_means_selects_its_policy(many, look):
    window = look(write_report(many, "-p", "snapkv,h2o", "--baseline", "chunkkv"))
    window.click("#means tr[data-label='h2o'] td >> nth=2")
    window.click("#means tr[data-label='snapkv'] td >> nth=2", modifiers=["Shift"])
    assert first_and_second(window) == ("h2o", "snapkv") and window.evaluate("getSelection().toString()") == ""
    window.fill("#policies", "no such policy")
    assert window.inner_text("#means tbody") == "No policy matches the filter."


def test_a_baseline_that_is_not_asked_for_is_on_the_page(many, look):
    window = look(write_report(many, "-p", "snapkv,h2o", "--baseline", "chunkkv"))
    assert {row[0] for row in rows_shown(window, "means")} == {"snapkv", "h2o", "chunkkv"}
    assert "chunkkv" in window.inner_text("#headline") and "Baseline: chunkkv." in window.inner_text("#compared")
    assert f"numbers of kvreplay compare {many} --baseline chunkkv." in window.inner_text("#compared")


def rows_shown(window, table: str) -> list[list[str]]:
    """The texts of a table's policies, without drawings."""
    return window.evaluate(f"""[...document.querySelectorAll("#{table} tr[data-label]")].map((row) =>
      [...row.cells].filter((cell) => !cell.matches(".drawn")).map((cell) => cell.innerText.trim()))""")


def test_a_run_of_one_trace_has_no_means_over_traces(page, look):
    window = look(page)
    assert not window.is_visible("#traces") and not window.is_visible("#live")


def test_a_page_opens_at_a_budget_with_live_numbers(tmp_path, look):
    run = write_live(make_run(tmp_path / "run", [SNAPKV], budgets=["0.1", "0.2"]), budget="0.2")
    window = look(write_report(run))
    assert window.input_value("#budget") == "0.2" and "live.kld" in window.inner_text("#headline")
    window.evaluate("location.hash = '#budget=0.1'")
    window.wait_for_function("document.getElementById('budget').value === '0.1'")


def test_offline_and_live_numbers_stand_beside_each_other(many, look):
    window = look(write_report(many))
    kinds = window.eval_on_selector_all("#headline .kinds th", "all => all.map((one) => [one.innerText, one.colSpan])")
    titles = window.locator("#headline thead tr:last-child th").all_inner_texts()
    assert kinds == [["offline, open loop", len(titles) - 3], ["live model", 1]] and titles[-1] == "live.kld"
    points = "#live-chart g.series[data-label=snapkv] path title"
    said = window.eval_on_selector_all(points, "all => all.map((one) => one.textContent)")
    assert len(said) == 3  # budgets
    recall = float(re.search(r"recall ([\d.]+)", said[0])[1])
    kld = float(re.search(r"live\.kld ([\d.]+)", said[0])[1])
    assert kld == pytest.approx(1 - recall, abs=0.002)
    assert window.locator("#live-chart polyline").count() == 0
    before = window.inner_html("#live-chart svg[role]")
    choose(window, offline_metric="att.l1")
    assert window.inner_html("#live-chart svg[role]") != before


OVERLAPS = """
() => {
  const found = [];
  const shown = (all) => [...all].filter((one) => one.checkVisibility() && one.textContent);
  const compare = (all, room) => {
    const boxes = all.map((one) => one.getBoundingClientRect()), name = (i) => all[i].textContent.slice(0, 40);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > room && high > room) found.push([name(i), name(i + 1 + j)]);
    }));
  };
  compare(shown(document.querySelectorAll("main section")), 1);
  const whole = ".chart, .reading, .scroll";
  for (const part of shown(document.querySelectorAll("header, nav, section"))) {
    const parts = part.querySelectorAll(`h1, h2, p, label, .actions, #jumps, #next, #found, .links, ${whole}`);
    compare(shown(parts).filter((one) => !one.parentElement.closest(whole)), 1);
  }
  for (const drawing of document.querySelectorAll("svg[role]")) compare(shown(drawing.querySelectorAll("text")), 2);
  for (const name of shown(document.querySelectorAll("button.name"))) {
    if (name.textContent.length < 15 && name.clientHeight > 40) found.push(["wrapped", name.textContent]);
  }
  for (const button of shown(document.querySelectorAll("button"))) {
    if (button.scrollWidth > button.clientWidth + 1) found.push(["cut", button.textContent]);
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200, 1920])
def test_nothing_overlaps(width, scheme, page, many, look):
    for file in (page, write_report(many)):
        window = look(file, width=width, color_scheme=scheme)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.evaluate(OVERLAPS) == []
        assert width - window.evaluate("document.querySelector('main').clientWidth") <= 80  # the whole window
        table = window.locator("#headline").first
        window.evaluate("document.querySelector('#headline').parentElement.scrollLeft = 300")
        name = table.locator("tr[data-label] th").first.bounding_box()
        assert abs(name["x"] - table.locator("xpath=..").bounding_box()["x"]) <= 2  # the first column is frozen
