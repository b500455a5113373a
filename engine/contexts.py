"""Timing passes of two sizes behind two lengths of context: what a longer cache costs.

Only differences are read off here; what a round costs is timed in served rounds.
"""

import random
import time
from dataclasses import dataclass

import torch

from .target import Target
from .timing import synchronize

N_NODES = 31
"""Draft nodes of the larger pass."""


@dataclass(frozen=True)
class ContextTime:
    """One timed pass.

    Attributes:
        context: Tokens in the cache before it.
        n_nodes: Draft nodes; 0 is a plain pass.
        seconds: Its time.
    """

    context: int
    n_nodes: int
    seconds: float


@torch.inference_mode()
def measure_contexts(
    target: Target, contexts: tuple[int, int], n_passes: int, seed: int = 0
) -> list[ContextTime]:
    """Time plain passes and passes over `N_NODES` nodes behind two contexts, in random order."""
    rng = random.Random(seed)
    vocabulary = range(target.vocab_size)
    caches = {}
    for context in contexts:
        caches[context] = target.lend_cache(context)
        target.forward(rng.choices(vocabulary, k=context), caches[context], last_only=True)
    cells = [(context, n_nodes) for context in contexts for n_nodes in (0, N_NODES)]
    times = []
    for i in range(n_passes + 1):
        for context, n_nodes in rng.sample(cells, len(cells)):
            tokens = rng.choices(vocabulary, k=n_nodes + 1)
            synchronize(target.device)
            started = time.perf_counter()
            target.forward(tokens, caches[context])
            synchronize(target.device)
            seconds = time.perf_counter() - started
            caches[context].truncate(context)
            if i:  # the first pass of each kind is a warm-up
                times.append(ContextTime(context, n_nodes, seconds))
    return times
