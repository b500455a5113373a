"""The measured study: trees timed on the device, kept in an Optuna study that can be resumed.

A prediction decides what is measured, never what wins.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import Trial, TrialState

from profiles import TreeConfig

from ..candidates import PLAIN_PREDICTION, Candidate
from ..cost import Prediction
from ..racing import Runner, Track, race
from ..space import SearchSpace
from .storage import (
    FAILED,
    UNUSABLE,
    explained,
    is_alive,
    open_storage,
    quietly,
    signs_of_life,
    this_worker,
)

MAX_REPEATS = 50
"""Proposals that were measured before or do not fit, after which a search ends early."""

N_PROPOSALS = 3
"""Trees that Optuna proposes for one race."""

Point = tuple[str, TreeConfig]


class MeasuredStudy:
    """The Optuna study of measured trees.

    Args:
        spaces: The search space of every draft.
        predict: Scores any candidate; called for those Optuna proposes on its own.
        storage: Optuna URL, or path of a journal file; in memory if None.
        name: Name of the study. Inputs that differ must differ in name.
        facts: What the name stands for, shown beside the study.
        seed: Seed of the sampler and of the order of runs.
        resume: Go on with the latest study of that name instead of beginning a new one.

    Attributes:
        resumes: Whether there was one with something in it.
        differences: Names of the facts in which the latest other study of the storage differs.
    """

    def __init__(
        self,
        spaces: Mapping[str, SearchSpace],
        predict: Callable[[str, TreeConfig], Prediction],
        *,
        storage: str | Path | None,
        name: str,
        facts: Mapping[str, Any] | None = None,
        seed: int,
        resume: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spaces = spaces
        self._predict = predict
        self._seed = seed
        self._where = storage
        with explained(storage, *UNUSABLE):
            self._storage = open_storage(storage)
            self._study = self._open_study(name, resume)
            self.differences = _differences(self._storage, self._study, facts or {})
            for key, value in (facts or {}).items():
                self._study.set_user_attr(key, value)
        self._ranges = {
            "depth": max(space.max_depth for space in spaces.values()),
            "width": max(space.max_width for space in spaces.values()),
            "top_k": max(space.max_top_k for space in spaces.values()),
        }
        self._measured: dict[Point, Candidate] = {}
        self._begun: dict[Point, dict[int, float]] = {}
        self.resumes = resume and bool(self._study.get_trials(deepcopy=False))
        if self.resumes:
            self._restore()

    @property
    def name(self) -> str:
        """The name of the study in its storage."""
        return str(self._study.study_name)

    @property
    def candidates(self) -> list[Candidate]:
        """Every candidate whose measurement has ended, in order."""
        return list(self._measured.values())

    def run(
        self,
        first: Sequence[Candidate],
        track: Track,
        n_trials: int,
        stay: Sequence[Candidate] = (),
    ) -> list[Candidate]:
        """Measure trees until `n_trials` different ones are: the given ones, then Optuna's.

        Args:
            first: What to begin with.
            track: Times the trees.
            n_trials: Trees to measure in all, those of a resumed study included.
            stay: Candidates that are measured to the end even if they are behind.

        Returns:
            The measured candidates.

        Raises:
            SpectuneError: The storage has failed, e.g. since its disk is full.
        """
        with explained(self._where, *FAILED):
            return self._run(first, track, n_trials, stay)

    def _run(
        self, first: Sequence[Candidate], track: Track, n_trials: int, stay: Sequence[Candidate]
    ) -> list[Candidate]:
        staying = {(c.draft, c.tree) for c in stay}
        given = [c for c in first if self._spaces[c.draft].contains(c.tree)][:n_trials]
        given = [c for c in given if (c.draft, c.tree) not in self._measured]
        for candidate in given:
            self._study.enqueue_trial(self._parameters(candidate))
        n_next = len(given) or N_PROPOSALS
        while n_trials > len(self._measured):
            batch = self._ask(min(n_next, n_trials - len(self._measured)))
            if not batch:
                break
            runners = {
                point: TrialRunner(trial, *point, stays=point in staying)
                for point, trial in batch.items()
            }
            self._race(runners, track)
            n_next = N_PROPOSALS
        return self.candidates

    def _open_study(self, name: str, resume: bool) -> optuna.Study:
        return _create(self._storage, name, self._seed, resume)

    def _is_new(self, point: Point, trial: Trial) -> bool:
        """Tell whether a tree that a trial proposes is still to be measured."""
        return point not in self._measured

    def _ask(self, n: int) -> dict[Point, Trial]:
        """Return up to `n` trials of trees that were not measured yet."""
        batch: dict[Point, Trial] = {}
        n_repeats = 0
        while len(batch) < n and n_repeats < MAX_REPEATS:
            with quietly():
                trial = self._study.ask()
            trial.set_user_attr("worker", this_worker())
            point = self._proposal(trial)
            if not self._spaces[point[0]].contains(point[1]):  # it would not fit the memory
                n_repeats += 1
                trial.set_user_attr("infeasible", point[1].label())
                self._study.tell(trial, state=TrialState.PRUNED)
                continue
            if point not in batch and self._is_new(point, trial):
                batch[point] = trial
                self._describe(trial, *point)
                continue
            n_repeats += 1  # nothing is measured twice; the sampler learns what is known
            trial.set_user_attr("repeats", point[1].label())
            before = self._measured.get(point)
            if before is not None and before.ratios:
                self._study.tell(trial, sum(before.ratios) / len(before.ratios))
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        return batch

    def _race(self, runners: "Mapping[Point, TrialRunner]", track: Track) -> None:
        """Race the trees of a batch and tell Optuna how each ended."""
        for point, runner in runners.items():
            for prompt, ratio in self._begun.pop(point, {}).items():
                runner.report(prompt, ratio)
            if runner.tree.is_plain:  # 1 by definition
                for prompt in set(range(track.n_prompts)) - set(runner.ratios):
                    runner.report(prompt, 1.0)
                runner.stays = True
        rivals = [dict(enumerate(c.ratios)) for c in self._measured.values() if c.speedup]
        with signs_of_life(self._storage, [runner.trial for runner in runners.values()]):
            race(track, list(runners.values()), rivals, self._seed)
        for point, runner in runners.items():
            self._end(runner)
            self._measured[point] = self._candidate(*point, runner.ratios, runner.state)

    def _end(self, runner: "TrialRunner") -> None:
        runner.trial.set_user_attr("outcome", runner.state)
        runner.trial.set_user_attr("prompts", len(runner.ratios))
        if runner.state == "finished":
            self._study.tell(runner.trial, runner.speedup)
        elif runner.state == "behind":
            self._study.tell(runner.trial, state=TrialState.PRUNED)
        else:
            self._study.tell(runner.trial, state=TrialState.FAIL)

    def _candidate(
        self, draft: str, tree: TreeConfig, ratios: Mapping[int, float], outcome: str
    ) -> Candidate:
        prediction = PLAIN_PREDICTION if tree.is_plain else self._predict(draft, tree)
        values = tuple(ratios[prompt] for prompt in sorted(ratios))
        speedup = sum(values) / len(values) if outcome == "finished" else None
        return Candidate(draft, tree, prediction, speedup, values)

    def _restore(self) -> None:
        """Take over what the study holds; trials of jobs that are gone are failed.

        Their times are kept: the trees are measured on from where they were.
        """
        with quietly():
            optuna.storages.fail_stale_trials(self._study)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING and not is_alive(trial):
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state in (TrialState.RUNNING, TrialState.WAITING):
                continue
            if "tree" not in trial.user_attrs:
                continue
            point = trial.params["draft"], self._tree(trial.params)
            outcome = trial.user_attrs.get("outcome")
            if outcome is None:
                self._begun[point] = dict(trial.intermediate_values)
            else:
                self._measured[point] = self._candidate(*point, trial.intermediate_values, outcome)

    def _proposal(self, trial: Trial) -> Point:
        trial.suggest_categorical("draft", sorted(self._spaces))
        # The ranges never change from trial to trial: samplers drop parameters that do.
        trial.suggest_int("depth", 0, self._ranges["depth"])
        trial.suggest_int("width", 1, self._ranges["width"])
        trial.suggest_int("top_k", 1, self._ranges["top_k"])
        trial.suggest_float("fill", 0.0, 1.0)
        return trial.params["draft"], self._tree(trial.params)

    def _tree(self, parameters: Mapping[str, Any]) -> TreeConfig:
        values = {name: value for name, value in parameters.items() if name != "draft"}
        return self._spaces[parameters["draft"]].tree(**values)

    def _parameters(self, candidate: Candidate) -> dict[str, Any]:
        tree = candidate.tree
        return {
            "draft": candidate.draft,
            "depth": tree.depth,
            "width": max(1, tree.width),
            "top_k": max(1, tree.top_k),
            "fill": self._spaces[candidate.draft].fill(tree),
        }

    def _describe(self, trial: Trial, draft: str, tree: TreeConfig) -> None:
        """Show beside a trial what it is and what was expected of it."""
        prediction = PLAIN_PREDICTION if tree.is_plain else self._predict(draft, tree)
        trial.set_user_attr("tree", tree.label())
        trial.set_user_attr("predicted_tau", prediction.tau)
        trial.set_user_attr("predicted_break_even_tau", prediction.break_even_tau)
        trial.set_user_attr("predicted_decode_speedup", prediction.decode_speedup)


class TrialRunner(Runner):
    """A tree in a race whose ratios go into its trial as they come."""

    def __init__(self, trial: Trial, draft: str, tree: TreeConfig, stays: bool) -> None:
        super().__init__(draft, tree, stays)
        self.trial = trial

    def report(self, prompt: int, ratio: float) -> None:
        """Take note of the speedup on a prompt."""
        super().report(prompt, ratio)
        self.trial.report(ratio, step=prompt)


def _create(storage: BaseStorage, name: str, seed: int, resume: bool) -> optuna.Study:
    """Return the latest study of that name if it is resumed, else a new one."""
    names = optuna.get_all_study_names(storage)
    generations = [name, *(f"{name}-{i}" for i in range(2, len(names) + 2))]
    taken = [generation for generation in generations if generation in names]
    is_new = not (resume and taken)
    study = optuna.create_study(
        study_name=generations[len(taken)] if is_new else taken[-1],
        storage=storage,
        direction="maximize",
        load_if_exists=not is_new,
        pruner=optuna.pruners.NopPruner(),
    )
    # Otherwise a resumed search would propose what the one before it did.
    n_before = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=seed + n_before, n_startup_trials=0)
    return study


def _differences(storage: BaseStorage, study: optuna.Study, facts: Mapping[str, Any]) -> list[str]:
    """Return the facts in which the latest other study differs; empty if there is none."""
    others = [s for s in storage.get_all_studies() if s.study_name != study.study_name]
    if not others:
        return []
    known = max(others, key=lambda other: other._study_id).user_attrs
    return [name for name, value in facts.items() if known.get(name) != value]
