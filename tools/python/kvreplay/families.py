"""The family of each policy, as `kvreplay policies` lists them."""

from __future__ import annotations

USER_DEFINED = "user-defined"  # of every policy that the engine does not list


def families() -> dict[str, list[str]]:
    """The policies of each family, in the order of `kvreplay policies`; without the engine, no built-in family."""
    try:
        from kvreplay import _engine
    except ImportError:
        return {USER_DEFINED: []}
    return dict(_engine.families())


def family_of(policy: str) -> str:
    """The family of a policy, by its name."""
    return next((family for family, names in families().items() if policy in names), USER_DEFINED)
