"""The profile as a whole, and the rules that tie its parts together.

Knows nothing of files. A profile that claims a speedup without the evidence for it cannot exist.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .batches import BatchRange, check_schedule, tree_for
from .deployment import Device, Domain, DraftRef, Sampling, Sha256, TargetRef
from .evidence import Alternative, Evidence
from .probe import ProbedValue
from .recheck import Recheck
from .serving import Calibration, GuardSettings, Serving
from .strict import Items, StrictModel, Text, broken_rule
from .summaries import CostModelSummary, CostTable, JobSummary, Noise, SearchSummary
from .times import Time
from .tree import TreeConfig

SCHEMA_VERSION = 1

Decision = Literal["speculate", "plain"]


def _bare_name(value: str) -> str:
    if value in (".", "..") or "/" in value or "\\" in value:
        raise broken_rule("it must be a file beside the profile; give its name without a folder")
    return value


FileName = Annotated[Text, AfterValidator(_bare_name)]


class Profile(StrictModel):
    """The fastest draft tree proved for one target, draft, device, domain and sampling."""

    schema_version: int = Field(ge=1, le=SCHEMA_VERSION, description="version of this layout")
    name: Text = Field(description="short name of the profile")
    created: Time = Field(description="when the tuning ended, with its zone")
    spectune: Text = Field(description="version of spectune that wrote it")
    target: TargetRef = Field(description="the model whose text is produced")
    draft: DraftRef = Field(description="what proposes tokens; the one tried where it lost")
    device: Device = Field(description="where it was measured")
    domain: Domain = Field(description="the prompts it was measured with")
    sampling: Sampling = Field(description="how tokens were drawn")
    decision: Decision = Field(description="speculate, or plain when in doubt")
    reason: Text = Field(description="one sentence: why this decision")
    tree: TreeConfig = Field(description="the draft tree to run; depth 0 for plain")
    adaptive: bool = Field(
        default=False, description="fit the tree to every round, within the calibration's limits"
    )
    evidence: Evidence | None = Field(default=None, description="proof for `tree`; none for plain")
    alternatives: Items[Alternative] = Field(
        default=(), description="other trees judged on the holdout"
    )
    batch_schedule: Items[BatchRange] = Field(
        default=(), description="what several prompts at a time run; plain if left out"
    )
    probe: Items[ProbedValue] = Field(
        default=(),
        description="conventions an EAGLE-3 draft was probed under; the first is its own",
    )
    guard: GuardSettings | None = Field(
        default=None, description="what speculation may lose at run time; the usual if left out"
    )
    calibration: Calibration | None = Field(
        default=None, description="what adaptive drafting knows of the draft"
    )
    noise: Noise | None = Field(default=None, description="steadiness of the machine")
    cost_model: CostModelSummary | None = Field(
        default=None, description="fitted price of a round"
    )
    search: SearchSummary | None = Field(default=None, description="how the tree was found")
    measurements: FileName | None = Field(
        default=None, description="raw figures, a file beside this one"
    )
    measurements_sha256: Sha256 | None = Field(
        default=None, description="hash of that file; another one is refused"
    )
    job: JobSummary | None = Field(default=None, description="where the time of tuning went")
    rechecks: Items[Recheck] = Field(default=(), description="later looks, oldest first")
    content_sha256: Sha256 | None = Field(
        default=None, description="hash of the above when written; edited = not trusted"
    )

    def tree_of_batch(self, n_rows: int) -> TreeConfig:
        """Return the tree of rounds with so many prompts in flight."""
        return self.tree if n_rows == 1 else tree_for(self.batch_schedule, n_rows)

    @property
    def serving(self) -> Serving:
        """How the tree is served; without a cost model a round costs what the evidence says."""
        cost_model = self.cost_model
        if cost_model is None:
            assert self.evidence is not None  # noqa: S101 - only speculation is served
            price = self.evidence.break_even_tau
            verify = CostTable(name="verify", x=[0.0, 1.0, 2.0], relative=[1.0, price, price])
            reference_ms = 1e3 / self.evidence.plain_tokens_per_s
            cost_model = CostModelSummary(reference_ms=reference_ms, tables=[verify])
        calibration = self.calibration if self.adaptive else None
        return Serving(cost_model, self.guard or GuardSettings(), calibration)

    @model_validator(mode="after")
    def _decision_is_backed(self) -> Self:
        check_schedule(self.batch_schedule)
        if self.decision == "speculate":
            self._check_speculate()
        else:
            self._check_plain()
        return self

    def _check_speculate(self) -> None:
        if self.adaptive and self.calibration is None:
            rule = "adaptive drafting needs a calibration; tune again, or set adaptive to false"
            raise broken_rule(rule, at=("adaptive",), value=True)
        or_plain = "or set decision to plain, set tree to {depth: 0} and remove evidence"
        if self.tree.is_plain:
            rule = f"decision speculate needs a depth of at least 1; raise it {or_plain}"
            raise broken_rule(rule, at=("tree", "depth"), value=0)
        if self.draft.kind == "none":
            rule = f"decision speculate needs a draft; name it {or_plain}"
            raise broken_rule(rule, at=("draft", "kind"), value="none")
        if self.evidence is None:
            rule = f"decision speculate needs evidence; tune again, {or_plain}"
            raise broken_rule(rule, at=("evidence",))
        speedup = self.evidence.speedup
        if not speedup.is_proved:
            name = "ratio" if speedup.ratio <= 1 else "low"
            rule = f"decision speculate needs it above 1; tune again, {or_plain}"
            raise broken_rule(rule, at=("evidence", "speedup", name), value=getattr(speedup, name))

        if self.rechecks and self.rechecks[-1].verdict == "refuted":
            rule = f"decision speculate was refuted since; tune again, {or_plain}"
            raise broken_rule(rule, at=("rechecks",), value="refuted")

    def _check_plain(self) -> None:
        if not self.tree.is_plain:
            rule = "decision plain needs depth 0; set tree to {depth: 0}, or tune again"
            raise broken_rule(rule, at=("tree", "depth"), value=self.tree.depth)
        if self.adaptive:
            rule = "decision plain has no tree to adapt; set adaptive to false"
            raise broken_rule(rule, at=("adaptive",), value=True)
        for i, each in enumerate(self.batch_schedule):
            if each.decision == "speculate":
                rule = "decision plain holds for batches, too; tune again, or remove the schedule"
                raise broken_rule(rule, at=("batch_schedule", i, "decision"), value=each.decision)
        if self.evidence is not None:
            rule = "decision plain has no speedup to prove; move a rival's figures to alternatives"
            raise broken_rule(rule, at=("evidence",), value=self.evidence.speedup.ratio)
