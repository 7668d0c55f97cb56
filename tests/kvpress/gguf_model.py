"""Models of GGUF files in kvpress' environment."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import torch
import transformers


def load_gguf(file: Path) -> transformers.PreTrainedModel:
    """In float32. The transformers of this environment asks gguf for the same names again for every module, which takes
    minutes."""
    with patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()
