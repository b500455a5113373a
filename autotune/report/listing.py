"""A folder of profiles as a table."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from profiles import Profile, load
from profiles.errors import SpectuneError

from .findings import draft_name

Entry = tuple[Path, Profile]
Broken = tuple[Path, str]


def read_folder(folder: Path) -> tuple[list[Entry], list[Broken]]:
    """Return the profiles of a folder by name, and the files that cannot be read with the reason.

    Raises:
        SpectuneError: The folder holds no YAML file.
    """
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and p.is_file())
    if not paths:
        raise SpectuneError(f"{folder} holds no profile (*.yaml): name another folder, or tune.")
    entries, broken = [], []
    for path in paths:
        try:
            entries.append((path, load(path)))
        except SpectuneError as error:
            reason = str(error).removeprefix(str(path)).removeprefix(":").strip()
            broken.append((path, " ".join(reason.split("\n")[:2])))
    return entries, broken


def listing_table(entries: Sequence[Entry], now: datetime) -> Table:
    """Return profiles as a table: device, pair, domain, tree, speedup and age."""
    table = Table(box=SIMPLE)
    for title in ("file", "device", "pair", "domain", "tree"):
        table.add_column(title, overflow="fold")
    for title in ("speedup", "at least", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for path, profile in entries:
        speedup = profile.evidence.speedup if profile.evidence else None
        table.add_row(
            path.name,
            profile.device.name or profile.device.kind or "unknown",
            f"{profile.target.id} + {draft_name(profile)}",
            profile.domain.name,
            profile.tree.label(),
            f"{speedup.ratio:.2f}x" if speedup else "1",
            f"{speedup.low:.2f}x" if speedup else "",
            age(now - profile.created),
        )
    return table


def as_document(entries: Sequence[Entry], broken: Sequence[Broken]) -> dict[str, Any]:
    """Return a folder as one JSON document."""
    rows = []
    for path, profile in entries:
        speedup = profile.evidence.speedup if profile.evidence else None
        rows.append(
            {
                "file": path.name,
                "name": profile.name,
                "device": profile.device.name,
                "target": profile.target.id,
                "draft": draft_name(profile),
                "domain": profile.domain.name,
                "decision": profile.decision,
                "tree": profile.tree.model_dump(),
                "speedup": speedup.ratio if speedup else 1.0,
                "low": speedup.low if speedup else None,
                "created": profile.created.isoformat(),
            }
        )
    return {
        "profiles": rows,
        "broken": [{"file": path.name, "error": error} for path, error in broken],
    }


def age(span: timedelta) -> str:
    """Return a time span in its largest unit."""
    seconds = span.total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"
