"""Model-free drafting: continuations of n-grams that occurred before in the request's own text.

Needs no weights and no accelerator. A node's children are scored by blending the followers of
its n-gram at every match length, longest first, with an escape to the next shorter one
(prediction by partial matching, Cleary and Witten 1984, method A).
"""

import math
from bisect import bisect_left

from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .timing import PhaseClock
from .tree import DraftTree, Pool, best

MAX_OCCURRENCES = 32
"""Most recent occurrences of an n-gram that are counted; bounds the time of a query."""


class LookupDraft:
    """The lookup draft.

    Args:
        min_match: Shortest n-gram, in tokens, whose followers are proposed.
        max_match: Longest n-gram looked up.
    """

    kind = "lookup"
    feature_layers: tuple[int, ...] = ()
    max_top_k = MAX_OCCURRENCES
    max_positions = None

    def __init__(self, min_match: int = 1, max_match: int = 5) -> None:
        self.min_match = min_match
        self.max_match = max_match

    def open(self, prompt: list[int], n_max: int) -> "LookupSession":
        """Start a request; see `Draft.open`."""
        session = LookupSession(self.min_match, self.max_match)
        session.commit(prompt, None)
        return session

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the pool at every root of a known text; see `Draft.pools`."""
        session = LookupSession(self.min_match, self.max_match)
        session.commit(tokens, None)
        return [session.pool(root + 1, tree) for root in roots]


class LookupSession:
    """An index of every n-gram of the text so far; see `DraftSession`."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes = range(max_match, min_match - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Append tokens and index the n-grams that they complete."""
        for token in tokens:
            end = len(self._tokens)  # position of the follower of the n-grams indexed here
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(self._tokens[end - size :])
                    self._ends.setdefault(ngram, []).append(end)
            self._tokens.append(token)

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree:
        """Return the tree below the last committed token; empty if nothing matches."""
        clock.lap("extend")
        pool = self.pool(len(self._tokens), tree, shaper)
        selected = shaper.select(pool) if shaper else pool.select(tree.nodes)
        clock.lap("levels")
        return selected

    def pool(self, n_seen: int, tree: TreeConfig, shaper: Shaper | None = None) -> Pool:
        """Grow the candidates below token `n_seen - 1`, as if the text ended there."""
        context = tuple(self._tokens[max(0, n_seen - self._sizes.start) : n_seen])
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        contexts: list[tuple[int, ...]] = []
        level_ends: list[int] = []
        frontier = [(-1, 0.0, context)]
        for depth in range(1, tree.depth + 1):
            start = len(tokens)
            for parent, score, suffix in frontier:
                for token, probability in self._followers(suffix, n_seen, tree.top_k):
                    tokens.append(token)
                    parents.append(parent)
                    scores.append(score + math.log(probability))
                    contexts.append((*suffix, token)[-self._sizes.start :])
            level_ends.append(len(tokens))
            if shaper and depth < tree.depth and not shaper.goes_deeper(scores[start:], depth):
                break
            beam = best(scores[start:], tree.width)
            frontier = [(start + i, scores[start + i], contexts[start + i]) for i in beam]
        return Pool(tokens, parents, scores, level_ends)

    def _followers(
        self, suffix: tuple[int, ...], n_seen: int, top_k: int
    ) -> list[tuple[int, float]]:
        """Return the `top_k` likeliest next tokens and their smoothed probabilities."""
        probabilities: dict[int, float] = {}
        escape = 1.0
        for size in self._sizes:
            if size > len(suffix):
                continue
            ends = self._ends.get(suffix[len(suffix) - size :])
            if not ends:
                continue
            n_before = bisect_left(ends, n_seen)
            recent = ends[max(0, n_before - MAX_OCCURRENCES) : n_before]
            share = escape / (len(recent) + 1)
            for end in reversed(recent):
                token = self._tokens[end]
                probabilities[token] = probabilities.get(token, 0.0) + share
            escape = share
        return sorted(probabilities.items(), key=lambda item: -item[1])[:top_k]
