"""`kvreplay capture`: options, messages and exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay import __version__
from kvreplay.capture.model_options import (
    DTYPES,
    ModelChoices,
    add_device_options,
    add_model_options,
    count,
    members,
    natural,
    shows_progress,
)
from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.program import Parser, exit_code, names, size
from kvreplay.sweep.options import add_executor

if TYPE_CHECKING:
    from kvreplay.capture.prompts import Prompt
    from kvreplay.capture.rope import Rope

MOST_LAYERS = 65535  # of a trace
DESCRIPTION = """Captures queries, keys and values of a language model as a trace: the continuation first (generated
or given), then one pass over all tokens, each layer written as it is computed and checked against the model's own
attention output."""


def _queries(text: str) -> int | None:
    """all -> None, last:N -> N."""
    match = re.fullmatch(r"last:([1-9]\d*)", text)
    if text != "all" and not match:
        raise argparse.ArgumentTypeError(f"expected all or last:N, found {text!r}")
    return int(match.group(1)) if match else None


def _layers(text: str) -> frozenset[int]:
    """0,3-5 -> {0, 3, 4, 5}."""
    chosen: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        begin, end = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if begin > end or end > MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"expected numbers and ranges like 0,3-5, found {text!r}")
        chosen.update(range(begin, end + 1))
    return frozenset(chosen)


def parser() -> Parser:
    """The options; every one has its help."""
    build = Parser(prog="kvreplay capture", description=DESCRIPTION, allow_abbrev=False)
    add = build.add_argument
    add("--version", action="version", version=f"kvreplay {__version__}")
    add_model_options(build)
    add_device_options(build)
    add("--name", help="the model's name in the trace (default: that on the hub, or of its folder or file)")
    source = build.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=".txt (one prompt), .jsonl or .parquet (columns context, input, answers as LongBench; or prompt; or text; "
        "or messages, a conversation; each also needle and continuation)",
    )
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("-n", type=count, metavar="N", help="the first N prompts of the file (default: 1)")
    add("--only", type=names, action="extend", metavar="NAME,...", help="these prompts of the file: STEM-000, ...")
    add("--max-tokens", type=count, metavar="N", help="a longer prompt loses the middle of its context")
    continuation = build.add_mutually_exclusive_group()
    continuation.add_argument(
        "--generate",
        type=natural,
        default=0,
        metavar="N",
        help="continue by N tokens: the row's continuation if it has one, cut after N, then greedy text without "
        "end of text (default: 0, the whole continuation of a row)",
    )
    continuation.add_argument(
        "--continuation",
        type=Path,
        metavar="FILE",
        help="continue by this text (teacher forced) instead of the row's continuation",
    )
    add(
        "--queries",
        type=_queries,
        default="all",
        metavar="all|last:N",
        help="store all queries, or the prompt's last N and the continuation's",
    )
    add("--layers", type=_layers, metavar="0,3-5", help="store these layers only")
    add(
        "--span",
        action="append",
        default=[],
        metavar="NAME[:KIND]=TEXT|/REGEX/",
        help="name the tokens of a text; may be repeated",
    )
    add(
        "--chunk",
        type=count,
        metavar="N",
        help="run N tokens at once, with the model's own cache, for prompts that do not fit (default: all at once)",
    )
    add(
        "--save-reference",
        action="store_true",
        help="store the 64 most probable tokens of every continuation token, and the probability of all others",
    )
    add("--with-wo", action="store_true", help="store each layer's output projection too")
    add("--store-dtype", choices=DTYPES, help="the type to store (default: the type the model computed in)")
    add("--verify", action="store_true", help="recompute every attention output from the trace, not 64 queries a layer")
    add(
        "-o",
        dest="output",
        type=Path,
        required=True,
        metavar="FILE|DIR",
        help="the trace; a folder for several prompts",
    )
    add("--force", action="store_true", help="replace an existing trace")
    add("--seed", type=natural, default=0, metavar="N", help="seed of every random choice (default: 0)")
    add_executor(build.add_argument, None)
    add("--memory", type=size, metavar="SIZE", help="what a job of --executor slurm may hold")
    return build


def _outputs(output: Path, names: Sequence[str], several: bool, force: bool) -> list[Path]:
    """One path a prompt, each new (or --force), and their folder."""
    from kvreplay.trace import refuse_existing

    is_folder = output.is_dir() or several
    if is_folder and output.suffix == ".h5":
        raise Error("-o", f"{len(names)} prompts", "a folder", str(output), Refusal.USAGE)
    paths = [output / f"{name}.h5" for name in names] if is_folder else [output]
    for path in paths:
        refuse_existing(path, force)
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error("-o", str(output), "a folder that can be made", str(error), Refusal.USAGE) from error
    return paths


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _rotation(rope: Rope | None) -> str:
    """How many layers rotate, and how clearly the keys show it."""
    if rope is None:
        return "no layer rotates its keys"
    rotating, layers = int(rope.inv_freq.any(axis=1).sum()), len(rope.inv_freq)
    return (
        f"{rotating} of {layers} layers rotate their keys; smallest margin in layer {rope.closest.layer}: "
        f"error {rope.closest.error:.2e}, next best {rope.closest.next_best:.2e}"
    )


def quiet_libraries(show: bool) -> None:
    """The libraries' bars and advice are not ours to print. To be called before anything imports tqdm."""
    if not show:
        os.environ["TQDM_DISABLE"] = "1"
    import torch  # noqa: F401  transformers would say that it is missing, in words of its own
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not show:
        transformers.logging.disable_progress_bar()


def _asked(prompts: list[Prompt], only: Sequence[str] | None) -> list[Prompt]:
    """Those that --only names, in the file's order; all without it."""
    known = [prompt.name for prompt in prompts]
    for name in only or ():
        if name not in known:
            raise Error("--only", "no such prompt", nearest(name, known), name, Refusal.USAGE)
    return [prompt for prompt in prompts if only is None or prompt.name in only]


def words_of_a_task(words: Sequence[str]) -> list[str]:
    """What of a command line is said of one prompt as of all: a sweep appends its name and a folder."""
    of_the_sweep = Parser(add_help=False, allow_abbrev=False)
    add_executor(of_the_sweep.add_argument, None)
    for option in ("-n", "-o", "--only", "--memory", "--progress", "--threads"):
        of_the_sweep.add_argument(option)
    return of_the_sweep.parse_known_args(words)[1]


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Everything after the options are read; the exit code."""
    import kvreplay.engine  # noqa: F401 - refuses before anything is loaded where it is not built
    from kvreplay.capture.prompts import Prompt, read_prompts

    if arguments.prompts:
        prompts = read_prompts(arguments.prompts, arguments.n or (None if arguments.only else 1))
    else:
        prompts = [Prompt("prompt", arguments.prompt)]
    prompts = _asked(prompts, arguments.only)
    if arguments.executor:
        from kvreplay.sweep.captures import capture_prompts

        return capture_prompts(arguments, words_of_a_task(words), [prompt.name for prompt in prompts])
    if arguments.with_wo and arguments.load:
        expected = "weights as stored (quantised output projections are not)"
        raise Error("--with-wo", "--load", expected, arguments.load, Refusal.USAGE)
    several = (arguments.n or 1) > 1 or len(prompts) > 1
    paths = _outputs(arguments.output, [prompt.name for prompt in prompts], several, arguments.force)
    try:
        continuation = arguments.continuation.read_text("utf-8") if arguments.continuation else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Error(str(arguments.continuation), "continuation", "a text that can be read", str(error)) from error
    if arguments.continuation and not continuation:
        raise Error(str(arguments.continuation), "continuation", "at least one token", "an empty file")
    show = shows_progress(arguments)
    quiet_libraries(show)

    from kvreplay.capture.spans import SpanRequest

    spans = tuple(SpanRequest.parse(text) for text in arguments.span)

    import torch
    import transformers
    from tqdm import tqdm

    from kvreplay.capture.capture import Choices, capture
    from kvreplay.capture.model import Source, load

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.set_seed(arguments.seed)
    source = Source.parse(arguments.model, arguments.revision)
    model, tokenizer = load(ModelChoices.of(arguments))
    choices = Choices(**members(Choices, arguments) | {
        "name": arguments.name or source.title, "continuation": continuation, "spans": spans,
        "source_hash": source.hash(),
    })  # fmt: skip

    def progress(layers: int) -> Any:
        return tqdm(total=layers, unit=" layers", desc="capture", disable=not show, file=sys.stderr)

    for prompt, path in zip(prompts, paths, strict=True):
        before = _peak_mib()
        captured = capture(model, tokenizer, prompt, path, choices, progress)
        worst = captured.worst
        print(
            f"trace    {path}  P {captured.prompt_tokens} + G {captured.tokens - captured.prompt_tokens}   "
            f"{captured.layers} layers   {captured.query_heads} query / {captured.kv_heads} kv heads   "
            f"{captured.dtype}   {path.stat().st_size / 1e6:.1f} MB\n"
            f"rope     {_rotation(captured.rope)}\n"
            f"verify   {captured.checked_queries} queries a layer recomputed from the trace: largest deviation "
            f"{worst.found:.2e} of sum a|v|, rounding allows {worst.allowed:.2e} "
            f"(layer {worst.layer}, head {worst.head}, query {worst.position})\n"
            f"memory   peak {_peak_mib():.0f} MiB, of which {before:.0f} MiB before this capture",
            flush=True,
        )
    return 0


def finished(options: Parser, work: Callable[[argparse.Namespace], int | None], words: Sequence[str], kept: str) -> int:
    """Reads the options and does the work; the value is the exit code. `kept`: what an interrupted program leaves."""
    return exit_code(options.command, lambda: work(options.parse_args(words)), kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; the value is its exit code."""
    words = sys.argv[1:] if argv is None else argv
    kept = "nothing is kept of the trace under way"
    return finished(parser(), lambda arguments: run(arguments, words), words, kept)


if __name__ == "__main__":
    sys.exit(main())
