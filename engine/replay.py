"""Replay: how many tokens per round a tree would have given on recorded text.

The output is the same for every tree, so on recorded text the tree of any round is determined
by the prefix, and so is how far the recorded continuation stays inside it. The draft alone is
run, once per (width, top-k): every depth and node budget is then a cut of the same pools.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles import TreeConfig

from .draft import Draft, fresh, remember
from .target import Target
from .trace import Trace, text_features
from .tree import Pool

ABSENT = np.iinfo(np.int32).max
WRONG, UNTRIED = -1, -2


@dataclass(frozen=True)
class ReplayedRounds:
    """The rounds a tree would have taken, one entry per round.

    Attributes:
        depths: Depth the round's tree was limited to (0 for a plain round).
        n_nodes: Draft nodes verified.
        n_emitted: Tokens emitted, the bonus token included.
        model_free: Whether a hybrid's round was model-free; None for other drafts.
    """

    depths: NDArray[np.int64]
    n_nodes: NDArray[np.int64]
    n_emitted: NDArray[np.int64]
    model_free: NDArray[np.bool_] | None = None

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return float(self.n_emitted.mean()) if len(self.n_emitted) else 1.0

    @property
    def extends(self) -> NDArray[np.bool_]:
        """Whether the draft ran its extend pass: not in plain and in model-free rounds."""
        ran: NDArray[np.bool_] = self.depths > 0
        return ran if self.model_free is None else ran & ~self.model_free

    @property
    def n_extend(self) -> NDArray[np.int64]:
        """Tokens that the draft's extend pass ran over: what was emitted since its last round.

        Zero where the draft did not run. In its first round the prefill is not counted.
        """
        rounds = np.flatnonzero(self.extends)
        n_extend = np.zeros_like(self.n_emitted)
        if len(rounds):
            n_before = (np.cumsum(self.n_emitted) - self.n_emitted)[rounds]
            n_extend[rounds[0]] = n_before[0] or self.n_emitted[rounds[0]]
            n_extend[rounds[1:]] = np.diff(n_before)
        return n_extend


class Replay:
    """Replays trees of one draft over traces; pools are grown when first asked for.

    Args:
        target: Gives the features of the traces to drafts that read them.
        draft: The draft.
        traces: Recorded texts.
        max_depth: Deepest tree that will be asked for.
    """

    def __init__(
        self, target: Target, draft: Draft, traces: Sequence[Trace], max_depth: int
    ) -> None:
        self._target = target
        self._draft = draft
        self._traces = traces
        self._max_depth = max_depth
        self._ranks: dict[tuple[int, int], list[_Ranks]] = {}

    def rounds(self, tree: TreeConfig) -> list[ReplayedRounds]:
        """Return the rounds of every trace under a tree of at most `max_depth` levels."""
        key = (tree.width, tree.top_k)
        if not tree.is_plain and key not in self._ranks:
            self._ranks[key] = list(self._grow_all(*key))
        return [
            _replay(trace, None if tree.is_plain else self._ranks[key][i], tree)
            for i, trace in enumerate(self._traces)
        ]

    def acceptance(self) -> tuple[list[int], list[list[int]]]:
        """Count where the recorded token stood, for the trees with most children replayed so far.

        Returns:
            By depth from 1: how many nodes on the recorded path were expanded, and how often
            their child of rank 1, 2, ... was the recorded token.
        """
        width, top_k = max(self._ranks, key=lambda key: (key[1], key[0]))
        siblings = np.concatenate([ranks.siblings for ranks in self._ranks[width, top_k]])
        tried = (siblings != UNTRIED).sum(axis=0)
        by_rank = [[int((column == k).sum()) for k in range(top_k)] for column in siblings.T]
        return [int(n) for n in tried], by_rank

    def _grow_all(self, width: int, top_k: int) -> Iterator["_Ranks"]:
        tree = TreeConfig(depth=self._max_depth, width=width, top_k=top_k, nodes=self._max_depth)
        for trace, pools in zip(
            self._traces, grow_pools(self._target, self._draft, self._traces, tree), strict=True
        ):
            continuations = [trace.generated[i + 1 :] for i in range(len(pools))]
            yield _Ranks.of(pools, continuations, self._max_depth)


def grow_pools(
    target: Target, draft: Draft, traces: Sequence[Trace], tree: TreeConfig
) -> Iterator[list[Pool]]:
    """Yield, for one text after another, the pool at every token of the answer but the last.

    Every text has the answers before it as history. Beyond the draft's reach pools are empty: a
    pool is grown to the full depth or not at all, so near the end of that reach replay takes
    rounds for plain that serving would still draft for.
    """
    draft = fresh(draft)
    for trace in traces:
        roots = list(range(len(trace.prompt), len(trace.tokens) - 1))
        n_roots = len(roots)
        if (reach := draft.max_positions) is not None:
            roots = [root for root in roots if root + 1 + tree.depth <= reach]
        pools: list[Pool] = []
        if roots:
            features = text_features(target, trace.tokens, draft.feature_layers)
            pools = draft.pools(trace.tokens, features, roots, tree)
        yield pools + [Pool([], [], [], [0] * tree.depth)] * (n_roots - len(pools))
        remember(draft, trace.generated)


@dataclass(frozen=True)
class _Ranks:
    """Where the recorded continuation sits in the pool of every root.

    Attributes:
        ranks: [roots, cut, depth]: in the pool cut after level cut+1, the number of candidates
            that come before the continuation's node at depth+1; ABSENT if it has none.
        sizes: [roots, cut]: candidates in the pool cut after level cut+1.
        siblings: [roots, depth]: the continuation's place among the children of its parent, from
            from 0; WRONG if it is none of them, UNTRIED if the parent has no children.
        accepted: [roots]: where a model-free round is taken, how far the continuation stays
            inside its tree, whatever the cut; -1 elsewhere.
    """

    ranks: NDArray[np.int32]
    sizes: NDArray[np.int32]
    siblings: NDArray[np.int32]
    accepted: NDArray[np.int32]

    @classmethod
    def of(cls, pools: list[Pool], continuations: list[list[int]], max_depth: int) -> "_Ranks":
        ranks = np.full((len(pools), max_depth, max_depth), ABSENT, dtype=np.int32)
        sizes = np.zeros((len(pools), max_depth), dtype=np.int32)
        siblings = np.full((len(pools), max_depth), UNTRIED, dtype=np.int32)
        accepted = np.full(len(pools), -1, dtype=np.int32)
        for i, (pool, continuation) in enumerate(zip(pools, continuations, strict=True)):
            if pool.is_whole:
                sizes[i] = len(pool.tokens)
                accepted[i] = _n_inside(pool, continuation)
                continue
            sizes[i] = pool.level_ends
            scores = np.array(pool.scores)
            places = {
                (parent, token): j
                for j, (parent, token) in enumerate(zip(pool.parents, pool.tokens, strict=True))
            }
            first_child: dict[int, int] = {}
            for j, parent in enumerate(pool.parents):
                first_child.setdefault(parent, j)
            node = -1
            for depth, token in enumerate(continuation[:max_depth]):
                if node in first_child:
                    siblings[i, depth] = WRONG
                found = places.get((node, token))
                if found is None:
                    break
                siblings[i, depth] = found - first_child[node]
                node = found
                before = scores > scores[node]
                before[:node] |= scores[:node] == scores[node]
                n_before = np.concatenate(([0], np.cumsum(before)))
                ends = np.array(pool.level_ends[depth:])
                ranks[i, depth:, depth] = n_before[ends]
        return cls(ranks, sizes, siblings, accepted)


def _n_inside(pool: Pool, continuation: list[int]) -> int:
    """Return how many tokens of a continuation lie on a path of the tree."""
    children, node = pool.tree().children, 0
    for n, token in enumerate(continuation):
        found = children.get((node, token))
        if found is None:
            return n
        node = found
    return len(continuation)


def _replay(trace: Trace, ranks: _Ranks | None, tree: TreeConfig) -> ReplayedRounds:
    """Walk over a trace as `Request.step` would, round by round."""
    depths, n_nodes, n_emitted, model_free = [], [], [], []
    n_new, budget = 1, len(trace.generated)
    while n_new < budget:
        limited = tree.limited(budget - n_new - 1)
        accepted, nodes, is_free = 0, 0, False
        if ranks is not None and not limited.is_plain:
            root, cut = n_new - 1, limited.depth - 1
            is_free = bool(ranks.accepted[root] >= 0)
            if is_free:
                accepted, nodes = int(ranks.accepted[root]), int(ranks.sizes[root, 0])
            else:
                accepted = int((ranks.ranks[root, cut, : limited.depth] < limited.nodes).sum())
                nodes = min(limited.nodes, int(ranks.sizes[root, cut]))
        depths.append(limited.depth)
        n_nodes.append(nodes)
        n_emitted.append(accepted + 1)
        model_free.append(is_free)
        n_new += accepted + 1
    return ReplayedRounds(
        np.array(depths, dtype=np.int64),
        np.array(n_nodes, dtype=np.int64),
        np.array(n_emitted, dtype=np.int64),
        np.array(model_free, dtype=np.bool_),
    )
