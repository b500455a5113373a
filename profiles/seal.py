"""Noticing that a profile was edited after it was written: a digest over all that it says.

It guards against mistakes, not against forgery: whoever can edit a file can seal it again.
"""

import hashlib
import json

from .schema import Profile

_LEFT_OUT = {"content_sha256", "name", "measurements"}
"""Names of the profile and of the file beside it may change: nothing is computed with them."""


def content_sha256(profile: Profile) -> str:
    """Return the digest of what a profile says now.

    Fields that have their default are left out, so that fields of later versions change nothing.
    """
    content = profile.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(profile: Profile) -> Profile:
    """Return the profile with the digest of its present content."""
    return profile.model_copy(update={"content_sha256": content_sha256(profile)})


def is_sealed(profile: Profile) -> bool:
    """Tell whether a profile still says what it said when it was written."""
    return profile.content_sha256 == content_sha256(profile)
