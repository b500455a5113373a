"""How much memory a tree needs, and how much there is: asked before it runs.

A process that asks for too much is killed on some systems before anything can be caught. The
estimate is generous; a tree beyond it is infeasible.
"""

import psutil
import torch

from profiles import TreeConfig

from .cache import SPARE_ROWS
from .target import Target


def needed_bytes(target: Target, n_tokens: int, tree: TreeConfig) -> int:
    """Return the bytes a request takes at most, beside the weights, by the target's config.

    Args:
        target: The target.
        n_tokens: Tokens of the prompt and of the answer.
        tree: The tree of its rounds.
    """
    config, size = target.config, target.dtype.itemsize
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    n_new, n_cached = tree.nodes + 1, n_tokens + tree.nodes + SPARE_ROWS
    cache = 2 * target.n_layers * n_kv_heads * head_dim * n_cached * size
    states = n_new * (8 * config.hidden_size + 4 * n_heads * head_dim) * size
    scores = n_new * n_cached * (n_heads * 4 + size + 1)  # of attention, with its masks
    logits = n_new * target.vocab_size * (size + 8)
    total: int = 2 * cache + states + scores + logits  # a cache that grows is there twice
    return total


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that can still be had."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return int(psutil.virtual_memory().available)


def check_fits(target: Target, n_tokens: int, tree: TreeConfig) -> None:
    """Refuse a tree that would not fit the device.

    Args:
        target: The target.
        n_tokens: Tokens of the prompt and of the answer.
        tree: The tree.

    Raises:
        MemoryError: It needs more than is free.
    """
    needed, free = needed_bytes(target, n_tokens, tree), free_bytes(target.device)
    if needed > free:
        raise MemoryError(
            f"a round of {tree.label()} needs {needed / 2**20:.0f} MiB, but {free / 2**20:.0f} "
            f"MiB of {target.device} are free"
        )
