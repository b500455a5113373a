"""How a profile's tree is served: the guard's limits, and what adaptive drafting needs to know."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from .strict import AtLeastOne, Count, Items, Number, Positive, StrictModel, broken_rule
from .summaries import CostModelSummary
from .tree import TreeConfig

Share = Annotated[Number, Field(ge=0, le=1)]


class GuardSettings(StrictModel):
    """What speculation may lose at run time, in units of a plain token's time.

    With the defaults a stream of 2,000 tokens loses at most 8 + 0.006 * 2000 = 20 of them.
    """

    allowance_tokens: Positive = Field(
        default=8.0, description="most that one request, or any stretch of a stream, may lose"
    )
    tax: Share = Field(
        default=0.006, description="further loss a stream may make per token emitted"
    )
    min_new_tokens: Count = Field(
        default=0, description="shorter answers are decoded plainly, without the draft's prefill"
    )
    max_context: AtLeastOne | None = Field(
        default=None,
        description="tokens of text beyond which rounds were measured to cost more than they give",
    )


class PathTable(StrictModel):
    """How often the paths of one depth are right, by the draft's score."""

    score: Items[Number] = Field(description="cumulative log-probability of a path, increasing")
    probability: Items[Share] = Field(description="how often such paths were accepted")
    hit: Share = Field(description="how often an accepted node of the level before has a child")

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if not self.score or len(self.score) != len(self.probability):
            rule = f"it has {len(self.probability)} entries but score has {len(self.score)}; give"
            raise broken_rule(f"{rule} one for each score, at least one", at=("probability",))
        for name in ("score", "probability"):
            values = getattr(self, name)
            steps = zip(values, values[1:], strict=False)
            if any(a > b or (a == b and name == "score") for a, b in steps):
                rule = "it must rise from entry to entry; sort it"
                raise broken_rule(rule, at=(name,), value=list(values))
        return self


class Calibration(StrictModel):
    """What adaptive drafting knows of its draft: how far it may grow, and what paths are worth."""

    limits: TreeConfig = Field(description="the largest tree of a round")
    tokens_per_pass: Positive = Field(
        description="tokens per time of the reference pass at which more drafting stops paying"
    )
    depths: Items[PathTable] = Field(description="one table per depth, from 1")

    @model_validator(mode="after")
    def _covers_the_limits(self) -> Self:
        if self.limits.is_plain or len(self.depths) < self.limits.depth:
            rule = f"limits of depth {self.limits.depth} need at least 1 level and a table for"
            raise broken_rule(
                f"{rule} each, but there are {len(self.depths)}; complete it", at=("depths",)
            )
        return self


@dataclass(frozen=True)
class Serving:
    """The parts from which a profile's decoder is built, beside models, tree and sampling.

    Attributes:
        cost_model: The prices.
        guard: The guard's limits.
        calibration: For adaptive drafting; None for a fixed tree.
    """

    cost_model: CostModelSummary
    guard: GuardSettings
    calibration: Calibration | None = None
