"""`kvreplay tune TRACE... -p POLICY -b BUDGET`: fits a policy on some traces and reports it on others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.capture.model_options import ModelChoices, add_model_options
from kvreplay.errors import Error, Refusal
from kvreplay.headline import HEADLINE
from kvreplay.program import (
    OF_RATIO,
    Parser,
    add_replay_options,
    add_same_prompt,
    budget_of_ratio,
    exit_code,
    require_format,
    require_least,
    require_paths,
    say_notes,
    writing,
)

if TYPE_CHECKING:
    from kvreplay.live.measure import LiveModel


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay tune",
        writes_files=True,
        description="Fits a policy on some traces and reports it on held-out traces, with the interval of the paired "
        "difference. Searches parameters by random search with successive halving; or allocates the budget over layers "
        "(--layers), or assigns policies to ranges of layers (--ranges), both exactly. Numbers are open loop: queries "
        "as captured under the full cache. Metrics of kvreplay live, such as kld, are measured in a model (--model).",
        examples=(
            "kvreplay tune traces/*.h5 -p snapkv -b 0.1 --search window=8..64,pool=none|max",
            "kvreplay tune traces/*.h5 -p h2o -b 0.2 --layers -o layers.yaml",
        ),
    )
    add = found.add_argument
    add("traces", metavar="TRACE", type=Path, nargs="+",
        help="traces, folders of traces, quoted patterns or manifests (.csv); some of the prompts are "
             "held out")  # fmt: skip
    tuned = found.add_argument_group("policy and search")
    add = tuned.add_argument
    add("-p", "--policy", metavar="POLICY", action="append", required=True,
        help="policy to start from, as in kvreplay replay; two or more with --ranges")  # fmt: skip
    size = tuned.add_mutually_exclusive_group(required=True)
    size.add_argument("-b", "--budget", metavar="BUDGET", help="a fraction of the prompt, or a number of tokens")
    size.add_argument("--compression-ratio", metavar="RATIO", dest="budget", type=budget_of_ratio, help=OF_RATIO)
    way = tuned.add_mutually_exclusive_group()
    way.add_argument("--search", metavar="NAME=VALUES,…", action="append", default=[],
        help="parameters to search, as LOW..HIGH or A|B|C; repeatable (default: all with choices or a range up to "
             "4096 wide, except heads, agg and grow)")  # fmt: skip
    way.add_argument("--layers", action="store_true", help="fit a budget per layer, L times B in total")
    way.add_argument("--ranges", metavar="R", type=int, nargs="?", const=3,
        help="fit a policy per layer, in at most R ranges of layers (default: 3)")  # fmt: skip
    add("--metric", metavar="NAME[:VARIANT]", default=HEADLINE,
        help=f"objective; with --model also a metric of kvreplay live (default: {HEADLINE})")  # fmt: skip
    add("--trials", metavar="N", type=int, default=64,
        help="number of candidates, besides the given policy (default: 64)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="random seed (default: 0)")
    judged = found.add_argument_group("held-out traces")
    apart = judged.add_mutually_exclusive_group()
    apart.add_argument("--hold-out", metavar="SHARE", type=float, default=0.3,
        help="share of the prompts to hold out, at least two prompts (default: 0.3)")  # fmt: skip
    apart.add_argument("--held-out", metavar="TRACE", type=Path, nargs="+", default=[],
        help="held-out traces, folders, patterns or manifests, in place of a share")  # fmt: skip
    add_same_prompt(judged.add_argument)
    add = found.add_argument_group("results").add_argument
    add("-o", "--output", metavar="BEST.yaml", type=Path, default=Path("best.yaml"),
        help="policy file to write (default: best.yaml)")  # fmt: skip
    add("--work", metavar="DIR", type=Path, default=Path("kvreplay-tune"),
        help="folder of the runs; finished cells in it are reused (default: kvreplay-tune)")  # fmt: skip
    add("--json", action="store_true", help="print JSON in place of the table")
    add_model_options(found, required=False)
    add_replay_options(
        found.add_argument_group("execution").add_argument, "device that computes, also of the model (default: auto)"
    )
    return found


def check_options(arguments: argparse.Namespace) -> None:
    """Rejects invalid options and missing files before any file is read."""
    require_format("-o", arguments.output, ".yaml", ".yml")
    if not 0 < arguments.hold_out < 1:
        raise Error("--hold-out", "out of range", "a share between 0 and 1", str(arguments.hold_out), Refusal.USAGE)
    require_least(arguments, trials=1, seed=0, ranges=2)
    # The engine expands patterns later.
    require_paths(*(one for one in (*arguments.traces, *arguments.held_out) if not has_magic(str(one))))
    if arguments.model is not None:
        ModelChoices.of(arguments).check()


def check_model(arguments: argparse.Namespace, is_live: bool) -> None:
    """Rejects a live metric without --model, --model without a live metric, and options for means over layers with a
    live metric."""
    if is_live and arguments.model is None:
        raise Error("--metric", f"{arguments.metric} is measured in the live model", "--model NAME", "none",
                    Refusal.USAGE)  # fmt: skip
    if arguments.model is not None and not is_live:
        raise Error("--model", f"{arguments.metric} needs no model", "a metric of kvreplay live, such as kld", "",
                    Refusal.USAGE)  # fmt: skip
    if is_live and (arguments.layers or arguments.ranges is not None):
        raise Error("--metric", f"{arguments.metric} is not additive over layers",
                    f"a mean over layers, such as {HEADLINE}", "", Refusal.USAGE)  # fmt: skip


def live_model(arguments: argparse.Namespace, say: Callable[[str], None]) -> LiveModel:
    """The model of --model."""
    from kvreplay.capture.command import quiet_libraries

    quiet_libraries(False)
    from kvreplay.capture.model import load
    from kvreplay.live.measure import LiveModel

    choices = ModelChoices.of(arguments)
    model, tokenizer = load(choices)
    return LiveModel(model, tokenizer, choices.source.title, choices.source.hash(), say=say)


def tune(arguments: argparse.Namespace, command: list[str]) -> None:
    """Splits the traces, fits the policy, tests it on held-out traces, and writes the outcome."""
    check_options(arguments)

    from kvreplay.engine import _engine
    from kvreplay.tune import space
    from kvreplay.tune.metric import better_of, is_live

    policies = [one for text in arguments.policy for one in _engine.split_policies(text)]
    several = arguments.ranges is not None
    if several != (len(policies) > 1):
        expected = "two or more policies" if several else "one policy, or --ranges"
        raise Error("-p", "policies to tune", expected, str(len(policies)), Refusal.USAGE)
    policies = [space.with_values(policy, {}) for policy in policies]  # refused here if they cannot be meant
    if len(set(policies)) < len(policies):
        raise Error("-p", "policies to tune", "different policies", ", ".join(policies), Refusal.USAGE)
    _engine.budget(arguments.budget)  # so is the budget
    asked = space.asked_space(arguments.search)
    better_of(arguments.metric)  # so is the metric
    check_model(arguments, is_live(arguments.metric))

    from kvreplay.tune import outcome, search
    from kvreplay.tune.hold_out import split_prompts
    from kvreplay.tune.objective import Objective

    objective = Objective(
        arguments.metric, arguments.budget, arguments.work,
        {"device": arguments.device, "threads": arguments.threads, "memory": arguments.memory},
    )  # fmt: skip
    divided = split_prompts(
        arguments.traces, arguments.held_out, arguments.hold_out, arguments.same_prompt, arguments.seed
    )
    if objective.is_live:
        objective.live = live_model(arguments, objective.note)
    if several:
        found = search.layer_ranges(objective, divided.fitting, policies, arguments.ranges)
    elif arguments.layers:
        found = search.layer_budgets(objective, divided.fitting, policies[0])
    else:
        asked = asked or space.declared_space(policies[0])
        found = search.halving(objective, divided.fitting, policies[0], asked, arguments.trials, arguments.seed)
    on_both = [outcome.difference(objective, side, traces, found, arguments.seed)
               for side, traces in vars(divided).items()]  # fmt: skip
    result = outcome.Outcome(objective, found, divided, *on_both, command)
    with writing(arguments.output):
        arguments.output.write_text(result.policy_file(), encoding="utf-8")
    if arguments.json:
        print(json.dumps(result.document(str(arguments.output)), indent=2, allow_nan=False))
    else:
        print(result.table(arguments.output, arguments.work))
    say_notes("tune", objective.notes, arguments.quiet)


def main(argv: list[str] | None = None) -> int:
    """Prints the result; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code("tune", lambda: tune(parser().parse_args(words), words),
                     "finished traces are kept; run the same command to continue")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
