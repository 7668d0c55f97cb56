"""The same sweep without Dask: an array of Slurm jobs, each a shard of the replay, and a command that merges them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kvreplay.program import program
from kvreplay.sweep.executors import Wanted, directives

SCRIPT = """#!/bin/bash
# Shards of a replay as an array of jobs, and their merge after them:
#   job=$(sbatch --parsable THIS_FILE) && sbatch --dependency=afterok:"$job" --wrap {merge}
# To continue a failed job: sbatch --array=NUMBER THIS_FILE, then the merge.
#SBATCH --job-name=kvreplay-sweep
#SBATCH --array=1-{shards}
{directives}
set -euo pipefail
cd {directory}
{program} {words} \\
  --shard "$SLURM_ARRAY_TASK_ID"/{shards} -o {output}/shards/"$SLURM_ARRAY_TASK_ID" \\
  {allowance} --progress never
"""


def array_script(words: Sequence[str], output: Path, wanted: Wanted) -> str:
    """The script. `words`: the whole command line of the replay, with its traces. There is one job for each worker."""
    folder = shlex.quote(str(output.absolute()))
    called = shlex.join(program())
    return SCRIPT.format(
        merge=shlex.quote(f"{called} merge {folder} {folder}/shards/*"),
        shards=wanted.workers,
        directives="\n".join(f"#SBATCH {directive}" for directive in directives(wanted)),
        directory=shlex.quote(str(Path.cwd())),
        program=called,
        words=shlex.join(["replay", *words]),
        output=folder,
        allowance=shlex.join(wanted.allowance.words(0)),
    )
