"""The cost tables of one device and pair, moved to another: two rooflines.

A pass over n tokens takes `overhead + max(memory, n * compute)` at best: the weights are read
once, the products grow with n. The measured table over that roofline is kept as the pass's own
inefficiency, and the roofline under it is moved (Williams et al., "Roofline", CACM 2009). Pure
arithmetic on tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from profiles import CostModelSummary, CostTable
from profiles.prices import interpolate


@dataclass(frozen=True)
class Hardware:
    """How passes change: all factors of time, 1 leaves it as it is.

    Attributes:
        memory: On the time to read the weights: below 1 is a faster memory.
        compute: On the time of the products.
    """

    memory: float = 1.0
    compute: float = 1.0

    def times(self, size: float) -> "Hardware":
        """Return the same with a model of another size."""
        return Hardware(self.memory * size, self.compute * size)

    @property
    def changes_nothing(self) -> bool:
        """Whether times stay as they are."""
        return self.memory == self.compute == 1.0


@dataclass(frozen=True)
class Roofline:
    """Where a model's passes are bound by memory, and where by compute.

    Attributes:
        overhead: Part of every pass that is neither.
        memory: Time of reading the weights once.
        token: Time of one token's products.
    """

    overhead: float
    memory: float
    token: float

    @classmethod
    def of(cls, tokens: Sequence[float], times: Sequence[float], overhead: float) -> "Roofline":
        """Fit to a table: the smallest pass is memory, the slope of the upper half is compute."""
        upper = len(tokens) - max(2, len(tokens) // 2)
        slope = 0.0
        if len(tokens) > 1:
            slope = float(np.polyfit(tokens[upper:], times[upper:], 1)[0])
        return cls(overhead, max(times[0] - overhead, 1e-9), max(0.0, slope))

    def bound(self, n_tokens: float, by: Hardware) -> float:
        """Return the time of a pass at best, without its overhead, on other hardware."""
        return max(self.memory * by.memory, n_tokens * self.token * by.compute)

    def moved(self, n_tokens: float, time: float, by: Hardware) -> float:
        """Return a pass's time on other hardware, its inefficiency kept."""
        above = max(0.0, time - self.overhead) / self.bound(n_tokens, Hardware())
        return self.overhead + above * self.bound(n_tokens, by)

    def knee(self, by: Hardware) -> float:
        """Return the tokens from which compute binds; infinite where it never does."""
        per_token = self.token * by.compute
        return self.memory * by.memory / per_token if per_token > 0 else float("inf")


def target_roofline(summary: CostModelSummary, overhead: float = 0.0) -> Roofline | None:
    """Return the roofline of the target's passes, in reference passes; None without a table."""
    table = next((t for t in summary.tables if t.name == "verify"), None)
    if table is None or len(table.x) < 2:
        return None
    return Roofline.of([x + 1 for x in table.x], table.relative, overhead)


def moved_summary(
    summary: CostModelSummary, target: Hardware, draft: Hardware, overhead: float = 0.0
) -> CostModelSummary:
    """Return the cost model on other hardware, still in units of the old reference pass.

    Args:
        summary: The fitted cost model.
        target, draft: What changes for the passes of each.
        overhead: Part of every target pass that is neither memory nor compute, in reference
            passes.
    """
    if target.changes_nothing and draft.changes_nothing:
        return summary
    roofline = target_roofline(summary, overhead) or Roofline(overhead, 1 - overhead, 0.0)
    tables = [_moved_table(table, roofline, target, draft) for table in summary.tables]
    if all(table.name != "plain" for table in tables):
        plain = roofline.moved(1, 1.0, target)
        tables.append(CostTable(name="plain", x=[0.0], relative=[plain]))
    return summary.model_copy(update={"tables": tuple(tables)})


def _moved_table(
    table: CostTable, roofline: Roofline, target: Hardware, draft: Hardware
) -> CostTable:
    name, x = table.name, list(table.x)
    if name == "verify":
        knee = roofline.knee(target) - 1  # in nodes
        if x[0] < knee < x[-1] and knee not in x:
            x = sorted([*x, knee])
        return _mapped(table, x, lambda n, time: roofline.moved(n + 1, time, target))
    if name == "plain":  # x is the context
        return _mapped(table, x, lambda _, time: roofline.moved(1, time, target))
    if name == "grow":
        return _mapped(table, x, lambda _, time: time * draft.memory)
    if name == "prefill":  # the draft's, as long as the prompt: bound by compute
        return _mapped(table, x, lambda _, time: time * draft.compute)
    if name in ("extend", "level"):
        own = Roofline.of(table.x, table.relative, 0.0)
        return _mapped(table, x, lambda n, time: own.moved(n, time, draft))
    return table


def _mapped(
    table: CostTable, x: list[float], change: Callable[[float, float], float]
) -> CostTable:
    points = (table.x, table.relative)
    relative = [change(n, interpolate(points, n)) for n in x]
    return table.model_copy(update={"x": tuple(x), "relative": tuple(relative)})
