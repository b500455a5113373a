"""Where studies lie: opening a storage, who is at it, and what it says when it fails."""

import os
import platform
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from profiles.errors import SpectuneError

from ..study_files import without_password

HEARTBEAT_S = 60
"""Seconds between the signs of life that a job gives in a database."""

FAILED = (OSError, SQLAlchemyError, optuna.exceptions.StorageInternalError)
"""What a storage raises that was there."""

UNUSABLE = (*FAILED, ValueError, ImportError)
"""What opening one raises."""


def open_storage(storage: str | Path | None) -> BaseStorage:
    """Open an Optuna URL or a journal file; in memory if None."""
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, str) and "://" in storage:
        with quietly():
            return RDBStorage(
                storage,
                engine_kwargs={"poolclass": NullPool},  # no connection outlives its use
                heartbeat_interval=HEARTBEAT_S,
                grace_period=3 * HEARTBEAT_S,
            )
    return JournalStorage(JournalFileBackend(str(storage)))


def this_worker() -> dict[str, Any]:
    """Return what tells this process from any other, on any machine."""
    process = psutil.Process()
    return {"host": platform.node(), "pid": os.getpid(), "started": process.create_time()}


def is_alive(trial: FrozenTrial) -> bool:
    """Tell whether the job that runs a trial may still be there; on other machines it may."""
    worker = trial.user_attrs.get("worker")
    if worker is None or worker["host"] != platform.node():
        return worker is not None
    if not psutil.pid_exists(worker["pid"]):
        return False
    process = psutil.Process(worker["pid"])
    if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent has not looked yet
        return False
    return bool(process.create_time() == worker["started"])


@contextmanager
def quietly() -> Iterator[None]:
    """Use what Optuna calls experimental without its saying so to our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")  # `signs_of_life` sends them
        yield


@contextmanager
def signs_of_life(storage: BaseStorage, trials: Sequence[Trial]) -> Iterator[None]:
    """Tell a database now and then that these trials are being worked on."""
    if not isinstance(storage, RDBStorage):
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while True:
            for trial in trials:
                storage.record_heartbeat(trial._trial_id)
            if ended.wait(HEARTBEAT_S):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def explained(storage: str | Path | None, *errors: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong with a storage into one sentence, without its password.

    Args:
        storage: What is used within.
        *errors: What may go wrong.

    Raises:
        SpectuneError: It did.
    """
    try:
        yield
    except errors as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise SpectuneError(
            "the storage of the study must be a database or a journal file that can be written, "
            f"but {without_password(str(storage))} cannot be used ({why}); check it, its disk and "
            "the driver it needs"
        ) from None
