"""Do prompts, offsets and spans say where in the text each token is?"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tiny_models import character_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvreplay.capture.command import main
from kvreplay.capture.prompts import Message, Prompt, encode, fit, read_prompts, render
from kvreplay.capture.spans import SpanRequest, decode_with_offsets, find_spans
from kvreplay.errors import Error
from kvreplay.trace import Span, Trace, TraceWriter

TEXT = "The key hangs behind the green lamp. Größe, 世界 and 😀! The end.\n"
ROW = {
    "context": "Much is said here. The key hangs behind the green lamp. More is said.",
    "input": "Where does the key hang?",
    "answers": ["under the mat", "behind the green lamp"],
    "needle": "The key hangs behind the green lamp.",
}


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with few merges: characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.encode("ascii", "ignore").decode()] * 4, trainer)
    return tokenizer


def sentence_tokenizer() -> Tokenizer:
    """Words that carry their space in front, which is dropped at the start of a text."""
    words = ["▁The", "▁key", "▁hangs", "▁behind", "s", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_offsets_of_bytes_map_back_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    encoded = tokenizer.encode(TEXT)
    text, offsets = decode_with_offsets(lambda ids: tokenizer.decode(list(ids)), encoded.ids)
    assert text == TEXT
    assert any(one == other for one, other in zip(offsets, offsets[1:], strict=False))  # a shared character
    covered = [0] * len(text)
    for begin, end in set(offsets):
        for character in range(begin, end):
            covered[character] += 1
    assert covered == [1] * len(text)
    # Where a token is whole characters, its own text stands at its offsets.
    for token, (begin, end) in zip(encoded.ids, offsets, strict=True):
        alone = tokenizer.decode([token])
        if "\ufffd" not in alone:
            assert text[begin:end] == alone


def test_offsets_of_words_with_their_space() -> None:
    tokenizer = sentence_tokenizer()
    text, offsets = decode_with_offsets(lambda ids: tokenizer.decode(list(ids)), [0, 1, 4, 2, 5])
    assert text == "The keys hangs."
    assert [text[begin:end] for begin, end in offsets] == ["The", " key", "s", " hangs", "."]


def test_offsets_of_broken_bytes_stay_in_order() -> None:
    tokenizer = byte_tokenizer()
    generator = random.Random(1)
    ids = [generator.randrange(tokenizer.get_vocab_size()) for _ in range(500)]
    text, offsets = decode_with_offsets(lambda some: tokenizer.decode(list(some)), ids)
    assert len(offsets) == 500
    assert all(0 <= begin <= end <= len(text) for begin, end in offsets)
    assert all(one[0] <= other[0] for one, other in zip(offsets, offsets[1:], strict=False))
    assert offsets[-1][1] == len(text)


def test_spans_by_text_and_by_regex() -> None:
    text = "say key, then key again: 42"
    offsets = [(i, i + 1) for i in range(len(text))]
    requests = [
        SpanRequest.parse(argument) for argument in ("first=key", "last:question=key", r"answer=/again: (\d+)/")
    ]
    spans = find_spans(Prompt("p", text), "", requests, text, offsets, len(text))
    assert spans == [Span("first", "first", 4, 7), Span("last", "question", 14, 17), Span("answer", "answer", 25, 27)]
    for argument in ("nothing", "=text", "name=", "name=/(/"):
        with pytest.raises(Error) as refusal:
            SpanRequest.parse(argument)
        assert refusal.value.exit_code == 2
    with pytest.raises(Error, match="no match"):
        find_spans(Prompt("p", text), "", [SpanRequest.parse("x=elsewhere")], text, offsets, len(text))


def write_prompts(folder: Path, ending: str) -> Path:
    path = folder / f"prompts.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({"prompt": "second"}) + "\n", "utf-8")
    elif ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW, {**ROW, "context": "second"}]), path)
    else:
        path.write_text(ROW["context"] + "\n", "utf-8")
    return path


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_prompt_files(ending: str, tmp_path: Path) -> None:
    path = write_prompts(tmp_path, ending)
    prompts = read_prompts(path, None)
    assert [prompt.context for prompt in prompts] == [ROW["context"]] + ["second"] * (ending != "txt")
    assert len(read_prompts(path, 1)) == 1
    if ending != "txt":
        assert prompts[0].text == f"{ROW['context']}\n\n{ROW['input']}"
        assert prompts[0].answers == tuple(ROW["answers"])
        assert prompts[0].needle == ROW["needle"]


def test_every_form_of_row_may_have_a_continuation(tmp_path: Path) -> None:
    """With its first space; an empty one and none are the same."""
    messages = [{"role": "user", "content": "Why?"}]
    rows = [{"prompt": "x"}, {"text": "x"}, {"context": "x", "input": "y"}, {"messages": messages}]
    lines = [json.dumps(row | {"continuation": " It is."}) for row in rows]
    lines += [json.dumps(rows[0] | {"continuation": none}) for none in ("", None)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), "utf-8")
    assert [prompt.continuation for prompt in read_prompts(tmp_path / "p.jsonl", None)] == [" It is."] * 4 + [""] * 2


@pytest.mark.parametrize(
    ("options", "tokens", "forced"),
    [
        ([], 8, " heron 4"),
        (["--generate", "5"], 5, " hero"),
        (["--generate", "8"], 8, " heron 4"),
        (["--generate", "14"], 14, " heron 4"),
        (["--continuation", "other.txt"], 3, "one"),
    ],
    ids=["whole", "cut", "exact", "greedy after it", "replaced"],
)
def test_a_row_s_continuation_is_forced(
    options: list[str],
    tokens: int,
    forced: str,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A character is a token. Greedy text after a shorter continuation is that of the prompt with the continuation."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(json.dumps(ROW | {"continuation": " heron 4"}) + "\n", "utf-8")
    Path("other.txt").write_text("one", "utf-8")
    model = ["--model", str(model_folder("llama")), "--progress", "never"]
    assert main([*model, "--prompts", "p.jsonl", *options, "-o", "t.h5"]) == 0
    trace = Trace(Path("t.h5"))
    text = f"{ROW['context']}\n\n{ROW['input']}"
    assert trace.prompt == len(text) and trace.tokens - trace.prompt == tokens
    assert trace.text.startswith(text + forced)
    if tokens > len(forced):
        greedy = [*model, "--prompt", text + forced, "--generate", str(tokens - len(forced)), "-o", "greedy.h5"]
        assert main(greedy) == 0
        assert Trace(Path("greedy.h5"))["/tokens/ids"].tolist() == trace["/tokens/ids"].tolist()


def test_a_line_of_json_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one\u2028line"}\n', "utf-8")
    assert [prompt.context for prompt in read_prompts(tmp_path / "p.jsonl", None)] == ["one\u2028line"]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("p.csv", "a,b", 2),
        ("p.jsonl", "{", 3),
        ("p.jsonl", "[1]", 3),
        ("p.jsonl", '{"input": "x"}', 3),
        ("p.jsonl", '{"context": "x", "answers": 5}', 3),
        ("p.jsonl", '{"context": "x", "answers": [5]}', 3),
        ("p.jsonl", '{"context": "x", "input": ["q"]}', 3),
        ("p.jsonl", '{"context": "x", "continuation": 5}', 3),
        ("p.jsonl", '{"context": "x", "continuation": ["y"]}', 3),
        ("p.jsonl", '{"context": "x", "messages": [{"role": "user", "content": "x"}]}', 3),
        ("p.jsonl", "", 3),
        ("p.parquet", "not parquet", 3),
        ("missing.txt", None, 3),
    ],
)
def test_bad_prompt_files(name: str, content: str | None, code: int, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(Error) as refusal:
        read_prompts(tmp_path / name, None)
    assert refusal.value.exit_code == code


def test_a_long_prompt_loses_the_middle_of_its_context() -> None:
    tokenizer = character_tokenizer()
    prompt = Prompt("p", "".join(str(i % 10) for i in range(200)), "why?")
    whole = encode(tokenizer, prompt, chat=True)
    cut, ids = fit(tokenizer, prompt, True, len(whole) - 60)
    assert len(ids) == len(whole) - 60
    assert cut.context == prompt.context[:70] + prompt.context[130:]
    assert tokenizer.decode(ids).endswith("why?\n[reply] ")
    with pytest.raises(Error) as refusal:
        fit(tokenizer, prompt, True, 12)
    assert refusal.value.exit_code == 2


def test_a_row_becomes_a_trace_with_its_spans(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "jsonl")
    out = tmp_path / "t.h5"
    words = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "--chat", "--generate", "4"]
    assert main([*words, "-o", str(out), "--progress", "never", "--span", "more:context=/More (is) said/"]) == 0
    trace = Trace(out)
    offsets = trace["/tokens/offsets"]
    found = {
        span.name: (span.kind, trace.text[offsets[span.begin][0] : offsets[span.end - 1][1]]) for span in trace.spans
    }
    assert found == {
        "context": ("context", ROW["context"]),
        "needle": ("needle", ROW["needle"]),
        "question": ("question", ROW["input"]),
        "answer": ("answer", ROW["answers"][1]),
        "more": ("context", "is"),
    }
    prompt_end = offsets[trace.prompt - 1][1]
    assert trace.text[:prompt_end] == f"[user] {ROW['context']}\n\n{ROW['input']}\n[reply] "


def test_several_prompts_fill_a_folder(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "jsonl")
    out = tmp_path / "traces"
    words = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "-n", "2", "--progress", "never"]
    assert main([*words, "-o", str(out)]) == 0
    assert [Trace(path).tokens for path in sorted(out.iterdir())] == [
        len(ROW["context"] + ROW["input"]) + 2,
        len("second"),
    ]
    assert main([*words, "-o", str(tmp_path / "one.h5")]) == 2


def test_a_text_longer_than_the_models_positions_is_refused(
    model_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long.h5"
    words = ["--model", str(model_folder("llama")), "--prompt", "heron " * 400, "-o", str(out), "--progress", "never"]
    assert main(words) == 3
    assert "prompt: too long for the model: expected at most 256 tokens (--max-tokens)" in capsys.readouterr().err
    assert not out.exists()


CONVERSATION = [
    {"role": "system", "content": "Keep the log."},
    {"role": "user", "content": "The key hangs behind the green lamp. Note it."},
    {"role": "assistant", "content": "behind the green lamp."},  # said before: pieces are sought in their order
    {"role": "user", "content": "Where does the key hang?"},
]


def write_conversation(folder: Path, messages: object, **columns: object) -> Path:
    path = folder / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages, **columns}) + "\n", "utf-8")
    return path


def test_a_conversation_becomes_a_trace_with_its_spans(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Through the chat template, asked for or not; the earlier turns are the context, the last is the question."""
    prompts = write_conversation(tmp_path, CONVERSATION, answers=["behind the green lamp"])
    for options in (["--chat"], []):
        out = tmp_path / f"t{len(options)}.h5"
        words = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "-o", str(out), *options]
        assert main([*words, "--progress", "never"]) == 0
        trace = Trace(out)
        turns = [f"[user] {message['content']}\n" for message in CONVERSATION]
        assert trace.text == "".join(turns) + "[reply] "
        offsets = trace["/tokens/offsets"]
        found = {span.name: trace.text[offsets[span.begin][0] : offsets[span.end - 1][1]] for span in trace.spans}
        assert found == {
            "context": "".join(turns[:3]).removeprefix("[user] ").rstrip("\n"),
            "question": "Where does the key hang?",
            "answer": "behind the green lamp",
        }


TEMPLATE = (  # of the form that many models have
    "{% if messages[0]['role'] != 'system' %}<|system|>You are an AI assistant named SmolLM.\n{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}\n{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize(
    ("contents", "context", "question"),
    [
        (["AI", "Yes?", "a"], "<|user|>AI\n<|assistant|>Yes?\n", "<|user|>a\n<|assistant|>"),
        ([" AI ", "", "s "], "<|user|>AI\n", "<|user|>s\n<|assistant|>"),
        (["assistant", "|", "assistant"], "<|user|>assistant\n<|assistant|>|\n", "<|user|>assistant\n<|assistant|>"),
        (["Why?"], "", "<|user|>Why?\n<|assistant|>"),
    ],
)
def test_short_messages_are_not_found_in_the_template(contents: list[str], context: str, question: str) -> None:
    """Each span is the message, whose place its surroundings here show."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    turns = [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    assert spans_of(tokenizer, Prompt.conversation("p", turns)) == {
        name: (inside, around)
        for name, inside, around in (
            ("context", context.removeprefix("<|user|>").removesuffix("\n"), context),
            ("question", contents[-1].strip(), question),
        )
        if around
    }


def test_a_short_question_and_context_of_one_turn() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert spans_of(tokenizer, Prompt("p", "AI", "a")) == {
        "context": ("AI", "<|user|>AI\n"),
        "question": ("a", "\n\na\n<|assistant|>"),
    }


def spans_of(tokenizer, prompt: Prompt) -> dict[str, tuple[str, str]]:
    """Each span's text, and with what is around it: from the last "<|user|>" or empty line to the next line's end."""
    ids = encode(tokenizer, prompt, chat=True)
    text, offsets = decode_with_offsets(tokenizer.decode, ids)
    found = {}
    for span in find_spans(prompt, render(tokenizer, prompt.marked(), True), (), text, offsets, len(ids)):
        before = "\n\n" if span.name == "question" and not prompt.messages else "<|user|>"
        after = "\n<|assistant|>" if span.name == "question" else "\n"
        begin, end = span.begin - len(before), span.end + len(after)
        found[span.name] = (text[span.begin : span.end], text[begin:end])
    return found


def test_conversations_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    rows = [{"messages": CONVERSATION, "context": None}, {"messages": None, "context": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    conversation, plain = read_prompts(path, None)
    assert conversation.messages == tuple(Message(**message) for message in CONVERSATION)
    assert (plain.context, plain.messages) == ("x", ())


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ("hello", "chat.jsonl:1: messages: expected a list of {role, content}, found 'hello'"),
        ([], "chat.jsonl:1: messages: expected a list of {role, content}, found an empty list"),
        (["hello"], "chat.jsonl:1: messages[0]: keys: expected role and content, found 'hello'"),
        ([{"role": "user"}], "chat.jsonl:1: messages[0]: keys: expected role and content, found role"),
        ([{}], "chat.jsonl:1: messages[0]: keys: expected role and content, found none"),
        (
            [{"role": "usr", "content": "x"}],
            "chat.jsonl:1: messages[0]: role: expected system or user or assistant, found 'usr'",
        ),
        ([{"role": "user", "content": None}], "chat.jsonl:1: messages[0]: content: expected a text, found None"),
        (
            [*CONVERSATION[:3]],
            "chat.jsonl:1: messages[2]: role: expected user in the last message, found assistant",
        ),
        (CONVERSATION[:1], "chat.jsonl:1: messages[0]: role: expected user in the last message, found system"),
        ([{"role": "user", "content": 5}], "chat.jsonl:1: messages[0]: content: expected a text, found 5"),
        (
            [{"role": "user", "content": ""}],
            "chat.jsonl:1: messages[0]: content: expected a non-empty text in the last message, found ''",
        ),
        (
            [*CONVERSATION[:3], {"role": "user", "content": " \n"}],
            "chat.jsonl:1: messages[3]: content: expected a non-empty text in the last message, found ' \\n'",
        ),
    ],
)
def test_bad_conversations(messages: object, refusal: str, tmp_path: Path) -> None:
    with pytest.raises(Error) as found:
        read_prompts(write_conversation(tmp_path, messages), None)
    assert str(found.value) == f"{tmp_path}/{refusal}"
    assert found.value.exit_code == 3


def test_conversations_that_a_model_cannot_take() -> None:
    [prompt] = [Prompt.conversation("chat-000", [Message(**message) for message in CONVERSATION])]
    tokenizer = character_tokenizer()
    length = len(encode(tokenizer, prompt, chat=False))
    with pytest.raises(
        Error, match=f"chat-000: messages cannot be shortened: expected at least {length}, found 20"
    ) as refusal:
        fit(tokenizer, prompt, False, 20)
    assert refusal.value.exit_code == 2
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(Error, match="chat-000: messages: .* accepts, found System role not supported") as refusal:
        encode(tokenizer, prompt, chat=False)
    assert refusal.value.exit_code == 3
    tokenizer.chat_template = None
    with pytest.raises(
        Error, match="chat-000: messages: chat template: expected a model with a chat template"
    ) as refusal:
        encode(tokenizer, prompt, chat=False)
    assert refusal.value.exit_code == 3


def test_one_writer_a_file(tmp_path: Path) -> None:
    first = TraceWriter(tmp_path / "t.h5")
    with pytest.raises(Error) as refusal:
        TraceWriter(tmp_path / "t.h5")
    assert refusal.value.exit_code == 3 and "another program is writing this file" in str(refusal.value)
    first.__exit__(Error, None, None)
    TraceWriter(tmp_path / "t.h5").__exit__(Error, None, None)
