"""Does a capture that is killed, stopped, refused or out of disk leave nothing that looks whole?"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from tiny_models import SIZES, character_tokenizer

from kvreplay.capture.command import main, parser
from kvreplay.capture.model_options import take_user_defaults
from kvreplay.capture.recorder import Recorder
from kvreplay.capture.source import Source
from kvreplay.errors import Error
from kvreplay.trace import Trace, TraceWriter

Folder = Callable[..., Path]

CHAT_NOTE = "the model has a chat template: --chat applies it; without it the model may not answer"

# A capture whose second layer waits, so that it can be stopped in the middle.
SLOW = """
import sys, time
from kvreplay.capture import recorder
from kvreplay.capture.command import main
record = recorder.Recorder.__call__
def slowly(self, call):
    record(self, call)
    if call.layer == 1:
        print("in the middle", flush=True)
        time.sleep(60)
recorder.Recorder.__call__ = slowly
sys.exit(main(sys.argv[1:]))
"""


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from kvreplay.capture.command import main
sys.exit(main(sys.argv[1:]))
"""


def words(folder: Path, out: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--prompt", "Rain " * 30, "-o", str(out), "--progress", "never", *more]


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle(stop: signal.Signals, model_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / "t.h5"
    command = [sys.executable, "-c", SLOW, *words(model_folder("llama"), out)]
    pipe, heed = subprocess.PIPE, lambda: signal.signal(stop, signal.SIG_DFL) if stop != signal.SIGKILL else None
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        time.sleep(0.2)
        process.send_signal(stop)
        _, message = process.communicate(timeout=30)
    assert not out.exists()
    partial = tmp_path / "t.h5.partial"
    if stop == signal.SIGKILL:
        assert partial.exists()  # nobody was left to remove it, and it does not look whole:
        with pytest.raises(Error):
            Trace(partial)
    else:
        assert process.returncode == 130
        assert "interrupted" in message and message.count("\n") == 1
        assert not partial.exists()
    assert main(words(model_folder("llama"), out)) == 0  # what was left behind is in nobody's way
    assert Trace(out).layers == 4


def test_disk_full(model_folder: Folder, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the middle of a layer."""
    out = tmp_path / "t.h5"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-m", "kvreplay.capture.command", *words(model_folder("llama"), out)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert done.stderr == f"kvreplay: {out}.partial: disk full\n"
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_seen_beforehand(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert main(words(model_folder("llama"), tmp_path / "t.h5")) == 5
    assert re.search(r"too little disk space: expected [\d.]+ MB, found 0.0 MB", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_kept_unless_forced(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.h5"
    out.write_text("mine")
    assert main(words(model_folder("llama"), out)) == 3
    said = f"kvreplay: {out}: exists: expected another name, or --force to overwrite, found a file\n"
    assert capsys.readouterr().err == said
    assert out.read_text() == "mine"
    assert main(words(model_folder("llama"), out, "--force")) == 0
    assert Trace(out).layers == 4


def test_other_prompts_of_a_file_are_mentioned(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"context": "Rain"}\n{"context": "Snow"}\n')
    given = ["--model", str(model_folder("llama")), "--prompts", str(rows), "--generate", "2"]
    assert main([*given, "-o", str(tmp_path / "one.h5")]) == 0
    assert f"prompts  the first of {rows} (-n N captures the first N)\n" in capsys.readouterr().out
    assert main([*given, "-n", "1", "-o", str(tmp_path / "asked.h5")]) == 0
    assert "prompts  " not in capsys.readouterr().out


@pytest.mark.parametrize("every", [False, True])
def test_a_wrong_trace_is_found_and_removed(
    every: bool,
    model_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One value in layer 2 is off by a tenth of itself where every query sees it."""
    write = TraceWriter.write_tokens

    def wrongly(self: TraceWriter, path: str, begin: int, piece: np.ndarray) -> None:
        if path == "/layers/002/v":
            piece = piece.copy()
            piece[:, 0] *= np.float32(1.1)
        write(self, path, begin, piece)

    monkeypatch.setattr(TraceWriter, "write_tokens", wrongly)
    assert main(words(model_folder("llama"), tmp_path / "t.h5", *(["--verify"] if every else []))) == 1
    assert "layer 2, head" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_a_type_cannot_hold(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Recorder.__call__

    def larger(self: Recorder, call: object) -> None:
        call.k[0, 3, 2] = 1e30  # type: ignore[attr-defined]
        record(self, call)

    monkeypatch.setattr(Recorder, "__call__", larger)
    assert main(words(model_folder("llama"), tmp_path / "t.h5", "--store-dtype", "float16")) == 3
    assert "/layers/000/k: value: expected finite numbers in float16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--laiers", "0"], "capture: unknown option --laiers: did you mean --layers?"),
        (
            ["--layers", "0,9"],
            "--layers: no such layer: expected layers of this model with attention, of 0 to 3, found 9",
        ),
        (["--layers", "3-1"], "expected full, or numbers and ranges like 0,3-5, found '3-1'"),
        (["--queries", "first:3"], "expected all or last:N, found 'first:3'"),
        (["--generate", "-1"], "expected a whole number of at least 0, found '-1'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--span", "x=absent"], "--span: x: expected 'absent' in the text, found no match"),
        (["--generate", "2", "--continuation", "c.txt"], "not allowed with argument"),
    ],
)
def test_bad_command_lines(
    change: list[str], message: str, model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model_folder("llama"), tmp_path / "t.h5", *change)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("kvreplay: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_trace_names_no_folder_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-1b.Q8_0.gguf").touch()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    for model in (tmp_path / "tiny-1b.Q8_0.gguf", "../tiny-1b.Q8_0.gguf"):
        assert Source.parse(str(model)).title == "tiny-1b.Q8_0"
    for model in (tmp_path / "tiny", "../tiny/", "."):
        assert Source.parse(str(model)).title == "tiny"
    assert Source.parse("maker/tiny").title == "maker/tiny"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("nowhere.gguf", "no such file"),
        ("text.gguf", "a file of another format"),
        ("folder", "no config.json"),
        ("file.bin", "another file"),
        ("nowhere", "no such file or folder"),
    ],
)
def test_a_model_without_files_is_refused_before_torch_is_imported(model: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("text.gguf", "file.bin"):
        (tmp_path / name).write_text("text")
    command = [sys.executable, "-c", WITHOUT_TORCH, *words(tmp_path / model, tmp_path / "t.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("kvreplay: --model: ") and done.stderr.endswith(f", found {found}\n")


def test_incomplete_weights_are_refused_before_torch_is_imported(model_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged, found in (
        (b"version https://git-lfs.github.com/spec/v1\n", "43 bytes without a complete header"),
        (whole[:-5], f"{len(whole) - 5:,} bytes of {len(whole):,}"),
        (whole[:8] + b"x" * (len(whole) - 8), f"{len(whole):,} bytes without a complete header"),
        (b"", "0 bytes without a complete header"),
    ):
        weights.write_bytes(damaged)
        command = [sys.executable, "-c", WITHOUT_TORCH, *words(folder, tmp_path / "t.h5")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 3
        assert done.stderr == (
            f"kvreplay: --model: {weights}: expected a complete safetensors file (git lfs pull, or download it again), "
            f"found {found}\n"
        )


def test_an_incomplete_gguf_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    writer = GGUFWriter(model, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1])
    writer.add_tensor("quantised", np.zeros((3, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    writer.close()
    whole = model.read_bytes()
    Source.parse(str(model)).require_model()
    last = max(GGUFReader(model).tensors, key=lambda tensor: tensor.data_offset)
    end = int(last.data_offset + last.n_bytes)
    for damaged, found in (
        (whole[: end - 1], f"{end - 1:,} bytes of {end:,}"),
        (whole[:40], "40 bytes without a complete header"),
        (whole[:16] + b"\xff" * 8 + whole[24:], f"{len(whole):,} bytes without a complete header"),
    ):
        model.write_bytes(damaged)
        command = [sys.executable, "-c", WITHOUT_TORCH, *words(model, tmp_path / "t.h5")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (3, (
            f"kvreplay: --model: {model}: expected a complete gguf file (git lfs pull, or download it again), "
            f"found {found}\n"
        ))  # fmt: skip


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_damaged_index_of_weights_is_refused(text: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    command = [sys.executable, "-c", WITHOUT_TORCH, *words(folder, tmp_path / "t.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = (
        f"{folder}/model.safetensors.index.json: expected an index of weights with weight_map, found another text"
    )
    assert (done.returncode, done.stderr) == (3, f"kvreplay: --model: {expected}\n")


def test_a_hub_that_does_not_answer_and_an_empty_prompt_are_refused_before_torch_is_imported(
    model_folder: Folder, tmp_path: Path
) -> None:
    for model, prompt, expected in (
        (
            "maker/none",
            "text",
            "--model: maker/none: expected a file, a folder, or a model in the cache or on the hub, found ",
        ),
        (model_folder("llama"), "", "prompt: prompt: expected at least one token, found an empty text"),
    ):
        arguments = ["--model", str(model), "--prompt", prompt, "-o", str(tmp_path / "t.h5")]
        hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **hub})
        assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
        assert done.stderr.startswith(f"kvreplay: {expected}")


def test_a_chat_template_and_layers_are_required_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no weights: reading them would be another error."""
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert main(words(tmp_path, tmp_path / "t.h5", "--layers", "1-2,99-110")) == 2
    last = SIZES["num_hidden_layers"] - 1
    expected = f"layers of this model with attention, of 0 to {last}, found 99, 100, 101, 102 and 8 more\n"
    assert capsys.readouterr().err == f"kvreplay: --layers: no such layer: expected {expected}"
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert main(words(tmp_path, tmp_path / "t.h5", "--chat")) == 3
    expected = "kvreplay: --chat: chat template: expected a model with a chat template, or no --chat, found none\n"
    assert capsys.readouterr().err == expected


def test_a_chat_template_that_is_not_applied_is_noted(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = tmp_path / "model"
    shutil.copytree(model_folder("llama"), without)
    (without / "chat_template.jinja").unlink()
    for model, more, count in (
        (model_folder("llama"), [], 1),
        (model_folder("llama"), ["--chat"], 0),
        (model_folder("llama"), ["-q"], 0),
        (without, [], 0),
    ):
        assert main(words(model, tmp_path / "t.h5", "--force", *more)) == 0
        assert capsys.readouterr().err.count(f"kvreplay: capture: {CHAT_NOTE}\n") == count, (model, more)


def test_a_missing_package_is_named(model_folder: Folder, tmp_path: Path) -> None:
    """torch cannot be found: exit 4. The line before says that the model is being loaded."""
    arguments = words(model_folder("llama"), tmp_path / "t.h5", "--progress", "auto")  # stderr is a pipe
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    loading = f"kvreplay: capture: loading {model_folder('llama').name}\n"
    said = "kvreplay: capture: torch is not installed; run pip install 'kvreplay[capture]'\n"
    assert done.stderr == loading + said


def test_printed_lines_are_as_wide_as_the_terminal(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--model", str(model_folder("llama")), "--prompt", "Rain " * 9, "-o", "t.h5", "--progress", "never"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert heads == ["trace", "rope", "verify", "memory", "next"] and len(lines) > len(heads)


def test_progress_in_a_pipe(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading, each prompt, and layers: the first and the last one, and every one where each takes long enough."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "Rain " * 9}) + "\n" for _ in range(2)))
    arguments = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "-n", "2", "--generate", "3"]

    def printed(*more: str) -> list[str]:
        assert main([*arguments, "-o", str(tmp_path / "traces"), "--force", *more]) == 0
        return [line.removeprefix("kvreplay: capture: ") for line in capsys.readouterr().err.splitlines()]

    name = model_folder("llama").name

    def expected(layers: list[int]) -> list[str]:
        lines = [f"loading {name}", "loaded in TIME"]
        for number, prompt in enumerate(("p-000", "p-001"), start=1):
            lines.append(f"{prompt}: prompt {number} of 2, generating 3 tokens")
            lines += [f"{prompt}: {layer} of 4 layers written" for layer in layers]
        return [*lines, CHAT_NOTE]

    def without_time(lines: list[str]) -> list[str]:
        return [re.sub(r"in \d[\d.]* s$", "in TIME", line) for line in lines]

    assert without_time(printed()) == expected([1, 4])
    monkeypatch.setattr("kvreplay.capture.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert without_time(printed()) == expected([1, 2, 3, 4])
    assert printed("--progress", "never") == [CHAT_NOTE]
    assert printed("-q") == []


def test_defaults_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kvreplay.yaml sets device and threads, below the command line."""

    def taken(*words: str) -> tuple[str | None, int | None]:
        arguments = parser().parse_args(["--model", "m", "--prompt", "a", "-o", "t.h5", *words])
        take_user_defaults("capture", arguments)
        return arguments.device, arguments.threads

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert taken() == (None, None) and capsys.readouterr().err == ""
    Path("kvreplay.yaml").write_text("device: cuda:1\nthreads: 3\noutput: out\n")
    assert taken() == ("cuda:1", 3)
    said = f"kvreplay: capture: defaults from {tmp_path}/kvreplay.yaml: --device cuda:1 --threads 3\n"
    assert capsys.readouterr().err == said
    assert taken("--device", "cpu", "--threads", "2") == ("cpu", 2)
    assert taken("--device-map", "auto") == (None, 3)
    Path("kvreplay.yaml").write_text("device: gpu\n")
    with pytest.raises(Error, match="kvreplay.yaml:1: device: expected auto, cpu.* found 'gpu'"):
        taken()
