import pytest

from profiles import FIELDS, Facts, compare
from toy_profiles import SHA_B, SHA_C, profile

HYBRID = {
    "draft.kind": "hybrid",
    "draft.min_match": 1,
    "draft.max_match": 16,
    "draft.min_probability": 0.02,
    "draft.history": 0,
    "draft.match_nodes": 16,
    "draft.match_tau": 2.5,
}
KNOBS = {
    "draft.min_match": 2,
    "draft.max_match": 8,
    "draft.min_probability": 0.1,
    "draft.history": 5000,
    "draft.match_nodes": 8,
    "draft.match_tau": 3.0,
}
EXACT = [field for field, rule in FIELDS.items() if rule == "exact" and field not in KNOBS]
NOTED = [field for field, rule in FIELDS.items() if rule == "noted"]
OTHER_VALUE = {
    "device.kind": "cuda",
    "device.name": "AMD EPYC 2",
    "device.count": 3,
    "device.threads": 1,
    "device.kernels": "torch",
    "target.sha256": SHA_B,
    "target.dtype": "float32",
    "draft.kind": "model",
    "draft.sha256": SHA_C,
    "sampling.temperature": 1.0,
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "device.driver": "600.1",
    "device.torch": "2.14.0",
    "device.transformers": "6.0.0",
    "spectune": "0.2.0",
}
TEXT_FACTS = ["device.kind", "device.name", "target.dtype"]
OPTIONAL = [*TEXT_FACTS, "device.count", "device.threads", "target.sha256", "draft.sha256"]


def facts_of(made):
    return Facts(made.device, made.target, made.draft, made.sampling, made.spectune)


def test_a_profile_matches_the_machine_it_was_made_on():
    made = profile()
    assert compare(made, facts_of(made)) == []


@pytest.mark.parametrize("field", [*EXACT, *NOTED])
def test_b29_each_fact_that_differs_is_told_alone_with_both_values(field):
    made, other = profile(), profile({field: OTHER_VALUE[field]})
    (mismatch,) = compare(made, facts_of(other))
    assert mismatch.field == field
    assert mismatch.actual_value == OTHER_VALUE[field]
    assert mismatch.level == ("noted" if field in NOTED else "fatal")
    assert str(mismatch).startswith(f"{field}: ")
    assert str(mismatch).endswith("(noted only)") == (field in NOTED)


@pytest.mark.parametrize("field", OPTIONAL)
def test_b29_a_missing_fact_matches_nothing_not_even_a_missing_one(field):
    known, missing = profile(), profile({field: None})
    for left, right in [(known, missing), (missing, known), (missing, missing)]:
        mismatches = compare(left, facts_of(right))
        if field == "device.kind" and left is missing:
            assert "device.kind" in [m.field for m in mismatches]
            continue
        assert [(m.field, m.level) for m in mismatches] == [(field, "fatal")]
        assert "unknown" in str(mismatches[0])


@pytest.mark.parametrize("field", TEXT_FACTS)
def test_b29_unknown_is_no_match_for_unknown(field):
    made = profile({field: "Unknown"})
    mismatches = compare(made, facts_of(made))
    assert (field, "fatal") in [(m.field, m.level) for m in mismatches]
    assert f"{field}: unknown in the profile, unknown here" in map(str, mismatches)


@pytest.mark.parametrize(
    ("memory", "matches"),
    [(21.2, True), (25.8, True), (21.1, False), (25.9, False), (None, False)],
)
def test_memory_may_differ_by_a_tenth(memory, matches):
    mismatches = compare(profile(), facts_of(profile({"device.memory_gib": memory})))
    assert [(m.field, m.level) for m in mismatches] == (
        [] if matches else [("device.memory_gib", "fatal")]
    )


@pytest.mark.parametrize("field", KNOBS)
def test_each_knob_of_a_hybrid_must_be_the_same(field):
    made, other = profile(HYBRID), profile(HYBRID | {field: KNOBS[field]})
    assert compare(made, facts_of(made)) == []
    assert [(m.field, m.level) for m in compare(made, facts_of(other))] == [(field, "fatal")]


def test_a_lookup_draft_has_no_weights_to_compare():
    made = profile({"draft": {"kind": "lookup", "min_match": 2, "max_match": 4}})
    assert compare(made, facts_of(made)) == []


def test_threads_are_a_fact_of_a_cpu_only():
    made = profile({"device.kind": "cuda", "device.threads": None})
    assert compare(made, facts_of(profile({"device.kind": "cuda"}))) == []


def test_the_filters_do_nothing_when_greedy():
    made = profile({"sampling": {"temperature": 0}})
    same = profile({"sampling": {"temperature": 0, "top_k": 5}})
    warm = profile({"sampling": {"temperature": 1.0, "top_k": 5}})
    assert compare(made, facts_of(same)) == []
    assert [m.field for m in compare(made, facts_of(warm))] == ["sampling.temperature"]


def test_b29_the_same_name_with_other_weights_is_another_model():
    made, other = profile(), profile({"target.sha256": SHA_B})
    assert made.target.id == other.target.id
    assert [m.field for m in compare(made, facts_of(other))] == ["target.sha256"]


def test_a_mismatch_is_told_in_one_line_with_both_values():
    (mismatch,) = compare(profile(), facts_of(profile({"device.count": 8})))
    assert str(mismatch) == "device.count: 2 in the profile, 8 here"
    (mismatch,) = compare(profile(), facts_of(profile({"device.torch": None})))
    assert str(mismatch) == "device.torch: '2.13.0' in the profile, unknown here (noted only)"
