"""The guard's books against any sequence of rounds, on a simulated clock."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode import Round
from engine.guard import FEW, OUTLIER, Guard
from engine.ledger import Ledger, Speed
from profiles import PLAIN, CostModelSummary, CostTable, GuardSettings, TreeConfig
from profiles.prices import Prices

PLAIN_S = 0.02
TREE = TreeConfig(depth=3, width=2, top_k=2, nodes=6)


def prices(round_price: float = 1.4) -> Prices:
    """Return prices: a speculative round costs `round_price` plain tokens."""
    tables = [
        CostTable(name="verify", x=[0.0, 1.0, 9.0], relative=[1.0, round_price, round_price]),
        CostTable(name="prefill", x=[1.0, 101.0], relative=[0.01, 1.01]),
    ]
    return Prices(CostModelSummary(reference_ms=1e3 * PLAIN_S, tables=tables))


class Traffic:
    """Decodes imagined requests under a guard; every round takes what is asked of it."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.tokens: list[int] = []
        self.losses: list[float] = []  # of each round, in plain tokens, by the true clock

    def round(
        self, own: Ledger, n_behind: int, price: float, n_emitted: int, *, budget_left: int = 10**6
    ) -> bool:
        """Run one round; a plain one costs 1, a speculative one `price`."""
        speculates = self.guard.speculates(
            own, n_behind=n_behind, budget_left=budget_left, context=100, is_new=n_behind > 100
        )
        n_emitted, price = (n_emitted, price) if speculates else (1, 1.0)
        tree, n_nodes = (TREE, 6) if speculates else (PLAIN, 0)
        done = Round(tree, n_nodes, n_behind if speculates else 0, 100, n_emitted)
        self.guard.settle(own, done, price * PLAIN_S)
        self.tokens.append(n_emitted)
        self.losses.append(price - n_emitted)
        return speculates

    def run(self, price: float, taus: list[int], n_tokens: int, rng: random.Random) -> float:
        """Decode one request; return the plain tokens' time it lost."""
        own = Ledger(self.guard.settings.allowance_tokens)
        start, n_behind, emitted = len(self.losses), 120, 0
        while emitted < n_tokens:
            extra = 0.01 * n_behind if n_behind > 12 else 0.0
            speculated = self.round(own, n_behind, price + extra, rng.choice(taus))
            emitted += self.tokens[-1]
            n_behind = self.tokens[-1] if speculated else n_behind + 1
        return sum(self.losses[start:])

    @property
    def speedup(self) -> float:
        return sum(self.tokens) / (sum(self.tokens) + sum(self.losses))


def largest_overdraft(tokens: list[int], losses: list[float], tax: float) -> float:
    """Return the largest loss of any stretch of rounds, less the tax on its tokens."""
    worst = running = 0.0
    for n, loss in zip(tokens, losses, strict=True):
        running = max(0.0, running + loss - tax * n)
        worst = max(worst, running)
    return worst


ROUNDS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 9.0)), max_size=200)


@given(rounds=ROUNDS, allowance=st.floats(1.0, 20.0), tax=st.floats(0.0, 0.05))
def test_no_stretch_of_rounds_that_could_be_paid_loses_more_than_allowance_and_tax(
    rounds: list[tuple[int, float]], allowance: float, tax: float
) -> None:
    ledger, tokens, losses = Ledger(allowance, tax), [], []
    for n, price in rounds:
        if not ledger.can_pay(price - n):
            n, price = 1, 1.0
        ledger.settle(n, price)
        tokens.append(n)
        losses.append(price - n)
        assert 0 <= ledger.balance + 1e-9 <= allowance + 2e-9
    assert largest_overdraft(tokens, losses, tax) <= allowance + 1e-6


@settings(deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 30.0), st.integers(1, 300))),
    modelled=st.floats(1.0, 3.0),
)
def test_whatever_rounds_take_the_overdraft_is_bounded_by_one_round(
    rounds: list[tuple[int, float, int]], modelled: float
) -> None:
    """A round cannot be stopped half way, so it may exceed what the ledger had left; its charge
    is bounded, and after it the guard does not speculate before the loss is earned back."""
    guard = Guard(TREE, prices(modelled))
    own, charges = Ledger(8.0), []
    for n, price, n_behind in rounds:
        before = guard.stats.gained_tokens
        could_pay = guard.stats.balance_tokens >= 0
        traffic = Traffic(guard)
        speculated = traffic.round(own, n_behind, price, n)
        assert could_pay or not speculated
        charges.append(n - (guard.stats.gained_tokens - before) if speculated else 0.0)
        assert guard.stats.balance_tokens >= -max(charges)
        assert own.balance >= -max(charges)


def test_a_stream_that_never_pays_keeps_99_percent_and_its_requests_the_allowance() -> None:
    for price, taus in ((1.4, [1]), (2.5, [1, 1, 1, 2]), (1.2, [1, 1, 1, 1, 2]), (1.02, [1])):
        traffic, rng = Traffic(Guard(TREE, prices(price))), random.Random(0)
        losses = [traffic.run(price, taus, 128, rng) for _ in range(20)]
        assert traffic.speedup >= 0.99
        assert max(losses) <= 8.0
        tax = traffic.guard.settings.tax
        assert largest_overdraft(traffic.tokens, traffic.losses, tax) <= 8.0 + 1e-6


def test_a_stream_that_pays_is_left_alone() -> None:
    """Plain rounds are the first few and the rare ones that show what plain decoding costs."""
    guard, rng = Guard(TREE, prices(1.4)), random.Random(0)
    traffic = Traffic(guard)
    for _ in range(20):
        traffic.run(1.4, [1, 2, 3, 4], 128, rng)
    assert guard.stats.n_leaves == 0
    assert guard.stats.n_plain_rounds <= 0.03 * guard.stats.n_rounds + FEW + 4
    assert traffic.speedup == pytest.approx(2.5 / 1.4, rel=0.05)


def test_a_change_of_traffic_is_followed_both_ways() -> None:
    guard, rng = Guard(TREE, prices(1.4)), random.Random(0)
    traffic = Traffic(guard)
    for _ in range(4):
        for taus in ([2, 3], [1]):
            for _ in range(4):
                traffic.run(1.4, taus, 128, rng)
    assert guard.stats.n_leaves >= 4
    assert guard.stats.n_returns >= 3
    # Half of the tokens at 2.5 / 1.4, the other half at 1.
    assert traffic.speedup >= 0.9 * 2 / (1.4 / 2.5 + 1)


def test_probes_grow_rarer_while_they_are_in_vain() -> None:
    guard = Guard(TREE, prices(1.4), GuardSettings(allowance_tokens=1000.0, tax=1.0))
    traffic, own = Traffic(guard), Ledger(1000.0)
    probes = []
    for i in range(6000):
        before = guard.stats.n_probes
        traffic.round(own, 1, 1.4, 1)
        if guard.stats.n_probes > before:
            probes.append(i)
    gaps = [b - a for a, b in pairwise(probes)]
    assert all(b > 1.5 * a for a, b in pairwise(gaps[:3]))
    assert max(gaps) <= 600


def test_below_the_least_length_no_draft_is_brought_up_to_date() -> None:
    guard = Guard(TREE, prices(1.4), GuardSettings(min_new_tokens=20))
    traffic, own = Traffic(guard), Ledger(8.0)
    for _ in range(FEW):
        traffic.round(own, 120, 1.4, 3)
    assert not traffic.round(own, 120, 1.4, 3, budget_left=19)
    assert traffic.round(own, 120, 1.4, 3, budget_left=20)
    assert traffic.round(own, 3, 1.4, 3, budget_left=2)  # nothing to bring up to date


def test_catching_up_is_paid_for_and_a_price_beyond_the_allowance_is_not_paid() -> None:
    guard = Guard(TREE, prices(1.4))
    traffic, own = Traffic(guard), Ledger(8.0)
    for _ in range(FEW):
        traffic.round(own, 9000, 1.4, 1)
    assert not traffic.round(own, 9000, 1.4, 3)
    assert traffic.round(own, 300, 1.4 + 3.0, 3)
    assert guard.stats.gained_tokens == pytest.approx(3 - 4.4)


def test_the_plain_price_follows_the_machine_through_a_wrong_model() -> None:
    """Speculative rounds take 1.5 times what the model says; when all gets slower, so does the
    price of plain, and the rare plain round corrects what the model got wrong."""
    speed = Speed()
    for i in range(200):
        machine = 1.0 if i < 100 else 1.3
        is_plain = i < 4 or i % 20 == 0
        speed.observe(is_plain, machine * (1.0 if is_plain else 1.5))
    assert speed.plain == pytest.approx(1.3)
    assert speed.speculative == pytest.approx(1.3 * 1.5)


def test_a_pause_of_the_machine_is_not_charged_in_full() -> None:
    guard = Guard(TREE, prices(1.4))
    traffic, own = Traffic(guard), Ledger(8.0)
    for _ in range(40):
        traffic.round(own, 3, 1.4, 2)
    before = guard.stats.balance_tokens
    assert traffic.round(own, 3, 5000.0, 2)
    assert before - guard.stats.balance_tokens <= OUTLIER * 1.4 - 2 + 1e-6
    assert guard.stats.drift < 1.2
