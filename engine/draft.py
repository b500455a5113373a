"""What every draft offers the decoder: one interface, whatever proposes the tokens."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .pending_tree import PendingTree
from .timing import PhaseClock
from .tree import DraftTree, Pool


class DraftSession(Protocol):
    """A draft's state for one request.

    The state after `commit` depends on the committed tokens and their target features alone,
    never on trees proposed before: this is what makes replay exact.
    """

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Take note of committed tokens.

        Args:
            tokens: Token ids that follow the ones committed so far, at least one.
            features: Target features [n, n_features * hidden] of the next n tokens without
                features; afterwards every committed token but the last has its own. None for
                drafts without `feature_layers`.
        """

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree | PendingTree:
        """Return the tree to verify below the last committed token.

        With a shaper it may have fewer levels and nodes, otherwise all that were asked for. Adds
        laps "extend" (bringing the state up to date) and "levels" to the clock.
        """


class Draft(Protocol):
    """Something that proposes tokens: a head, a small model, or a lookup."""

    @property
    def kind(self) -> str:
        """eagle3, model, lookup, suffix or hybrid."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target features it reads (indices into `hidden_states`); empty for none."""

    @property
    def max_top_k(self) -> int:
        """Distinct tokens it can propose below one node."""

    @property
    def max_positions(self) -> int | None:
        """Tokens of a text it can read, None for any number; beyond them rounds are plain."""

    def open(self, prompt: list[int], n_max: int) -> DraftSession:
        """Start a request whose text will not exceed `n_max` tokens; the prompt is committed."""

    def pools(
        self,
        tokens: list[int],
        features: Tensor | None,
        roots: list[int],
        tree: TreeConfig,
    ) -> list[Pool]:
        """Return the candidate pool at every root of a known text, as `propose` would grow it.

        Args:
            tokens: The whole text.
            features: Target features of every token of it, or None.
            roots: Positions in `tokens`, ascending; the pool of a root sees nothing after it.
            tree: Depth, width and top-k of the pools; the node budget is not applied.
        """


@runtime_checkable
class HistoryDraft(Draft, Protocol):
    """A draft that can look back at earlier answers.

    What it remembers belongs to one decoder. It changes between requests only, so that within
    one the trees depend on the prefix alone.
    """

    def fresh(self) -> "HistoryDraft":
        """Return this draft, weights shared, without a memory of earlier answers."""

    def remember(self, answer: list[int]) -> None:
        """Take note of the tokens of a finished answer."""


def fresh(draft: Draft) -> Draft:
    """Return a draft whose memory of earlier answers, if it has any, is empty and its own."""
    return draft.fresh() if isinstance(draft, HistoryDraft) else draft


def remember(draft: Draft | None, answer: list[int]) -> None:
    """Tell a draft of a finished answer; most have no use for it."""
    if isinstance(draft, HistoryDraft):
        draft.remember(answer)
