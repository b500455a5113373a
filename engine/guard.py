"""The guard: speculates while it pays, and keeps what it may lose within the ledger.

One guard serves one decoder, whatever number of requests it decodes at a time: what one request
teaches about the traffic holds for the next. It is told what rounds were and took; it knows
neither tokens nor models, and it reads no clock but to time itself.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from profiles import PLAIN, TreeConfig
from profiles.prices import Prices
from profiles.serving import GuardSettings

from .ledger import FEW, OUTLIER, WINDOW, Ledger, Speed

if TYPE_CHECKING:
    from .decode import Request, Round

SPELL = 0.5
"""Share of the allowance that a spell of speculation may fall below its best before it ends; the
rest pays for probes."""

PROBE_LOSS = 1.5
PROBE_GAIN = 1.0
"""A probe ends when it has lost, or gained, as many plain tokens' time: the distance between the
two is the hysteresis."""

FIRST_WAIT, LAST_WAIT = 32, 512
"""Plain tokens before the first probe; the wait doubles with every probe in vain."""

NEW_REQUEST = 16
"""A new request, which may be of another kind, shortens the wait by this factor."""

REFRESH_EVERY = 96
"""Speculative rounds after which a plain one shows again what plain decoding costs."""

USUAL_EXTEND = 2.0
"""Tokens a draft's extend pass runs over in a usual round."""

BEHIND = 12
"""Tokens beyond which an extend pass is bringing a draft up to date."""


@dataclass
class GuardStats:
    """What a guard has seen and done.

    Attributes:
        n_rounds: Rounds, plain ones included.
        n_plain_rounds: Rounds decoded plainly.
        n_tokens: Tokens all rounds emitted.
        n_probes: Probes begun.
        n_returns: Probes that led back to speculation.
        n_leaves: Times speculation was left, probes excluded.
        gained_tokens: What speculation has gained so far (lost, below 0), in plain tokens' time.
        balance_tokens: What it may still lose.
        worst_request_tokens: The most that one request lost, from its best point on.
        drift: Time of a plain token over the profile's.
        guard_s: Seconds the guard itself took.
    """

    n_rounds: int = 0
    n_plain_rounds: int = 0
    n_tokens: int = 0
    n_probes: int = 0
    n_returns: int = 0
    n_leaves: int = 0
    gained_tokens: float = 0.0
    balance_tokens: float = 0.0
    worst_request_tokens: float = 0.0
    drift: float = 1.0
    guard_s: float = 0.0


class Guard:
    """Decides before every round whether it speculates.

    Args:
        tree: The tree of speculative rounds.
        prices: What rounds cost according to the profile.
        settings: What may be lost.
    """

    def __init__(
        self, tree: TreeConfig, prices: Prices, settings: GuardSettings | None = None
    ) -> None:
        self.tree = tree
        self.settings = settings or GuardSettings()
        self.stats = GuardStats(balance_tokens=self.settings.allowance_tokens)
        self._prices = prices
        self._stream = Ledger(self.settings.allowance_tokens, self.settings.tax)
        self._speed = Speed()
        self._round_prices: deque[float] = deque(maxlen=WINDOW)
        self._catch_up_rate: float | None = None
        self._state = "speculating"
        self._begin_spell(SPELL * self.settings.allowance_tokens)
        self._wait, self._waited = FIRST_WAIT, 0
        self._n_since_refresh, self._refresh_after = 0, FEW

    def request(self) -> "RequestGuard":
        """Return the guard of one more request."""
        return RequestGuard(self)

    def speculates(
        self, own: Ledger, *, n_behind: int, budget_left: int, context: int, is_new: bool
    ) -> bool:
        """Decide on the next round.

        Args:
            own: The request's own ledger.
            n_behind: Tokens of the request that its draft has not seen.
            budget_left: Tokens the request may still generate.
            context: Tokens in the target's cache.
            is_new: Whether this is the request's first round.
        """
        if self.stats.n_rounds < FEW:
            return False  # the price of a plain token comes first
        if self.settings.max_context is not None and context > self.settings.max_context:
            return False  # measured to lose there
        catch_up = self._catch_up(n_behind, context)
        if catch_up and budget_left < self.settings.min_new_tokens:
            return False
        loss = max(0.0, self._round_price(context) - 1)
        if self._state == "plain":
            wait = self._wait / NEW_REQUEST if is_new else self._wait
            budget = max(PROBE_LOSS, 2 * loss)
            if self._waited < wait or not self._can_pay(own, catch_up + budget):
                return False
            self._state = "probing"
            self.stats.n_probes += 1
            self._begin_spell(budget)
        if not self._spell.can_pay(loss) or not self._stream.can_pay(loss):
            self._leave()
            return False
        if self._n_since_refresh >= self._refresh_after:
            return False
        return self._can_pay(own, catch_up + loss)

    def settle(self, own: Ledger, done: "Round", seconds: float) -> None:
        """Enter a finished round in the books."""
        self.stats.n_rounds += 1
        self.stats.n_tokens += done.n_emitted
        modelled_s = self._prices.round_s(
            done.tree, min(done.n_extend, BEHIND), done.n_nodes, done.context, done.model_free
        )
        if done.tree.is_plain:
            self._speed.observe(True, seconds / modelled_s)
            self._settle_plain(done.n_emitted)
        else:
            self._settle_speculative(own, done, seconds, modelled_s)
        self.stats.balance_tokens = self._stream.balance
        self.stats.drift = self._speed.plain

    def _settle_plain(self, n_tokens: int) -> None:
        self.stats.n_plain_rounds += 1
        self._stream.settle(n_tokens, n_tokens)
        self._waited += n_tokens
        if self._n_since_refresh >= self._refresh_after:
            self._refresh_after = min(REFRESH_EVERY, 2 * self._refresh_after)
        self._n_since_refresh = 0

    def _settle_speculative(
        self, own: Ledger, done: "Round", seconds: float, modelled_s: float
    ) -> None:
        catch_up = self._catch_up(done.n_extend, done.context)
        plain_s = self._speed.plain * self._prices.plain_s(done.context)
        usual = self._speed.speculative * modelled_s / plain_s
        price = min(seconds / plain_s, OUTLIER * (usual + catch_up))
        if done.n_extend > BEHIND:
            self._catch_up_rate = max(0.0, price - usual) / done.n_extend
        else:
            self._speed.observe(False, seconds / modelled_s)
        for ledger in (self._stream, own):
            ledger.settle(done.n_emitted, price)
        lost = own.allowance - own.balance
        self.stats.worst_request_tokens = max(self.stats.worst_request_tokens, lost)
        self.stats.gained_tokens += done.n_emitted - price
        self._n_since_refresh += 1
        # Whether speculation pays is judged without the one-off price of coming back.
        price = max(0.0, price - catch_up)
        self._round_prices.append(price)
        self._spell.settle(done.n_emitted, price)
        self._spell_gain += done.n_emitted - price
        if self._state == "probing" and self._spell_gain >= PROBE_GAIN:
            self._state = "speculating"
            self.stats.n_returns += 1
            self._begin_spell(SPELL * self.settings.allowance_tokens)

    def _begin_spell(self, allowance: float) -> None:
        self._spell, self._spell_gain = Ledger(allowance), 0.0

    def _leave(self) -> None:
        """Decode plainly for a while: longer after a spell that lost, shortly after a good one."""
        if self._state == "speculating":
            self.stats.n_leaves += 1
        paid = self._state == "speculating" and self._spell_gain > 0
        self._wait = FIRST_WAIT if paid else min(LAST_WAIT, 2 * self._wait)
        self._state, self._waited = "plain", 0

    def _can_pay(self, own: Ledger, loss: float) -> bool:
        return self._stream.can_pay(loss) and own.can_pay(loss)

    def _round_price(self, context: int) -> float:
        """Return what a speculative round costs, in plain tokens: as lately, else as modelled."""
        if len(self._round_prices) >= FEW:
            return fmean(self._round_prices)
        price = self._prices.round(self.tree, USUAL_EXTEND, self.tree.nodes, context).total
        return price / self._prices.plain(context)

    def _catch_up(self, n_behind: int, context: int) -> float:
        """Return the price of bringing a draft up to date, in plain tokens."""
        if n_behind <= BEHIND:
            return 0.0
        if self._catch_up_rate is not None:
            return self._catch_up_rate * n_behind
        price = self._prices.prefill(n_behind) - self._prices.extend(USUAL_EXTEND, context)
        return max(0.0, price) / self._prices.plain(context)


class RequestGuard:
    """The guard of one request: the policy and the observer of its rounds.

    Whatever the stream has gained, a request of its own loses no more than the allowance.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._own = Ledger(guard.settings.allowance_tokens)
        self._is_new = True

    def tree(self, request: "Request") -> TreeConfig:
        """Choose the tree of the next round."""
        started = time.perf_counter()
        speculates = self._guard.speculates(
            self._own,
            n_behind=request.n_behind,
            budget_left=request.budget_left,
            context=request.cache.length,
            is_new=self._is_new,
        )
        self._is_new = False
        self._guard.stats.guard_s += time.perf_counter() - started
        return self._guard.tree if speculates else PLAIN

    def settle(self, done: "Round", seconds: float) -> None:
        """Take note of a finished round."""
        started = time.perf_counter()
        self._guard.settle(self._own, done, seconds)
        self._guard.stats.guard_s += time.perf_counter() - started
