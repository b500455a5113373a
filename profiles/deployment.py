"""What a profile was made for: target, draft, device, domain and sampling.

The same records hold what is observed when a profile is used; see `match`.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .strict import (
    LARGEST,
    AtLeastOne,
    Count,
    Items,
    Number,
    Positive,
    StrictModel,
    Text,
    broken_rule,
)

Template = Literal["chat", "none"]
DraftKind = Literal["eagle3", "model", "lookup", "suffix", "hybrid", "none"]

# Kept to the last digit: it is computed with.
RopeTheta = Annotated[float, Field(ge=1, le=LARGEST)]
Probability = Annotated[Number, Field(ge=0, lt=1)]
MatchTau = Annotated[Number, Field(ge=1)]

# Which kinds have which knob; a kind with a knob that is REQUIRED must state it.
_OWNERS: dict[str, tuple[DraftKind, ...]] = {
    "min_match": ("lookup", "suffix", "hybrid"),
    "max_match": ("lookup", "suffix", "hybrid"),
    "min_probability": ("lookup", "suffix", "hybrid"),
    "history": ("suffix", "hybrid"),
    "match_nodes": ("hybrid",),
    "match_tau": ("hybrid",),
    "feature_layers": ("eagle3", "hybrid"),
    "rope_theta": ("eagle3", "hybrid"),
}
_REQUIRED = ("min_match", "max_match", "match_nodes", "match_tau")


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
    """Whatever proposes tokens to the target.

    A hybrid is a head or a small model, named as such, with the knobs of its model-free rounds.
    """

    kind: DraftKind = Field(
        description="eagle3 head, causal model, model-free lookup or suffix, hybrid, or none"
    )
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
    min_probability: Probability | None = Field(
        default=None,
        description="nodes on less likely paths are not proposed without a head; missing = all",
    )
    history: Count | None = Field(
        default=None, description="tokens of earlier answers looked up as well; missing = none"
    )
    match_nodes: AtLeastOne | None = Field(
        default=None, description="most draft nodes of a hybrid's model-free round"
    )
    match_tau: MatchTau | None = Field(
        default=None,
        description="tokens a model-free round must promise to be taken instead of the head's",
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
        """Whether this draft is or holds a network, with an id and a hash of its own."""
        return self.kind in ("eagle3", "model", "hybrid")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.has_weights and self.id is None:
            rule = f"kind {self.kind} needs it; give the draft's folder or hub id"
            raise broken_rule(rule, at=("id",))
        for name, owners in _OWNERS.items():
            value = getattr(self, name)
            if value is not None and self.kind not in owners:
                rule = f"only kind {' or '.join(owners)} has it; remove it or correct kind"
                raise broken_rule(rule, at=(name,), value=value)
            if value is None and self.kind in owners and name in _REQUIRED:
                raise broken_rule(f"kind {self.kind} needs it; give a number", at=(name,))
        if self.min_match and self.max_match and self.min_match > self.max_match:
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
    kernels: Text | None = Field(
        default=None, description="what computes on a CPU: own (compiled there) or torch"
    )
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
    template: Template | None = Field(
        default=None,
        description="whether prompts were put into the target's chat template; missing = unknown",
    )


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


def draft_name(draft: DraftRef) -> str:
    """Return how a draft is named among others: its id, or its kind where it has no weights."""
    return f"hybrid:{draft.id}" if draft.kind == "hybrid" else draft.id or draft.kind
