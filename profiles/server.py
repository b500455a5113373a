"""How the servers of a serving engine were run when a profile was measured on it."""

from typing import Literal

from pydantic import Field

from .strict import AtLeastOne, Items, StrictModel, Text

EngineName = Literal["spectune", "vllm"]
"""The engines that profiles are measured on; `spectune` is our own."""


class ServerRun(StrictModel):
    """What the servers had in common, with a draft and without."""

    version: Text = Field(description="version of the engine")
    concurrency: AtLeastOne = Field(default=1, description="requests served at once")
    arguments: Items[Text] = Field(
        default=(), description="arguments of the server, model and speculation apart"
    )
    environment: dict[str, Text] = Field(
        default_factory=dict, description="variables that its speed depends on"
    )
