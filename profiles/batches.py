"""What several prompts at a time are decoded with: a tree for each range of batches, or plain.

A range ends at a batch that was measured; beyond the largest of them decoding is plain.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from .strict import AtLeastOne, Items, Number, Positive, StrictModel, Text, broken_rule
from .tree import PLAIN, TreeConfig

FIRST_BATCH = 2
"""Smallest batch of a schedule; a prompt by itself has the profile's own tree."""


class BatchEvidence(StrictModel):
    """What a tree did on held-out prompts, so many of them at a time, against plain decoding."""

    baseline: Text = Field(description="what `ratio` compares with, in words")
    rows: AtLeastOne = Field(description="prompts in flight in every batch")
    ratio: Positive = Field(description="ratio of total times, prefill included")
    low: Annotated[Number, Field(ge=0)] = Field(
        description="one-sided lower bound of the typical batch's speedup and of `ratio` alike"
    )
    confidence: Annotated[Number, Field(gt=0, lt=1)] = Field(description="confidence of `low`")
    worst_batch: Positive = Field(description="smallest ratio of a single batch")
    batches: AtLeastOne = Field(description="number of paired batches, of different prompts each")
    tau: Annotated[Number, Field(ge=1)] = Field(description="tokens per round and row")
    plain_tokens_per_s: Positive = Field(
        description="tokens per second of the baseline, all rows together"
    )

    @property
    def is_proved(self) -> bool:
        """Whether this is evidence that speculation is faster."""
        return self.ratio > 1 and self.low > 1


class BatchRange(StrictModel):
    """What runs while so many prompts are in flight."""

    batch: Items[AtLeastOne | None] = Field(
        description="first and last number of prompts in flight; null for any number"
    )
    decision: Literal["speculate", "plain"] = Field(
        description="speculate, or plain when in doubt"
    )
    reason: Text = Field(description="one sentence: why this decision")
    tree: TreeConfig = Field(default=PLAIN, description="the draft tree; depth 0 for plain")
    tried: TreeConfig | None = Field(
        default=None, description="for plain, the tree that did best on the tune prompts"
    )
    evidence: BatchEvidence | None = Field(
        default=None, description="figures of `tree`, for plain those of `tried`"
    )

    @field_validator("batch")
    @classmethod
    def _is_a_range(cls, value: Sequence[int | None]) -> Sequence[int | None]:
        if len(value) != 2 or value[0] is None or (value[1] is not None and value[0] > value[1]):
            raise broken_rule(
                "it must be [first, last]; write [2, 4], or [5, null] for 5 and more"
            )
        return value

    @model_validator(mode="after")
    def _decision_is_backed(self) -> Self:
        if self.decision == "plain":
            if not self.tree.is_plain:
                rule = "decision plain needs depth 0; set tree to {depth: 0}, or tune again"
                raise broken_rule(rule, at=("tree", "depth"), value=self.tree.depth)
            return self
        or_plain = "tune again, or set decision to plain and remove tree"
        if self.tree.is_plain:
            rule = f"decision speculate needs a depth of at least 1; {or_plain}"
            raise broken_rule(rule, at=("tree", "depth"), value=0)
        if self.last is None:
            rule = f"decision speculate ends at the largest batch that was measured; {or_plain}"
            raise broken_rule(rule, at=("batch",), value=list(self.batch))
        if self.evidence is None:
            raise broken_rule(f"decision speculate needs evidence; {or_plain}", at=("evidence",))
        if not self.evidence.is_proved:
            name = "ratio" if self.evidence.ratio <= 1 else "low"
            rule = f"decision speculate needs it above 1; {or_plain}"
            value = getattr(self.evidence, name)
            raise broken_rule(rule, at=("evidence", name), value=value)
        return self

    @property
    def first(self) -> int:
        """Smallest number of prompts in flight."""
        return self.batch[0] or FIRST_BATCH

    @property
    def last(self) -> int | None:
        """Largest number of prompts in flight; None for any."""
        return self.batch[1]

    def label(self) -> str:
        """Return the range in words, such as `3 to 4` or `9 and more`."""
        if self.last is None:
            return f"{self.first} and more"
        return f"{self.first} to {self.last}" if self.last > self.first else str(self.first)


def check_schedule(schedule: Sequence[BatchRange]) -> None:
    """Refuse ranges that leave a gap, overlap, or do not end with plain decoding.

    Raises:
        PydanticCustomError: For the validator of a model with the key `batch_schedule`.
    """
    expected: int | None = FIRST_BATCH
    for i, each in enumerate(schedule):
        if each.first != expected:
            want = "nothing" if expected is None else expected
            rule = (
                f"ranges must follow one another, and this one must begin with {want}; correct it"
            )
            at = ("batch_schedule", i, "batch")
            raise broken_rule(rule, at=at, value=list(each.batch))
        expected = None if each.last is None else each.last + 1
    if schedule and expected is not None:
        rule = "the last range must have no end, so that every batch has a decision; add"
        rule += f" {{batch: [{expected}, null], decision: plain}}"
        raise broken_rule(rule, at=("batch_schedule",), value=f"{len(schedule)} ranges")


def tree_for(schedule: Sequence[BatchRange], n_rows: int) -> TreeConfig:
    """Return the tree of rounds with so many prompts in flight; plain where nothing is known."""
    for each in schedule:
        if each.first <= n_rows and (each.last is None or n_rows <= each.last):
            return each.tree
    return PLAIN
