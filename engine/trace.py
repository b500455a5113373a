"""Recording the target's own text: the forced text of every timing and the ground of replay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profiles import PLAIN, Sampling

from .decode import Request, decode
from .sampling import Sampler, request_seed
from .stopping import StopRules
from .target import Target


@dataclass(frozen=True)
class Trace:
    """One prompt and what the target said after it, as token ids.

    Attributes:
        id: The prompt's name in the sample.
        prompt: Token ids of the prompt.
        generated: Token ids of the answer, EOS included where it was reached.
    """

    id: str
    prompt: list[int]
    generated: list[int]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.generated


def record(
    target: Target,
    prompt_id: str,
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    sampling: Sampling,
    seed: int,
    index: int,
) -> Trace:
    """Decode one prompt plainly and keep the token ids.

    Args:
        index: Place of the prompt in the sample; with `seed` it fixes the noise of sampling.
    """
    request = Request(
        target,
        None,
        prompt,
        Sampler(sampling, request_seed(seed, index)),
        StopRules(max_new_tokens, eos_ids),
    )
    for _ in decode(request, lambda _: PLAIN):
        pass
    return Trace(prompt_id, prompt, request.generated)


@torch.inference_mode()
def text_features(target: Target, tokens: list[int], layers: Sequence[int]) -> Tensor | None:
    """Return the target's features of every token of a known text, from one pass."""
    if not layers:
        return None
    cache = target.new_cache(len(tokens))
    return target.forward(tokens, cache, last_only=True, feature_layers=layers)[1]


Tick = Callable[[], None]
"""Called after each unit of a long job; for progress bars."""


def no_tick() -> None:
    """Report nothing."""
