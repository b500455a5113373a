"""What a tree did on the holdout: the figures behind a claimed speedup.

A record of evidence only has to be consistent; whether it proves anything is `Speedup.is_proved`.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from .strict import AtLeastOne, Number, Positive, StrictModel, Text, broken_rule
from .tree import TreeConfig


class Speedup(StrictModel):
    """Wall time of plain decoding over that of speculative decoding, on the holdout."""

    ratio: Positive = Field(description="ratio of total end-to-end times")
    low: Positive = Field(
        description="one-sided lower bound of the typical prompt's speedup and of `ratio` alike"
    )
    confidence: Annotated[Number, Field(gt=0, lt=1)] = Field(description="confidence of `low`")
    worst_prompt: Positive = Field(description="smallest ratio of a single prompt")
    prompts: AtLeastOne = Field(description="number of paired prompts")

    @property
    def is_proved(self) -> bool:
        """Whether this is evidence that speculation is faster."""
        return self.ratio > 1 and self.low > 1


class Evidence(StrictModel):
    """What one tree did on the holdout, against a named baseline."""

    baseline: Text = Field(description="what `speedup` compares with, in words")
    speedup: Speedup = Field(description="end to end, prefill included")
    decode_speedup: Positive = Field(description="tau / break_even_tau, prefill left out")
    tau: Annotated[Number, Field(ge=1)] = Field(description="tokens per round; plain is 1")
    break_even_tau: Positive = Field(description="round time / plain token time")
    plain_tokens_per_s: Positive = Field(description="tokens per second of the baseline")
    plain_first_token_ms: Positive | None = Field(
        default=None, description="mean time of the baseline to its first token, ms"
    )
    plain_over_transformers_generate: Positive | None = Field(
        default=None, description="speed of the baseline over transformers' generate()"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        expected = self.tau / self.break_even_tau
        if abs(self.decode_speedup - expected) > 0.02 * expected:
            rule = f"it must be tau / break_even_tau = {self.tau:g} / {self.break_even_tau:g}"
            rule += f" = {expected:.4g} within 2 %; correct whichever of the three is wrong"
            raise broken_rule(rule, at=("decode_speedup",), value=self.decode_speedup)
        return self


class Alternative(StrictModel):
    """Another tree judged on the same holdout, with its true figures even where it lost."""

    draft: Text = Field(description="its draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the tree that ran")
    evidence: Evidence = Field(description="its figures; `speedup.low` may be below 1")
