"""Are results the same in any locale, time zone, year and folder, and without locks?"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import h5py
import pytest
from program import done, kvreplay
from subjects import Replay, Subject

INPUT, RESOURCES = 3, 5
NAMES = [
    "a b",
    'it\'s "so"',
    "two\nlines",
    "größe-ὕψος-高さ",
    "$(HOME);*?[x]&",
    "-leading",
    "x" * 200,
    "%s%n",
    "\udcff\udcfe",
]
ANY_BYTES = {"errors": "surrogateescape"}  # of a name that is no UTF-8


@pytest.fixture(scope="session")
def decimal_comma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of locales with de_DE.UTF-8."""
    folder = tmp_path_factory.mktemp("locales")
    try:
        made = subprocess.run(
            ["localedef", "-i", "de_DE", "-f", "UTF-8", folder / "de_DE.UTF-8"], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no localedef here")
    if made.returncode != 0:
        pytest.skip(f"no such locale can be made: {made.stderr.strip()}")
    return folder


def check_equal(subject: Subject, where: Path, environment: dict[str, str]) -> None:
    answer = subject.ended(subject.place(where), environment)
    assert (answer.code, answer.err) == (0, ""), answer
    assert done("diff", subject.whole, where / subject.result, folder=where) == "equal\n"
    if (where / subject.result).is_dir():
        assert (where / subject.result / "results.csv").read_bytes() == (subject.whole / "results.csv").read_bytes()


@pytest.mark.parametrize("name", ["replay", "synth", "capture"])
def test_a_decimal_comma(name: str, decimal_comma: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    german = {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8", "LOCPATH": str(decimal_comma)}
    check_equal(request.getfixturevalue(name), tmp_path / "german", german)


@pytest.mark.parametrize("name", ["replay", "capture"])
@pytest.mark.parametrize("second", [-1, 0, 2**31, 253402300800], ids=["1969", "1970", "2038", "10000"])
def test_a_clock_gone_wrong(
    name: str, second: int, interposed: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if name == "capture" and second != 0:
        pytest.skip("one year is enough")
    clock = {"FAULT_CLOCK": str(second), "LD_PRELOAD": str(interposed)}
    check_equal(request.getfixturevalue(name), tmp_path / "then", clock)


def test_time_zones(replay: Replay, tmp_path: Path) -> None:
    for number, zone in enumerate(("Pacific/Kiritimati", ":nonsense", "")):
        check_equal(replay, tmp_path / str(number), {"TZ": zone, "SOURCE_DATE_EPOCH": "1"})


def test_names_of_folders(trace: Path) -> None:
    words = ["-p", "h2o,snapkv:window=2", "-b", "6"]
    folder = trace.parent
    done("replay", "fixture.h5", *words, "-o", "whole", folder=folder)
    for name in NAMES:
        odd = folder / name
        odd.mkdir()
        (odd / "fixture.h5").hardlink_to(trace)
        here = f"./{name}"
        answer = kvreplay("replay", f"{here}/fixture.h5", *words, "-o", f"{here}/out", folder=folder, **ANY_BYTES)
        assert (answer.code, answer.err) == (0, ""), answer
        assert done("diff", "whole", f"{here}/out", folder=folder) == "equal\n"
        assert (odd / "out/results.csv").read_bytes() == (folder / "whole/results.csv").read_bytes()


def test_names_of_traces(trace: Path) -> None:
    """A name that results cannot bear is refused before anything is computed; any other one works."""
    folder = trace.parent
    for number, name in enumerate(["a b", "two\nlines", "größe-ὕψος", "\udcff", "y" * 244, "y" * 245, "y" * 250]):
        odd = folder / f"{name}.h5"
        odd.hardlink_to(trace)
        answer = kvreplay(
            "replay", f"./{name}.h5", "-p", "h2o", "-b", "6", "-o", f"out{number}", folder=folder, **ANY_BYTES
        )
        borne = "\n" not in name and len(name) <= 244
        if borne:
            assert (answer.code, answer.err) == (0, ""), answer
            with h5py.File(folder / f"out{number}/cells/{name}.h5") as file:
                assert len(file["cells"]) == 4
        else:
            assert answer.code == INPUT and answer.err.count("\n") == 1, answer
            assert not (folder / f"out{number}").exists()


@pytest.mark.parametrize("name", ["replay", "synth", "capture"])
@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_no_locks(name: str, error: int, interposed: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name == "capture" and error != errno.ENOLCK:
        pytest.skip("one of them is enough")
    check_equal(
        request.getfixturevalue(name), tmp_path / "nfs", {"FAULT_LOCKS": str(error), "LD_PRELOAD": str(interposed)}
    )


def test_observables_without_locks(trace: Path, interposed: Path) -> None:
    words = ["replay", "fixture.h5", "-p", "h2o", "-b", "6", "--observables", "keep", "-o"]
    nfs = {**os.environ, "FAULT_LOCKS": str(errno.ENOLCK), "LD_PRELOAD": str(interposed)}
    for name in ("first", "second"):
        assert kvreplay(*words, name, folder=trace.parent, env=nfs).code == 0
    assert done("diff", "first", "second", folder=trace.parent) == "equal\n"
    assert (trace.parent / "fixture.obs.h5").is_file()
