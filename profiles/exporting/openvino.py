"""OpenVINO GenAI: Python that makes the `GenerationConfig` of a request.

`num_assistant_tokens` leaves the root out, as our nodes do; `tree_depth` above 0 asks for a tree.
"""

from typing import Any

from .body import Body, assignments, converted
from .choice import Choice
from .comment import shortest_match

VERSION = "2026.4.1"
_HEAD = "import openvino_genai\n\nconfig = openvino_genai.GenerationConfig()\n"


def write(choice: Choice) -> Body:
    """Write a tree or a chain for OpenVINO GenAI."""
    draft, tree = choice.draft, choice.tree
    settings: dict[str, Any] = {"num_assistant_tokens": tree.nodes}
    if not tree.is_chain:
        settings |= {"tree_depth": tree.depth, "branching_factor": tree.top_k}
    if draft.kind == "lookup":
        settings["max_ngram_size"] = draft.max_match
        argument, notes = "prompt_lookup=True", shortest_match(draft)
    else:
        folder = converted(str(draft.id), "-openvino")
        argument = f"draft_model=openvino_genai.draft_model({folder!r}, DEVICE)"
        notes = [f"{folder}: the draft after `optimum-cli export openvino`"]
    notes.append(_use(choice.profile.target.id, argument))
    return Body(settings, _HEAD + assignments("config", settings), notes)


def off(target: str) -> Body:
    """Return the settings of a pipeline without speculation: those it has by itself."""
    return Body({}, _HEAD, [_use(target)])


def _use(target: str, *argument: str) -> str:
    arguments = ", ".join((repr(converted(target, "-openvino")), "DEVICE", *argument))
    return f"use it: openvino_genai.LLMPipeline({arguments}).generate(PROMPT, config)"
