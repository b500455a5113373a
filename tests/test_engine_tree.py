"""Draft trees: masks, positions, and the choice of nodes from a pool."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tree import ROOT_ONLY, DraftTree, Pool, best

random_parents = st.lists(st.floats(0, 1, exclude_max=True), max_size=30).map(
    lambda draws: [int(x * (i + 1)) for i, x in enumerate(draws)]
)


@given(random_parents)
def test_b06_a_node_sees_its_ancestors_and_itself(parents: list[int]) -> None:
    """Depths and mask rows are those found by walking up from every node."""
    tree = DraftTree(tokens=[0] * len(parents), parents=parents)
    mask = tree.mask()
    assert mask.dtype == torch.bool
    for node in range(tree.n_nodes + 1):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1] - 1])
        assert tree.depths[node] == len(path) - 1
        assert mask[node].nonzero()[:, 0].tolist() == sorted(path)


def test_children_are_found_by_parent_and_token() -> None:
    """The same token may stand below different nodes."""
    tree = DraftTree(tokens=[5, 6, 5, 5], parents=[0, 0, 1, 2])
    assert tree.children == {(0, 5): 1, (0, 6): 2, (1, 5): 3, (2, 5): 4}
    assert ROOT_ONLY.children == {}
    assert ROOT_ONLY.mask().tolist() == [[True]]


@st.composite
def random_pools(draw: st.DrawFn) -> Pool:
    """Draw a pool with coarse scores, so that ties abound."""
    level_sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    parents: list[int] = []
    scores: list[float] = []
    ends: list[int] = []
    start = -1
    for size in level_sizes:
        previous = range(start, len(parents)) if start >= 0 else range(-1, 0)
        start = len(parents)
        for _ in range(size):
            parent = draw(st.sampled_from(list(previous)))
            above = 0.0 if parent < 0 else scores[parent]
            parents.append(parent)
            scores.append(above - draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, float("inf")])))
        ends.append(len(parents))
    return Pool(list(range(len(parents))), parents, scores, ends)


@settings(max_examples=300)
@given(random_pools(), st.integers(1, 30))
def test_the_selection_is_connected_and_keeps_the_best_scores(pool: Pool, n_nodes: int) -> None:
    """Also with ties every kept node's parent is kept, and no node left out beats a kept one."""
    tree = pool.select(n_nodes)
    kept = tree.tokens  # tokens are the indices in the pool
    assert len(kept) == min(n_nodes, len(pool.tokens))
    assert kept == sorted(kept)
    for node, (index, parent) in enumerate(zip(kept, tree.parents, strict=True), start=1):
        assert parent < node
        assert pool.parents[index] == (kept[parent - 1] if parent else -1)
    left_out = set(range(len(pool.tokens))) - set(kept)
    for index in left_out:
        for other in kept:
            key, other_key = (-pool.scores[index], index), (-pool.scores[other], other)
            assert other_key < key


def test_ties_go_to_the_lower_index() -> None:
    """Four equal candidates: the first two are kept."""
    pool = Pool([10, 11, 12, 13], [-1, -1, 0, 0], [-1.0] * 4, [2, 4])
    assert pool.select(2) == DraftTree([10, 11], [0, 0])
    assert pool.select(3) == DraftTree([10, 11, 12], [0, 0, 1])


@given(st.lists(st.sampled_from([0.0, -1.0, -2.0, float("-inf")])), st.integers(1, 5))
def test_best_takes_finite_scores_in_order(scores: list[float], n: int) -> None:
    """The n largest, best first, ties by index; what cannot happen is never expanded."""
    found = best(scores, n)
    n_finite = sum(score != float("-inf") for score in scores)
    assert len(found) == min(n, n_finite)
    assert all((-scores[a], a) < (-scores[b], b) for a, b in pairwise(found))
    assert all(
        (-scores[i], i) >= (-scores[found[-1]], found[-1])
        for i in set(range(len(scores))) - set(found)
        if found
    )


@pytest.mark.parametrize("n_nodes", [1, 3, 100])
def test_an_empty_pool_gives_the_root(n_nodes: int) -> None:
    """A lookup that finds nothing verifies nothing."""
    assert Pool([], [], [], [0, 0]).select(n_nodes) == ROOT_ONLY
