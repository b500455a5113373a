"""The schedule of a profile: which tree runs with how many prompts in flight, and its rules."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import toy_profiles
from profiles import PLAIN, BatchRange, TreeConfig, export, is_sealed, load, save, validated
from profiles.errors import SpectuneError

EVIDENCE: dict[str, Any] = {
    "baseline": "plain decoding of the same batches",
    "rows": 4,
    "ratio": 1.3,
    "low": 1.1,
    "confidence": 0.95,
    "worst_batch": 1.2,
    "batches": 8,
    "tau": 2.1,
    "plain_tokens_per_s": 120.0,
}
TREE = {"depth": 2, "width": 1, "top_k": 1, "nodes": 2}
SMALL = {"batch": [2, 4], "decision": "speculate", "reason": "Faster.", "tree": TREE} | {
    "evidence": EVIDENCE
}
LARGE = {"batch": [5, None], "decision": "plain", "reason": "Not faster.", "tried": TREE}
SCHEDULE = [SMALL, LARGE]


def changed(place: int, **changes: Any) -> list[dict[str, Any]]:
    schedule = copy.deepcopy(SCHEDULE)
    schedule[place] |= changes
    return schedule


def test_every_number_of_prompts_has_its_tree() -> None:
    profile = toy_profiles.profile({"batch_schedule": SCHEDULE})
    two = TreeConfig(**TREE)
    found = [profile.tree_of_batch(n) for n in (1, 2, 3, 4, 5, 500)]
    assert found == [profile.tree, two, two, two, PLAIN, PLAIN]
    assert [each.label() for each in profile.batch_schedule] == ["2 to 4", "5 and more"]


def test_a_profile_without_a_schedule_runs_batches_plainly_and_keeps_its_seal() -> None:
    """Profiles that were written before there was a schedule load, trusted as before."""
    profile = toy_profiles.profile()
    assert is_sealed(profile)
    assert "batch_schedule" not in profile.model_dump(exclude_defaults=True)
    assert profile.tree_of_batch(2) == PLAIN


def test_a_schedule_is_written_and_read_and_sealed(tmp_path: Path) -> None:
    profile = toy_profiles.profile({"batch_schedule": SCHEDULE})
    save(profile, tmp_path / "toy.yaml")
    again = load(tmp_path / "toy.yaml")
    assert again == profile
    assert is_sealed(again)
    edited = profile.model_copy(update={"batch_schedule": profile.batch_schedule[1:]})
    assert not is_sealed(edited)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SCHEDULE[1:], r"batch_schedule\[0\]\.batch is \[5, None\].*must begin with 2"),
        (SCHEDULE[:1], r"must have no end.*\[5, null\], decision: plain"),
        (changed(1, batch=[6, None]), "must begin with 5"),
        ([*SCHEDULE, LARGE], "must begin with nothing"),
        (changed(0, batch=[4, 2]), r"it must be \[first, last\]"),
        (changed(0, batch=[4]), r"it must be \[first, last\]"),
        (changed(0, batch=[2, 4.0]), "whole number"),
        (changed(0, evidence=None), "decision speculate needs evidence"),
        (changed(0, evidence=EVIDENCE | {"low": 0.99}), r"low is 0\.99.*needs it above 1"),
        (changed(0, evidence=EVIDENCE | {"ratio": 0.9, "low": 0.8}), r"ratio is 0\.9"),
        (changed(0, tree={"depth": 0}), "depth of at least 1"),
        (changed(0, surprise=1), "not a known key"),
        (changed(1, tree=TREE), "decision plain needs depth 0"),
        (
            [SMALL | {"batch": [2, None]}],
            "ends at the largest batch that was measured",
        ),
    ],
)
def test_a_schedule_that_claims_what_was_not_proved_is_refused(
    schedule: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(SpectuneError, match=message):
        toy_profiles.profile({"batch_schedule": schedule})


def test_a_plain_profile_speculates_in_no_batch() -> None:
    changes = toy_profiles.PLAIN_CHANGES | {"batch_schedule": SCHEDULE}
    with pytest.raises(SpectuneError, match="decision plain holds for batches"):
        toy_profiles.profile(changes)
    plain = toy_profiles.profile(
        toy_profiles.PLAIN_CHANGES | {"batch_schedule": [LARGE | {"batch": [2, None]}]}
    )
    assert plain.tree_of_batch(7) == PLAIN


def test_a_range_reads_back_as_written() -> None:
    each = validated(BatchRange, SMALL, "a range")
    assert (each.first, each.last, each.evidence and each.evidence.is_proved) == (2, 4, True)


def test_vllm_gets_the_depth_of_every_range_of_batches() -> None:
    """What it cannot run, trees that are no chains, counts as plain there."""
    chain = {"tree": {"depth": 3, "width": 1, "top_k": 1, "nodes": 3}}
    settings = export(toy_profiles.profile(chain | {"batch_schedule": SCHEDULE}), "vllm").settings
    assert settings["num_speculative_tokens"] == 3
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 2], [5, 5, 0]]
    wide = changed(0, tree=TREE | {"width": 2, "top_k": 2, "nodes": 4})
    settings = export(toy_profiles.profile(chain | {"batch_schedule": wide}), "vllm").settings
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 0], [5, 5, 0]]
    assert "per_batch" not in export(toy_profiles.profile(chain), "vllm").text


def test_sglang_gets_the_steps_of_every_range_of_batches() -> None:
    """As a file of their own, for chains of a head; nothing is said of other trees."""
    chain = {"tree": {"depth": 3, "width": 1, "top_k": 1, "nodes": 3}}
    text = export(toy_profiles.profile(chain | {"batch_schedule": SCHEDULE}), "sglang").text
    steps = {"1": {"candidate_steps": [3]}, "2": {"candidate_steps": [2]}}
    steps |= {"5": {"candidate_steps": [0]}}
    assert f"put this into FILE.json: {json.dumps(steps)}" in text
    assert "--speculative-adaptive-config FILE.json" in text
    for changes in (chain, {"batch_schedule": SCHEDULE}):
        assert "adaptive" not in export(toy_profiles.profile(changes), "sglang").text
