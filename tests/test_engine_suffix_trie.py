"""The suffix trie: counts of every n-gram and its followers, against counting by hand."""

import random
from collections import Counter

import pytest

from engine.suffix_trie import END, SuffixTrie

MAX_LENGTH = 5


def count_followers(text: list[int], ngram: list[int]) -> Counter[int]:
    """Count what follows an n-gram, document by document."""
    n = len(ngram)
    found: Counter[int] = Counter()
    for i in range(len(text) - n):
        if text[i : i + n] == ngram and END not in ngram:
            found[text[i + n]] += 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_suffixes_and_followers_are_those_counted_by_hand(seed: int) -> None:
    """For random texts of few tokens, in one or several documents, at every position: the suffixes
    held are those that occurred before, and their followers have the counts of the whole text."""
    rng = random.Random(seed)
    trie, text, document = SuffixTrie(MAX_LENGTH), [], []
    for _ in range(150):
        if rng.random() < 0.03:
            trie.push_document([])
            text, document = [*text, END], []
            continue
        token = rng.randrange(1 + seed % 4)
        longest = len(trie.suffixes) - 1
        expected = count_followers(text, document[len(document) - longest :])
        assert trie.push(token) == (expected[token] > 0 if longest else token in text)
        text, document = [*text, token], [*document, token]
        suffixes = trie.suffixes
        for length in range(1, min(MAX_LENGTH, len(document)) + 1):
            expected = count_followers(text, document[-length:])
            if length == MAX_LENGTH:
                break
            if length >= len(suffixes):
                assert not expected
                continue
            assert dict(trie.followers(suffixes[length], 100)) == expected
            assert trie.n_followers(suffixes[length]) == expected.total()


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_advanced_as_if_the_tokens_had_been_there(seed: int) -> None:
    """Walking a trie with a text that is not in it finds the same as counting by hand."""
    rng = random.Random(seed)
    trie, text = SuffixTrie(MAX_LENGTH), []
    for _ in range(6):
        answer = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        trie.push_document(answer)
        text += [*answer, END]
    places, walked = [trie.root], []
    for _ in range(100):
        token = rng.randrange(3)
        walked.append(token)
        places = trie.advanced(places, token, MAX_LENGTH - 1)
        for length in range(1, MAX_LENGTH):
            expected = count_followers(text, walked[-length:]) if length <= len(walked) else {}
            if length >= len(places):
                assert not expected
                continue
            assert dict(trie.followers(places[length], 100)) == expected
            assert trie.n_followers(places[length]) == sum(expected.values())


def test_only_the_latest_followers_are_told() -> None:
    """Of many followers the latest are told, with their counts; the total counts them all."""
    trie = SuffixTrie(2)
    for follower in [*range(100, 150), 100]:
        trie.push_document([1, follower])
    place = trie.advanced([trie.root], 1, 1)[1]
    assert list(trie.followers(place, 3)) == [(100, 2), (149, 1), (148, 1)]
    assert trie.n_followers(place) == 51


def n_nodes(trie: SuffixTrie) -> int:
    """Count the nodes of a trie."""
    stack, n = [trie.root], 0
    while stack:
        node = stack.pop()
        n += 1
        stack += (node.children or {}).values()
    return n


def test_memory_does_not_depend_on_the_longest_ngram_where_nothing_repeats() -> None:
    """A token that continues no repeat adds one node, however long the n-grams kept."""
    for max_length in (2, 50):
        trie = SuffixTrie(max_length)
        trie.push_document(range(1000))
        assert n_nodes(trie) == 1002  # with the root and the end
