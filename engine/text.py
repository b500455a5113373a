"""Text in and out: chat templates and streaming. The only module here that reads a tokenizer."""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Turns token ids into text piece by piece, never cutting a character.

    Args:
        tokenizer: A tokenizer of transformers.
        context: Token ids before the first one; only their decoding is skipped.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # ids before this one are final and not decoded again
        self._shown = 0  # ids before this one have been shown

    def _decode(self, start: int, end: int) -> str:
        return str(
            self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Add token ids and return the text that is complete now; it may be empty."""
        self._ids += token_ids
        shown = self._decode(self._context, self._shown)
        text = self._decode(self._context, len(self._ids))
        if text.endswith("\ufffd"):  # the last character is not complete
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def finish(self) -> str:
        """Return what is left, incomplete characters included."""
        shown = self._decode(self._context, self._shown)
        return self._decode(self._context, len(self._ids))[len(shown) :]
