"""Where a study lies: a journal file beside the profile, or a database that the user names.

The journal grows under a name of its own and takes its final one with the profile, so a job that
was stopped leaves the files of the one before as they were, and its own study to go on with.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from profiles.errors import SpectuneError


def study_path(out: Path) -> Path:
    """Return where the study of a profile lies: `NAME.study.log` beside it."""
    return out.with_name(f"{out.stem}.study.log")


def unfinished_path(out: Path) -> Path:
    """Return where the study of an unfinished job lies."""
    return out.with_name(f"{out.stem}.unfinished-study.log")


_PLACE = re.compile(
    r"""(?: (?P<user> [^:/?#@]* ) (?: : [^@/?#]* )? (?= @ ) )?
        (?P<place> @? [^:/?#@]* (?: : [0-9]+ )? (?: / [^?#@]* )? )
        (?: [?#] [^@]* )?""",
    re.X,
)
"""What follows `://` in a URL: user and password, host and path, options."""


@dataclass(frozen=True)
class StudyHome:
    """Where a job keeps its study.

    Attributes:
        storage: Optuna URL, or path of a journal file.
        resume: Whether to go on with a study that lies there.
        label: How a profile names it.
    """

    storage: str | Path
    resume: bool
    label: str


@contextmanager
def study_home(out: Path, storage: str | None, *, resume: bool) -> Iterator[StudyHome]:
    """Hold the place of a job's study; no other job can write the same profile meanwhile.

    Args:
        out: The profile to be written.
        storage: Where the user wants the study; beside the profile if None.
        resume: Whether to go on with the study of a stopped or finished job.

    Raises:
        SpectuneError: Another job is at this profile.
    """
    with _journal(out, resume=resume) as path:
        if storage is None:
            yield StudyHome(path, resume, study_path(out).name)
        else:
            yield StudyHome(storage, resume, without_password(storage))


@contextmanager
def _journal(out: Path, *, resume: bool) -> Iterator[Path]:
    """Hold the journal of an unfinished study.

    With `resume` that of a stopped job, or a copy of that of the finished profile; otherwise
    what a stopped job left is thrown away.
    """
    path, lock = unfinished_path(out), FileLock(out.with_name(f".{out.stem}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SpectuneError(
            f"a profile is written by one job at a time, but another is at {out}; wait for it or "
            "choose another --out"
        ) from None
    try:
        _remove(path.with_name(f"{path.name}.lock"))  # of Optuna; its holder is gone
        if not resume:
            _remove(path)
        elif not path.exists() and study_path(out).exists():
            shutil.copyfile(study_path(out), path)
        if path.exists():
            _mend(path)
        yield path
    finally:
        _remove(Path(lock.lock_file))
        lock.release()


def _mend(path: Path) -> None:
    """Cut the last line of a journal if a killed job left it unfinished."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def without_password(storage: str) -> str:
    """Return a storage as it may be shown: a URL without its password and its options."""
    scheme, separator, rest = storage.partition("://")
    if not separator:
        return storage
    found = _PLACE.fullmatch(rest)  # else a sign in the password makes its end a guess
    return f"{scheme}://{found['user'] or ''}{found['place']}" if found else f"{scheme}://..."
