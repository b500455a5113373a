"""Several workers on one study: what they agree on through its storage, on whatever machines.

Beside the study NAME lies another one, NAME.steps. Its trials are the steps that one worker takes
for all: describing the study, queueing its first trees, finishing it. A trial is made together
with what it is and whose it is, so the first of them is the same one to all workers; those of a
worker that is gone do not count.
"""

import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import torch
from filelock import FileLock, Timeout
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from profiles import Device
from profiles.errors import UsageError
from profiles.match import same_device

from ..progress import Silent
from ..study_files import StudyHome
from .storage import (
    UNUSABLE,
    explained,
    is_alive,
    open_storage,
    quietly,
    signs_of_life,
    this_worker,
)

POLL_S = 1.0
"""Seconds between looks at what other workers do."""

N_OPENINGS = 5
"""Looks at a storage that others are setting up."""

FINISH = "finish"
"""The step that ends a study: proof and profile."""


class Alone:
    """The only worker of its study: it takes every step and waits for nobody."""

    def join(self, facts: Mapping[str, Any]) -> None:
        """Agree with oneself."""

    def is_done(self, step: str) -> bool:
        """Know of no step that another worker has taken."""
        return False

    @contextmanager
    def once(self, step: str, notes: Mapping[str, Any] | None = None) -> Iterator[bool]:
        """Take a step."""
        yield True

    @contextmanager
    def alone_on(self, device: torch.device) -> Iterator[None]:
        """Time on a device that is not shared on purpose."""
        yield

    def keep(self, step: str, name: str, value: Any) -> None:
        """Keep nothing: nobody will ask."""

    def kept(self, step: str, name: str) -> Any:
        """Return nothing."""


class Workers(Alone):
    """The workers of a shared study, as one of them sees the others.

    Args:
        home: Where the study lies; it has a name.
        progress: Told what is waited for.
    """

    def __init__(self, home: StudyHome, progress: Silent) -> None:
        self._home, self._progress = home, progress
        self._token = uuid.uuid4().hex
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with explained(home.storage, *UNUSABLE), quietly():
            self._storage = _open_together(home.storage)
            self._steps = optuna.create_study(
                study_name=f"{home.study}.steps", storage=self._storage, load_if_exists=True
            )

    def join(self, facts: Mapping[str, Any]) -> None:
        """Say what this worker would measure, or learn that the others measure something else.

        Args:
            facts: What is measured, in parts.

        Raises:
            UsageError: The study's facts are others, those of another device for example.
        """
        with self.once("describe", {"facts": dict(facts)}):
            pass
        theirs = self.kept("describe", "facts")
        different = [name for name in facts if not _same(name, theirs.get(name), facts[name])]
        if different:
            values = "; ".join(
                f"{name} {_short(theirs.get(name))} there, {_short(facts[name])} here"
                for name in different
            )
            raise UsageError(
                f"workers of one study must measure the same, but {self._home.study} in "
                f"{self._home.label} has another {', '.join(different)} ({values}); run this "
                "worker as the others run, or choose another --study"
            )

    def is_done(self, step: str) -> bool:
        """Tell whether a step has been taken."""
        return any(trial.state == TrialState.COMPLETE for trial in self._of(step))

    @contextmanager
    def once(self, step: str, notes: Mapping[str, Any] | None = None) -> Iterator[bool]:
        """Let one worker take a step; True for that one, the others wait until it is done.

        A worker that is gone, or that fails inside the `with` block, leaves it to the next.

        Args:
            step: Its name.
            notes: Kept with the step.
        """
        with explained(self._home.storage, *UNUSABLE):
            mine = self._claim(step, notes or {})
        if mine is None:
            yield False
            return
        try:
            with signs_of_life(self._storage, [mine]):  # type: ignore[list-item]
                yield True
        except BaseException:
            self._storage.set_trial_state_values(mine._trial_id, TrialState.FAIL)
            raise
        self._storage.set_trial_state_values(mine._trial_id, TrialState.COMPLETE, [0.0])

    @contextmanager
    def alone_on(self, device: torch.device) -> Iterator[None]:
        """Hold a device of this machine: two workers timing on it at once would time neither."""
        lock = FileLock(_lock_path(device), mode=0o666)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._progress.say(f"Waiting for another worker that is timing on {device}.")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def keep(self, step: str, name: str, value: Any) -> None:
        """Keep a value with a step that this worker is taking."""
        mine = next(trial for trial in reversed(self._of(step)) if self._is_mine(trial))
        self._storage.set_trial_user_attr(mine._trial_id, name, value)

    def kept(self, step: str, name: str) -> Any:
        """Return what was kept with a step that is done."""
        done = next(t for t in self._of(step) if t.state == TrialState.COMPLETE)
        return done.user_attrs[name]

    def _claim(self, step: str, notes: Mapping[str, Any]) -> FrozenTrial | None:
        """Return this worker's trial once the step is its own; None once the step is done."""
        is_told = False
        while True:
            trials = self._of(step)
            if any(trial.state == TrialState.COMPLETE for trial in trials):
                return None
            running = [t for t in trials if t.state == TrialState.RUNNING and is_alive(t)]
            if not running:
                self._begin(step, notes)
                continue
            if self._is_mine(running[0]):
                return running[0]
            for trial in running[1:]:
                if self._is_mine(trial):  # another one was first
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            if not is_told and step == FINISH:
                host = running[0].user_attrs["worker"]["host"]
                self._progress.say(f"The worker on {host} finishes the study; waiting for it.")
                is_told = True
            time.sleep(POLL_S)

    def _begin(self, step: str, notes: Mapping[str, Any]) -> None:
        attributes = {"step": step, "token": self._token, "worker": this_worker(), **notes}
        self._steps.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=attributes))

    def _of(self, step: str) -> list[FrozenTrial]:
        """Return the trials of a step, oldest first; those of machines that fell silent fail."""
        with quietly():
            optuna.storages.fail_stale_trials(self._steps)
        trials = self._steps.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.user_attrs.get("step") == step]

    def _is_mine(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs["token"] == self._token)


def workers_of(home: StudyHome, progress: Silent) -> Alone:
    """Return the workers of a study: several, or this one alone.

    Raises:
        SpectuneError: The storage cannot be used.
    """
    return Alone() if home.study is None else Workers(home, progress)


def _open_together(storage: str | Path) -> BaseStorage:
    """Open a storage that others may be opening for the first time, too.

    Whoever finds a table that was not there a moment ago looks again.
    """
    for _ in range(N_OPENINGS):
        try:
            return open_storage(storage)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if not any(words in str(error) for words in ("already exists", "duplicate key")):
                raise
            time.sleep(POLL_S)
    return open_storage(storage)


def _same(name: str, theirs: Any, ours: Any) -> bool:
    if name == "device" and theirs is not None:
        return same_device(Device.model_validate(theirs), Device.model_validate(ours))
    return bool(theirs == ours)


def _short(value: Any) -> str:
    """Return a fact in a few words."""
    if isinstance(value, dict):
        value = ", ".join(str(part) for part in value.values() if part is not None)
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lock_path(device: torch.device) -> Path:
    """Return the lock of a device of this machine, the same to all processes that can see it."""
    name = str(device)
    if device.type == "cuda":  # the index depends on what a process was given to see
        properties = torch.cuda.get_device_properties(device)
        name = f"cuda-{getattr(properties, 'uuid', device.index)}"
    return Path(tempfile.gettempdir()) / f"spectune-{name.replace(':', '-')}.lock"
