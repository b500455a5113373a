"""Prompts and answers of a job, kept only when asked for, in a file for its owner alone."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from profiles import atomic_write
from profiles.errors import SpectuneError
from profiles.io import read_bytes

MAX_TEXT_BYTES = 2**30


@dataclass(frozen=True)
class KeptText:
    """One turn of the sample: what the target was given and what it said.

    Attributes:
        split: `tune` or `holdout`.
        id: Hash of the prompt and number of the turn.
        prompt: Text the target was given, template included.
        answer: The target's own answer.
        prompt_ids, answer_ids: The same as token ids.
    """

    split: str
    id: str
    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]


def texts_path(profile_path: Path) -> Path:
    """Return where the texts of a job lie: `NAME.texts.jsonl` beside the profile."""
    return profile_path.with_name(f"{profile_path.stem}.texts.jsonl")


def save_texts(texts: Iterable[KeptText], path: Path) -> None:
    """Write texts, one JSON object a line, readable by the owner only (mode 600).

    Raises:
        SpectuneError: The file cannot be written.
    """
    lines = [json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts]
    atomic_write(path, "".join(lines), private=True)


def load_texts(path: Path) -> list[KeptText]:
    """Read the texts of a job.

    Raises:
        SpectuneError: There are none, or the file is damaged.
    """
    if not path.exists():
        raise SpectuneError(f"{path} does not exist: texts are kept by `tune --keep-text` only.")
    try:
        lines = read_bytes(path, MAX_TEXT_BYTES).decode().split("\n")
        return [KeptText(**json.loads(line)) for line in lines if line]
    except (ValueError, TypeError) as error:
        raise SpectuneError(f"{path} is damaged ({error}): tune again with --keep-text.") from None
