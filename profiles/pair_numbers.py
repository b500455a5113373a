"""A device and a pair described by numbers alone, for what-if questions without any profile.

Read from a YAML file that says of every number whether it is known or assumed. Knows nothing of
how questions are answered.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from .io import PathLike, decode_text, read_bytes, refuse_newer
from .schema import SCHEMA_VERSION
from .strict import (
    AtLeastOne,
    Count,
    Items,
    Number,
    Positive,
    StrictModel,
    Text,
    broken_rule,
    validated,
)
from .strict_yaml import parse_mapping
from .summaries import ErrorSummary
from .tree import TreeConfig

NotNegative = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(ge=0, le=1)]


class PassTime(StrictModel):
    """One timed pass of the target."""

    tokens: AtLeastOne = Field(description="tokens in the pass")
    ms: Positive = Field(description="its time, ms")


class TargetNumbers(StrictModel):
    """The target by its numbers."""

    name: Text = Field(description="what it is")
    parameters: AtLeastOne | None = Field(default=None, description="number of weights")
    dtype: Text = Field(default="float16", description="type the weights are computed in")
    passes: Annotated[Items[PassTime], Field(min_length=2)] = Field(
        description="passes by size, the first of 1 token"
    )
    overhead_ms: NotNegative = Field(
        default=0.0, description="part of every pass that is neither memory nor compute, ms"
    )
    prefill_ms: NotNegative | None = Field(default=None, description="time of the prompt, ms")

    @model_validator(mode="after")
    def _passes_make_a_curve(self) -> Self:
        tokens = [p.tokens for p in self.passes]
        if tokens[0] != 1:
            rule = "the first pass must be of 1 token, which is plain decoding; add it"
            raise broken_rule(rule, at=("passes",), value=tokens)
        if any(a >= b for a, b in zip(tokens, tokens[1:], strict=False)):
            rule = "tokens must increase from pass to pass; sort them and keep each once"
            raise broken_rule(rule, at=("passes",), value=tokens)
        if self.overhead_ms >= self.passes[0].ms:
            rule = f"it must be below the 1-token pass of {self.passes[0].ms:g} ms; lower it"
            raise broken_rule(rule, at=("overhead_ms",), value=self.overhead_ms)
        return self


class DraftNumbers(StrictModel):
    """The draft by its numbers."""

    name: Text = Field(description="what it is")
    parameters: AtLeastOne | None = Field(default=None, description="number of weights")
    step_ms: NotNegative = Field(description="one sequential draft pass of a single node, ms")
    node_ms: NotNegative = Field(default=0.0, description="more for each further node in it, ms")
    prefill_ms: NotNegative = Field(default=0.0, description="its share of the prompt, ms")


class PairNumbers(StrictModel):
    """Everything a what-if question needs of one target, draft, device and domain."""

    schema_version: int = Field(ge=1, le=SCHEMA_VERSION, description="version of this layout")
    name: Text = Field(description="short name")
    source: Text = Field(description="where the numbers come from")
    assumed: dict[Text, Text] = Field(
        default_factory=dict,
        description="key path of every number that is not known: why it is so",
    )
    device: Text | None = Field(default=None, description="name of a data sheet")
    target: TargetNumbers = Field(description="the model whose text is produced")
    draft: DraftNumbers = Field(description="what proposes tokens")
    round_overhead_ms: NotNegative = Field(
        default=0.0, description="fixed time of every speculative round, ms"
    )
    acceptance: Annotated[dict[Text, Items[Items[Rate]]], Field(min_length=1)] = Field(
        description="by domain, the first is the default: [depth - 1][rank - 1], the share of "
        "expanded nodes whose child of that rank is right"
    )
    tree: TreeConfig = Field(description="the tree to start from")
    prompt_tokens: Count = Field(default=0, description="prompt length, tokens")
    output_tokens: AtLeastOne = Field(default=128, description="answer length, tokens")
    error: ErrorSummary | None = Field(
        default=None, description="error of the round time; missing = not known"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for domain, table in self.acceptance.items():
            if not table or not all(table):
                rule = "it needs at least one depth with one rank each; complete it"
                raise broken_rule(rule, at=("acceptance", domain))
            for i, row in enumerate(table):
                if sum(row) > 1 + 1e-9:
                    rule = f"row {i} adds up to {sum(row):g}, but at most one child is right"
                    raise broken_rule(f"{rule}; lower its rates", at=("acceptance", domain))
        for path in self.assumed:
            if not _exists(self, path.split(".")):
                raise broken_rule("it names no key of this file; correct it", at=("assumed", path))
        return self


def load_numbers(path: PathLike) -> PairNumbers:
    """Read such a file and check every rule.

    Raises:
        SpectuneError: The file cannot be read, is not strict YAML, or breaks a rule; the message
            names the file, the key path, the value and the remedy.
    """
    source = os.fspath(Path(path))
    data = parse_mapping(decode_text(read_bytes(path), source), source)
    refuse_newer(data, source)
    return validated(PairNumbers, data, source)


def _exists(value: Any, keys: list[str]) -> bool:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = getattr(value, key, None) if key in type(value).model_fields else None
        if value is None:
            return False
    return True
