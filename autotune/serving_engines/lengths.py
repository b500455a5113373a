"""Which settings to measure: one run at the longest chain tells how often each place of it is
right, and with that the tokens per round of every shorter one. Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from profiles import DraftRef
from profiles.prices import interpolate

from ..cost import Prediction
from .interface import Speculation
from .turns import Work

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Chains that are considered, the longest one of a draft apart."""


@dataclass
class Family:
    """A draft with its knobs, in chains of any length up to a longest one.

    Attributes:
        draft: Its name.
        ref: The draft.
        longest: Its longest chain, measured first.
        known: What chains did that were measured, by length.
        failed: Lengths that could not be run.
    """

    draft: str
    ref: DraftRef
    longest: int
    known: dict[int, Work] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def speculation(self, depth: int) -> Speculation:
        """Return the setting of a length."""
        return Speculation(self.draft, self.ref, depth)

    @property
    def lengths(self) -> list[int]:
        """All lengths that are considered."""
        return [length for length in LENGTHS if length < self.longest] + [self.longest]

    @property
    def rates(self) -> list[float]:
        """How often a round accepted at least one, two, ... tokens, from the longest chain run."""
        work = self.known[max(self.known)]
        return [accepted / work.n_rounds for accepted in work.counts.by_position]

    def predict(self, depth: int, plain: Work) -> Prediction:
        """Return tokens per round and break-even of a length; a measured one has its own."""
        if depth in self.known:
            work = self.known[depth]
            return Prediction(work.tau, work.round_s / plain.round_s)
        lengths = sorted(self.known)
        prices = [self.known[length].round_s / plain.round_s for length in lengths]
        price = interpolate(([0, *lengths], [1.0, *prices]), depth)
        return Prediction(1 + sum(self.rates[:depth]), price)


def next_setting(families: Sequence[Family], plain: Work | None) -> Speculation | None:
    """Return the setting to measure next; None if the most promising one was measured.

    The longest chain of every family comes first. Then, with times between those of the lengths
    measured so far, the setting with the best predicted speedup.

    Args:
        families: What there is; what was measured stands in them.
        plain: What plain decoding did; needed once a chain was measured.
    """
    for family in families:
        if not family.known and not family.failed:
            return family.speculation(family.longest)
    if plain is None:
        return None
    predicted = [
        (family.predict(depth, plain).decode_speedup, family, depth)
        for family in families
        if family.known
        for depth in family.lengths
        if depth not in family.failed
    ]
    if not predicted:
        return None
    _, family, depth = max(predicted, key=lambda item: item[0])
    return None if depth in family.known else family.speculation(depth)
