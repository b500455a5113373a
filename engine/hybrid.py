"""A hybrid draft: model-free rounds where the text repeats, a neural draft's rounds elsewhere.

In each round the model-free draft is asked first, which costs next to nothing. If its tree
promises enough tokens it is verified and the neural draft does not run at all; that one catches
up over the tokens it missed, with the target's features, in its next own round.
"""

import math
from dataclasses import replace

from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .draft import Draft, DraftSession, fresh
from .pending_tree import PendingTree
from .suffix import SuffixDraft, SuffixSession
from .timing import PhaseClock
from .tree import DraftTree, Pool

MATCH_WIDTH = 2
"""Width and top-k of a model-free round's tree: where it is taken, its first choice is good."""


class HybridDraft:
    """A neural draft that lets a model-free one take the rounds that it is good at.

    Both see the same prefix and the rule looks at nothing else, so replay stays exact.

    Args:
        head: The neural draft.
        suffix: The model-free draft.
        match_nodes: Most nodes of a model-free round, which may be a chain of them.
        match_tau: Expected tokens from which a round is model-free. Where lambda is the tokens
            per plain-token time that decoding reaches, a round is better model-free if it is
            ahead of a round of the head by more than lambda times the difference in price; both
            are typical figures of the pair, so the rule comes down to this number.
    """

    kind = "hybrid"

    def __init__(
        self, head: Draft, suffix: SuffixDraft, *, match_nodes: int, match_tau: float
    ) -> None:
        self.head = head
        self.suffix = suffix
        self.match_nodes = match_nodes
        self.match_tau = match_tau
        n = match_nodes
        self._match_tree = TreeConfig(depth=n, width=MATCH_WIDTH, top_k=MATCH_WIDTH, nodes=n)
        self.feature_layers = head.feature_layers
        self.max_top_k = head.max_top_k
        self.max_positions = head.max_positions

    def open(self, prompt: list[int], n_max: int) -> "HybridSession":
        """Start a request; see `Draft.open`."""
        return HybridSession(self, prompt, n_max)

    def remember(self, answer: list[int]) -> None:
        """Take note of a finished answer; see `HistoryDraft.remember`."""
        self.suffix.remember(answer)

    def never_matching(self) -> "HybridDraft":
        """Return this draft with every round the head's, to time both parts of its rounds."""
        return self._with(self.head, self.suffix, math.inf)

    def fresh(self) -> "HybridDraft":
        """Return this draft without a memory of earlier answers; see `HistoryDraft.fresh`."""
        return self._with(fresh(self.head), self.suffix.fresh(), self.match_tau)

    def _with(self, head: Draft, suffix: SuffixDraft, match_tau: float) -> "HybridDraft":
        return HybridDraft(head, suffix, match_nodes=self.match_nodes, match_tau=match_tau)

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the pool of every root: the head's, or the whole tree of a model-free round."""
        session = self.suffix.open(tokens[: roots[0]], len(tokens))
        pools: dict[int, Pool] = {}
        committed = roots[0]
        for root in roots:
            session.commit(tokens[committed : root + 1], None)
            committed = root + 1
            pool = self.match(session, len(tokens) - committed)
            if pool is not None:
                pools[root] = pool
        others = [root for root in roots if root not in pools]
        if others:
            pools |= zip(others, self.head.pools(tokens, features, others, tree), strict=True)
        return [pools[root] for root in roots]

    def match(self, session: SuffixSession, n_left: int) -> Pool | None:
        """Return the tree of a model-free round, None if the head shall have it.

        Args:
            session: The model-free draft's state.
            n_left: Tokens the text may still grow by; the last of them needs no draft.
        """
        tree = self._match_tree.limited(n_left - 1)
        if tree.is_plain:
            return None
        pool = session.pool(tree).whole(tree.nodes)
        expected = 1 + sum(math.exp(score) for score in pool.scores)
        return pool if expected >= self.match_tau else None


class HybridSession:
    """The states of both drafts for one request; see `DraftSession`."""

    def __init__(self, draft: HybridDraft, prompt: list[int], n_max: int) -> None:
        self._draft = draft
        self._n_left = n_max - len(prompt)
        self._suffix = draft.suffix.open(prompt, n_max)
        self.head: DraftSession = draft.head.open(prompt, n_max)

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Take note of committed tokens; the head runs over them in its next own round."""
        self._n_left -= len(tokens)
        self._suffix.commit(tokens, features)
        self.head.commit(tokens, features)

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree | PendingTree:
        """Return the tree below the last committed token; adds the lap "match" as well.

        A shaper knows what the head's scores are worth, so it shapes the head's trees alone.
        """
        free = self.matched(clock)
        return self.head.propose(tree, clock, shaper) if free is None else free

    def matched(self, clock: PhaseClock) -> DraftTree | None:
        """Return the tree of a model-free round, None if the head shall have it."""
        pool = self._draft.match(self._suffix, self._n_left)
        clock.lap("match")
        return None if pool is None else replace(pool.tree(), model_free=True)
