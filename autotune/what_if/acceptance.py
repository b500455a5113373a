"""Tokens per round from acceptance tables: for trees that were never replayed, or "what if".

A table says how often the child of rank r at depth d was right. From it follows the best static
tree and its expected tokens (Sequoia, arXiv 2402.12374). A real draft ranks its nodes anew each
round and its rounds start at the hard places, so the table alone is off; how far is known where
trees of the same draft were replayed, and the curve through them corrects it. Pure arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from profiles import Acceptance, ErrorSummary, TreeConfig

PRIOR_TRIES = 5.0
"""Weight, in tries, of the depth before where few nodes of a depth were tried."""

MAX_CALIBRATION_TREES = 400
"""Replayed trees that a correction is fitted to and tested on."""

Rates = NDArray[np.float64]
"""[depth - 1, rank - 1]: share of expanded nodes whose child of that rank is right."""


def rates_of(table: Acceptance) -> Rates:
    """Return a table's rates; a depth tried seldom leans on the depth before it."""
    n_ranks = max((len(row) for row in table.accepted), default=0)
    rates: list[Rates] = []
    for tried, row in zip(table.tried, table.accepted, strict=True):
        counts = np.zeros(n_ranks)
        counts[: len(row)] = row
        if rates:
            rates.append((counts + PRIOR_TRIES * rates[-1]) / (tried + PRIOR_TRIES))
        else:
            rates.append(counts / max(1, tried))
    return np.array(rates).reshape(len(rates), n_ranks)


def rates_of_rows(rows: Sequence[Sequence[float]]) -> Rates:
    """Return rates given as rows of possibly unequal length."""
    rates = np.zeros((len(rows), max(map(len, rows))))
    for i, row in enumerate(rows):
        rates[i, : len(row)] = row
    return rates


def scaled_rates(rates: Rates, factor: float) -> Rates:
    """Return all rates times a factor; no node's children become right more often than always."""
    scaled = rates * factor
    total = scaled.sum(axis=1, keepdims=True)
    return np.asarray(scaled / np.maximum(total, 1.0))


def static_tau(rates: Rates, tree: TreeConfig) -> float:
    """Return the expected tokens per round of the best static tree of this shape.

    Each level expands the `width` likeliest nodes into `top_k` children; the likeliest `nodes` of
    all levels are kept. Depths beyond the table repeat its last row.
    """
    if tree.is_plain or not rates.size:
        return 1.0
    level, best = np.ones(1), np.zeros(0)
    for depth in range(tree.depth):
        children = rates[min(depth, len(rates) - 1), : tree.top_k]
        level = np.outer(level, children[children > 0]).ravel()
        best = -np.sort(-np.concatenate([best, level]))[: tree.nodes]
        if not level.size or (len(best) == tree.nodes and level.max() <= best[-1]):
            break  # nothing below is likelier
        level = -np.sort(-level)[: min(tree.width, tree.nodes)]
    return 1.0 + float(best.sum())


@dataclass(frozen=True)
class Tau:
    """Tokens per round, and how sure that is.

    Attributes:
        value: Tokens per round.
        is_replayed: Whether recorded text was replayed; else tables were used.
        error: Relative error by tables on trees whose replayed value is known; None if none is.
    """

    value: float
    is_replayed: bool
    error: ErrorSummary | None = None


@dataclass(frozen=True)
class TauTable:
    """Tokens per round of any tree of one draft in one domain.

    Attributes:
        rates: Acceptance by depth and rank.
        replayed: The replayed value of every tree that was scored.
    """

    rates: Rates
    replayed: Mapping[TreeConfig, float]

    def tau(self, tree: TreeConfig, factor: float = 1.0, *, replay: bool = True) -> Tau:
        """Return a tree's tokens per round.

        Args:
            tree: The tree.
            factor: Times every rate of acceptance; other than 1 it is hypothetical.
            replay: Take the replayed value where there is one; False for a domain that is not
                the profile's own.
        """
        if tree.is_plain:
            return Tau(1.0, is_replayed=True)
        known = self.replayed.get(tree.canonical())
        if known is not None and factor == 1 and replay:
            return Tau(known, is_replayed=True)
        own = static_tau(self.rates, tree) - 1
        if known is None or not replay:
            scale, exponent = self._correction
            known = 1 + scale * own**exponent if own > 0 else 1.0
        if factor == 1 or own <= 0:
            value = known
        else:
            # Relative, and so exact where the factor comes near 1.
            changed = static_tau(scaled_rates(self.rates, factor), tree) - 1
            value = 1 + (known - 1) * changed / own
        return Tau(min(value, tree.depth + 1.0), is_replayed=False, error=self.error)

    @cached_property
    def _correction(self) -> tuple[float, float]:
        tables, replayed = self._gains
        return _power_law(tables, replayed)

    @cached_property
    def error(self) -> ErrorSummary | None:
        """Relative error of tables against replay: fitted on every other tree, tested on the rest.

        None where no tree was replayed.
        """
        tables, replayed = self._gains
        if len(tables) < 4:
            return None
        scale, exponent = _power_law(tables[::2], replayed[::2])
        by_table = 1 + scale * tables[1::2] ** exponent
        errors = np.abs(by_table / (1 + replayed[1::2]) - 1)
        return ErrorSummary(median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9)))

    @cached_property
    def _gains(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return tau - 1 by table and by replay for trees spread over all that were scored."""
        trees = [tree for tree in self.replayed if not tree.is_plain]
        trees = trees[:: max(1, len(trees) // MAX_CALIBRATION_TREES)]
        tables = np.array([static_tau(self.rates, tree) - 1 for tree in trees])
        replayed = np.array([self.replayed[tree] - 1 for tree in trees])
        usable = (tables > 0) & (replayed > 0)
        return tables[usable], replayed[usable]


def _power_law(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return (a, b) of y = a * x**b, least squares in logarithms; y = x where points are few."""
    if len(x) < 2 or np.ptp(x) < 1e-9:
        return 1.0, 1.0
    exponent, scale = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(scale)), max(0.0, float(exponent))
