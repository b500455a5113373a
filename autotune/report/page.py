"""The report of a profile as one page: no network, pictures inside, everything escaped.

Made from the profile and the measurements beside it alone, so that it can be made again anywhere.
"""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from profiles import Evidence, Measurements, Profile, atomic_write

from ..texts import KeptText
from .canvas import Picture
from .cost_pictures import draft_picture, fit_picture, round_picture, verify_picture
from .findings import (
    certainty,
    commands,
    draft_name,
    evidence_cells,
    headline,
    judged_evidence,
    subject_of,
)
from .labels import checklist, circumstances
from .proof_pictures import holdout_picture, job_picture
from .search_pictures import (
    acceptance_picture,
    grid_picture,
    history_picture,
    prediction_picture,
)

N_TEXTS_SHOWN = 6


def write_report(
    profile: Profile,
    measurements: Measurements | None,
    profile_path: Path,
    out: Path,
    texts: Sequence[KeptText] = (),
) -> None:
    """Write the report of a profile, whole or not at all.

    Args:
        profile: The profile.
        measurements: The figures behind it; without them most pictures are missing.
        profile_path: Where the profile lies, for the commands that are shown.
        out: The HTML file.
        texts: Prompts and answers; the first few are shown, and the file is then private.

    Raises:
        SpectuneError: The file cannot be written.
    """
    html = page(profile, measurements, profile_path, texts)
    atomic_write(out, html, private=bool(texts))


def page(
    profile: Profile,
    measurements: Measurements | None,
    profile_path: Path,
    texts: Sequence[KeptText] = (),
) -> str:
    """Return the report as HTML; arguments as for `write_report`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    evidence = judged_evidence(profile)
    return environment.get_template("report.html").render(
        profile=profile,
        draft=draft_name(profile),
        headline=headline(profile),
        certainty=certainty(profile),
        commands=commands(profile, profile_path),
        checklist=checklist(profile),
        circumstances=circumstances(profile),
        judged=judged_rows(profile),
        confidence=f"{100 * evidence.speedup.confidence:.3g} %" if evidence else "",
        sections=[
            (title, [_embedded(picture) for picture in group])
            for title, group in sections(profile, measurements)
        ],
        has_measurements=measurements is not None,
        texts=texts[:N_TEXTS_SHOWN],
    )


def judged_rows(profile: Profile) -> list[dict[str, object]]:
    """Return the rows of the holdout's table, the chosen tree first."""
    rows: list[tuple[bool, str, str, Evidence]] = []
    if profile.evidence is not None:
        rows.append((True, draft_name(profile), profile.tree.label(), profile.evidence))
    rows += [(False, a.draft, a.tree.label(), a.evidence) for a in profile.alternatives]
    return [
        {"chosen": chosen, "draft": draft, "tree": tree, "cells": evidence_cells(evidence)}
        for chosen, draft, tree, evidence in rows
    ]


def sections(
    profile: Profile, measurements: Measurements | None
) -> list[tuple[str, list[Picture]]]:
    """Return the pictures under their headings; what there is no data for is left out."""
    subject = subject_of(profile, measurements)
    gain = [round_picture(profile, subject)] if subject else []
    job = ("Where the time of the job went", _present([job_picture(profile)]))
    if measurements is None:
        return [("Where the time goes, and the proof", _present(gain)), job]
    gain += [holdout_picture(profile, run) for run in measurements.holdout]
    costs = [
        verify_picture(profile, measurements),
        draft_picture(profile, measurements),
        fit_picture(profile, measurements),
    ]
    found = [prediction_picture(profile, measurements), history_picture(measurements)]
    if subject is not None:
        found[:0] = [
            acceptance_picture(measurements, subject),
            grid_picture(measurements, subject),
        ]
    return [
        ("Where the time goes, and the proof", _present(gain)),
        ("What a round costs", _present(costs)),
        ("What the draft guesses, and what the search found", _present(found)),
        job,
    ]


def _present(pictures: Sequence[Picture | None]) -> list[Picture]:
    return [picture for picture in pictures if picture is not None]


def _embedded(picture: Picture) -> dict[str, str]:
    return {
        "title": picture.title,
        "caption": picture.caption,
        "alt": picture.alt,
        "base64": b64encode(picture.png).decode(),
    }
