"""What a round costs, in units of a plain round at the same moment.

`round = extend(accepted) + levels(depth, width) + verify(nodes) + commit`, fitted to rounds that
were timed as they are served. Pure arithmetic: no engine, no files.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LinearRegression

from profiles import CostModelSummary, CostTable, ErrorSummary, RoundPoint, TreeConfig

if TYPE_CHECKING:
    from engine.replay import ReplayedRounds
    from engine.rounds import RoundTime

Times = NDArray[np.float64]
Sizes = NDArray[np.integer[Any]] | float

HELD_OUT_EVERY = 4
"""Every fourth tree of a draft is left out of the fit, to test it."""


@dataclass(frozen=True)
class DraftCost:
    """The draft's share of a round, relative to a plain round.

    Attributes:
        extend_base, extend_token: Cost of an extend pass and of each token in it.
        levels_base, level, level_node: Cost of growing any tree, of each level after the first,
            and of each node expanded there.
        commit: Cost of keeping the accepted path.
        heldout_error: Relative errors of the predicted round time for trees left out.
    """

    extend_base: float
    extend_token: float
    levels_base: float
    level: float
    level_node: float
    commit: float
    heldout_error: ErrorSummary | None

    def round(self, tree: TreeConfig, n_extend: Sizes) -> Times:
        """Return the draft's and the commit's share of rounds with the given extend lengths."""
        n_levels = tree.depth - 1
        levels = self.levels_base + n_levels * (self.level + tree.width * self.level_node)
        extend = self.extend_base + self.extend_token * np.asarray(n_extend)
        return np.asarray(extend + levels + self.commit)


class CostModel:
    """Round time relative to a plain round.

    Args:
        probes: Rounds that verified known numbers of nodes, from a draft that costs nothing.
        rounds_by_draft: Timed rounds of every draft.

    Attributes:
        times: The timed rounds by draft; "" are the probes.
        reference_s: Seconds of a plain round.
        drafts: What each draft costs.
        rounds: The timed trees of every draft, next to what is predicted for them.
    """

    def __init__(
        self, probes: "Sequence[RoundTime]", rounds_by_draft: "Mapping[str, Sequence[RoundTime]]"
    ) -> None:
        self.times: dict[str, Sequence[RoundTime]] = {"": probes, **rounds_by_draft}
        self.reference_s = float(np.median([t.total_s for t in probes if t.tree.is_plain]))
        self._verify_x, self._verify_y = _verify_points(probes)
        self.rounds: list[RoundPoint] = []
        self._context = (min(t.context for t in probes), max(t.context for t in probes))
        self.drafts = {
            name: self._fit_draft(name, times) for name, times in rounds_by_draft.items()
        }

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest verify pass that was timed; beyond it nothing is known."""
        return int(self._verify_x[-1])

    def verify(self, n_nodes: Sizes) -> Times:
        """Return the cost of verify passes with that many draft nodes; 0 is a plain pass.

        Between timed points it is interpolated, beyond the last it is extended with the slope
        of the last step, which callers must flag (`max_nodes`).
        """
        x, y = self._verify_x, self._verify_y
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        beyond = np.maximum(np.asarray(n_nodes, dtype=float) - x[-1], 0.0)
        return np.asarray(np.interp(n_nodes, x, y) + slope * beyond)

    def round_times(self, draft: str, tree: TreeConfig, rounds: "ReplayedRounds") -> Times:
        """Return the relative time of each of the replayed rounds."""
        # The extend pass runs over what the round before emitted.
        n_extend = np.concatenate((rounds.n_emitted[:1], rounds.n_emitted[:-1]))
        speculative = self.drafts[draft].round(tree, n_extend) + self.verify(rounds.n_nodes)
        return np.where(rounds.depths > 0, speculative, 1.0)

    def predict(
        self, draft: str, tree: TreeConfig, replayed: Sequence["ReplayedRounds"]
    ) -> "Prediction":
        """Predict a tree's figures from its replayed rounds, one entry per text."""
        times = [
            self.round_times(draft, tree, rounds) for rounds in replayed if len(rounds.depths)
        ]
        n_rounds = sum(len(t) for t in times)
        n_tokens = sum(int(rounds.n_emitted.sum()) for rounds in replayed)
        return Prediction(
            tau=n_tokens / n_rounds,
            break_even_tau=float(sum(t.sum() for t in times)) / n_rounds,
        )

    def summary(self, draft: str) -> CostModelSummary:
        """Return the tables a profile keeps."""
        cost = self.drafts[draft]
        widths = [1.0, 2.0, 4.0, 8.0]
        tokens = [1.0, 2.0, 4.0, 8.0]
        tables = [
            CostTable(name="verify", x=self._verify_x.tolist(), relative=self._verify_y.tolist()),
            CostTable(
                name="extend",
                x=tokens,
                relative=[cost.extend_base + cost.extend_token * n for n in tokens],
            ),
            CostTable(
                name="level", x=widths, relative=[cost.level + cost.level_node * w for w in widths]
            ),
            CostTable(name="grow", x=[1.0], relative=[cost.levels_base]),
            CostTable(name="commit", x=[1.0], relative=[cost.commit]),
        ]
        return CostModelSummary(
            reference_ms=1e3 * self.reference_s,
            tables=tables,
            heldout_error=cost.heldout_error,
            valid={
                "nodes": (1.0, float(self.max_nodes)),
                "context": (float(self._context[0]), float(self._context[1])),
            },
        )

    def _fit_draft(self, name: str, times: "Sequence[RoundTime]") -> DraftCost:
        """Fit a draft's cost, test it on trees left out, and fit again on all of them."""
        by_tree: dict[TreeConfig, list[RoundTime]] = defaultdict(list)
        for time in times:
            if not time.tree.is_plain:
                by_tree[time.tree].append(time)
        trees = sorted(by_tree, key=lambda tree: (tree.depth, tree.width, tree.nodes))
        held_out = trees[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        error = None
        if held_out:
            kept = {tree: by_tree[tree] for tree in trees if tree not in held_out}
            trial = _fit_parts(kept, None)
            unseen = [self._point(name, trial, tree, by_tree[tree], True) for tree in held_out]
            self.rounds += unseen
            errors = [abs(point.predicted / point.relative - 1) for point in unseen]
            error = ErrorSummary(
                median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9))
            )
        cost = _fit_parts(by_tree, error)
        self.rounds += [
            self._point(name, cost, tree, by_tree[tree], False)
            for tree in trees
            if tree not in held_out
        ]
        return cost

    def _point(
        self,
        draft: str,
        cost: DraftCost,
        tree: TreeConfig,
        times: "Sequence[RoundTime]",
        left_out: bool,
    ) -> RoundPoint:
        predicted = (
            float(cost.round(tree, t.n_extend)) + float(self.verify(t.n_nodes)) for t in times
        )
        return RoundPoint(
            draft=draft,
            tree=tree,
            nodes=float(np.mean([t.n_nodes for t in times])),
            relative=_median(t.total_s / t.reference_s for t in times),
            predicted=_median(predicted),
            left_out=left_out,
        )


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a tree on recorded text."""

    tau: float
    break_even_tau: float

    @property
    def decode_speedup(self) -> float:
        """Predicted plain over speculative decoding time, prefill left out."""
        return self.tau / self.break_even_tau


def _verify_points(
    probes: "Sequence[RoundTime]",
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and relative verify times: monotone steps, and a 1-token pass of its own."""
    by_nodes: dict[int, list[float]] = defaultdict(list)
    for time in probes:
        by_nodes[time.n_nodes].append(time.verify_s / time.reference_s)
    x = np.array(sorted(by_nodes), dtype=float)
    y = np.array([np.median(by_nodes[int(n)]) for n in x])
    # One token runs on other kernels than several do: it is not part of the staircase.
    y[1:] = IsotonicRegression().fit_transform(x[1:], y[1:])
    return x, y


def _fit_parts(
    by_tree: "dict[TreeConfig, list[RoundTime]]", heldout_error: ErrorSummary | None
) -> DraftCost:
    times = [time for group in by_tree.values() for time in group]
    by_extend: dict[int, list[float]] = defaultdict(list)
    for time in times:
        by_extend[time.n_extend].append(time.extend_s / time.reference_s)
    extend = LinearRegression(positive=True).fit(
        np.array([[n] for n in by_extend], dtype=float),
        np.array([np.median(values) for values in by_extend.values()]),
        sample_weight=np.array([len(values) for values in by_extend.values()], dtype=float),
    )
    levels = LinearRegression(positive=True).fit(
        np.array([[t.depth - 1, (t.depth - 1) * t.width] for t in by_tree], dtype=float),
        np.array(
            [_median(t.levels_s / t.reference_s for t in group) for group in by_tree.values()]
        ),
    )
    return DraftCost(
        extend_base=max(0.0, float(extend.intercept_)),
        extend_token=float(extend.coef_[0]),
        levels_base=max(0.0, float(levels.intercept_)),
        level=float(levels.coef_[0]),
        level_node=float(levels.coef_[1]),
        commit=_median(t.commit_s / t.reference_s for t in times),
        heldout_error=heldout_error,
    )


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))
