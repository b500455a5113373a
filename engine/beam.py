"""Growing trees with a neural draft: extend pass, beam levels, candidate pool.

One piece of code grows the tree of a round (one root) and the trees of a whole recorded text
(many roots at once, for replay), so that both give the same trees.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .batch_cache import BatchCache
from .cache import SPARE_ROWS, KVCache
from .timing import PhaseClock
from .tree import DraftTree, Pool

ROOTS_PER_BLOCK = 32
"""Roots grown together in replay; bounds the attention mask of a level pass."""


class BeamDraft(ABC):
    """A draft that scores its vocabulary below any node: an EAGLE-3 head or a small model.

    Attributes:
        first_token: Index of the first token of a text that enters its cache.
        n_layers: Layers of its cache.
    """

    kind: str
    feature_layers: tuple[int, ...] = ()
    first_token = 0
    n_layers: int
    max_top_k: int
    max_positions: int | None = None

    @abstractmethod
    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache."""

    @abstractmethod
    def extend(
        self, tokens: list[int], features: Tensor | None, cache: KVCache, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Append committed tokens [n] with their features to the cache.

        Returns:
            Logits [n or 1, draft vocabulary] and the hidden states [n or 1, H] that children
            continue from (None for a draft that needs none).
        """

    @abstractmethod
    def expand(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Append tree nodes [n] to the cache; `mask` [n, m] covers the last m cache rows.

        Returns:
            As `extend`, for all n nodes.
        """

    @abstractmethod
    def fused(self, features: Sequence[Tensor | None]) -> Tensor | None:
        """Return what committed tokens of several texts continue from, as `pass_rows` takes it.

        Args:
            features: Per text those of its tokens; None for a single token that does not count.
        """

    @abstractmethod
    def pass_rows(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        masks: Sequence[Tensor],
        cache: BatchCache,
    ) -> tuple[Tensor, Tensor | None]:
        """Run over new tokens of several texts, one text after another; see `forward_rows`.

        Args:
            tokens: int64 [n], target ids.
            hidden: [n, H], fused features or fed-back states; None for a draft that needs none.
            positions: int64 [n].
            masks: Per text bool [n_i, m_i], which new token attends to which of the last m_i.
            cache: What precedes them; counts them when told to.

        Returns:
            As `extend`, for all n tokens.
        """

    @abstractmethod
    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Map draft vocabulary ids to target ids."""

    def open(self, prompt: list[int], n_max: int) -> "BeamSession":
        """Start a request; see `Draft.open`."""
        return BeamSession(self, prompt, n_max)

    def children(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return target tokens and log-probabilities [..., min(top_k, vocabulary)]."""
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)
        scores, ids = log_probabilities.topk(min(top_k, logits.shape[-1]), dim=-1)
        return self.to_target(ids), scores

    @torch.inference_mode()
    def grow(
        self,
        cache: KVCache,
        logits: Tensor,
        hidden: Tensor | None,
        visible: Tensor,
        tree: TreeConfig,
        shaper: Shaper | None = None,
    ) -> list[Pool]:
        """Grow the candidate pools of several roots and forget their cache rows.

        Args:
            cache: Holds the committed tokens.
            logits: [n_roots, draft vocabulary], what follows each root.
            hidden: [n_roots, H] or None.
            visible: int64 [n_roots], cache rows each root may attend to.
            tree: Depth, width and top-k.
            shaper: Ends the growth early; for a single root only.
        """
        n_committed, n_roots = cache.length, len(logits)
        everything = bool((visible == n_committed).all())
        columns = torch.arange(n_committed, device=logits.device)
        committed = columns[None, :] < visible[:, None]
        same_root = torch.eye(n_roots, dtype=torch.bool, device=logits.device)
        if hidden is not None:
            hidden = hidden[:, None]  # the root is a beam of one

        def expand(
            tokens: Tensor, parents: Tensor, ancestors: list[Tensor], level: int
        ) -> tuple[Tensor, Tensor]:
            nonlocal hidden
            n_beam = tokens.shape[1]
            # Rows by (root, beam), columns by (root, slot of a level).
            blocks = [
                (same_root[:, None, :, None] & slots[:, :, None, :]).reshape(n_roots * n_beam, -1)
                for slots in ancestors
            ]
            if not everything:
                blocks.insert(0, committed.repeat_interleave(n_beam, dim=0))
            if hidden is not None:
                hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[2]))
            logits, flat_hidden = self.expand(
                tokens.flatten(),
                None if hidden is None else hidden.flatten(0, 1),
                (visible + level - 2).repeat_interleave(n_beam),
                cache,
                torch.cat(blocks, dim=1),
            )
            if flat_hidden is not None:
                hidden = flat_hidden.unflatten(0, (n_roots, n_beam))
            return self.children(logits.unflatten(0, (n_roots, n_beam)), tree.top_k)

        pools = grow_beams(*self.children(logits, tree.top_k), expand, tree, shaper)
        cache.truncate(n_committed)
        return pools

    @torch.inference_mode()
    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the pool at every root of a known text; see `Draft.pools`."""
        inputs = tokens[self.first_token : roots[-1] + 1]
        cache = self.new_cache(len(inputs) + ROOTS_PER_BLOCK * tree.width * tree.depth)
        if features is not None:
            features = features[: len(inputs)]
        logits, hidden = self.extend(inputs, features, cache, last_only=False)
        rows = torch.tensor(roots, device=logits.device) - self.first_token
        pools: list[Pool] = []
        for block in rows.split(ROOTS_PER_BLOCK):
            block_hidden = None if hidden is None else hidden[block]
            pools += self.grow(cache, logits[block], block_hidden, block + 1, tree)
        return pools


class BeamSession:
    """The state of a neural draft for one request; see `DraftSession`."""

    def __init__(self, draft: BeamDraft, prompt: list[int], n_max: int) -> None:
        self.draft = draft
        self._tokens = prompt[draft.first_token :]
        self._features: list[Tensor] = []
        self._cache = draft.new_cache(n_max + SPARE_ROWS)
        self._n_run = 0  # tokens the draft has run over

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Take note of committed tokens; the draft runs over them at the next proposal."""
        self._tokens += tokens
        if features is not None:
            self._features.append(features)

    def take(self) -> tuple[list[int], Tensor | None]:
        """Return the tokens, and their features, that the draft is to run over now."""
        pending = self._tokens[self._n_run :]
        self._n_run = len(self._tokens)
        features = torch.cat(self._features) if self._features else None
        self._features.clear()
        return pending, features

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree:
        """Return the tree below the last committed token."""
        pending, features = self.take()
        logits, hidden = self.draft.extend(pending, features, self._cache, last_only=True)
        clock.lap("extend")
        visible = torch.tensor([self._cache.length], device=logits.device)
        growing = shaper if shaper and shaper.stops_early else None
        pool = self.draft.grow(self._cache, logits, hidden, visible, tree, growing)[0]
        selected = shaper.select(pool) if shaper else pool.select(tree.nodes)
        clock.lap("levels")
        return selected


def grow_beams(
    tokens: Tensor,
    scores: Tensor,
    expand: Callable[[Tensor, Tensor, list[Tensor], int], tuple[Tensor, Tensor]],
    tree: TreeConfig,
    shaper: Shaper | None = None,
) -> list[Pool]:
    """Grow pools level by level: the best `width` candidates of a level are expanded.

    The published EAGLE-2 expansion (arXiv 2406.16858, section 4.1), with width and top-k apart.

    Args:
        tokens: [roots, K] children of the roots.
        scores: [roots, K] their log-probabilities.
        expand: Called as (tokens [roots, w], parents [roots, w] as indices into the previous
            beam, ancestors, level) and returns the children, [roots, w, K] twice. `ancestors`
            holds, for every beam so far, bool [roots, w, slots]: which of its nodes are
            ancestors of the new ones, or themselves.
        tree: Depth and width.
        shaper: Asked before every level whether it is worth growing; for a single root only.
    """
    n_roots, top_k = tokens.shape
    level_tokens, level_scores, level_start = tokens, scores, 0
    parents = torch.full_like(tokens, -1)
    pool = [(tokens, parents, scores)]
    ancestors: list[Tensor] = []
    for level in range(2, tree.depth + 1):
        if shaper and not shaper.goes_deeper(level_scores[0].tolist(), level - 1):
            break
        n_beam = min(tree.width, level_tokens.shape[1])
        order = level_scores.sort(dim=1, descending=True, stable=True).indices[:, :n_beam]
        beam_parents = order // top_k
        ancestors = [
            slots.gather(1, beam_parents[..., None].expand(-1, -1, slots.shape[2]))
            for slots in ancestors
        ]
        itself = torch.eye(n_beam, dtype=torch.bool, device=tokens.device)
        ancestors.append(itself.expand(n_roots, -1, -1))
        children, child_scores = expand(
            level_tokens.gather(1, order), beam_parents, ancestors, level
        )
        beam_scores = level_scores.gather(1, order)
        parents = (level_start + order)[..., None].expand(-1, -1, top_k).flatten(1)
        level_start += level_tokens.shape[1]
        level_tokens = children.flatten(1)
        level_scores = (beam_scores[..., None] + child_scores).flatten(1)
        pool.append((level_tokens, parents, level_scores))
    ends = torch.tensor([part[0].shape[1] for part in pool]).cumsum(0).tolist()
    columns = [torch.cat(parts, dim=1).tolist() for parts in zip(*pool, strict=True)]
    return [Pool(t, p, s, ends) for t, p, s in zip(*columns, strict=True)]
