"""Suffix and hybrid drafts in a tuning job: which are made, and what they may remember."""

from pathlib import Path

import pytest

import autotune.proving
import autotune.report.page
from autotune import Settings, tune
from autotune.job import Models, load_drafts, prepare
from autotune.progress import Silent
from autotune.proving import run_interleaved
from autotune.racing import ForcedTrack
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, run_forced
from engine.hybrid import HybridDraft
from engine.pair import LoadedTarget, load_draft, load_target
from engine.suffix import SuffixDraft
from engine.trace import Trace
from pairs import save_noisy_copy, save_target, speculating_profile, write_prompts
from profiles import TreeConfig, draft_name, load_measurements, measurements_path
from profiles.errors import UsageError

TINY = Settings(
    n_tune=3,
    n_holdout=8,
    n_race=3,
    max_new_tokens=12,
    n_trials=4,
    n_probe_rounds=1,
    max_nodes=6,
    max_depth=3,
    max_lookup_depth=4,
)
CHAIN = TreeConfig.chain(3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    save_noisy_copy(save_target(folder / "target"), folder / "noisy")
    write_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> LoadedTarget:
    return load_target(str(base / "target"), dtype="float32", device="cpu")


def models(base: Path, *drafts: str, history: int = 0) -> Models:
    return Models(str(base / "target"), drafts, "float32", "cpu", history=history)


def test_hybrid_stands_for_the_hybrid_of_every_head_given(
    base: Path, loaded: LoadedTarget
) -> None:
    """It shares the head's weights; and the history asked for is that of all drafts that can."""
    noisy = str(base / "noisy")
    wanted = models(base, "hybrid", "lookup", noisy, "suffix", history=70)
    drafts = load_drafts(wanted, loaded, Silent())
    assert set(drafts) == {"lookup", noisy, "suffix", f"hybrid:{noisy}"}
    hybrid = drafts[f"hybrid:{noisy}"]
    assert isinstance(hybrid.draft, HybridDraft)
    assert hybrid.draft.head is drafts[noisy].draft
    assert {name: draft.knobs.get("history") for name, draft in drafts.items()} == {
        "lookup": None,
        noisy: None,
        "suffix": 70,
        f"hybrid:{noisy}": 70,
    }
    assert hybrid.draft.suffix.history == 70
    assert all(draft_name(draft.ref) == name for name, draft in drafts.items())


def test_a_hybrid_of_nothing_is_refused(base: Path, loaded: LoadedTarget) -> None:
    with pytest.raises(UsageError, match="a hybrid must be made of a head or a small model, but"):
        load_drafts(models(base, "hybrid", "lookup"), loaded, Silent())


def test_a_job_over_all_kinds_of_drafts_is_written_and_can_be_served(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft is timed and scored under its name, and the profile's own knobs are kept."""
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    noisy, out = str(base / "noisy"), tmp_path / "out.yaml"
    wanted = models(base, noisy, "hybrid", "suffix", history=60)
    profile = tune(wanted, base / "prompts.jsonl", out, settings=TINY)
    measurements = load_measurements(measurements_path(out))
    names = {noisy, f"hybrid:{noisy}", "suffix"}
    # Variants of a draft stand under its name and what differs.
    assert {score.draft.partition(" ")[0] for score in measurements.scores} == names
    assert {point.draft for point in measurements.latency} >= names
    assert draft_name(profile.draft) in names
    assert profile.draft.history == (None if profile.draft.kind == "model" else 60)


@pytest.mark.parametrize("kind", ["suffix", "hybrid"])
def test_a_profile_serves_the_draft_that_it_names(
    base: Path, loaded: LoadedTarget, kind: str
) -> None:
    """Knobs included, and with a memory: the second time the answer is found in it."""
    name = "suffix" if kind == "suffix" else f"hybrid:{base / 'noisy'}"
    knobs = {"history": 200, "max_match": 7}
    ref = load_draft(name, loaded).variant(**knobs).ref
    tree = {"depth": 3, "width": 1, "top_k": 1, "nodes": 3}
    changes = {"draft": ref.model_dump(mode="json", exclude_none=True), "tree": tree}
    profile = speculating_profile(loaded, "lookup", changes)
    served = SpeculativeDecoder.from_profile(profile, loaded=loaded).draft
    assert served is not None
    draft = served.suffix if isinstance(served, HybridDraft) else served
    assert isinstance(draft, SuffixDraft)
    assert (served.kind, draft.history, draft.max_match) == (kind, 200, 7)
    decoder = SpeculativeDecoder(loaded, served, CHAIN)  # without a guard, which looks at clocks
    first, second = (decoder.generate("a question", max_new_tokens=24) for _ in range(2))
    assert first.text == second.text
    assert second.stats.n_rounds < first.stats.n_rounds
    decoder.forget()
    third = decoder.generate("a question", max_new_tokens=24)
    assert third.stats.n_rounds == first.stats.n_rounds


def conversation(answer: list[int], prompt: int) -> list[Trace]:
    return [Trace(str(prompt), [prompt, prompt + 1], answer)]


def test_a_raced_tree_finds_the_answers_of_prompts_before_and_no_others(base: Path) -> None:
    """Every tree starts without a memory and is served the prompts in turn: a second tree finds
    nothing of the first one's, and no prompt finds its own answer."""
    job = prepare(
        models(base, "suffix", history=200), base / "prompts.jsonl", None, TINY, Silent()
    )
    answers = [list(range(50 + 20 * i, 70 + 20 * i)) for i in (0, 1, 0)]
    texts = [conversation(answer, 10 * i + 5) for i, answer in enumerate(answers)]
    trees = [CHAIN, TreeConfig(depth=4, width=2, top_k=2, nodes=6)]
    taus: dict[TreeConfig, list[float]] = {tree: [] for tree in trees}

    def spy(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
        done = run_forced(decoder, trace)
        taus[decoder.tree].append(done.stats.n_round_tokens / done.stats.n_rounds)
        return done

    track = ForcedTrack(job, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.racing.run_forced", spy)
        for prompt in range(track.n_prompts):
            for tree in trees:
                track.seconds(prompt, "suffix", tree)
    for tree in trees:
        assert taus[tree][:2] == [1.0, 1.0]
        assert taus[tree][2] > 2
    late = ForcedTrack(job, texts)  # a race that is resumed at its third prompt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.racing.run_forced", spy)
        late.seconds(2, "suffix", CHAIN)
    assert taus[CHAIN][3] == taus[CHAIN][2]


@pytest.mark.parametrize("disturbed", [False, True])
def test_the_holdout_remembers_each_answer_once_and_only_for_later_prompts(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, disturbed: bool
) -> None:
    """Both runs of a prompt go without its own answer, also when it is measured anew because the
    machine was disturbed; the third prompt, answered as the first, finds that one."""
    decoder = SpeculativeDecoder(loaded, SuffixDraft(history=300), CHAIN)
    answers = [list(range(50 + 20 * i, 70 + 20 * i)) for i in (0, 1, 0)]
    texts = [conversation(answer, 10 * i + 5) for i, answer in enumerate(answers)]
    paces = iter([1.0, 1.0, 1.0, 9.0 if disturbed else 1.0, *[1.0] * 50])
    monkeypatch.setattr(autotune.proving, "pace_of", lambda target, pass_s: next(paces))
    steadily = run_interleaved([SpeculativeDecoder(loaded), decoder], texts, 1.0, lambda: None)
    assert steadily.n_remeasured == disturbed
    rounds = [[run[0].stats.n_rounds for run in steadily.blocks[prompt][1]] for prompt in range(3)]
    assert rounds[:2] == [[19, 19]] * 2
    assert rounds[2] == [19, 19] if disturbed else max(rounds[2]) < 10
