"""What decoding needs of a device's memory, estimated before it is allocated, and what is free.

What comes on top of the weights grows with the text (the caches of target and draft, and the
features a head has yet to read) and with the tree (the rows of a verify pass with their logits,
and what the draft's levels hold). Arithmetic on sizes: nothing is allocated here.
"""

from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from profiles import PLAIN, TreeConfig
from profiles.errors import SpectuneError

from .beam import BeamDraft
from .cache import CHUNK, SPARE_ROWS
from .draft import Draft
from .fingerprint import cgroup_limits
from .hybrid import HybridDraft
from .packed import held_twice
from .static import capacity_of, recorded_rows
from .target import Target

RESERVE = 2**28
"""Bytes left to the allocator, to libraries and to whatever else runs there."""

SCORE_BYTES = 12
"""Bytes per row and token of a vocabulary: logits and what is made of them, in float32."""

MASK_BYTES = 5
"""Bytes per row and token of context: a boolean mask, and what is added to the scores."""

BATCH_GROWTH = 3
"""Bytes of a batch's caches over those of its texts: room doubles, and is copied as it grows."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that may still be allocated on a device; a reserve is left out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds without using it serves the next tensor.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        used = psutil.Process().memory_info().rss
        limits = [limit - used for limit in cgroup_limits()]
        free = min([psutil.virtual_memory().available, *limits])
    return max(0, int(free) - RESERVE)


def gib(n_bytes: int) -> str:
    """Return bytes as people read them."""
    return f"{n_bytes / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Need:
    """What requests of one target and draft allocate, in bytes.

    Attributes:
        token: Per token of the text: both caches, and features until the head reads them.
        row: Per row of a target pass: activations.
        score: Per row of a verify pass: logits.
        draft_row: Per node that the draft expands: cache, activations and logits.
        is_lent: Whether passes are recorded, on caches of fixed sizes; see `engine.static`.
    """

    token: int
    row: int
    score: int
    draft_row: int = 0
    is_lent: bool = False

    def bytes(self, n_tokens: int, tree: TreeConfig = PLAIN) -> int:
        """Return the bytes of a request of that many tokens, prompt and answer together."""
        prefill = min(n_tokens, CHUNK) * (self.row + MASK_BYTES * n_tokens)
        n_rows = recorded_rows(tree.nodes + 1) if self.is_lent else tree.nodes + 1
        round_bytes = n_rows * (self.row + self.score)
        if not tree.is_plain:
            round_bytes += tree.width * tree.depth * self.draft_row
        held = capacity_of(n_tokens) if self.is_lent else n_tokens + SPARE_ROWS
        return held * self.token + max(prefill, round_bytes)

    def most_rows(self, n_tokens: int, tree: TreeConfig, free: int) -> int:
        """Return how many requests of that many tokens fit at a time; 0 if there is no room.

        The prompt of one that joins runs by itself, beside the rows in flight.
        """
        row = BATCH_GROWTH * (n_tokens + SPARE_ROWS) * self.token
        row += (tree.nodes + 1) * (self.row + self.score + MASK_BYTES * n_tokens)
        row += tree.width * tree.depth * self.draft_row
        return max(0, free - self.bytes(n_tokens, tree)) // row

    def longest(self, free: int) -> int:
        """Return the most tokens a text may have for plain decoding; 0 if there is no room."""
        low, high = 0, 2**31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= free else (low, middle - 1)
        return low


def need_of(target: Target, draft: Draft | None = None) -> Need:
    """Return what requests need; a draft without weights needs next to nothing."""
    need = Need(
        token=target.cache_bytes,
        row=target.row_bytes,
        score=SCORE_BYTES * target.vocab_size,
        is_lent=target.static is not None,
    )
    head = draft.head if isinstance(draft, HybridDraft) else draft
    if not isinstance(head, BeamDraft):
        return need
    features = len(head.feature_layers) * target.config.hidden_size * target.dtype.itemsize
    return replace(
        need,
        token=need.token + head.cache_bytes + features,
        row=need.row + features,
        draft_row=head.cache_bytes + head.row_bytes + SCORE_BYTES * head.max_top_k,
    )


@dataclass(frozen=True)
class Room:
    """What requests of some length may use.

    Attributes:
        need: What they allocate.
        n_tokens: Tokens of the longest of them.
        free: Bytes there are.
    """

    need: Need
    n_tokens: int
    free: int

    def fits(self, tree: TreeConfig) -> bool:
        """Tell whether rounds of a tree fit."""
        return self.need.bytes(self.n_tokens, tree) <= self.free

    def rows(self, tree: TreeConfig) -> int:
        """Return how many of them rounds of a tree may have in flight, at least one."""
        return max(1, self.need.most_rows(self.n_tokens, tree, self.free))

    def shortage(self, tree: TreeConfig) -> str:
        """Say what a tree that does not fit would need."""
        return f"{gib(self.need.bytes(self.n_tokens, tree))} of {gib(self.free)} that are free"


def room_for(target: Target, draft: Draft | None, n_tokens: int) -> Room:
    """Return the room for requests of that many tokens as things are now.

    Raises:
        SpectuneError: Not even plain decoding fits.
    """
    free = free_bytes(target.device) + _idle_bytes(target, draft)
    plain = Room(need_of(target), n_tokens, free)
    if not plain.fits(PLAIN):
        raise SpectuneError(
            f"a text must fit the memory of {target.device}, but {n_tokens} tokens need "
            f"{plain.shortage(PLAIN)}; shorten the prompt, lower max_new_tokens or free memory"
        )
    return Room(need_of(target, draft), n_tokens, free)


def _idle_bytes(target: Target, draft: Draft | None) -> int:
    """Return the bytes of caches that are held to be lent again."""
    head = draft.head if isinstance(draft, HybridDraft) else draft
    lenders = [target.static, head.steps if isinstance(head, BeamDraft) else None]
    return sum(lender.shelf.idle_bytes for lender in lenders if lender is not None)


def check_weights_fit(
    model: nn.Module, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a model whose weights are larger than what is free.

    Args:
        model: The model without memory for its weights (on the device `meta`).
        name: How the user knows it.
        dtype: What its weights will be in.
        device: Where they will be; on a CPU linear layers may be held twice, see `packed`.

    Raises:
        SpectuneError: They do not fit; says what else could be done.
    """
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    linears = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    n_weights += sum(w.numel() for w in linears if held_twice(w.shape, device, dtype))
    needed, free = n_weights * dtype.itemsize, free_bytes(device)
    if needed <= free:
        return
    raise SpectuneError(
        f"a model must fit the memory of one device, but {name} in "
        f"{str(dtype).removeprefix('torch.')} needs {gib(needed)} and {device} has {gib(free)} "
        f"free; {_elsewhere(needed)}"
    )


def _elsewhere(needed: int) -> str:
    """Say where a model that does not fit here could be tuned."""
    n_devices = torch.cuda.device_count()
    for i in range(n_devices):
        if free_bytes(torch.device("cuda", i)) >= needed:
            return f"use --device cuda:{i}, which has room, or a smaller dtype"
    together = sum(free_bytes(torch.device("cuda", i)) for i in range(n_devices))
    if n_devices > 1 and together >= needed:
        return (
            "it needs several GPUs at once, which this engine does not use: tune it in a serving "
            "engine that splits it (--backend vllm), or use a smaller model or dtype"
        )
    return "use a smaller model or dtype, or free memory"
