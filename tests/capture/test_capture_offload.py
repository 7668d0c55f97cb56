"""Can a model that memory does not hold be captured with its layers on disk, and is the trace the same?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tiny_models import SIZES, build, character_tokenizer, save

from kvreplay.capture.command import main
from kvreplay.trace import Trace

PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
OPTIONS = [
    "--prompt",
    PROMPT,
    "--generate",
    "3",
    "--save-reference",
    "--with-wo",
    "--quiet",
    "--threads",
    "1",
]

# The peak of the whole process in KiB, after the program's own lines. (ru_maxrss would count the process that forked.)
MEASURED = """
import re, sys
from pathlib import Path
from kvreplay.capture.command import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def device_map(path: Path, places: dict[str, Any]) -> str:
    path.write_text(json.dumps(places))
    return str(path)


def assert_same(found: Trace, expected: Trace) -> None:
    """Every number within rounding of float32, everything else equal."""
    np.testing.assert_array_equal(found["/tokens/ids"], expected["/tokens/ids"])
    np.testing.assert_array_equal(found["/model/rope/inv_freq"], expected["/model/rope/inv_freq"])
    assert found.attribute("/model", "source_hash") == expected.attribute("/model", "source_hash")
    paths = [f"/layers/{n:03d}/{name}" for n in range(expected.layers) for name in ("q", "k", "v", "wo", "input_norm")]
    for path in [*paths, "/reference/log_probabilities", "/reference/tail"]:
        largest = np.max(np.abs(expected[path]))
        np.testing.assert_allclose(found[path], expected[path], rtol=0, atol=2e-5 * largest, err_msg=path)


@pytest.mark.parametrize("places", ["all on disk", "some on disk"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_on_disk_give_the_same_trace(name: str, places: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", name)
    names = ["embed_tokens", "norm", "rotary_emb", *(f"layers.{layer}" for layer in range(4))]
    some = {f"model.{name}": "disk" if name in ("layers.1", "layers.2") else "cpu" for name in names}
    where = device_map(tmp_path / "map.json", {"": "disk"} if places == "all on disk" else {**some, "lm_head": "cpu"})
    for out, more in (("memory", []), ("disk", ["--device-map", where])):
        assert main(["--model", str(folder), "-o", str(tmp_path / f"{out}.h5"), *OPTIONS, *more]) == 0
    assert_same(Trace(tmp_path / "disk.h5"), Trace(tmp_path / "memory.h5"))


def test_peak_memory_is_below_the_models_size(tmp_path: Path) -> None:
    """A random model of 1 GB in float32, 14 wide layers, all of them on disk."""
    sizes = {**SIZES, "hidden_size": 768, "intermediate_size": 7680, "num_hidden_layers": 14}
    model = build(transformers.LlamaConfig(**sizes, head_dim=16))
    size = 4 * sum(weight.numel() for weight in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="200MB")
    character_tokenizer().save_pretrained(tmp_path / "model")
    del model
    where = device_map(tmp_path / "map.json", {"": "disk"})
    peaks = {}
    for out, more in (("memory", []), ("disk", ["--device-map", where])):
        words = ["--model", str(tmp_path / "model"), "-o", str(tmp_path / f"{out}.h5"), *OPTIONS, *more]
        command = [sys.executable, "-c", MEASURED, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        peaks[out] = 1024 * int(done.stdout.splitlines()[-1])
    assert_same(Trace(tmp_path / "disk.h5"), Trace(tmp_path / "memory.h5"))
    print(size, peaks)
    assert peaks["memory"] > size > peaks["disk"], (size, peaks)
