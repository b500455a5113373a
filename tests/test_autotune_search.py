"""The measured study, on synthetic objectives: nothing here decodes."""

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import optuna
import psutil
import pytest
from optuna.trial import TrialState

from autotune.candidates import (
    PLAIN_PREDICTION,
    Candidate,
    best_chain,
    best_shallow,
    defaults_within,
    leaders,
)
from autotune.cost import Prediction
from autotune.proving import choose_rungs
from autotune.racing import ENOUGH_PROMPTS, MIN_PROMPTS, contenders
from autotune.search import MeasuredStudy
from autotune.search.storage import open_storage
from autotune.space import SearchSpace
from autotune.study_files import without_password
from profiles import PLAIN, TreeConfig
from profiles.errors import SpectuneError

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
    """A track whose speedups are made up, with noise; counts what was run."""

    n_prompts = N_PROMPTS

    def __init__(self, mean: float | None = None, noise: float = 0.02) -> None:
        self.runs: Counter[tuple[int, str, TreeConfig]] = Counter()
        self._mean, self._noise = mean, noise
        self._rng = np.random.default_rng(0)

    @property
    def trees(self) -> set[TreeConfig]:
        return {tree for _, _, tree in self.runs}

    def n_runs(self, tree: TreeConfig) -> int:
        return sum(n for (_, _, other), n in self.runs.items() if other == tree)

    def speedup(self, draft: str, tree: TreeConfig) -> float:
        if self._mean is not None:
            return self._mean
        return 1.6 - 0.1 * abs(tree.depth - 4) - 0.01 * abs(tree.nodes - 12)

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        self.runs[prompt, draft, tree] += 1
        plain_s = 1.0 + prompt  # prompts differ far more than trees
        if tree.is_plain:
            return plain_s
        return plain_s / (self.speedup(draft, tree) * float(self._rng.lognormal(0, self._noise)))


def study(
    storage: Path | str | None = None,
    spaces: dict[str, SearchSpace] | None = None,
    *,
    resume: bool = False,
    facts: dict[str, str] | None = None,
    name: str = "test",
) -> MeasuredStudy:
    return MeasuredStudy(
        spaces or SPACES,
        predict,
        storage=storage,
        name=name,
        facts=facts,
        seed=0,
        resume=resume,
    )


FIRST = [
    *(predicted(tree, s) for tree, s in ((DEEP, 1.5), (CHAIN, 1.2), (SHALLOW, 1.1))),
    Candidate("head", PLAIN, PLAIN_PREDICTION),
]


def test_no_tree_is_measured_twice_and_repeats_do_not_count() -> None:
    objective = Objective()
    measured = study().run(FIRST, objective, 20)
    assert max(n for (_, _, tree), n in objective.runs.items() if not tree.is_plain) == 1
    assert len({(c.draft, c.tree) for c in measured}) == len(measured) == 20
    assert all(c.tree == c.tree.canonical() for c in measured)


def test_a_space_smaller_than_the_number_of_trials_ends_the_search() -> None:
    objective = Objective()
    measured = study(spaces={"head": SearchSpace(1, 1, 1, 1)}).run([], objective, 20)
    assert {c.tree for c in measured} == {PLAIN, TreeConfig.chain(1)} == objective.trees


def test_what_is_given_is_measured_first() -> None:
    measured = study().run(FIRST, Objective(), 6)
    assert [c.tree for c in measured[:4]] == [c.tree for c in FIRST]
    assert len(measured) == 6


def test_a_given_tree_outside_the_space_is_left_out() -> None:
    deep = predicted(TreeConfig.chain(9), 3.0)
    measured = study().run([deep, *FIRST], Objective(), 5)
    assert deep.tree not in {c.tree for c in measured}


def test_plain_is_worth_one_and_paces_every_prompt() -> None:
    """Plain runs twice on a prompt, first and last, whatever the number of trees."""
    objective = Objective()
    measured = study().run(FIRST, objective, 4, FIRST)
    plain = next(c for c in measured if c.tree.is_plain)
    assert plain.speedup == 1.0
    assert set(plain.ratios) == {1.0}
    assert objective.n_runs(PLAIN) == 2 * len(next(c for c in measured if c.tree == DEEP).ratios)


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
    measured = study().run(first, Objective(), n_trials)
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


class TwoSided(Objective):
    """One tree is fast, all others are slow."""

    def speedup(self, draft: str, tree: TreeConfig) -> float:
        return 1.5 if tree == DEEP else 0.6


def test_a_tree_clearly_behind_is_stopped_and_has_no_speedup() -> None:
    objective = TwoSided()
    measured = study().run(FIRST, objective, 4)
    losers = [c for c in measured if not c.tree.is_plain and c.tree != DEEP]
    assert len(losers) == 2
    for loser in losers:
        assert loser.speedup is None
        assert MIN_PROMPTS <= len(loser.ratios) == objective.n_runs(loser.tree) < N_PROMPTS
    leader = next(c for c in measured if c.tree == DEEP)
    assert leader.speedup == pytest.approx(1.5, rel=0.05)
    assert len(leader.ratios) == ENOUGH_PROMPTS, "nothing was left to decide"


def test_a_tree_that_stays_is_measured_to_the_end_though_it_is_behind() -> None:
    """Chains are what many engines can run: the best one must come out with a figure."""
    measured = study().run(FIRST, TwoSided(), 4, [FIRST[1]])
    chain = next(c for c in measured if c.tree == CHAIN)
    assert chain.speedup == pytest.approx(0.6, rel=0.05)


def test_a_tree_is_also_stopped_when_plain_is_the_best_so_far() -> None:
    objective = Objective(mean=0.5)
    measured = study().run([FIRST[3], FIRST[0]], objective, 2)
    assert [c.tree for c in measured] == [PLAIN, DEEP]
    assert measured[1].speedup is None
    assert objective.n_runs(DEEP) < N_PROMPTS


def test_a_later_tree_is_compared_with_the_best_of_the_races_before() -> None:
    first = study()
    first.run([FIRST[0]], TwoSided(), 1)
    measured = first.run([FIRST[1]], TwoSided(), 2)
    assert measured[1].speedup is None


def test_noise_alone_stops_few_of_equal_trees() -> None:
    """With all trees alike, losing any is chance; the winner must not look far better."""
    measured = study().run(FIRST[:3], Objective(mean=1.3, noise=0.05), 12)
    stopped = [c for c in measured if c.speedup is None and not c.tree.is_plain]
    assert len(stopped) <= 6
    assert max(c.speedup or 0 for c in measured) < 1.45


def test_a_search_says_nothing_of_its_own() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study().run(FIRST, Objective(mean=0.8), 8)
    assert [str(w.message) for w in caught] == []


def test_a_prediction_cannot_win() -> None:
    promised = [predicted(SHALLOW, 9.0), predicted(CHAIN, 8.0)]  # never measured
    behind = Candidate("head", DEEP, Prediction(9, 1), 0.97, (0.97,) * N_PROMPTS)
    stopped = Candidate("head", TreeConfig.chain(2), Prediction(9, 1), None, (1.2,))
    plain = Candidate("head", PLAIN, PLAIN_PREDICTION, 1.0, (1.0,) * N_PROMPTS)
    assert choose_rungs([*promised, behind, stopped, plain]) == []


@pytest.mark.parametrize("spread", [0.02, 0.6])
def test_the_rungs_are_the_leader_a_chain_and_where_there_is_doubt_a_shallow_tree(
    spread: float,
) -> None:
    noise = np.exp(spread * np.array([1, -1] * (N_PROMPTS // 2)))

    def ahead(tree: TreeConfig, speedup: float, expected: float) -> Candidate:
        ratios = tuple((speedup * noise).tolist())
        return Candidate("head", tree, Prediction(expected, 1), speedup, ratios)

    leader, shallow, chain = (
        ahead(DEEP, 1.5, 1.2),
        ahead(SHALLOW, 1.2, 1.3),
        ahead(CHAIN, 1.1, 1.1),
    )
    wide = ahead(TreeConfig(depth=5, width=3, top_k=3, nodes=12), 1.4, 1.9)
    fallback = [shallow] if spread > 0.5 else []
    assert choose_rungs([chain, wide, shallow, leader]) == [leader, *fallback, chain]
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


def loaded(storage: Path | str, name: str = "test") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=open_storage(storage))


def test_the_study_is_a_journal_file_that_optuna_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.study.log"
    facts = {"domain": "code", "sample": "ab12"}
    measured = study(path, facts=facts).run(FIRST, Objective(), 10)
    found = loaded(path)
    assert found.user_attrs == facts
    own = [t for t in found.trials if "repeats" not in t.user_attrs]
    assert [t.user_attrs["tree"] for t in own] == [c.tree.label() for c in measured]
    for trial, candidate in zip(own, measured, strict=True):
        assert trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        if candidate.speedup is not None:
            assert trial.value == pytest.approx(candidate.speedup)
        assert list(trial.intermediate_values.values()) == pytest.approx(candidate.ratios)
        assert trial.user_attrs["predicted_tau"] == candidate.prediction.tau
        speedup = trial.user_attrs["predicted_decode_speedup"]
        assert speedup == candidate.prediction.decode_speedup
    assert found.best_value == pytest.approx(max(c.speedup or 0 for c in measured))


def test_the_same_seed_proposes_the_same_trees() -> None:
    runs = [study().run(FIRST, Objective(noise=0.0), 12) for _ in range(2)]
    assert runs[0] == runs[1]


class Hungry(Objective):
    """One tree does not fit memory, another takes no time at all."""

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        if tree == CHAIN and prompt == 1:
            raise MemoryError
        seconds = super().seconds(prompt, draft, tree)
        return 0.0 if tree == SHALLOW else seconds


def test_b36_trees_that_fail_or_are_infinitely_fast_never_win_and_the_search_goes_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.log"
    measured = study(path).run(FIRST, Hungry(), 8)
    assert len(measured) == 8
    for tree in (CHAIN, SHALLOW):
        assert next(c for c in measured if c.tree == tree).speedup is None
    assert max(c.speedup or 0 for c in measured) < 2
    failed = [t for t in loaded(path).trials if t.user_attrs.get("outcome") == "failed"]
    assert {t.state for t in failed} == {TrialState.FAIL}
    assert len(failed) == 2
    again = study(path, resume=True)
    assert next(c for c in again.candidates if c.tree == CHAIN).speedup is None


# --- going on with a study ----------------------------------------------------------------------


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "journal":
        return tmp_path / "x.study.log"
    return f"sqlite:///{tmp_path}/x.db"


class Stopped(Objective):
    """Is interrupted after some runs."""

    def __init__(self, n_runs: int) -> None:
        super().__init__()
        self._left = n_runs

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return super().seconds(prompt, draft, tree)


def test_a_finished_study_goes_on_to_the_asked_total_without_repeats(storage: Path | str) -> None:
    first = study(storage).run(FIRST, Objective(), 6)
    again, objective = study(storage, resume=True), Objective()
    assert again.resumes
    measured = again.run(FIRST, objective, 10)
    assert [(c.draft, c.tree, c.speedup) for c in measured[:6]] == [
        (c.draft, c.tree, pytest.approx(c.speedup) if c.speedup else None) for c in first
    ]
    assert len(measured) == len({(c.draft, c.tree) for c in measured}) == 10
    assert objective.trees.isdisjoint({c.tree for c in first if c.draft == "head"} - {PLAIN})
    assert study(storage, resume=True).run(FIRST, Stopped(0), 10) == again.candidates


def states(storage: Path | str) -> Counter[str]:
    return Counter(trial.state.name for trial in loaded(storage).trials)


def as_if_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker so far be another process, one that has ended."""
    alive = psutil.Process
    monkeypatch.setattr("autotune.search.storage.psutil.pid_exists", lambda pid: False)
    monkeypatch.setattr("autotune.search.storage.psutil.Process", alive)


def test_a_stopped_race_goes_on_where_it_was(
    storage: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Stopped(2 * (2 + 3) + 1)  # two prompts, plain twice and three trees each
    with pytest.raises(KeyboardInterrupt):
        study(storage).run(FIRST, stopped, 4)
    as_if_killed(monkeypatch)
    again, objective = study(storage, resume=True), Objective()
    assert again.candidates == []
    measured = again.run(FIRST, objective, 4)
    assert {prompt for prompt, _, tree in objective.runs if not tree.is_plain}.isdisjoint({0, 1})
    assert {c.tree for c in measured} == {c.tree for c in FIRST}
    assert len(next(c for c in measured if c.tree == DEEP).ratios) >= ENOUGH_PROMPTS


def test_trials_of_jobs_that_are_gone_are_reclaimed_and_those_of_others_left(
    storage: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(storage).run(FIRST, Stopped(4), 4)
    study(storage, resume=True)
    assert states(storage) == {"RUNNING": 4}, "this very process still runs"
    as_if_killed(monkeypatch)
    study(storage, resume=True)
    assert states(storage) == {"FAIL": 4}


def test_a_resumed_search_proposes_other_trees_than_the_one_before(storage: Path | str) -> None:
    first = study(storage).run([], Objective(), 3)
    measured = study(storage, resume=True).run([], Objective(), 6)
    assert not {(c.draft, c.tree) for c in first} & {(c.draft, c.tree) for c in measured[3:]}


def test_without_resume_a_new_study_begins_beside_the_old(storage: Path | str) -> None:
    study(storage).run(FIRST, Objective(), 3)
    fresh = study(storage)
    assert not fresh.resumes
    assert fresh.candidates == []
    assert fresh.name != "test"
    fresh.run(FIRST, Objective(), 4)
    assert len(study(storage, resume=True).candidates) == 4, "the latest one is gone on with"


def test_studies_of_other_inputs_are_never_mixed_and_the_difference_is_named(
    storage: Path | str,
) -> None:
    facts = {"device": "A", "sample": "x", "domain": "code"}
    study(storage, facts=facts, name="one").run(FIRST, Objective(), 3)
    other = study(storage, facts=facts | {"device": "B"}, name="two", resume=True)
    assert not other.resumes
    assert other.candidates == []
    assert other.differences == ["device"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://someone:secret@localhost:1/x",
        "mysql+nodriver://someone:secret@localhost/x",
        "nonsense://someone:secret@localhost/x",
        "sqlite:////nowhere/at/all.db",
        "/nowhere/at/all.log",
    ],
)
def test_a_storage_that_cannot_be_used_is_named_without_its_password(url: str) -> None:
    with pytest.raises(SpectuneError, match="cannot be used") as caught:
        study(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_passwords_and_options_are_left_out_of_what_is_shown() -> None:
    shown = without_password("postgresql://me:secret@host:5432/db?password=secret&sslmode=x")
    assert shown == "postgresql://me@host:5432/db"
    assert without_password("sqlite:///a/b.db") == "sqlite:///a/b.db"
    assert without_password("a/b.log") == "a/b.log"
