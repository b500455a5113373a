"""Passes whose shapes and memory never change, so that a device can record them.

The number of new tokens is padded to a bucket, and attention runs over the whole of a cache of
fixed size, of which a mask hides what is not there yet. The numbers are those of the dynamic
path, to rounding. Knows the lean forward and caches; nothing of drafts or rounds.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cache import KVCache
from .devices import sent
from .graphs import Recorder
from .lean import LeanForward

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80)
"""Numbers of new tokens for which passes are recorded; larger passes run as they come."""

LEAST_CAPACITY = 1024
"""Tokens of the smallest cache; the others are powers of two, so that there are few."""

SPARE = 256
"""Rows beyond a text that a cache has room for: padding, and the nodes of a draft's levels."""

N_COPIES = 2
"""Caches of one size that may be lent at a time."""


def bucket_of(n: int) -> int | None:
    """Return the least bucket that holds n tokens, None if there is none."""
    return next((bucket for bucket in BUCKETS if bucket >= n), None)


def capacity_of(n_tokens: int) -> int:
    """Return the capacity of the cache that is lent for a text of that many tokens."""
    return max(LEAST_CAPACITY, 1 << (n_tokens + SPARE - 1).bit_length())


def recorded_rows(n: int) -> int:
    """Return the rows of all recorded passes of at most n tokens: each keeps memory of its own."""
    return sum(bucket for bucket in BUCKETS if bucket <= (bucket_of(n) or n))


class StaticCache(KVCache):
    """A cache whose memory is lent to it.

    Args:
        states: [n_layers, 2, 1, n_kv_heads, capacity, head_dim], finite numbers: what the mask
            hides is multiplied by zero.
    """

    def __init__(self, states: Tensor) -> None:
        super().__init__(states.shape[0], states.shape[4])
        self.lent = states
        # A token that is kept stands at the row of its position.
        self.positions = torch.arange(states.shape[4], device=states.device)
        self._states = states
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True

    def has_room(self, n: int) -> bool:
        """Tell whether n rows can be written to the memory lent; what outgrew it has moved."""
        is_home = self.layers[0].keys.data_ptr() == self.lent.data_ptr()
        return is_home and self.length + n <= self.lent.shape[4]

    def grown(self, n: int) -> None:
        """Count n rows as held, which a recorded pass has written."""
        for layer in self.layers:
            layer.length += n


class Shelf:
    """Lends memory for caches, and has it back when the cache that it is lent to is gone.

    Args:
        n_layers, n_kv_heads, head_dim: Sizes of a row.
        like: A tensor of the dtype and on the device to allocate.
    """

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self._sizes = n_layers, 2, 1, n_kv_heads
        self._head_dim = head_dim
        self._like = like
        self._memory: dict[int, list[Tensor]] = {}
        self._borrowers: dict[int, weakref.ref[StaticCache]] = {}

    def lend(self, n_tokens: int) -> StaticCache | None:
        """Return a cache for a text of that many tokens; None while all of its size are lent."""
        capacity = capacity_of(n_tokens)
        held = self._memory.setdefault(capacity, [])
        free = (memory for memory in held if not self._is_lent(memory))
        memory = next(free, None)
        if memory is None:
            if len(held) == N_COPIES:
                return None
            try:
                memory = self._like.new_zeros(*self._sizes, capacity, self._head_dim)
            except torch.OutOfMemoryError:
                return None
            held.append(memory)
        cache = StaticCache(memory)
        self._borrowers[memory.data_ptr()] = weakref.ref(cache)
        return cache

    @property
    def idle_bytes(self) -> int:
        """Bytes of the memory that is not lent now."""
        held = (memory for size in self._memory.values() for memory in size)
        return sum(m.numel() * m.element_size() for m in held if not self._is_lent(m))

    def _is_lent(self, memory: Tensor) -> bool:
        return self._borrowers[memory.data_ptr()]() is not None


class SlotStates:
    """One layer of a fixed cache: new rows go to given places, and all rows are seen.

    Args:
        states: [2, n_kv_heads, capacity, head_dim].
        rows: int64 [n], where the new rows go.
    """

    def __init__(self, states: Tensor, rows: Tensor) -> None:
        self.keys, self.values = states[0][None], states[1][None]
        self._states = states
        self._rows = rows

    def write(self, states: Tensor) -> None:
        """Write keys and values of the new tokens, [n, 2, n_kv_heads, head_dim]."""
        self._states.index_copy_(2, self._rows, states.permute(1, 2, 0, 3))


class SlotCache:
    """A fixed cache as models take it, for one pass: its new rows go to given places.

    Args:
        states: [n_layers, 2, 1, n_kv_heads, capacity, head_dim].
        rows: int64 [n].
    """

    length = 0

    def __init__(self, states: Tensor, rows: Tensor) -> None:
        self._layers = [SlotStates(layer[:, 0], rows) for layer in states]

    def extend(self, n: int, n_kv_heads: int, head_dim: int, like: Tensor) -> list[SlotStates]:
        """Return the states of all layers; see `KVCache.extend`."""
        return self._layers

    def update(self, keys: Tensor, values: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Write [1, n_kv_heads, n, head_dim] twice and return all keys and values."""
        layer = self._layers[layer_index]
        layer.write(torch.cat([keys, values]).permute(2, 0, 1, 3))
        return layer.keys, layer.values


def visible_rows(columns: Tensor, first: Tensor, block: Tensor) -> Tensor:
    """Return who attends to which row of a cache, bool [n, capacity].

    Args:
        columns: int64 [capacity]: 0, 1, 2, ...
        first: int64 [1]; every row before it is seen.
        block: bool [n, m], which of the m rows from `first` on are seen; none behind them is.
    """
    place = columns - first
    within = block.index_select(1, place.clamp(0, block.shape[1] - 1))
    return (place < 0) | (within & (place < block.shape[1]))


def in_window(
    columns: Tensor, first: Tensor, positions: Tensor, key_positions: Tensor, window: int
) -> Tensor:
    """Return which rows are near enough, bool [n, capacity].

    Args:
        columns: int64 [capacity]: 0, 1, 2, ...
        first: int64 [1]; rows before it stand at their position.
        positions: int64 [n], of the queries.
        key_positions: int64 [m], of the m rows from `first` on.
        window: Rows a query may see, itself included.
    """
    place = (columns - first).clamp(0, len(key_positions) - 1)
    known = torch.where(columns < first, columns, key_positions.index_select(0, place))
    return positions[:, None] - known[None, :] < window


class StaticForward:
    """The recorded passes of a model over a few tokens.

    Args:
        lean: The model's forward pass.
        window: Its sliding window; None sees everything.
        record: Records passes.
    """

    def __init__(self, lean: LeanForward, window: int | None, record: Recorder) -> None:
        self.lean = lean
        self.window = window
        self.record = record
        self.shelf = Shelf(*lean.cache_layout())
        self._passes: dict[tuple[int, int, tuple[int, ...]], _RecordedPass] = {}

    @classmethod
    @torch.inference_mode()
    def build(
        cls, lean: LeanForward | None, window: int | None, record: Recorder | None
    ) -> "StaticForward | None":
        """Return the recorded passes of a model, None where nothing records them.

        A tree pass is compared with the dynamic one first.
        """
        if lean is None or record is None:
            return None
        static = cls(lean, window, record)
        return static if static._agrees() else None

    def lend(self, n_tokens: int) -> StaticCache | None:
        """Return a cache whose passes are recorded; None where all are lent out."""
        return self.shelf.lend(n_tokens)

    def __call__(
        self,
        tokens: Sequence[int] | Tensor,
        cache: KVCache,
        positions: Tensor | None,
        mask: Tensor | None,
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run a few tokens; see `Target.forward`. None if there is no such pass.

        What is returned is overwritten by the next pass of that size.
        """
        n, bucket = len(tokens), bucket_of(len(tokens))
        if bucket is None or not isinstance(cache, StaticCache) or not cache.has_room(bucket):
            return None
        if mask is not None and mask.shape[1] > n:
            return None
        key = bucket, cache.lent.data_ptr(), tuple(feature_layers)
        if key not in self._passes:
            self._passes[key] = _RecordedPass(self, cache.lent, bucket, key[2])
        logits, features = self._passes[key](tokens, cache.length, positions, mask)
        cache.grown(n)
        return logits[:n], None if features is None else features[:n]

    def _agrees(self) -> bool:
        """Compare a small tree behind a prompt with the dynamic pass."""
        device, cache = self.lean.device, self.lend(1)
        dynamic = KVCache(self.lean.cache_layout()[0], 8)
        if cache is None:
            return False
        prompt = torch.arange(1, 5, device=device)
        for each in (cache, dynamic):
            self.lean(prompt, prompt - 1, each, None, last_only=True, feature_layers=())
        ids, positions = sent([5, 6, 7], device), sent([4, 5, 5], device)
        mask = sent([[True, False, False], [True, True, False], [True, False, True]], device)
        found = self(ids, cache, positions, mask, ())
        seen = torch.cat([mask.new_ones(3, 4), mask], dim=1)
        if self.window is not None:
            keys = torch.cat([prompt - 1, positions])
            seen &= positions[:, None] - keys[None, :] < self.window
        expected, _ = self.lean(ids, positions, dynamic, seen, last_only=False, feature_layers=())
        if found is None:
            return False
        distance = (found[0] - expected).double().norm() / expected.double().norm()
        return bool(distance < (0.1 if expected.dtype.itemsize == 2 else 1e-4))


class _RecordedPass:
    """A pass over one number of tokens on one cache, and the memory that it reads its input from.

    Args:
        static: The passes it belongs to.
        cache: [n_layers, 2, 1, n_kv_heads, capacity, head_dim].
        n: Tokens, padding included.
        feature_layers: Features it gives.
    """

    def __init__(
        self, static: StaticForward, cache: Tensor, n: int, feature_layers: tuple[int, ...]
    ) -> None:
        self._static, self._cache, self._feature_layers = static, cache, feature_layers
        self._ids = torch.zeros(n, dtype=torch.int64, device=cache.device)
        self._positions = torch.zeros(n, dtype=torch.int64, device=cache.device)
        self._start = torch.zeros(1, dtype=torch.int64, device=cache.device)
        # Padding sees itself: what sees nothing is no number, and would spread.
        self._block = torch.eye(n, dtype=torch.bool, device=cache.device)
        self._play: Callable[[], tuple[Tensor, Tensor | None]] | None = None

    def __call__(
        self,
        tokens: Sequence[int] | Tensor,
        start: int,
        positions: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Copy the input in and play the pass back, or record it."""
        n = len(tokens)
        if positions is None:
            positions = torch.arange(start, start + n)
        self._ids[:n].copy_(torch.as_tensor(tokens), non_blocking=True)
        self._positions[:n].copy_(positions, non_blocking=True)
        self._start.fill_(start)
        if n > 1:
            block = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
            self._block[:n, :n].copy_(block, non_blocking=True)
            self._block[:n, n:] = False
        if self._play is None:
            self._play = self._static.record(self._work)
        return self._play()

    def _work(self) -> tuple[Tensor, Tensor | None]:
        device, static = self._cache.device, self._static
        columns = torch.arange(self._cache.shape[4], device=device)
        visible = visible_rows(columns, self._start, self._block)
        if static.window is not None:
            visible &= in_window(
                columns, self._start, self._positions, self._positions, static.window
            )
        rows = self._start + torch.arange(len(self._ids), device=device)
        return static.lean(
            self._ids,
            self._positions,
            SlotCache(self._cache, rows),
            visible,
            last_only=False,
            feature_layers=self._feature_layers,
        )
