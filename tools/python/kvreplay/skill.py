"""Skill: the recall of a policy on a scale from its random twin (0) to the best set with the same counts (1).

    skill = (recall - twin) / (oracle - twin)

All three are means of attention recall over the same layers and heads. The twin of a policy is the policy
`random-twin:of=(POLICY)` at the same number of tokens on the same trace. For several twins with different seeds, their
mean recall is used.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvreplay.parameters import parameters

if TYPE_CHECKING:
    import pandas as pd

TWIN = "random-twin"
SKILL = {"name": "skill", "unit": "ratio", "better": "higher"}  # as run.json declares metrics
SMALLEST = 1e-9  # of oracle less twin: below it no policy can differ from its twin
PLACE = "trace boundary eval backend seed budget_tokens layer head".split()  # what a policy's row and its twin's share

Policy = tuple[str, str]  # name and canonical parameters


def is_recall(rows: pd.DataFrame) -> pd.Series:
    """The rows that skill is computed from."""
    return (rows["metric"] == "attention_recall") & rows["variant"].isin(["", "oracle"])


def named(label: str) -> tuple[str, set[tuple[str, str]]]:
    """The name and the values of a policy."""
    name, _, values = label.partition(":")
    return name, set(parameters(values).items())


def policy_of_twin(params: str) -> str:
    """The policy whose twin has these parameters."""
    return parameters(params).get("of", "").removeprefix("(").removesuffix(")")


def twins_of(cells: pd.DataFrame, labels: dict[Policy, str]) -> dict[Policy, str]:
    """The parameter `of` of each policy's random twin among these cells; policies without a twin are omitted.

    `of` is a label: it names the parameters that differ from their defaults, and seeds. So it matches its own policy,
    and policies that differ from this one in more parameters. If `labels` contains the label of a policy, `of` must
    agree with it. Otherwise the matching twin with the most parameters is used, unless it matches several policies.
    """
    policies = list(dict.fromkeys(zip(cells["policy"], cells["params"], strict=True)))
    twins = {of: named(of) for of in {policy_of_twin(params) for name, params in policies if name == TWIN}}
    found: dict[Policy, str] = {}
    for name, params in policies:
        values = set(parameters(params).items())
        least = named(labels.get((name, params), name))[1]
        fits = [of for of, (twin, own) in twins.items() if twin == name and least <= own <= values]
        if fits:
            found[name, params] = max(fits, key=lambda of: len(twins[of][1]))
    fitted = Counter(found.values())
    return {policy: of for policy, of in found.items() if policy in labels or fitted[of] == 1}


def skill_rows(recalls: pd.DataFrame, twins: dict[Policy, str]) -> pd.DataFrame:
    """Rows of the metric `skill`, one for each row of attention recall that has its twin's; NaN where undefined.

    `recalls`: rows of `is_recall` with numbers; `twins` as of `twins_of`.
    """
    import pandas as pd

    own, oracle = (recalls[recalls["variant"] == variant] for variant in ("", "oracle"))
    of_twin = own[own["policy"] == TWIN]
    of_twin = of_twin.assign(of=of_twin["params"].map(policy_of_twin))
    of_twin = of_twin.groupby([*PLACE, "of"], as_index=False)["value"].mean()
    policies = zip(own["policy"], own["params"], strict=True)
    found = own.assign(of=pd.Series([twins.get(policy) for policy in policies], own.index, dtype=object))
    found = found.merge(of_twin, on=[*PLACE, "of"], suffixes=("", "_of_twin"))
    cell = ["trace", "cell", "layer", "head"]
    found = found.merge(oracle[[*cell, "value"]], on=cell, how="left", suffixes=("", "_of_oracle"))
    room = found["value_of_oracle"] - found["value_of_twin"]
    value = (found["value"] - found["value_of_twin"]) / room
    found = found.assign(metric=SKILL["name"], variant="", unit=SKILL["unit"], value=value.where(room > SMALLEST))
    return found[recalls.columns]
