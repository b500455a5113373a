"""Measuring at a steady pace, on a machine whose pace is invented here."""

from collections.abc import Callable

import pytest

from autotune.steady import (
    MAX_REPEATS,
    NOISY_SPREAD,
    TOLERANCE,
    Steadily,
    measure_steadily,
    noise_of,
    noise_warning,
)
from profiles import Noise


class Machine:
    """A machine with a clock of its own: `slowness(time)` says how much longer work takes."""

    def __init__(self, slowness: Callable[[float], float], block_s: float = 10.0) -> None:
        self.slowness, self.block_s = slowness, block_s
        self.now = 0.0
        self.n_measured: dict[int, int] = {}

    def pace_s(self) -> float:
        """Run the fixed pass, which takes a second on a quiet machine."""
        taken = self.slowness(self.now)
        self.now += taken
        return taken

    def measure(self, number: int) -> float:
        """Run a block; return when it began."""
        began = self.now
        self.n_measured[number] = self.n_measured.get(number, 0) + 1
        self.now += self.block_s * self.slowness(self.now)
        return began

    def run(self, n_blocks: int = 16, steady_s: float = 1.0) -> Steadily[float]:
        """Measure blocks on it."""
        return measure_steadily(n_blocks, self.measure, self.pace_s, steady_s)


def burner(start: float, end: float, factor: float = 1.8) -> Callable[[float], float]:
    """Return the slowness of a machine on which something else runs for a while."""
    return lambda now: factor if start <= now < end else 1.0


def test_a_quiet_machine_is_measured_once_and_says_nothing() -> None:
    machine = Machine(lambda now: 1.0 + 0.1 * (now > 80))  # ordinary drift
    done = machine.run()
    assert list(done.blocks) == list(range(16))
    assert set(machine.n_measured.values()) == {1}
    assert (done.n_remeasured, done.n_left_out, done.summary()) == (0, 0, None)


@pytest.mark.parametrize(("start", "end"), [(0, 90), (90, 240), (40, 60)])
def test_b25_blocks_measured_beside_other_work_are_measured_again_when_it_is_over(
    start: float, end: float
) -> None:
    machine = Machine(burner(start, end))
    done = machine.run()
    assert sorted(done.blocks) == list(range(16))
    assert done.n_left_out == 0
    assert 0 < done.n_remeasured < 16
    for began in done.blocks.values():
        assert not start <= began < end
    summary = done.summary()
    assert summary is not None
    assert "1.80 times" in summary
    assert f"{done.n_remeasured} prompts were measured again" in summary


def test_b25_blocks_that_stay_disturbed_are_left_out_after_a_bounded_number_of_runs() -> None:
    machine = Machine(burner(100, 1e9))
    done = machine.run()
    assert 0 < len(done.blocks) < 16
    assert done.n_left_out == 16 - len(done.blocks)
    assert max(machine.n_measured.values()) == 1 + MAX_REPEATS
    assert all(began < 100 for began in done.blocks.values())
    assert f"{done.n_left_out} of them left out" in (done.summary() or "")


def test_b25_work_that_began_before_the_holdout_shows_against_the_pace_of_earlier() -> None:
    done = Machine(burner(0, 1e9)).run(steady_s=1.0)
    assert not done.blocks
    assert done.slowest == pytest.approx(1.8)


def test_a_pace_that_was_bad_earlier_is_no_measure() -> None:
    done = Machine(lambda _: 1.0).run(steady_s=1.8)
    assert len(done.blocks) == 16
    assert done.n_remeasured == 0


def test_of_two_runs_the_calmer_is_kept() -> None:
    # A reading before the first block and one after each; only the one after block 4 is bad,
    # which spoils blocks 4 and 5. Both are run again, and the second runs are kept.
    readings = iter([1.0] * 5 + [1.5] + [1.0] * 100)
    machine = Machine(lambda _: 1.0)
    done = measure_steadily(8, machine.measure, lambda: next(readings), 1.0)
    assert machine.n_measured == dict.fromkeys(range(8), 1) | {4: 2, 5: 2}
    assert done.blocks[4] > done.blocks[7]
    assert (done.n_remeasured, done.n_left_out) == (2, 0)


def test_what_is_kept_hangs_on_the_pace_alone() -> None:
    # Blocks that gain most lie in the disturbed half: they are left out all the same.
    gains = {number: 2.0 if number >= 8 else 1.0 for number in range(16)}
    readings = iter([1.0] * 9 + [2.0] * 100)
    done = measure_steadily(16, gains.__getitem__, lambda: next(readings), 1.0)
    assert set(done.blocks.values()) == {1.0}


def test_spread_and_drift_of_a_repeated_pass() -> None:
    steady = noise_of([1.0] * 30)
    assert (steady.spread, steady.drift) == (0, 0)
    assert noise_of([1.0] * 10 + [1.1] * 10 + [1.2] * 10).drift == pytest.approx(0.2)
    assert noise_of([1.0, 2.0] * 15).spread > NOISY_SPREAD


@pytest.mark.parametrize(
    ("spread", "drift", "warns"),
    [
        (NOISY_SPREAD, TOLERANCE, False),
        (0.3, 0.0, True),
        (0.0, 0.4, True),
        (0.0, -0.4, True),
    ],
)
def test_a_busy_machine_is_warned_of_with_the_figures(
    spread: float, drift: float, warns: bool
) -> None:
    warning = noise_warning(Noise(spread=spread, drift=drift))
    assert (warning is not None) == warns
    if warning:
        assert f"varies by {100 * spread:.0f} %" in warning
        assert f"drifts by {100 * drift:+.0f} %" in warning
