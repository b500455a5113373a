"""The trees a search may propose: legal, canonical, within the bounds, each once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.space import DEFAULTS, SearchSpace
from profiles import PLAIN, TreeConfig

SPACES = st.builds(
    SearchSpace,
    max_depth=st.integers(1, 16),
    max_width=st.integers(1, 12),
    max_top_k=st.integers(1, 12),
    max_nodes=st.integers(1, 80),
)
POINTS = st.tuples(
    st.integers(0, 20), st.integers(1, 12), st.integers(1, 12), st.floats(0, 1, allow_nan=False)
)
USUAL = [SearchSpace(8, 10, 10, 64), SearchSpace(16, 4, 4, 64), SearchSpace(3, 2, 2, 6)]


@settings(deadline=None)
@given(space=SPACES, point=POINTS)
def test_every_point_is_a_legal_canonical_tree_within_the_bounds(
    space: SearchSpace, point: tuple[int, int, int, float]
) -> None:
    tree = space.tree(*point)
    assert TreeConfig(**tree.model_dump()) == tree == tree.canonical()
    assert space.contains(tree)
    assert tree.is_plain == (point[0] == 0)


@settings(deadline=None)
@given(space=SPACES, point=POINTS)
def test_a_tree_of_the_space_comes_back_from_its_own_fill(
    space: SearchSpace, point: tuple[int, int, int, float]
) -> None:
    tree = space.tree(*point)
    again = space.tree(tree.depth, max(1, tree.width), max(1, tree.top_k), space.fill(tree))
    assert again == tree
    assert 0 <= space.fill(tree) <= 1


@pytest.mark.parametrize("space", USUAL)
def test_enumeration_gives_legal_trees_of_the_space_each_once(space: SearchSpace) -> None:
    trees = list(space.enumerate())
    assert len(trees) == len(set(trees)) > 10
    for tree in trees:
        assert tree == tree.canonical()
        assert space.contains(tree)
        assert not tree.is_plain
        assert space.tree(tree.depth, tree.width, tree.top_k, space.fill(tree)) == tree


@settings(deadline=None)
@given(space=SPACES)
def test_the_simplest_chain_is_in_every_space(space: SearchSpace) -> None:
    assert TreeConfig.chain(1) in set(space.enumerate())
    assert space.tree(1, 1, 1, 0.0) == TreeConfig.chain(1)
    assert space.contains(PLAIN)


def test_more_fill_never_means_fewer_nodes() -> None:
    space = USUAL[0]
    nodes = [space.tree(5, 4, 4, i / 100).nodes for i in range(101)]
    assert nodes == sorted(nodes)
    assert nodes[0] == 5  # the fewest that reach the depth
    assert nodes[-1] == 64


def test_the_defaults_are_the_published_settings() -> None:
    assert [(t.depth, t.width, t.top_k, t.nodes) for t in DEFAULTS] == [
        (8, 10, 10, 59),  # EAGLE 60/7/10
        (3, 1, 1, 3),  # SGLang 3/1/4
        (5, 4, 4, 7),  # SGLang 5/4/8
    ]


@pytest.mark.parametrize("default", DEFAULTS, ids=TreeConfig.label)
def test_a_default_put_into_the_search_is_measured_as_published(default: TreeConfig) -> None:
    space = USUAL[0]
    fill = space.fill(default)
    assert space.tree(default.depth, default.width, default.top_k, fill) == default.canonical()
