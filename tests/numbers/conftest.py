"""`--hypothesis-profile=long` looks at thirty times as many traces."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

for name, examples in (("default", 15), ("long", 500)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=name == "default",
    )
settings.load_profile("default")
