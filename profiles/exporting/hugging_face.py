"""transformers: Python that sets what `generate` reads in assisted generation.

It drafts in chains of `num_assistant_tokens`, our depth, at batch 1. The confidence threshold is
0 because the default ends drafts early; None would be filled with that default again.
"""

from typing import Any

from .body import Body, assignments
from .choice import Choice
from .comment import shortest_match

VERSION = "5.24.0"


def write(choice: Choice) -> Body:
    """Write a chain for transformers."""
    draft, depth = choice.draft, choice.tree.depth
    settings: dict[str, Any]
    if draft.kind == "lookup":
        settings = {"prompt_lookup_num_tokens": depth, "max_matching_ngram_size": draft.max_match}
        use = "use it: run this on the loaded target, then model.generate(**inputs)"
        usage = [*shortest_match(draft), use]
        return Body(settings, assignments("model.generation_config", settings), usage)
    settings = {
        "num_assistant_tokens": depth,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    usage = [
        f"use it: assistant = AutoModelForCausalLM.from_pretrained({draft.id!r}), run this, then "
        "model.generate(**inputs, assistant_model=assistant)",
        "batches of more than one prompt are refused by transformers",
    ]
    return Body(settings, assignments("assistant.generation_config", settings), usage)


def off(target: str) -> Body:
    """Return the settings of plain generation: none."""
    return Body({}, "", ["use it: model.generate(**inputs), without assistant_model"])
