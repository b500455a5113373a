"""What people read in a terminal: a profile and its measurements as tables."""

from collections.abc import Iterable
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiles import Measurements, ProbedValue, Profile

from .figure_tables import acceptance_table, round_table, trials_table
from .findings import certainty, commands, draft_name, evidence_cells, headline, subject_of
from .labels import checklist, circumstances, was_corrected


def print_profile(
    profile: Profile, measurements: Measurements | None, path: Path, console: Console
) -> None:
    """Print what a profile and its measurements say, what to do first.

    Args:
        profile: The profile.
        measurements: The figures behind it, if they are there.
        path: Where the profile lies, for the commands that are shown.
        console: Where to print; nothing is taken as markup.
    """
    console.print(Text(headline(profile), style="bold"))
    console.print(certainty(profile))
    console.print()
    for purpose, command in commands(profile, path):
        console.print(f"{purpose}:")
        console.print(f"    {command}", soft_wrap=True)  # a command is one line, to be copied
    console.print()
    console.print(_listed([*checklist(profile), *circumstances(profile)]))
    if was_corrected(profile):
        console.print(probe_table(profile))
    if profile.evidence or profile.alternatives:
        console.print(evidence_table(profile))
    subject = subject_of(profile, measurements)
    for table in (
        round_table(profile, subject),
        acceptance_table(measurements, subject),
        trials_table(measurements),
    ):
        if table is not None:
            console.print(table)


def _listed(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, value)
    return table


def evidence_table(profile: Profile) -> Table:
    """Return the holdout's figures: the chosen tree first, then its rivals."""
    table = Table(
        title=f"Holdout of {profile.domain.name}, plain decoding = 1",
        caption="tau: tokens per round; even: tau at which speculation breaks even; decode and "
        "total: speedup without and with reading the prompt; at least: bound of total; worst: "
        "slowest prompt",
        box=SIMPLE,
    )
    for column in ("draft", "tree"):
        table.add_column(column, overflow="fold")
    for column in ("tau", "even", "decode", "total", "at least", "worst"):
        table.add_column(column, justify="right")
    if profile.evidence:
        cells = draft_name(profile), profile.tree.label(), *evidence_cells(profile.evidence)
        table.add_row(*cells, style="bold")
    for rival in profile.alternatives:
        table.add_row(rival.draft, rival.tree.label(), *evidence_cells(rival.evidence))
    return table


def probe_table(profile: Profile) -> Table:
    """Return every reading of the head's conventions that was tried."""
    table = Table(title="Readings of the head's config", box=SIMPLE)
    for column in ("what", "value"):
        table.add_column(column)
    for column in ("agreement", "tokens", "p"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in profile.probe:
        table.add_row(*_probe_cells(row), style="bold" if row.verdict == "chosen" else None)
    return table


def _probe_cells(row: ProbedValue) -> list[str]:
    return [
        row.what.replace("_", " "),
        f"{row.value:g}" if isinstance(row.value, float) else str(list(row.value)),
        f"{100 * row.agreement:.1f} %",
        str(row.n_tokens),
        "" if row.p_value is None else f"{row.p_value:.2g}",
        row.verdict,
    ]
