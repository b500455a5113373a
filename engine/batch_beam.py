"""Trees of several texts from one neural draft: extend and level passes over all rows at once.

Gives each text the tree that its session would grow alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from profiles import TreeConfig

from .batch_cache import BatchCache
from .beam import BeamDraft, BeamSession
from .growth import grow_levels
from .timing import PhaseClock
from .tree import DraftTree, Pool


class BeamRows:
    """The states of a neural draft for the texts of a batch, in one cache.

    Args:
        draft: The draft.
        n_slots: Most texts at a time.
        device: Where the draft computes.
    """

    def __init__(self, draft: BeamDraft, n_slots: int, device: torch.device) -> None:
        self._draft = draft
        self._device = device
        self._sessions: list[BeamSession] = []
        self._cache = BatchCache(draft.n_layers, n_slots, device)

    def drop(self, session: BeamSession) -> None:
        """Forget a text, if it is known."""
        if session in self._sessions:
            row = self._sessions.index(session)
            self._cache.drop(row)
            self._sessions[row] = self._sessions[-1]
            self._sessions.pop()

    @torch.inference_mode()
    def propose(
        self, sessions: Sequence[BeamSession], trees: Sequence[TreeConfig], clock: PhaseClock
    ) -> list[DraftTree]:
        """Return the trees below the last committed tokens of some of the texts.

        Texts that are known but not asked for take part in the passes with a token that is
        forgotten again.

        Args:
            sessions: The texts, known or new.
            trees: What each is asked for; of one width and top-k.
            clock: Gets the laps "extend" and "levels".
        """
        logits, hidden = self._extend(sessions)
        clock.lap("extend")
        asking = [session in sessions for session in self._sessions]
        pools = self._grow(logits, hidden, asking, max(trees, key=lambda tree: tree.depth))
        rows = [self._sessions.index(session) for session in sessions]
        found = [
            pools[row].cut(tree.depth).select(tree.nodes)
            for row, tree in zip(rows, trees, strict=True)
        ]
        clock.lap("levels")
        return found

    def _extend(self, sessions: Sequence[BeamSession]) -> tuple[Tensor, Tensor | None]:
        """Run over committed tokens; return [n_rows, vocabulary] and [n_rows, H] or None."""
        parts = [self._extend_known(sessions)] if self._sessions else []
        for session in sessions:
            if session not in self._sessions:
                tokens, features = session.take()
                single = self._draft.new_cache(len(tokens))
                parts.append(self._draft.extend(tokens, features, single, last_only=True))
                self._cache.join(single)
                self._sessions.append(session)
        logits, hidden = zip(*parts, strict=True)
        return torch.cat(logits), None if hidden[0] is None else torch.cat(hidden)

    def _extend_known(self, sessions: Sequence[BeamSession]) -> tuple[Tensor, Tensor | None]:
        tokens: list[list[int]] = []
        features: list[Tensor | None] = []
        paths: list[list[int]] = []
        positions: list[int] = []
        for session, length in zip(self._sessions, self._cache.lengths, strict=True):
            if session in sessions:
                own, read = session.take()
                paths.append(list(range(len(own))))
                positions += range(length, length + len(own))
            else:
                own, read = [0], None
                paths.append([])
                positions.append(0)
            tokens.append(own)
            features.append(read)
        counts = [len(own) for own in tokens]
        logits, hidden = self._draft.pass_rows(
            torch.tensor([token for own in tokens for token in own], device=self._device),
            self._draft.fused(features),
            torch.tensor(positions, device=self._device),
            [torch.ones(n, n, dtype=torch.bool, device=self._device).tril() for n in counts],
            self._cache,
        )
        self._cache.keep_paths(paths)
        last = torch.tensor(counts, device=self._device).cumsum(0) - 1
        return logits[last], None if hidden is None else hidden[last]

    def _grow(
        self, logits: Tensor, hidden: Tensor | None, asking: Sequence[bool], tree: TreeConfig
    ) -> list[Pool]:
        """Grow the pools of all rows and forget their nodes; see `BeamDraft.grow`."""
        draft, cache, lengths = self._draft, self._cache, self._cache.lengths
        starts = [n if asks else 0 for n, asks in zip(lengths, asking, strict=True)]
        first = torch.tensor(starts, device=self._device)
        steps = torch.tensor(asking, device=self._device).long()  # others stay at position 0
        if hidden is not None:
            hidden = hidden[:, None]  # the root is a beam of one

        def expand(
            tokens: Tensor, parents: Tensor, ancestors: list[Tensor], level: int
        ) -> tuple[Tensor, Tensor]:
            nonlocal hidden
            shape = tokens.shape  # [n_rows, n_beam]
            if hidden is not None:
                hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[2]))
            logits, flat_hidden = draft.pass_rows(
                tokens.flatten(),
                None if hidden is None else hidden.flatten(0, 1),
                (first + steps * (level - 2)).repeat_interleave(shape[1]),
                torch.cat(ancestors, dim=2).unbind(),
                cache,
            )
            cache.keep_all()
            if flat_hidden is not None:
                hidden = flat_hidden.unflatten(0, shape)
            return draft.children(logits.unflatten(0, shape), tree.top_k)

        grown = grow_levels(*draft.children(logits, tree.top_k), expand, tree)
        cache.truncate(lengths)
        return grown.pools()
