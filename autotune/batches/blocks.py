"""Batches of recorded answers to time, and the decoders to time them with.

All prompts of a batch are in flight at once, their texts forced and cut to one length: plain
decoding then keeps every row busy to the end, while with a tree rows end one by one. A queue
would fill them again, so what is measured is, if anything, too low for the tree.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.decoder import SpeculativeDecoder
from engine.trace import Trace
from profiles import TreeConfig

from ..job import Job
from ..tracing import Conversation

MIN_TOKENS = 6
"""Tokens below which an answer leaves no round to time."""


def batches_of(conversations: Sequence[Conversation], size: int) -> list[list[Trace]]:
    """Return first answers in batches of `size`, each cut to one length; no answer is in two.

    Answers of like length go together, so that little is cut. What does not fill a batch, and
    answers that are too short to time, are left out.
    """
    answers = [c[0] for c in conversations if c and len(c[0].generated) >= MIN_TOKENS]
    answers.sort(key=lambda trace: -len(trace.generated))
    batches = [answers[i : i + size] for i in range(0, len(answers) - size + 1, size)]
    return [_cut(batch) for batch in batches]


def _cut(batch: Sequence[Trace]) -> list[Trace]:
    n = min(len(trace.generated) for trace in batch)
    return [replace(trace, generated=trace.generated[:n]) for trace in batch]


def batch_decoder(job: Job, draft: str, tree: TreeConfig) -> SpeculativeDecoder:
    """Return a decoder of one tree, whatever the number of prompts in flight."""
    drafting = None if tree.is_plain else job.drafts[draft].draft
    return SpeculativeDecoder(job.loaded, drafting, tree, job.settings.sampling)
