"""Every n-gram of a text with the number of its occurrences, grown token by token.

Knows token ids only: no trees, no drafts. A token costs time proportional to the length of the
repeat it continues, at most the longest n-gram kept, and never to the length of the text: what
was seen once is no node but a position, from which its continuation is read off the text (the
leaves of a suffix tree, Ukkonen 1995, without the compressed edges).
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

MANY = 16
"""Followers of an n-gram from which on they are kept in the order of their latest occurrence."""

END = -1
"""Stands in the text where one document ends and the next begins."""


class Node:
    """An n-gram.

    Attributes:
        count: How often it occurred.
        end: Where its latest occurrence ends: the position of what followed.
        children: The n-grams that are longer by one token, by that token; None while it occurred
            only once, and at the greatest length.
    """

    __slots__ = ("children", "count", "end")

    def __init__(self, end: int) -> None:
        self.count = 1
        self.end = end
        self.children: dict[int, Node] | None = None


Place: TypeAlias = Node | int
"""Where an n-gram ends in the trie: at a node, or, if it occurred once, at a position."""


class SuffixTrie:
    """The n-grams of a text.

    Args:
        max_length: Longest n-gram that is counted.

    Attributes:
        root: The empty n-gram.
        suffixes: The suffixes of the text that occurred before, by length from 0.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._text: list[int] = []
        self.root = Node(0)
        self.root.children = {}
        self.suffixes = [self.root]

    def push_document(self, tokens: Iterable[int]) -> None:
        """Append a document of its own: n-grams do not reach over its end."""
        for token in tokens:
            self.push(token)
        self.push(END)
        self.suffixes = [self.root]

    def push(self, token: int) -> bool:
        """Append a token; tell whether it had followed the longest of `suffixes` before."""
        text = self._text
        text.append(token)
        end = len(text)
        suffixes = [self.root]
        for length, node in enumerate(self.suffixes, start=1):
            children = node.children
            assert children is not None  # noqa: S101 - those of `suffixes` have some
            child = children.get(token)
            if child is None:
                children[token] = Node(end)
                continue
            if len(children) > MANY:  # latest followers last
                children[token] = children.pop(token)
            if length < self._max_length:
                if child.children is None:
                    child.children = {text[child.end]: Node(child.end + 1)}
                suffixes.append(child)
            child.count += 1
            child.end = end
        self.suffixes = suffixes
        return child is not None

    def advanced(self, places: Sequence[Place], token: int, max_length: int) -> list[Place]:
        """Return the suffixes of some text that the trie holds after one more token.

        Args:
            places: Its suffixes now, by length from 0.
            token: The token.
            max_length: Longest suffix to return.
        """
        longer: list[Place] = [self.root]
        for place in places[:max_length]:
            if isinstance(place, Node):
                if place.children is not None:
                    child = place.children.get(token)
                    if child is None:
                        break  # longer suffixes were never followed by it either
                    longer.append(child)
                    continue
                place = place.end
            if place >= len(self._text) or self._text[place] != token:
                break
            longer.append(place + 1)
        return longer

    def n_followers(self, place: Place) -> int:
        """Return how often anything followed."""
        if isinstance(place, int):
            return int(place < len(self._text))
        return place.count - (place.end == len(self._text))  # nothing follows the end of the text

    def followers(self, place: Place, n: int) -> Iterable[tuple[int, int]]:
        """Return the `n` latest tokens that followed and how often, the latest first."""
        if isinstance(place, Node):
            if place.children is not None:
                latest = islice(reversed(place.children.items()), n)
                return [(token, child.count) for token, child in latest]
            place = place.end
        return [(self._text[place], 1)] if place < len(self._text) else []
