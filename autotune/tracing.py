"""Step 3: the target's own answers to the sample's prompts."""

from collections.abc import Sequence
from typing import Protocol

from engine.pair import LoadedTarget
from engine.trace import Trace, record

from .progress import Silent
from .sample import SamplePrompt, render
from .settings import Settings

Conversation = list[Trace]
"""The turns of one prompt; they are timed together, as one unit of the statistics."""


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
    conversations = []
    with progress.step(title, len(prompts)) as tick:
        for index, prompt in enumerate(prompts):
            conversations.append(_converse(source, prompt, index))
            tick()
    return conversations


def _converse(source: Source, prompt: SamplePrompt, index: int) -> Conversation:
    loaded, settings = source.loaded, source.settings
    answers: list[str] = []
    traces: Conversation = []
    longest = (loaded.target.max_positions or 2**31) - settings.max_new_tokens
    for turn in range(prompt.n_turns):
        ids = list(prompt.token_ids)
        if answers:
            ids = render(prompt.prompt, answers, loaded.tokenizer, raw=settings.raw)
        if len(ids) > longest:
            break  # the conversation has outgrown the context
        trace = record(
            loaded.target,
            f"{prompt.id}.{turn}",
            ids,
            max_new_tokens=settings.max_new_tokens,
            eos_ids=loaded.eos_ids,
            sampling=settings.sampling,
            seed=settings.seed,
            index=index,
        )
        traces.append(trace)
        answers.append(loaded.tokenizer.decode(trace.generated, skip_special_tokens=True))
    return traces


def flatten(conversations: Sequence[Conversation]) -> list[Trace]:
    """Return all turns in one list."""
    return [trace for conversation in conversations for trace in conversation]
