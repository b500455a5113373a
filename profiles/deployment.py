"""What a profile was made for: target, draft, device, domain and sampling.

The same records hold what is observed when a profile is used; see `match`.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .strict import AtLeastOne, Count, Items, Number, Positive, StrictModel, Text, broken_rule

DraftKind = Literal["eagle3", "model", "lookup", "none"]

# Kept to the last digit: it is computed with.
RopeTheta = Annotated[float, Field(gt=0)]

_OWNERS = {"min_match": "lookup", "max_match": "lookup"}
_OWNERS |= {"feature_layers": "eagle3", "rope_theta": "eagle3"}


def _hex64(value: str) -> str:
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise broken_rule("it must be 64 hexadecimal digits in lower case; copy the full hash")
    return value


Sha256 = Annotated[str, AfterValidator(_hex64)]


class TargetRef(StrictModel):
    """The model whose text is produced."""

    id: Text = Field(description="folder, hub id, GGUF file or `demo`")
    revision: Text | None = Field(default=None, description="hub revision")
    sha256: Sha256 | None = Field(
        default=None, description="hash of the weights; missing = not trusted"
    )
    dtype: Text | None = Field(
        default=None, description="type the weights are computed in, e.g. bfloat16"
    )
    parameters: AtLeastOne | None = Field(default=None, description="number of weights")


class DraftRef(StrictModel):
    """Whatever proposes tokens to the target."""

    kind: DraftKind = Field(description="eagle3 head, causal model, model-free lookup, or none")
    id: Text | None = Field(
        default=None, description="folder, hub id or `demo`; drafts with weights only"
    )
    sha256: Sha256 | None = Field(
        default=None, description="hash of the weights; missing = not trusted"
    )
    parameters: AtLeastOne | None = Field(default=None, description="number of weights")
    min_match: AtLeastOne | None = Field(
        default=None, description="shortest suffix looked up, tokens"
    )
    max_match: AtLeastOne | None = Field(
        default=None, description="longest suffix looked up, tokens"
    )
    feature_layers: Items[Count] | None = Field(
        default=None,
        description="target hidden states that feed the head, 0 = embeddings; missing = config's",
    )
    rope_theta: RopeTheta | None = Field(
        default=None, description="base of the head's rotary angles; missing = its config's"
    )

    @property
    def has_weights(self) -> bool:
        """Whether this draft is a network, with an id and a hash of its own."""
        return self.kind in ("eagle3", "model")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.has_weights and self.id is None:
            rule = f"kind {self.kind} needs it; give the draft's folder or hub id"
            raise broken_rule(rule, at=("id",))
        for name, owner in _OWNERS.items():
            value = getattr(self, name)
            if value is not None and self.kind != owner:
                rule = f"only kind {owner} has it; remove it or set kind to {owner}"
                raise broken_rule(rule, at=(name,), value=value)
        if self.kind != "lookup":
            return self
        if self.min_match is None or self.max_match is None:
            name = "min_match" if self.min_match is None else "max_match"
            raise broken_rule("kind lookup needs it; give a number of tokens", at=(name,))
        if self.min_match > self.max_match:
            rule = f"it must not exceed max_match, which is {self.max_match}; lower it"
            raise broken_rule(rule, at=("min_match",), value=self.min_match)
        return self


class Device(StrictModel):
    """The machine and libraries that ran the measurements; a missing fact is never trusted."""

    kind: Text | None = Field(default=None, description="cpu, cuda, ...")
    name: Text | None = Field(default=None, description="processor or accelerator model")
    count: AtLeastOne | None = Field(
        default=None, description="CPU cores, or an accelerator's SMs"
    )
    memory_gib: Positive | None = Field(default=None, description="memory of the device, GiB")
    threads: AtLeastOne | None = Field(default=None, description="CPU threads that computed")
    driver: Text | None = Field(default=None, description="accelerator driver version")
    torch: Text | None = Field(default=None, description="version of torch")
    transformers: Text | None = Field(default=None, description="version of transformers")


class Domain(StrictModel):
    """The prompts that stand for the traffic."""

    name: Text = Field(description="label given by the user; never used to recognise a domain")
    sample_sha256: Sha256 = Field(description="hash of the whole sample, independent of its order")
    n_tune: Count = Field(description="prompts used to choose")
    n_holdout: Count = Field(description="prompts used to judge")
    mean_prompt_tokens: Positive = Field(description="mean prompt length, tokens")
    max_new_tokens: AtLeastOne = Field(description="output budget per prompt, tokens")


class Sampling(StrictModel):
    """How the next token is drawn from the target's logits."""

    temperature: Annotated[Number, Field(ge=0)] = Field(description="0 = greedy")
    top_k: Count = Field(default=0, description="keep the k likeliest tokens; 0 = all")
    top_p: Annotated[Number, Field(gt=0, le=1)] = Field(
        default=1.0, description="nucleus mass; 1 = all"
    )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that the filters do nothing."""
        return self.temperature == 0


GREEDY = Sampling(temperature=0.0)
