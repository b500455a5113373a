"""The figures behind a profile as terminal tables: what the page shows as pictures."""

from rich.box import SIMPLE
from rich.table import Table

from profiles import Measurements, Profile

from .findings import Subject, acceptance_rates, plain_ms, round_parts, trials

N_RANKS = 4
MOST_DEPTHS = 10


def round_table(profile: Profile, subject: Subject | None) -> Table | None:
    """Return where the time of a round goes."""
    parts = round_parts(profile, subject) if subject else []
    plain = plain_ms(profile)
    if subject is None or not parts or plain is None:
        return None
    total = sum(ms for _, ms in parts)
    table = _table(f"A round of {subject.tree.label()}, by the cost model")
    table.add_column("part")
    for column in ("ms", "share", "plain tokens"):
        table.add_column(column, justify="right")
    for name, ms in (*parts, ("the round", total)):
        table.add_row(name, f"{ms:.2f}", f"{100 * ms / total:.0f} %", f"{ms / plain:.2f}")
    table.add_row("a plain token", f"{plain:.2f}", "", "1.00")
    return table


def acceptance_table(measurements: Measurements | None, subject: Subject | None) -> Table | None:
    """Return how often the draft's children were right, by depth and rank."""
    if measurements is None or subject is None:
        return None
    rates = acceptance_rates(measurements, subject.draft)[:MOST_DEPTHS]
    if not rates:
        return None
    n_ranks = min(N_RANKS, max(len(row) for _, row in rates))
    table = _table(f"Acceptance of {subject.draft} by depth and rank, in percent")
    for column in ("depth", "tried", *(f"rank {rank + 1}" for rank in range(n_ranks)), "any"):
        table.add_column(column, justify="right")
    for depth, (tried, row) in enumerate(rates, start=1):
        shares = [*row[:n_ranks], *[0.0] * (n_ranks - len(row)), sum(row)]
        table.add_row(str(depth), str(tried), *(f"{100 * share:.0f}" for share in shares))
    return table


def trials_table(measurements: Measurements | None) -> Table | None:
    """Return the search's history."""
    ran = trials(measurements) if measurements else []
    if not ran:
        return None
    table = _table("Trees measured on tune prompts, in their order")
    for column in ("draft", "tree"):
        table.add_column(column, overflow="fold")
    for column in ("predicted", "measured", "prompts"):
        table.add_column(column, justify="right")
    for trial in ran:
        predicted = "" if trial.predicted is None else f"{trial.predicted:.2f}x"
        prompts = f"{len(trial.ratios)}{'' if trial.is_whole else ', stopped'}"
        table.add_row(trial.draft, trial.tree.label(), predicted, f"{trial.speedup:.2f}x", prompts)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE)
