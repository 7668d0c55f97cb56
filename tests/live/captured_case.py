"""A model's folder, and a run over a trace of it."""

from dataclasses import dataclass
from pathlib import Path

from kvreplay.live.command import main

PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."


@dataclass(frozen=True)
class Case:
    """One model."""

    model: Path
    run: Path

    def live(self, *words: str) -> int:
        """The exit code of `kvreplay live RUN --model MODEL WORDS`."""
        return main([str(self.run), "--model", str(self.model), "--progress", "never", *words])
