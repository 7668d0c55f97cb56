"""Runs of many traces, written by hand: results.csv and run.json with the numbers that a test gives."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from kvreplay.parameters import parameters
from kvreplay.results import COLUMNS

UNITS = {"output_error": "relative L2 norm", "kv_bytes": "bytes", "kv_l1_loss:rho": "ratio"}
CONTROLS = ("full", "random", "random-twin")
METRICS = {"attention_recall": "higher", "output_error": "lower", "kv_bytes": "neither"}


def write_run(
    folder: Path,
    values: dict[str, dict[str, list[float | str]]],
    traces: list[str],
    model: str = "small",
    prompts: list[str] | None = None,
    better: dict[str, str] = METRICS,
    variants: dict[str, str] | None = None,
    budgets: tuple[str, ...] = ("0.1",),
    hashes: list[str] | None = None,
    eval_queries: str = "continuation",
    version: str = "",
    labels: dict[str, str] | None = None,
) -> Path:
    """`values`: numbers of all traces by policy NAME[:PARAMS], by metric NAME[:VARIANT]; no selections, so none can
    be read. `labels`: by policy NAME[:PARAMS], its label in run.json; by default run.json has none."""
    (folder / "cells").mkdir(parents=True)
    hashes = hashes or [f"{model}/{trace}" for trace in traces]
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as page:
        writer = csv.DictWriter(page, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for i, trace in enumerate(traces):
            about = {"trace": trace, "trace_hash": hashes[i], "model": model, "boundary": 100, "eval": eval_queries,
                     "n_queries": 32, "open_loop": "true", "synthetic": "false", "backend": "cpu"}  # fmt: skip
            writer.writerow(about | {"role": "trace", "layer": "all", "head": "all", "metric": "redundancy_key"})
            for budget in budgets:
                for policy, metrics in values.items():
                    name, _, params = policy.partition(":")
                    cell = about | {
                        "role": "control" if name in CONTROLS else "asked", "policy": name, "params": params,
                        "heads": "kv", "budget": budget, "budget_tokens": 100 * float(budget), "seed": 0,
                        "cell": f"{hashes[i]}/{policy}/{budget}{version}",
                    }  # fmt: skip
                    for metric, column in metrics.items():
                        row = cell | dict(zip(("metric", "variant"), metric.partition(":")[::2], strict=True))
                        writer.writerow(row | {"layer": 0, "head": "all", "value": 77})
                        writer.writerow(row | {"layer": "all", "head": "all", "value": column[i]})
    prompts = prompts or [f"ids of {one}" for one in hashes]
    inputs = [{"trace": trace, "trace_hash": one, "prompt_hash": prompt, "path": f"{trace}.h5"}
              for trace, one, prompt in zip(traces, hashes, prompts, strict=True)]  # fmt: skip
    about = {"schema": "kvreplay-run/1", "open_loop": True, "inputs": inputs,
             "policies": [{"label": label, "name": policy.partition(":")[0],
                           "parameters": parameters(policy.partition(":")[2])}
                          for policy, label in (labels or {}).items()],
             "metrics": [{"name": name, "unit": UNITS.get(name, "share"), "better": word, "variants": [
                 {"name": variant, "better": other} | ({"unit": UNITS[variant]} if variant in UNITS else {})
                 for variant, other in (variants or {}).items()
                 if variant.startswith(name + ":")]} for name, word in better.items()]}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return folder
