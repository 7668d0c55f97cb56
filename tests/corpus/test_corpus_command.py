"""Does tools/corpus capture what is missing, and only that, and list what is there?"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

pytest.importorskip("torch", reason="the corpus needs tools/setup build python")
pytest.importorskip("transformers", reason="the corpus needs tools/setup build python")

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save

import kvreplay as kv
from kvreplay.capture import capture as one_capture
from kvreplay.capture import corpus, ruler
from kvreplay.capture.prompts import Message, Prompt
from kvreplay.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
OTHER = "incomplete, or has another prompt, model or setting: captured again"
NEEDLE = "The lamp is green."
PROMPTS = [
    Prompt("needle-60-d50", f"The tide was late. {NEEDLE} It rained.", "What is green?", ("lamp",), NEEDLE),
    Prompt("question-1", "The boat came at noon.", "When did the boat come?", ("at noon",)),
    Prompt.conversation("chat-1", [Message("user", "Hello."), Message("assistant", "Yes?"), Message("user", "Why?")]),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # tiny matrices are slower on many
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> list[Prompt]:
    """The corpus is these few, which a test may change, of a tiny model."""
    some = list(PROMPTS)
    monkeypatch.setattr(corpus, "full_prompts", lambda: list(some))
    monkeypatch.setattr(corpus, "MODEL", tiny_model)
    return some


def manifest(folder: Path) -> list[dict[str, str]]:
    with open(folder / "corpus.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_second_call_does_nothing(
    prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "corpus"
    assert corpus.main(["-o", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"corpus: 0 of 3 traces are in {out}" in said and "3 of 3  chat-1" in said
    assert sorted(times(out)) == ["chat-1.h5", "corpus.csv", "needle-60-d50.h5", "question-1.h5"]
    before = times(out)
    monkeypatch.setattr(corpus, "capture_all", None)  # would fail if it were called
    assert corpus.main(["-o", str(out)]) == 0
    assert times(out) == before
    assert capsys.readouterr().err == f"corpus: 3 of 3 traces are in {out}\n"


def test_the_list(prompts: list[Prompt], tmp_path: Path) -> None:
    """In the corpus's order, of whatever is there, with the files' own sizes and hashes."""
    assert corpus.main(["-o", str(tmp_path), "chat"]) == 0
    assert [row["name"] for row in manifest(tmp_path)] == ["chat-1"]
    assert corpus.main(["-o", str(tmp_path), "needle", "question"]) == 0
    rows = manifest(tmp_path)
    assert [(row["name"], row["kind"]) for row in rows] == [
        ("needle-60-d50", "needle"),
        ("question-1", "question"),
        ("chat-1", "chat"),
    ]
    for row, prompt in zip(rows, prompts, strict=True):
        path = tmp_path / f"{prompt.name}.h5"
        frame = "[user] \n[reply] " if not prompt.messages else "[user] Hello.\n[user] Yes?\n[user] \n[reply] "
        text = prompt.question if prompt.messages else prompt.text
        assert int(row["prompt_tokens"]) == len(frame + text)  # a character is a token
        assert int(row["continuation_tokens"]) == corpus.GENERATED == 32
        assert int(row["bytes"]) == path.stat().st_size
        assert row["trace_hash"] == kv.Trace(path).hash
        assert row["file_hash"] == xxhash.xxh3_128_hexdigest(path.read_bytes())
    context = PROMPTS[0].context
    assert float(rows[0]["needle_depth"]) == pytest.approx(context.index(NEEDLE) / len(context), abs=5e-4)
    assert rows[1]["needle_depth"] == rows[2]["needle_depth"] == ""
    assert len({row["file_hash"] for row in rows}) == 3


@pytest.mark.parametrize(
    "harm", ["changed question", "shorter context", "changed answer", "changed role", "truncated", "damaged", "gone"]
)
def test_what_does_not_hold_its_prompt_is_captured_again(
    harm: str, prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert corpus.main(["-o", str(tmp_path)]) == 0
    assert "again" not in capsys.readouterr().err
    before, listed = times(tmp_path), manifest(tmp_path)
    place = 2 if harm == "changed role" else 1
    path = tmp_path / f"{prompts[place].name}.h5"
    if harm == "changed question":
        prompts[1] = Prompt("question-1", PROMPTS[1].context, "When did the boat come in?", ("at noon",))
    elif harm == "shorter context":  # part of the one that is there
        prompts[1] = Prompt("question-1", "The boat came", PROMPTS[1].question)
    elif harm == "changed answer":
        prompts[1] = replace(PROMPTS[1], answers=("noon",))
    elif harm == "changed role":
        first, *others = PROMPTS[2].messages
        prompts[2] = replace(PROMPTS[2], messages=(replace(first, role="system"), *others))
    elif harm == "truncated":
        os.truncate(path, 20000)
    elif harm == "damaged":
        content = bytearray(path.read_bytes())
        content[len(content) // 3 : 2 * len(content) // 3] = bytes(2 * len(content) // 3 - len(content) // 3)
        path.write_bytes(content)
    else:
        path.unlink()
    assert corpus.main(["-o", str(tmp_path)]) == 0
    after = times(tmp_path)
    assert {name for name in after if after[name] != before[name]} - {"corpus.csv"} == {path.name}
    assert (f"corpus: {path.name} is {OTHER}\n" in capsys.readouterr().err) == (harm != "gone")
    with Trace(path) as trace:
        assert (prompts[1].text if place == 1 else PROMPTS[2].question) in trace.text
    rows = manifest(tmp_path)
    assert rows[:place] + rows[place + 1 :] == listed[:place] + listed[place + 1 :]
    assert rows[place]["file_hash"] == xxhash.xxh3_128_hexdigest(path.read_bytes())


@contextmanager
def interrupted_at_question_1() -> Iterator[None]:
    """Captures of that prompt end as if somebody had pressed Ctrl-C."""
    whole = one_capture.capture

    def interrupted(*arguments):
        if arguments[2].name == "question-1":
            raise KeyboardInterrupt
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one_capture, "capture", interrupted)
        yield


def test_an_interrupted_call_goes_on(prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with interrupted_at_question_1():
        assert corpus.main(["-o", str(tmp_path)]) == 130
    expected = "kvreplay: corpus: interrupted; finished traces are kept; run the same command to continue"
    assert capsys.readouterr().err.splitlines()[-1] == expected
    before = times(tmp_path)
    assert sorted(before) == ["corpus.csv", "needle-60-d50.h5"]
    assert corpus.main(["-o", str(tmp_path)]) == 0
    before.pop("corpus.csv")
    assert times(tmp_path).items() > before.items() and len(manifest(tmp_path)) == 3


@pytest.fixture
def left_behind(prompts: list[Prompt], tmp_path: Path) -> Path:
    """question-1.h5, of a call that was killed before the trace had its row."""
    whole = corpus.Manifest.add

    def killed(*arguments):
        if arguments[1].name == "question-1":
            raise KeyboardInterrupt
        whole(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus.Manifest, "add", killed)
        assert corpus.main(["-o", str(tmp_path)]) == 130
    assert [row["name"] for row in manifest(tmp_path)] == ["needle-60-d50"]
    return tmp_path / "question-1.h5"


def test_a_trace_without_its_row_gets_it(left_behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, before = left_behind.parent, times(left_behind.parent)
    assert corpus.main(["-o", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "corpus: question-1.h5 exists, is complete and matches its prompt: listed, not captured again\n" in said
    assert f"corpus: 2 of 3 traces are in {folder}\n" in said and "1 of 1  chat-1" in said
    assert times(folder)["question-1.h5"] == before["question-1.h5"]
    rows = manifest(folder)
    assert [row["name"] for row in rows] == ["needle-60-d50", "question-1", "chat-1"]
    left_behind.unlink()
    assert corpus.main(["-o", str(folder)]) == 0
    [captured] = [row for row in manifest(folder) if row["name"] == "question-1"]
    assert rows[1] | {"file_hash": ""} == captured | {"file_hash": ""}  # the time of writing is in the file


@pytest.mark.parametrize("harm", ["another prompt", "a number"])
def test_a_trace_without_its_row_that_does_not_hold_its_prompt_is_captured_again(
    harm: str, left_behind: Path, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]
) -> None:
    if harm == "another prompt":
        prompts[1] = replace(PROMPTS[1], question="When did the boat come in?")
    else:
        with h5py.File(left_behind, "r+") as file:
            file["layers/001/v"][0, 3, 0] += 1
    before = times(left_behind.parent)
    capsys.readouterr()
    assert corpus.main(["-o", str(left_behind.parent)]) == 0
    assert f"corpus: question-1.h5 is {OTHER}\n" in capsys.readouterr().err
    after = times(left_behind.parent)
    assert after["question-1.h5"] != before["question-1.h5"]
    assert after["needle-60-d50.h5"] == before["needle-60-d50.h5"]
    with Trace(left_behind) as trace:
        assert prompts[1].question in trace.text and trace.problems() == []


def test_a_trace_that_somebody_captured_under_our_name_stays(
    left_behind: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even of the same prompt."""
    with h5py.File(left_behind, "r+") as file:
        file.attrs["producer"] = np.bytes_("kvreplay 0.1.0")  # of `kvreplay capture`
    before = times(left_behind.parent)
    assert corpus.main(["-o", str(left_behind.parent)]) == 2
    assert capsys.readouterr().err.startswith(f"kvreplay: {left_behind}: output: expected no file of this name")
    assert times(left_behind.parent) == before


def test_another_model_is_noticed(prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert corpus.main(["-o", str(tmp_path / "out"), "chat"]) == 0
    before = times(tmp_path / "out")
    model = shutil.copytree(corpus.MODEL, tmp_path / "model")
    [weights] = model.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, weights, metadata={"format": "pt"})
    monkeypatch.setattr(corpus, "MODEL", model)
    assert corpus.main(["-o", str(tmp_path / "out"), "chat"]) == 0
    assert times(tmp_path / "out")["chat-1.h5"] != before["chat-1.h5"]


def test_rows_are_true_after_an_interrupted_call(prompts: list[Prompt], tmp_path: Path) -> None:
    """A row of before would not be true of the file that has another text now."""
    assert corpus.main(["-o", str(tmp_path)]) == 0
    needle = tmp_path / "needle-60-d50.h5"
    prompts[0] = replace(PROMPTS[0], context=f"{NEEDLE} The tide was late. It rained.")
    prompts[1] = replace(PROMPTS[1], question="When did the boat sink?")

    with interrupted_at_question_1():
        assert corpus.main(["-o", str(tmp_path)]) == 130
    rows = manifest(tmp_path)
    assert [row["name"] for row in rows] == ["needle-60-d50", "chat-1"]
    assert not (tmp_path / "question-1.h5").exists()
    assert rows[0]["needle_depth"] == "0.000"
    assert rows[0]["file_hash"] == xxhash.xxh3_128_hexdigest(needle.read_bytes())


def test_a_row_whose_file_is_another_goes(prompts: list[Prompt], tmp_path: Path) -> None:
    """Of kinds that were not asked for."""
    assert corpus.main(["-o", str(tmp_path)]) == 0
    path = tmp_path / "needle-60-d50.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert corpus.main(["-o", str(tmp_path), "chat"]) == 0
    assert [row["name"] for row in manifest(tmp_path)] == ["question-1", "chat-1"]


def test_a_file_that_is_not_listed_stays(
    prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "chat-1.h5"
    own.write_text("mine")
    assert corpus.main(["-o", str(tmp_path)]) == 2
    expected = f"no file of this name, or a file listed in {tmp_path}/corpus.csv or written by this program"
    assert capsys.readouterr().err == f"kvreplay: {own}: output: expected {expected}, found another file\n"
    assert own.read_text() == "mine" and list(tmp_path.iterdir()) == [own]


def test_a_disk_too_small_is_refused_before_anything_is_captured(
    prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 2000))
    assert corpus.main(["-o", str(tmp_path)]) == 5
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"kvreplay: {tmp_path}: too little disk space: expected 0 MB, found")
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "questions",
            "corpus: kind: expected one of needle, question, arithmetic, summary, code, chat, found questions",
        ),
        ("--smal", "corpus: unknown option --smal: did you mean --small?"),
        (
            "--ruler needle",
            "corpus: task: expected one of niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, "
            "niah_multikey_2, niah_multikey_3, niah_multivalue, niah_multiquery, vt, fwe, found needle",
        ),
        ("--tokens 500", "corpus: --tokens: expected --ruler, whose prompts have these lengths, found no --ruler"),
        (
            "--ruler --tokens 1000,x",
            "corpus: argument --tokens: expected numbers of tokens like 1000,2000, found '1000,x' "
            "(see tools/corpus --help)",
        ),
        ("-o note.txt", "-o: note.txt: expected a writable folder, found [Errno 17] File exists: 'note.txt'"),
    ],
)
def test_bad_words(
    words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").touch()
    assert corpus.main(words.split()) == 2
    assert capsys.readouterr().err == f"kvreplay: {line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@pytest.fixture
def long_model(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model with 4,096 positions: a character is a token."""
    folder = save(tmp_path_factory.mktemp("long"), "llama")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    monkeypatch.setattr(corpus, "MODEL", folder)
    return folder


def test_ruler(
    long_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks at their lengths as plain text, then the answers, and greedy text up to 64 tokens."""
    assert corpus.main(["--ruler", "--tokens", "2000,1500", "vt", "niah_multiquery", "-o", str(tmp_path)]) == 0
    rows = manifest(tmp_path)
    expected = ["niah_multiquery-1500", "niah_multiquery-2000", "vt-1500", "vt-2000"]
    assert [row["name"] for row in rows] == expected
    assert [row["kind"] for row in rows] == ["niah_multiquery"] * 2 + ["vt"] * 2
    prompts = {prompt.name: prompt for prompt in ruler.ruler_prompts((1500, 2000), list(ruler.TASKS), len)}
    for row in rows:
        prompt, asked = prompts[row["name"]], int(row["name"].rpartition("-")[2])
        assert asked - 250 < int(row["prompt_tokens"]) <= asked and row["continuation_tokens"] == "64"
        with Trace(tmp_path / f"{prompt.name}.h5") as trace:
            assert trace.text.startswith(prompt.text + " " + ", ".join(prompt.answers))
            assert {span.kind for span in trace.spans} == {"context", "needle", "question", "answer"}
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert answers == [{"name": name, "answers": list(prompts[name].answers)} for name in expected]

    before = times(tmp_path)
    monkeypatch.setattr(corpus, "capture_all", None)  # would fail if it were called
    assert corpus.main(["--ruler", "--tokens", "1500", "vt", "-o", str(tmp_path)]) == 0
    assert times(tmp_path) == before
    assert capsys.readouterr().err.endswith(f"corpus: 1 of 1 traces are in {tmp_path}\n")


@pytest.mark.parametrize("content", ["mine", "[1]\n", '{"name": "x"}\n', "5\n", '"text"\n'])
def test_answers_that_this_program_did_not_write_stay(
    content: str, long_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "answers.jsonl"
    own.write_text(content)
    assert corpus.main(["--ruler", "--tokens", "1500", "vt", "-o", str(tmp_path)]) == 2
    expected = "no file of this name, or a file written by this program"
    assert capsys.readouterr().err == f"kvreplay: {own}: output: expected {expected}, found another file\n"
    assert own.read_text() == content and list(tmp_path.iterdir()) == [own]


def test_ruler_s_lengths_are_those_of_the_model_s_tokens(long_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks at the four default lengths, unless some are named."""
    asked = []
    monkeypatch.setattr(ruler, "ruler_prompts", lambda *arguments: asked.append(arguments) or [])
    monkeypatch.setattr(corpus, "Manifest", lambda folder: pytest.skip("enough"))
    with pytest.raises(pytest.skip.Exception):
        corpus.main(["--ruler", "-o", str(long_model / "out")])
    [(lengths, tasks, count)] = asked
    assert lengths == (500, 1000, 2000, 4000) and tasks == list(ruler.TASKS) and count("seven 7") == 7


def test_a_source_is_of_all_that_makes_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, plain = corpus.Settings(chat=True, generated=32), corpus.Settings(chat=False, generated=32)
    prompt = Prompt("n", "c")
    parts = {"name": "n", "context": "c", "question": "", "answers": (), "needle": "", "messages": ()}
    parts["continuation"] = ""
    made_from = json.dumps([parts, "hash", corpus.MODEL_NAME, corpus.COMPUTED_IN, corpus.STORED_IN, 32])
    source = corpus.source_digest(prompt, "hash", chat)
    assert source == xxhash.xxh3_128_hexdigest(made_from.encode())
    sources = [
        source,
        corpus.source_digest(prompt, "other", chat),
        corpus.source_digest(Prompt("n", "c", continuation="x"), "hash", chat),
        corpus.source_digest(prompt, "hash", plain),
        corpus.source_digest(prompt, "hash", replace(chat, generated=64)),
    ]
    monkeypatch.setattr(corpus, "COMPUTED_IN", "float16")
    sources.append(corpus.source_digest(prompt, "hash", chat))
    monkeypatch.setattr(corpus, "STORED_IN", "float16")
    sources.append(corpus.source_digest(prompt, "hash", chat))
    assert len(set(sources)) == len(sources)
    assert corpus.source_digest(prompt, "hash", chat) == sources[-1]


@pytest.mark.skipif(not (ROOT / "build/model/smollm2-135m-instruct.gguf").exists(), reason="needs tools/setup model")
def test_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One short real trace, and in it the conversation's spans."""
    prompt = Prompt.conversation("chat-small-1", PROMPTS[2].messages)
    monkeypatch.setattr(corpus, "small_prompts", lambda: [prompt])
    monkeypatch.setattr(corpus, "GENERATED", 2)
    assert corpus.main(["--small", "chat", "-o", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == "" and f"corpus: 0 of 1 traces are in {tmp_path}\n" in said.err
    path = tmp_path / "chat-small-1.h5"
    with Trace(path) as trace:
        text, offsets = trace.text, trace["/tokens/offsets"]
        spans = {span.kind: text[offsets[span.begin][0] : offsets[span.end - 1][1]] for span in trace.spans}
        template = "<|im_end|>\n<|im_start|>assistant\n"
        assert spans == {"context": f"Hello.{template}Yes?", "question": "Why?"}
        assert (trace.layers, trace.tokens - trace.prompt) == (30, 2)
    program = ROOT / "build" / "release" / "kvreplay"
    if program.exists():
        subprocess.run([program, "validate", path], check=True, capture_output=True)
