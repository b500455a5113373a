"""The conventions a head was probed under: its config's, and the usual other readings."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .deployment import RopeTheta
from .strict import AtLeastOne, Count, Items, Number, StrictModel, broken_rule


def _number_or_layers(value: Any) -> Any:
    """Refuse here what is neither, so that one fault is told instead of one for each type."""
    layers = value if isinstance(value, (list, tuple)) else ()
    is_layers = bool(layers) and all(type(layer) is int and layer >= 0 for layer in layers)
    is_base = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if not is_layers and not is_base:
        raise broken_rule("it must be a base or a list of layers; write 10000.0 or [2, 14, 25]")
    return value


Probability = Annotated[Number, Field(ge=0, le=1)]


class ProbedValue(StrictModel):
    """One reading of a convention, and how often the head is right under it."""

    what: Literal["feature_layers", "rope_theta"] = Field(description="the convention")
    value: Annotated[RopeTheta | Items[Count], BeforeValidator(_number_or_layers)] = Field(
        description="target hidden states that feed the head, or base of its rotary angles"
    )
    agreement: Probability = Field(
        description="share of recorded tokens that are the head's first choice"
    )
    n_tokens: AtLeastOne = Field(description="tokens of the tune prompts' answers looked at")
    p_value: Probability | None = Field(
        default=None,
        description="exact McNemar test, corrected for the number of values, against the value "
        "in use; for the one chosen, against the config's",
    )
    verdict: Literal["kept", "chosen", "undecided", "rejected"] = Field(
        description="kept or chosen: in use; undecided: no proof that it is worse"
    )
