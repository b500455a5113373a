"""Choosing a token from logits: argmax, or argmax of logits plus counter-based Gumbel noise.

The noise of a token depends on the request's seed, on the index of the generated token and on
the token id, and on nothing else. A draw is therefore the same with and without speculation,
in any batch slot and on any device.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from profiles import GREEDY, Sampling

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed integers
_GOLDEN = -0x61C8864680B583EB


def request_seed(seed: int, index: int) -> int:
    """Return the seed of the request at `index` of a caller's list: a hash, so order is free."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 (the splitmix64 finaliser, Steele et al. 2014); shifts are logical."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def gumbel_noise(seed: int, index: int, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise for token ids, as float64 of the same shape.

    Args:
        seed: The request's seed, any 64-bit integer.
        index: Which generated token of the request this is, from 0.
        token_ids: int64, any shape.
    """
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=token_ids.device) + _GOLDEN)
    key = _mix(key ^ (index * 2 + 1))
    bits = _mix(key + token_ids * _GOLDEN)
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


class Sampler:
    """Draws the tokens of one request.

    Args:
        sampling: Temperature (0 is greedy), top-k and top-p, as transformers defines them.
        seed: The request's seed; ignored by greedy decoding.
        processors: Logits processors of transformers, called once per generated token with the
            token's own prefix, in order: exactly as in plain decoding, stateful ones included.
    """

    def __init__(
        self,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self._processors = LogitsProcessorList(processors)
        if sampling.temperature > 0:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))

    def drawer(
        self, logits: Tensor, tokens: list[int], n_prompt: int
    ) -> Callable[[int], tuple[int, Tensor]]:
        """Return a function that draws the next token at a row of `logits`.

        The function must be called for visited nodes only, after the tokens before that node
        have been appended to `tokens`; it returns the token and its processed scores [1, V].

        Args:
            logits: [n, vocabulary], one row per node.
            tokens: Prompt and generated tokens; read at each call.
            n_prompt: Length of the prompt in `tokens`.
        """
        if self.sampling.temperature == 0 and not self._processors:
            # As `argmax`, the first of equals, but several times faster on a CPU.
            choices = logits.max(dim=-1).indices.tolist()
            return lambda row: (choices[row], logits[row : row + 1])

        def draw(row: int) -> tuple[int, Tensor]:
            scores = logits[row : row + 1]
            if scores.dtype in (torch.float16, torch.bfloat16):
                scores = scores.float()
            prefix = torch.tensor([tokens], device=logits.device)
            scores = self._processors(prefix, scores.clone())
            if self.sampling.temperature == 0:
                return int(scores.argmax()), scores
            # Only tokens that survived the filters can win; the others need no noise.
            candidates = torch.nonzero(scores[0] > float("-inf"))[:, 0]
            noise = gumbel_noise(self.seed, len(tokens) - n_prompt, candidates)
            return int(candidates[(scores[0, candidates].double() + noise).argmax()]), scores

        return draw
