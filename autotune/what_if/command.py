"""`spectune what-if`: parse the question, print, save or draw the answers."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import atomic_write, check_writable, measurements_path
from profiles.errors import UsageError

from ..commands.options import add_command
from ..console import print_json
from .scenario import KEYS

if TYPE_CHECKING:
    from .answers import WhatIf


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "Predict speed elsewhere or under other conditions, from a profile or numbers alone."
    keys = "\n".join(f"  {name:17} {key.text}" for name, key in KEYS.items())
    command = add_command(
        subparsers,
        "what-if",
        text,
        run,
        epilog=f"keys:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("profile", nargs="?", type=Path, help="the YAML file that `tune` wrote")
    command.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE.yaml",
        help="instead of a profile, a device and a pair described by numbers",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one thing; may be given several times",
    )
    command.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=LO:HI[:STEP]",
        help="try a range, or values separated by commas; two sweeps make a grid",
    )
    command.add_argument("--csv", type=Path, metavar="FILE", help="save the rows as CSV")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="save a picture")


def run(arguments: argparse.Namespace) -> None:
    """Answer the question.

    Raises:
        SpectuneError: A file cannot be read or written, or the question makes no sense.
    """
    from .ask import what_if
    from .basis import basis_of_numbers, basis_of_profile

    if (arguments.profile is None) == (arguments.measurements is None):
        raise UsageError("what-if needs either a profile or --measurements: give one of them")
    changes, sweeps = _pairs(arguments.set, "--set"), _pairs(arguments.sweep, "--sweep")
    if arguments.plot is not None and not sweeps:
        raise UsageError("--plot needs something to plot against: add a --sweep")
    if arguments.profile is not None:
        basis = basis_of_profile(arguments.profile)
        read = [arguments.profile, measurements_path(arguments.profile)]
    else:
        basis = basis_of_numbers(arguments.measurements)
        read = [arguments.measurements]
    for path in (arguments.csv, arguments.plot):
        if path is not None:
            check_writable(path, *read)
    answers = what_if(basis, changes, sweep=sweeps)
    _write(answers, arguments)


def _write(answers: "WhatIf", arguments: argparse.Namespace) -> None:
    if arguments.csv is not None:
        frame = answers.to_frame()
        frame["flags"] = frame["flags"].str.join("; ")
        atomic_write(arguments.csv, frame.to_csv(index=False))
    if arguments.plot is not None:
        from .plot import plot

        atomic_write(arguments.plot, plot(answers))
    if arguments.json:
        print_json(document(answers))
        return
    from ..console import LiteralConsole
    from .table import print_answers

    print_answers(answers, LiteralConsole())


def document(answers: "WhatIf") -> dict[str, Any]:
    """Return the answers as what JSON can hold."""
    return {
        "asked": answers.name,
        "swept": list(answers.swept),
        "rows": [answer.row() for answer in answers.answers],
        "notes": list(answers.notes),
    }


def _pairs(given: Sequence[str], option: str) -> Mapping[str, str]:
    """Return `KEY=VALUE` options as a mapping; a dash in a key counts as an underscore."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        key = name.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise UsageError(f"{option} must be written KEY=VALUE, but got {text!r}: correct it")
        if key in pairs:
            raise UsageError(f"{option} must name a key once, but {key} comes twice: drop one")
        pairs[key] = value.strip()
    return pairs
