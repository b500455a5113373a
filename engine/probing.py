"""How often variants of an EAGLE-3 head are right about recorded text.

Measures; which variants to compare and what follows from it is not known here.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .eagle3_draft import Eagle3Draft
from .target import Target
from .trace import Tick, Trace, no_tick, text_features


@torch.inference_mode()
def first_choices_right(
    target: Target,
    variants: Sequence[Eagle3Draft],
    traces: Sequence[Trace],
    roots: Sequence[Sequence[int]],
    tick: Tick = no_tick,
) -> NDArray[np.bool_]:
    """Tell where each variant's first choice is the recorded next token, teacher-forced.

    Args:
        target: Gives the features, in one pass per trace for all variants.
        variants: Heads to compare.
        traces: Recorded texts.
        roots: For every trace the positions whose next token is to be guessed, each at least 1.
        tick: Called after every trace.

    Returns:
        Bool [n_variants, n_roots of all traces], in the order of the traces.
    """
    layers = sorted({layer for variant in variants for layer in variant.feature_layers})
    columns: list[NDArray[np.bool_]] = [np.zeros((len(variants), 0), dtype=np.bool_)]
    for trace, places in zip(traces, roots, strict=True):
        if places:
            tokens = trace.tokens[: max(places) + 1]
            features = text_features(target, tokens, layers)
            assert features is not None  # noqa: S101 - every head reads features
            by_layer = dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))
            wanted = np.array([trace.tokens[root + 1] for root in places])
            guesses = [_first_choices(v, tokens, by_layer, places) for v in variants]
            columns.append(np.stack([guess == wanted for guess in guesses]))
        tick()
    return np.concatenate(columns, axis=1)


def _first_choices(
    draft: Eagle3Draft, tokens: list[int], by_layer: dict[int, Tensor], roots: Sequence[int]
) -> NDArray[np.int64]:
    """Return the target ids a head puts first after each root, from one pass over the text."""
    head = draft.head
    features = torch.cat([by_layer[layer] for layer in draft.feature_layers], dim=-1)
    hidden = head.fuse(features[:-1])[None]
    n = hidden.shape[1]
    positions = torch.arange(n, device=hidden.device)[None]
    ids = torch.tensor([tokens[draft.first_token :]], device=hidden.device)
    states = head(ids, hidden, positions, draft.new_cache(n))[0]
    rows = torch.tensor(roots, device=hidden.device) - draft.first_token
    choices: NDArray[np.int64] = (
        head.to_target(head.logits(states[rows]).argmax(dim=-1)).cpu().numpy()
    )
    return choices
