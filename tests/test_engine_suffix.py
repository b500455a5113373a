"""The lookup and suffix drafts: what they find, how they score it, what they remember."""

import math
import random

import pytest
import torch

from engine.draft import DraftSession
from engine.lookup import LookupDraft
from engine.suffix import (
    MAX_FOLLOWERS,
    MIN_ESCAPE,
    PRIOR_WEIGHT,
    History,
    SuffixDraft,
    prior_belief,
)
from engine.suffix_trie import Place, SuffixTrie
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


def test_b24_nothing_to_find_gives_an_empty_tree() -> None:
    """A text without repeats drafts nothing."""
    tree = propose(LookupDraft(1, 5).open([1, 2, 3], 100), 4, 2, 2, 8)
    assert tree == DraftTree([], [])


def belief(text: list[int], length: int, max_match: int) -> float:
    """Compute how often a longest match of `length` tokens went on as before, by scanning."""
    n, n_right = float(PRIOR_WEIGHT), PRIOR_WEIGHT * prior_belief(length)
    for end in range(1, len(text)):
        before = text[:end]
        longest = max((m for m in range(max_match + 1) if occurrences(before, m)), default=0)
        if longest == length:
            n += 1
            suffix = before[end - length :]
            n_right += any(
                before[e] == text[end]
                for e in range(length, end)
                if before[e - length : e] == suffix
            )
    return n_right / n


def occurrences(text: list[int], length: int) -> list[int]:
    """Return what followed the last `length` tokens where they occurred before."""
    if length > len(text):
        return []
    suffix = text[len(text) - length :]
    return [text[e] for e in range(length, len(text)) if text[e - length : e] == suffix]


def followers_of_path(
    text: list[int], path: list[int], min_match: int, max_match: int
) -> dict[int, float]:
    """Compute the probabilities below a drafted path by scanning the text."""
    found: dict[int, float] = {}
    escape, known = 1.0, 0
    extended = text + path
    for size in range(min(max_match, len(extended)), min_match - 1, -1):
        suffix = extended[len(extended) - size :]
        after = [text[e] for e in range(size, len(text)) if text[e - size : e] == suffix]
        if len(after) > known and escape >= MIN_ESCAPE:
            known = len(after)
            believed = belief(text, size, max_match)
            for token in after:
                found[token] = found.get(token, 0.0) + escape * believed / len(after)
            escape *= 1 - believed
    return found


@pytest.mark.parametrize("seed", range(6))
def test_children_are_those_of_a_scan_of_the_text(seed: int) -> None:
    """Tokens and scores of every level equal a direct computation on the extended text: the
    followers of ever shorter matches, each believed as far as such matches were right so far."""
    rng = random.Random(seed)
    min_match, max_match = rng.choice([(1, 1), (1, 3), (2, 4), (1, 5)])
    text = [rng.randrange(3) for _ in range(90)]
    tree = TreeConfig(depth=3, width=2, top_k=2, nodes=3)
    (pool,) = SuffixDraft(min_match, max_match).pools(text, None, [len(text) - 1], tree)
    assert pool.tokens
    paths: dict[int, list[int]] = {-1: []}
    for i, (token, parent, score) in enumerate(
        zip(pool.tokens, pool.parents, pool.scores, strict=True)
    ):
        paths[i] = [*paths[parent], token]
        above = 0.0 if parent < 0 else pool.scores[parent]
        followers = followers_of_path(text, paths[parent], min_match, max_match)
        assert score - above == pytest.approx(math.log(followers[token]))
        assert sum(p > followers[token] + 1e-12 for p in followers.values()) < tree.top_k
    assert pool.level_ends[-1] == len(pool.tokens)


@pytest.mark.parametrize("history", [0, 50])
def test_a_pool_sees_nothing_after_its_root(history: int) -> None:
    """The pool at a root of a long text is the one of the text that ends there, and the one that
    a request proposes from whose text came in pieces."""
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(60)]
    tree = TreeConfig(depth=3, width=3, top_k=3, nodes=3)
    draft = SuffixDraft(1, 4, 0.01, history)
    draft.remember([rng.randrange(4) for _ in range(40)])
    roots = list(range(5, 59))
    session = draft.open(text[:5], 100)
    for root, pool in zip(roots, draft.pools(text, None, roots, tree), strict=True):
        session.commit(text[root : root + 1], None)
        assert pool == draft.pools(text[: root + 1], None, [root], tree)[0]
        assert pool == session.pool(tree)


def test_unlikely_paths_are_left_out() -> None:
    """Only nodes whose path is likely enough are proposed, and they are those of the full pool."""
    rng = random.Random(2)
    text = [rng.randrange(3) for _ in range(80)]
    tree = TreeConfig(depth=4, width=4, top_k=3, nodes=4)
    (every,) = SuffixDraft(1, 4).pools(text, None, [79], tree)
    (likely,) = SuffixDraft(1, 4, 0.1).pools(text, None, [79], tree)
    kept = sorted(score for score in every.scores if score >= math.log(0.1))
    assert 0 < len(kept) < len(every.scores)
    assert sorted(likely.scores) == pytest.approx(kept)


def test_long_matches_are_believed_more_than_short_ones_and_less_where_they_fail() -> None:
    """A repeated text is nearly certain to go on; a single known token is not; and in a text where
    single tokens never go on as before, they are believed less and less."""
    chain = TreeConfig.chain(1)
    passage = list(range(100, 120))

    def p_next(text: list[int]) -> float:
        return math.exp(SuffixDraft().pools(text, None, [len(text) - 1], chain)[0].scores[0])

    assert p_next(passage + passage[:15]) > 0.95
    assert p_next([*passage, 100]) < 0.3
    unlike = [token for i in range(40) for token in (7, 200 + i)]
    assert p_next([*unlike, 7]) < p_next([7, 200, 7]) / 4


def test_a_loop_is_drafted_beyond_its_period() -> None:
    """Drafted tokens extend the suffix, so a loop goes on however short the text is."""
    tree = TreeConfig.chain(12)
    (pool,) = SuffixDraft(1, 4).pools([5, 6, 5, 6, 5], None, [4], tree)
    assert pool.tokens == [6, 5] * 6


def test_earlier_answers_are_found_and_forgotten_in_bounds() -> None:
    """With a history an answer given before is proposed again, not across two answers; the oldest
    go first when it is full; without a history nothing is kept."""
    chain = TreeConfig.chain(3)
    answers = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]

    def proposed(draft: SuffixDraft, token: int) -> list[int]:
        return draft.open([token], 10).pool(chain).tokens

    draft = SuffixDraft(history=8)
    for answer in answers[:2]:
        draft.remember(answer)
    assert proposed(draft, 2) == [3, 4]  # and not 5, of the next answer
    assert proposed(draft, 5) == [6, 7, 8]
    draft.remember(answers[2])  # one too many: only what fits the newer half is kept
    assert [proposed(draft, answer[0]) for answer in answers] == [[], [], [10, 11, 12]]
    assert proposed(draft.fresh(), 9) == []
    for forgetful in (SuffixDraft(), LookupDraft()):
        forgetful.remember(answers[0])
        assert proposed(forgetful, 1) == []


def test_a_history_keeps_to_its_size() -> None:
    """However many answers there are, at most the given number of tokens is indexed."""
    history, rng = History(100, 4), random.Random(0)
    for _ in range(60):
        history.add([rng.randrange(50) for _ in range(rng.randint(1, 150))])
        assert history.n_tokens <= 100


def test_an_answer_in_progress_keeps_the_history_it_began_with() -> None:
    """A history that is rebuilt meanwhile changes nothing for a request in flight."""
    draft = SuffixDraft(history=6)
    draft.remember([1, 2, 3])
    session = draft.open([9], 10)
    for answer in ([4, 4, 4], [5, 5, 5], [6, 6, 6]):
        draft.remember(answer)
    session.commit([1], None)
    assert session.pool(TreeConfig.chain(2)).tokens == [2, 3]


def test_the_likeliest_of_the_text_and_of_earlier_answers_come_first() -> None:
    """The longer match decides, wherever it was found."""
    chain = TreeConfig.chain(1)
    draft = SuffixDraft(history=100)
    draft.remember([1, 2, 3, 77])
    assert draft.open([3, 88, 1, 2, 3], 10).pool(chain).tokens == [77]
    assert draft.open([1, 2, 3, 88, 0, 1, 2, 3], 10).pool(chain).tokens == [88]


def test_a_proposal_takes_no_more_steps_in_a_longer_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at for a proposal is bounded by the knobs, not by the length of the text."""
    n_seen = []
    followers = SuffixTrie.followers

    def counted(trie: SuffixTrie, place: Place, n: int) -> list[tuple[int, int]]:
        found = list(followers(trie, place, n))
        n_seen[-1] += len(found)
        return found

    monkeypatch.setattr(SuffixTrie, "followers", counted)
    for n in (4000, 32_000):
        rng = random.Random(3)
        text = [int(rng.gammavariate(1.2, 40)) for _ in range(n)]
        n_seen.append(0)
        session = SuffixDraft(1, 8).open(text, n)
        session.pool(TreeConfig(depth=4, width=3, top_k=3, nodes=8))
        assert len(session._text.suffixes) <= 9
    assert n_seen[1] <= (1 + 3 * 3) * 8 * MAX_FOLLOWERS
    assert n_seen[1] < 2 * n_seen[0]
