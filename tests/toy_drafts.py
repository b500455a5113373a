"""Targets and drafts whose every answer is known by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.adaptive import Shaper
from engine.beam import BeamDraft
from engine.timing import PhaseClock
from engine.tree import DraftTree, Pool
from profiles import TreeConfig


@dataclass
class CountingCache:
    """A cache of nothing: only its length is kept."""

    length: int = 0

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def keep_path(self, start: int, path: list[int]) -> None:
        self.length = start + len(path)


class TableTarget:
    """A target whose logits depend on the last token alone: row t of a table follows token t."""

    device = torch.device("cpu")
    max_positions = None

    def __init__(self, n_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = n_tokens
        self.table = torch.randn(n_tokens, n_tokens, generator=generator, dtype=torch.float64)

    def new_cache(self, capacity: int) -> CountingCache:
        return CountingCache()

    lend_cache = new_cache

    def forward(
        self, tokens: Sequence[int], cache: CountingCache, *, last_only: bool = False, **_: Any
    ) -> tuple[Tensor, None]:
        cache.length += len(tokens)
        return self.table[list(tokens)[-1:] if last_only else list(tokens)], None


class TableDraft(BeamDraft):
    """A neural draft whose logits depend on the last token alone."""

    kind = "table"

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.max_top_k = len(table)

    def new_cache(self, capacity: int) -> Any:
        return CountingCache()

    def extend(
        self, tokens: list[int], features: Tensor | None, cache: Any, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        cache.length += len(tokens)
        return self.table[tokens[-1:] if last_only else tokens], None

    def expand(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, cache: Any, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        cache.length += len(tokens)
        return self.table[tokens], None

    def fused(self, features: Sequence[Tensor | None]) -> Tensor | None:
        raise NotImplementedError

    def pass_rows(self, *_: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


Script = Callable[[list[int], TreeConfig], DraftTree]
"""Gives the tree below the last of the committed tokens."""


class ScriptedDraft:
    """A draft that proposes what a test wrote down."""

    kind = "scripted"
    feature_layers: tuple[int, ...] = ()
    max_top_k = 1000
    max_positions = None

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tokens: list[int] = []

    def open(self, prompt: list[int], n_max: int) -> "ScriptedDraft":
        self._tokens = list(prompt)
        return self

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        self._tokens += tokens

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree:
        return self._script(self._tokens, tree)

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        raise NotImplementedError
