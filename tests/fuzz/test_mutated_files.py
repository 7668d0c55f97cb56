"""A few thousand damaged files, each refused or read: never a crash, a hang, or a bug that the program itself reports.

`tests/fuzz/mutate_files.py` does the same at length.
"""

from __future__ import annotations

from pathlib import Path

import mutate_files
import pytest
from mutate_files import Mutants, checksummed, lookup3


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound files."""
    return mutate_files.sound_folder(tmp_path_factory.mktemp("fuzz"))


def test_the_checksum_is_hdf5s(sounds: Path):
    for name in ("trace", "newest", "cells"):
        blocks = checksummed((sounds / f"{name}.h5").read_bytes())
        assert blocks[0].begin == 0
        assert sum(block.is_header for block in blocks) > 10
    # Bob Jenkins's own examples.
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551


def test_sound_files_are_read(sounds: Path, tmp_path: Path):
    for number, kind in enumerate(mutate_files.TOGETHER + mutate_files.ALONE):
        own = tmp_path / str(number)
        own.mkdir()
        assert mutate_files.problem_of(kind, [sounds / f"{kind.sound}.h5"], own, sounds) is None, kind


def test_damaged_files_are_refused_or_read(sounds: Path, tmp_path: Path):
    mutants = Mutants(seed=1, sounds=sounds, repairs=True)
    assert mutate_files.mutate(mutants, 0, 31 * mutate_files.BATCH, 2, tmp_path) == []
    # Few of those that take a process each.
    first = 31 * mutate_files.BATCH
    assert mutate_files.mutate(mutants, first, len(mutate_files.ALONE), 2, tmp_path) == []
