"""Runs kvpress' presses and ReplayPress on one prompt; writes the kept sets, and what the model then predicts. In
kvpress' environment."""

from __future__ import annotations

import sys
from pathlib import Path

import kvpress
import numpy as np
import torch
import transformers
from cases import PRESS_CASES, PRESS_RATIOS, PRESS_TOKENS
from gguf_model import load_gguf

from kvreplay.kvpress import ReplayPress

QUESTION, DECODED = 5, 2  # tokens after the prompt: in one pass, then one by one


def loaded(name: str) -> transformers.PreTrainedModel:
    """The model of a GGUF file, or one with random weights."""
    torch.manual_seed(0)
    if name == "qwen3":
        config = transformers.Qwen3Config(
            vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=2, head_dim=32,
        )  # fmt: skip
        model = transformers.Qwen3ForCausalLM(config).eval()
        for layer in model.model.layers:  # with weights of 1, the norms of all keys are equal
            torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 0.5, 1.5)
        return model
    return load_gguf(Path(name))


def predicted(press: kvpress.BasePress | None, model: torch.nn.Module, ids: torch.Tensor) -> tuple:
    """Logits [QUESTION + DECODED, V] after the press; keys and values [L] of [Hkv,n,d]; whether a slot is masked."""
    prompt = ids.shape[1] - QUESTION - DECODED
    cache = transformers.DynamicCache()
    modules = [layer.self_attn for layer in model.model.layers]
    with torch.inference_mode():
        if press is None:
            model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        else:
            with press(model):
                model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        keys, values = ([getattr(layer, of)[0].clone() for layer in cache.layers] for of in ("keys", "values"))
        masked = [torch.zeros(one.shape[:2], dtype=torch.bool) for one in keys]
        for rows, module in zip(masked, modules, strict=True):
            if (indices := getattr(module, "masked_key_indices", None)) is not None:
                rows[indices[1], indices[2]] = True
        logits = []
        for begin, end in [(0, QUESTION), *((QUESTION + i, QUESTION + i + 1) for i in range(DECODED))]:
            positions = torch.arange(prompt + begin, prompt + end)[None]
            output = model(
                input_ids=ids[:, prompt + begin : prompt + end], past_key_values=cache, position_ids=positions
            )
            logits.append(output.logits[0])
    return torch.cat(logits).numpy(), keys, values, masked


def by_token(
    keys: list[torch.Tensor], values: list[torch.Tensor], masked: list[torch.Tensor], every: list[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the prompt's tokens [L,Hkv,P] have the nearest keys: those of eager attention differ by rounding; and
    their values [L,Hkv,P,d]."""
    kept = np.zeros((len(every), *every[0].shape[:2]), dtype=bool)
    stored = np.zeros((*kept.shape, values[0].shape[-1]), dtype=np.float32)
    for layer, (rows, all_rows) in enumerate(zip(keys, every, strict=True)):
        nearest = torch.cdist(rows, all_rows).argmin(-1)
        for head, places in enumerate(nearest):
            there = ~masked[layer][head]
            kept[layer, head, places[there].numpy()] = True
            stored[layer, head, places[there].numpy()] = values[layer][head][there].numpy()
    return kept, stored


def main(name: str, file: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = loaded(name)
    # Distinct tokens: equal ones have keys of equal norm in the first layer, whose order is rounding.
    ids = torch.randperm(model.config.vocab_size)[: PRESS_TOKENS + QUESTION + DECODED][None]
    model.set_attn_implementation("sdpa")
    found: dict[str, np.ndarray] = {}
    found["full"], every, _, _ = predicted(None, model, ids)
    for case in PRESS_CASES:
        for ratio in PRESS_RATIOS:
            theirs = eval(case.press, {**vars(kvpress), "R": ratio})
            values = {}
            for whose, press in (("theirs", theirs), ("ours", ReplayPress(case.policy, ratio))):
                # ObservedAttentionPress reads the attention weights that eager attention computes.
                eager = "Observed" in case.press and whose == "theirs"
                model.set_attn_implementation("eager" if eager else "sdpa")
                found[f"{case.press} {ratio} {whose}"], *cache = predicted(press, model, ids)
                found[f"{case.press} {ratio} {whose} kept"], values[whose] = by_token(*cache, every)
            apart = np.abs(values["theirs"] - values["ours"]).max(-1) / np.abs(values["theirs"]).max()
            found[f"{case.press} {ratio} values apart"] = apart
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
