"""Growing trees with a neural draft: extend pass, beam levels, candidate pool.

One piece of code grows the tree of a round (one root) and the trees of a whole recorded text
(many roots at once, for replay), so that both give the same trees.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .batch_cache import BatchCache
from .cache import SPARE_ROWS, KVCache
from .devices import sent
from .graphs import Recorder
from .growth import grow_levels
from .pending_tree import PendingTree
from .static import SlotCache
from .static_draft import DraftSteps
from .timing import PhaseClock
from .tree import DraftTree, Pool

ROOTS_PER_BLOCK = 32
"""Roots grown together in replay; bounds the attention mask of a level pass."""


class BeamDraft(ABC):
    """A draft that scores its vocabulary below any node: an EAGLE-3 head or a small model.

    Attributes:
        first_token: Index of the first token of a text that enters its cache.
        n_layers: Layers of its cache.
        cache_bytes: Bytes of its cache per token held.
        row_bytes: Bytes that a token's activations take within a pass, about.
        window: Tokens it sees at most, itself included; None sees all.
        steps: Recorded passes, None where nothing records them.
    """

    kind: str
    feature_layers: tuple[int, ...] = ()
    first_token = 0
    n_layers: int
    max_top_k: int
    max_positions: int | None = None
    cache_bytes = 0
    row_bytes = 0
    window: int | None = None
    steps: DraftSteps | None = None

    @abstractmethod
    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache."""

    @abstractmethod
    def extend(
        self, tokens: list[int], features: Tensor | None, cache: KVCache, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Append committed tokens [n] with their features to the cache.

        With `last_only` many tokens are run in several passes, so that memory stays bounded.

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

    def at(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: SlotCache,
        visible: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run tokens [n] at given rows of a fixed cache; needed only where `record` is called.

        Args:
            tokens: int64 [n].
            hidden: States [n, H] they continue from, or None.
            positions: int64 [n].
            cache: Takes the new rows.
            visible: bool [n, capacity], who attends to which row, the window included.

        Returns:
            As `extend`, for all n tokens.
        """
        raise NotImplementedError(f"a draft of kind {self.kind} is not recorded")

    def cache_layout(self) -> tuple[int, int, int, Tensor]:
        """Return layers, key heads and head size of its cache, and a tensor like its own."""
        raise NotImplementedError(f"a draft of kind {self.kind} is not recorded")

    def record(self, recorder: Recorder | None) -> None:
        """Run rounds by recordings from now on, if there is a recorder."""
        self.steps = None if recorder is None else DraftSteps(self, recorder)

    def lend_cache(self, n_tokens: int) -> KVCache:
        """Return an empty cache for a text of that many tokens: one whose passes are recorded."""
        lent = None if self.steps is None else self.steps.lend(n_tokens)
        return self.new_cache(n_tokens + SPARE_ROWS) if lent is None else lent

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
        visible: Sequence[int],
        tree: TreeConfig,
        shaper: Shaper | None = None,
    ) -> list[Pool]:
        """Grow the candidate pools of several roots and forget their cache rows.

        Args:
            cache: Holds the committed tokens.
            logits: [n_roots, draft vocabulary], what follows each root.
            hidden: [n_roots, H] or None.
            visible: Cache rows each root may attend to.
            tree: Depth, width and top-k.
            shaper: Ends the growth early; for a single root only.
        """
        n_committed, n_roots = cache.length, len(logits)
        everything = all(n == n_committed for n in visible)
        ends = sent(visible, logits.device)
        columns = torch.arange(n_committed, device=logits.device)
        committed = columns[None, :] < ends[:, None]
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
                (ends + level - 2).repeat_interleave(n_beam),
                cache,
                torch.cat(blocks, dim=1),
            )
            if flat_hidden is not None:
                hidden = flat_hidden.unflatten(0, (n_roots, n_beam))
            return self.children(logits.unflatten(0, (n_roots, n_beam)), tree.top_k)

        grown = grow_levels(*self.children(logits, tree.top_k), expand, tree, shaper)
        cache.truncate(n_committed)
        return grown.pools()

    @torch.inference_mode()
    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the pool at every root of a known text; see `Draft.pools`."""
        inputs = tokens[self.first_token : roots[-1] + 1]
        cache = self.new_cache(len(inputs) + ROOTS_PER_BLOCK * tree.width * tree.depth)
        if features is not None:
            features = features[: len(inputs)]
        n_before = roots[0] - self.first_token  # only what follows needs logits for every token
        if n_before:
            before = None if features is None else features[:n_before]
            self.extend(inputs[:n_before], before, cache, last_only=True)
            features = None if features is None else features[n_before:]
        logits, hidden = self.extend(inputs[n_before:], features, cache, last_only=False)
        pools: list[Pool] = []
        for i in range(0, len(roots), ROOTS_PER_BLOCK):
            block = [root - roots[0] for root in roots[i : i + ROOTS_PER_BLOCK]]
            rows = sent(block, logits.device)
            block_hidden = None if hidden is None else hidden[rows]
            visible = [n_before + row + 1 for row in block]
            pools += self.grow(cache, logits[rows], block_hidden, visible, tree)
        return pools


class BeamSession:
    """The state of a neural draft for one request; see `DraftSession`."""

    def __init__(self, draft: BeamDraft, prompt: list[int], n_max: int) -> None:
        self.draft = draft
        self._tokens = prompt[draft.first_token :]
        self._features: list[Tensor] = []
        self._cache = draft.lend_cache(n_max)
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
    ) -> DraftTree | PendingTree:
        """Return the tree below the last committed token."""
        pending, features = self.take()
        steps = self.draft.steps
        extended = None if steps is None else steps.extend(pending, features, self._cache)
        if extended is None:
            extended = self.draft.extend(pending, features, self._cache, last_only=True)
        logits, hidden = extended
        clock.lap("extend")
        selected = self._grow(logits, hidden, tree, shaper)
        clock.lap("levels")
        return selected

    def _grow(
        self, logits: Tensor, hidden: Tensor | None, tree: TreeConfig, shaper: Shaper | None
    ) -> DraftTree | PendingTree:
        """Grow the tree below the last committed token, by a recorded pass if there is one."""
        growing = shaper if shaper and shaper.stops_early else None
        steps = self.draft.steps
        if steps is not None and growing is None:
            grown = steps.grow(logits, hidden, self._cache, tree)
            if grown is not None:
                return shaper.select(grown.pool()) if shaper else grown.tree()
        visible = [self._cache.length]
        pool = self.draft.grow(self._cache, logits, hidden, visible, tree, growing)[0]
        return shaper.select(pool) if shaper else pool.select(tree.nodes)
