"""Step 3: the target's own answers to the sample's prompts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from engine.pair import LoadedTarget
from engine.trace import Trace, record

from .progress import Silent
from .sample import SamplePrompt, render
from .settings import Settings

Conversation = list[Trace]
"""The turns of one prompt; they are timed together, as one unit of the statistics."""

Record = Callable[[str, list[int]], Trace]
"""Decodes a prompt plainly: called with a name and its token ids."""


class Source(Protocol):
    """Whose answers are recorded, and how they are drawn."""

    @property
    def loaded(self) -> LoadedTarget:
        """The target."""

    @property
    def settings(self) -> Settings:
        """How much of it is recorded, and how tokens are drawn."""


def record_answers(
    source: Source, prompts: Sequence[SamplePrompt], progress: Silent, title: str
) -> list[Conversation]:
    """Decode prompts plainly, later turns with the target's own answers before them."""
    loaded, settings = source.loaded, source.settings
    longest = (loaded.target.max_positions or 2**31) - settings.max_new_tokens
    conversations = []
    with progress.step(title, len(prompts)) as tick:
        for index, prompt in enumerate(prompts):
            decode = partial(_record, source, index)
            conversations.append(
                converse(prompt, loaded.tokenizer, decode, longest=longest, raw=settings.raw)
            )
            tick()
    return conversations


def converse(
    prompt: SamplePrompt, tokenizer: Any, record: Record, *, longest: int, raw: bool
) -> Conversation:
    """Record the turns of a prompt, up to the one whose prompt is longer than `longest`."""
    answers: list[str] = []
    traces: Conversation = []
    for turn in range(prompt.n_turns):
        ids = list(prompt.token_ids)
        if answers:
            ids = render(prompt.prompt, answers, tokenizer, raw=raw)
        if len(ids) > longest:
            break  # the conversation has outgrown the context
        trace = record(f"{prompt.id}.{turn}", ids)
        traces.append(trace)
        answers.append(tokenizer.decode(trace.generated, skip_special_tokens=True))
    return traces


def _record(source: Source, index: int, name: str, ids: list[int]) -> Trace:
    loaded, settings = source.loaded, source.settings
    return record(
        loaded.target,
        name,
        ids,
        max_new_tokens=settings.max_new_tokens,
        eos_ids=loaded.eos_ids,
        sampling=settings.sampling,
        seed=settings.seed,
        index=index,
    )


def flatten(conversations: Sequence[Conversation]) -> list[Trace]:
    """Return all turns in one list."""
    return [trace for conversation in conversations for trace in conversation]
