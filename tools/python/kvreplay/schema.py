"""The trace's schema, `schema.json`, as a checker: the one table that writer and reader obey."""

from __future__ import annotations

import json
import operator
import re
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import ml_dtypes
import numpy as np

from kvreplay.errors import Error, Refusal

REAL_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
ARRAY_TYPES = {"int32": np.dtype(np.int32), "float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
# What other writers store them as: the same numbers.
ALSO_STORED_AS = {"int32": {"int64": np.dtype(np.int64)}, "float64": {"float32": np.dtype(np.float32)}}
ATTRIBUTE_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int, np.integer),
    "float": (float, np.floating),
}

INT32_MAX = int(np.iinfo(np.int32).max)

_LAYER = re.compile(r"^(/layers/)\d+")
_TENSOR = re.compile(r"^(/layers/\{layer\}/)[^/]+$")
_MODEL_DIMENSION = re.compile(r"(/\w+)@(\w+)")


def _pattern(path: str) -> str:
    return _LAYER.sub(r"\1{layer}", path)


def _size(dimension: str | int, known: dict[str, int]) -> int | None:
    """A dimension by name or number, a product (Hq*d) or a difference (T-P); None: not known yet."""
    for sign, of_two in (("*", operator.mul), ("-", operator.sub)):
        left, found, right = str(dimension).partition(sign)
        if found:
            sizes = _size(left, known), _size(right, known)
            return None if None in sizes else of_two(*sizes)
    return int(dimension) if str(dimension).isdigit() else known.get(dimension)


def load() -> dict[str, Any]:
    """The schema as written, for whoever prints it."""
    return json.loads(files("kvreplay").joinpath("schema.json").read_text("utf-8"))


@dataclass
class Checker:
    """Holds one trace against the schema: each object as it comes, and at the end what is missing.

    `where` names the trace in every message. A dimension is bound by the attribute its help names, or by the
    first dataset that has it; one first met inside a layer holds for that layer alone.
    """

    where: str
    schema: dict[str, Any] = field(default_factory=load)
    dimensions: dict[str, int] = field(default_factory=dict)
    layer_dimensions: dict[str, dict[str, int]] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)

    def _refuse(self, place: str, what: str, expected: str, found: Any) -> Error:
        return Error(f"{self.where}:{place}", what, expected, str(found), Refusal.INPUT)

    def group(self, path: str) -> None:
        """Notes a group; unknown groups are ignored."""
        self.present.add(path)

    def attribute_rule(self, path: str, name: str) -> dict[str, Any] | None:
        places = {_pattern(path), _TENSOR.sub(r"\1{tensor}", _pattern(path))}
        found = (rule for rule in self.schema["attributes"] if rule["object"] in places and rule["name"] == name)
        return next(found, None)

    def dataset_rule(self, path: str) -> dict[str, Any] | None:
        return next((rule for rule in self.schema["datasets"] if rule["path"] == _pattern(path)), None)

    def is_tensor(self, path: str) -> bool:
        """Whether a dataset holds floating-point numbers of a layer; these have hashes of their own."""
        rule = self.dataset_rule(path)
        return rule is not None and "{layer}" in rule["path"] and rule["type"] in ("real", "float32")

    def attribute(self, path: str, name: str, value: Any) -> None:
        """Type and range of one attribute; unknown ones are ignored."""
        rule = self.attribute_rule(path, name)
        if rule is None:
            return
        place = f"{path}@{name}"
        if not isinstance(value, ATTRIBUTE_TYPES[rule["type"]]):
            raise self._refuse(place, "type", rule["type"], type(value).__name__)
        if "equals" in rule and value != rule["equals"]:
            raise self._refuse(place, "value", repr(rule["equals"]), repr(value))
        if "one_of" in rule and value not in rule["one_of"]:
            raise self._refuse(place, "value", " or ".join(rule["one_of"]), repr(value))
        if rule["type"] != "string":
            self._range(place, rule, np.asarray(value))
        self.present.add(place)
        for dimension, text in self.schema["dimensions"].items():
            named = _MODEL_DIMENSION.search(text)
            if named and named.groups() == (path, name):
                self.dimensions[dimension] = int(value)

    def shape(self, path: str, shape: tuple[int, ...]) -> None:
        """A dataset's shape against the dimensions known so far; binds the new ones."""
        rule = self.dataset_rule(path)
        if rule is None:
            return
        layer = _LAYER.match(path)
        scope = self.layer_dimensions.setdefault(layer.group(), {}) if layer else self.dimensions
        known = {**self.dimensions, **scope}
        agrees = len(shape) == len(rule["shape"])
        sizes = [_size(wanted, known) for wanted in rule["shape"]]
        for wanted, size, length in zip(rule["shape"], sizes, shape, strict=False):
            if size is None:
                scope[wanted] = length
            else:
                agrees = agrees and size == length
        if not agrees:
            named = zip(rule["shape"], sizes, strict=True)
            expected = ", ".join(str(w) if size in (None, w) else f"{w} = {size}" for w, size in named)
            raise self._refuse(path, "shape", f"[{expected}]", list(shape))
        self.present.add(path)

    def element_type(self, path: str, dtype: np.dtype) -> None:
        """A dataset's element type; strings and compounds are the writer's and the reader's own business."""
        rule = self.dataset_rule(path)
        if rule is None or rule["type"] in ("string", "span"):
            return
        own = rule["type"]
        allowed = REAL_TYPES if own == "real" else {own: ARRAY_TYPES[own], **ALSO_STORED_AS.get(own, {})}
        if dtype not in allowed.values():
            raise self._refuse(path, "type", " or ".join(allowed), dtype)

    def values(self, path: str, array: np.ndarray) -> None:
        """Range and order of a small dataset's values."""
        rule = self.dataset_rule(path)
        if rule is None or array.size == 0:
            return
        self._range(path, rule, array)
        if rule["type"] == "int32" and array.max() > INT32_MAX:
            raise self._refuse(path, "value", f"at most {INT32_MAX}", array.max())
        if rule.get("ascending") and np.any(np.diff(array) <= 0):
            raise self._refuse(path, "order", "ascending", f"{array[np.argmax(np.diff(array) <= 0) + 1]} out of order")

    def _range(self, place: str, rule: dict[str, Any], array: np.ndarray) -> None:
        checks = {
            "min": ("at least", array < rule.get("min", 0)),
            "max": ("at most", array > rule.get("max", 0)),
            "above": ("above", array <= rule.get("above", 0)),
        }
        if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
            raise self._refuse(place, "value", "finite", array[~np.isfinite(array)].flat[0])
        for key, (words, bad) in checks.items():
            if key in rule and np.any(bad):
                raise self._refuse(place, "value", f"{words} {rule[key]}", array[bad].flat[0])

    def span(self, name: str, kind: str, begin: int, end: int) -> None:
        """One named token range."""
        tokens = self.dimensions["T"]
        if not 0 <= begin < end <= tokens:
            expected = f"0 <= begin < end <= {tokens}"
            raise self._refuse("/spans", f"range of span {name} ({kind})", expected, f"[{begin}, {end})")

    def finish(self) -> None:
        """Everything required is there, and every layer has its queries."""
        layers = [f"/layers/{layer:03d}" for layer in range(self.dimensions.get("L", 0))]
        absent = {group["path"] for group in self.schema["groups"] if not group["required"]} - self.present
        for rule in self.schema["groups"] + self.schema["datasets"]:
            if not rule["required"] or rule["path"].rsplit("/", 1)[0] in absent:
                continue
            in_layers = [rule["path"].replace("/layers/{layer}", layer) for layer in layers]
            for path in in_layers if "{layer}" in rule["path"] else [rule["path"]]:
                if path not in self.present:
                    raise self._refuse(path, "object", "present", "nothing")
        for rule in self.schema["attributes"]:
            owned = rule["object"] == "/" or rule["object"] in self.present
            if rule["required"] and owned and f"{rule['object']}@{rule['name']}" not in self.present:
                raise self._refuse(f"{rule['object']}@{rule['name']}", "attribute", "present", "nothing")
        for layer in layers:
            queries = self.layer_dimensions[layer]["Tq"]
            if f"{layer}/q_positions" not in self.present and queries != self.dimensions["T"]:
                raise self._refuse(f"{layer}/q", "queries without q_positions", str(self.dimensions["T"]), queries)
