"""`kvreplay capture`: options, messages and exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.capture.model_options import (
    DTYPES,
    LATENT_QUERIES,
    ModelChoices,
    add_device_options,
    add_model_options,
    count,
    members,
    natural,
    say_loading,
    shows_progress,
    take_user_defaults,
)
from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.program import Parser, exit_code, names, print_next_replay, say_notes, size
from kvreplay.sweep.options import add_executor
from kvreplay.sweep.progress import duration
from kvreplay.tables import wrapped

if TYPE_CHECKING:
    from kvreplay.capture.capture import Captured
    from kvreplay.capture.prompts import Prompt
    from kvreplay.capture.refusals import Layers
    from kvreplay.capture.rope import Rope

INDENT = " " * len("memory   ")  # of the second line of a fact
MOST_LAYERS = 65535  # of a trace
DESCRIPTION = """Captures queries, keys and values of a language model as a trace. The continuation is generated or
given; then one pass over all tokens computes the layers. Each layer is written as soon as it is computed and checked
against the attention output of the model."""
USAGE = "kvreplay capture --model MODEL --prompts FILE -o FILE|DIR [options]"
EXAMPLES = (
    "kvreplay capture --model ./model --prompts prompt.txt --generate 32 -o trace.h5",
    "kvreplay capture --model ./model --prompts longbench.jsonl -n 20 --device cuda -o traces/",
)


def _queries(text: str) -> int:
    """The last queries of the prompt; all: more than any prompt has."""
    match = re.fullmatch(r"last:([1-9]\d*)", text)
    if text != "all" and not match:
        raise argparse.ArgumentTypeError(f"expected all or last:N, found {text!r}")
    return int(match.group(1)) if match else sys.maxsize


def _layers(text: str) -> Layers:
    """0,3-5 -> {0, 3, 4, 5}; full -> full."""
    if text == "full":
        return "full"
    chosen: set[int] = set()
    for piece in names(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        begin, end = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if begin > end or end > MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"expected full, or numbers and ranges like 0,3-5, found {text!r}")
        chosen.update(range(begin, end + 1))
    return frozenset(chosen)


def parser() -> Parser:
    """The options; every one has its help."""
    build = Parser(prog="kvreplay capture", usage=USAGE, description=DESCRIPTION, examples=EXAMPLES, writes_files=True)
    add = build.add_argument
    add_model_options(build)
    add_device_options(build)
    texts = build.add_argument_group("prompts and continuation")
    source = texts.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=".txt (one prompt), .jsonl or .parquet (columns context, input, answers as LongBench; or prompt; or text; "
        "or messages, a conversation; optional: needle, continuation)",
    )
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    add = texts.add_argument
    add("--chat", action="store_true", help="apply the chat template of the model")
    add("-n", "--count", type=count, metavar="N", help="number of prompts to capture, from the first (default: 1)")
    add(
        "--only",
        type=names,
        action="extend",
        metavar="NAME,...",
        help="prompts to capture, by name: STEM-000, ..., STEM that of FILE",
    )
    add(
        "--max-tokens",
        type=count,
        metavar="N",
        help="limit on prompt tokens; truncates the context in the middle (default: none)",
    )
    continuation = texts.add_mutually_exclusive_group()
    continuation.add_argument(
        "--generate",
        type=natural,
        default=0,
        metavar="N",
        help="continue by N tokens: the row's continuation, cut to N tokens, then greedy decoding that ignores the "
        "end-of-text token (default: 0: the whole continuation of the row)",
    )
    continuation.add_argument(
        "--continuation",
        type=Path,
        metavar="FILE",
        help="continue by this text (teacher forcing), in place of the continuation of the row",
    )
    stored = build.add_argument_group("contents of the trace")
    add = stored.add_argument
    add("--name", help="name of the model in the trace (default: that of the hub, folder or file)")
    add(
        "--queries",
        type=_queries,
        metavar="all|last:N",
        help="queries to store: all, or the last N of the prompt and those of the continuation (default: all; of "
        f"latent attention, whose queries are long, last:{LATENT_QUERIES})",
    )
    add(
        "--layers",
        type=_layers,
        metavar="full|0,3-5",
        help="layers to store: those with full attention, or by number (default: all)",
    )
    add(
        "--span",
        action="append",
        default=[],
        metavar="NAME[:KIND]=TEXT|/REGEX/",
        help="mark the tokens of a text as a span of KIND, as needle or question (default: NAME); repeatable",
    )
    add(
        "--chunk",
        type=count,
        metavar="N",
        help="chunked prefill: N tokens per forward pass, with the KV cache, for long prompts (default: all at once)",
    )
    add(
        "--save-reference",
        action="store_true",
        help="store the 64 most probable tokens at each continuation token, and the total probability of the others",
    )
    add("--with-wo", action="store_true", help="also store the output projection W_o of each layer")
    add("--with-hidden", action="store_true", help="also store the hidden states at the input of each layer")
    add(
        "--reconstruct",
        choices=("chunks", "whole"),
        help="also store queries and keys of passes that repeat the prompt, which the policies kvzip and kvcompose "
        "read; chunks: an instruction and 2,000 tokens per pass (KVzip); whole: one pass, no instruction (KVCompose)",
    )
    add(
        "--reconstruct-at",
        metavar="prompt|N|span:NAME",
        help="end of the tokens that are repeated, as --boundary of replay (default: prompt)",
    )
    add("--store-dtype", choices=DTYPES, help="data type of the stored tensors (default: that of the computation)")
    add("--verify", action="store_true", help="check the attention output of all queries, not only of 64 per layer")
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE|DIR",
        help="trace to write, or a folder for several prompts",
    )
    add("--force", action="store_true", help="overwrite an existing trace")
    add("--seed", type=natural, default=0, metavar="N", help="random seed (default: 0)")
    add = build.add_argument_group("cluster").add_argument
    add_executor(add, None)
    add("--resume", action="store_true", help="keep existing traces and capture the other prompts")
    add("--memory", type=size, metavar="SIZE", help="memory of a job with --executor slurm, as 8GiB")
    return build


def _refuse_one_file(output: Path, prompts: int) -> None:
    """Rejects the name of a trace as the output of several prompts."""
    if prompts > 1 and output.suffix == ".h5":
        raise Error("-o", f"{prompts} prompts, one trace each", "a folder (-o FOLDER)", str(output), Refusal.USAGE)


def _outputs(output: Path, names: Sequence[str], several: bool, force: bool) -> list[Path]:
    """One path a prompt, each new (or --force), and their folder."""
    from kvreplay.trace import refuse_existing

    is_folder = output.is_dir() or several
    paths = [output / f"{name}.h5" for name in names] if is_folder else [output]
    for path in paths:
        refuse_existing(path, force)
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error("-o", str(output), "a writable folder", str(error), Refusal.USAGE) from error
    return paths


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _rotation(rope: Rope | None) -> str:
    """How many layers rotate, and how clearly the keys show it."""
    if rope is None:
        return "no layer has RoPE"
    rotating, layers = int(rope.inv_freq.any(axis=1).sum()), len(rope.inv_freq)
    return (
        f"{rotating} of {layers} layers have RoPE; smallest margin in layer {rope.closest.layer}: "
        f"error {rope.closest.error:.2e}, next best RoPE {rope.closest.next_best:.2e}"
    )


def _lines(captured: Captured, path: Path) -> Iterator[str]:
    """Yields the lines that describe a finished capture, wrapped to the width of the terminal."""
    worst = captured.worst
    facts = (
        f"prompt {captured.prompt_tokens} + continuation {captured.tokens - captured.prompt_tokens} tokens",
        f"{captured.layers} layers",
        f"{captured.query_heads} query / {captured.kv_heads} KV heads",
        captured.dtype,
        f"{path.stat().st_size / 1e6:.1f} MB",
    )
    yield from wrapped(f"trace    {path}  " + "   ".join(facts), INDENT)
    yield from wrapped(f"rope     {_rotation(captured.rope)}", INDENT)
    yield from wrapped(
        f"verify   {captured.checked_queries} queries per layer recomputed from the trace: largest deviation "
        f"{worst.found:.2e} of sum a|v|, rounding allows {worst.allowed:.2e} "
        f"(layer {worst.layer}, head {worst.head}, query {worst.position})",
        INDENT,
    )


def quiet_libraries(show: bool) -> None:
    """Silences progress bars, unless `show`, and advice of the libraries."""
    allow_bars(show)
    import torch  # noqa: F401  transformers would say that it is missing, in words of its own
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not show:
        transformers.logging.disable_progress_bar()


def allow_bars(show: bool) -> None:
    """Disables progress bars of the libraries unless `show`. Call it before any of them is imported: tqdm reads the
    variable once."""
    if not show:
        os.environ["TQDM_DISABLE"] = "1"


def _asked(prompts: list[Prompt], only: Sequence[str] | None) -> list[Prompt]:
    """Those that --only names, in the file's order; all without it."""
    known = [prompt.name for prompt in prompts]
    for name in only or ():
        if name not in known:
            raise Error("--only", "unknown prompt", nearest(name, known), name, Refusal.USAGE)
    return [prompt for prompt in prompts if only is None or prompt.name in only]


def words_of_a_task(words: Sequence[str]) -> list[str]:
    """The options of a command line that hold for every prompt. A sweep appends the prompt's name and a folder."""
    of_the_sweep = Parser(add_help=False, allow_abbrev=False)
    add_executor(of_the_sweep.add_argument, None)
    of_the_sweep.add_argument("--resume", action="store_true")
    for option in (("-n", "--count"), ("-o", "--output"), ("--only",), ("--memory",), ("--progress",), ("--threads",)):
        of_the_sweep.add_argument(*option)
    return of_the_sweep.parse_known_args(words)[1]


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Everything after the options are read; the exit code."""
    if arguments.with_wo and arguments.load:
        expected = "unquantised weights"
        raise Error("--with-wo", "cannot be combined with --load", expected, arguments.load, Refusal.USAGE)
    if arguments.reconstruct_at and not arguments.reconstruct:
        expected = "--reconstruct chunks or --reconstruct whole beside it"
        raise Error("--reconstruct-at", "no passes", expected, arguments.reconstruct_at, Refusal.USAGE)
    _refuse_one_file(arguments.output, max(arguments.count or 1, len(set(arguments.only or ()))))
    model_choices = ModelChoices.of(arguments)
    model_choices.check()

    import kvreplay.engine  # noqa: F401 - refuses before anything is loaded where it is not built

    take_user_defaults("capture", arguments)
    model_choices = ModelChoices.of(arguments)
    from kvreplay.capture.prompts import Prompt, read_prompts, require_template
    from kvreplay.capture.spans import SpanRequest

    if arguments.prompts:
        chooses = arguments.count or arguments.only
        prompts = read_prompts(arguments.prompts, arguments.count or (None if arguments.only else 2))
        if not chooses and len(prompts) > 1:
            prompts = prompts[:1]
            print(f"prompts  the first of {arguments.prompts} (-n N captures the first N)", flush=True)
    else:
        prompts = [Prompt("prompt", arguments.prompt)]
    prompts = _asked(prompts, arguments.only)
    if arguments.executor:
        from kvreplay.sweep.captures import capture_prompts

        return capture_prompts(arguments, words_of_a_task(words), [prompt.name for prompt in prompts])
    several = (arguments.count or 1) > 1 or len(prompts) > 1
    paths = _outputs(arguments.output, [prompt.name for prompt in prompts], several, arguments.force)
    try:
        continuation = arguments.continuation.read_text("utf-8") if arguments.continuation else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Error(str(arguments.continuation), "continuation", "a readable text file", str(error)) from error
    if arguments.continuation and not continuation:
        raise Error(str(arguments.continuation), "continuation", "at least one token", "an empty file")
    if empty := next((prompt.name for prompt in prompts if not (prompt.text or prompt.messages)), None):
        raise Error(empty, "prompt", "at least one token", "an empty text")
    spans = tuple(SpanRequest.parse(text) for text in arguments.span)
    show = shows_progress(arguments)
    allow_bars(show)
    model_choices.source.require_reachable()
    say_loading("capture", model_choices.source, arguments)
    quiet_libraries(show)

    import torch
    import transformers

    from kvreplay.capture.capture import Choices, capture
    from kvreplay.capture.model import load
    from kvreplay.capture.progress import progress_of

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.set_seed(arguments.seed)
    source = model_choices.source

    def check_tokenizer(tokenizer: Any) -> None:
        for prompt in prompts:
            require_template(tokenizer, prompt, arguments.chat)

    begin = time.monotonic()
    model, tokenizer = load(model_choices, arguments.layers, check_tokenizer)
    hides_progress = arguments.progress == "never"
    say_notes("capture", [f"loaded in {duration(time.monotonic() - begin)}"], hides_progress)
    choices = Choices(**members(Choices, arguments) | {
        "name": arguments.name or source.title, "continuation": continuation, "spans": spans,
        "source_hash": source.hash(), "reconstruct_at": arguments.reconstruct_at or "prompt",
    })  # fmt: skip

    for number, (prompt, path) in enumerate(zip(prompts, paths, strict=True), start=1):
        before = _peak_mib()
        generated = f", generating {arguments.generate} tokens" if arguments.generate else ""
        say_notes("capture", [f"{prompt.name}: prompt {number} of {len(prompts)}{generated}"], hides_progress)
        progress = partial(progress_of, "capture", "layers written", prompt.name, arguments=arguments)
        captured = capture(model, tokenizer, prompt, path, choices, progress)
        memory = f"peak {_peak_mib():.0f} MiB; before this capture, mostly the model: {before:.0f} MiB"
        print("\n".join([*_lines(captured, path), *wrapped(f"memory   {memory}", INDENT)]), flush=True)
    if getattr(tokenizer, "chat_template", None) and not arguments.chat and not all(one.messages for one in prompts):
        note = "the model has a chat template: --chat applies it; without it the model may not answer"
        say_notes("capture", [note], arguments.quiet)
    print_next_replay(paths[0] if len(paths) == 1 else paths[0].parent)
    return 0


def finished(options: Parser, work: Callable[[argparse.Namespace], int | None], words: Sequence[str], kept: str) -> int:
    """Reads the options and does the work; the value is the exit code. `kept`: what an interrupted program leaves."""
    return exit_code(options.command, lambda: work(options.parse_args(words)), kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; the value is its exit code."""
    words = sys.argv[1:] if argv is None else argv
    kept = "the unfinished trace was discarded"
    return finished(parser(), lambda arguments: run(arguments, words), words, kept)


if __name__ == "__main__":
    sys.exit(main())
