"""Does a notebook show runs, traces and kept sets with the right numbers, and their names as text?"""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import kvreplay as kv

HOSTILE = '<script>alert("x")</script>&'


class Content(HTMLParser):
    """The tags of a page, and the texts of its table cells by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def trace(small: Path) -> kv.Trace:
    """A trace in memory whose text, model and spans look like tags."""
    stored = kv.open(small)
    layers = range(stored.layers)
    arrays = [[np.array(tensor(layer)) for layer in layers] for tensor in (stored.q, stored.k, stored.v)]
    text = (HOSTILE * stored.tokens)[: 2 * stored.tokens]
    offsets = [(2 * i, 2 * i + 2) for i in range(stored.tokens)]
    return kv.from_arrays(*arrays, prompt=stored.prompt, text=text, offsets=offsets, model=HOSTILE,
                          spans=[(HOSTILE, "needle", 3, 5)], name="shown")  # fmt: skip


@pytest.fixture(scope="module")
def run(trace: kv.Trace) -> kv.Run:
    return kv.replay(trace, ["snapkv", "h2o", "tova"], [0.25, 0.5], progress=False)


def test_names_and_texts_are_escaped(trace: kv.Trace, run: kv.Run) -> None:
    pages = [trace._repr_html_(), run._repr_html_(), run.selection("h2o", 0.5)._repr_html_()]
    for page in pages:
        assert not {"script", "link", "iframe"} & Content(page).tags
        assert not re.search(r"https?:|#[0-9a-f]{3,6}\b|(?<!-)color:", page)  # self-contained, and colours of the page
        assert len(page) < 20_000
    facts = dict(Content(pages[0]).rows)
    assert facts["model"] == HOSTILE and facts["spans"] == f"{HOSTILE} 3 to 5"
    assert facts["text"].endswith("…") and trace.text.startswith(facts["text"][:-1])
    assert facts["tokens"] == f"{trace.prompt} prompt + {trace.tokens - trace.prompt} continuation"


def test_a_run_shows_its_headline_numbers(run: kv.Run) -> None:
    assert repr(run) == "<kvreplay run of shown>"
    header, *rows = Content(run._repr_html_()).rows
    terminal = next(line for line in run.table(all=True).splitlines() if line.startswith("policy "))
    assert header == ["budget", *terminal.split()]
    shown = {(row[0], row[1].strip("()")): dict(zip(header, row, strict=True)) for row in rows}
    results = run.results[(run.results["layer"] == "all") & (run.results["role"] != "trace")]
    assert len(shown) == len(rows) == len(results[["budget", "label"]].drop_duplicates())
    for name, metric, variant in (
        ("recall", "attention_recall", ""),
        ("out.err", "output_error", "pooled"),
    ):
        wanted = results[(results["metric"] == metric) & (results["variant"] == variant)]
        for row in wanted.itertuples():
            assert shown[row.budget, row.label][name] == f"{row.value:.3f}"
    errors = results[(results["metric"] == "output_error") & (results["variant"] == "pooled")]
    errors = errors[(errors["role"] != "control") & (errors["budget"] == "0.5")]
    assert f"<b>{errors['value'].min():.3f}</b>" in run._repr_html_()


def test_a_policy_with_memory_of_its_own_is_never_best(trace: kv.Trace) -> None:
    names = ["snapkv", "h2o", "kivi"]
    page = kv.replay(trace, names, 0.25, progress=False)._repr_html_()
    best = {name: re.search(rf">{name}<.*?</tr>", page, re.DOTALL)[0].count("<b>") for name in names}
    assert best["snapkv"] + best["h2o"] > 0 and best["kivi"] == 0


def test_the_map_shows_the_share_of_heads_that_keep_a_token(run: kv.Run) -> None:
    image = pytest.importorskip("PIL.Image")
    kept = run.selection("h2o", 0.5)
    page = kept._repr_html_()
    picture = image.open(io.BytesIO(base64.b64decode(re.search('base64,([^"]+)', page)[1]))).convert("RGBA")
    np.testing.assert_array_equal(np.asarray(picture)[..., 3], np.round(255 * kept.mask().mean(axis=1)))
    assert f"{kept.kept.mean():.1f} on average" in page
