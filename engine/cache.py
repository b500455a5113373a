"""The key/value cache: new tokens are written at the end, a round's accepted path is kept.

Works as a transformers `Cache`, so any model that takes one decodes on it. Sliding-window
layers keep their whole past here; the window is a matter of the mask, which lets a round roll
back after the window has been passed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .devices import sent

CHUNK = 512
"""Most tokens of one pass over a prompt: memory then grows with the context, not its square."""

SPARE_ROWS = 64
"""Rows to allocate for the nodes of a round, beyond the text itself; more cost a copy."""


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, n_kv_heads, capacity, head_dim], filled up to `length`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers; a model's head counts and sizes are read from its first states."""
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_empty(
            *value_states.shape[:2], self.capacity, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, n_kv_heads, n, head_dim] at the end and return views of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, n: int) -> None:
        self.capacity = max(n, 2 * self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], self.capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def keep(self, start: int, rows: Tensor) -> None:
        """Move the rows `start + rows` to `start`, `start + 1`, ... and forget what follows."""
        for states in (self.keys, self.values):
            states[:, :, start : start + len(rows)] = states[:, :, start + rows]
        self.length = start + len(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `tokens_to_remove` tokens (a negative count, as transformers has it)."""
        self.length -= abs(tokens_to_remove)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the offset of the first, as transformers asks for it."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens held, as transformers asks for it."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no limit that transformers must know of."""
        return -1


class RowLayout(NamedTuple):
    """How the tokens of a pass, one after another over all rows, form rows of equal length.

    Attributes:
        counts: New tokens of every row.
        starts: Tokens that every row holds before them.
        slots: int64, the place of every token in [n_rows * n]; None where all rows are full.
    """

    counts: Sequence[int]
    starts: Sequence[int]
    slots: Tensor | None = None

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.counts)

    @property
    def n(self) -> int:
        """Most new tokens of a row."""
        return max(self.counts)


class LayerStates(NamedTuple):
    """What one layer holds after `KVCache.extend`.

    Attributes:
        new: Where keys and values of the added tokens belong: [2, n, n_kv_heads, head_dim].
        keys: All keys, the new ones included: [1, n_kv_heads, length, head_dim].
        values: All values.
    """

    new: Tensor
    keys: Tensor
    values: Tensor

    def write(self, states: Tensor) -> None:
        """Write the added keys and values, [n, 2, n_kv_heads, head_dim]."""
        self.new.copy_(states.transpose(0, 1))


class Slots(Protocol):
    """One layer of a cache during a pass, as an attention layer needs it."""

    @property
    def keys(self) -> Tensor:
        """All keys, the new ones included once they are written."""

    @property
    def values(self) -> Tensor:
        """All values."""

    def write(self, states: Tensor) -> None:
        """Write the added keys and values, [n, 2, n_kv_heads, head_dim]."""


class Extendable(Protocol):
    """A cache whose layers grow together."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def extend(self, n: int, n_kv_heads: int, head_dim: int, like: Tensor) -> Sequence[Slots]:
        """Add n tokens to all layers; see `KVCache.extend`."""


class KVCache(Cache):
    """The cache of one sequence.

    Args:
        n_layers: Layers of the model that will write to it.
        capacity: Tokens to allocate for at the first write; more are allowed, at the price of
            a copy.
    """

    layers: list[KVLayer]

    def __init__(self, n_layers: int, capacity: int) -> None:
        super().__init__(layers=[KVLayer(capacity) for _ in range(n_layers)])
        self.positions = torch.zeros(capacity, dtype=torch.int64)
        self._states: Tensor | None = None  # [n_layers, 2, 1, n_kv_heads, capacity, head_dim]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length

    def extend(self, n: int, n_kv_heads: int, head_dim: int, like: Tensor) -> list[LayerStates]:
        """Add n tokens to all layers at once; their keys and values are for the caller to write.

        All layers then share one tensor, which spares a pass a few calls per layer. A cache is
        either extended or updated layer by layer, not both.

        Args:
            n: Tokens to add.
            n_kv_heads: Heads of keys and of values, the same in every layer.
            head_dim: Size of a head.
            like: A tensor of the dtype and on the device to allocate.
        """
        start, end = self.length, self.length + n
        states = self._states
        if states is None or end > states.shape[4]:
            capacity = max(end, self.layers[0].capacity if start == 0 else 2 * start)
            shape = (len(self.layers), 2, 1, n_kv_heads, capacity, head_dim)
            states = self._allocate(shape, like)
        for layer in self.layers:
            layer.length = end
        held = states[..., :end, :]
        return [
            LayerStates(*of_layer)
            for of_layer in zip(
                held[:, :, 0, :, start:].transpose(2, 3).unbind(),
                held[:, 0].unbind(),
                held[:, 1].unbind(),
                strict=True,
            )
        ]

    def _allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        states = like.new_empty(shape)
        if self._states is not None:
            states[..., : self.length, :] = self._states[..., : self.length, :]
        self._states = states
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.keys, layer.values = keys, values
            layer.capacity, layer.is_initialized = shape[4], True
        return states

    def note_positions(self, positions: Tensor) -> None:
        """Record the absolute positions, int64 [n], of the tokens about to be written."""
        end = self.length + len(positions)
        if self.positions.device != positions.device or end > len(self.positions):
            grown = positions.new_zeros(max(end, 2 * len(self.positions)))
            grown[: self.length] = self.positions[: self.length]
            self.positions = grown
        self.positions[self.length : end] = positions

    def truncate(self, length: int) -> None:
        """Forget every token from position `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def keep_path(self, start: int, path: list[int]) -> None:
        """Keep, of the tokens written from `start` on, those with the offsets in `path`.

        Args:
            start: Tokens held before the verify pass.
            path: Offsets of the accepted nodes, ascending, root (0) first.
        """
        if path[-1] == len(path) - 1:  # already contiguous: nothing moves
            self.truncate(start + len(path))
            return
        rows = sent(path, self.layers[0].keys.device)
        if self._states is None:
            for layer in self.layers:
                layer.keep(start, rows)
        else:
            self._states[..., start : start + len(path), :] = self._states[..., start + rows, :]
            self.truncate(start + len(path))
        self.positions[start : start + len(path)] = self.positions[start + rows]
