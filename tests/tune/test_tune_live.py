"""Is what `kvreplay tune --metric kld` finds what `kvreplay live` says of it?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="live metrics need tools/setup build python")
sys.path.append(str(Path(__file__).resolve().parents[1] / "capture"))

from tiny_models import save

import kvreplay as kv
from kvreplay.capture.command import main as capture
from kvreplay.live.command import main as live

PROMPTS = {
    "heron": "The heron stood in the shallow water all the morning, and did not say what it was waiting for.",
    "lamp": "An old lamp burned in the window of the mill at midnight, and the dog would not go near it at all.",
    "boats": "It rained all day, and the boats stayed in the harbour until noon; then three of them went out.",
    "bread": "She baked the bread twice, once for the house and once for the road, and forgot both on the table.",
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A tiny model, and what it makes of four prompts."""
    folder = tmp_path_factory.mktemp("captured")
    model = save(folder / "model", "llama")
    paths = [folder / f"{name}.h5" for name in PROMPTS]
    for path, prompt in zip(paths, PROMPTS.values(), strict=True):
        words = ["--model", str(model), "--prompt", prompt, "--generate", "6", "-o", str(path), "--progress", "never"]
        assert capture(words) == 0
    return model, paths


@pytest.mark.parametrize("metric, better", [("kld", min), ("same_top_p", max), ("kld:median", min)])
def test_its_numbers_are_those_of_live(captured, tune, tmp_path, metric, better):
    model, paths = captured
    sinks = (0, 1, 3, 9)
    found = tune(*paths, "-p", "streaming-llm:sinks=0", "-b", "12", "--search", "sinks=0|1|3|9", "--metric", metric,
                 "--model", model)  # fmt: skip
    policies = [f"streaming-llm:sinks={count}" for count in sinks]
    run = tmp_path / "run"
    kv.replay(paths, policies, "12", metrics="attention_recall", output=run)
    assert live([str(run), "--model", str(model), "--progress", "never"]) == 0
    name, _, variant = metric.partition(":")
    rows = kv.Run(run).overall
    rows = rows[(rows["metric"] == name) & (rows["variant"] == variant) & (rows["role"] == "asked")]
    values = rows.assign(policy=rows["policy"] + ":" + rows["params"]).pivot(
        index="trace", columns="policy", values="value"
    )
    assert len(values) == 4 and len(values.columns) == 4 and values.nunique().min() > 1
    named = {f"streaming-llm:sinks={count}": next(one for one in values if f"sinks={count}" in one) for count in sinks}
    fitting = values.loc[found["fitting"]["traces"]].mean()
    assert fitting[named[found["best"]]] == better(fitting)
    for side in ("fitting", "held_out"):
        for word in ("start", "best"):
            mean = values.loc[found[side]["traces"], named[found[word]]].mean()
            assert found[side][word] == pytest.approx(mean, rel=1e-5, abs=1e-9)
    assert found["open_loop"] is False
    said = f"{metric} ({found['direction']} is better) at budget 12, closed loop"
    assert said in (tmp_path / "best.yaml").read_text()


def test_nothing_is_measured_again(captured, tune, tmp_path, monkeypatch):
    from kvreplay.live import measure

    model, paths = captured
    passes = []
    real = measure.run
    monkeypatch.setattr(measure, "run", lambda *words: passes.append(1) or real(*words))
    words = [*paths, "-p", "streaming-llm", "-b", "12", "--search", "sinks=0|3", "--metric", "kld", "--model", model]
    first = tune(*words)
    assert passes
    passes.clear()
    assert tune(*words) == first and not passes
    assert list((tmp_path / "kvreplay-tune").glob("fitting-cpu-float32-*/live/*.csv"))


def test_another_model_is_refused(captured, refused, tmp_path):
    _, paths = captured
    other = save(tmp_path / "other", "qwen3")
    words = ["-p", "streaming-llm", "-b", "12", "--search", "sinks=0|3", "--metric", "kld", "--model", other]
    assert "another model" in refused(3, *paths, *words)
