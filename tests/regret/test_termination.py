"""A command that replays in memory ends at SIGTERM and leaves no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvreplay import _engine


def test_sigterm_leaves_no_file(tmp_path: Path) -> None:
    trace, temporary = tmp_path / "long.h5", tmp_path / "temporary"
    temporary.mkdir()
    shape = "--layers 8 --query-heads 8 --prompt 4000".split()
    assert _engine.program(["synth", "gaussian", "-o", str(trace), *shape]) == 0
    words = [sys.executable, "-m", "kvreplay.bounds.command", str(trace), "-p", "h2o", "-b", "0.1"]
    with subprocess.Popen(
        words, env=os.environ | {"TMPDIR": str(temporary)}, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as command:
        while trace.name not in Path(f"/proc/{command.pid}/maps").read_text() and command.poll() is None:
            time.sleep(0.01)
        command.send_signal(signal.SIGTERM)
        said = command.communicate(timeout=60)[1]
    assert command.returncode == 130, said
    assert list(temporary.iterdir()) == []
