"""A policy is found by the names that other programs give to it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from program import done, kvreplay


def planned(*words: str | Path, folder: Path) -> dict:
    return json.loads(done("replay", *words, "--dry-run", "--json", folder=folder))


@pytest.mark.parametrize(
    "spelling, name",
    [
        ("SnapKVPress", "snapkv"), ("SnapKV", "snapkv"), ("snap_kv", "snapkv"), ("StreamingLLMPress", "streaming-llm"),
        ("streamingllm", "streaming-llm"), ("PyramidKV", "pyramid-kv"), ("H2O", "h2o"), ("KnormPress", "knorm"),
        ("ExpectedAttentionPress", "expected-attention"), ("LeverageScorePress", "leverage"), ("FullKV", "full"),
        ("h2o_online", "h2o-online"),
    ],
)  # fmt: skip
def test_a_policy_has_one_name_in_every_spelling(spelling: str, name: str, traces: Path, tmp_path: Path) -> None:
    [card] = [json.loads(done("policies", spelling, "--json", folder=tmp_path))]
    assert card["name"] == name
    cells = planned(traces / "fixture.h5", "-p", f"{spelling}", "-b", "6", folder=tmp_path)["traces"][0]["cells"]
    assert cells[0]["policy"].partition(":")[0] == name


def test_spellings_in_parameters_and_exclusions(traces: Path, tmp_path: Path) -> None:
    plan = planned(
        traces / "fixture.h5", "-p", "random-twin:of=(SnapKVPress:window=2),H2O:recent=3,TOVA", "-b", "6",
        "--exclude", "TOVAPress", folder=tmp_path
    )  # fmt: skip
    assert plan["policies"] == ["random-twin:of=(snapkv:window=2,kernel=5,pool=avg)", "h2o:recent=3"]


def test_a_misspelt_policy_names_the_nearest(tmp_path: Path) -> None:
    for spelling in ("snapvk", "SnapVK"):
        answer = kvreplay("policies", spelling, folder=tmp_path)
        assert (answer.code, answer.err) == (2, f"kvreplay: {spelling}: unknown policy: did you mean snapkv?\n")


@pytest.mark.parametrize(
    "words, kind, first, place",
    [
        (["policies", "PyramidKVPres"], "policy", "pyramid-infer, pyramid-kv", "kvreplay policies"),
        (["policies", "PerLayerCompressionPress"], "policy", "", "kvreplay policies"),
        (["metrics", "bandwidth"], "metric", "", "kvreplay metrics"),
        (["corpus"], "command", "compare", "kvreplay help"),
        (["replay", "--granularity"], "option", "", "kvreplay replay --help"),
    ],
)
def test_a_name_like_no_other_is_answered_with_three_and_their_list(
    words: list[str], kind: str, first: str, place: str, tmp_path: Path
) -> None:
    answer = kvreplay(*words, folder=tmp_path)
    where = words[0] if kind == "option" else words[-1]
    line = rf"kvreplay: {where}: unknown {kind}: expected one of (\d+) names, such as (.*) \(see {place}\), found .*\n"
    match = re.fullmatch(line, answer.err)
    assert answer.code == 2 and match, answer
    assert len(match[2].split(", ")) == 3 and match[2].startswith(first) and int(match[1]) > 12
