"""Prices read from the cost tables of a profile, against hand arithmetic."""

import pytest

from profiles import PLAIN, CostModelSummary, CostTable, TreeConfig
from profiles.prices import Prices

TREE = TreeConfig(depth=3, width=2, top_k=2, nodes=6)


def prices(*more: CostTable) -> Prices:
    tables = [
        CostTable(name="verify", x=[0.0, 1.0, 5.0, 9.0], relative=[1.0, 1.2, 1.4, 2.2]),
        CostTable(name="extend", x=[1.0, 2.0], relative=[0.1, 0.11]),
        CostTable(name="level", x=[1.0, 4.0], relative=[0.05, 0.08]),
        CostTable(name="grow", x=[1.0], relative=[0.02]),
        CostTable(name="commit", x=[1.0], relative=[0.01]),
    ]
    valid = {"nodes": (1.0, 9.0), "context": (32.0, 1024.0)}
    return Prices(CostModelSummary(reference_ms=20.0, tables=[*tables, *more], valid=valid))


def test_a_round_is_the_sum_of_its_parts() -> None:
    price = prices().round(TREE, n_extend=4, n_nodes=6)
    assert price.extend == pytest.approx(0.13)
    assert price.levels == pytest.approx(0.02 + 2 * 0.06)
    assert price.verify == pytest.approx(1.6)
    assert price.commit == 0.01
    assert price.total == pytest.approx(0.13 + 0.14 + 1.6 + 0.01)
    assert prices().round_s(TREE, 4, 6) == pytest.approx(0.02 * price.total)


def test_plain_is_the_reference_unless_it_has_a_table_by_context() -> None:
    assert prices().round(PLAIN, 5, 0).total == prices().plain(700) == 1.0
    by_context = prices(CostTable(name="plain", x=[0.0, 1000.0], relative=[1.0, 1.5]))
    assert by_context.plain(400) == pytest.approx(1.2)
    assert by_context.plain_s(1400) == pytest.approx(0.02 * 1.7)


def test_a_part_with_tables_at_contexts_is_interpolated_between_them() -> None:
    found = prices(
        CostTable(name="draw", x=[1.0], relative=[9.0]),  # a part of no round
        CostTable(name="plain", at={"context": 100.0}, x=[1.0], relative=[1.0]),
        CostTable(name="plain", at={"context": 300.0}, x=[1.0], relative=[1.4]),
    )
    assert [found.plain(c) for c in (0, 100, 200, 300)] == pytest.approx([1.0, 1.0, 1.2, 1.4])


def test_beyond_the_last_point_prices_go_on_rising_and_are_not_called_measured() -> None:
    assert prices().verify(13) == pytest.approx(2.2 + 4 * 0.2)
    assert prices().is_measured(nodes=9, context=32)
    assert not prices().is_measured(nodes=10)
    assert not prices().is_measured(nodes=9, context=2000)
    falling = prices(CostTable(name="plain", x=[0.0, 10.0], relative=[1.2, 1.0]))
    assert falling.plain(99) == 1.0
