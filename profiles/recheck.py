"""A later look at a profile's speedup, on the machine it was made for."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .strict import AtLeastOne, Count, Number, Positive, StrictModel, Text, broken_rule
from .times import Day

RecheckVerdict = Literal["confirmed", "inconclusive", "refuted"]


class Recheck(StrictModel):
    """What measuring a profile against plain decoding again has shown."""

    date: Day = Field(description="when it was made")
    spectune: Text = Field(description="version of spectune that measured")
    prompts: Count = Field(description="number of paired prompts")
    max_new_tokens: AtLeastOne = Field(description="output budget per prompt, tokens")
    ratio: Positive | None = Field(
        default=None, description="ratio of total end-to-end times, plain over the profile"
    )
    low: Annotated[Number, Field(ge=0)] = Field(description="one-sided lower bound")
    high: Positive | None = Field(
        default=None, description="one-sided upper bound; none if the prompts vary too much"
    )
    confidence: Annotated[Number, Field(gt=0, lt=1)] = Field(description="of each bound")
    verdict: RecheckVerdict = Field(description="confirmed: faster; refuted: slower than plain")

    @model_validator(mode="after")
    def _verdict_is_backed(self) -> Self:
        if self.verdict == "confirmed" and self.low <= 1:
            rule = "verdict confirmed needs it above 1; measure again"
            raise broken_rule(rule, at=("low",), value=self.low)
        if self.verdict == "refuted" and (self.high is None or self.high >= 1):
            rule = "verdict refuted needs it below 1; measure again"
            raise broken_rule(rule, at=("high",), value=self.high)
        return self
