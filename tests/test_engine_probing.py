"""Variants of a head, and how often each is right about recorded text."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.eagle3 import Eagle3Head
from engine.eagle3_draft import Eagle3Draft
from engine.probing import first_choices_right
from engine.target import Target
from engine.trace import Trace, text_features
from profiles import TreeConfig
from tiny import VOCAB, tiny_head, tiny_model

N_LAYERS = 6
CHANGES: dict[str, dict[str, Any]] = {
    "layers": {"feature_layers": (3, 4, 5)},
    "base": {"rope_theta": 1e6},
    "both": {"feature_layers": (1, 2, 3), "rope_theta": 500.0},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=N_LAYERS))


def head_of(target: Target, **changes: Any) -> Eagle3Head:
    head = tiny_head(target.model, feature_layers=(2, 3, 4), draft_vocab=100, **changes)
    with torch.no_grad():  # attention sharp enough for positions to matter
        head.layers[0].qkv_proj.weight[:96].mul_(8)
    return head


def random_traces(lengths: dict[int, int], seed: int = 0) -> list[Trace]:
    """Return random texts with {prompt tokens: answer tokens}."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for n_prompt, n_new in lengths.items():
        ids = torch.randint(0, VOCAB, (n_prompt + n_new,), generator=generator).tolist()
        texts.append(Trace(f"{n_prompt}", ids[:n_prompt], ids[n_prompt:]))
    return texts


def logits_of(draft: Eagle3Draft, target: Target, tokens: list[int]) -> torch.Tensor:
    features = text_features(target, tokens, draft.feature_layers)
    assert features is not None
    with torch.inference_mode():
        cache = draft.new_cache(len(tokens))
        return draft.extend(tokens[1:], features[:-1], cache, last_only=False)[0]


@pytest.mark.parametrize("name", CHANGES)
def test_a_variant_scores_as_a_head_built_with_its_conventions(target: Target, name: str) -> None:
    """Layers and base are all that a variant changes, and they change what it says."""
    change = CHANGES[name]
    head = head_of(target)
    config = head.config
    if "feature_layers" in change:
        config = replace(config, feature_layers=change["feature_layers"])
    if "rope_theta" in change:
        config = replace(config, rope=dict(config.rope) | {"rope_theta": change["rope_theta"]})
    built = Eagle3Head(config, head.embed_tokens).double()
    built.load_state_dict(head.state_dict())
    built.target_ids = head.target_ids
    tokens = random_traces({20: 180})[0].tokens
    original = Eagle3Draft(head)
    before = logits_of(original, target, tokens)
    scores = logits_of(original.variant(**change), target, tokens)
    assert torch.equal(scores, logits_of(Eagle3Draft(built), target, tokens))
    assert not torch.allclose(scores, before, atol=1e-3)


def test_a_variant_copies_no_weight_and_leaves_the_head_alone(target: Target) -> None:
    head = head_of(target)
    config, frequencies = head.config, head._inv_freq.clone()
    twin = head.variant(feature_layers=[1, 2, 3], rope_theta=1e6)
    assert twin.config.feature_layers == (1, 2, 3)
    assert twin.config.rope["rope_theta"] == 1e6
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in head.parameters()]
    assert twin.embed_tokens is head.embed_tokens
    assert twin.target_ids is head.target_ids
    assert head.config is config
    assert torch.equal(head._inv_freq, frequencies)


def first_children(
    draft: Eagle3Draft, target: Target, trace: Trace, roots: list[int]
) -> list[int]:
    """Return what a tree of one node would hold below each root."""
    if not roots:
        return []
    features = text_features(target, trace.tokens, draft.feature_layers)
    tree = TreeConfig(depth=1, width=1, top_k=1, nodes=1)
    return [pool.tokens[0] for pool in draft.pools(trace.tokens, features, roots, tree)]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9}, {"norm_output": True}], ids=str)
def test_a_first_choice_is_the_first_child_of_a_tree(
    target: Target, changes: dict[str, Any]
) -> None:
    """What is counted is what a round would propose first, for every variant at once."""
    draft = Eagle3Draft(head_of(target, **changes))
    variants = [draft.variant(**change) for change in ({}, *CHANGES.values())]
    traces = random_traces({1: 30, 9: 2, 40: 12})
    for root in range(40, 50, 2):  # every other answer token of the last text is what a head says
        trace = traces[-1]
        trace.generated[root - 39] = first_children(draft, target, trace, [root])[0]
    roots = [[1, 2, 7, 29], [], list(range(40, 51))]
    wanted = [
        t.tokens[root + 1] for t, places in zip(traces, roots, strict=True) for root in places
    ]
    expected = []
    for variant in variants:
        pairs = zip(traces, roots, strict=True)
        guesses = sum([first_children(variant, target, t, places) for t, places in pairs], [])
        expected.append([guess == token for guess, token in zip(guesses, wanted, strict=True)])
    ticks: list[int] = []
    right = first_choices_right(target, variants, traces, roots, lambda: ticks.append(1))
    assert right.tolist() == expected
    assert sum(expected[0]) >= 5
    assert expected[0] != expected[1]
    assert not all(expected[0])
    assert len(ticks) == len(traces)
