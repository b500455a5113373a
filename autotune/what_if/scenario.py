"""What may be asked in a what-if question: the keys, their values, sweeps over them.

Knows nothing of profiles or prices.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from profiles.errors import UsageError

MAX_POINTS = 20_000
N_STEPS = 10
"""Steps of a sweep over real numbers that names none."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_QUANTITY = re.compile(r"(?P<number>[^xkmb]+?)(?P<unit>[xkmb]?)\Z", re.I)


@dataclass(frozen=True)
class Quantity:
    """A hardware figure or a size: absolute, or a factor of what it was.

    Attributes:
        value: The number.
        is_factor: Whether it multiplies what was there.
    """

    value: float
    is_factor: bool

    def __str__(self) -> str:
        return f"{self.value:g}" + ("x" if self.is_factor else "")


Value = int | float | str | Quantity


@dataclass(frozen=True)
class Key:
    """One thing that can be changed.

    Attributes:
        kind: What its values are; a text-or-factor is a number or a name.
        low: Smallest legal number.
        text: What it means.
        unit: Of its numbers, for a picture.
        high: Largest legal number; more is a mistake, and figures stay finite.
    """

    kind: Literal["whole", "number", "quantity", "factor or name", "name"]
    low: float
    text: str
    unit: str = ""
    high: float = 1e9


_SIZE, MOST_PARAMETERS = "parameters or factor", 1e15

KEYS: dict[str, Key] = {
    "depth": Key("whole", 0, "levels of the tree; 0 is plain decoding", "levels"),
    "width": Key("whole", 1, "nodes expanded per level", "nodes"),
    "top_k": Key("whole", 1, "children per expanded node", "children"),
    "nodes": Key("whole", 1, "nodes verified per round", "per round"),
    "batch": Key("whole", 1, "requests decoded together", "requests"),
    "context": Key("whole", 0, "tokens in the cache", "tokens"),
    "acceptance": Key(
        "factor or name",
        0,
        "factor on every rate, another profile, or a domain of a --measurements file",
        "factor",
    ),
    "draft_cost": Key("number", 0, "factor on the draft's share of a round", "factor"),
    "verify_cost": Key(
        "number", 1e-3, "factor on the verify pass, plain decoding untouched", "factor"
    ),
    "fixed_overhead": Key("number", 0, "ms added to every speculative round", "ms per round"),
    "memory_bandwidth": Key(
        "quantity", 1e-9, "GB/s, a factor such as 2x, or a device's name", "GB/s or factor"
    ),
    "compute": Key(
        "quantity", 1e-9, "TFLOPS, a factor such as 2x, or a device's name", "TFLOPS or factor"
    ),
    "target_size": Key(
        "quantity", 1e-9, "parameters such as 4B, or a factor such as 2x", _SIZE, MOST_PARAMETERS
    ),
    "draft_size": Key(
        "quantity", 1e-9, "parameters such as 200M, or a factor such as 2x", _SIZE, MOST_PARAMETERS
    ),
    "output_length": Key("whole", 1, "tokens of an answer, for the end-to-end speedup", "tokens"),
    "draft": Key("name", 0, "another draft of the same tuning job"),
}


@dataclass(frozen=True)
class Scenario:
    """One set of answers to "what if"; None leaves a thing as it is."""

    depth: int | None = None
    width: int | None = None
    top_k: int | None = None
    nodes: int | None = None
    batch: int = 1
    context: int | None = None
    acceptance: float | str = 1.0
    draft_cost: float = 1.0
    verify_cost: float = 1.0
    fixed_overhead: float = 0.0
    memory_bandwidth: Quantity | str | None = None
    compute: Quantity | str | None = None
    target_size: Quantity | None = None
    draft_size: Quantity | None = None
    output_length: int | None = None
    draft: str | None = None


def parse_changes(changes: Mapping[str, Any]) -> dict[str, Value]:
    """Return changes with their values checked.

    Args:
        changes: By key; numbers, or text as on the command line.

    Raises:
        UsageError: A key is unknown or a value is nonsense.
    """
    return {key: parse_value(key, value) for key, value in changes.items()}


def expand(
    changes: Mapping[str, Value], sweeps: Mapping[str, Sequence[Value]]
) -> list[dict[str, Value]]:
    """Return the changes at every point of a grid, the first sweep outermost.

    Raises:
        UsageError: There are more than two sweeps, too many points, or a key is set and swept.
    """
    if len(sweeps) > 2:
        raise UsageError(f"at most two keys can be swept, but got {len(sweeps)}: use --set")
    if doubled := set(sweeps) & set(changes):
        raise UsageError(f"{doubled.pop()} must be either set or swept, but is both: drop one")
    if math.prod(map(len, sweeps.values())) > MAX_POINTS:
        raise UsageError(f"sweeps must have at most {MAX_POINTS} points: use a larger step")
    return [
        {**changes, **dict(zip(sweeps, point, strict=True))}
        for point in itertools.product(*sweeps.values())
    ]


def parse_value(key: str, value: Any) -> Value:
    """Return a value of a key, checked.

    Raises:
        UsageError: The key is unknown or the value is nonsense.
    """
    rule = _key(key)
    if isinstance(value, Quantity):
        value = str(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refused(key, value)
    text = str(value).strip()
    if rule.kind == "name" or not text:
        if not text or not isinstance(value, str):
            raise _refused(key, value)
        return text
    if rule.kind == "quantity":
        return _quantity(key, text)
    number = _number(text)
    if number is None and rule.kind == "factor or name" and isinstance(value, str):
        return text
    if number is None or not rule.low <= number <= rule.high:
        raise _refused(key, value)
    if rule.kind != "whole":
        return number
    if number != int(number):
        raise _refused(key, value)
    return int(number)


def parse_sweep(key: str, text: str | Iterable[Any]) -> list[Value]:
    """Return the values of a sweep: `LO:HI`, `LO:HI:STEP`, or a list separated by commas.

    Raises:
        UsageError: The key is unknown, or the range or one of its values is nonsense.
    """
    rule = _key(key)
    if not isinstance(text, str):
        return _distinct(key, [parse_value(key, value) for value in text])
    if ":" not in text:
        return _distinct(key, [parse_value(key, part) for part in text.split(",")])
    parts = text.split(":")
    if rule.kind == "name" or len(parts) > 3:
        raise UsageError(f"a sweep of {key} must be {_form(rule)}, but got {text!r}: correct it")
    ends = [parse_value(key, part) for part in parts[:2]]
    low, high = (end.value if isinstance(end, Quantity) else end for end in ends)
    if isinstance(low, str) or isinstance(high, str) or not low <= high:
        raise UsageError(f"a sweep of {key} must rise from LO to HI, but got {text!r}: correct it")
    is_factor = [isinstance(end, Quantity) and end.is_factor for end in ends]
    if is_factor[0] != is_factor[1]:
        raise UsageError(f"both ends of a sweep of {key} must be factors, or neither: {text!r}")
    points = _points(key, low, high, parts[2] if len(parts) == 3 else None)
    if rule.kind == "quantity":
        return [Quantity(point, is_factor[0]) for point in points]
    return [int(point) if rule.kind == "whole" else point for point in points]


def _points(key: str, low: float, high: float, step_text: str | None) -> list[float]:
    whole = KEYS[key].kind == "whole"
    step: float | None = 1.0 if whole else (high - low) / N_STEPS
    if step_text is not None:
        step = _number(step_text.rstrip("x"))
        if step is None or step <= 0 or (whole and step != int(step)):
            raise UsageError(
                f"the step of a sweep of {key} must be above 0, but got {step_text!r}"
            )
    if not step:
        return [low]
    n_steps = (high - low) / step
    if n_steps > MAX_POINTS:
        raise UsageError(f"sweeps must have at most {MAX_POINTS} points: use a larger step")
    return [round(low + i * step, 9) for i in range(math.floor(n_steps + 1e-9) + 1)]


def _distinct(key: str, values: list[Value]) -> list[Value]:
    if not values:
        raise UsageError(f"a sweep of {key} must have at least one value, but got none: add one")
    return list(dict.fromkeys(values))


def _key(key: str) -> Key:
    if key not in KEYS:
        raise UsageError(f"a key must be one of {', '.join(KEYS)}, but got {key!r}: correct it")
    return KEYS[key]


def _quantity(key: str, text: str) -> Quantity | str:
    match = _QUANTITY.match(text)
    number = _number(match["number"]) if match else None
    if match is None or number is None:
        if key in ("memory_bandwidth", "compute") and text[0] != "-":
            return text  # a device's name
        raise _refused(key, text)
    unit = match["unit"].lower()
    if unit not in ("", "x") and not key.endswith("_size"):
        raise _refused(key, text)
    value = number if unit == "x" else number * _UNITS[unit]
    if not KEYS[key].low <= value <= KEYS[key].high:
        raise _refused(key, text)
    return Quantity(value, unit == "x")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def _refused(key: str, value: object) -> UsageError:
    rule = KEYS[key]
    return UsageError(f"{key} must be {_form(rule)}, but got {value!r}: correct it")


def _form(rule: Key) -> str:
    return {
        "whole": f"a whole number from {rule.low:g} to {rule.high:g}",
        "number": f"a number from {rule.low:g} to {rule.high:g}",
        "quantity": f"a number from {rule.low:g} to {rule.high:g} ({rule.text})",
        "factor or name": f"a number from {rule.low:g} to {rule.high:g} or a name ({rule.text})",
        "name": f"a name ({rule.text})",
    }[rule.kind]
