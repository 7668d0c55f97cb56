"""Shared by the programs in Python: command lines, error lines and exit codes."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import errno
import gc
import io
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kvreplay import __version__
from kvreplay.errors import DISK_FULL, SUGGESTION, Error, Refusal
from kvreplay.parameters import split_list

QUIET = (
    "no progress and no notes; no table or names of files from commands that write files (JSON and dry runs are still "
    "printed)"
)
SPELLINGS = {"--policy": "--policies", "--budget": "--budgets", "--trace": "--traces"}
SPELLINGS |= {plural: singular for singular, plural in SPELLINGS.items()}


class PrintVersion(argparse.Action):
    """Prints the version as the program does, with the commit; without the engine, as for figures, the version."""

    def __call__(self, *_: object) -> NoReturn:
        with contextlib.suppress(ImportError):
            from kvreplay import _engine

            sys.exit(_engine.program(["--version"]))
        print(f"kvreplay {__version__}")
        sys.exit()


class Parser(argparse.ArgumentParser):
    """A command line with kvreplay's usage errors: for an unknown option the error names the nearest one. The help ends
    with `examples`. `writes_files`: stdout repeats the files, and -q discards it until exit_code() ends."""

    def __init__(
        self, *, allow_abbrev: bool = False, examples: Sequence[str] = (), writes_files: bool = False, **options: Any
    ) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **options)
        self.examples = examples
        self._writes_files = writes_files
        self._optionals.title = "other options"
        self.add_argument("-q", "--quiet", action="store_true", help=QUIET)
        self.add_argument("-V", "--version", action=PrintVersion, nargs=0, default=argparse.SUPPRESS,
                          help="print the version")  # fmt: skip

    def format_help(self) -> str:
        examples = "".join(f"  {example}\n" for example in self.examples)
        return super().format_help() + (f"\nexamples:\n{examples}" if examples else "")

    @property
    def command(self) -> str:
        return re.split("[ /]", self.prog)[-1]

    def flag(self, field: str) -> str:
        """The first name of the option whose value is `field` of the namespace."""
        return next(action.option_strings[0] for action in self._actions if action.dest == field)

    @property
    def long_names(self) -> set[str]:
        """The names of the options as keywords of Python, in both spellings."""
        options = {option for option in self._option_string_actions if option.startswith("--")}
        options |= {SPELLINGS[option] for option in options & set(SPELLINGS)}
        return {option.removeprefix("--").replace("-", "_") for option in options}

    def error(self, message: str) -> NoReturn:
        lacks_words = self.examples and message.startswith("the following arguments are required")
        remedy = f", as in {self.examples[0]}" if lacks_words else ""
        raise Error(self.command, f"{message}{remedy} (see {self.prog} --help)", exit_code=Refusal.USAGE)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = [self._known_spelling(word) for word in (sys.argv[1:] if args is None else args)]
        self._refuse_unknown(words)
        return super().parse_args(words, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        arguments, rest = super().parse_known_args(args, namespace)
        if arguments.quiet:
            arguments.progress = "never"
            if self._writes_files and not any(getattr(arguments, name, None) for name in ("json", "dry_run", "emit")):
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return arguments, rest

    def _known_spelling(self, word: str) -> str:
        """The singular and the plural of an option in SPELLINGS mean the same."""
        name, *value = word.split("=", 1)
        known = self._option_string_actions
        return "=".join([SPELLINGS[name], *value]) if name not in known and SPELLINGS.get(name) in known else word

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Reports unknown options before missing ones, since a misspelt option is both."""
        takes_value = {option for action in self._actions if action.nargs != 0 for option in action.option_strings}
        known = [option for action in self._actions for option in action.option_strings]
        previous = ""
        for word in words:
            if word == "--":  # what follows is no option
                return
            name = word.partition("=")[0]
            if word.startswith("--") and name not in known and previous not in takes_value:
                near = difflib.get_close_matches(name[2:], [one[2:] for one in known if one.startswith("--")], 1)
                expected = f"{SUGGESTION}--{near[0]}?" if near else f"an option of {self.prog} --help"
                raise Error(self.command, "unknown option", expected, name, Refusal.USAGE)
            previous = word


def program() -> tuple[str, ...]:
    """The command of the program kvreplay for other processes; without an installed program, that inside Python."""
    beside = Path(sys.executable).with_name("kvreplay")
    path = shutil.which("kvreplay") or (str(beside) if beside.is_file() else "")
    return (path,) if path else (sys.executable, "-m", "kvreplay.command_line.command")


def size(text: str) -> int:
    """The bytes of a size such as 4G or 512MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMGT]?)(?:iB|B)?", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number of bytes, as 4096, 512M or 1.5G, found {text!r}")
    return int(float(match[1]) * 1024 ** " kMGT".index(match[2].replace("K", "k") or " "))


def names(value: str) -> list[str]:
    """The type of an option NAME,… that may be repeated: action="extend"."""
    return split_list(value) or [""]


OF_RATIO = "share of the prompt to evict, in place of a budget: 0.9 is -b 0.1, as in kvpress"


def budget_of_ratio(text: str) -> str:
    """The type of --compression-ratio: the equivalent budget."""
    from kvreplay.engine import _engine

    return _engine.budget_of_compression_ratio(text)


def pattern(flag: str, text: str) -> re.Pattern[str] | None:
    """The regular expression of an option; None: not given."""
    try:
        return re.compile(text) if text else None
    except re.error as problem:
        raise Error(flag, f"not a regular expression: {problem}", "", text, Refusal.USAGE) from problem


def add_same_prompt(add_argument: Callable[..., Any]) -> None:
    """Adds --same-prompt, a pattern or None."""
    add_argument("--same-prompt", metavar="REGEX", type=partial(pattern, "--same-prompt"),
        help="traces with an equal match of REGEX in their names (or of its first group) share a prompt "
             "(default: equal names, or equal token ids)")  # fmt: skip


def add_replay_options(add_argument: Callable[..., Any], device: str = "device that computes (default: auto)") -> None:
    """Adds --device, --threads and --memory for the replays of a command; `device`: help of the first."""
    add_argument("--device", metavar="auto|cpu|cuda[:N]", help=device)
    add_argument("--threads", metavar="N", help="CPU threads (default: all cores)")
    add_argument("--memory", metavar="SIZE", help="limit on memory, as 8G (default: the free memory)")


def require_least(arguments: argparse.Namespace, **least: int) -> None:
    """Rejects options, given by name, whose values are too small. Options without a value are skipped."""
    for name, bound in least.items():
        value = getattr(arguments, name, None)
        if value is not None and value < bound:
            raise Error(f"--{name}", "out of range", f"{bound} or more", str(value), Refusal.USAGE)


def require_format(flag: str, path: Path | None, *suffixes: str) -> None:
    """Rejects a file whose suffix is not one of these."""
    if path and path.suffix.lower() not in suffixes:
        expected = "a name ending in " + " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise Error(flag, "unknown file format", expected, str(path), Refusal.USAGE)


def require_paths(*paths: Path) -> None:
    """Rejects files and folders that do not exist, in the words of the engine, which is not imported for this."""
    for path in paths:
        if not path.exists():
            raise Error(str(path), f"cannot be opened: {os.strerror(errno.ENOENT)}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that the block writes; an error of the system becomes an Error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        raise Error(str(problem.filename or path), "cannot be written", "", str(problem.strerror)) from problem


def print_next_replay(trace: Path) -> None:
    """Prints the command that replays a new trace, or a folder of them."""
    print(f"next     kvreplay replay {shlex.quote(str(trace))} -p snapkv,h2o,chunkkv -b 0.1 -o out")


def on_terminal() -> bool:
    """Whether stderr is a terminal; it is None if the shell has closed it."""
    return sys.stderr is not None and sys.stderr.isatty()


def say_notes(command: str, notes: Iterable[str], quiet: bool = False) -> None:
    """Prints notes for the reader of the results on stderr, unless `quiet`; on a terminal in lines of its width."""
    from kvreplay.tables import wrapped  # which imports this module

    for note in () if quiet else notes:
        line = f"kvreplay: {command}: {note}"
        fits = "\n" in line or not on_terminal()
        print(*([line] if fits else wrapped(line, "  ")), sep="\n", file=sys.stderr)


def say_step(command: str, step: str, quiet: bool = False) -> None:
    """Prints a step that takes seconds, on a terminal only, unless `quiet`."""
    say_notes(command, [step], quiet or not on_terminal())


def _say(line: str) -> None:
    """Prints on stderr. A line that cannot be written is lost."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discards the buffer of stdout, whose reader has gone: the interpreter's own flush would report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that temporary folders are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _pip_argument(command: str, module: str) -> str:
    """The extra of the command's name, or one that requires the package; else the package."""
    from importlib import metadata  # slow to import

    with contextlib.suppress(metadata.PackageNotFoundError):
        lines = (re.match(r"([\w-]+).*extra == ['\"](\w+)", line) for line in metadata.requires("kvreplay") or ())
        requirements = [(match[1].replace("-", "_"), match[2]) for match in lines if match]
        extras = [extra for name, extra in requirements if extra == command or name == module]
        if extras:
            return f"'kvreplay[{command if command in extras else extras[0]}]'"
    return module


def exit_code(command: str, work: Callable[[], int | None], kept: str = "") -> int:
    """Does the work and returns its exit code, or 0. An Error or a missing package is reported as one line on stderr.
    After an interruption, `kept` is printed: what the program has left, and how to continue."""
    atexit.register(gc.freeze)  # a last search for garbage among all modules takes up to 0.4 s
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path is printed in its own bytes, UTF-8 or not
    try:
        try:
            with _orderly_end(), contextlib.redirect_stdout(sys.stdout):  # --quiet replaces it
                return work() or 0
        finally:
            sys.stdout.flush()
    except Error as error:
        _say(f"kvreplay: {error}")
        return error.exit_code
    except BrokenPipeError:
        _drop_output()
        return int(Refusal.UNREAD)
    except MemoryError:
        _say(f"kvreplay: {command}: out of memory")
        return int(Refusal.RESOURCES)
    except KeyboardInterrupt:
        if kept:
            _say(f"kvreplay: {command}: interrupted; {kept}")
        return int(Refusal.INTERRUPTED)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kvreplay"):
            remedy = f"run pip install {_pip_argument(command, error.name or '')}"
            _say(f"kvreplay: {Error(command, f'{error.name} is not installed; {remedy}')}")
            return int(Refusal.CAPABILITY)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            _drop_output()
            _say(f"kvreplay: {command}: disk full: {error.filename or 'standard output'}")
            return int(Refusal.RESOURCES)
        _say(traceback.format_exc().rstrip())
        _say(f"kvreplay: {command}: internal error, a bug of kvreplay {__version__}; please report the lines above")
        return int(Refusal.INTERNAL)
