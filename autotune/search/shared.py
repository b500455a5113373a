"""The measured study when several workers take part in it.

Trees are queued in the storage, and each is handed to one worker. Those of a worker that is gone
are queued again, with the times it has left.
"""

import time
from collections.abc import Sequence
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from ..candidates import Candidate
from ..racing import Track
from .measured import MeasuredStudy, Point, TrialRunner
from .storage import is_alive, quietly
from .workers import POLL_S, Workers

N_SHARED = 3
"""Trees that a worker takes at once: it races them side by side, with one plain run for all."""

NAMELESS_S = 10.0
"""Seconds that a trial may be without the name of its worker, which is written a moment later."""

PARAMETERS = frozenset({"draft", "depth", "width", "top_k", "fill"})


class SharedStudy(MeasuredStudy):
    """A measured study that other workers are at, too.

    Args:
        workers: All of them.
        device: Where this one times.
        **arguments: Those of every measured study.
    """

    def __init__(self, workers: Workers, device: torch.device, **arguments: Any) -> None:
        self._workers = workers
        self._device = device
        self._nameless: dict[int, float] = {}
        super().__init__(**arguments)

    def _run(
        self, first: Sequence[Candidate], track: Track, n_trials: int, stay: Sequence[Candidate]
    ) -> list[Candidate]:
        """Measure trees together with the others until `n_trials` are; see `MeasuredStudy.run`."""
        staying = {(c.draft, c.tree) for c in stay}
        given = [c for c in first if self._spaces[c.draft].contains(c.tree)][:n_trials]
        with self._workers.once("queue") as is_ours:
            for candidate in given if is_ours else ():
                self._study.enqueue_trial(self._parameters(candidate))
        while len(self._measured) < n_trials:
            with self._workers.alone_on(self._device):
                others = self._look_around()
                n_free = n_trials - len(self._measured) - len(others)
                batch = self._ask(min(N_SHARED, n_free))
                runners = {
                    point: TrialRunner(trial, *point, stays=point in staying)
                    for point, trial in batch.items()
                }
                if runners:
                    self._race(runners, track)
            if not batch and not others:
                break  # nothing is left to propose
            if not batch:
                time.sleep(POLL_S)
        return self.candidates

    def _open_study(self, name: str, resume: bool) -> optuna.Study:
        """Take part in the study of that name; proposals differ from worker to worker."""
        study = optuna.create_study(
            study_name=name,
            storage=self._storage,
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner(),
        )
        with quietly():
            study.sampler = optuna.samplers.TPESampler(n_startup_trials=0, constant_liar=True)
        return study

    def _is_new(self, point: Point, trial: Trial) -> bool:
        """Tell whether no other worker has this tree: of two that do, the older trial keeps it."""
        while True:
            trials = self._study.get_trials(deepcopy=False)
            older = [t for t in trials if t.number < trial.number and self._is_taken(t)]
            points = {self._point(t) for t in older}
            if None not in points:
                break
            time.sleep(POLL_S / 10)  # it will say in a moment what it is
        points |= {self._point(t) for t in trials if "outcome" in t.user_attrs}
        return super()._is_new(point, trial) and point not in points

    def _look_around(self) -> set[Point]:
        """Take over what others have measured, queue again what those that are gone have left.

        Returns:
            What others are measuring now.
        """
        with quietly():
            optuna.storages.fail_stale_trials(self._study)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING and not self._runs(trial):
                self._fail(trial)
        trials = self._study.get_trials(deepcopy=False)
        running: set[Point] = set()
        left: dict[Point, FrozenTrial] = {}
        for trial in trials:
            if (point := self._point(trial)) is None:
                continue
            if trial.state == TrialState.FAIL and not trial.user_attrs.keys() & {
                "outcome",
                "repeats",
            }:
                left[point] = trial
            elif outcome := trial.user_attrs.get("outcome"):
                self._measured[point] = self._candidate(*point, trial.intermediate_values, outcome)
            elif trial.state in (TrialState.RUNNING, TrialState.WAITING):
                running.add(point)
        for point, trial in left.items():
            if point not in running and point not in self._measured:
                self._begun[point] = dict(trial.intermediate_values)
                self._study.enqueue_trial(_wanted(trial))
        waiting = {self._point(t) for t in trials if t.state == TrialState.WAITING}
        return running - waiting

    def _runs(self, trial: FrozenTrial) -> bool:
        """Tell whether a trial is being measured by a worker that is still there."""
        if trial.state != TrialState.RUNNING:
            return False
        if "worker" in trial.user_attrs:
            return is_alive(trial)
        seen = self._nameless.setdefault(trial.number, time.monotonic())
        return time.monotonic() - seen < NAMELESS_S

    def _is_taken(self, trial: FrozenTrial) -> bool:
        """Tell whether a tree is being measured, or will be by whoever takes it next."""
        return trial.state == TrialState.WAITING or self._runs(trial)

    def _fail(self, trial: FrozenTrial) -> None:
        try:
            self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except optuna.exceptions.UpdateFinishedTrialError:
            return  # another worker has seen it, too

    def _point(self, trial: FrozenTrial) -> Point | None:
        """Return which tree a trial is for, as soon as that is known."""
        parameters = _wanted(trial)
        if not parameters.keys() >= PARAMETERS:
            return None
        return parameters["draft"], self._tree(parameters)


def _wanted(trial: FrozenTrial) -> dict[str, Any]:
    """Return what a trial is or was queued to be."""
    return dict(trial.system_attrs.get("fixed_params") or trial.params)
