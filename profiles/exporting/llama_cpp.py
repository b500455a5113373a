"""llama.cpp: the flags of `llama-server`, one chain of `--spec-draft-n-max` tokens."""

from typing import Any

from .body import Body, command, converted, flags
from .choice import Choice

VERSION = "00dc805"
TYPES = {"eagle3": "draft-eagle3", "model": "draft-simple", "lookup": "ngram-simple"}


def write(choice: Choice) -> Body:
    """Write a chain for llama.cpp."""
    draft, depth = choice.draft, choice.tree.depth
    settings: dict[str, Any] = {"spec-type": TYPES[draft.kind]}
    if draft.kind == "lookup":
        settings |= {"spec-ngram-simple-size-n": draft.min_match}
        settings |= {"spec-ngram-simple-size-m": depth, "spec-draft-n-max": depth}
        notes = [
            f"dropped: matches of up to {draft.max_match} tokens; ngram-simple looks up exactly "
            f"{draft.min_match}"
        ]
    else:
        model = converted(str(draft.id), ".gguf")
        settings |= {"spec-draft-model": model, "spec-draft-n-max": depth}
        settings |= {"spec-draft-n-min": 0, "spec-draft-p-min": 0.0}
        notes = [f"{model} is the draft after convert_hf_to_gguf.py"]
        if draft.kind == "eagle3":
            notes[0] += " with --target-model-dir"
    return _server(choice.profile.target.id, settings, notes)


def off(target: str) -> Body:
    """Write a server without speculation."""
    return _server(target, {"spec-type": "none"}, [])


def _server(target: str, settings: dict[str, Any], notes: list[str]) -> Body:
    words = ("llama-server", "--model", converted(target, ".gguf"), *flags(settings))
    return Body(settings, command(*words) + "\n", notes)
