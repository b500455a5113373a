"""Growing trees with a neural draft: the published tree, cuts of a pool, many roots at once."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.beam import BeamDraft
from engine.cache import KVCache
from engine.draft import Draft, DraftSession
from engine.eagle3 import Eagle3Head
from engine.eagle3_draft import Eagle3Draft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.target import Target
from engine.timing import PhaseClock
from engine.trace import text_features
from engine.tree import DraftTree, Pool
from profiles import TreeConfig
from tiny import CONFIGS, VOCAB, tiny_head, tiny_model, twin_with_noise
from toy_drafts import TableDraft

CLOCK = PhaseClock(torch.device("cpu"))


def published_tree(
    log_probabilities: list[list[float]], root: int, depth: int, top_k: int, n_nodes: int
) -> list[tuple[tuple[int, ...], float]]:
    """Build the EAGLE-2 tree as arXiv 2406.16858 describes it; row t follows token t.

    Returns:
        Path and cumulative score of the reranked nodes, level by level.
    """

    def children(path: tuple[int, ...], score: float) -> list[tuple[tuple[int, ...], float]]:
        row = log_probabilities[path[-1] if path else root]
        likeliest = sorted(range(len(row)), key=lambda token: -row[token])[:top_k]
        return [((*path, token), score + row[token]) for token in likeliest]

    layer = children((), 0.0)
    everything = list(layer)
    for _ in range(depth - 1):
        expanded = sorted(layer, key=lambda node: -node[1])[:top_k]
        layer = [child for node in expanded for child in children(*node)]
        everything += layer
    kept = sorted(range(len(everything)), key=lambda i: -everything[i][1])[:n_nodes]
    return [everything[i] for i in sorted(kept)]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens from the root to every node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("seed", range(20))
def test_with_width_equal_to_top_k_the_tree_is_the_published_one(seed: int) -> None:
    """Node for node, in order, for random drafts and settings."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(20, 20, generator=generator, dtype=torch.float64)
    depth, top_k = rng.randint(1, 6), rng.randint(1, 7)
    pool = top_k + (depth - 1) * top_k**2
    n_nodes = rng.randint(depth, pool)
    tree = TreeConfig(depth=depth, width=top_k, top_k=top_k, nodes=n_nodes)
    session = TableDraft(table).open([3, 7], 50)
    found = session.propose(tree, CLOCK)
    rows = torch.log_softmax(table.float(), -1).tolist()
    expected = published_tree(rows, 7, depth, top_k, n_nodes)
    assert paths(found) == [path for path, _ in expected]


def plain_scores(model: torch.nn.Module, text: list[int], path: tuple[int, ...]) -> list[float]:
    """Return log-probabilities after a path from a plain pass without cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1]
    scores: list[float] = torch.log_softmax(logits.float(), -1).tolist()
    return scores


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_models_tree_scores_are_those_of_plain_passes(kind: str) -> None:
    """Every candidate's cumulative score is the sum along its path, on every architecture and
    past the sliding window; the children are the likeliest ones."""
    model = tiny_model(kind, num_hidden_layers=2)
    text = [3, 50, 4, 77, 9, 12, 99, 31, 5, 60, 8]
    tree = TreeConfig(depth=3, width=2, top_k=3, nodes=3)
    (pool,) = ModelDraft(model, VOCAB).pools(text, None, [len(text) - 1], tree)
    assert pool.level_ends == [3, 9, 15]
    walked: dict[int, tuple[int, ...]] = {-1: ()}
    for i, (token, parent, score) in enumerate(
        zip(pool.tokens, pool.parents, pool.scores, strict=True)
    ):
        walked[i] = (*walked[parent], token)
        row = plain_scores(model, text, walked[parent])
        above = 0.0 if parent < 0 else pool.scores[parent]
        assert score - above == pytest.approx(row[token], abs=2e-6)
        assert sorted(row, reverse=True)[tree.top_k - 1] <= row[token] + 1e-6


@torch.inference_mode()
def test_a_heads_tree_scores_are_those_of_a_chain_without_cache() -> None:
    """The head's candidate equals feeding its own states back along the path, alone."""
    model = tiny_model(num_hidden_layers=3)
    head = tiny_head(model, sliding_window=7)
    target, text = Target(model), [3, 50, 4, 77, 9, 12, 99, 31, 5, 60, 8]
    features = text_features(target, text, head.config.feature_layers)
    assert features is not None and head.target_ids is not None
    tree = TreeConfig(depth=3, width=2, top_k=3, nodes=3)
    (pool,) = Eagle3Draft(head).pools(text, features, [len(text) - 1], tree)
    fused = head.fuse(features[:-1])
    walked: dict[int, tuple[int, ...]] = {-1: ()}
    for i, (token, parent, score) in enumerate(
        zip(pool.tokens, pool.parents, pool.scores, strict=True)
    ):
        walked[i] = (*walked[parent], token)
        row = _head_scores(head, text, fused, walked[parent])
        above = 0.0 if parent < 0 else pool.scores[parent]
        place = head.target_ids.tolist().index(token)
        assert score - above == pytest.approx(row[place], abs=2e-6)
        assert sorted(row, reverse=True)[tree.top_k - 1] <= row[place] + 1e-6


def _head_scores(
    head: Eagle3Head, text: list[int], fused: Tensor, path: tuple[int, ...]
) -> list[float]:
    cache = KVCache(1, 32)
    n = len(fused)
    states = head(torch.tensor([text[1:]]), fused[None], torch.arange(n)[None], cache)
    for step, token in enumerate(path):
        states = head(torch.tensor([[token]]), states[:, -1:], torch.tensor([[n + step]]), cache)
    scores: list[float] = torch.log_softmax(head.logits(states[0, -1]).float(), -1).tolist()
    return scores


def drafts_of(model: PreTrainedModel) -> dict[str, Draft]:
    head = tiny_head(model, texts=[range(3, 60)])
    return {
        "lookup": LookupDraft(1, 3),
        "model": ModelDraft(twin_with_noise(model, 0.2), VOCAB),
        "sliding": ModelDraft(tiny_model("mistral", 3, num_hidden_layers=2), VOCAB),
        "head": Eagle3Draft(head),
    }


def repeated_text(rng: random.Random, n: int) -> list[int]:
    words = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(3)]
    text: list[int] = []
    while len(text) < n:
        text += rng.choice(words)
    return text[:n]


def session_at(draft: Draft, text: list[int], features: Tensor | None, root: int) -> DraftSession:
    """Bring a session to a root in pieces, as rounds would, with a proposal on the way."""
    n_prompt = max(1, root - 6)
    session = draft.open(text[:n_prompt], 64)
    ends = sorted({n_prompt + 1, max(n_prompt + 1, root - 2), root + 1})
    for start, end in pairwise([n_prompt, *ends]):
        first = 0 if start == n_prompt else start - 1  # the last token has no feature yet
        rows = None if features is None else features[first : end - 1]
        session.commit(text[start:end], rows)
        if end <= root:
            session.propose(TreeConfig(depth=2, width=2, top_k=2, nodes=4), CLOCK)
    return session


@pytest.mark.parametrize("name", ["lookup", "model", "sliding", "head"])
def test_depth_and_node_cuts_of_one_pool_equal_a_fresh_growth(name: str) -> None:
    """The first levels of a deep pool are the pool of a shallow tree, and its best nodes the tree
    a session proposes at that point; growing many roots at once changes nothing."""
    rng = random.Random(name)
    model = tiny_model(num_hidden_layers=2)
    target, draft = Target(model), drafts_of(model)[name]
    text = repeated_text(rng, 45)
    features = text_features(target, text, draft.feature_layers)
    roots = list(range(1, 44))  # more than one block of roots
    deepest = TreeConfig(depth=5, width=2, top_k=3, nodes=5)
    pools = draft.pools(text, features, roots, deepest)
    assert len(pools) == len(roots)
    for root in rng.sample(roots, 12):
        pool = pools[root - roots[0]]
        depth = rng.randint(1, 5)
        nodes = rng.randint(depth, 3 + 6 * (depth - 1))
        tree = TreeConfig(depth=depth, width=2, top_k=3, nodes=nodes)
        end = pool.level_ends[depth - 1]
        cut = Pool(pool.tokens[:end], pool.parents[:end], pool.scores[:end], [])
        assert session_at(draft, text, features, root).propose(tree, CLOCK) == cut.select(nodes)


def test_b07_a_top_k_beyond_the_vocabulary_takes_the_vocabulary() -> None:
    """Every token is a child, once."""
    draft: BeamDraft = TableDraft(torch.zeros(5, 5))
    tree = TreeConfig(depth=2, width=5, top_k=9, nodes=30)
    proposed = draft.open([1], 10).propose(tree, CLOCK)
    assert sorted(proposed.tokens[:5]) == [0, 1, 2, 3, 4]
    assert proposed.n_nodes == 30
    assert len(set(paths(proposed))) == 30
