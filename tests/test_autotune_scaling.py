"""Two rooflines: what other memory and compute do to a measured table."""

import pytest

import toy_what_if
from autotune.what_if.scaling import Hardware, Roofline, moved_summary
from profiles.prices import Prices

# The T4's passes of the article: bound by memory to about 190 tokens, then by compute.
T4 = Roofline.of([1, 192, 512], [44.7, 51.8, 125.6], overhead=0.0)


def test_the_roofline_of_a_table_is_its_smallest_pass_and_its_last_slope() -> None:
    assert T4.memory == 44.7
    assert T4.token == pytest.approx((125.6 - 51.8) / 320)
    assert T4.knee(Hardware()) == pytest.approx(194, abs=1)


def test_unchanged_hardware_changes_nothing() -> None:
    for tokens, time in ((1, 44.7), (192, 51.8), (512, 125.6), (4000, 990.0)):
        assert T4.moved(tokens, time, Hardware()) == pytest.approx(time)
    costs = toy_what_if.costs()
    assert moved_summary(costs, Hardware(), Hardware()) is costs


def test_memory_moves_small_passes_and_compute_large_ones() -> None:
    memory, compute = Hardware(memory=0.5), Hardware(compute=0.5)
    assert T4.moved(1, 44.7, memory) == pytest.approx(44.7 / 2)
    assert T4.moved(512, 125.6, memory) == pytest.approx(125.6)
    assert T4.moved(1, 44.7, compute) == pytest.approx(44.7)
    assert T4.moved(512, 125.6, compute) == pytest.approx(125.6 / 2)
    assert T4.knee(memory) == pytest.approx(T4.knee(Hardware()) / 2)


def test_overhead_stays() -> None:
    eager = Roofline.of([1, 192, 512], [44.7, 51.8, 125.6], overhead=31.0)
    assert eager.moved(1, 44.7, Hardware(memory=1e-9, compute=1e-9)) == pytest.approx(31.0)


def test_the_moved_verify_table_gets_a_point_at_its_new_knee() -> None:
    costs = toy_what_if.costs()
    moved = moved_summary(costs, Hardware(memory=2.0), Hardware())
    verify = next(table for table in moved.tables if table.name == "verify")
    assert len(verify.x) == len(costs.tables[0].x) + 1
    before, after = Prices(costs), Prices(moved)
    assert after.plain(0) == pytest.approx(2 * before.plain(0))
    assert after.verify(64) == pytest.approx(before.verify(64))  # compute-bound all along
    assert after.level(4) == before.level(4)


@pytest.mark.parametrize("nodes", [0, 1, 7, 16, 40, 64, 200])
def test_faster_hardware_never_slows_a_pass(nodes: int) -> None:
    costs = toy_what_if.costs()
    times = [
        Prices(moved_summary(costs, Hardware(m, c), Hardware())).verify(nodes)
        for m, c in ((1.0, 1.0), (0.9, 1.0), (0.9, 0.7), (0.3, 0.7), (0.3, 0.1))
    ]
    assert all(a >= b - 1e-9 for a, b in zip(times, times[1:], strict=False))
