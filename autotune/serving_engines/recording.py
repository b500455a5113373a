"""Step 3 for a serving engine: the target's own answers, from a server without a draft."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.trace import Trace

from ..progress import Silent
from ..sample import SamplePrompt
from ..tracing import Conversation, converse
from .interface import Served
from .job import SPARE_TOKENS, ServerJob


def record_on(
    job: ServerJob,
    plain: Served,
    prompts: Sequence[SamplePrompt],
    progress: Silent,
    title: str,
) -> list[Conversation]:
    """Let a plain server that is awake answer prompts, as many at once as it will serve.

    The tokens of an answer are counted only: over HTTP no text can be forced, so every side
    gives as many tokens of its own as these answers have.
    """
    n_new = job.settings.max_new_tokens
    longest = job.deployment.max_tokens - n_new - SPARE_TOKENS

    def record(name: str, ids: list[int]) -> Trace:
        return Trace(name, ids, list(plain.answer(ids, n_new).token_ids))

    def answer(prompt: SamplePrompt) -> Conversation:
        done = converse(
            prompt, job.target.tokenizer, record, longest=longest, raw=job.settings.raw
        )
        tick()
        return done

    with (
        progress.step(title, len(prompts)) as tick,
        ThreadPoolExecutor(job.deployment.concurrency) as pool,
    ):
        return list(pool.map(answer, prompts))
