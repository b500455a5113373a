"""The tables of `peers.py`, in Markdown."""

from typing import Any

from common import table
from peer_figures import pool, speed_cell
from rich import box
from rich.table import Table

from autotune.bench.contest import Runs


def tables(by_domain: dict[str, Runs], figures: dict[str, Any]) -> list[Table]:
    """Return the speeds and the figures as tables in Markdown."""
    everything = by_domain | {"all": pool(by_domain)}
    names = dict.fromkeys(name for runs in by_domain.values() for name in runs)
    speed = table(
        "Tokens per second: end to end (decode only), median over the prompts",
        ["", *everything],
        [[name, *(speed_cell(runs, name) for runs in everything.values())] for name in names],
    )
    rows = [["all", name, *shown(figures, name)] for name in figures if is_ratio(figures, name)]
    for domain in by_domain:
        mine = figures[domain]
        rows += [[domain, name, *shown(mine, name)] for name in mine if is_ratio(mine, name)]
    ratios = table("Ratios", ["domain", "figure", "ratio", "low", "high", "against"], rows)
    for each in (speed, ratios):
        each.box = box.MARKDOWN
    return [speed, ratios]


def is_ratio(figures: dict[str, Any], name: str) -> bool:
    """Tell whether a name stands for a figure with an interval."""
    return f"{name}_low" in figures


def shown(figures: dict[str, Any], name: str) -> list[Any]:
    """Return a figure, its interval, and whom it is against where that is a choice."""
    bounds = [figures[f"{name}_{end}"] for end in ("low", "high")]
    against = figures.get(f"{name}_against", "")
    return [figures[name], *("" if bound is None else bound for bound in bounds), against]
