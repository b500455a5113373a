"""May a profile be trusted here? What it must agree with, and what is said where it does not."""

from importlib.metadata import version

from profiles import Device, DraftRef, Facts, Mismatch, Profile, Sampling, compare
from profiles.errors import UsageError

from .fingerprint import describe_device
from .pair import LoadedTarget


class UntrustedProfileWarning(UserWarning):
    """A profile does not fit this deployment, so decoding is plain."""


def facts(loaded: LoadedTarget, draft: DraftRef, sampling: Sampling) -> Facts:
    """Return what a profile must agree with to be trusted here."""
    return Facts(
        device=Device(**describe_device(loaded.target.device)),
        target=loaded.ref,
        draft=draft,
        sampling=sampling,
        spectune=version("spectune"),
    )


def check_engine(profile: Profile) -> None:
    """Refuse a profile that was measured on another engine: it says nothing about this one.

    Raises:
        UsageError: It was.
    """
    if profile.server is not None:
        raise UsageError(
            f"this engine runs profiles made on it, but {profile.name} was made on "
            f"{profile.engine} {profile.server.version}; see how to start that with: spectune "
            f"export FILE --to {profile.engine}"
        )


def fatal_mismatches(profile: Profile, found: Facts) -> list[Mismatch]:
    """Return the differences for which a profile is not trusted."""
    return [m for m in compare(profile, found) if m.level == "fatal"]


def why_untrusted(profile: Profile, fatal: list[Mismatch]) -> str:
    """Return a warning that names the differences and the remedies."""
    differences = "; ".join(str(mismatch) for mismatch in fatal)
    return (
        f"the profile {profile.name} was not made for this deployment ({differences}), so "
        "decoding is plain; tune again here, or trust it all the same with --trust (trust=True)"
    )
