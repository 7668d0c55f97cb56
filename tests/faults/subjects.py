"""What faults are tried on: a replay, a merge, a synthetic trace and a capture, each with its undisturbed result in
`whole`.

A capture is forked from a process that has imported everything already: faults then hit the capture, and a sweep of
them takes seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import MappingProxyType
from typing import Any

from program import PROGRAM, Answer, done

PATIENCE = 120  # seconds
IMPORTED = ["torch", "transformers", "kvreplay.capture.command", "kvreplay.capture.capture", "kvreplay.capture.model"]
NOTHING: Mapping[Any, Any] = MappingProxyType({})
Limits = Mapping[int, int]  # of setrlimit, for this process and what it starts


def _limited(limits: Limits) -> Callable[[], None]:
    def begin() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs the tests may ignore it

    return begin


@dataclass(frozen=True)
class Subject:
    """A command line whose result is `out` in `folder`, made undisturbed in `folder`/whole."""

    folder: Path
    words: tuple[str, ...]
    result: str  # a file or a folder

    @property
    def whole(self) -> Path:
        return self.folder / "whole" / self.result

    def begun(self, where: Path, environment: Mapping[str, str] = NOTHING, limits: Limits = NOTHING) -> Begun:
        """Started in `where`, which holds what an earlier start has left."""
        log = where / "log"
        with log.open("w") as to:
            process = subprocess.Popen(
                [PROGRAM, *self.words], cwd=where, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=to, preexec_fn=_limited(limits),
            )  # fmt: skip
        return Begun(log, process.pid, process.poll)

    def ended(self, where: Path, environment: Mapping[str, str] = NOTHING, limits: Limits = NOTHING) -> Answer:
        return self.begun(where, environment, limits).ended()

    def place(self, where: Path) -> Path:
        """A fresh folder to start in."""
        where.mkdir(parents=True)
        for given in self.folder.iterdir():
            if given.name != "whole":
                (where / given.name).symlink_to(given)
        return where

    def finished(self, where: Path) -> None:
        """Goes on from what is left in `where`: the result must be the undisturbed one, and nothing else be left."""
        answer = self.ended(where)
        assert (answer.code, answer.err) == (0, ""), answer
        assert done("diff", self.whole, where / self.result, folder=where) == "equal\n"
        assert not list(where.rglob("*.partial"))

    @contextmanager
    def trial(self, root: Path) -> Iterator[Path]:
        """A fresh folder for one fault; when that has been, the work is finished in it."""
        where = self.place(root / "trial")
        yield where
        self.finished(where)
        shutil.rmtree(where)


@dataclass(frozen=True)
class Begun:
    """A process at work."""

    log: Path
    pid: int
    poll: Callable[[], int | None]

    def ended(self) -> Answer:
        until = time.monotonic() + PATIENCE
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(self.log.read_text())
            time.sleep(0.002)
        return Answer(code, "", self.log.read_text())

    def killed_after(self, seconds: float, blow: signal.Signals = signal.SIGKILL) -> Answer:
        """Struck unless it has ended before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.poll() is None:
            time.sleep(0.0005)
        if self.poll() is None:
            os.kill(self.pid, blow)
        return self.ended()


class Replay(Subject):
    def on_threads(self, count: int) -> Replay:
        at = self.words.index("--threads") + 1
        return Replay(self.folder, (*self.words[:at], str(count), *self.words[at + 1 :]), self.result)

    @classmethod
    def prepared(cls, folder: Path, traces: int = 2) -> Replay:
        names = [f"trace{seed}.h5" for seed in range(traces)]
        for seed, name in enumerate(names):
            shape = "--layers 3 --prompt 384 --continuation 16 --head-dim 16".split()
            done("synth", "sinks", "-o", name, *shape, "--seed", str(seed), folder=folder)
        policies = "-p snapkv,h2o,chunkkv -b 0.1,0.3 --threads 1".split()
        made = cls(folder, ("replay", *names, *policies, "-o", "out"), "out")
        made.finish_undisturbed()
        return made

    def finish_undisturbed(self) -> None:
        answer = self.ended(self.place(self.folder / "whole"))
        assert (answer.code, answer.err) == (0, ""), answer


class Synth(Replay):
    @classmethod
    def prepared(cls, folder: Path) -> Synth:
        shape = "--layers 3 --prompt 1024 --head-dim 64".split()
        made = cls(folder, ("synth", "sinks", "-o", "out.h5", *shape, "--force"), "out.h5")
        made.finish_undisturbed()
        return made


class Merge(Replay):
    """Of a trace in two folders with a policy each, and one in a third."""

    @classmethod
    def prepared(cls, folder: Path) -> Merge:
        shape = "--layers 3 --prompt 384 --continuation 16 --head-dim 16".split()
        for seed, policy in (("0", "snapkv"), ("0", "h2o"), ("1", "knorm")):
            name, shard = f"trace{seed}.h5", f"shard-{policy}"
            done("synth", "sinks", "-o", name, *shape, "--seed", seed, "--force", folder=folder)
            done("replay", name, "-p", policy, *"-b 0.1,0.3 --threads 1 -o".split(), shard, folder=folder)
        made = cls(folder, ("merge", "out", "shard-snapkv", "shard-h2o", "shard-knorm"), "out")
        made.finish_undisturbed()
        return made


def _capture(words: tuple[str, ...], where: str, environment: dict[str, str], limits: dict[int, int]) -> None:
    os.chdir(where)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    libc = ctypes.CDLL(None)
    for name, value in environment.items():  # where preloaded code looks
        libc.setenv(os.fsencode(name), os.fsencode(value), 1)
    _limited(limits)()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    from kvreplay.capture.command import main

    torch.set_num_threads(1)
    os._exit(main(words))  # multiprocessing's own end flushes again what could not be written, and fails


class Capture(Replay):
    @classmethod
    def prepared(cls, folder: Path, interposed: Path | None = None) -> Capture:
        from tiny_models import save

        save(folder / "model", "llama")
        words = "--model model --generate 8 -q --force -o out.h5 --prompt".split()
        made = cls(folder, (*words, "A few words, " * 15), "out.h5")
        server = cls.server()
        forkserver._forkserver._stop()  # another test of this process may have started one without the library
        before = os.environ.get("LD_PRELOAD")
        if interposed:
            os.environ["LD_PRELOAD"] = str(interposed)
        server.Process(target=int).start()  # the server starts with this environment
        os.environ.pop("LD_PRELOAD", None)
        if before:
            os.environ["LD_PRELOAD"] = before
        made.finish_undisturbed()
        return made

    @staticmethod
    def server() -> Any:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        return context

    def begun(self, where: Path, environment: Mapping[str, str] = NOTHING, limits: Limits = NOTHING) -> Begun:
        words = (self.words, str(where), dict(environment), dict(limits))
        process = self.server().Process(target=_capture, args=words)
        process.start()
        assert process.pid

        def poll() -> int | None:
            return process.exitcode

        return Begun(where / "log", process.pid, poll)
