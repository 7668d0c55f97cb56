#!/usr/bin/env python3
"""Damages files, and gives them to the program as a user would: it must refuse them or read them, never crash or hang.

    tests/fuzz/mutate_files.py --files 200000             mutants 0 to 199,999 of seed 0
    tests/fuzz/mutate_files.py --files 100000 --resume    so many more, from where the seed's last run stopped
    tests/fuzz/mutate_files.py --show 4711                writes that mutant into build/fuzz/mutants and runs it

A mutant is a function of seed, number, and the sound files, which are made once in build/fuzz/sound. Sound files are
traces (as kvreplay writes them, archived, by h5py in its oldest and newest form, and with contents of the oldest form
behind a new superblock), stored observables and a file of cells. Bytes are flipped, blocks of them zeroed, copied,
removed or inserted; files are cut or extended; fields of superblock and object headers become other numbers. In half of
the mutants that a child process reads (`validate --untrusted`, `convert`) the checksums of superblock and object
headers are made right again, so that the damage reaches the library.

Offenders are kept in build/fuzz/findings, and a line for each run is added to build/fuzz/log.csv. Exit code 1: there
are offenders. The program is taken from the environment variable KVREPLAY, by default build/release/kvreplay.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import h5py

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("KVREPLAY", ROOT / "build" / "release" / "kvreplay")).resolve()
BUILD = ROOT / "build" / "fuzz"

BATCH = 64  # files of one sound file that a process is given at once, where its command takes many
SECONDS = 20.0  # for a process
# A sanitizer's own exit code would be one of the program's.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "ASAN_OPTIONS": "exitcode=99:detect_leaks=0",
    "UBSAN_OPTIONS": "exitcode=99",
}
MARKS_OF_BUGS = ("Sanitizer", "runtime error:", "this is a bug of kvreplay")

UNDEFINED = b"\xff" * 8
EDGES = [0, 1, 2, 3, 4, 7, 8, 15, 16, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
EDGES += [2**63, 2**64 - 1, 2**64 - 8]


# Checksums of HDF5's metadata: Bob Jenkins's lookup3, hashlittle with initial value 0.


def lookup3(data: bytes) -> int:
    """The 32-bit hash that ends checksummed blocks of metadata."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    if not data:
        return c

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF

    padded = data + bytes(-len(data) % 12)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    for i in range(0, len(words) - 3, 3):
        a, b, c = (a + words[i]) & 0xFFFFFFFF, (b + words[i + 1]) & 0xFFFFFFFF, (c + words[i + 2]) & 0xFFFFFFFF
        a = ((a - c) & 0xFFFFFFFF) ^ rotated(c, 4)
        c = (c + b) & 0xFFFFFFFF
        b = ((b - a) & 0xFFFFFFFF) ^ rotated(a, 6)
        a = (a + c) & 0xFFFFFFFF
        c = ((c - b) & 0xFFFFFFFF) ^ rotated(b, 8)
        b = (b + a) & 0xFFFFFFFF
        a = ((a - c) & 0xFFFFFFFF) ^ rotated(c, 16)
        c = (c + b) & 0xFFFFFFFF
        b = ((b - a) & 0xFFFFFFFF) ^ rotated(a, 19)
        a = (a + c) & 0xFFFFFFFF
        c = ((c - b) & 0xFFFFFFFF) ^ rotated(b, 4)
        b = (b + a) & 0xFFFFFFFF
    a, b, c = (a + words[-3]) & 0xFFFFFFFF, (b + words[-2]) & 0xFFFFFFFF, (c + words[-1]) & 0xFFFFFFFF
    c = ((c ^ b) - rotated(b, 14)) & 0xFFFFFFFF
    a = ((a ^ c) - rotated(c, 11)) & 0xFFFFFFFF
    b = ((b ^ a) - rotated(a, 25)) & 0xFFFFFFFF
    c = ((c ^ b) - rotated(b, 16)) & 0xFFFFFFFF
    a = ((a ^ c) - rotated(c, 4)) & 0xFFFFFFFF
    b = ((b ^ a) - rotated(a, 14)) & 0xFFFFFFFF
    return ((c ^ b) - rotated(b, 24)) & 0xFFFFFFFF


def end_of_header(data: bytes, begin: int) -> int | None:
    """Where the checksum stands of the version 2 object header that begins there; none: it has no place in the file."""
    if begin + 6 > len(data):
        return None
    flags = data[begin + 5]
    at = begin + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    end = at + width + int.from_bytes(data[at : at + width], "little")
    return end if end + 4 <= len(data) else None


@dataclass(frozen=True)
class Block:
    """A checksummed block of metadata: its bytes [begin, end), then the checksum."""

    begin: int
    end: int
    is_header: bool  # an object header's first, whose length it says itself


def checksummed(data: bytes) -> list[Block]:
    """Superblock, object headers and their continuations."""
    blocks = [Block(0, 44, False)] if data[8] >= 2 else []
    at = data.find(b"OHDR")
    while at >= 0:
        if (end := end_of_header(data, at)) and lookup3(data[at:end]) == int.from_bytes(data[end : end + 4], "little"):
            blocks.append(Block(at, end, True))
        at = data.find(b"OHDR", at + 4)
    at = data.find(b"OCHK")
    while at >= 0:  # its length stands in the header that it continues: the one that makes the checksum right
        for end in range(at + 4, min(at + 1024, len(data) - 4)):
            if lookup3(data[at:end]) == int.from_bytes(data[end : end + 4], "little"):
                blocks.append(Block(at, end, False))
                break
        at = data.find(b"OCHK", at + 4)
    return blocks


def repair(data: bytearray, blocks: list[Block]) -> None:
    """Makes the blocks' checksums right, where the blocks still are."""
    for block in blocks:
        end = end_of_header(data, block.begin) if block.is_header else block.end
        if end is not None and end + 4 <= len(data):
            data[end : end + 4] = struct.pack("<I", lookup3(bytes(data[block.begin : end])))


# Sound files.


@dataclass(frozen=True)
class Sound:
    """A file that the program reads, and where damage to it matters."""

    name: str
    data: bytes
    blocks: list[Block]


def behind_new_superblock(data: bytes) -> bytes:
    """A file of HDF5's oldest form, with a superblock of version 2 instead of its own: nothing in it is checksummed."""
    root = data[24 + 32 + 8 : 24 + 32 + 16]  # of the symbol table entry: name's offset, header's address
    start = b"\x89HDF\r\n\x1a\n\x02\x08\x08\x00" + bytes(8) + UNDEFINED + struct.pack("<Q", len(data)) + root
    return start + struct.pack("<I", lookup3(start)) + data[48:]


def copy_file(source: Path, target: Path, libver: tuple[str, str] | str, **storage: object) -> None:
    """The same objects as h5py writes them with these bounds."""
    with h5py.File(source) as old, h5py.File(target, "w", libver=libver) as new:
        new.attrs.update(old.attrs)

        def copy(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Group):
                made = new.require_group(name)
            else:
                options = storage if item.ndim == 3 else {}
                made = new.create_dataset(name, data=item[()], dtype=item.dtype, **options)
            for attribute, value in item.attrs.items():
                made.attrs[attribute] = value

        old.visititems(copy)


def make_sound_files(folder: Path) -> None:
    """Writes them all, or nothing."""
    folder.mkdir(parents=True)
    run = functools.partial(subprocess.run, check=True, cwd=folder, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    run([PROGRAM, "synth", "fixture", "-o", "trace.h5"])
    policies = "h2o:recent=3,snapkv:window=2,streaming-llm,kivi"
    metrics = ["--metrics", "attention_recall,kv_l1_loss", "--detail", "head", "--save", "scores,attention"]
    wanted = [*metrics, "--observables", "keep", "-o", "out"]
    run([PROGRAM, "replay", "trace.h5", "-p", policies, "-b", "6", *wanted])
    (folder / "trace.obs.h5").rename(folder / "observables.h5")
    (folder / "out" / "cells" / "trace.h5").rename(folder / "cells.h5")
    shutil.rmtree(folder / "out")
    trace = folder / "trace.h5"
    copy_file(trace, folder / "h5py.h5", ("v108", "v110"))
    copy_file(trace, folder / "archive.h5", ("v108", "v110"), chunks=(1, 4, 4), compression=4, shuffle=True)
    copy_file(trace, folder / "newest.h5", ("v110", "v110"), chunks=(2, 4, 4))
    copy_file(trace, folder / "oldest.h5", "earliest")
    (folder / "old_contents.h5").write_bytes(behind_new_superblock((folder / "oldest.h5").read_bytes()))
    links = folder / "links.h5"
    copy_file(trace, links, ("v108", "v110"))
    with h5py.File(links, "r+", libver=("v108", "v110")) as file:
        file["layers/000/loop"] = file["layers"]
        file["model/soft"] = h5py.SoftLink("/model/soft")
        file["tokens/away"] = h5py.ExternalLink("trace.h5", "/tokens/ids")


@functools.cache
def sound(name: str, folder: Path) -> Sound:
    """A sound file by its name."""
    data = (folder / f"{name}.h5").read_bytes()
    return Sound(name, data, checksummed(data))


# What is damaged, and what reads it. A batch of mutants is of one kind; kinds take turns.


@dataclass(frozen=True)
class Kind:
    """Mutants of one sound file, and the command that they are given to, all at once or each alone."""

    sound: str
    command: tuple[str, ...]
    together: bool = True
    codes: frozenset[int] = frozenset({0, 1, 3, 6})  # exit codes that say what is wrong, or that nothing is

    @property
    def in_child(self) -> bool:
        """Whether the command reads the file in a child process, which HDF5 may crash."""
        return "--untrusted" in self.command or self.command == CONVERT


VALIDATE, DEEP = ("validate", "--untrusted"), ("validate", "--untrusted", "--deep")
REPLAY = ("replay", "-p", "h2o", "-b", "6", "--metrics", "attention_recall")
CONVERT = ("convert", "-o", "new.h5", "--force")
TOGETHER = [
    *(Kind(name, VALIDATE) for name in ("trace", "h5py", "archive", "newest", "links", "old_contents")),
    *(Kind(name, DEEP) for name in ("trace", "archive", "newest", "old_contents")),
    *(Kind(name, VALIDATE) for name in ("oldest", "observables")),
]
# Half of them fast: replaying measures the machine first.
DIFF_OF_CELLS = Kind("cells", ("diff",), together=False, codes=frozenset({0, 1, 2, 3}))  # 2: no file of cells any more
ALONE = [
    DIFF_OF_CELLS,
    Kind("cells", REPLAY, together=False),
    DIFF_OF_CELLS,
    Kind("observables", REPLAY, together=False),
    DIFF_OF_CELLS,
    Kind("trace", REPLAY, together=False),
    Kind("oldest", CONVERT, together=False),
    Kind("old_contents", CONVERT, together=False),
]


def kind_of(number: int) -> Kind:
    """Of a mutant: each in a batch of its kind, one batch of 32 for those that take a process each."""
    batch = number // BATCH
    return ALONE[number % len(ALONE)] if batch % 32 == 31 else TOGETHER[batch % len(TOGETHER)]


def damage(rng: random.Random, data: bytearray, blocks: list[Block]) -> None:
    """One change of some bytes, in metadata more often than elsewhere."""
    if not data:
        return
    begin, end = 0, len(data)
    if blocks and rng.random() < 0.8:
        block = rng.choice(blocks)
        begin, end = min(block.begin, end - 1), min(block.end, end)
    begin, end = (begin, end) if begin < end else (0, len(data))
    at = rng.randrange(begin, end)
    match rng.randrange(10):
        case 0 | 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            data[at] = rng.randrange(256)
        case 3 | 4:  # a number: a size, an address, a count, a dimension
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(EDGES) if rng.random() < 0.6 else rng.randrange(len(data) + 16)
            raw = (value % 256**width).to_bytes(width, "little")
            data[at : at + width] = raw[: max(0, len(data) - at)]
        case 5:  # what was a number is nearly that number
            width = rng.choice((1, 2, 4, 8))
            value = int.from_bytes(data[at : at + width], "little") + rng.choice((-8, -4, -1, 1, 4, 8))
            data[at : at + width] = (value % 256**width).to_bytes(width, "little")[: max(0, len(data) - at)]
        case 6:
            length = min(rng.choice((1, 4, 8, 16, 64, 512)), end - at)
            data[at : at + length] = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
        case 7:  # something from elsewhere: a message, an address
            length = min(rng.choice((4, 8, 16, 32)), end - at)
            source = rng.randrange(max(1, len(data) - length))
            data[at : at + length] = data[source : source + length]
        case 8:  # two neighbours change places
            length = min(rng.choice((1, 4, 8, 16)), (end - at) // 2)
            data[at : at + 2 * length] = data[at + length : at + 2 * length] + data[at : at + length]
        case _:
            structure(rng, data, at)


def structure(rng: random.Random, data: bytearray, at: int) -> None:
    """Bytes go, come, or end."""
    length = rng.choice((1, 2, 4, 8, 48, 512))
    match rng.randrange(5):
        case 0:
            del data[at : at + length]
        case 1:
            data[at:at] = rng.randbytes(length)
        case 2:
            del data[at:]
        case 3:
            data.extend(bytes(length))
        case _:
            data[at:at] = data[at : at + length]


@dataclass(frozen=True)
class Mutants:
    """All mutants of a seed. A mutant is a function of its number and of the sound files."""

    seed: int
    sounds: Path
    repairs: bool = True  # whether half of them have right checksums

    def bytes_of(self, number: int) -> bytes:
        rng = random.Random(f"{self.seed} {number}")
        whole = sound(kind_of(number).sound, self.sounds)
        data = bytearray(whole.data)
        repaired = rng.random() < 0.5
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            damage(rng, data, whole.blocks)
        if repaired and self.repairs and kind_of(number).in_child:
            repair(data, whole.blocks)
        return bytes(data)


# Running them.


@dataclass(frozen=True)
class Offence:
    """A mutant that the program did not survive."""

    number: int
    what: str


def command_of(kind: Kind, files: list[Path], folder: Path, sounds: Path) -> list[str]:
    """The command line for mutants in `folder`."""
    words = [str(PROGRAM), *kind.command]
    if kind.together:
        return [*words, *map(str, files)]
    (file,) = files
    if kind.command == CONVERT:
        return [*words, str(file)]
    if kind == DIFF_OF_CELLS:
        return [*words, str(file), str(sounds / "cells.h5")]
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    trace = folder / "trace.h5"
    trace.with_suffix(".obs.h5").unlink(missing_ok=True)
    places = {"trace": trace, "cells": out / "cells" / "trace.h5", "observables": trace.with_suffix(".obs.h5")}
    shutil.copyfile(sounds / "trace.h5", trace)
    places[kind.sound].parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, places[kind.sound])
    return [*words, str(trace), "-o", str(out)]


def problem_of(kind: Kind, files: list[Path], folder: Path, sounds: Path) -> str | None:
    """How the program failed at mutants in `folder`; none: it did not."""
    command = command_of(kind, files, folder, sounds)
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return f"more than {SECONDS:.0f} seconds"
    err = answer.stderr.decode(errors="replace")
    if answer.returncode < 0:
        return f"signal {-answer.returncode}"
    if any(mark in err for mark in MARKS_OF_BUGS):
        return next(line for line in err.splitlines() if any(mark in line for mark in MARKS_OF_BUGS))
    if answer.returncode not in kind.codes:
        return f"exit code {answer.returncode}: {err.strip().splitlines()[-1] if err.strip() else 'no message'}"
    return None


def run_batch(numbers: list[int], mutants: Mutants) -> list[Offence]:
    """All offences of mutants of one batch."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvreplay-", dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        files = {number: folder / f"{number}.h5" for number in numbers}
        for number, file in files.items():
            file.write_bytes(mutants.bytes_of(number))
        kind = kind_of(numbers[0])
        together = problem_of(kind, list(files.values()), folder, mutants.sounds) if kind.together else None
        if kind.together and together is None:
            return []
        offences = []
        for number, file in files.items():
            if what := problem_of(kind_of(number), [file], folder, mutants.sounds):
                offences.append(Offence(number, what))
        if together and not offences:
            offences.append(Offence(numbers[0], f"{together}: this and {len(numbers) - 1} behind it, none alone"))
        return offences


def batches(first: int, end: int) -> Iterator[list[int]]:
    """Numbers [first, end), apart where another kind begins."""
    while first < end:
        last = min(end, first // BATCH * BATCH + BATCH)
        yield list(range(first, last))
        first = last


def sound_folder(folder: Path) -> Path:
    """Where sound files are, made when there are none."""
    sounds = folder / "sound"
    if not sounds.exists():
        partial = folder / "sound.partial"
        shutil.rmtree(partial, ignore_errors=True)
        make_sound_files(partial)
        partial.rename(sounds)
    return sounds


def commit() -> str:
    """Of the checkout."""
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def log(folder: Path, executions: int, seconds: float, findings: int) -> None:
    """A line for this run."""
    path = folder / "log.csv"
    if not path.exists():
        path.write_text("date,commit,what,executions,seconds,findings\n")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with path.open("a") as file:
        file.write(f"{now},{commit()},mutate_files,{executions},{seconds:.0f},{findings}\n")


def keep(offence: Offence, mutants: Mutants, folder: Path) -> Path:
    """The offender's file, and beside it what it does."""
    findings = folder / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    path = findings / f"mutant-{mutants.seed}-{offence.number}.h5"
    path.write_bytes(mutants.bytes_of(offence.number))
    kind = kind_of(offence.number)
    path.with_suffix(".txt").write_text(f"{kind.sound}: {' '.join(kind.command)}: {offence.what}\n")
    return path


def mutate(mutants: Mutants, first: int, files: int, jobs: int, folder: Path) -> list[Offence]:
    """Runs mutants [first, first + files); offenders are kept, and how far it came."""
    state = folder / f"mutants-{mutants.seed}.json"
    began, done, offences = time.monotonic(), 0, []
    all_batches = list(batches(first, first + files))
    try:
        # Not forked: a caller may have threads, whose locks a fork would copy.
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            work = functools.partial(run_batch, mutants=mutants)
            for numbers, found in zip(all_batches, pool.imap(work, all_batches), strict=True):
                for offence in found:
                    print(f"{keep(offence, mutants, folder)}: {offence.what}", flush=True)
                offences += found
                done += len(numbers)
                state.write_text(json.dumps({"next": first + done}))
    finally:
        seconds = time.monotonic() - began
        log(folder, done, seconds, len(offences))
        print(f"{done} files in {seconds:.0f} s ({done / max(seconds, 1e-9):.0f} a second), {len(offences)} offenders")
    return offences


def show(mutants: Mutants, number: int, folder: Path) -> None:
    """Writes a mutant and says what the program does with it."""
    own = folder / "mutants"
    own.mkdir(exist_ok=True)
    path = own / f"mutant-{mutants.seed}-{number}.h5"
    path.write_bytes(mutants.bytes_of(number))
    kind = kind_of(number)
    print(" ".join(command_of(kind, [path], own, mutants.sounds)))
    print(problem_of(kind, [path], own, mutants.sounds) or "survived")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10000, metavar="N", help="mutants (default 10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="others (default 0)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first mutant's number (default 0)")
    parser.add_argument("--resume", action="store_true", help="go on where the last run of this seed stopped")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at once (default 2)")
    parser.add_argument("--no-repair", action="store_true", help="checksums stay wrong")
    parser.add_argument("--show", type=int, metavar="N", help="only this mutant")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was done is logged
    BUILD.mkdir(parents=True, exist_ok=True)
    mutants = Mutants(options.seed, sound_folder(BUILD), repairs=not options.no_repair)
    if options.show is not None:
        show(mutants, options.show, BUILD)
        return 0
    first = options.first
    state = BUILD / f"mutants-{options.seed}.json"
    if options.resume and state.exists():
        first = json.loads(state.read_text())["next"]
    return 1 if mutate(mutants, first, options.files, options.jobs, BUILD) else 0


if __name__ == "__main__":
    sys.exit(main())
