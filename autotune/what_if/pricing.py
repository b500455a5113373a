"""The price of a round under a scenario, tied to the rounds that were really replayed.

A draft does not always fill its tree (a lookup finds little, an answer ends), so the mean round
of a replayed tree is cheaper than its tables say. How many nodes it verified on average follows
from its stored round time, and is kept when conditions change.
"""

from dataclasses import dataclass

import numpy as np

from profiles import TreeConfig
from profiles.prices import Prices

from .basis import Basis, DraftBasis
from .scaling import Hardware
from .scenario import Scenario


@dataclass(frozen=True)
class Anchor:
    """What ties the tables' price of a verify pass to replayed rounds.

    Attributes:
        fill: Nodes verified on average, as a share of the tree's.
        ratio: Verify time of the replayed rounds over that of the tables at these nodes.
    """

    fill: float = 1.0
    ratio: float = 1.0


@dataclass(frozen=True)
class Conditions:
    """Under which conditions rounds are priced.

    Attributes:
        prompt, output: Tokens of the prompt and of the answer.
        context: Tokens in the cache of a typical round.
        scenario: What is asked to be different.
    """

    prompt: float
    output: int
    context: float
    scenario: Scenario = Scenario()

    @classmethod
    def of(cls, basis: Basis, scenario: Scenario) -> "Conditions":
        """Return those of a scenario; a typical round is halfway through the answer."""
        output = scenario.output_length or basis.output_length
        if scenario.context is None:
            return cls(basis.prompt_tokens, output, basis.prompt_tokens + output / 2, scenario)
        prompt = max(1.0, scenario.context - output / 2)
        return cls(prompt, output, float(scenario.context), scenario)


def anchor_of(draft: DraftBasis, tree: TreeConfig, usual: Conditions) -> Anchor:
    """Return the anchor of a tree, or that of the most similar tree that was replayed."""
    known = tree.canonical()
    if known not in draft.round_times:
        if not draft.replayed_sizes[0]:
            return Anchor()
        known = _nearest(draft, known)
    table = next(iter(draft.acceptance.values()))
    rest = round_parts(draft.prices, known, table.replayed[known], Anchor(), usual)
    round_time = draft.round_times[known] * draft.prices.plain(usual.context)
    verify = max(round_time - (rest.total - rest.verify), 1e-6)
    by_nodes = [draft.prices.verify(n, usual.context) for n in range(known.nodes + 1)]
    off = np.abs(np.array(by_nodes) - verify)
    n_nodes = int(np.flatnonzero(off <= off.min() + 1e-12)[-1])  # the most, where steps are flat
    return Anchor(fill=n_nodes / known.nodes, ratio=verify / by_nodes[n_nodes])


@dataclass(frozen=True)
class RoundParts:
    """One speculative round of all rows of a batch by part, in one unit.

    Attributes:
        prefill: The draft's pass over the prompt, spread over the rounds of an answer.
        extend, levels, verify, commit: By part.
        overhead: The fixed overhead asked for.
    """

    prefill: float = 0.0
    extend: float = 0.0
    levels: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """The whole round."""
        return float(sum(vars(self).values()))

    def times(self, unit: float) -> "RoundParts":
        """Return the parts in another unit."""
        return RoundParts(**{name: unit * value for name, value in vars(self).items()})


def round_parts(
    prices: Prices, tree: TreeConfig, tau: float, anchor: Anchor, conditions: Conditions
) -> RoundParts:
    """Return the price of a round, in units of the reference pass.

    Rows share each pass: a batch of rows of n tokens is taken for one pass of all their tokens,
    and every row but the first adds the reading of its own cache. Where batches were measured,
    the price is corrected to what they took.
    """
    scenario, context = conditions.scenario, conditions.context
    batch, n_nodes = scenario.batch, anchor.fill * tree.nodes
    verify = prices.verify(batch * (n_nodes + 1) - 1, context) + _caches(prices, batch, context)
    levels = prices.grow(context) + (tree.depth - 1) * prices.level(batch * tree.width, context)
    extend = prices.extend(batch * tau, context)
    n_rounds = max(1.0, (conditions.output - 1) / tau)
    # The first round of an answer has the prefill in place of a short extend pass.
    prefill = max(0.0, batch * prices.prefill(conditions.prompt) - extend) / n_rounds
    draft_cost = scenario.draft_cost * prices.batch_round(batch)
    verify_cost = scenario.verify_cost * prices.batch_round(batch)
    return RoundParts(
        prefill=draft_cost * prefill,
        extend=draft_cost * extend,
        levels=draft_cost * levels,
        verify=verify_cost * anchor.ratio * verify,
        commit=prices.batch_round(batch) * prices.commit(n_nodes, context),
        overhead=1e-3 * scenario.fixed_overhead / prices.reference_s,
    )


def plain_price(prices: Prices, conditions: Conditions) -> float:
    """Return the price of a plain token of every row of a batch."""
    batch, context = conditions.scenario.batch, conditions.context
    wider = prices.verify(batch - 1, context) - prices.verify(0, context)
    modelled = prices.plain(context) + max(0.0, wider) + _caches(prices, batch, context)
    return prices.batch_plain(batch) * modelled


def prefill_of(basis: Basis, prices: Prices, moved: Hardware, n_prompt: float) -> float:
    """Return the price of the target's pass over a prompt.

    Where it was not timed it is read off the verify passes, beyond the largest as a rule.
    """
    if basis.prefill_ms is None or not basis.prompt_tokens:
        return prices.verify(n_prompt - 1)
    # A prompt is bound by compute, so its time grows with its length.
    timed = 1e-3 * basis.prefill_ms / prices.reference_s
    return moved.compute * timed * n_prompt / basis.prompt_tokens


def _caches(prices: Prices, batch: int, context: float) -> float:
    """Return the price of reading the caches of all rows but the first."""
    per_token = (prices.plain(2e6) - prices.plain(1e6)) / 1e6  # beyond all tables it is linear
    return (batch - 1) * per_token * context


def _nearest(draft: DraftBasis, tree: TreeConfig) -> TreeConfig:
    trees, sizes = draft.replayed_sizes
    own = np.log([tree.depth, tree.width, tree.top_k, tree.nodes])
    return trees[int(np.abs(sizes - own).sum(axis=1).argmin())]
