"""Colour, line style and marker of every policy, the same in figures, reports and notebooks. Needs no matplotlib."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

# Okabe and Ito's palette without yellow, which is faint on white, and indigo, wine and brown: ten colours that remain
# distinct with protanopia and deuteranopia, also from the grey of the controls. ON_DARK has the same hues for a dark
# ground, in the same order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#332288", "#882255", "#7A3E00")
ON_DARK = ("#2C85BD", "#FF7731", "#05D891", "#D29FE4", "#FFD43D", "#A1E3F4", "#FFFFFF", "#C06AFD", "#A85D83", "#AC5A35")
MARKERS = "osD^vPX<>p"
DASHES = ("-", (0, (4, 1.2)), (0, (1.2, 1)), (0, (6, 1.2, 1.2, 1.2)))
GREY, GREY_ON_DARK = "#6e6e6e", "#9a9a9a"
CONTROLS = {
    "full": {"linestyle": "-", "marker": "h"},
    "oracle": {"linestyle": (0, (5, 2)), "marker": "*"},
    "random": {"linestyle": (0, (1, 1.5)), "marker": "d"},
    "random-twin": {"linestyle": (0, (3, 1.5, 1, 1.5)), "marker": "d"},
}
# The policies of each colour. The ten that figures draw most are the first of their colours, and no family of at most
# ten policies has a colour twice.
POLICIES = (
    ("snapkv", "keydiff", "ada-kv", "local", "kvcrush", "oracle-top-k"),
    ("h2o", "lagkv", "head-kv", "kivi", "r-kv", "oracle-top-p"),
    ("chunkkv", "expected-attention", "compactor", "lava", "vase", "page-means"),
    ("finch", "cur", "pyramid-infer", "hybrid", "keyformer", "double-sparsity"),
    ("sca", "observed-attention", "duo-attention", "strided", "critical-kv", "kvzip"),
    ("knorm", "h2o-online", "defensive-kv", "cam-one-shot", "lru", "pq", "kvcompose"),
    ("tova", "leverage", "simlayerkv", "think", "lfu", "magic-pig"),
    ("pyramid-kv", "vatp", "q-filter", "minicache", "native"),
    ("streaming-llm", "scissorhands", "value-norm", "nacl", "dms", "cam"),
    ("dynamickv", "caote", "truncate", "quest", "cap-kv", "tri-attention"),
)


def normal(name: str) -> str:
    """A name without case and hyphens: `SnapKV` is `snapkv`."""
    return name.lower().replace("-", "")


Place = tuple[int, int]  # a colour, and a row of that colour, which gives the marker
PLACES: dict[str, Place] = {
    normal(name): (colour, row) for colour, names in enumerate(POLICIES) for row, name in enumerate(names)
}


def policy_name(label: str) -> str:
    """The name of a label: `snapkv:window=32` and `SnapKV, window 32` are `snapkv`. A policy that is not built in is
    named by the text before its parameters."""
    first = normal(re.split("[:, ]", label)[0])
    return first if first in PLACES else normal(label.partition(":")[0])


def places_of(names: Iterable[str]) -> dict[str, Place]:
    """A place for each name. A built-in policy always has the same. Another name has the colour of a hash of the name,
    or the next one that no other name has, and a row without a built-in policy."""
    names = set(names)
    places = {name: PLACES[name] for name in sorted(names & set(PLACES))}
    for name in sorted(names - set(PLACES)):
        preferred = zlib.crc32(name.encode()) % len(COLOURS)
        taken = {colour for colour, _ in places.values()}
        ring = [*range(preferred, len(COLOURS)), *range(preferred)]
        colour = next((one for one in ring if one not in taken), preferred)
        row = len(POLICIES[colour])
        while (colour, row) in places.values():
            row += 1
        places[name] = colour, row
    return places


def looks_of(labels: Sequence[str], controls: Sequence[str] = ()) -> dict[str, dict[str, object]]:
    """Colour, dash and marker of each label that one figure draws; those of `controls` are grey.

    Colour, dash and marker follow from the policy's name: policies of one colour differ in dash and marker. So do
    several labels of a policy, the one without parameters first.
    """
    shown = [label for label in labels if label not in controls]
    of_label = {label: policy_name(label) for label in shown}
    places = places_of(of_label.values())
    variants = dict.fromkeys(places, 0)
    found: dict[str, dict[str, object]] = {}
    for label in sorted(shown, key=lambda label: normal(label) != of_label[label]):
        name = of_label[label]
        (colour, row), variant = places[name], variants[name]
        variants[name] += 1
        found[label] = {
            "color": COLOURS[colour],
            "linestyle": DASHES[(row + variant) % len(DASHES)],
            "marker": MARKERS[(colour + row + variant) % len(MARKERS)],
            "zorder": 2.5,
        }
    looks = {label: found[label] for label in shown}
    for place, label in enumerate(controls):
        look = CONTROLS.get(label.partition(":")[0], list(CONTROLS.values())[place % len(CONTROLS)])
        looks[label] = {"color": GREY, "linewidth": 1.1, "zorder": 1.5} | look
    return looks


def on_dark(colour: str) -> str:
    """The same hue for a dark ground."""
    return GREY_ON_DARK if colour == GREY else ON_DARK[COLOURS.index(colour)]
