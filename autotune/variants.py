"""Drafts with other knobs, a part of the search like depth and width.

A variant costs what its draft costs and differs in what it proposes alone, so replay tells the
good from the bad without the target.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .job import Job

TRIED: Mapping[str, tuple[dict[str, Any], ...]] = {
    "lookup": ({"max_match": 3}, {"max_match": 8}, {"min_match": 2}),
    "suffix": ({"max_match": 6}, {"min_match": 2}, {"min_probability": 0.1}),
    "hybrid": ({"match_tau": 1.5}, {"match_tau": 3.0}, {"min_match": 2}),
}
"""By kind, the knobs that are tried beside a draft's own."""


def with_variants(job: Job) -> Job:
    """Return the job with the variants of its drafts added to them."""
    drafts, spaces, variant_of = dict(job.drafts), dict(job.spaces), dict(job.variant_of)
    for base, loaded in job.drafts.items():
        for knobs in TRIED.get(loaded.ref.kind, ()):
            variant = loaded.variant(**knobs)
            if variant.ref == loaded.ref:
                continue
            name = " ".join((base, *(f"{knob}={value}" for knob, value in knobs.items())))
            drafts[name], spaces[name], variant_of[name] = variant, job.spaces[base], base
    return replace(job, drafts=drafts, spaces=spaces, variant_of=variant_of)
