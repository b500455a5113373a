"""The comment on top of every export: where its figures come from, and what they do not prove."""

from ..deployment import Device, DraftRef, Sampling
from ..evidence import Evidence
from ..schema import Profile
from ..tree import TreeConfig

BASELINE_OF_PLAIN = "plain decoding on this engine"


def provenance(profile: Profile, title: str, version: str) -> list[str]:
    """Say what was measured, where, and for whom this is written."""
    target = " ".join(filter(None, (profile.target.id, profile.target.dtype)))
    return [
        f"{title} settings from the spectune profile {profile.name} of {profile.created:%Y-%m-%d}",
        f"written by the rules of {title} {version}",
        f"measured on: {_engine(profile)}",
        f"device: {_device(profile.device)}",
        f"target: {target}; draft: {_draft(profile.draft)}",
        f"domain: {profile.domain.name}, {_sampling(profile.sampling)}",
    ]


def proof(profile: Profile, tree: TreeConfig, evidence: Evidence) -> list[str]:
    """Give the figures of the exported tree and what they are compared with."""
    speedup, where = evidence.speedup, _where(profile)
    with_adaptive = ", with adaptive drafting" * profile.adaptive
    return [
        f"tree: {tree.label()}, {evidence.tau:.3g} tokens per round, {evidence.break_even_tau:.3g}"
        " to break even",
        f"baseline on {where}: {evidence.baseline}",
        f"speedup there{with_adaptive}: {speedup.ratio:.3g}x, at least {speedup.low:.3g}x at "
        f"{100 * speedup.confidence:.3g} % confidence on {speedup.prompts} held-out prompts",
    ]


def no_proof(profile: Profile) -> list[str]:
    """Say why a plain profile exports as no speculation at all."""
    return [
        f"baseline on {_where(profile)}: {BASELINE_OF_PLAIN}",
        f"decision: plain. {profile.reason}",
        "do not enable speculation: start the engine without any draft",
    ]


def dropped(profile: Profile, title: str) -> list[str]:
    """Name what the profile does at run time and the engine does not."""
    if profile.server is not None:
        return []  # it served fixed chains, unguarded
    adaptive = "adaptive drafting (every round has the whole tree there) and " * profile.adaptive
    draft = profile.draft
    lines = [
        f"dropped: {adaptive}the guard (nothing falls back to plain decoding there when "
        "speculation stops paying)"
    ]
    if draft.rope_theta is not None:
        lines.append(
            f"dropped: rope_theta {draft.rope_theta:g} that the head was found to need; {title} "
            "reads it from the head's config.json, so correct it there"
        )
    if draft.feature_layers is not None:
        lines.append(
            f"dropped: feature layers {list(draft.feature_layers)} (hidden states, 0 = embeddings)"
            f" that the head was found to need; {title} reads them from the head's config.json"
        )
    if draft.min_probability is not None:
        lines.append(f"dropped: min_probability {draft.min_probability:g} of drafted paths")
    return lines


def standing(profile: Profile, engine: str, title: str) -> str:
    """Say that a measurement on one engine is none on another."""
    if profile.server is not None and profile.engine == engine:
        return (
            f"measured on {title} {profile.server.version} with prefix caches off: another "
            "version, device or traffic is to be measured again"
        )
    return f"unproven on {title} until re-measured"


def shortest_match(draft: DraftRef) -> list[str]:
    """Name the lookup's shortest match where an engine begins at a single token."""
    if draft.kind != "lookup" or draft.min_match == 1:
        return []
    return [f"dropped: the shortest match of {draft.min_match} tokens; there it is 1"]


def one_line(text: str) -> str:
    """Replace line breaks and all else unprintable by spaces: no name can end a comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _where(profile: Profile) -> str:
    return "spectune's engine" if profile.server is None else profile.engine


def _engine(profile: Profile) -> str:
    if profile.server is None:
        return f"spectune {profile.spectune}, its own engine, batch 1"
    version, at_once = profile.server.version, profile.server.concurrency
    return (
        f"{profile.engine} {version}, {at_once} requests at once, by spectune {profile.spectune}"
    )


def _device(device: Device) -> str:
    threads = f"{device.threads} threads" if device.kind == "cpu" and device.threads else None
    return ", ".join(filter(None, (device.kind, device.name, threads))) or "unknown"


def _draft(draft: DraftRef) -> str:
    if not draft.has_weights:
        return f"{draft.kind} of {draft.min_match} to {draft.max_match} tokens"
    return " ".join(filter(None, (draft.kind, draft.id)))


def _sampling(sampling: Sampling) -> str:
    if sampling.is_greedy:
        return "greedy"
    return (
        f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}"
    )
