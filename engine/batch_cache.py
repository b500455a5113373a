"""The key/value cache of a batch: every row has its own length, new tokens go to its own end.

Rows in use are the first ones; a row that is dropped is replaced by the last. Works as a
transformers `Cache`, so that any model which takes one decodes on it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache import SPARE_ROWS, KVCache, RowLayout


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, each [n_slots, n_kv_heads, capacity, head_dim]."""

    is_croppable = False
    is_sliding = False

    def __init__(self, cache: "BatchCache") -> None:
        super().__init__()
        self._cache = cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: buffers are allocated by the first row that joins."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [n_rows, n_kv_heads, n, head_dim] at the rows' ends; return what they hold.

        Where a row has fewer new tokens than n, what lies behind them is written, too, and stays
        beyond the row's length.
        """
        rows, columns = self._cache.padded_places
        self.keys[rows, :, columns] = key_states.transpose(1, 2)
        self.values[rows, :, columns] = value_states.transpose(1, 2)
        n_rows, end = len(rows), self._cache.end
        return self.keys[:n_rows, :, :end], self.values[:n_rows, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the offset of the first, as transformers asks for it."""
        return self._cache.end, 0

    def get_seq_length(self) -> int:
        """Return the most tokens a row holds, as transformers asks for it."""
        return self._cache.length

    def get_max_length(self) -> int:
        """Return -1: there is no limit that transformers must know of."""
        return -1


class BatchStates:
    """What one layer holds while a pass adds tokens to it.

    Attributes:
        keys: Keys of all rows in use, [n_rows, n_kv_heads, end, head_dim].
        values: Values, likewise.
    """

    def __init__(self, both: Tensor, places: tuple[Tensor, Tensor], keys_values: Tensor) -> None:
        self._both = both  # [2, n_slots, n_kv_heads, capacity, head_dim]
        self._rows, self._columns = places
        self.keys, self.values = keys_values.unbind()

    def write(self, states: Tensor) -> None:
        """Write the added keys and values, [n, 2, n_kv_heads, head_dim], row after row."""
        self._both[:, self._rows, :, self._columns] = states


class BatchCache(Cache):
    """The cache of several sequences.

    Args:
        n_layers: Layers of the model that will write to it.
        n_slots: Most rows at a time.
        device: Where the rows lie.
    """

    layers: list[BatchLayer]

    def __init__(self, n_layers: int, n_slots: int, device: torch.device) -> None:
        super().__init__(layers=[BatchLayer(self) for _ in range(n_layers)])
        self.lengths: list[int] = []
        self.end = 0
        self._n_slots = n_slots
        self._device = device
        self._capacity = 0
        self._stacks: list[Tensor] = []  # [n_parts, n_slots, n_kv_heads, capacity, head_dim]
        self._counts: list[int] = []
        self.positions = torch.zeros(n_slots, 0, dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    def join(self, cache: KVCache) -> None:
        """Add a row that holds what the cache of a single sequence does."""
        row, length = len(self.lengths), cache.length
        parts = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        if not self._stacks:
            self._allocate(parts)
        self._reserve(length + SPARE_ROWS)
        for part, mine in zip(parts, self._parts(), strict=True):
            mine[row, :, :length] = part[0, :, :length]
        self.positions[row, :length] = cache.positions[:length]
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row == last:
            return
        for stack in self._stacks:
            stack[:, row, :, :length] = stack[:, last, :, :length]
        self.positions[row, :length] = self.positions[last, :length]
        self.lengths[row] = length

    def begin(self, counts: Sequence[int], positions: Tensor) -> RowLayout:
        """Make room for a pass that adds tokens to every row.

        Args:
            counts: New tokens of every row, at least 1 each.
            positions: int64, their absolute positions, row after row.
        """
        n_rows, n = len(self.lengths), max(counts)
        self._counts = list(counts)
        self.end = self.length + n
        self._reserve(self.end)
        starts = torch.tensor(self.lengths, device=self._device)
        columns = starts[:, None] + torch.arange(n, device=self._device)
        self.padded_places = (torch.arange(n_rows, device=self._device)[:, None], columns)
        slots = None
        rows = self.padded_places[0].expand(-1, n).flatten()
        columns = columns.flatten()
        if min(counts) < n:
            used = [row * n + i for row, count in enumerate(counts) for i in range(count)]
            slots = torch.tensor(used, device=self._device)
            rows, columns = rows[slots], columns[slots]
        self._places = (rows, columns)
        self.positions[rows, columns] = positions
        return RowLayout(self._counts, self.lengths, slots)

    def extend(self, n: int, n_kv_heads: int, head_dim: int, like: Tensor) -> list[BatchStates]:
        """Return the states of all layers for the pass that has begun; see `KVCache.extend`."""
        n_rows = len(self.lengths)
        (stack,) = self._stacks  # heads are alike in all layers, else the pass goes by `update`
        pairs = stack.unflatten(0, (-1, 2))
        held = pairs[:, :, :n_rows, :, : self.end]
        return [
            BatchStates(both, self._places, keys_values)
            for both, keys_values in zip(pairs.unbind(), held.unbind(), strict=True)
        ]

    def keep_all(self) -> None:
        """Keep all tokens that the last pass added."""
        self.lengths = [n + new for n, new in zip(self.lengths, self._counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what rows hold beyond their given lengths."""
        self.lengths = list(lengths)

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the tokens that the last pass added to each row, those of an accepted path.

        Args:
            paths: Per row offsets of the accepted nodes, ascending, root (0) first.
        """
        moves = [
            (row, length + i, length + offset)
            for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True))
            for i, offset in enumerate(path)
            if i != offset
        ]
        if moves:
            rows, to, origin = torch.tensor(moves, device=self._device).unbind(1)
            for stack in self._stacks:
                stack[:, rows, :, to] = stack[:, rows, :, origin]
            self.positions[rows, to] = self.positions[rows, origin]
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    def _parts(self) -> list[Tensor]:
        """Return keys and values of all layers in order."""
        return [part for stack in self._stacks for part in stack.unbind()]

    def _allocate(self, parts: Sequence[Tensor]) -> None:
        """Allocate for rows like the first one; one tensor for all layers if they are alike."""
        shapes = [(part.shape[1], part.shape[3]) for part in parts]
        counts = [len(parts)] if len(set(shapes)) == 1 else [1] * len(parts)
        self._stacks = [
            parts[0].new_zeros(n, self._n_slots, heads, 0, size)
            for n, (heads, size) in zip(counts, shapes, strict=False)
        ]

    def _reserve(self, capacity: int) -> None:
        """Allocate for at least so many tokens a row."""
        if capacity <= self._capacity:
            return
        self._capacity = max(capacity, 2 * self._capacity)
        self._stacks = [_grown(stack, 3, self._capacity) for stack in self._stacks]
        self.positions = _grown(self.positions, 1, self._capacity)
        parts = self._parts()
        for layer, keys, values in zip(self.layers, parts[::2], parts[1::2], strict=True):
            layer.keys, layer.values = keys, values


def _grown(old: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with more room along one axis.

    The room is zeroed: masked keys are multiplied by 0, which a number survives and NaN does not.
    """
    shape = list(old.shape)
    shape[dim] = size
    new = old.new_zeros(shape)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


def visible_rows(lengths: Sequence[int], masks: Sequence[Tensor], end: int) -> Tensor:
    """Return who attends to whom in a pass over several rows, bool [n_rows, n, end].

    Args:
        lengths: Tokens that every row holds already.
        masks: Per row bool [n_i, m_i] with m_i >= n_i, which of its new tokens attends to which
            of its last m_i, the new ones included; what precedes them is visible. n is the
            largest n_i.
        end: Columns of the cache, the new tokens included.
    """
    n = max(len(mask) for mask in masks)
    visible = torch.zeros(len(masks), n, end, dtype=torch.bool, device=masks[0].device)
    for row, (length, mask) in enumerate(zip(lengths, masks, strict=True)):
        n_new, n_seen = mask.shape
        start = length + n_new - n_seen
        visible[row, :, :start] = True
        visible[row, :n_new, start : start + n_seen] = mask
    return visible


def padded(values: Tensor, layout: RowLayout) -> Tensor:
    """Return values [n_tokens, ...] as equally long rows [n_rows, n, ...], filled with zeros."""
    if layout.slots is not None:
        empty = values.new_zeros(layout.n_rows * layout.n, *values.shape[1:])
        values = empty.index_copy_(0, layout.slots, values)
    return values.reshape(layout.n_rows, layout.n, *values.shape[1:])


def packed(rows: Tensor, layout: RowLayout) -> Tensor:
    """Return what belongs to tokens of rows [n_rows, n, ...], one after another."""
    flat = rows.flatten(0, 1)
    return flat if layout.slots is None else flat[layout.slots]
