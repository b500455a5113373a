"""What an engine's module hands back, and the three ways of writing it down."""

import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Body:
    """Settings in an engine's own terms.

    Attributes:
        settings: Names and values, as the engine's parser takes them.
        text: The same as a file of the engine's own kind; empty where there is nothing to set.
        usage: How to use it, one line each.
    """

    settings: dict[str, Any]
    text: str
    usage: list[str] = field(default_factory=list)


def yaml_text(settings: dict[str, Any]) -> str:
    """Write settings as YAML, one key a line."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def flags(settings: dict[str, Any]) -> list[str]:
    """Write settings as command-line words, `--key value` each."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def command(*words: str) -> str:
    """Write words as one line for a shell."""
    return shlex.join(words)


def assignments(place: str, settings: dict[str, Any]) -> str:
    """Write settings as Python that sets attributes of `place`."""
    return "".join(f"{place}.{key} = {value!r}\n" for key, value in settings.items())


def converted(model_id: str, suffix: str) -> str:
    """Return a file name for a model that the engine needs in another format."""
    name = PurePath(model_id).name
    return name if name.endswith(suffix) else f"{name}{suffix}"
