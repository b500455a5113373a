"""What a round costs, in units of a plain round at the same moment.

`round = extend(accepted) + levels(depth, width) + verify(nodes, context) + commit`, fitted to
rounds that were timed as they are served. Pure arithmetic: no engine, no files.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.isotonic import IsotonicRegression

from profiles import CostModelSummary, CostTable, ErrorSummary, RoundPoint, TreeConfig

from .fitting import DraftCost, Sizes, Times, fit_draft, leave_one_out, median, relative

if TYPE_CHECKING:
    from engine.contexts import ContextTime
    from engine.replay import ReplayedRounds
    from engine.rounds import RoundTime


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a tree on recorded text.

    Attributes:
        tau: Tokens per round.
        break_even_tau: Round time over plain token time, the draft's prefill spread over the
            rounds of its text.
    """

    tau: float
    break_even_tau: float

    @property
    def decode_speedup(self) -> float:
        """Predicted plain over speculative decoding time; the target's prefill is left out."""
        return self.tau / self.break_even_tau


@dataclass(frozen=True)
class ContextCost:
    """What a longer context costs, linear between two that were timed.

    Attributes:
        reference: The context at which a plain pass costs 1.
        plain: What a plain pass costs more per token of context.
        node: What a verified node costs more per token of context.
        span: The contexts that were timed.
    """

    reference: float
    plain: float = 0.0
    node: float = 0.0
    span: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def fit(cls, times: "Sequence[ContextTime]", reference: float) -> "ContextCost":
        """Fit the medians of passes of two sizes behind two contexts."""
        groups: dict[tuple[int, int], list[float]] = defaultdict(list)
        for time in times:
            groups[time.context, time.n_nodes].append(time.seconds)
        short, long = min(time.context for time in times), max(time.context for time in times)
        n_nodes, length = max(time.n_nodes for time in times), long - short
        if length == 0:
            return cls(reference, span=(short, long))
        growth = {
            n: (median(groups[long, n]) - median(groups[short, n])) / length for n in (0, n_nodes)
        }
        at_short = median(groups[short, 0])
        # A pause during a long pass must not price a shorter context at nothing, or below.
        unit = max(0.5 * at_short, at_short + growth[0] * (reference - short))
        plain = max(0.0, growth[0])
        node = max(0.0, growth[n_nodes] - plain) / n_nodes
        return cls(reference, plain / unit, node / unit, (short, long))


class CostModel:
    """Round time relative to a plain round.

    Args:
        probes: Rounds that verified known numbers of nodes, from a draft that costs nothing.
        rounds_by_draft: Timed rounds of every draft.
        contexts: Passes behind a short and a long context; without them context is free.

    Attributes:
        times: The timed rounds by draft; "" are the probes.
        reference_s: Seconds of a plain round.
        drafts: What each draft costs.
        rounds: The timed trees of every draft, each as predicted by a fit that never saw it.
    """

    def __init__(
        self,
        probes: "Sequence[RoundTime]",
        rounds_by_draft: "Mapping[str, Sequence[RoundTime]]",
        contexts: "Sequence[ContextTime]" = (),
    ) -> None:
        self.times: dict[str, Sequence[RoundTime]] = {"": probes, **rounds_by_draft}
        plain = [time for time in probes if time.tree.is_plain]
        self.reference_s = median(time.total_s for time in plain)
        reference = median(time.context for time in plain)
        self._context = (
            ContextCost.fit(contexts, reference) if contexts else ContextCost(reference)
        )
        seen = [time.context for group in self.times.values() for time in group]
        self._contexts = min(*self._context.span, *seen), max(*self._context.span, *seen)
        self._verify_x, self._verify_y = self._fit_verify(probes)
        self.drafts: dict[str, DraftCost] = {}
        self.rounds: list[RoundPoint] = []
        for name, times in rounds_by_draft.items():
            scaled = list(self._relative(times))
            self.drafts[name] = fit_draft(scaled)
            self.rounds += leave_one_out(
                name, scaled, lambda time: float(self.verify(time.n_nodes, time.context))
            )
        self._variant_of: dict[str, str] = {}

    def share(self, variant_of: "Mapping[str, str]") -> None:
        """Let drafts cost what others do of which they are variants."""
        for name, base in variant_of.items():
            self.drafts[name] = self.drafts[base]
            self._variant_of[name] = base

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest verify pass that was timed; beyond it nothing is known."""
        return int(self._verify_x[-1])

    def plain(self, context: Sizes) -> Times:
        """Return the cost of plain passes behind that many tokens."""
        extra = np.asarray(context, dtype=float) - self._context.reference
        return np.asarray(np.maximum(1 + self._context.plain * extra, 0.0))

    def verify(self, n_nodes: Sizes, context: Sizes | None = None) -> Times:
        """Return the cost of verify passes with that many draft nodes; 0 is a plain pass.

        Between timed sizes it is interpolated, beyond the last it is extended with the slope
        of the last step, which callers must flag (`max_nodes`).

        Args:
            n_nodes: Draft nodes.
            context: Tokens before them; the reference's if None.
        """
        x, y = self._verify_x, self._verify_y
        sizes = np.asarray(n_nodes, dtype=float)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        at_reference = np.interp(sizes, x, y) + slope * np.maximum(sizes - x[-1], 0.0)
        if context is None:
            return np.asarray(at_reference)
        extra = np.asarray(context, dtype=float) - self._context.reference
        surplus = extra * (self._context.plain + sizes * self._context.node)
        return np.asarray(np.maximum(at_reference + surplus, 0.0))

    def round_times(
        self, draft: str, tree: TreeConfig, rounds: "ReplayedRounds", n_prompt: int
    ) -> Times:
        """Return the relative time of each replayed round of a text.

        The draft's prefill is part of the first round in which it runs.
        """
        cost = self.drafts[draft]
        context = n_prompt + np.cumsum(rounds.n_emitted) - rounds.n_emitted
        n_extend = rounds.n_extend
        speculative = cost.round(tree, n_extend, rounds.model_free)
        speculative = speculative + self.verify(rounds.n_nodes, context)
        first = np.flatnonzero(rounds.extends)[:1]
        speculative[first] += cost.prefill(context[first]) - cost.extend(n_extend[first])
        return np.where(rounds.depths > 0, speculative, self.plain(context))

    def expected(self, draft: str, timed: "RoundTime") -> float:
        """Return what a timed round was expected to take, in units of its own reference."""
        cost = self.drafts[draft].round(timed.tree, timed.n_extend)
        cost = cost + self.verify(timed.n_nodes, timed.context)
        return float(cost / self.plain(timed.context))

    def predict(
        self,
        draft: str,
        tree: TreeConfig,
        replayed: Sequence["ReplayedRounds"],
        n_prompts: Sequence[int],
    ) -> Prediction:
        """Predict a tree's figures from its replayed rounds.

        Args:
            draft: The draft's name.
            tree: The tree.
            replayed: Its rounds, one entry per text.
            n_prompts: Tokens of each text's prompt.
        """
        n_rounds = n_tokens = 0
        rounds_s = plain_s = 0.0
        for rounds, n_prompt in zip(replayed, n_prompts, strict=True):
            n = int(rounds.n_emitted.sum())
            n_rounds, n_tokens = n_rounds + len(rounds.depths), n_tokens + n
            rounds_s += float(self.round_times(draft, tree, rounds, n_prompt).sum())
            plain_s += float(self.plain(n_prompt + np.arange(n)).sum())
        return Prediction(
            tau=n_tokens / n_rounds,
            break_even_tau=(rounds_s / n_rounds) / (plain_s / n_tokens),
        )

    def heldout_error(self, draft: str) -> ErrorSummary | None:
        """Return the error of the round time on trees left out; None if none could be."""
        draft = self._variant_of.get(draft, draft)
        errors = [
            abs(point.predicted / point.relative - 1)
            for point in self.rounds
            if point.draft == draft
        ]
        if not errors:
            return None
        return ErrorSummary(median=median(errors), p90=float(np.quantile(errors, 0.9)))

    def summary(self, draft: str) -> CostModelSummary:
        """Return the tables a profile keeps."""
        draft = self._variant_of.get(draft, draft)
        cost = self.drafts[draft]
        sizes = [1.0, 2.0, 8.0]
        prompts = sorted({float(t.n_extend) for t in self.times[draft] if t.is_first})
        tables = [
            *self._context_tables(),
            CostTable(name="extend", x=sizes, relative=cost.extend(np.array(sizes)).tolist()),
            CostTable(name="level", x=sizes, relative=cost.level(np.array(sizes)).tolist()),
            CostTable(name="grow", x=[1.0], relative=[cost.grow]),
            CostTable(name="commit", x=[1.0], relative=[cost.commit]),
            CostTable(name="match", x=[1.0], relative=[cost.match]),
        ]
        if prompts:
            ends = sorted({prompts[0], prompts[-1]})
            costs = cost.prefill(np.array(ends)).tolist()
            tables.append(CostTable(name="prefill", x=ends, relative=costs))
        return CostModelSummary(
            reference_ms=1e3 * self.reference_s,
            tables=tables,
            heldout_error=self.heldout_error(draft),
            valid={"nodes": (1.0, float(self.max_nodes)), "context": self._contexts},
        )

    def _context_tables(self) -> list[CostTable]:
        """Return what depends on the context: at both ends of the timed range, if it has two."""
        contexts = sorted(set(self._contexts))
        return [
            CostTable(name="plain", x=contexts, relative=self.plain(np.array(contexts)).tolist()),
            *(
                CostTable(
                    name="verify",
                    at={"context": context},
                    x=self._verify_x.tolist(),
                    relative=self.verify(self._verify_x, context).tolist(),
                )
                for context in contexts
            ),
        ]

    def _fit_verify(self, probes: "Sequence[RoundTime]") -> tuple[Times, Times]:
        """Return nodes and verify costs: monotone steps, and a 1-token pass of its own."""
        by_nodes: dict[int, list[float]] = defaultdict(list)
        for time in self._relative(probes):
            extra = time.context - self._context.reference
            surplus = extra * (self._context.plain + time.n_nodes * self._context.node)
            by_nodes[time.n_nodes].append(time.verify_s - surplus)
        x = np.array(sorted(by_nodes), dtype=float)
        y = np.array([np.median(by_nodes[int(n)]) for n in x])
        # One token runs on other kernels than several do: it is not part of the staircase.
        y[1:] = IsotonicRegression().fit_transform(x[1:], y[1:])
        return x, y

    def _relative(self, times: "Sequence[RoundTime]") -> "Iterator[RoundTime]":
        """Yield rounds relative to a plain round behind the reference's context."""
        for time in times:
            yield relative(time, float(self.plain(time.context)))
