"""The lookup draft: what it finds, how it scores it, and that it never looks ahead."""

import math
import random

import pytest
import torch

from engine.draft import DraftSession
from engine.lookup import MAX_OCCURRENCES, LookupDraft
from engine.timing import PhaseClock
from engine.tree import DraftTree
from profiles import TreeConfig

CLOCK = PhaseClock(torch.device("cpu"))


def propose(session: DraftSession, depth: int, width: int, top_k: int, nodes: int) -> DraftTree:
    tree = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes)
    return session.propose(tree, CLOCK)


def test_a_repeated_text_is_continued() -> None:
    """The chain below the last token is what followed it before."""
    session = LookupDraft(1, 3).open([1, 2, 3, 4, 5, 1, 2], 100)
    assert propose(session, 3, 1, 1, 3) == DraftTree([3, 4, 5], [0, 1, 2])
    session.commit([3], None)
    assert propose(session, 3, 1, 1, 3) == DraftTree([4, 5, 1], [0, 1, 2])


@pytest.mark.parametrize(("min_match", "found"), [(1, 1), (2, 2), (3, 0)])
def test_the_shortest_match_is_honoured(min_match: int, found: int) -> None:
    """(2, 3) occurred before, (1, 2, 3) did not: at least two tokens match, never three."""
    prompt = [9, 2, 3, 7, 3, 8, 1, 2, 3]
    tree = propose(LookupDraft(min_match, 4).open(prompt, 100), 1, 1, 2, 2)
    assert tree.tokens == {1: [7, 8], 2: [7], 0: []}[found]


def test_nothing_to_find_gives_an_empty_tree() -> None:
    """A text without repeats drafts nothing."""
    tree = propose(LookupDraft(1, 5).open([1, 2, 3], 100), 4, 2, 2, 8)
    assert tree == DraftTree([], [])


def test_longer_matches_come_first_and_scores_are_smoothed_counts() -> None:
    """After (1, 2): 3 twice; after (2) alone also 4. Escapes are 1 / (count + 1)."""
    prompt = [1, 2, 3, 0, 1, 2, 3, 0, 9, 2, 4, 0, 1, 2]
    draft = LookupDraft(1, 2)
    pool = draft.pools(prompt, None, [len(prompt) - 1], TreeConfig.chain(1))[0]
    p_three = 2 / 3 + 1 / 3 * 2 / 4
    assert pool.tokens == [3]
    assert pool.scores == pytest.approx([math.log(p_three)])
    pool = draft.pools(
        prompt, None, [len(prompt) - 1], TreeConfig(depth=1, width=1, top_k=3, nodes=1)
    )[0]
    assert pool.tokens == [3, 4]
    assert pool.scores == pytest.approx([math.log(p_three), math.log(1 / 3 * 1 / 4)])


def followers_of_path(
    text: list[int], path: list[int], min_match: int, max_match: int
) -> dict[int, float]:
    """Compute the smoothed probabilities below a drafted path by scanning the text."""
    found: dict[int, float] = {}
    escape = 1.0
    extended = text + path
    for size in range(max_match, min_match - 1, -1):
        suffix = extended[-size:]
        ends = [e for e in range(size, len(text)) if text[e - size : e] == suffix]
        ends = ends[-MAX_OCCURRENCES:]
        for end in ends:
            found[text[end]] = found.get(text[end], 0.0) + escape / (len(ends) + 1)
        escape /= (len(ends) + 1) if ends else 1
    return found


@pytest.mark.parametrize("seed", range(5))
def test_children_are_those_of_a_scan_of_the_text(seed: int) -> None:
    """Tokens and scores of every level equal a direct computation on the extended text."""
    rng = random.Random(seed)
    min_match, max_match = rng.choice([(1, 1), (1, 3), (2, 4), (1, 5)])
    text = [rng.randrange(3) for _ in range(150)]
    tree = TreeConfig(depth=3, width=2, top_k=2, nodes=3)
    (pool,) = LookupDraft(min_match, max_match).pools(text, None, [len(text) - 1], tree)
    paths: dict[int, list[int]] = {-1: []}
    for i, (token, parent, score) in enumerate(
        zip(pool.tokens, pool.parents, pool.scores, strict=True)
    ):
        paths[i] = [*paths[parent], token]
        # Counts are those of the committed text; the drafted tokens only extend the suffix.
        above = 0.0 if parent < 0 else pool.scores[parent]
        followers = followers_of_path(text, paths[parent], min_match, max_match)
        assert score - above == pytest.approx(math.log(followers[token]))
        assert sum(p > followers[token] + 1e-12 for p in followers.values()) < tree.top_k
    assert pool.level_ends[-1] == len(pool.tokens)


def test_a_pool_sees_nothing_after_its_root() -> None:
    """The pool at a root of a long text is the one of the text that ends there."""
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(60)]
    tree = TreeConfig(depth=3, width=3, top_k=3, nodes=3)
    draft = LookupDraft(1, 4)
    roots = list(range(5, 59))
    for root, pool in zip(roots, draft.pools(text, None, roots, tree), strict=True):
        assert pool == draft.pools(text[: root + 1], None, [root], tree)[0]


def test_only_recent_occurrences_count() -> None:
    """Beyond the limit the oldest occurrences are forgotten, so a query's time is bounded."""
    prompt = [1, 2] * MAX_OCCURRENCES + [1, 3] * MAX_OCCURRENCES + [1]
    (pool,) = LookupDraft(1, 1).pools(
        prompt, None, [len(prompt) - 1], TreeConfig(depth=1, width=1, top_k=5, nodes=1)
    )
    assert pool.tokens == [3]
