"""Text in and out: chat templates and streaming. The only module here that reads a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from profiles.errors import UsageError

# How a chat begins in the common templates; a text that begins so has its template already.
_CHAT_OPENINGS = (
    *("<|im_start|>", "<|start_header_id|>", "<|begin_of_text|>", "<start_of_turn>"),
    *("<|system|>", "<|user|>", "[INST]", "<s>"),
)

_PROMPT_RULE = "a prompt must be text, token ids or messages with `role` and `content`"

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""


def has_template(tokenizer: Any) -> bool:
    """Tell whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def is_templated(text: str, tokenizer: Any) -> bool:
    """Tell whether a text carries a chat template or a start token already."""
    openings = (*_CHAT_OPENINGS, *([tokenizer.bos_token] if tokenizer.bos_token else []))
    return text.lstrip().startswith(openings)


def encode_chat(messages: Sequence[Message], tokenizer: Any, *, raw: bool = False) -> list[int]:
    """Return the token ids that ask the target for the answer to a conversation.

    With the chat template if the tokenizer has one; without it, with `raw`, and for text that
    carries a template already, the contents themselves with a blank line between them. The ids
    have at most one start token, and no end token that the tokenizer put behind the text.

    Raises:
        ValueError: The chat template refuses the conversation.
    """
    if raw or not has_template(tokenizer) or is_templated(messages[0]["content"], tokenizer):
        ids = _encode("\n\n".join(message["content"] for message in messages), tokenizer)
    else:
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True
            )
        except Exception as error:  # a template is a program of its own
            raise ValueError(str(error)) from error
        ids = list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        del ids[0]
    return ids


def encode_prompt(
    prompt: str | Sequence[Message] | Sequence[int], tokenizer: Any, *, raw: bool = False
) -> list[int]:
    """Return the token ids of a user's text, of chat messages, or the ids that are given.

    Raises:
        UsageError: The prompt is empty or none of these, or the chat template refuses it.
    """
    _check_is_sequence(prompt)
    if not prompt:
        raise UsageError("a prompt needs at least one token, but it is empty; give some text")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if all(isinstance(item, int) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    if isinstance(prompt[0], Sequence):
        raise UsageError(f"{_PROMPT_RULE}, but is a list of several; give them one at a time")
    try:
        return encode_chat(prompt, tokenizer, raw=raw)  # type: ignore[arg-type]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{_PROMPT_RULE}, but is {type(prompt).__name__} without {error}; give one of these"
        ) from error
    except ValueError as error:
        raise UsageError(f"the target's chat template refuses the prompt: {error}") from error


def _check_is_sequence(prompt: object) -> None:
    if not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        raise UsageError(f"{_PROMPT_RULE}, but is a {kind}; give one of these, e.g. its tolist()")


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids = list(tokenizer.encode(text))
    eos = tokenizer.eos_token
    if ids and eos and ids[-1] == tokenizer.eos_token_id and not text.endswith(eos):
        ids.pop()  # an end token behind the prompt would tell the target to stop
    return ids


class TextStream:
    """Turns token ids into text piece by piece, never cutting a character.

    Args:
        tokenizer: A tokenizer of transformers.
        skip_special_tokens: Leave out the text of special tokens.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # ids before this one are final and not decoded again
        self._shown = 0  # ids before this one have been shown

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip))

    def push(self, token_ids: Sequence[int]) -> str:
        """Add token ids and return the text that is complete now; it may be empty."""
        self._ids += token_ids
        shown = self._decode(self._context, self._shown)
        text = self._decode(self._context, len(self._ids))
        # Nothing is taken as shown while the last character is incomplete, or while only special
        # tokens came: decoding goes on from text that people have seen, spaces included.
        if len(text) <= len(shown) or text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def finish(self) -> str:
        """Return what is left, incomplete characters included."""
        shown = self._decode(self._context, self._shown)
        return self._decode(self._context, len(self._ids))[len(shown) :]
