"""The reference pass: one token on a fixed context, repeated to see how steady the machine is."""

import time

import torch

from .target import Target
from .timing import synchronize


@torch.inference_mode()
def reference_times(target: Target, n_passes: int, context: int = 64) -> list[float]:
    """Return the seconds of a fixed 1-token pass, repeated; their spread tells the noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (context,), generator=generator).tolist()
    cache = target.lend_cache(context + 1)
    target.forward(tokens, cache, last_only=True)
    target.forward(tokens[:1], cache)  # a warm-up, which on some devices records the pass
    cache.truncate(context)
    times = []
    for _ in range(n_passes):
        synchronize(target.device)
        started = time.perf_counter()
        target.forward(tokens[:1], cache)
        synchronize(target.device)
        times.append(time.perf_counter() - started)
        cache.truncate(context)
    return times
