"""Model-free drafting: what followed the end of the text where it occurred before.

Suffix Decoding (arXiv 2411.04975) on a trie of counts. A token's probability blends the followers
of every match length, the longest first, with an escape to the next shorter one (prediction by
partial matching, Cleary and Witten 1984). How far a match of some length is to be believed is
learnt from the text itself: a long match in a repetitive text is nearly certain, a match of one
token hardly says anything. Needs no weights and no accelerator, and its time does not grow with
the text.
"""

import copy
import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .suffix_trie import END, Place, SuffixTrie
from .timing import PhaseClock
from .tree import DraftTree, Pool, best

MAX_FOLLOWERS = 32
"""Latest followers of an n-gram that are looked at; bounds the time of a query."""

MIN_ESCAPE = 0.02
"""Probability below which shorter matches are not looked at any more."""

PRIOR_WEIGHT = 5
"""Observations that the belief held beforehand in matches of some length counts for."""

Matches = Sequence[Sequence[Place]]
"""For every trie the suffixes of a text that it holds, by their length from 0."""


def prior_belief(length: int) -> float:
    """Return how often a match of that many tokens goes on as before, in texts of all kinds."""
    return float(min(0.98, 1 - 0.8 * 0.6 ** (length - 1)))


class History:
    """Earlier answers, the latest `max_tokens` tokens of them at most.

    When it is full the older half is dropped and the rest is indexed anew, which costs every
    token at most one more indexing in the long run.
    """

    def __init__(self, max_tokens: int, max_length: int) -> None:
        self._max_tokens = max_tokens
        self._max_length = max_length
        self._answers: deque[list[int]] = deque()
        self.n_tokens = 0
        self.trie = SuffixTrie(max_length)

    def add(self, answer: list[int]) -> None:
        """Add a finished answer."""
        answer = answer[-self._max_tokens :]
        self._answers.append(answer)
        self.n_tokens += len(answer)
        if self.n_tokens <= self._max_tokens:
            self.trie.push_document(answer)
            return
        while len(self._answers) > 1 and 2 * self.n_tokens > self._max_tokens:
            self.n_tokens -= len(self._answers.popleft())
        self.trie = SuffixTrie(self._max_length)  # requests in flight keep the one they began with
        for kept in self._answers:
            self.trie.push_document(kept)


class SuffixDraft:
    """The suffix draft.

    Args:
        min_match: Shortest suffix of the text, in tokens, whose followers are proposed.
        max_match: Longest suffix looked up.
        min_probability: Nodes whose path is less likely are not proposed.
        history: Tokens of earlier answers that are looked up as well.
    """

    kind = "suffix"
    feature_layers: tuple[int, ...] = ()
    max_top_k = MAX_FOLLOWERS
    max_positions = None

    def __init__(
        self,
        min_match: int = 1,
        max_match: int = 16,
        min_probability: float = 0.0,
        history: int = 0,
    ) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.min_probability = min_probability
        self.history = history
        self._earlier = self._no_history()

    def _no_history(self) -> History | None:
        return History(self.history, self.max_match + 1) if self.history else None

    def open(self, prompt: list[int], n_max: int) -> "SuffixSession":
        """Start a request; see `Draft.open`."""
        session = SuffixSession(self, None if self._earlier is None else self._earlier.trie)
        session.commit(prompt, None)
        return session

    def fresh(self) -> "SuffixDraft":
        """Return this draft without earlier answers; see `HistoryDraft.fresh`."""
        twin = copy.copy(self)
        twin._earlier = self._no_history()
        return twin

    def remember(self, answer: list[int]) -> None:
        """Look up a finished answer from now on; see `HistoryDraft.remember`."""
        if self._earlier is not None:
            self._earlier.add(answer)

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the pool at every root of a known text; see `Draft.pools`."""
        session = self.open([], len(tokens))
        pools = []
        for start, root in zip([-1, *roots], roots, strict=False):
            session.commit(tokens[start + 1 : root + 1], None)
            pools.append(session.pool(tree))
        return pools


class SuffixSession:
    """The n-grams of one request's text, and where its end occurred before; see `DraftSession`."""

    def __init__(self, draft: SuffixDraft, earlier: SuffixTrie | None) -> None:
        self._min_match = draft.min_match
        self._max_match = draft.max_match
        self._min_score = math.log(draft.min_probability) if draft.min_probability else -math.inf
        self._text = SuffixTrie(draft.max_match + 1)
        self._tries = [self._text] if earlier is None else [self._text, earlier]
        self._matches: Matches = [[trie.root] for trie in self._tries]
        # By length of the longest match: how often it occurred, and went on as before.
        self._n_matches = [PRIOR_WEIGHT] * (draft.max_match + 1)
        self._n_right = [PRIOR_WEIGHT * prior_belief(n) for n in range(draft.max_match + 1)]

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Append tokens to the text."""
        earlier = self._matches[1:]
        for token in tokens:
            length = len(self._text.suffixes) - 1
            self._n_matches[length] += 1
            self._n_right[length] += self._text.push(token)
            if earlier:
                earlier = self._advanced(earlier, self._tries[1:], token)
        self._matches = [self._text.suffixes, *earlier]

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree:
        """Return the tree below the last committed token; empty if nothing matches."""
        clock.lap("extend")
        growing = shaper if shaper and shaper.stops_early else None
        pool = self.pool(tree, growing)
        selected = shaper.select(pool) if shaper else pool.select(tree.nodes)
        clock.lap("levels")
        return selected

    def pool(self, tree: TreeConfig, shaper: Shaper | None = None) -> Pool:
        """Grow the candidates below the last committed token."""
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        level_ends: list[int] = []
        frontier = [(-1, 0.0, self._matches)]
        for depth in range(1, tree.depth + 1):
            start = len(tokens)
            origins = []
            for parent, score, matches in frontier:
                for token, probability in self._likeliest(matches, tree.top_k):
                    child_score = score + math.log(probability)
                    if child_score < self._min_score:
                        break
                    tokens.append(token)
                    parents.append(parent)
                    scores.append(child_score)
                    origins.append(matches)
            level_ends.append(len(tokens))
            if depth == tree.depth or (shaper and not shaper.goes_deeper(scores[start:], depth)):
                break
            frontier = []
            for i in best(scores[start:], tree.width):
                matches = self._advanced(origins[i], self._tries, tokens[start + i])
                frontier.append((start + i, scores[start + i], matches))
        return Pool(tokens, parents, scores, level_ends)

    def _advanced(
        self, matches: Matches, tries: Sequence[SuffixTrie], token: int
    ) -> list[list[Place]]:
        """Return the matches of a text that is longer by one token."""
        return [
            trie.advanced(places, token, self._max_match)
            for trie, places in zip(tries, matches, strict=True)
        ]

    def _likeliest(self, matches: Matches, top_k: int) -> list[tuple[int, float]]:
        """Return the `top_k` likeliest next tokens and their probabilities."""
        probabilities: dict[int, float] = {}
        escape = 1.0
        n_known = [0] * len(matches)
        for length in range(max(map(len, matches)) - 1, self._min_match - 1, -1):
            belief = self._n_right[length] / self._n_matches[length]
            for i, places in enumerate(matches):
                if length >= len(places):
                    continue
                n = self._tries[i].n_followers(places[length])
                if n == n_known[i]:
                    continue  # the same occurrences as those of the longer match
                n_known[i] = n
                share = escape * belief / n
                for token, count in self._tries[i].followers(places[length], MAX_FOLLOWERS):
                    probabilities[token] = probabilities.get(token, 0.0) + share * count
                escape *= 1 - belief
            if escape < MIN_ESCAPE:
                break
        probabilities.pop(END, None)
        return sorted(probabilities.items(), key=lambda item: -item[1])[:top_k]
