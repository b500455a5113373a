"""The measured study, on synthetic objectives: nothing here decodes."""

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.cost_model import Prediction
from autotune.proving import choose_rungs
from autotune.racing import contenders
from autotune.search import (
    PLAIN_PREDICTION,
    Candidate,
    MeasuredStudy,
    best_chain,
    best_shallow,
    defaults_within,
    leaders,
)
from autotune.space import SearchSpace
from profiles import PLAIN, TreeConfig

N_PROMPTS = 8
SPACES = {"head": SearchSpace(8, 10, 10, 64), "lookup": SearchSpace(16, 4, 4, 64)}
DEEP, SHALLOW, CHAIN = (
    TreeConfig(depth=4, width=3, top_k=3, nodes=10),
    TreeConfig(depth=2, width=2, top_k=2, nodes=4),
    TreeConfig.chain(3),
)


def predicted(tree: TreeConfig, speedup: float, draft: str = "head") -> Candidate:
    return Candidate(draft, tree, Prediction(tau=speedup, break_even_tau=1.0))


def predict(draft: str, tree: TreeConfig) -> Prediction:
    return (
        PLAIN_PREDICTION if tree.is_plain else Prediction(1 + tree.depth / 2, 1 + tree.depth / 4)
    )


class Objective:
    """Speedups per prompt, with noise; counts what was measured."""

    def __init__(self, mean: float | None = None, noise: float = 0.02) -> None:
        self.calls: list[tuple[str, TreeConfig]] = []
        self.n_prompts: Counter[tuple[str, TreeConfig]] = Counter()
        self._mean, self._noise = mean, noise
        self._rng = np.random.default_rng(0)

    def speedup(self, draft: str, tree: TreeConfig) -> float:
        if self._mean is not None:
            return self._mean
        return 1.6 - 0.1 * abs(tree.depth - 4) - 0.01 * abs(tree.nodes - 12)

    def __call__(self, draft: str, tree: TreeConfig) -> Iterator[float]:
        self.calls.append((draft, tree))
        for _ in range(N_PROMPTS):
            self.n_prompts[draft, tree] += 1
            yield self.speedup(draft, tree) * float(self._rng.lognormal(0, self._noise))


def study(
    storage: Path | None = None, spaces: dict[str, SearchSpace] | None = None
) -> MeasuredStudy:
    return MeasuredStudy(spaces or SPACES, predict, storage=storage, name="test", seed=0)


FIRST = [
    *(predicted(tree, s) for tree, s in ((DEEP, 1.5), (CHAIN, 1.2), (SHALLOW, 1.1))),
    Candidate("head", PLAIN, PLAIN_PREDICTION),
]


def test_no_tree_is_measured_twice_and_repeats_do_not_count() -> None:
    objective, ticks = Objective(), []
    measured = study().run(FIRST, objective, 20, N_PROMPTS, lambda: ticks.append(1))
    assert max(Counter(objective.calls).values()) == 1
    assert len({(c.draft, c.tree) for c in measured}) == len(measured) == len(ticks) == 20
    assert all(c.tree == c.tree.canonical() for c in measured)


def test_a_space_smaller_than_the_number_of_trials_ends_the_search() -> None:
    spaces = {"head": SearchSpace(1, 1, 1, 1)}
    objective = Objective()
    measured = study(spaces=spaces).run([], objective, 20, N_PROMPTS)
    assert {c.tree for c in measured} == {PLAIN, TreeConfig.chain(1)}
    assert objective.calls == [("head", TreeConfig.chain(1))]


def test_what_is_given_comes_first_and_in_its_order() -> None:
    measured = study().run(FIRST, Objective(), 6, N_PROMPTS)
    assert [c.tree for c in measured[:4]] == [c.tree for c in FIRST]
    assert len(measured) == 6


def test_a_given_tree_outside_the_space_is_left_out() -> None:
    deep = predicted(TreeConfig.chain(9), 3.0)
    measured = study().run([deep, *FIRST], Objective(), 5, N_PROMPTS)
    assert deep.tree not in {c.tree for c in measured}


def test_plain_is_worth_one_and_never_timed() -> None:
    objective = Objective()
    measured = study().run(FIRST, objective, 4, N_PROMPTS)
    plain = next(c for c in measured if c.tree.is_plain)
    assert plain.speedup == 1.0
    assert set(plain.ratios) == {1.0}
    assert all(not tree.is_plain for _, tree in objective.calls)


class FixedPredictor:
    """Stands in for replay and the cost model."""

    def candidate(self, draft: str, tree: TreeConfig) -> Candidate:
        return Candidate(draft, tree, predict(draft, tree))


@pytest.mark.parametrize("n_trials", [2, 4, 6, 12])
def test_plain_is_measured_in_a_search_of_any_length(n_trials: int) -> None:
    everything = [
        predicted(tree, 1 + i / 1000, draft)
        for draft, space in SPACES.items()
        for i, tree in enumerate(space.enumerate())
    ]
    first = contenders(everything, SPACES, FixedPredictor())  # type: ignore[arg-type]
    assert first[0] == leaders(everything, 1)[0]
    measured = study().run(first, Objective(), n_trials, N_PROMPTS)
    assert any(c.tree.is_plain for c in measured)
    assert len(measured) == n_trials


def test_the_usual_settings_are_among_the_contenders_where_they_are_legal() -> None:
    everything = [predicted(tree, 1.0) for tree in SPACES["head"].enumerate()]
    first = contenders(everything, SPACES, FixedPredictor())  # type: ignore[arg-type]
    for draft, default in defaults_within(SPACES):
        assert (draft, default) in {(c.draft, c.tree) for c in first}
    assert len(defaults_within({"head": SPACES["head"]})) == 3
    assert defaults_within({"head": SearchSpace(2, 2, 2, 4)}) == []
    assert len({(c.draft, c.tree) for c in first}) == len(first)


def test_a_tree_clearly_behind_is_stopped_and_has_no_speedup() -> None:
    class TwoSided(Objective):
        def speedup(self, draft: str, tree: TreeConfig) -> float:
            return 1.5 if tree == DEEP else 0.6

    objective = TwoSided()
    measured = study().run(FIRST, objective, 4, N_PROMPTS)
    losers = [c for c in measured if not c.tree.is_plain and c.tree != DEEP]
    assert objective.n_prompts["head", DEEP] == N_PROMPTS
    assert len(losers) == 2
    for loser in losers:
        assert loser.speedup is None
        assert objective.n_prompts[loser.draft, loser.tree] < N_PROMPTS
        assert len(loser.ratios) == objective.n_prompts[loser.draft, loser.tree]


def test_a_tree_is_also_stopped_when_plain_is_the_best_so_far() -> None:
    objective = Objective(mean=0.5)
    first = [FIRST[3], FIRST[0]]
    measured = study().run(first, objective, 2, N_PROMPTS)
    assert [c.tree for c in measured] == [PLAIN, DEEP]
    assert measured[1].speedup is None
    assert objective.n_prompts["head", DEEP] < N_PROMPTS


def test_a_search_says_nothing_of_its_own() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study().run(FIRST, Objective(mean=0.8), 8, N_PROMPTS)
    assert [str(w.message) for w in caught] == []


def test_a_prediction_cannot_win() -> None:
    promised = [predicted(SHALLOW, 9.0), predicted(CHAIN, 8.0)]  # never measured
    behind = Candidate("head", DEEP, Prediction(9, 1), 0.97, (0.97,) * N_PROMPTS)
    stopped = Candidate("head", TreeConfig.chain(2), Prediction(9, 1), None, (1.2,))
    plain = Candidate("head", PLAIN, PLAIN_PREDICTION, 1.0, (1.0,) * N_PROMPTS)
    assert choose_rungs([*promised, behind, stopped, plain]) == []


def test_the_rungs_are_the_leader_then_a_shallow_tree_and_a_chain() -> None:
    def ahead(tree: TreeConfig, speedup: float, expected: float) -> Candidate:
        return Candidate("head", tree, Prediction(expected, 1), speedup, (speedup,) * N_PROMPTS)

    leader, shallow, chain = (
        ahead(DEEP, 1.5, 1.2),
        ahead(SHALLOW, 1.2, 1.3),
        ahead(CHAIN, 1.1, 1.1),
    )
    wide = ahead(TreeConfig(depth=5, width=3, top_k=3, nodes=12), 1.4, 1.9)
    assert choose_rungs([chain, wide, shallow, leader]) == [leader, shallow, chain]
    assert choose_rungs([chain]) == [chain]


def test_leaders_are_no_neighbours_and_the_best_chain_and_shallow_tree_are_found() -> None:
    near = TreeConfig(depth=4, width=3, top_k=3, nodes=12)  # differs from DEEP by its nodes alone
    scored = [predicted(t, s) for t, s in ((DEEP, 2.0), (near, 1.9), (CHAIN, 1.5), (SHALLOW, 1.4))]
    assert [c.tree for c in leaders(scored, 2)] == [DEEP, CHAIN]
    chain, shallow = best_chain(scored), best_shallow(scored)
    assert chain is not None
    assert shallow is not None
    assert (chain.tree, shallow.tree) == (CHAIN, SHALLOW)
    assert best_chain([]) is None


def test_the_study_is_a_journal_file_that_optuna_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.study.log"
    measured = study(path).run(FIRST, Objective(), 10, N_PROMPTS)
    storage = JournalStorage(JournalFileBackend(str(path)))
    loaded = optuna.load_study(study_name="test", storage=storage)
    own = [t for t in loaded.trials if "repeats" not in t.user_attrs]
    assert [t.user_attrs["tree"] for t in own] == [c.tree.label() for c in measured]
    for trial, candidate in zip(own, measured, strict=True):
        assert trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        if candidate.speedup is not None:
            assert trial.value == pytest.approx(candidate.speedup)
        if not candidate.tree.is_plain:
            assert list(trial.intermediate_values.values()) == pytest.approx(candidate.ratios)
            assert trial.user_attrs["predicted_tau"] == candidate.prediction.tau
            speedup = trial.user_attrs["predicted_decode_speedup"]
            assert speedup == candidate.prediction.decode_speedup
    assert loaded.best_value == pytest.approx(max(c.speedup or 0 for c in measured))


def test_the_same_seed_proposes_the_same_trees() -> None:
    runs = [study().run(FIRST, Objective(noise=0.0), 12, N_PROMPTS) for _ in range(2)]
    assert runs[0] == runs[1]


def test_b36_a_tree_that_needs_too_much_memory_is_left_out_and_the_search_goes_on() -> None:
    class Hungry(Objective):
        def __call__(self, draft: str, tree: TreeConfig) -> Iterator[float]:
            if tree == CHAIN:
                raise MemoryError
            yield from super().__call__(draft, tree)

    measured = study().run(FIRST, Hungry(), 8, N_PROMPTS)
    assert len(measured) == 8
    assert next(c for c in measured if c.tree == CHAIN).speedup is None
