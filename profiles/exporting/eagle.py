"""The EAGLE repository: the call of `EaModel.from_pretrained`.

Its `total_token` counts the root and its `depth` leaves out the first level.
"""

from typing import Any

from .body import Body
from .choice import Choice

VERSION = "cb7e084"


def write(choice: Choice) -> Body:
    """Write a tree for EAGLE's own code."""
    tree = choice.tree
    settings: dict[str, Any] = {
        "base_model_path": choice.profile.target.id,
        "ea_model_path": choice.draft.id,
        "total_token": tree.nodes + 1,
        "depth": tree.depth - 1,
        "top_k": tree.top_k,
        "use_eagle3": True,
    }
    arguments = "".join(f"    {key}={value!r},\n" for key, value in settings.items())
    text = "from eagle.model.ea_model import EaModel\n\n"
    return Body(settings, f"{text}model = EaModel.from_pretrained(\n{arguments})\n")


def off(target: str) -> Body:
    """Return the settings of the target alone: none."""
    return Body({}, "", ["use it: load the target with transformers, without EaModel"])
