import itertools

import pytest
from pydantic import ValidationError

from profiles import PLAIN, SpectuneError, TreeConfig, validated


def tree(depth, width, top_k, nodes):
    return TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes)


def draw_tree(config, seed):
    """Build a tree the way the engine does, from scores that are a fixed function of the path.

    Returns the chosen paths and the number of nodes expanded on each level below the root.
    """

    def score(path):
        return sum(-((hash((seed, path[: i + 1])) % 997) + 1) for i in range(len(path)))

    def best(paths, n):
        return sorted(paths, key=lambda path: (-score(path), path))[:n]

    def children(path):
        # The draft ranks its tokens: a smaller top_k sees a prefix of the same ranking.
        return best([(*path, token) for token in range(30)], config.top_k)

    level, candidates, expanded = children(()), [], []
    for depth in range(1, config.depth + 1):
        candidates += level
        if depth < config.depth:
            beam = best(level, config.width)
            expanded.append(len(beam))
            level = [child for path in beam for child in children(path)]
    return frozenset(best(candidates, config.nodes)), tuple(expanded)


def legal_trees():
    for depth, width, top_k in itertools.product((1, 2, 3), (1, 2, 4, 30), (1, 2, 3)):
        for nodes in range(1, 9):
            try:
                yield tree(depth, width, top_k, nodes)
            except ValidationError:
                continue


def test_b07_depth_0_is_plain_whatever_the_other_numbers_are():
    assert TreeConfig(depth=0) == PLAIN == tree(0, 3, 3, 10) == TreeConfig.chain(0)
    assert (PLAIN.width, PLAIN.top_k, PLAIN.nodes, PLAIN.pool) == (0, 0, 0, 0)
    assert PLAIN.is_plain
    assert not PLAIN.is_chain
    assert PLAIN.canonical() == PLAIN


def test_level_sizes_follow_the_width_and_the_top_k():
    assert tree(4, 3, 3, 10).level_sizes == (3, 9, 9, 9)
    assert tree(3, 2, 4, 20).level_sizes == (4, 8, 8)
    assert tree(3, 2, 4, 20).pool == 20
    assert tree(3, 100, 2, 3).level_sizes == (2, 4, 8)


def test_b07_the_nodes_lie_between_the_depth_and_the_pool():
    tree(4, 3, 3, 4)
    tree(4, 3, 3, 30)
    with pytest.raises(ValidationError, match=r"only 30 candidates; lower nodes to 30"):
        tree(4, 3, 3, 31)
    with pytest.raises(ValidationError, match=r"depth 4 needs at least 4 nodes; raise nodes to 4"):
        tree(4, 3, 3, 3)


@pytest.mark.parametrize("name", ["width", "top_k", "nodes"])
def test_b07_zero_below_the_root_is_refused_by_name_unless_plain(name):
    data = {"depth": 4, "width": 3, "top_k": 3, "nodes": 10, name: 0}
    with pytest.raises(SpectuneError) as caught:
        validated(TreeConfig, data, "--tree")
    assert str(caught.value) == (
        f"--tree: $.{name} is 0: with depth 4 it must be at least 1;"
        " raise it, or set depth to 0 for plain decoding."
    )


@pytest.mark.parametrize("name", ["depth", "width", "top_k", "nodes"])
@pytest.mark.parametrize("value", [-1, 1.5, "4", None, True, 10**12])
def test_b07_every_wrong_value_is_refused_in_one_line_that_names_it(name, value):
    data = {"depth": 4, "width": 3, "top_k": 3, "nodes": 10, name: value}
    with pytest.raises(SpectuneError) as caught:
        validated(TreeConfig, data, "--tree")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--tree: $.{name} is ")


def test_the_settings_of_other_engines_translate():
    assert TreeConfig.from_eagle(60, 7, 10) == tree(8, 10, 10, 59)
    assert TreeConfig.from_sglang(3, 1, 4) == tree(3, 1, 1, 3)
    assert TreeConfig.from_sglang(5, 4, 8) == tree(5, 4, 4, 7)
    with pytest.raises(SpectuneError, match=r"^SGLang setting 3/1/9: \$\.nodes is 8: .* lower"):
        TreeConfig.from_sglang(3, 1, 9)
    with pytest.raises(SpectuneError, match=r"^EAGLE setting 4/7/10: \$\.nodes is 3: .* raise"):
        TreeConfig.from_eagle(4, 7, 10)


def test_a_chain_is_a_tree_that_cannot_branch():
    assert TreeConfig.chain(5) == tree(5, 1, 1, 5)
    assert TreeConfig.chain(5).is_chain
    assert tree(1, 3, 3, 1).is_chain
    assert not tree(2, 1, 3, 2).is_chain  # its two nodes may be siblings
    with pytest.raises(SpectuneError, match="a chain of depth -1"):
        TreeConfig.chain(-1)


def test_canonical_merges_known_equals():
    assert tree(1, 7, 3, 2).canonical() == tree(1, 1, 2, 2)
    assert tree(4, 9, 1, 4).canonical() == TreeConfig.chain(4)
    assert tree(3, 50, 3, 6).canonical() == tree(3, 9, 3, 6)
    assert tree(3, 8, 3, 6).canonical() == tree(3, 8, 3, 6)
    assert tree(4, 3, 3, 4).canonical() == tree(4, 3, 3, 4)


def test_canonical_never_changes_the_tree_or_the_nodes_expanded():
    for config in legal_trees():
        merged = config.canonical()
        assert merged.canonical() == merged
        for seed in range(3):
            assert draw_tree(config, seed) == draw_tree(merged, seed), config


def test_what_canonical_keeps_apart_differs_for_some_scores():
    def behaviour(config):
        return tuple(draw_tree(config, seed) for seed in range(60))

    kinds = {}
    useful = [config for config in legal_trees() if config.top_k <= config.nodes]
    for config in {config.canonical() for config in useful}:
        assert kinds.setdefault(behaviour(config), config) == config


def test_b07_more_children_than_the_draft_has_tokens_are_refused():
    tree(2, 4, 32, 10).check_vocabulary(32)
    PLAIN.check_vocabulary(1)
    with pytest.raises(SpectuneError, match=r"tree\.top_k is 33, .* only 32 .* lower top_k to 32"):
        tree(2, 4, 33, 10).check_vocabulary(32)


def test_labels_are_short():
    assert tree(4, 3, 3, 10).label() == "D4 W3 K3 N10"
    assert PLAIN.label() == "plain"


def test_a_tree_cannot_be_changed_and_serves_as_a_key():
    config = tree(4, 3, 3, 10)
    with pytest.raises(ValidationError):
        config.depth = 5
    assert {config: 1}[tree(4, 3, 3, 10)] == 1
