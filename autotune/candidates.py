"""Trees that may win, with what is known of each, and the ways to pick among them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from profiles import TreeConfig

from .cost import Prediction
from .space import DEFAULTS, SearchSpace

PLAIN_PREDICTION = Prediction(tau=1.0, break_even_tau=1.0)


@dataclass(frozen=True)
class Candidate:
    """A draft and a tree, with what is known of it.

    Attributes:
        draft: The draft's name.
        tree: The tree, in canonical form.
        prediction: From replay and the cost model.
        speedup: Measured on the tune prompts, end to end; None if it was not, or if the
            measurement was stopped early because it was clearly behind or did not fit memory.
        ratios: The speedups by prompt, as far as measured.
    """

    draft: str
    tree: TreeConfig
    prediction: Prediction
    speedup: float | None = None
    ratios: tuple[float, ...] = field(default=())


def leaders(
    predicted: Sequence[Candidate], n: int, variant_of: Mapping[str, str] | None = None
) -> list[Candidate]:
    """Return the `n` best predicted candidates, no two of them next to each other.

    Trees that differ by a step in the node budget or in a knob of the draft alone predict alike;
    measuring both would tell little.
    """
    chosen: list[Candidate] = []
    seen: set[tuple[str, int, int, int]] = set()
    for candidate in sorted(predicted, key=lambda c: -c.prediction.decode_speedup):
        tree = candidate.tree
        draft = (variant_of or {}).get(candidate.draft, candidate.draft)
        family = (draft, tree.depth, tree.width, tree.top_k)
        if family not in seen:
            seen.add(family)
            chosen.append(candidate)
        if len(chosen) == n:
            break
    return chosen


def best_chain(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the chain with the best predicted speedup."""
    chains = [c for c in candidates if c.tree.is_chain]
    return max(chains, key=lambda c: c.prediction.decode_speedup, default=None)


def best_shallow(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the tree of at most two levels with the best predicted speedup."""
    shallow = [c for c in candidates if c.tree.depth <= 2]
    return max(shallow, key=lambda c: c.prediction.decode_speedup, default=None)


def defaults_within(spaces: Mapping[str, SearchSpace]) -> list[tuple[str, TreeConfig]]:
    """Return the usual settings that are legal for each neural draft."""
    return [
        (draft, tree.canonical())
        for draft, space in spaces.items()
        for tree in DEFAULTS
        if space.contains(tree)
    ]
