"""Tokens per round from acceptance tables, against brute force and known laws."""

import itertools

import numpy as np
import pytest

from autotune.what_if.acceptance import TauTable, rates_of, rates_of_rows, scaled_rates, static_tau
from profiles import PLAIN, Acceptance, TreeConfig

RATES = rates_of_rows([[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]])


def brute_force(tree: TreeConfig) -> float:
    """Sum the likeliest paths of a tree whose width leaves nothing out."""
    paths = []
    for depth in range(1, tree.depth + 1):
        for ranks in itertools.product(range(tree.top_k), repeat=depth):
            paths.append(np.prod([RATES[min(i, 1), rank] for i, rank in enumerate(ranks)]))
    return 1 + sum(sorted(paths, reverse=True)[: tree.nodes])


@pytest.mark.parametrize("nodes", [3, 5, 12, 30])
def test_the_best_static_tree_keeps_the_likeliest_paths(nodes: int) -> None:
    tree = TreeConfig(depth=3, width=27, top_k=3, nodes=nodes)
    assert static_tau(RATES, tree) == pytest.approx(brute_force(tree))


def test_a_chain_is_a_sum_of_products_and_the_last_row_goes_on() -> None:
    expected = 1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4**2
    assert static_tau(RATES, TreeConfig.chain(3)) == pytest.approx(expected)
    assert static_tau(RATES, PLAIN) == 1.0


def test_width_limits_what_is_expanded() -> None:
    tree = TreeConfig(depth=2, width=1, top_k=2, nodes=4)
    assert static_tau(RATES, tree) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * (0.4 + 0.3))


def test_rates_of_seldom_tried_depths_lean_on_the_depth_before() -> None:
    table = Acceptance(draft="d", tried=[100, 5, 0], accepted=[[50, 10], [0, 0], [0, 0]])
    rates = rates_of(table)
    assert rates[0].tolist() == [0.5, 0.1]
    assert rates[1].tolist() == pytest.approx([0.25, 0.05])
    assert rates[2].tolist() == pytest.approx(rates[1].tolist())


def test_scaled_rates_never_add_up_to_more_than_one() -> None:
    assert scaled_rates(RATES, 0.0).sum() == 0.0
    assert scaled_rates(RATES, 9.0).sum(axis=1).tolist() == pytest.approx([1.0, 1.0])


def test_a_table_is_corrected_by_replayed_trees_and_tested_on_others() -> None:
    trees = [TreeConfig(depth=d, width=3, top_k=3, nodes=n) for d in (2, 3) for n in (3, 5, 8, 12)]
    replayed = {tree: 1 + 0.8 * (static_tau(RATES, tree) - 1) for tree in trees}
    table = TauTable(RATES, replayed)
    assert table.tau(trees[0]).is_replayed
    unseen = TreeConfig(depth=3, width=3, top_k=3, nodes=10)
    tau = table.tau(unseen)
    assert not tau.is_replayed
    assert tau.value == pytest.approx(1 + 0.8 * (static_tau(RATES, unseen) - 1))
    assert tau.error is not None
    assert tau.error.p90 < 1e-6
    noisy = TauTable(
        RATES, {t: v * (1.1 if i % 3 else 1) for i, (t, v) in enumerate(replayed.items())}
    )
    assert noisy.error is not None
    assert noisy.error.p90 > 0.03


def test_without_replayed_trees_the_error_is_unknown() -> None:
    tau = TauTable(RATES, {}).tau(TreeConfig.chain(2))
    assert (tau.value, tau.error) == (pytest.approx(1.7), None)


def test_tau_never_exceeds_what_the_depth_allows() -> None:
    certain = TauTable(rates_of_rows([[1.0]]), {})
    assert certain.tau(TreeConfig.chain(4), 3.0).value == 5.0
