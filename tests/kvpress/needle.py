"""Answers questions about a needle through kvpress' pipeline behind several presses; and, with the sources of kvpress,
runs its evaluation. In kvpress' environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock, patch

import datasets
import kvpress
import torch
import transformers
from gguf_model import load_gguf

from kvreplay.kvpress import ReplayPress

ROOT = Path(__file__).resolve().parents[2]
PYTHON_POLICY = f"{ROOT}/docs/value_attention.py:value_attention"
NEEDLE = "The secret word of the lighthouse keeper is marmalade."
QUESTION = "\nWhat is the secret word of the lighthouse keeper?"
ANSWER_PREFIX = "The secret word of the lighthouse keeper is"
DEPTHS = (0.2, 0.8)
RATIO = 0.4
# Scorers of other benchmarks, which the registry imports.
OTHER_SCORERS = ("bert_score", "fuzzywuzzy", "jieba", "nltk", "nltk.translate", "nltk.translate.bleu_score",
                 "nltk.translate.meteor_score")  # fmt: skip


def story() -> str:
    """The first prompt of the demo."""
    return json.loads((ROOT / "traces" / "demo.jsonl").read_text().splitlines()[0])["context"][:1600]


def answers(pipe: transformers.Pipeline) -> dict[str, list[str]]:
    """The answers of each press, one for each depth of the needle."""
    presses = {
        "SnapKVPress": kvpress.SnapKVPress(RATIO),
        "snapkv": ReplayPress("snapkv:preset=kvpress", RATIO),
        "value_attention": ReplayPress(PYTHON_POLICY, RATIO),
    }
    text, found = story(), {}
    for name, press in presses.items():
        found[name] = []
        for depth in DEPTHS:
            place = text.find(" ", int(depth * len(text)))
            context = f"{text[:place]} {NEEDLE}{text[place:]}"
            with torch.inference_mode():
                output = pipe(context, question=QUESTION, answer_prefix=ANSWER_PREFIX, press=press, max_new_tokens=6)
            found[name].append(output["answer"])
    return found


def evaluate(source: Path, model: Path, folder: Path) -> None:
    """kvpress' needle evaluation, with a haystack of the demo in place of the one that it downloads."""
    row = {"context": story(), "needle": NEEDLE, "question": QUESTION, "answer_prefix": ANSWER_PREFIX,
           "max_new_tokens": 8}  # fmt: skip
    sys.path.insert(0, str(source / "evaluation"))
    with patch.dict(sys.modules, {name: MagicMock() for name in OTHER_SCORERS}):
        import evaluate
        from evaluate_registry import PRESS_REGISTRY

        PRESS_REGISTRY["value_attention"] = ReplayPress(PYTHON_POLICY)
        config = evaluate.EvaluationConfig(
            dataset="needle_in_haystack", model=str(model), device="cpu", press_name="value_attention",
            compression_ratio=RATIO, needle_depth=[20, 80], max_context_length=512, output_dir=str(folder),
        )  # fmt: skip
        with patch.object(evaluate, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row])):
            evaluate.EvaluationRunner(config).run_evaluation()


def main(gguf: Path, folder: Path, source: str) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load_gguf(gguf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if source:
        for one in (model, tokenizer):
            one.save_pretrained(folder / "model")
        evaluate(Path(source), folder / "model", folder / "results")
        return
    pipe = transformers.pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer, device="cpu")
    (folder / "answers.json").write_text(json.dumps(answers(pipe)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
