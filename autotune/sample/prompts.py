"""Read the user's prompts from a file, in the shapes people keep them in.

A file is JSON Lines, one JSON array, a text file (``.txt``: every non-empty line is one prompt),
CSV or Parquet. A record, or a table row, holds one of

==================  =========================================================================
``messages``        a chat list of ``role`` / ``content``; a trailing answer is dropped, earlier
                    answers stay as context
``conversations``   ShareGPT's ``from`` / ``value``; answers before the first question are dropped
                    too
``turns``           MT-bench: the user's turns in order, each answered before the next is asked
``instruction``     Alpaca, with its ``input`` (or Dolly's ``context``) appended if there is one
``prompt``          HumanEval and most others: text, or a list as in ``turns`` or ``messages``
==================  =========================================================================

The first field of this list that is not empty counts. A record that cannot be read in full is
skipped with its line and the reason; no part of a record is dropped in silence.

This module knows nothing about tokenizers, chat templates or models.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiles.errors import SpectuneError
from profiles.io import expanded

from .records import SHAPES, UNREAD, Turns, UnusableError, read_turns

MAX_FILE_BYTES = 256 * 2**20
"""A sample needs some hundred prompts; a larger file is taken for a mistake."""

_N_EXAMPLES = 3
_READ = (*SHAPES, *UNREAD)


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered by the target, turn by turn.

    ``turns[0]`` is everything said before the first answer is generated; every later turn holds
    the messages that follow the previous answer.
    """

    turns: Turns
    line: int = 0
    """Where it stands in its file, counted from 1, in the unit of its ``PromptFile``."""

    @cached_property
    def id(self) -> str:
        """A hash of the content: stable under reordering, and free of the user's text."""
        content = json.dumps(self.turns, ensure_ascii=True).encode()
        return hashlib.sha256(content).hexdigest()[:16]


class Skipped(NamedTuple):
    """A record that was left out, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class PromptFile:
    """What a file of prompts holds.

    ``unit`` is what the ``line`` of a prompt counts: lines, or the records of an array or table.
    """

    records: list[Prompt]
    skipped: list[Skipped]
    unit: Literal["line", "record"] = "line"


def read_prompts(path: str | Path) -> PromptFile:
    """Read every usable prompt of a file.

    Args:
        path: A ``.jsonl``, ``.json``, ``.txt``, ``.csv`` or ``.parquet`` file, UTF-8 where it is
            text.

    Raises:
        SpectuneError: The file cannot be read, or no record in it can be used.
    """
    path = expanded(path)
    unit, records = _records(path, _read_bytes(path))
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    for line, record in records:
        try:
            prompts.append(Prompt(read_turns(record), line))
        except UnusableError as error:
            skipped.append(Skipped(line, f"{error}{_keys_seen(record)}"))
    if not prompts and not skipped:
        raise SpectuneError(f"{path} is empty; write at least one prompt into it.")
    if not prompts:
        raise SpectuneError(
            f"{path} holds no usable prompt ({describe_skipped(skipped, unit)}); "
            f"give every record one of the fields {', '.join(SHAPES)}."
        )
    return PromptFile(prompts, skipped, unit)


def describe_skipped(skipped: Sequence[Skipped], unit: str) -> str:
    """Name the first few skipped records and count the rest, without a full stop."""
    parts = [f"{unit} {line}: {reason}" for line, reason in skipped[:_N_EXAMPLES]]
    if len(skipped) > _N_EXAMPLES:
        parts.append(f"and {len(skipped) - _N_EXAMPLES} more")
    return "; ".join(parts)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise SpectuneError(f"{path} is a folder; name one file of prompts in it.")
        if not path.is_file():
            raise SpectuneError(f"There is no prompt file {path}; check the path.")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise SpectuneError(
                f"{path} has {size / 2**20:.0f} MiB, above the limit of "
                f"{MAX_FILE_BYTES / 2**20:.0f} MiB; some hundred prompts are enough, so cut it."
            )
        return path.read_bytes()
    except OSError as error:
        raise SpectuneError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions."
        ) from error


def _records(path: Path, data: bytes) -> tuple[Literal["line", "record"], Any]:
    """Return the unit records are counted in, and an iterator of (line, record)."""
    match path.suffix.lower():
        case ".parquet":
            return "record", enumerate(_parquet_rows(path, data), start=1)
        case ".csv":
            return "record", enumerate(_csv_rows(path, _decode(path, data)), start=1)
        case ".txt":
            return "line", _text_records(_decode(path, data))
        case ".json" | ".jsonl":
            text = _decode(path, data)
            if text.lstrip().startswith("["):
                return "record", enumerate(_json_array(path, text), start=1)
            return "line", _json_lines(text)
    raise SpectuneError(
        f"{path} is not a known kind of prompt file; use .jsonl, .json, .txt, .csv or .parquet."
    )


def _decode(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SpectuneError(f"{path} is UTF-16 text; save it as UTF-8.")
    if b"\0" in data:
        raise SpectuneError(f"{path} is binary data (or UTF-16), not text; give a UTF-8 file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":  # cut off inside its last character
            return data[: error.start].decode("utf-8-sig")
        line = data.count(b"\n", 0, error.start) + 1
        raise SpectuneError(
            f"{path} is not UTF-8 (byte 0x{data[error.start]:02x} on line {line}); "
            f"save it as UTF-8."
        ) from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines: U+2028 and its kin may stand inside a JSON string.
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield line, content.strip()


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for line, content in _lines(text):
        try:
            yield line, _loads(content)
        except UnusableError as error:
            yield line, error
        except (ValueError, RecursionError):
            yield line, UnusableError("is not one complete JSON object")


def _text_records(text: str) -> Iterator[tuple[int, Any]]:
    for line, content in _lines(text):
        if isinstance(_parse_json(content), dict):
            yield line, UnusableError("is a JSON object; name the file .jsonl")
        else:
            yield line, {"prompt": content}


def _json_array(path: Path, text: str) -> list[Any]:
    try:
        records = _loads(text)
    except (ValueError, RecursionError) as error:
        raise SpectuneError(
            f"{path} begins with '[' but is not one complete JSON array ({error}); "
            f"repair it, or write one JSON object per line."
        ) from error
    assert isinstance(records, list)  # noqa: S101 - it began with '['
    return records


def _loads(text: str) -> Any:
    """Return what a JSON text says; the parser alone would keep the last of two equal keys."""
    return json.loads(text, object_pairs_hook=_as_object)


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise UnusableError(f"gives {doubled[:40]!r} twice")
    return found


def _parse_json(text: str) -> Any:
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return None


def _csv_rows(path: Path, text: str) -> Iterator[Any]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        _known_columns(path, list(reader.fieldnames or ()))
        for row in reader:
            if None in row or None in row.values():
                yield UnusableError("has more or fewer cells than the header; quote its commas")
                continue
            for key in ("messages", "conversations", "turns"):  # a list stands as JSON in its cell
                if key in row:
                    row[key] = _parse_json(row[key]) or row[key]
            yield row
    except csv.Error as error:
        raise SpectuneError(
            f"{path} is not a well-formed CSV table ({error} on line {reader.line_num}); "
            f"repair it, or use JSON Lines."
        ) from error


def _parquet_rows(path: Path, data: bytes) -> list[Any]:
    import pandas

    try:
        frame = pandas.read_parquet(io.BytesIO(data))
        known = _known_columns(path, list(frame.columns))
        rows: list[Any] = json.loads(frame[known].to_json(orient="records"))
    except ImportError as error:
        raise SpectuneError(
            f"Reading {path} needs pyarrow; install it with 'pip install pyarrow'."
        ) from error
    except SpectuneError:
        raise
    except Exception as error:  # pyarrow raises whatever it likes
        raise SpectuneError(
            f"{path} is not a readable Parquet file ({str(error).strip()}); write it again."
        ) from error
    return rows


def _known_columns(path: Path, columns: list[str]) -> list[str]:
    """Return the columns that bear on the prompt; refuse a table that has none, or one twice."""
    doubled = [column for column in columns if columns.count(column) > 1 and column in _READ]
    if doubled:
        raise SpectuneError(f"{path} has the column {doubled[0]} twice; rename one of them.")
    if columns and not set(columns) & set(SHAPES):
        raise SpectuneError(
            f"{path} has no column named {', '.join(SHAPES)}; its columns are "
            f"{_shorten(columns)}, so rename the one with the prompts."
        )
    return [column for column in columns if column in _READ]


def _keys_seen(record: Any) -> str:
    return f" (keys: {_shorten(list(record))})" if isinstance(record, dict) and record else ""


def _shorten(names: list[str]) -> str:
    shown = [str(name)[:40] for name in names[:10]]
    return ", ".join(shown + ["..."] * (len(names) > len(shown)))
