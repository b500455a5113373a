"""Choose among the profiles of a folder the one made for a deployment, or say why none fits."""

import os
from dataclasses import dataclass
from pathlib import Path

from .deployment import Device, Sampling, TargetRef
from .errors import SpectuneError
from .io import PathLike, load
from .match import Facts, compare
from .schema import Profile
from .server import EngineName

_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class _Wanted:
    engine: EngineName
    target: TargetRef | str | None
    device: Device | None
    domain: str | None
    sampling: Sampling | None


def find(
    folder: PathLike,
    *,
    target: TargetRef | str | None = None,
    device: Device | None = None,
    domain: str | None = None,
    sampling: Sampling | None = None,
    engine: EngineName = "spectune",
) -> Profile:
    """Return the profile of a folder that fits; the newest, where several are made alike.

    What is left out may be anything. A target given as text is compared by its id; a record of a
    target, a device or a sampling by the rules of `compare`.

    Args:
        folder: Folder of profiles, `*.yaml` and `*.yml`; its subfolders are not searched.
        target: The target: its id, or a record of its weights and dtype.
        device: The device to decode on.
        domain: The domain's name.
        sampling: How tokens will be drawn.
        engine: What will decode; a profile made on one engine says nothing about another.

    Raises:
        SpectuneError: Nothing fits, with one sentence for each candidate, or profiles of several
            domains or samplings fit and none of them was asked for.
    """
    candidates = _candidates(folder)
    wanted = _Wanted(engine, target, device, domain, sampling)
    fitting: list[tuple[Path, Profile]] = []
    reasons: list[str] = []
    for path in candidates:
        try:
            profile = load(path)
        except SpectuneError as error:
            reasons.append(str(error).splitlines()[0])
            continue
        unfit = _why_not(profile, wanted)
        if unfit:
            reasons.append(f"{path}: {unfit}.")
        else:
            fitting.append((path, profile))
    if not fitting:
        remedy = "tune one, or ask for less"
        raise SpectuneError("\n  ".join([f"no profile in {folder} fits; {remedy}:", *reasons]))
    _refuse_ambiguous(fitting)
    return max(fitting, key=lambda found: found[1].created)[1]


def _candidates(folder: PathLike) -> list[Path]:
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in _ENDINGS)
    except OSError as error:
        reason = error.strerror or error
        raise SpectuneError(
            f"profiles are looked for in a folder, but {os.fspath(folder)} cannot be listed "
            f"({reason}); check the path"
        ) from None
    if not paths:
        raise SpectuneError(
            f"profiles are files *.yaml, but {os.fspath(folder)} holds none; write one there with "
            "`spectune tune --out`"
        )
    return paths


def _why_not(profile: Profile, wanted: _Wanted) -> str | None:
    """Name the first thing in which a profile is not what is wanted; None if it fits."""
    if profile.engine != wanted.engine:
        return f"engine: {profile.engine} in the profile, {wanted.engine} wanted"
    if isinstance(wanted.target, str) and profile.target.id != wanted.target:
        return f"target.id: {profile.target.id} in the profile, {wanted.target} wanted"
    if wanted.domain is not None and profile.domain.name != wanted.domain:
        return f"domain.name: {profile.domain.name} in the profile, {wanted.domain} wanted"
    target = None if isinstance(wanted.target, str) else wanted.target
    facts = Facts(
        device=wanted.device or profile.device,
        target=target or profile.target,
        draft=profile.draft,
        sampling=wanted.sampling or profile.sampling,
        spectune=profile.spectune,
    )
    asked = {"device": wanted.device, "target": target, "sampling": wanted.sampling}
    for mismatch in compare(profile, facts):
        part = mismatch.field.partition(".")[0]
        if mismatch.level == "fatal" and asked.get(part) is not None:
            return str(mismatch)
    return None


def _refuse_ambiguous(fitting: list[tuple[Path, Profile]]) -> None:
    """Refuse to choose between profiles made for different purposes."""
    for what in ("target", "device", "domain", "sampling"):
        kinds = {_purpose(profile, what): path.name for path, profile in fitting}
        if len(kinds) > 1:
            names = ", ".join(f"{purpose} ({name})" for purpose, name in sorted(kinds.items()))
            raise SpectuneError(
                f"profiles of more than one {what} fit: {names}; say which {what} is wanted"
            )


def _purpose(profile: Profile, what: str) -> str:
    if what == "target":
        return " ".join(filter(None, (profile.target.id, profile.target.dtype)))
    if what == "device":
        device = profile.device
        threads = f"{device.threads} threads" if device.threads else None
        return " ".join(filter(None, (device.kind, device.name, threads))) or "unknown"
    if what == "domain":
        return profile.domain.name
    return f"temperature {profile.sampling.temperature:g}"
