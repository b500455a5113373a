"""The two studies: every tree predicted in memory, the most promising ones measured by Optuna.

The only module that imports optuna. A prediction decides what is measured, never what wins.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from profiles import TreeConfig

from .cost_model import Prediction
from .space import DEFAULTS, SearchSpace

MAX_REPEATS = 50
"""Proposals in a row that were measured before, after which a search ends early."""

RatioPerPrompt = Iterable[float]
PLAIN_PREDICTION = Prediction(tau=1.0, break_even_tau=1.0)

Measure = Callable[[str, TreeConfig], RatioPerPrompt]
"""Time a draft's tree against plain decoding; yields the speedup on one prompt after another."""


@dataclass(frozen=True)
class Candidate:
    """A draft and a tree, with what is known of it.

    Attributes:
        draft: The draft's name.
        tree: The tree, in canonical form.
        prediction: From replay and the cost model.
        speedup: Measured on the tune prompts, end to end; None if it was not, or if the
            measurement was stopped early because it was clearly behind or did not fit memory.
        ratios: The speedups by prompt, as far as measured.
    """

    draft: str
    tree: TreeConfig
    prediction: Prediction
    speedup: float | None = None
    ratios: tuple[float, ...] = field(default=())


def leaders(predicted: Sequence[Candidate], n: int) -> list[Candidate]:
    """Return the `n` best predicted candidates, no two of them next to each other.

    Trees that differ by a step in the node budget alone predict alike; measuring both would
    tell little.
    """
    chosen: list[Candidate] = []
    seen: set[tuple[str, int, int, int]] = set()
    for candidate in sorted(predicted, key=lambda c: -c.prediction.decode_speedup):
        tree = candidate.tree
        family = (candidate.draft, tree.depth, tree.width, tree.top_k)
        if family not in seen:
            seen.add(family)
            chosen.append(candidate)
        if len(chosen) == n:
            break
    return chosen


def best_chain(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the chain with the best predicted speedup."""
    chains = [c for c in candidates if c.tree.is_chain]
    return max(chains, key=lambda c: c.prediction.decode_speedup, default=None)


def best_shallow(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the tree of at most two levels with the best predicted speedup."""
    shallow = [c for c in candidates if c.tree.depth <= 2]
    return max(shallow, key=lambda c: c.prediction.decode_speedup, default=None)


class MeasuredStudy:
    """The persistent Optuna study of measured trees.

    Args:
        spaces: The search space of every draft.
        predict: Scores any candidate; called for those Optuna proposes on its own.
        storage: Journal file of the study; in memory if None.
        name: Name of the study. Inputs that differ must differ in name.
        seed: Seed of the sampler.
    """

    def __init__(
        self,
        spaces: dict[str, SearchSpace],
        predict: Callable[[str, TreeConfig], Prediction],
        *,
        storage: Path | None,
        name: str,
        seed: int,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = None if storage is None else JournalStorage(JournalFileBackend(str(storage)))
        self._spaces = spaces
        self._predict = predict
        self._study = optuna.create_study(
            study_name=name,
            storage=backend,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=0),
            pruner=_pruner(),
            load_if_exists=True,
        )
        self._ranges = {
            "depth": max(space.max_depth for space in spaces.values()),
            "width": max(space.max_width for space in spaces.values()),
            "top_k": max(space.max_top_k for space in spaces.values()),
        }
        self._measured: dict[tuple[str, TreeConfig], Candidate] = {}

    @property
    def candidates(self) -> list[Candidate]:
        """Every candidate whose measurement was begun, in order."""
        return list(self._measured.values())

    def run(
        self,
        first: Sequence[Candidate],
        measure: Measure,
        n_trials: int,
        n_prompts: int,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Candidate]:
        """Measure `n_trials` different trees: the given ones first, then Optuna's proposals.

        Args:
            first: What to begin with, the likely winner first: later trees are compared with
                the best so far and stopped as soon as they are clearly behind.
            measure: Times one tree.
            n_trials: Trees to measure in all.
            n_prompts: Prompts that `measure` goes through.
            tick: Called after each measured tree.

        Returns:
            The measured candidates.
        """
        known = [c for c in first if self._spaces[c.draft].contains(c.tree)]
        for candidate in known[:n_trials]:
            self._study.enqueue_trial(self._point(candidate), skip_if_exists=True)
        n_repeats = 0
        while len(self._measured) < n_trials and n_repeats < MAX_REPEATS:
            trial = self._study.ask()
            draft, tree = self._proposal(trial)
            before = self._measured.get((draft, tree))
            if before is None:
                n_repeats = 0
                self._measured[draft, tree] = self._measure(trial, draft, tree, measure, n_prompts)
                tick()
                continue
            n_repeats += 1  # nothing is measured twice; the sampler learns what is known
            trial.set_user_attr("repeats", tree.label())
            if before.ratios:
                self._study.tell(trial, _value(before))
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        return self.candidates

    def _proposal(self, trial: Trial) -> tuple[str, TreeConfig]:
        draft = trial.suggest_categorical("draft", sorted(self._spaces))
        # The ranges never change from trial to trial: samplers drop parameters that do.
        depth = trial.suggest_int("depth", 0, self._ranges["depth"])
        width = trial.suggest_int("width", 1, self._ranges["width"])
        top_k = trial.suggest_int("top_k", 1, self._ranges["top_k"])
        fill = trial.suggest_float("fill", 0.0, 1.0)
        return draft, self._spaces[draft].tree(depth, width, top_k, fill)

    def _point(self, candidate: Candidate) -> dict[str, Any]:
        tree = candidate.tree
        return {
            "draft": candidate.draft,
            "depth": tree.depth,
            "width": max(1, tree.width),
            "top_k": max(1, tree.top_k),
            "fill": self._spaces[candidate.draft].fill(tree),
        }

    def _measure(
        self, trial: Trial, draft: str, tree: TreeConfig, measure: Measure, n_prompts: int
    ) -> Candidate:
        if tree.is_plain:  # 1 by definition
            trial.set_user_attr("tree", tree.label())
            for prompt in range(n_prompts):
                trial.report(1.0, step=prompt)
            self._study.tell(trial, 1.0)
            return Candidate(draft, tree, PLAIN_PREDICTION, 1.0, (1.0,) * n_prompts)
        prediction = self._predict(draft, tree)
        trial.set_user_attr("tree", tree.label())
        trial.set_user_attr("predicted_tau", prediction.tau)
        trial.set_user_attr("predicted_decode_speedup", prediction.decode_speedup)
        ratios: list[float] = []
        try:
            for prompt, ratio in enumerate(measure(draft, tree)):
                ratios.append(ratio)
                trial.report(ratio, step=prompt)
                if len(ratios) < n_prompts and trial.should_prune():
                    break
        except MemoryError:  # this tree is infeasible; the search goes on without it
            self._study.tell(trial, state=TrialState.FAIL)
            return Candidate(draft, tree, prediction)
        candidate = Candidate(draft, tree, prediction, ratios=tuple(ratios))
        if len(ratios) < n_prompts:
            self._study.tell(trial, state=TrialState.PRUNED)
            return candidate
        candidate = Candidate(draft, tree, prediction, _value(candidate), tuple(ratios))
        self._study.tell(trial, candidate.speedup)
        return candidate


def _pruner() -> optuna.pruners.BasePruner:
    """Return the pruner: a paired test against the best tree so far, prompt by prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=3)


def _value(candidate: Candidate) -> float:
    """Return the mean speedup on the prompts seen."""
    return sum(candidate.ratios) / len(candidate.ratios)


def defaults_within(spaces: dict[str, SearchSpace]) -> list[tuple[str, TreeConfig]]:
    """Return the usual settings that are legal for each neural draft."""
    return [
        (draft, tree.canonical())
        for draft, space in spaces.items()
        for tree in DEFAULTS
        if space.contains(tree)
    ]
