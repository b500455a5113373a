"""When a request ends: budget, EOS, stop strings, criteria of transformers; after every token.

A round emits several tokens; each is tested in turn, so the text ends where plain decoding ends.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from profiles.errors import UsageError

StoppingCriterion = Callable[[Tensor, Tensor], Any]


class StopRules:
    """The stopping rules of one request.

    Args:
        max_new_tokens: Exact budget, at least 1.
        eos_ids: Token ids that end the text (the id itself is kept, as transformers does).
        stop_strings: Texts that end it; the token that completes one is kept. None spans a token
            that the tokenizer does not have, as in transformers.
        criteria: Stopping criteria of transformers, called with (ids [1, n], scores [1, V]).
        tokenizer: Needed for `stop_strings` only.
        device: Where criteria expect their tensors.
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        criteria: Sequence[StoppingCriterion] = (),
        tokenizer: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.eos_ids = frozenset(eos_ids)
        self._criteria = list(criteria)
        self._n_own = len(self._criteria)
        self._device = device
        if not all(stop_strings):
            raise UsageError("a stop string needs some text, but one is empty; leave it out")
        if stop_strings:
            self._criteria.append(_stop_strings(tokenizer, list(stop_strings)))

    def reason(self, tokens: list[int], n_prompt: int, scores: Tensor) -> str | None:
        """Return why the text ends with its last token, or None where it goes on.

        Args:
            tokens: Prompt and generated tokens, the one just emitted last.
            n_prompt: Length of the prompt.
            scores: Processed scores [1, V] the token was drawn from.
        """
        if tokens[-1] in self.eos_ids:
            return "eos"
        if self._criteria:
            ids = torch.tensor([tokens], device=self._device)
            for number, criterion in enumerate(self._criteria):
                # Only the generated part can hold a stop string; the prompt may quote one.
                seen = ids if number < self._n_own else ids[:, n_prompt:]
                if bool(torch.as_tensor(criterion(seen, scores)).all()):
                    return "criterion" if number < self._n_own else "stop"
        return "length" if len(tokens) - n_prompt >= self.max_new_tokens else None


def _stop_strings(tokenizer: Any, strings: list[str]) -> StopStringCriteria:
    try:
        return StopStringCriteria(tokenizer, strings)
    except ValueError as error:
        raise UsageError(
            f"the tokenizer must be able to spell a stop string, but cannot spell {strings}; "
            "change it or leave it out"
        ) from error
