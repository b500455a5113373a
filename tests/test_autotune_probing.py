"""The probe of an EAGLE-3 head's conventions: statistics, choice of tokens, and the decision."""

import io
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from transformers import LlamaForCausalLM, PreTrainedModel

import toy_profiles
from autotune import Settings, tune
from autotune.job import Job, Models, prepare
from autotune.probing import (
    ALPHA,
    FAR,
    N_TOKENS,
    base_readings,
    choose_roots,
    decide,
    layer_readings,
    mcnemar,
    probe_drafts,
)
from autotune.progress import Silent
from autotune.report.terminal import print_profile
from autotune.tracing import flatten, record_answers
from engine.decoder import SpeculativeDecoder
from engine.eagle3 import Eagle3Head
from engine.eagle3_checkpoint import save_eagle3
from engine.eagle3_draft import Eagle3Draft
from engine.pair import draft_of
from engine.target import Target
from engine.trace import Trace
from pairs import VOCAB, save, small_llama, speculating_profile, write_prompts
from profiles import ProbedValue, load
from profiles.errors import SpectuneError
from tiny import _fit as fit_output
from tiny import tiny_head, tiny_model

LAYERS = (2, 4, 5)
N_LAYERS = 7

# --- statistics ---------------------------------------------------------------------------------


def outcomes(both: int, first: int, second: int, neither: int = 0) -> np.ndarray[Any, Any]:
    """Return two rows of which so many tokens are right in both, the first only, ..."""
    rows = [[1] * both + [1] * first + [0] * second + [0] * neither]
    rows += [[1] * both + [0] * first + [1] * second + [0] * neither]
    return np.array(rows, dtype=bool)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (2, 9), (40, 71), (0, 12)])
def test_the_test_is_mcnemars_exact_one(first: int, second: int) -> None:
    """It looks at discordant tokens alone: twice the smaller binomial tail, at most 1."""
    n = first + second
    p = mcnemar(*outcomes(5, first, second, 7))
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1)) / 2**n
    assert p == pytest.approx(min(1.0, 2 * tail))
    assert p == pytest.approx(min(1.0, 2 * stats.binom.cdf(min(first, second), n, 0.5)))
    assert p == mcnemar(*outcomes(900, second, first, 1))


def test_another_reading_needs_proof_and_the_configs_needs_none() -> None:
    assert decide(outcomes(50, 0, 7)).used == 0  # p = 0.016
    assert decide(outcomes(50, 0, 8)).used == 1  # p = 0.0078
    decision = decide(outcomes(50, 0, 7))
    assert decision.verdicts == ("kept", "undecided")
    assert decision.p_values == (None, pytest.approx(2 / 2**7))
    decision = decide(outcomes(50, 0, 8))
    assert decision.verdicts == ("rejected", "chosen")
    assert decision.p_values == (pytest.approx(2 / 2**8), pytest.approx(2 / 2**8))
    assert decide(outcomes(50, 8, 0)).verdicts == ("kept", "rejected")
    assert decide(outcomes(50, 0, 0)).verdicts == ("kept", "undecided")


def test_every_further_reading_asks_for_more_proof() -> None:
    """Two others: p = 0.0078 counts twice and is no longer below 0.01."""
    first, second = outcomes(50, 0, 8)
    decision = decide(np.stack([first, second, first]))
    assert decision.used == 0
    assert decision.p_values == (None, pytest.approx(4 / 2**8), 1.0)
    assert decision.verdicts == ("kept", "undecided", "undecided")


def test_of_two_proved_readings_the_better_one_is_used() -> None:
    right = np.zeros((3, 200), dtype=bool)
    right[1, :60] = right[2, :100] = True
    decision = decide(right)
    assert decision.used == 2
    assert decision.verdicts == ("rejected", "rejected", "chosen")
    right[1, 100:138] = True  # 98 right against 100: as good as the one used
    assert decide(right).verdicts == ("rejected", "undecided", "chosen")


def test_a_single_reading_is_kept() -> None:
    decision = decide(np.array([[True, False]]))
    assert (decision.used, decision.p_values, decision.verdicts) == (0, (None,), ("kept",))


def test_equally_good_readings_are_rarely_mistaken_for_better_ones() -> None:
    """Over 600 probes of three readings without a difference, fewer than ALPHA go wrong."""
    rng = np.random.default_rng(0)
    n_wrong = sum(decide(rng.random((3, 300)) < 0.5).used != 0 for _ in range(600))
    assert n_wrong < 600 * ALPHA


# --- what is compared, and on what --------------------------------------------------------------


def lengths(*pairs: tuple[int, int]) -> list[Trace]:
    return [Trace(str(i), [0] * prompt, [1] * answer) for i, (prompt, answer) in enumerate(pairs)]


def test_all_answer_tokens_are_looked_at_where_there_are_few() -> None:
    roots = choose_roots(lengths((3, 4), (10, 1), (5, 2)))
    assert roots == [[3, 4, 5], [], [5]]  # the first answer token comes from the prefill


@pytest.mark.parametrize(
    ("near", "far", "n_far"),
    [(9000, 9000, N_TOKENS // 2), (9000, 300, 300), (300, 9000, N_TOKENS - 300), (500, 700, 700)],
)
def test_half_of_many_tokens_lie_far_into_the_text_if_they_can(
    near: int, far: int, n_far: int
) -> None:
    """Texts of 100 answer tokens before and beyond position FAR."""
    traces = lengths(*[(10, 101)] * (near // 100), *[(FAR, 101)] * (far // 100))
    roots = choose_roots(traces)
    found = [root for places in roots for root in places]
    assert len(found) == min(N_TOKENS, near + far)
    assert sum(root >= FAR for root in found) == n_far
    for trace, places in zip(traces, roots, strict=True):
        assert len(set(places)) == len(places)
        assert all(len(trace.prompt) <= root < len(trace.tokens) - 1 for root in places)
        assert places, "no text is left out"


def test_layers_are_shifted_within_the_target() -> None:
    assert layer_readings((2, 4, 5), 7) == [(2, 4, 5), (3, 5, 6), (1, 3, 4)]
    assert layer_readings((0, 4, 5), 7) == [(0, 4, 5), (1, 5, 6)]
    assert layer_readings((2, 4, 6), 7) == [(2, 4, 6), (1, 3, 5)]
    assert layer_readings((0, 6), 7) == [(0, 6)]


def config_with(rope: Any) -> SimpleNamespace:
    return SimpleNamespace(rope_parameters=rope)


def test_bases_are_the_heads_the_usual_one_and_the_targets() -> None:
    target = config_with({"rope_type": "llama3", "rope_theta": 5e5})
    rope = {"rope_type": "default", "rope_theta": 1_000_000}
    assert base_readings(rope, target) == [1e6, 1e4, 5e5]
    assert base_readings(rope | {"rope_theta": 1e4}, target) == [1e4, 5e5]
    assert base_readings(rope, config_with(rope)) == [1e6, 1e4]
    assert base_readings(rope, SimpleNamespace()) == [1e6, 1e4]
    nested = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0}}
    assert base_readings(rope, config_with(nested)) == [1e6, 1e4, 9.0]
    assert base_readings(rope | {"rope_type": "yarn"}, target) == [1e6]


def test_the_targets_base_is_found_in_a_real_config() -> None:
    model = tiny_model("llama", rope_theta=123_000.0)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    assert base_readings(rope, model.config) == [1e4, 123_000.0]


# --- heads --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("probe")
    return {
        "target": save(small_llama(3, num_hidden_layers=N_LAYERS, hidden_size=64), base / "t"),
        "prompts": write_prompts(base / "prompts.jsonl", 24),
    }


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(folders["target"]).eval()


@pytest.fixture(scope="module")
def traces(model: PreTrainedModel) -> list[Trace]:
    """Return 12 texts of the target, sampled, so that they do not end in loops."""
    torch.manual_seed(0)
    prompts = torch.randint(0, VOCAB, (12, 20))
    texts = model.generate(
        prompts, do_sample=True, max_new_tokens=120, eos_token_id=None, pad_token_id=0
    ).tolist()
    return [Trace(str(i), text[:20], text[20:]) for i, text in enumerate(texts)]


def fitted_head(model: PreTrainedModel, traces: list[Trace], **changes: Any) -> Eagle3Head:
    """Return a head whose output layer was fitted under its conventions."""
    texts = [trace.tokens for trace in traces]
    changes = {"feature_layers": LAYERS, "draft_vocab": 200} | changes
    return tiny_head(model, 5, texts=texts, **changes)


def save_as(head: Eagle3Head, folder: Path, **config: Any) -> Path:
    """Save a head under a config that says something else."""
    save_eagle3(head, folder)
    raw = json.loads((folder / "config.json").read_text())
    if "layers" in config:
        outputs = [layer - 1 for layer in config["layers"]]
        raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = outputs
    if "base" in config:
        raw["rope_theta"] = config["base"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def job_of(folders: dict[str, Path], *heads: Path) -> Job:
    names = [str(head) for head in heads]
    models = Models(str(folders["target"]), [*names, "lookup"], "float32", "cpu")
    settings = Settings(n_tune=4, n_holdout=8, max_new_tokens=24)
    return prepare(models, folders["prompts"], None, settings, Silent())


def verdicts(table: tuple[ProbedValue, ...], what: str) -> dict[Any, str]:
    return {row.value: row.verdict for row in table if row.what == what}


@pytest.mark.parametrize("said", [LAYERS, (3, 5, 6), (1, 3, 4)])
def test_b15_the_layers_a_head_was_made_for_are_found(
    folders: dict[str, Path],
    model: PreTrainedModel,
    traces: list[Trace],
    tmp_path: Path,
    said: tuple[int, ...],
) -> None:
    """Whatever its config says: right, one too many or one too few."""
    head = save_as(fitted_head(model, traces), tmp_path / "head", layers=said)
    job = job_of(folders, head)
    assert job.drafts[str(head)].draft.feature_layers == said
    probed, tables = probe_drafts(job, traces, Silent())
    found = probed.drafts[str(head)]
    assert found.draft.feature_layers == LAYERS
    assert found.ref.feature_layers == LAYERS
    assert found.ref.rope_theta == 1e4
    assert set(tables) == {str(head)}
    told = verdicts(tables[str(head)], "feature_layers")
    assert next(iter(told)) == said
    assert told.pop(LAYERS) == ("kept" if said == LAYERS else "chosen")
    assert set(told.values()) == {"rejected"}
    assert verdicts(tables[str(head)], "rope_theta") == {}  # the target's base is 1e4, too
    assert probed.drafts["lookup"] is job.drafts["lookup"]
    assert probed.study_name != job.study_name


def test_without_a_difference_the_config_is_kept_and_the_rest_undecided(
    folders: dict[str, Path], model: PreTrainedModel, traces: list[Trace], tmp_path: Path
) -> None:
    """A head that ignores the features and whose attention is off knows the last token alone."""
    head = fitted_head(model, traces)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.layers[0].qkv_proj.weight[:96] = 0
    fit_output(head, Target(model), [trace.tokens for trace in traces])
    folder = save_as(head, tmp_path / "head", base=1e6)
    probed, tables = probe_drafts(job_of(folders, folder), traces, Silent())
    table = tables[str(folder)]
    assert [row.verdict for row in table] == [
        "kept",
        "undecided",
        "undecided",
        "kept",
        "undecided",
    ]
    assert [row.p_value for row in table] == [None, 1.0, 1.0, None, 1.0]
    assert probed.drafts[str(folder)].draft.feature_layers == LAYERS
    assert probed.drafts[str(folder)].ref.rope_theta == 1e6


@pytest.mark.parametrize("said", [1e4, 1e6])
def test_the_base_a_head_was_made_with_is_found(
    folders: dict[str, Path],
    model: PreTrainedModel,
    traces: list[Trace],
    tmp_path: Path,
    said: float,
) -> None:
    """Its attention is sharp, so that positions matter; one config is right, one is not."""
    head = fitted_head(model, traces)
    with torch.no_grad():
        head.layers[0].qkv_proj.weight[:96].mul_(4)
    fit_output(head, Target(model), [trace.tokens for trace in traces])
    folder = save_as(head, tmp_path / "head", base=said)
    probed, tables = probe_drafts(job_of(folders, folder), traces, Silent())
    found = probed.drafts[str(folder)]
    assert isinstance(found.draft, Eagle3Draft)
    assert found.draft.head.config.rope["rope_theta"] == found.ref.rope_theta == 1e4
    told = verdicts(tables[str(folder)], "rope_theta")
    assert told == ({} if said == 1e4 else {1e6: "rejected", 1e4: "chosen"})


def test_a_head_of_random_weights_is_refused_in_one_sentence(
    folders: dict[str, Path], model: PreTrainedModel, traces: list[Trace], tmp_path: Path
) -> None:
    head = tiny_head(model, 5, feature_layers=LAYERS, draft_vocab=200)
    folder = save_as(head, tmp_path / "head")
    with pytest.raises(SpectuneError, match="made for another target") as caught:
        probe_drafts(job_of(folders, folder), traces, Silent())
    message = str(caught.value)
    assert str(folder) in message
    assert "wrong layers" in message
    assert "norm flags" in message
    assert "\n" not in message


def test_a_head_that_always_says_the_same_is_refused(
    folders: dict[str, Path], model: PreTrainedModel, tmp_path: Path
) -> None:
    """A tenth of the text is one token: always guessing it is right often, and proves nothing."""
    rng = np.random.default_rng(0)
    answers = rng.integers(3, VOCAB, (12, 100))
    answers[:, ::10] = 40
    texts = [Trace(str(i), [1, 2, 3], row.tolist()) for i, row in enumerate(answers)]
    head = tiny_head(model, 5, feature_layers=LAYERS, draft_vocab=VOCAB)
    with torch.no_grad():
        head.lm_head.weight.zero_()
    assert head.target_ids is not None
    head.target_ids = head.target_ids.roll(-40)
    folder = save_as(head, tmp_path / "head")
    job = job_of(folders, folder)
    draft = job.drafts[str(folder)].draft
    assert isinstance(draft, Eagle3Draft)
    assert draft.head.to_target(torch.tensor([0])).item() == 40
    with pytest.raises(SpectuneError, match=r"guesses 9\.\d % of 1188 and a constant 9\.\d %"):
        probe_drafts(job, texts, Silent())


def test_a_good_head_on_monotonous_text_is_not_refused(
    folders: dict[str, Path], model: PreTrainedModel, tmp_path: Path
) -> None:
    """Where the text is one token, nobody can be better than a constant."""
    texts = [Trace(str(i), [1, 2, 3], [40] * 50) for i in range(4)]
    head = fitted_head(model, texts)
    folder = save_as(head, tmp_path / "head")
    _, tables = probe_drafts(job_of(folders, folder), texts, Silent())
    assert max(row.agreement for row in tables[str(folder)]) > 0.9


def test_drafts_without_features_are_not_probed(
    folders: dict[str, Path], traces: list[Trace]
) -> None:
    job = job_of(folders)
    assert probe_drafts(job, traces, Silent()) == (job, {})


def test_too_few_tokens_refuse_nobody(
    folders: dict[str, Path], model: PreTrainedModel, traces: list[Trace], tmp_path: Path
) -> None:
    head = save_as(tiny_head(model, 5, feature_layers=LAYERS), tmp_path / "head")
    short = [replace(trace, generated=trace.generated[:9]) for trace in traces]
    _, tables = probe_drafts(job_of(folders, head), short, Silent())
    assert {row.n_tokens for row in tables[str(head)]} == {12 * 8}


class Listening(Silent):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_correction_is_told(
    folders: dict[str, Path], model: PreTrainedModel, traces: list[Trace], tmp_path: Path
) -> None:
    right = save_as(fitted_head(model, traces), tmp_path / "right")
    wrong = save_as(fitted_head(model, traces), tmp_path / "wrong", layers=(3, 5, 6))
    listening = Listening()
    probe_drafts(job_of(folders, right, wrong), traces, listening)
    (message,) = listening.said
    assert message.startswith(str(wrong))
    assert "(2, 4, 5)" in message
    assert "(3, 5, 6) of its config" in message


# --- what a profile makes of it -----------------------------------------------------------------


def test_a_profile_serves_the_head_as_it_was_probed(
    folders: dict[str, Path], model: PreTrainedModel, traces: list[Trace], tmp_path: Path
) -> None:
    """Both conventions in the config are wrong, and neither is read again from there."""
    head = fitted_head(model, traces)
    with torch.no_grad():
        head.layers[0].qkv_proj.weight[:96].mul_(4)
    fit_output(head, Target(model), [trace.tokens for trace in traces])
    folder = save_as(head, tmp_path / "head", layers=(3, 5, 6), base=1e6)
    probed, _ = probe_drafts(job_of(folders, folder), traces, Silent())
    ref = probed.drafts[str(folder)].ref
    assert (ref.feature_layers, ref.rope_theta) == (LAYERS, 1e4)
    changes = {"draft": ref.model_dump(mode="json")}
    profile = speculating_profile(probed.loaded, "lookup", changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = SpeculativeDecoder.from_profile(profile, loaded=probed.loaded)
    assert isinstance(decoder.draft, Eagle3Draft)
    assert decoder.draft.feature_layers == LAYERS
    assert decoder.draft.head.config.rope["rope_theta"] == 1e4
    assert draft_of(ref, probed.loaded).ref == ref
    unprobed = ref.model_copy(update={"feature_layers": None, "rope_theta": None})
    assert draft_of(unprobed, probed.loaded).draft.feature_layers == (3, 5, 6)


@pytest.mark.parametrize("layers", [(), (2, 4), (2, 4, N_LAYERS)])
def test_b15_layers_that_the_pair_does_not_have_are_refused(
    folders: dict[str, Path], model: PreTrainedModel, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    folder = save_as(tiny_head(model, 5, feature_layers=LAYERS), tmp_path / "head")
    job = job_of(folders, folder)
    ref = job.drafts[str(folder)].ref.model_copy(update={"feature_layers": layers})
    with pytest.raises(SpectuneError, match="must be 3 numbers below the target's 7 layers"):
        draft_of(ref, job.loaded)


# --- what people read ---------------------------------------------------------------------------


def row(what: str, value: Any, verdict: str, p: float | None = None) -> dict[str, Any]:
    agreement = 0.61 if verdict in ("kept", "chosen") else 0.2
    return {
        "what": what,
        "value": value,
        "agreement": agreement,
        "n_tokens": 2000,
        "p_value": p,
        "verdict": verdict,
    }


def shown(probe: list[dict[str, Any]]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    profile = toy_profiles.profile({"probe": probe})
    print_profile(profile, None, Path("toy.yaml"), console)
    return console.export_text()


def test_a_probe_that_changed_nothing_is_one_line() -> None:
    text = shown(
        [
            row("feature_layers", [2, 4, 5], "kept"),
            row("feature_layers", [3, 5, 6], "rejected", 1e-9),
            row("rope_theta", 1e6, "kept"),
            row("rope_theta", 1e4, "undecided", 0.3),
        ]
    )
    assert "right on 61.0 % of 2000 tokens, read as its config says" in text
    assert "[3, 5, 6]" not in text
    assert "probe" not in shown([])


def test_a_probe_that_changed_something_is_a_table() -> None:
    text = shown(
        [
            row("feature_layers", [2, 4, 5], "kept"),
            row("rope_theta", 1e6, "rejected", 1e-9),
            row("rope_theta", 1e4, "chosen", 1e-9),
        ]
    )
    assert "read otherwise than its config says" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "feature layers [2, 4, 5] 61.0 % 2000 kept" in lines
    assert "rope theta 1e+06 20.0 % 2000 1e-09 rejected" in lines
    assert "rope theta 10000 61.0 % 2000 1e-09 chosen" in lines


# --- whole jobs ---------------------------------------------------------------------------------

TINY = Settings(
    n_tune=4, n_holdout=8, n_race=2, max_new_tokens=32, n_trials=2, n_probe_rounds=2, max_nodes=4
)
TINY = replace(TINY, max_depth=2)


def test_a_job_writes_what_it_probed(
    folders: dict[str, Path], model: PreTrainedModel, tmp_path: Path
) -> None:
    job = prepare(
        Models(str(folders["target"]), ["lookup"], "float32", "cpu"),
        folders["prompts"],
        None,
        TINY,
        Silent(),
    )
    answers = flatten(record_answers(job, job.sample.tune, Silent(), ""))
    head = save_as(fitted_head(model, answers), tmp_path / "head", base=2e4)
    models = Models(str(folders["target"]), [str(head)], "float32", "cpu")
    out = tmp_path / "out.yaml"
    profile = tune(models, folders["prompts"], out, settings=TINY)
    assert load(out) == profile
    assert [row.value for row in profile.probe] == [LAYERS, (3, 5, 6), (1, 3, 4), 2e4, 1e4]
    assert {row.n_tokens for row in profile.probe} == {4 * (32 - 1)}
    assert profile.probe[0].agreement > 0.5
    used = [row.value for row in profile.probe if row.verdict in ("kept", "chosen")]
    assert [profile.draft.feature_layers, profile.draft.rope_theta] == used


def test_a_job_with_a_useless_head_stops_and_writes_nothing(
    folders: dict[str, Path], model: PreTrainedModel, tmp_path: Path
) -> None:
    head = save_as(tiny_head(model, 5, feature_layers=LAYERS, draft_vocab=200), tmp_path / "head")
    models = Models(str(folders["target"]), ["lookup", str(head)], "float32", "cpu")
    with pytest.raises(SpectuneError, match="made for another target"):
        tune(models, folders["prompts"], tmp_path / "out.yaml", settings=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
