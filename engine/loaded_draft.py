"""A draft together with how a profile names it, and variants of it with other knobs."""

from dataclasses import dataclass
from typing import Any

from profiles import DraftRef, validated
from profiles.errors import UsageError

from .draft import Draft
from .hybrid import HybridDraft
from .lookup import LookupDraft
from .suffix import SuffixDraft

_MATCH = {"min_match": 1, "max_match": 16, "min_probability": 0.02, "history": 0}

KNOBS: dict[str, dict[str, Any]] = {
    "lookup": {"min_match": 1, "max_match": 5, "min_probability": 0.02},
    "suffix": _MATCH,
    "hybrid": _MATCH | {"match_nodes": 16, "match_tau": 2.0},
}
"""The knobs of each kind of draft that has any, with their defaults."""


@dataclass(frozen=True)
class LoadedDraft:
    """A draft and how a profile names it."""

    draft: Draft
    ref: DraftRef

    @property
    def head(self) -> "LoadedDraft":
        """The head or small model inside a hybrid; any other draft itself."""
        if not isinstance(self.draft, HybridDraft):
            return self
        none = dict.fromkeys(KNOBS["hybrid"])
        ref = self.ref.model_copy(update=none | {"kind": self.draft.head.kind})
        return LoadedDraft(self.draft.head, ref)

    def with_head(self, head: "LoadedDraft") -> "LoadedDraft":
        """Return this draft with `head` in the place of its own."""
        return hybrid_of(head, **self.knobs) if isinstance(self.draft, HybridDraft) else head

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs of this draft; empty for a head or a small model alone."""
        return knobs_of(self.ref)

    @property
    def is_head(self) -> bool:
        """Whether it is a head or a small model by itself, of which a hybrid can be made."""
        return self.ref.kind in ("eagle3", "model")

    def variant(self, **knobs: Any) -> "LoadedDraft":
        """Return this draft with other knobs; weights are shared, earlier answers forgotten.

        Raises:
            SpectuneError: Its kind has no such knob, or the values break a rule.
        """
        ref = validated(DraftRef, self.ref.model_dump() | knobs, f"a {self.ref.kind} draft")
        if isinstance(self.draft, HybridDraft):
            return LoadedDraft(_hybrid(self.draft.head, ref), ref)
        if isinstance(self.draft, SuffixDraft):
            return LoadedDraft(_suffix(ref), ref)
        return LoadedDraft(self.draft, ref)


def knobs_of(ref: DraftRef) -> dict[str, Any]:
    """Return the knobs of a reference, those it does not state as None."""
    return {name: getattr(ref, name) for name in KNOBS.get(ref.kind, ())}


def model_free(ref: DraftRef) -> LoadedDraft:
    """Return the lookup or suffix draft with the knobs of a reference."""
    return LoadedDraft(_suffix(ref), ref)


def hybrid_of(head: LoadedDraft, **knobs: Any) -> LoadedDraft:
    """Return a hybrid of a head or a small model; knobs not given have their defaults.

    Raises:
        UsageError: The draft has no weights.
    """
    if not head.is_head:
        raise UsageError(
            f"a hybrid must be made of a head or a small model, but {head.ref.kind} is neither; "
            "write hybrid:demo, or hybrid: and a folder or hub id"
        )
    changes = {"kind": "hybrid"} | KNOBS["hybrid"] | knobs
    ref = validated(DraftRef, head.ref.model_dump() | changes, "a hybrid draft")
    return LoadedDraft(_hybrid(head.draft, ref), ref)


def _suffix(ref: DraftRef) -> SuffixDraft:
    assert ref.min_match is not None and ref.max_match is not None  # noqa: S101 - the schema asks
    knobs = ref.min_match, ref.max_match, ref.min_probability or 0.0
    return LookupDraft(*knobs) if ref.kind == "lookup" else SuffixDraft(*knobs, ref.history or 0)


def _hybrid(head: Draft, ref: DraftRef) -> HybridDraft:
    assert ref.match_nodes is not None and ref.match_tau is not None  # noqa: S101
    return HybridDraft(head, _suffix(ref), match_nodes=ref.match_nodes, match_tau=ref.match_tau)
