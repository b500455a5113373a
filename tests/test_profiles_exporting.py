"""Profiles in the terms of other engines: their knobs, their off-by-ones, and refusals."""

import json
import re
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import profiles
from profiles import ENGINES, TreeConfig, export
from profiles.engine_spaces import ENGINE_SPACES, can_run, nearest
from profiles.errors import SpectuneError, UsageError
from toy_profiles import PLAIN_CHANGES, data, profile

CHAIN_ENGINES = ("vllm", "transformers", "llama.cpp")
LOOKUP = {"draft": {"kind": "lookup", "min_match": 2, "max_match": 5}}
SUFFIX = {"draft": {"kind": "suffix", "min_match": 2, "max_match": 5}}
HYBRID: dict[str, Any] = {"draft": {"kind": "hybrid", "id": "toy/head", "sha256": "0b" * 32}}
HYBRID["draft"] |= {"min_match": 1, "max_match": 9, "match_nodes": 8, "match_tau": 2.0}
MODEL = {"draft": {"kind": "model", "id": "toy/small", "sha256": "0b" * 32}}
CHAIN = {"tree": {"depth": 5, "width": 1, "top_k": 1, "nodes": 5}}
TREE = {"tree": {"depth": 4, "width": 3, "top_k": 3, "nodes": 10}}


def settings(engine: str, *changes: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for change in changes:
        merged |= change
    return export(profile(merged), engine).settings


def with_chain(draft: str = "toy/head", **speedup: float) -> profiles.Profile:
    """Return the toy profile with a chain of depth 3 among its alternatives."""
    evidence = data()["evidence"] | {"tau": 2.0, "break_even_tau": 1.4, "decode_speedup": 2 / 1.4}
    evidence["speedup"] = evidence["speedup"] | {"ratio": 1.36, "low": 1.31} | speedup
    tree = {"depth": 3, "width": 1, "top_k": 1, "nodes": 3}
    other = data()["alternatives"]
    chain = {"draft": draft, "tree": tree, "evidence": evidence}
    return profile({"alternatives": [*other, chain]})


# --- knobs: the same tree of depth 4, top-k 3 and 10 nodes, as each engine counts it -------------

HEAD = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "toy/head"}
KNOBS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "sglang",
        TREE,
        HEAD
        | {"speculative-num-steps": 4, "speculative-eagle-topk": 3}
        | {"speculative-num-draft-tokens": 11},
    ),
    (
        "sglang",
        CHAIN,
        HEAD
        | {"speculative-num-steps": 5, "speculative-eagle-topk": 1}
        | {"speculative-num-draft-tokens": 6},
    ),
    (
        "sglang",
        MODEL | TREE,
        {"speculative-algorithm": "STANDALONE", "speculative-draft-model-path": "toy/small"}
        | {"speculative-num-steps": 4, "speculative-eagle-topk": 3}
        | {"speculative-num-draft-tokens": 11},
    ),
    (
        "sglang",
        LOOKUP | CHAIN,
        {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 6}
        | {"speculative-ngram-min-bfs-breadth": 1, "speculative-ngram-max-bfs-breadth": 1}
        | {"speculative-ngram-max-trie-depth": 10},
    ),
    ("vllm", CHAIN, {"method": "eagle3", "model": "toy/head", "num_speculative_tokens": 5}),
    (
        "vllm",
        MODEL | CHAIN,
        {"method": "draft_model", "model": "toy/small", "num_speculative_tokens": 5},
    ),
    (
        "vllm",
        LOOKUP | CHAIN,
        {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        | {"num_speculative_tokens": 5},
    ),
    (
        "vllm",
        SUFFIX | CHAIN,
        {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
        | {"num_speculative_tokens": 5},
    ),
    (
        "tensorrt-llm",
        TREE,
        {"decoding_type": "Eagle3", "speculative_model": "toy/head", "max_draft_len": 4}
        | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 10},
    ),
    (
        "tensorrt-llm",
        CHAIN,
        {"decoding_type": "Eagle3", "speculative_model": "toy/head", "max_draft_len": 5},
    ),
    (
        "tensorrt-llm",
        MODEL | CHAIN,
        {"decoding_type": "Draft_Target", "speculative_model": "toy/small", "max_draft_len": 5},
    ),
    (
        "tensorrt-llm",
        LOOKUP | CHAIN,
        {"decoding_type": "NGram", "max_matching_ngram_size": 5, "is_public_pool": False}
        | {"is_use_oldest": False, "max_draft_len": 5},
    ),
    ("openvino", TREE, {"num_assistant_tokens": 10, "tree_depth": 4, "branching_factor": 3}),
    ("openvino", CHAIN, {"num_assistant_tokens": 5}),
    ("openvino", LOOKUP | CHAIN, {"num_assistant_tokens": 5, "max_ngram_size": 5}),
    (
        "transformers",
        MODEL | CHAIN,
        {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
        | {"assistant_confidence_threshold": 0.0},
    ),
    (
        "transformers",
        LOOKUP | CHAIN,
        {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 5},
    ),
    (
        "llama.cpp",
        CHAIN,
        {"spec-type": "draft-eagle3", "spec-draft-model": "head.gguf", "spec-draft-n-max": 5}
        | {"spec-draft-n-min": 0, "spec-draft-p-min": 0.0},
    ),
    (
        "llama.cpp",
        LOOKUP | CHAIN,
        {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 2}
        | {"spec-ngram-simple-size-m": 5, "spec-draft-n-max": 5},
    ),
    (
        "eagle",
        TREE,
        {"base_model_path": "toy/target", "ea_model_path": "toy/head", "total_token": 11}
        | {"depth": 3, "top_k": 3, "use_eagle3": True},
    ),
]


@pytest.mark.parametrize(("engine", "changes", "expected"), KNOBS)
def test_a_setting_is_written_as_the_engine_counts_it(
    engine: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert settings(engine, changes) == expected


@pytest.mark.parametrize(
    ("engine", "ours"),
    [("sglang", (3, 1, 1, 3)), ("sglang", (5, 4, 4, 7)), ("eagle", (8, 10, 10, 59))],
)
def test_what_is_read_from_an_engine_is_written_back_the_same(
    engine: str, ours: tuple[int, int, int, int]
) -> None:
    # The two directions are separate code; the known defaults of both engines must agree.
    tree = dict(zip(("depth", "width", "top_k", "nodes"), ours, strict=True))
    written = settings(engine, {"tree": tree})
    if engine == "sglang":
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        read = TreeConfig.from_sglang(*(written[f"speculative-{name}"] for name in names))
    else:
        read = TreeConfig.from_eagle(written["total_token"], written["depth"], written["top_k"])
    assert read == TreeConfig(**tree)


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_every_export_says_what_it_proves(engine: str) -> None:
    title = ENGINE_SPACES[engine].title
    kind = MODEL if engine == "transformers" else {}
    text = export(profile(CHAIN | kind), engine).text
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    for part in (
        "measured on: spectune 0.1.0",
        "device: cpu, AMD EPYC, 2 threads",
        "baseline on spectune's engine: plain decoding on this engine, same dtype, same threads",
        "1.79x, at least 1.7x at 95 % confidence on 32 held-out prompts",
        "dropped: the guard (nothing falls back",
        f"unproven on {title} until re-measured",
        "temperature 0.7, top_k 20, top_p 0.9",
    ):
        assert part in comments


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plain_profile_exports_as_no_speculation(engine: str) -> None:
    for changes in (PLAIN_CHANGES, PLAIN_CHANGES | LOOKUP):
        exported = export(profile(changes), engine, chain=True)
        assert exported.tree.is_plain
        assert exported.evidence is None
        assert exported.settings in ({}, {"spec-type": "none"})
        assert "# do not enable speculation" in exported.text
        assert f"# unproven on {ENGINE_SPACES[engine].title} until re-measured" in exported.text


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt-llm"])
def test_files_are_yaml_that_holds_the_settings(engine: str) -> None:
    exported = export(profile(CHAIN), engine)
    read = yaml.safe_load(exported.text)
    nested = {"sglang": None, "vllm": "speculative-config", "tensorrt-llm": "speculative_config"}
    key = nested[engine]
    assert (read[key] if key else read) == exported.settings
    off = yaml.safe_load(export(profile(PLAIN_CHANGES), engine).text)
    assert not off or off == {"speculative_config": None}


@pytest.mark.parametrize("engine", ["openvino", "transformers", "eagle"])
def test_python_compiles(engine: str) -> None:
    kind = MODEL if engine == "transformers" else {}
    for changes in (CHAIN | kind, PLAIN_CHANGES):
        compile(export(profile(changes), engine).text, engine, "exec")


def test_the_flag_for_vllm_is_one_shell_word_of_json() -> None:
    exported = export(profile(CHAIN | {"draft.id": "it's here/a head"}), "vllm")
    (line,) = (c for c in exported.comments if c.startswith("as a flag: "))
    flag, value = shlex.split(line.removeprefix("as a flag: "))
    assert flag == "--speculative-config"
    assert json.loads(value) == exported.settings
    assert exported.settings["model"] == "it's here/a head"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_name_can_leave_its_comment(engine: str) -> None:
    evil = "x\nspeculative-num-steps: 9\r\u2028import os #\x1b[2J"
    changes = {"name": evil, "target.id": evil, "domain.name": evil, "device.name": evil}
    kind = MODEL if engine == "transformers" else {}
    for decision in (CHAIN | kind, PLAIN_CHANGES | {"reason": evil}):
        exported = export(profile(changes | decision), engine)
        assert all(line.isprintable() for line in exported.comments)
        head = "".join(f"# {line}\n" for line in exported.comments)
        assert exported.text.startswith(head)
        body = exported.text.removeprefix(head)
        if engine == "llama.cpp":  # a shell takes a quoted line break as part of the name
            assert shlex.split(body)[:3] == ["llama-server", "--model", f"{evil}.gguf"]
        else:
            assert not re.search(r"^(speculative-num-steps: 9|import os)", body, re.M)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", CHAIN_ENGINES)
def test_an_engine_without_trees_refuses_one_and_names_the_chain(engine: str) -> None:
    with pytest.raises(SpectuneError, match=r"chain only.*D4 W3 K3 N10.*D4 W1 K1 N4.*--project"):
        export(profile(MODEL), engine)


def test_a_width_of_its_own_is_refused_with_the_nearest_tied_one() -> None:
    for engine in ("sglang", "tensorrt-llm", "openvino", "eagle"):
        with pytest.raises(SpectuneError, match="width must equal top_k.*nearest.*D4 W3 K3 N10"):
            export(profile({"tree": {"depth": 4, "width": 2, "top_k": 3, "nodes": 10}}), engine)


def test_more_nodes_than_tensorrt_takes_are_refused() -> None:
    tree = {"tree": {"depth": 3, "width": 4, "top_k": 4, "nodes": 20}}
    assert settings("sglang", tree)["speculative-num-draft-tokens"] == 21
    with pytest.raises(SpectuneError, match="at most top_k x depth = 12 nodes.*D3 W7 K7 N20"):
        export(profile(tree), "tensorrt-llm")


def test_a_redundant_width_is_no_width_of_its_own() -> None:
    # With two levels at most top_k nodes can be expanded, with one level none.
    two = {"tree": {"depth": 2, "width": 9, "top_k": 3, "nodes": 6}}
    assert settings("sglang", two)["speculative-eagle-topk"] == 3
    one = {"tree": {"depth": 1, "width": 9, "top_k": 5, "nodes": 3}}
    assert settings("sglang", one)["speculative-eagle-topk"] == 3
    assert settings("vllm", {"tree": {"depth": 1, "width": 9, "top_k": 5, "nodes": 1}}) == {
        "method": "eagle3",
        "model": "toy/head",
        "num_speculative_tokens": 1,
    }


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("transformers", CHAIN, "small models as drafts, model-free lookup, .* kind eagle3"),
        ("llama.cpp", SUFFIX | CHAIN, "kind suffix"),
        ("vllm", HYBRID | CHAIN, "kind hybrid"),
        ("eagle", MODEL | CHAIN, "EAGLE runs EAGLE-3 heads, .* kind model"),
        ("eagle", LOOKUP | CHAIN, "kind lookup"),
        ("sglang", LOOKUP | TREE, "SGLang drafts with kind lookup in a chain only"),
        ("openvino", MODEL | TREE, "kind model in a chain only"),
    ],
)
def test_a_draft_the_engine_has_not_is_refused(
    engine: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpectuneError, match=words):
        export(profile(changes), engine)


def test_an_unknown_engine_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="sglang.*but is tgi"):
        export(profile(), "tgi")


@given(
    st.sampled_from(sorted(ENGINE_SPACES)),
    st.sampled_from(["eagle3", "model", "lookup"]),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(0, 1),
)
def test_the_nearest_choice_is_one_the_engine_can_run(
    engine: str, kind: str, depth: int, width: int, top_k: int, fill: float
) -> None:
    whole = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=depth)
    nodes = depth + round(fill * (whole.pool - depth))
    tree = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes)
    near = nearest(engine, tree, kind)
    assert can_run(engine, near, kind)
    assert near.depth == tree.depth
    assert near == tree or not can_run(engine, tree, kind)
    if kind in ENGINE_SPACES[engine].branching:
        assert near.nodes == tree.nodes


# --- the chain ----------------------------------------------------------------------------------


def test_projecting_takes_the_chain_with_its_own_evidence() -> None:
    exported = export(with_chain(), "vllm", chain=True)
    assert exported.settings["num_speculative_tokens"] == 3
    assert exported.evidence is not None
    assert exported.evidence.speedup.ratio == 1.36
    assert "1.36x, at least 1.31x" in exported.text
    assert "D3 W1 K1 N3, 2 tokens per round, 1.4 to break even" in exported.text
    assert "1.79" not in exported.text


def test_projecting_a_chain_takes_the_chain_itself() -> None:
    exported = export(profile(CHAIN), "vllm", chain=True)
    assert exported.settings["num_speculative_tokens"] == 5
    assert "1.79x" in exported.text


def test_a_chain_of_a_hybrid_is_none_of_its_head() -> None:
    with pytest.raises(SpectuneError, match=r"another draft \(hybrid:toy/head, lookup\)"):
        export(with_chain("hybrid:toy/head"), "vllm", chain=True)


def test_projecting_needs_a_chain_of_the_same_draft_that_won() -> None:
    with pytest.raises(SpectuneError, match="there is none; tune again"):
        export(profile({"alternatives": []}), "vllm", chain=True)
    with pytest.raises(SpectuneError, match=r"only one of another draft \(lookup\)"):
        export(profile(), "vllm", chain=True)  # its only alternative is a chain of the lookup
    with pytest.raises(SpectuneError, match=r"D3 W1 K1 N3, ran at 1.02x \(at least 0.97x\)"):
        export(with_chain(ratio=1.02, low=0.97), "vllm", chain=True)


def test_adaptive_drafting_is_named_as_dropped_where_the_profile_has_it() -> None:
    assert "adaptive" not in export(profile(CHAIN), "sglang").text
    text = export(profile(CHAIN | {"adaptive": True}), "sglang").text
    assert "# dropped: adaptive drafting (every round has the whole tree there)" in text
    assert "# speedup there, with adaptive drafting: 1.79x" in text


def test_what_a_probe_corrected_is_named_because_engines_read_the_config() -> None:
    changes = CHAIN | {"draft.rope_theta": 10000.0, "draft.feature_layers": [2, 4, 5]}
    text = export(profile(changes), "sglang").text
    assert "# dropped: rope_theta 10000 that the head was found to need" in text
    assert "# dropped: feature layers [2, 4, 5]" in text


def test_a_bound_on_the_likelihood_of_paths_is_named_as_dropped() -> None:
    bound = {"draft": {"kind": "lookup", "min_match": 1, "max_match": 5, "min_probability": 0.1}}
    assert "# dropped: min_probability 0.1 of" in export(profile(CHAIN | bound), "vllm").text


def test_a_shortest_match_that_an_engine_has_not_is_named() -> None:
    for engine in ("tensorrt-llm", "openvino", "transformers"):
        assert "shortest match of 2" in export(profile(LOOKUP | CHAIN), engine).text
        longer = CHAIN | {"draft": {"kind": "lookup", "min_match": 1, "max_match": 5}}
        assert "shortest match" not in export(profile(longer), engine).text
