"""kvreplay in Python: traces, replays, policies in Python, measurements, captures from language models, figures.

```python
import kvreplay as kv

trace = kv.open("trace.h5")
run = kv.replay(trace, ["snapkv", kv.policy.h2o()], [0.1, 512])
run.results                    # every number, as pandas
run.selection("snapkv", 0.1)   # the kept tokens
```

A name is imported at its first use, so that figures work without the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvreplay.engine import Trace, load_plugin, measure, open, plan, policy, replay
    from kvreplay.errors import Error
    from kvreplay.example_trace import example
    from kvreplay.laws import check
    from kvreplay.memory import Rope, from_arrays
    from kvreplay.plot.command import figure
    from kvreplay.python_policies import BlockEnd, Policy, Row, parameter
    from kvreplay.regret_terms import regret
    from kvreplay.results import Run

__all__ = ["BlockEnd", "Error", "Policy", "Rope", "Row", "Run", "Trace", "check", "example", "figure", "from_arrays",
           "load_plugin", "measure", "open", "parameter", "plan", "policy", "regret", "replay"]  # fmt: skip

_PLACES = {
    "kvreplay.regret_terms": ("regret",),
    "kvreplay.engine": ("Trace", "load_plugin", "measure", "open", "plan", "policy", "replay"),
    "kvreplay.errors": ("Error",),
    "kvreplay.example_trace": ("example",),
    "kvreplay.laws": ("check",),
    "kvreplay.memory": ("Rope", "from_arrays"),
    "kvreplay.plot.command": ("figure",),
    "kvreplay.python_policies": ("BlockEnd", "Policy", "Row", "parameter"),
    "kvreplay.results": ("Run",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _load_engine() -> Any:
    """OpenMP reads the environment when it is loaded. Its threads sleep while they wait, unless the user's environment
    contains a setting of this."""
    import os
    from importlib import import_module

    if any(setting in os.environ for setting in _WAITING):
        return import_module("kvreplay._engine")
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        return import_module("kvreplay._engine")
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def __getattr__(name: str) -> Any:
    if name == "_engine":
        return _load_engine()
    if name not in _MODULES:
        raise AttributeError(f"module 'kvreplay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
