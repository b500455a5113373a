"""Fitting the cost of a draft's share of a round to timed rounds.

All times are relative to a plain round at the same moment. Pure arithmetic: no engine, no files.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression

from profiles import RoundPoint, TreeConfig

if TYPE_CHECKING:
    from engine.rounds import RoundTime

Times = NDArray[np.float64]
Sizes = NDArray[np.integer[Any]] | NDArray[np.float64] | float

MIN_LEFT_OUT = 4
"""Fewer trees leave too little to fit when one is left out."""


@dataclass(frozen=True)
class Line:
    """A cost against a size: a point for size 1, whose kernels differ, and a line from 2 on."""

    one: float
    base: float
    slope: float

    def __call__(self, size: Sizes) -> Times:
        """Return the cost; sizes between 1 and 2 are interpolated."""
        sizes = np.asarray(size, dtype=float)
        two = self.base + 2 * self.slope
        small = self.one + (two - self.one) * np.clip(sizes - 1, 0, 1)
        cost = np.where(sizes < 2, small, self.base + self.slope * sizes)
        return np.maximum(cost, 0.0)  # below the smallest size that was timed

    @classmethod
    def fit(cls, sizes: Sequence[int], values: Sequence[float]) -> "Line":
        """Fit medians by size; every cost grows with the size or stays."""
        by_size: dict[int, list[float]] = defaultdict(list)
        for size, value in zip(sizes, values, strict=True):
            by_size[size].append(value)
        several = sorted(size for size in by_size if size > 1)
        base = slope = 0.0
        if several:
            line = LinearRegression(positive=True).fit(
                np.array([[size] for size in several], dtype=float),
                np.array([np.median(by_size[size]) for size in several]),
                sample_weight=np.array([len(by_size[size]) for size in several], dtype=float),
            )
            base, slope = float(line.intercept_), float(line.coef_[0])
        one = float(np.median(by_size[1])) if 1 in by_size else max(0.0, base + slope)
        return cls(one, base if several else one, slope)


@dataclass(frozen=True)
class DraftCost:
    """The draft's share of a round, relative to a plain round.

    Attributes:
        prefill: The first extend pass of a text, against the tokens of the prompt.
        extend: Any later extend pass, against the tokens it runs over.
        grow: Growing any tree.
        level: Each level after the first, against its width.
        commit: Keeping the accepted path.
        match: A hybrid's look for a model-free tree, in every round.
    """

    prefill: Line
    extend: Line
    grow: float
    level: Line
    commit: float
    match: float = 0.0

    def round(
        self, tree: TreeConfig, n_extend: Sizes, model_free: NDArray[np.bool_] | None = None
    ) -> Times:
        """Return the draft's and the commit's share of rounds with the given extend lengths.

        A hybrid's model-free rounds have neither extend pass nor levels.
        """
        levels = self.grow + (tree.depth - 1) * float(self.level(tree.width))
        drafting = self.extend(n_extend) + levels
        if model_free is not None:
            drafting = np.where(model_free, 0.0, drafting)
        return np.asarray(self.match + drafting + self.commit)


def fit_draft(times: "Sequence[RoundTime]") -> DraftCost:
    """Fit a draft's cost; times must be relative, i.e. divided by their reference."""
    firsts = [time for time in times if time.is_first]
    rounds = [time for time in times if not time.is_first]
    by_tree = grouped(rounds)
    extends = [time for time in rounds if time.n_extend]
    grow, level = _fit_levels(
        {tree: median(time.levels_s for time in group) for tree, group in by_tree.items()}
    )
    extend = Line.fit([t.n_extend for t in extends], [t.extend_s for t in extends])
    prefill = Line.fit([t.n_extend for t in firsts], [t.extend_s for t in firsts])
    return DraftCost(
        prefill=prefill if firsts else extend,
        extend=extend,
        grow=grow,
        level=level,
        commit=median(time.commit_s for time in rounds),
        match=median(time.match_s for time in rounds),
    )


def leave_one_out(
    draft: str, times: "Sequence[RoundTime]", verify: "Callable[[RoundTime], float]"
) -> list[RoundPoint]:
    """Predict every tree by a fit to all the others; empty if there are too few.

    Args:
        draft: The draft's name.
        times: Relative times of its rounds.
        verify: The relative cost of a round's verify pass.
    """
    by_tree = grouped(time for time in times if not time.is_first)
    if len(by_tree) < MIN_LEFT_OUT:
        return []
    points = []
    for tree, group in by_tree.items():
        cost = fit_draft([time for time in times if time.is_first or time.tree != tree])
        points.append(
            RoundPoint(
                draft=draft,
                tree=tree,
                nodes=float(np.mean([time.n_nodes for time in group])),
                relative=median(time.total_s for time in group),
                predicted=median(float(cost.round(tree, t.n_extend)) + verify(t) for t in group),
                left_out=True,
            )
        )
    return points


def relative(time: "RoundTime", unit: float = 1.0) -> "RoundTime":
    """Return a round with its times divided by its reference and multiplied by `unit`."""
    factor = unit / time.reference_s
    return replace(
        time,
        extend_s=factor * time.extend_s,
        levels_s=factor * time.levels_s,
        verify_s=factor * time.verify_s,
        commit_s=factor * time.commit_s,
        match_s=factor * time.match_s,
        total_s=factor * time.total_s,
        reference_s=unit,
    )


def grouped(times: "Iterable[RoundTime]") -> "dict[TreeConfig, list[RoundTime]]":
    """Return the speculative rounds by tree."""
    by_tree: dict[TreeConfig, list[RoundTime]] = defaultdict(list)
    for time in times:
        if not time.tree.is_plain:
            by_tree[time.tree].append(time)
    return dict(by_tree)


def median(values: Iterable[float]) -> float:
    """Return the median of any numbers."""
    return float(np.median(list(values)))


def _fit_levels(medians: Mapping[TreeConfig, float]) -> tuple[float, Line]:
    """Return the cost of growing any tree and of each further level against its width."""
    columns = [
        (n * (tree.width == 1), n * (tree.width > 1), n * tree.width * (tree.width > 1))
        for tree in medians
        for n in (tree.depth - 1,)
    ]
    fit = LinearRegression(positive=True).fit(
        np.array(columns, dtype=float), np.array(list(medians.values()))
    )
    one, base, slope = (float(c) for c in fit.coef_)
    if not any(tree.width > 1 for tree in medians):
        base = one
    if not any(tree.width == 1 and tree.depth > 1 for tree in medians):
        one = base + slope
    return max(0.0, float(fit.intercept_)), Line(one, base, slope)
