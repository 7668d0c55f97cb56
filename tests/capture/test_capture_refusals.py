"""Is what a trace cannot describe refused by its name, with exit code 3 and nothing written?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import CONFIGS, SIZES, build, character_tokenizer

from kvreplay.capture.command import main
from kvreplay.capture.masks import Visibility
from kvreplay.capture.probe import probe
from kvreplay.errors import Error

TINY = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
CASES = {
    "t5": (lambda: transformers.T5Config(vocab_size=128, d_model=48, d_kv=12, d_ff=64), "encoder-decoder"),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=128, hidden_size=48, n_layer=2, n_head=4), "ALiBi"),
    "mpt": (lambda: transformers.MptConfig(vocab_size=128, d_model=48, n_layers=2, n_heads=4), "ALiBi"),
    "falcon": (lambda: transformers.FalconConfig(**TINY, alibi=True), "ALiBi"),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=128, hidden_size=48, num_hidden_layers=2),
        "no attention interface",
    ),
    "bert": (lambda: transformers.BertConfig(**TINY, intermediate_size=64), "causal attention"),
}


@pytest.mark.parametrize("kind", CASES)
def test_refused_by_name(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, name = CASES[kind]
    folder = tmp_path / "model"
    if kind in ("mamba", "bert"):
        build(make()).save_pretrained(folder)
    else:
        make().save_pretrained(folder)  # no weights: it is refused before they are read
    character_tokenizer().save_pretrained(folder)
    out = tmp_path / "out"
    out.mkdir()
    code = main(["--model", str(folder), "--prompt", "A few words", "-o", str(out / "t.h5"), "--progress", "never"])
    message = capsys.readouterr().err
    assert code == 3, message
    assert re.search(name, message), message
    assert message.startswith("kvreplay: ") and message.count("\n") == 1
    assert list(out.iterdir()) == []


def test_head_counts_that_differ_by_layer() -> None:
    model = build(CONFIGS["llama"])
    wider = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, head_dim=16)
    model.model.layers[2].self_attn = type(model.model.layers[2].self_attn)(wider, 2)
    model.model.layers[2].self_attn.config = model.config
    assert [call.k.shape[0] for call in probe(model, "mixed", 5, 20)[0]] == [2, 2, 4, 2]
    for layers in ({0, 1, 3}, {2}):
        assert [call.layer for call in probe(model, "mixed", 5, 20, frozenset(layers))[0]] == sorted(layers)


@pytest.mark.parametrize("change", ["frequencies", "scaling"])
def test_rope_that_the_keys_do_not_show(change: str) -> None:
    """The buffers say one thing, the rotation another."""
    model = build(CONFIGS["llama"])
    rotary = model.model.rotary_emb
    run = rotary.forward
    factor = 1.01 if change == "frequencies" else 1.0

    def elsewhere(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = run(x, position_ids.float() * factor)
        return (cosines, sines) if change == "frequencies" else (1.05 * cosines, 1.05 * sines)

    rotary.forward = elsewhere
    with pytest.raises(Error, match="RoPE|cosines and sines"):
        probe(model, "strange", 5, 20)


def test_mask_kinds() -> None:
    t, j = torch.arange(40)[:, None], torch.arange(40)[None, :]
    causal = j <= t

    def rule(mask: torch.Tensor, chunk: int = 0) -> tuple[int, int] | None:
        return Visibility.of(mask, 40, 40).rule(torch.device("cpu"), chunk)

    assert rule(causal[None, None]) == rule(causal[None, None], 64) == (0, 0)
    assert rule((causal & (j > t - 7))[None, None], 8) == (7, 0)
    chunks = (causal & (j // 8 == t // 8))[None, None]
    assert rule(chunks, 8) == (0, 8)
    assert rule(chunks) is None and rule(chunks, 9) is None
    assert rule(torch.ones(1, 1, 40, 40, dtype=torch.bool)) is None  # both directions
    assert rule(torch.zeros(1, 1, 40, 40)) is None  # added numbers
