"""What a profile keeps of the work behind it: cost model, search and noise, in short."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from .strict import Count, Items, Number, Positive, StrictModel, Text, broken_rule
from .tree import TreeConfig

ALWAYS_PAID = ("plain", "verify", "batch_plain", "batch_round")
"""Tables of the target's passes: nothing is ever divided by a time of 0."""


class CostTable(StrictModel):
    """One line of the cost model: a part of the round against its size."""

    name: Text = Field(
        description="part of the round: extend, level, verify, commit, ...; or batch_plain and "
        "batch_round, factors on the price of a batch as one wider pass"
    )
    at: dict[str, Number] = Field(
        default_factory=dict, description="what was held fixed, e.g. {context: 512}"
    )
    x: Annotated[Items[Number], Field(min_length=1)] = Field(
        description="size, increasing: tokens (extend, verify), nodes (level, commit) or rows"
    )
    relative: Items[Annotated[Number, Field(ge=0)]] = Field(
        description="time at each x, in units of the reference 1-token pass"
    )

    @model_validator(mode="after")
    def _is_a_function(self) -> Self:
        if len(self.x) != len(self.relative):
            rule = f"it has {len(self.relative)} entries but x has {len(self.x)}"
            rule += "; give one for each x"
            raise broken_rule(rule, at=("relative",), value=list(self.relative))
        if any(a >= b for a, b in zip(self.x, self.x[1:], strict=False)):
            rule = "it must increase from entry to entry; sort it and keep each x once"
            raise broken_rule(rule, at=("x",), value=list(self.x))
        return self


class ErrorSummary(StrictModel):
    """Relative error of a prediction on configurations it was not fitted on."""

    median: Annotated[Number, Field(ge=0)] = Field(description="median of |predicted / real - 1|")
    p90: Annotated[Number, Field(ge=0)] = Field(description="90th percentile of the same")


Span = Annotated[Items[Number], Field(min_length=2, max_length=2)]


class CostModelSummary(StrictModel):
    """The fitted price of a round, enough to answer what-if questions without the device."""

    reference_ms: Positive = Field(description="median time of the reference 1-token pass, ms")
    tables: Items[CostTable] = Field(description="price of each part of the round")
    heldout_error: ErrorSummary | None = Field(default=None, description="error of the round time")
    valid: dict[str, Span] = Field(
        default_factory=dict, description="measured range [low, high] of nodes, context, ..."
    )

    @model_validator(mode="after")
    def _spans_are_ordered(self) -> Self:
        for name, (low, high) in self.valid.items():
            if low > high:
                rule = "it must be [low, high]; swap the two"
                raise broken_rule(rule, at=("valid", name), value=[low, high])
        return self

    @model_validator(mode="after")
    def _tables_are_prices(self) -> Self:
        places = [(table.name, table.at.get("context", 0.0)) for table in self.tables]
        for table, place in zip(self.tables, places, strict=True):
            if places.count(place) > 1:
                rule = f"table {table.name} stands there twice behind the same context; keep one"
                raise broken_rule(rule, at=("tables",), value=table.name)
            if table.name in ALWAYS_PAID and min(table.relative) <= 0:
                rule = f"table {table.name} must be above 0 everywhere; tune again"
                raise broken_rule(rule, at=("tables",), value=min(table.relative))
        return self


class RunnerUp(StrictModel):
    """A tree that was measured on tune prompts and not chosen."""

    draft: Text = Field(description="its draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the tree")
    speedup: Positive = Field(description="ratio on tune prompts, not evidence")


class SearchSummary(StrictModel):
    """How the tree was found."""

    predicted: Count = Field(description="settings priced by the cost model")
    measured: Count = Field(description="settings run on the device")
    sampler: Text = Field(description="Optuna sampler, or `enumeration`")
    seed: int = Field(description="seed of the split and of the samplers")
    storage: Text | None = Field(
        default=None, description="file or database of the Optuna study, without a password"
    )
    runners_up: Items[RunnerUp] = Field(default=(), description="best first")


class JobSummary(StrictModel):
    """Where the time of the tuning job went."""

    planned_s: Annotated[Number, Field(ge=0)] = Field(description="the plan made before, seconds")
    seconds: dict[str, Annotated[Number, Field(ge=0)]] = Field(
        description="what each step took, seconds"
    )
    cut: Text | None = Field(default=None, description="what a budget of time has cut")

    @property
    def took_s(self) -> float:
        """Seconds of all steps together."""
        return sum(self.seconds.values())


class Noise(StrictModel):
    """How steady the machine was: the same reference pass repeated."""

    spread: Annotated[Number, Field(ge=0)] = Field(description="relative spread (IQR / median)")
    drift: Number = Field(description="relative change from the first to the last pass")
    slowest: Positive | None = Field(
        default=None, description="slowest pass during the holdout, over its usual time"
    )
    remeasured: Count | None = Field(
        default=None, description="holdout prompts measured again for it"
    )
    left_out: Count | None = Field(default=None, description="holdout prompts left out for it")
