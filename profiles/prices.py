"""What a round costs according to a profile: its cost tables, read.

Plain arithmetic on a few points, fast enough to be asked before every round. All prices are in
units of the reference 1-token pass unless the name ends in `_s`. Knows nothing of how the tables
were measured or fitted.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .summaries import CostModelSummary, CostTable
from .tree import TreeConfig

Points = tuple[Sequence[float], Sequence[float]]
"""A function by its points: x, increasing, and the price at each x."""


@dataclass(frozen=True)
class RoundPrice:
    """The price of one round by part, in units of the reference pass.

    Attributes:
        extend: Bringing the draft's state up to date.
        levels: Growing the tree; a hybrid's look for a model-free one is part of it.
        verify: The target's pass.
        commit: Keeping the accepted path.
    """

    extend: float
    levels: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        """The whole round."""
        return self.extend + self.levels + self.verify + self.commit


class Prices:
    """The cost tables of one profile as functions.

    `round = extend(n) + grow + (depth - 1) * level(width) + verify(nodes) + commit(nodes)`; plain
    decoding pays `plain(context)` per token. A part may have several tables, each `at` a context:
    between contexts it is interpolated. A part without a table is free, plain is 1.

    Args:
        summary: The profile's cost model.
    """

    def __init__(self, summary: CostModelSummary) -> None:
        self.reference_s = 1e-3 * summary.reference_ms
        self._valid = summary.valid
        self._tables: dict[str, list[tuple[float | None, CostTable]]] = {}
        for table in summary.tables:
            self._tables.setdefault(table.name, []).append((table.at.get("context"), table))
        for group in self._tables.values():
            group.sort(key=lambda item: item[0] or 0.0)

    @property
    def usual_context(self) -> float:
        """The middle of the measured contexts, where one price has to stand for all."""
        return sum(self._valid.get("context", (0.0, 0.0))) / 2

    @property
    def longest_context(self) -> float:
        """The longest context that was measured; 0 if none was."""
        return self._valid.get("context", (0.0, 0.0))[1]

    def plain(self, context: float = 0.0) -> float:
        """Return the price of a plain token with that many tokens in the cache."""
        return self._price("plain", context, context) if "plain" in self._tables else 1.0

    def plain_s(self, context: float = 0.0) -> float:
        """Return the seconds of a plain token."""
        return self.reference_s * self.plain(context)

    def prefill(self, n_tokens: float) -> float:
        """Return the price of a draft's first pass, over a prompt of that many tokens."""
        return self._price("prefill", n_tokens, 0.0)

    def extend(self, n_tokens: float, context: float = 0.0) -> float:
        """Return the price of a draft's pass over the tokens committed since its last one."""
        return self._price("extend", n_tokens, context)

    def grow(self, context: float = 0.0) -> float:
        """Return the price of growing any tree, its first level included."""
        return self._price("grow", 1.0, context)

    def level(self, width: float, context: float = 0.0) -> float:
        """Return the price of one more level of that width."""
        return self._price("level", width, context)

    def verify(self, n_nodes: float, context: float = 0.0) -> float:
        """Return the price of the target's pass over the root and that many nodes."""
        if "verify" not in self._tables:
            return self.plain(context)
        return self._price("verify", n_nodes, context)

    def commit(self, n_nodes: float, context: float = 0.0) -> float:
        """Return the price of keeping the accepted path."""
        return self._price("commit", n_nodes, context)

    def match(self, context: float = 0.0) -> float:
        """Return the price of a hybrid's look for a model-free tree."""
        return self._price("match", 1.0, context)

    def batch_plain(self, batch: int) -> float:
        """Return measured over modelled time of a plain round with so many rows; 1 if unknown."""
        return self._batch_factor("batch_plain", batch)

    def batch_round(self, batch: int) -> float:
        """Return the same of a speculative round."""
        return self._batch_factor("batch_round", batch)

    def round(
        self,
        tree: TreeConfig,
        n_extend: float,
        n_nodes: float,
        context: float = 0.0,
        model_free: bool = False,
    ) -> RoundPrice:
        """Return the price of a round.

        Args:
            tree: The tree asked for; depth 0 is a plain round.
            n_extend: Tokens the draft's extend pass runs over.
            n_nodes: Nodes verified, at most `tree.nodes`: a lookup may find fewer.
            context: Tokens in the target's cache.
            model_free: Whether it is a model-free round of a hybrid, whose head does not run.
        """
        if tree.is_plain:
            return RoundPrice(0.0, 0.0, self.plain(context), 0.0)
        extend = levels = 0.0
        if not model_free:
            extend = self.extend(n_extend, context)
            levels = self.grow(context) + (tree.depth - 1) * self.level(tree.width, context)
        return RoundPrice(
            extend=extend,
            levels=levels + self.match(context),
            verify=self.verify(n_nodes, context),
            commit=self.commit(n_nodes, context),
        )

    def round_s(
        self,
        tree: TreeConfig,
        n_extend: float,
        n_nodes: float,
        context: float = 0.0,
        model_free: bool = False,
    ) -> float:
        """Return the seconds of a round; arguments as for `round`."""
        price = self.round(tree, n_extend, n_nodes, context, model_free)
        return self.reference_s * price.total

    def is_measured(self, **sizes: float) -> bool:
        """Tell whether all sizes lie in the measured range, e.g. `nodes=12, context=300`.

        Beyond it prices are extended with the slope of the last step: callers must say so.
        """
        return all(
            self._valid[name][0] <= size <= self._valid[name][1]
            for name, size in sizes.items()
            if name in self._valid
        )

    def _batch_factor(self, name: str, batch: int) -> float:
        """Return a factor of measured batches; beyond the largest, that of the largest."""
        if name not in self._tables:
            return 1.0
        largest = self._tables[name][0][1].x[-1]
        return self._price(name, min(float(batch), largest), 0.0)

    def _price(self, part: str, x: float, context: float) -> float:
        group = self._tables.get(part)
        if group is None:
            return 0.0
        if len(group) == 1:
            return interpolate((group[0][1].x, group[0][1].relative), x)
        contexts = [at or 0.0 for at, _ in group]
        prices = [interpolate((table.x, table.relative), x) for _, table in group]
        return interpolate((contexts, prices), context)


def interpolate(points: Points, x: float) -> float:
    """Return the price at x: linear between points, the first price before them.

    Beyond the last point it goes on with the slope of the last step, but never falls.
    """
    xs, ys = points
    i = bisect_right(xs, x)
    if i == 0 or len(xs) == 1:
        return ys[0]
    if i == len(xs):
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return ys[-1] + max(0.0, slope) * (x - xs[-1])
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
