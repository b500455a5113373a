import subprocess
import sys
from pathlib import Path

import pytest

import profiles
from profiles import Profile, SpectuneError, validated
from profiles.prices import Prices
from toy_profiles import PLAIN_CHANGES, data, profile

SPECULATE_FAULTS = [
    ({"tree": {"depth": 0}}, "$.tree.depth is 0: decision speculate needs a depth of at least 1"),
    ({"draft": {"kind": "none"}}, "$.draft.kind is 'none': decision speculate needs a draft"),
    ({"evidence": None}, "$.evidence is null: decision speculate needs evidence"),
    ({"evidence.speedup.low": 0.9}, "$.evidence.speedup.low is 0.9: decision speculate needs it"),
    ({"evidence.speedup.low": 1.0}, "$.evidence.speedup.low is 1.0: decision speculate needs it"),
    ({"evidence.speedup.low": 1.0000001}, "$.evidence.speedup.low is 1.0: decision"),
    ({"evidence.speedup.ratio": 1}, "$.evidence.speedup.ratio is 1.0: decision speculate needs"),
    ({"evidence.decode_speedup": 1.95}, "$.evidence.decode_speedup is 1.95: it must be tau"),
    ({"evidence.tau": 0.9}, "$.evidence.tau is 0.9: it must be at least 1"),
]
HYBRID = {"kind": "hybrid", "id": "toy/head", "min_match": 1, "max_match": 9, "match_nodes": 8}
HYBRID |= {"match_tau": 2.5}
OTHER_FAULTS = [
    ({"target.sha256": "unknown"}, "$.target.sha256 is 'unknown': it must be 64 hexadecimal"),
    ({"target.sha256": "A" * 64}, "it must be 64 hexadecimal digits in lower case"),
    ({"draft.id": None}, "$.draft.id is null: kind eagle3 needs it; give"),
    ({"draft.min_match": 2}, "$.draft.min_match is 2: only kind lookup or suffix or hybrid has"),
    ({"draft": {"kind": "lookup", "min_match": 1}}, "$.draft.max_match is null: kind lookup"),
    (
        {"draft": {"kind": "lookup", "min_match": 4, "max_match": 3}},
        "$.draft.min_match is 4: it must not exceed max_match, which is 3",
    ),
    (
        {"draft": {"kind": "suffix", "max_match": 2}},
        "$.draft.min_match is null: kind suffix needs",
    ),
    ({"draft.kind": "hybrid"}, "$.draft.min_match is null: kind hybrid needs it; give a number"),
    ({"draft": HYBRID | {"id": None}}, "$.draft.id is null: kind hybrid needs it; give"),
    ({"draft": HYBRID | {"match_tau": 0.5}}, "$.draft.match_tau is 0.5: it must be at least 1"),
    (
        {"draft": HYBRID | {"min_probability": 1}},
        "$.draft.min_probability is 1: it must be less",
    ),
    (
        {"draft": {"kind": "lookup", "min_match": 1, "max_match": 2, "history": 9}},
        "$.draft.history is 9: only kind suffix or hybrid has it",
    ),
    (
        {"draft.kind": "eagle"},
        "it must be 'eagle3', 'model', 'lookup', 'suffix', 'hybrid' or 'none'",
    ),
    ({"sampling.temperature": -0.5}, "$.sampling.temperature is -0.5: it must be at least 0"),
    ({"sampling.top_p": 0}, "$.sampling.top_p is 0: it must be greater than 0"),
    ({"measurements": "../x.gz"}, "$.measurements is '../x.gz': it must be a file beside"),
    ({"created": "yesterday"}, "$.created is 'yesterday': it must be a time; write it like 2026"),
    ({"created": "2026-11-30T09:00:00"}, "it must be a time with its zone"),
    ({"created": "0001-01-01T00:00:00+05:00"}, "it is no time in UTC; write it like 2026"),
    ({"created": 5}, "$.created is 5: it must be a time"),
    ({"name": ""}, "$.name is '': it must not be empty"),
    ({"cost_model.valid": {"nodes": [9, 1]}}, "$.cost_model.valid.nodes is [9.0, 1.0]: it must"),
    ({"cost_model.valid": {"nodes": [9]}}, "$.cost_model.valid.nodes is [9]: it must have at lea"),
    ({"schema_version": True}, "$.schema_version is true: it must be a whole number"),
    ({"schema_version": 0}, "$.schema_version is 0: it must be at least 1"),
]


@pytest.mark.parametrize(("changes", "message"), SPECULATE_FAULTS + OTHER_FAULTS)
def test_every_rule_names_the_key_the_value_and_the_remedy(changes, message):
    with pytest.raises(SpectuneError) as caught:
        profile(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)  # the remedy follows the rule


def test_cost_tables_are_functions_of_increasing_size():
    tables = data()["cost_model"]["tables"]
    tables[0]["relative"] = [1.0]
    with pytest.raises(
        SpectuneError, match=r"tables\[0\]\.relative is .* has 1 entries but x has"
    ):
        profile({"cost_model.tables": tables})
    tables[0].update(x=[1, 1], relative=[1, 1])
    with pytest.raises(SpectuneError, match=r"tables\[0\]\.x is .*increase from entry to entry"):
        profile({"cost_model.tables": tables})


def test_plain_needs_neither_tree_nor_evidence_nor_draft():
    plain = profile(PLAIN_CHANGES)
    assert plain.tree == profiles.PLAIN
    assert profile({**PLAIN_CHANGES, "draft": {"kind": "none"}}).decision == "plain"
    with pytest.raises(SpectuneError, match=r"\$\.tree\.depth is 4: decision plain needs depth 0"):
        profile({**PLAIN_CHANGES, "tree": data()["tree"]})
    with pytest.raises(SpectuneError, match=r"\$\.evidence is 1\.79: decision plain has no speed"):
        profile({**PLAIN_CHANGES, "evidence": data()["evidence"]})


def test_a_rival_keeps_its_true_figures_below_1():
    (rival,) = profile(PLAIN_CHANGES).alternatives
    assert (rival.evidence.speedup.ratio, rival.evidence.speedup.low) == (0.98, 0.9)
    assert not rival.evidence.speedup.is_proved


def test_several_faults_are_all_told_in_at_most_ten_lines():
    with pytest.raises(SpectuneError) as caught:
        profile({"name": 5, "tree.depth": "four"})
    lines = str(caught.value).splitlines()
    assert lines[0] == "toy has 2 faults:"
    assert lines[1] == "  $.name is 5: it must be text; put it in quotes."
    assert lines[2].startswith("  $.tree.depth is 'four': it must be a whole number; write digits")
    n_required = sum(field.is_required() for field in Profile.model_fields.values())
    with pytest.raises(SpectuneError) as caught:
        validated(Profile, {f"k{i}": i for i in range(30)}, "toy")
    lines = str(caught.value).splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"  ... and {30 + n_required - 8} more."


def test_a_profile_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        profile().decision = "plain"
    with pytest.raises(AttributeError):
        profile().alternatives.append(None)


def test_numpy_floats_become_plain_floats():
    numpy = pytest.importorskip("numpy")
    made = profile({"noise": {"spread": numpy.float64(0.01), "drift": numpy.float64(0.5)}})
    assert type(made.noise.spread) is float
    with pytest.raises(SpectuneError, match="it must be a whole number"):
        profile({"search.seed": numpy.int64(3)})
    assert "numpy" not in profiles.to_yaml(profile({"name": numpy.str_("x")}))


def test_every_field_says_what_it_means():
    for model in (profiles.Profile, profiles.Measurements):
        schema = model.model_json_schema()
        for part in (schema, *schema["$defs"].values()):
            for name, field in part["properties"].items():
                assert field.get("description"), f"{part['title']}.{name}"


def test_importing_profiles_loads_nothing_heavy():
    code = (
        "import profiles, sys; heavy = {'torch', 'transformers', 'optuna', 'pandas', 'numpy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(profiles.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_public_names_exist_once():
    assert len(set(profiles.__all__)) == len(profiles.__all__)
    assert all(hasattr(profiles, name) for name in profiles.__all__)


PROBE_FAULTS = [
    (
        {"draft": {"kind": "lookup", "min_match": 1, "max_match": 2, "feature_layers": [1]}},
        "$.draft.feature_layers is (1,): only kind eagle3 or hybrid has it; remove it or correct",
    ),
    (
        {"draft.kind": "model", "draft.rope_theta": 1e4},
        "$.draft.rope_theta is 10000.0: only kind eagle3 or hybrid has it",
    ),
    ({"draft.feature_layers": [-1]}, "$.draft.feature_layers[0] is -1: it must be at least 0"),
    ({"draft.rope_theta": 0}, "$.draft.rope_theta is 0: it must be at least 1"),
]
PROBED_FAULTS = [
    ("value", [], "it must be a base or a list of layers; write 10000.0 or [2, 14, 25]"),
    ("value", "x", "it must be a base or a list of layers; write"),
    ("value", [1.5], "it must be a base or a list of layers; write"),
    ("value", [True], "it must be a base or a list of layers; write"),
    ("value", True, "it must be a base or a list of layers; write"),
    ("value", -1.0, "it must be a base or a list of layers; write"),
    ("agreement", 1.1, "it must be at most 1"),
    ("p_value", -0.1, "it must be at least 0"),
    ("n_tokens", 0, "it must be at least 1"),
    ("verdict", "good", "it must be 'kept', 'chosen', 'undecided' or 'rejected'"),
    ("what", "layers", "it must be 'feature_layers' or 'rope_theta'"),
]


@pytest.mark.parametrize(("changes", "message"), PROBE_FAULTS)
def test_the_conventions_of_a_head_belong_to_heads(changes, message):
    with pytest.raises(SpectuneError) as caught:
        profile(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value", "message"), PROBED_FAULTS)
def test_a_fault_in_a_probed_value_is_one_line(key, value, message):
    rows = data()["probe"]
    rows[1][key] = value
    with pytest.raises(SpectuneError) as caught:
        profile({"probe": rows})
    assert f"$.probe[1].{key} is" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_and_base_of_a_head_are_kept_to_the_last_digit(tmp_path):
    made = profile({"draft.feature_layers": [2, 14, 25], "draft.rope_theta": 12345678.9})
    profiles.save(made, tmp_path / "toy.yaml")
    draft = profiles.load(tmp_path / "toy.yaml").draft
    assert (draft.feature_layers, draft.rope_theta) == ((2, 14, 25), 12345678.9)
    assert [row.value for row in made.probe] == [(2, 4, 5), (3, 5, 6), 10000.0]
    assert profile().draft.feature_layers is None  # as in profiles of heads never probed


SERVING_FAULTS = [
    ({"adaptive": True, "calibration": None}, "$.adaptive is true: adaptive drafting needs a cal"),
    ({**PLAIN_CHANGES, "adaptive": True}, "$.adaptive is true: decision plain has no tree to ad"),
    ({"guard.tax": 1.5}, "$.guard.tax is 1.5: it must be at most 1"),
    ({"guard.allowance_tokens": 0}, "$.guard.allowance_tokens is 0: it must be greater than 0"),
    (
        {"calibration.limits": {"depth": 3, "width": 1, "top_k": 1, "nodes": 3}},
        "limits of depth 3 need at least 1 level and a table for each, but there are 2",
    ),
    ({"calibration.limits": {"depth": 0}}, "limits of depth 0 need at least 1 level"),
    (
        {"calibration.depths": [{"score": [0.0, 0.0], "probability": [0, 1], "hit": 1}] * 2},
        "depths[0].score is [0.0, 0.0]: it must rise from entry to entry",
    ),
    (
        {"calibration.depths": [{"score": [-1.0, 0.0], "probability": [1, 0], "hit": 1}] * 2},
        "depths[0].probability is [1.0, 0.0]: it must rise from entry to entry",
    ),
    (
        {"calibration.depths": [{"score": [-1.0], "probability": [0, 1], "hit": 1}] * 2},
        "it has 2 entries but score has 1; give one for each score",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SERVING_FAULTS)
def test_a_fault_in_how_a_tree_is_served_is_told(changes, message):
    with pytest.raises(SpectuneError) as caught:
        profile(changes)
    assert message in str(caught.value)


def test_a_profile_is_served_by_its_own_prices_or_else_by_its_evidence():
    serving = profile().serving
    assert serving.cost_model == profile().cost_model
    assert serving.guard == profile().guard
    assert serving.calibration is None
    assert profile({"adaptive": True}).serving.calibration == profile().calibration
    bare = profile({"cost_model": None, "guard": None}).serving
    assert bare.guard == profiles.GuardSettings()
    prices = Prices(bare.cost_model)
    assert prices.plain_s() == pytest.approx(1 / 61.0, rel=1e-4)
    assert prices.round(profile().tree, 3, 10).total == pytest.approx(1.55)
