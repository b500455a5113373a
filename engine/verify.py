"""Verification: walk the tree along the tokens the target itself draws.

At a node the next token is drawn from the target's own distribution, exactly as plain decoding
draws it; if a child carries that token the walk goes on there, else it ends. The output is
lossless for any tree because no draw depends on the tree.
"""

from collections.abc import Callable

from .pending_tree import PendingTree
from .tree import DraftTree


def walk(tree: DraftTree | PendingTree, emit: Callable[[int], int | None]) -> list[int]:
    """Walk from the root while the emitted tokens stay inside the tree.

    Args:
        tree: The verified tree.
        emit: Draws and commits the token that follows a node (0 is the root) and returns it,
            or None if the text ended with it.

    Returns:
        The visited nodes, root first: those whose cache rows and features are kept.
    """
    path = [0]
    while True:
        token = emit(path[-1])
        child = None if token is None else tree.children.get((path[-1], token))
        if child is None:
            return path
        path.append(child)
