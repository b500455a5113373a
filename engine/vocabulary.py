"""Whether the token ids of a target and a small draft mean the same.

Must not know about weights.
"""

from typing import Any

from profiles.errors import SpectuneError


def check_same_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_vocab: int, draft_vocab: int
) -> None:
    """Refuse a small draft whose token ids do not mean what the target's mean.

    Embedding rows beyond the tokenizer's ids are padding and may differ in number.

    Args:
        target_tokenizer: The target's tokenizer.
        draft_tokenizer: The draft's tokenizer.
        target_vocab: Embedding rows of the target.
        draft_vocab: Embedding rows of the draft.

    Raises:
        SpectuneError: The vocabularies differ, or the draft lacks rows for tokens in use.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    differing = sorted(
        (token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)),
        key=lambda token: (target.get(token, len(target)), token),
    )
    if differing:
        examples = ", ".join(
            f"{token!r} is {target.get(token, 'absent')} and {draft.get(token, 'absent')}"
            for token in differing[:3]
        )
        raise SpectuneError(
            "a draft model must share the target's tokenizer, but the two differ in "
            f"{len(differing)} tokens ({examples}); use a draft of the same model family, an "
            "EAGLE-3 head or lookup"
        )
    n_used = min(max(target.values(), default=-1) + 1, target_vocab)
    if draft_vocab < n_used:
        raise SpectuneError(
            f"a draft model must have an embedding row for each of the {n_used} token ids the "
            f"target uses, but it has {draft_vocab}; use a draft of the same model family, an "
            "EAGLE-3 head or lookup"
        )
