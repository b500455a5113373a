"""What the benchmarks share: options, conditions, and one way of printing."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.fingerprint import describe_device

DOMAINS = Path(__file__).parent.parent / "examples" / "domains"


def parser(
    description: str | None, quick: str = "end within 2 minutes on 2 cores"
) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has; `quick` is the help of `--quick`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON document")
    options.add_argument("--quick", action="store_true", help=quick)
    options.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options.add_argument("--seed", type=int, default=0)
    return options


def conditions(device: torch.device | str, **more: Any) -> dict[str, Any]:
    """Return what must stand beside a figure: device, versions, and what the benchmark adds."""
    return describe_device(device) | {"spectune": version("spectune"), "batch": 1} | more


def say(text: str) -> None:
    """Tell on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def publish(
    figures: Mapping[str, Any],
    conditions: Mapping[str, Any],
    tables: Sequence[Table],
    as_json: bool,
) -> None:
    """Print the result: one JSON document, or tables with the conditions below them."""
    if as_json:
        print(json.dumps({"figures": figures, "conditions": conditions}))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables:
        console.print(table)
    shown = ", ".join(f"{key} {value}" for key, value in conditions.items() if value is not None)
    console.print(f"Conditions: {shown}", highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table; floats are shown with three digits, first column left."""
    result = Table(title=title)
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left")
    for row in rows:
        result.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    return result
