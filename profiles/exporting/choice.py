"""What of a profile is exported to an engine: a draft, a tree and the evidence for that tree.

Refuses what the engine cannot run. Knows nothing of how a setting is written for it.
"""

from dataclasses import dataclass

from ..deployment import DraftRef, draft_name
from ..engine_spaces import ENGINE_SPACES, nearest, why_not
from ..errors import SpectuneError
from ..evidence import Alternative, Evidence
from ..schema import Profile
from ..tree import TreeConfig

DRAFT_WORDS = {
    "eagle3": "EAGLE-3 heads",
    "model": "small models as drafts",
    "lookup": "model-free lookup",
    "suffix": "suffix decoding",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A proved setting of a profile.

    Attributes:
        profile: Where it comes from.
        draft: Its draft.
        tree: Its tree, in canonical form.
        evidence: What that very tree did on the holdout.
    """

    profile: Profile
    draft: DraftRef
    tree: TreeConfig
    evidence: Evidence


def own_tree(profile: Profile) -> Choice:
    """Return the tree that a speculating profile decided for."""
    assert profile.evidence is not None  # noqa: S101 - the schema asks for it
    return Choice(profile, profile.draft, profile.tree.canonical(), profile.evidence)


def own_chain(profile: Profile) -> Choice:
    """Return the profile's tree if it is a chain, else the best chain it proved beside it.

    Raises:
        SpectuneError: The profile has no such chain, or it was not proved faster than plain.
    """
    if profile.tree.is_chain:
        return own_tree(profile)
    chains = [rival for rival in profile.alternatives if rival.tree.is_chain]
    same_draft = [rival for rival in chains if rival.draft == draft_name(profile.draft)]
    if not same_draft:
        others = ", ".join(sorted({rival.draft for rival in chains}))
        found = f"only one of another draft ({others})" if chains else "none"
        raise SpectuneError(
            f"projecting to a chain needs a chain among the alternatives of {profile.name}, but "
            f"there is {found}; tune again, or export for an engine that drafts in trees"
        )
    best = max(same_draft, key=lambda rival: rival.evidence.speedup.ratio)
    _refuse_unproved(profile, best)
    return Choice(profile, profile.draft, best.tree.canonical(), best.evidence)


def check_runnable(choice: Choice, engine: str, drafts: frozenset[str]) -> None:
    """Refuse a draft or a tree that the engine does not have.

    Args:
        choice: What would be exported.
        engine: The engine, a key of `ENGINE_SPACES`.
        drafts: The kinds of draft it runs.

    Raises:
        SpectuneError: With the engine's rule and the nearest choice that it can run.
    """
    kind, tree = choice.draft.kind, choice.tree
    if kind not in drafts:
        known = ", ".join(words for name, words in DRAFT_WORDS.items() if name in drafts)
        raise SpectuneError(
            f"{ENGINE_SPACES[engine].title} runs {known}, but this profile drafts with kind "
            f"{kind}; tune with such a draft, or export for another engine"
        )
    reason = why_not(engine, tree, kind)
    if reason is None:
        return
    legal = nearest(engine, tree, kind)
    remedy = f"the nearest it can run is {legal.label()}, which needs a measurement of its own"
    if legal.is_chain:
        remedy += "; --project chain takes the chain that this profile has proved, if any"
    raise SpectuneError(f"{reason}, but the profile's tree is {tree.label()}; {remedy}")


def _refuse_unproved(profile: Profile, chain: Alternative) -> None:
    speedup = chain.evidence.speedup
    if not speedup.is_proved:
        raise SpectuneError(
            f"projecting to a chain needs one proved faster than plain, but the best of "
            f"{profile.name}, {chain.tree.label()}, ran at {speedup.ratio:.3g}x (at least "
            f"{speedup.low:.3g}x); leave speculation off there, or tune on more prompts"
        )
