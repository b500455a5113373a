"""Whether a profile may be trusted here: which facts must be equal, and which may differ.

Knows nothing of how facts are observed, nor of what is done when they differ.
"""

from dataclasses import dataclass
from typing import Literal

from .deployment import Device, DraftRef, Sampling, TargetRef
from .schema import Profile
from .seal import content_sha256, is_sealed
from .strict import show_value

Rule = Literal["exact", "within 10 %", "noted"]
Level = Literal["fatal", "noted"]

DRAFT_KNOBS = (
    *("min_match", "max_match", "min_probability", "history", "match_nodes", "match_tau"),
)
"""What only some kinds of drafts have."""

# For each fact, how near the profile's value must be to the one observed now.
FIELDS: dict[str, Rule] = {
    "device.kind": "exact",
    "device.name": "exact",
    "device.count": "exact",
    "device.threads": "exact",
    "device.kernels": "exact",
    "device.memory_gib": "within 10 %",
    "target.sha256": "exact",
    "target.dtype": "exact",
    "draft.kind": "exact",
    "draft.sha256": "exact",
    **{f"draft.{name}": "exact" for name in DRAFT_KNOBS},
    "sampling.temperature": "exact",
    "sampling.top_k": "exact",
    "sampling.top_p": "exact",
    "device.driver": "noted",
    "device.torch": "noted",
    "device.transformers": "noted",
    "spectune": "noted",
}


EDITED = "content_sha256"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true now, in the profile's own terms; an unknown fact is None."""

    device: Device
    target: TargetRef
    draft: DraftRef
    sampling: Sampling
    spectune: str | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A fact on which the profile and the present differ, or which one of them does not know."""

    field: str
    profile_value: object
    actual_value: object
    level: Level

    def __str__(self) -> str:
        if self.field == EDITED:
            return "it was edited after it was written, or never sealed: content_sha256 is " + (
                f"{_tell(self.profile_value)}, but its content gives {_tell(self.actual_value)}"
            )
        values = f"{_tell(self.profile_value)} in the profile, {_tell(self.actual_value)} here"
        return f"{self.field}: {values}" + (" (noted only)" if self.level == "noted" else "")


def compare(profile: Profile, facts: Facts) -> list[Mismatch]:
    """List every fact of `FIELDS` that does not match, in that order, and whether it was edited.

    A fact that is missing or "unknown" on either side matches nothing, not even another unknown;
    facts that are only noted are listed when they differ.
    """
    mismatches = []
    for field, rule in FIELDS.items():
        expected, actual = _look_up(profile, field), _look_up(facts, field)
        if not _matters(field, profile) or _agree(expected, actual, rule):
            continue
        level: Level = "noted" if rule == "noted" else "fatal"
        mismatches.append(Mismatch(field, expected, actual, level))
    if not is_sealed(profile):
        edited = Mismatch(EDITED, profile.content_sha256, content_sha256(profile), "fatal")
        mismatches.append(edited)
    return mismatches


def _matters(field: str, profile: Profile) -> bool:
    """Tell whether a fact has any bearing on this profile's figures."""
    if field == "draft.sha256":
        return profile.draft.has_weights
    if field == "device.kernels" or field.removeprefix("draft.") in DRAFT_KNOBS:
        return _look_up(profile, field) is not None
    if field == "device.threads":
        return profile.device.kind == "cpu"
    if field in ("sampling.top_k", "sampling.top_p"):
        return not profile.sampling.is_greedy
    return True


def _agree(expected: object, actual: object, rule: Rule) -> bool:
    if rule == "noted":
        return expected == actual
    if not _is_known(expected) or not _is_known(actual):
        return False
    if rule == "within 10 %" and isinstance(expected, float) and isinstance(actual, float):
        return abs(actual - expected) <= 0.1 * expected
    return expected == actual


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and value.lower() == "unknown")


def _look_up(record: object, field: str) -> object:
    for name in field.split("."):
        record = getattr(record, name)
    return record


def _tell(value: object) -> str:
    return show_value(value) if _is_known(value) else "unknown"


def same_device(a: Device, b: Device) -> bool:
    """Tell whether what is measured on one device holds on the other, by the rules of `FIELDS`."""
    for field, rule in FIELDS.items():
        part, _, name = field.partition(".")
        if part != "device" or rule == "noted" or (name == "threads" and a.kind != "cpu"):
            continue
        if name == "kernels" and a.kernels is None:
            continue
        if not _agree(getattr(a, name), getattr(b, name), rule):
            return False
    return True
