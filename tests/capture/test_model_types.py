"""Does docs/models.md list what capture does with each causal type of transformers?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from model_types import PAGE, results, table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# The types of one family run the same code: one of each is captured again.
AGAIN = (
    *("llama", "gemma4", "llama4_text", "qwen3_5", "bamba", "bert", "gpt_oss", "deepseek_v3", "bart", "mpt", "rwkv"),
    *("nanochat", "flint", "gptj", "recurrent_gemma", "diffllama", "dory", "zamba2", "qwen4_exp_text", "git", "xlstm"),
)
ROWS = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE))


@pytest.fixture(autouse=True)
def same_version() -> None:
    if f"transformers {transformers.__version__}:" not in PAGE.read_text("utf-8"):
        pytest.skip("the page lists another version of transformers")


def test_the_page_lists_every_type() -> None:
    assert ROWS.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert table(ROWS) in PAGE.read_text("utf-8")


def test_types_are_captured_or_rejected_as_the_page_says(tmp_path: Path) -> None:
    assert results(AGAIN, tmp_path) == {kind: ROWS[kind] for kind in AGAIN}
