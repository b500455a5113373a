"""Step 5, second half: the most promising trees timed against plain on the tune prompts."""

from collections.abc import Iterator, Sequence

import torch

from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from profiles import PLAIN, TreeConfig

from .job import Job
from .predicting import Predictor
from .search import (
    PLAIN_PREDICTION,
    Candidate,
    best_chain,
    best_shallow,
    defaults_within,
    leaders,
)
from .space import SearchSpace
from .tracing import Conversation

N_LEADERS = 5
"""Predicted leaders that are measured whatever Optuna proposes."""


def contenders(
    predicted: Sequence[Candidate],
    spaces: dict[str, SearchSpace],
    predictor: Predictor,
) -> list[Candidate]:
    """Return what is measured first: the leader, plain, chain and shallow tree, more leaders."""
    first, *others = leaders(predicted, N_LEADERS)
    chosen = [first, Candidate(next(iter(spaces)), PLAIN, PLAIN_PREDICTION)]
    chosen += [c for c in (best_chain(predicted), best_shallow(predicted)) if c is not None]
    chosen += others
    chosen += [predictor.candidate(draft, tree) for draft, tree in defaults_within(spaces)]
    unique = {(c.draft, c.tree.canonical()): c for c in reversed(chosen)}
    return list(reversed(unique.values()))


class Race:
    """Times trees against plain decoding, request by request, on forced text."""

    def __init__(self, job: Job, conversations: Sequence[Conversation]) -> None:
        self._job = job
        self._conversations = conversations
        self._plain = SpeculativeDecoder(job.loaded, sampling=job.settings.sampling)

    def measure(self, draft: str, tree: TreeConfig) -> Iterator[float]:
        """Yield the speedup on one prompt after another, sides in alternating order.

        Raises:
            MemoryError: The tree does not fit the device.
        """
        job = self._job
        decoder = SpeculativeDecoder(
            job.loaded, job.drafts[draft].draft, tree, job.settings.sampling
        )
        for i, conversation in enumerate(self._conversations):
            sides = (self._plain, decoder) if i % 2 == 0 else (decoder, self._plain)
            try:
                seconds = {
                    side: sum(run_forced(side, trace).total_s for trace in conversation)
                    for side in sides
                }
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            decoder.remember(conversation)
            yield seconds[self._plain] / seconds[decoder]
