"""Turn one record of a prompt file into the turns of a conversation.

The shapes are listed in ``prompts``. A record is read in full or refused with a reason: tuning on
half a prompt would be silently wrong.

This module knows nothing about files, tokenizers or models.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

SHAPES = ("messages", "conversations", "turns", "instruction", "prompt")
"""The fields a prompt is read from, the most complete first."""

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}

UNREAD = (
    *("input", "context", "system", "system_prompt", "history", "documents"),
    *("tools", "functions", "tool_calls", "image", "images", "audio", "video"),
)
"""Fields that change a prompt and are not read (the first two only beside ``instruction``)."""

_ALPACA_INPUTS = ("input", "context")


class Message(NamedTuple):
    """One message of a conversation.

    ``role`` is "system", "user" or "assistant".
    """

    role: str
    content: str


Turns = tuple[tuple[Message, ...], ...]
"""Per turn, the messages that come before its answer: see ``prompts.Prompt``."""


class UnusableError(ValueError):
    """A record cannot become a prompt; the message is the reason to report."""


def read_turns(record: Any) -> Turns:
    """Return the turns of a record in any of the shapes.

    Args:
        record: What the file holds there, or the ``UnusableError`` that reading it gave.

    Raises:
        UnusableError: It is no record, or a part of it would be lost.
    """
    if isinstance(record, UnusableError):
        raise record
    if not isinstance(record, dict):
        raise UnusableError(f"is {_kind(record)}, not a JSON object")
    present = [shape for shape in SHAPES if shape in record]
    if not present:
        raise UnusableError(f"has none of the fields {', '.join(SHAPES)}")
    shape = next((shape for shape in present if not _is_empty(record[shape])), present[0])
    value = record[shape]
    _refuse_unread(record, read=_ALPACA_INPUTS if shape == "instruction" else ())
    if shape == "instruction":
        parts = [value, *(record[key] for key in _ALPACA_INPUTS if not _is_empty(record.get(key)))]
        return _user_turns(["\n\n".join(_text(part, f"'{shape}'") for part in parts)], shape)
    if shape == "prompt" and isinstance(value, str):
        return _user_turns([value], shape)
    if not isinstance(value, list):
        expected = "text" if shape == "prompt" else "a list"
        raise UnusableError(f"'{shape}' is {_kind(value)}, not {expected}")
    if not value:
        raise UnusableError(f"'{shape}' is an empty list")
    if shape == "turns" or (shape == "prompt" and isinstance(value[0], str)):
        return _user_turns(value, shape)
    return (_conversation(value, shape),)


def _user_turns(texts: list[Any], shape: str) -> Turns:
    return tuple((Message("user", _text(text, f"'{shape}'")),) for text in texts)


def _conversation(items: list[Any], shape: str) -> tuple[Message, ...]:
    messages = [_message(item, shape) for item in items]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if all(message.role != "user" for message in messages):
        raise UnusableError(f"'{shape}' has no user message")
    if messages[-1].role != "user":
        raise UnusableError(f"'{shape}' ends with a {messages[-1].role} message")
    if shape == "conversations":  # scraped dialogues often start in the middle
        first = next(i for i, message in enumerate(messages) if message.role == "user")
        messages = [m for i, m in enumerate(messages) if i > first or m.role != "assistant"]
    return tuple(messages)


def _message(item: Any, shape: str) -> Message:
    if not isinstance(item, dict):
        raise UnusableError(f"'{shape}' holds {_kind(item)} where a message is expected")
    _refuse_unread(item, read=())
    role = item.get("role", item.get("from"))
    known = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise UnusableError(f"'{shape}' has a message of role {role!r:.40}, which is not read")
    content = item.get("content", item.get("value"))
    return Message(known, _text(content, f"the {known} message in '{shape}'"))


def _text(value: Any, where: str) -> str:
    """Return text, or a list of text parts joined by newlines; refuse anything else."""
    if isinstance(value, list):
        value = "\n".join(_text_part(part, where) for part in value)
    if not isinstance(value, str):
        raise UnusableError(f"{where} is {_kind(value)}, not text")
    if not value.strip():
        raise UnusableError(f"{where} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise UnusableError(f"{where} holds half a character (a lone surrogate)")
    return value


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else _kind(part)
    raise UnusableError(f"{where} holds {kind}, and only text parts are read")


def _refuse_unread(record: Mapping[str, Any], read: tuple[str, ...]) -> None:
    for key in UNREAD:
        if key not in read and not _is_empty(record.get(key)):
            raise UnusableError(f"'{key}' would be dropped; put it into the prompt or messages")


def _is_empty(value: Any) -> bool:
    value = value.strip() if isinstance(value, str) else value
    return value is None or value in ("", [], {})


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"
