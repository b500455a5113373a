"""Strict, frozen models and the sentences shown when a value breaks their rules.

Knows nothing of YAML, files or what a profile holds: only how a value is checked and how a fault
is told to a person who can mend it.
"""

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from .errors import SpectuneError

MAX_FAULTS_SHOWN = 8

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)


class StrictModel(BaseModel):
    """A frozen record: unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Add what every field means to the docstring, for `help` and `pydoc`."""
        super().__pydantic_init_subclass__(**options)
        told = [f"    {name}: {field.description}" for name, field in cls.model_fields.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:", *told])


LARGEST, SMALLEST = 1e15, 1e-15
"""Beyond these a figure is a mistake; within them no product of a few overflows."""


def round_figure(value: float) -> float:
    """Keep six significant digits, so that what is checked is exactly what is written.

    What is nearer to 0 than `SMALLEST` is 0.
    """
    return float(f"{value:.6g}") if abs(value) >= SMALLEST else 0.0


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=int(LARGEST))]
AtLeastOne = Annotated[int, Field(ge=1, le=int(LARGEST))]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST), AfterValidator(round_figure)]
Positive = Annotated[Number, Field(gt=0)]
# Files hold lists and frozen records hold tuples; the items themselves stay strict.
if TYPE_CHECKING:
    Items: TypeAlias = Sequence
else:
    Items = Annotated[tuple[T, ...], Field(strict=False)]


def broken_rule(rule: str, *, at: tuple[int | str, ...] = (), value: object = None) -> Exception:
    """Build the error a validator raises for a rule that pydantic has no name for.

    Args:
        rule: The rule and the remedy; the key path and the value are put in front of it.
        at: The key at fault below the model or field being validated.
        value: The value found there, where it is not the validated input itself.
    """
    # The text travels as context because pydantic would fill in any {braces} in a template.
    return PydanticCustomError("broken_rule", "{rule}", {"rule": rule, "at": at, "value": value})


def validated(model: type[ModelT], data: Any, source: str) -> ModelT:
    """Check `data` against `model`.

    Args:
        model: The model to build.
        data: Plain Python data, usually a mapping.
        source: Where the data came from (a file, an option), named first in the message.

    Raises:
        SpectuneError: One line per fault with key path, value and remedy.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise SpectuneError(format_validation_error(error, source)) from None


def format_validation_error(error: ValidationError, source: str) -> str:
    """Tell every fault in one line of key path, value, rule and remedy.

    A single fault gives a single line; several are listed below a heading, at most
    `MAX_FAULTS_SHOWN` of them.
    """
    faults = [_fault(dict(detail)) for detail in error.errors(include_url=False)]
    if len(faults) == 1:
        return f"{source}: {faults[0]}"
    lines = [f"{source} has {len(faults)} faults:", *(f"  {f}" for f in faults[:MAX_FAULTS_SHOWN])]
    if len(faults) > MAX_FAULTS_SHOWN:
        lines.append(f"  ... and {len(faults) - MAX_FAULTS_SHOWN} more.")
    return "\n".join(lines)


def key_path(keys: tuple[int | str, ...]) -> str:
    """Write keys as `$.tree.depth` or `$.alternatives[0].tree`."""
    return "$" + "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in keys
    )


def show_value(value: object) -> str:
    """Write a value as the file would, cut to a length that fits in a sentence."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _short.repr(value)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60

# What pydantic found wrong -> the rule and the remedy; {placeholders} come from its context.
_ADVICE = {
    "int_type": "it must be a whole number; write digits only, without quotes",
    "int_from_float": "it must be a whole number; write digits only, without a point",
    "float_type": "it must be a number; write it like 0.001, without quotes",
    "bool_type": "it must be true or false; write one of them, without quotes",
    "string_type": "it must be text; put it in quotes",
    "string_too_short": "it must not be empty; fill it in",
    "finite_number": "it must be a finite number; replace it by the measured one",
    "literal_error": "it must be {expected}; choose one of these",
    "greater_than": "it must be greater than {gt}; correct it",
    "greater_than_equal": "it must be at least {ge}; correct it",
    "less_than": "it must be less than {lt}; correct it",
    "less_than_equal": "it must be at most {le}; correct it",
    "too_short": "it must have at least {min_length} entries; complete it",
    "too_long": "it must have at most {max_length} entries; remove the rest",
    "model_type": "it must be a mapping of keys to values; write it as {{key: value}}",
    "dict_type": "it must be a mapping of keys to values; write it as {{key: value}}",
    "tuple_type": "it must be a list; write it as [value, value]",
    "datetime_type": "it must be a time; write it like 2026-11-30T09:00:00Z",
    "timezone_aware": "it must be a time with its zone; write it like 2026-11-30T09:00:00Z",
    "broken_rule": "{rule}",
}


def _fault(detail: Mapping[str, Any]) -> str:
    """Write one of pydantic's error records as a sentence."""
    kind, context = detail["type"], detail.get("ctx", {})
    path = key_path((*detail["loc"], *context.get("at", ())))
    if kind == "missing":
        return f"{path} is missing: add it."
    value = show_value(context["value"] if context.get("at") else detail["input"])
    if kind == "extra_forbidden":
        return f"{path} is not a known key (its value is {value}): correct its name or remove it."
    advice = _ADVICE[kind].format_map(context) if kind in _ADVICE else detail["msg"]
    return f"{path} is {value}: {advice}."
