"""The target's pass over a tree, on every kind of attention: brute force against plain passes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.cache import KVCache
from engine.target import Target, check_tree_decoding
from engine.tree import DraftTree
from profiles.errors import SpectuneError
from tiny import CONFIGS, VOCAB, tiny_model

ATTENTION = [(kind, "eager") for kind in CONFIGS] + [
    (kind, "sdpa") for kind in CONFIGS if kind != "gemma2"
]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare to float32's precision: transformers computes norms and eager softmaxes in it."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def random_tree(rng: random.Random, n_nodes: int) -> DraftTree:
    parents = [rng.randint(max(0, i - 3), i) for i in range(n_nodes)]
    return DraftTree([rng.randrange(VOCAB) for _ in parents], parents)


def root_path(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1] - 1])
    return path[::-1]


def plain_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return the last token's logits of transformers' own pass, without any cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        return logits[0, -1]


def verify(target: Target, cache: KVCache, root: int, tree: DraftTree, **kw: Any) -> Any:
    return target.forward(
        [root, *tree.tokens],
        cache,
        positions=cache.length + torch.tensor(tree.depths),
        mask=tree.mask() if tree.n_nodes else None,
        **kw,
    )


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "attention"), ATTENTION)
def test_b06_every_node_gets_the_logits_of_its_own_path(kind: str, attention: str) -> None:
    """Over rounds of random trees and random accepted paths, past the sliding window and past
    the cache's first allocation, each node's logits are those of a plain pass over its text."""
    rng = random.Random(f"{kind} {attention}")
    model = tiny_model(kind, num_hidden_layers=2, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    target = Target(model)
    text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    cache = target.new_cache(16)
    target.forward(text, cache)
    text.append(rng.randrange(VOCAB))
    for n_nodes in (0, 5, 1, 12, 0, 9, 7):
        tree = random_tree(rng, n_nodes)
        start = cache.length
        logits, _ = verify(target, cache, text[-1], tree)
        words = [text[-1], *tree.tokens]
        for node in range(n_nodes + 1):
            own = [words[i] for i in root_path(tree, node)]
            expected = plain_logits(model, text[:-1] + own)
            assert_close(logits[node], expected)
        accepted = root_path(tree, rng.randint(0, n_nodes))
        cache.keep_path(start, accepted)
        text += [words[i] for i in accepted[1:]] + [rng.randrange(VOCAB)]
        assert cache.length == len(text) - 1
        assert cache.positions[: cache.length].tolist() == list(range(cache.length))


@pytest.mark.parametrize("kind", CONFIGS)
def test_features_are_the_hidden_states_of_transformers(kind: str) -> None:
    """Index i is `hidden_states[i]`, in the order asked for, over any split of the text."""
    model = tiny_model(kind, num_hidden_layers=3)
    target, cache = Target(model), KVCache(3, 20)
    ids = [5, 9, 100, 7, 44, 3, 8, 21, 90, 11, 12, 3]
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    expected = torch.cat([output.hidden_states[i][0] for i in (2, 0, 1)], -1)
    parts = [
        target.forward(part, cache, feature_layers=(2, 0, 1))[1]
        for part in (ids[:7], ids[7:8], ids[8:])
    ]
    assert_close(torch.cat([part for part in parts if part is not None]), expected)
    _, none = target.forward([1], cache)
    assert none is None


@pytest.mark.parametrize("kind", CONFIGS)
def test_last_only_gives_the_last_row(kind: str) -> None:
    """The prefill computes one row of logits, the same one."""
    target = Target(tiny_model(kind, num_hidden_layers=1))
    ids = list(range(3, 14))
    every, _ = target.forward(ids, target.new_cache(16))
    last, _ = target.forward(ids, target.new_cache(16), last_only=True)
    assert last.shape == (1, VOCAB)
    assert_close(last, every[-1:])


def test_b04_keep_path_gathers_the_accepted_rows() -> None:
    """Rows of the accepted nodes move next to the prefix; a contiguous path moves nothing."""
    cache = KVCache(2, 4)
    for layer in cache.layers:
        rows = torch.arange(10.0).view(1, 1, 10, 1)
        layer.update(rows, -rows)
    cache.positions = torch.arange(10)
    cache.keep_path(3, [0, 2, 5])
    for layer in cache.layers:
        assert layer.keys[0, 0, : layer.length, 0].tolist() == [0, 1, 2, 3, 5, 8]
        assert layer.values[0, 0, : layer.length, 0].tolist() == [0, -1, -2, -3, -5, -8]
    assert cache.length == 6
    cache.keep_path(4, [0, 1])
    assert cache.length == 6
    cache.truncate(2)
    assert cache.length == 2


def test_trees_are_refused_where_positions_are_ignored() -> None:
    """A model that numbers tokens itself cannot verify a tree, and is named."""
    model = tiny_model("llama", num_hidden_layers=1)
    forward = model.forward

    def count_positions(cache: KVCache, input_ids: Tensor, position_ids: Tensor, **kw: Any) -> Any:
        positions = cache.length + torch.arange(input_ids.shape[1])[None]
        return forward(input_ids, position_ids=positions, cache=cache, **kw)

    check_tree_decoding(Target(model))
    model.forward = count_positions
    target = Target(model)
    with pytest.raises(SpectuneError, match="LlamaForCausalLM cannot verify draft trees"):
        check_tree_decoding(target)
