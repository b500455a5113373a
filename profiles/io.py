"""Read and write profiles: one strict reader, one atomic writer, one sentence for each fault."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import SpectuneError, UsageError
from .schema import SCHEMA_VERSION, Profile
from .strict import validated
from .strict_yaml import dump_mapping, parse_mapping

MAX_BYTES = 1024 * 1024
"""Of a YAML file; a profile has some kilobytes."""

_HEADER = """\
# A spectune profile: how to decode with one target and draft on one device for one domain.
# `spectune show FILE` explains it; it is checked in full whenever it is loaded.
"""

PathLike = str | os.PathLike[str]


def load(path: PathLike) -> Profile:
    """Read a profile and check every rule of the schema.

    Raises:
        SpectuneError: The file cannot be read, is not strict YAML, or breaks a rule; the message
            names the file, the key path, the value and the remedy.
    """
    source = os.fspath(path)
    data = parse_mapping(decode_text(read_bytes(path), source), source)
    refuse_newer(data, source)
    return validated(Profile, data, source)


def save(profile: Profile, path: PathLike) -> None:
    """Write a profile, whole or not at all; an existing file keeps its mode.

    Raises:
        SpectuneError: The path is a folder or cannot be written.
    """
    atomic_write(path, to_yaml(profile))


def to_yaml(profile: Profile) -> str:
    """Write a profile as text: fields in the order of the schema, missing facts left out."""
    return _HEADER + dump_mapping(profile.model_dump(exclude_none=True))


def atomic_write(path: PathLike, data: bytes | str, *, private: bool = False) -> None:
    """Replace a file by `data` in one step: readers see the old file or the new, never a part.

    Text is written as UTF-8. An existing file keeps its mode, a link keeps pointing at its file.
    A private file is its owner's alone (mode 600), whatever it was before.

    Raises:
        SpectuneError: The path is a folder or cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    with _explained(path):
        target = Path(os.path.realpath(path))
        _check_replaceable(target)
        _write_beside(target, content, private)


def remove_leftovers(path: PathLike) -> None:
    """Remove what killed writers of a file left beside it; the caller is its only writer."""
    target = Path(os.path.realpath(path))
    for left_over in target.parent.glob(f"{_mark(target)}*.tmp"):
        left_over.unlink(missing_ok=True)


def _mark(target: Path) -> str:
    """Return how the names of the temporary files for a file begin; short, however long its is."""
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()
    return f".spectune-{digest[:8]}-"


def check_writable(path: PathLike, *read: PathLike) -> None:
    """Refuse now what `atomic_write` would refuse after hours of work; changes nothing.

    Args:
        path: What will be written.
        *read: Files it is made from, which it must not replace.

    Raises:
        SpectuneError: The path is a folder or cannot be written.
        UsageError: It is one of the files it is made from.
    """
    with _explained(path):
        target = Path(os.path.realpath(path))
        if target in {Path(os.path.realpath(other)) for other in read}:
            raise UsageError(
                f"a result must not overwrite what it is made from, but {os.fspath(path)} is that "
                "file: choose another path"
            )
        _check_replaceable(target)
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextmanager
def _explained(path: PathLike) -> Iterator[None]:
    """Turn an error of the file system into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "choose another path or make room for it"
        if isinstance(error, FileNotFoundError):
            remedy = "make its folder, or choose another path"
        raise SpectuneError(f"{os.fspath(path)} cannot be written ({reason}): {remedy}.") from None


def expanded(path: PathLike) -> Path:
    """Return a path with `~` replaced by the home folder; it need not exist.

    Raises:
        UsageError: The system cannot even look for it, e.g. since its name is too long.
    """
    try:
        found = Path(path).expanduser()
        found.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"a path must be one that this system can look for, but {os.fspath(path)[:80]!r} is "
            f"not ({reason}); correct it"
        ) from None
    return found


def read_bytes(path: PathLike, most: int = MAX_BYTES) -> bytes:
    """Read a file of at most `most` bytes.

    Raises:
        SpectuneError: It is missing, a folder, unreadable or too large.
    """
    source = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise SpectuneError(f"{source} does not exist: check the path.") from None
    except IsADirectoryError:
        raise SpectuneError(f"{source} is a folder: give the file inside it.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpectuneError(f"{source} cannot be read ({reason}): check the path.") from None
    if len(data) > most:
        limit = f"{most // 1024**2} MiB"
        raise SpectuneError(f"{source} is larger than {limit}: it is not a file of spectune's.")
    return data


def refuse_newer(data: dict[str, Any], source: str) -> None:
    """Refuse a file of a later layout, before its unknown keys are called mistakes.

    Raises:
        SpectuneError: `schema_version` is above `SCHEMA_VERSION`.
    """
    version = data.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise SpectuneError(
            f"{source}: $.schema_version is {version}, but this spectune reads up to"
            f" {SCHEMA_VERSION}: upgrade spectune."
        )


def decode_text(data: bytes, source: str) -> str:
    """Return bytes as text.

    Raises:
        SpectuneError: They are not UTF-8, or hold a zero byte.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})"
        raise SpectuneError(f"{source} {rule}: save it as UTF-8.") from None
    if "\0" in text:
        raise SpectuneError(f"{source} is not text (it holds a zero byte): give a YAML file.")
    return text


def _check_replaceable(target: Path) -> None:
    """Refuse what a rename would replace although its owner did not mean it to be."""
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    if target.exists() and not target.is_file():
        raise OSError(0, "it is not a regular file")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(0, "it is read-only")


def _write_beside(target: Path, content: bytes, private: bool) -> None:
    temporary = target.parent / f"{_mark(target)}{os.urandom(8).hex()}.tmp"
    mode = 0o600 if private else 0o666  # less what the umask takes
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and not private:
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:  # Ctrl-C included: nothing is left behind
        temporary.unlink(missing_ok=True)
        raise
