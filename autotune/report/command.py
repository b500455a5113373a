"""`spectune show`: one profile, two side by side, or a folder of them. Loads no torch."""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profiles import (
    Measurements,
    Profile,
    check_writable,
    load,
    load_measurements_of,
    measurements_path,
)
from profiles.errors import SpectuneError, UsageError

from ..commands.options import add_command
from ..console import print_json, tell


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "Print what a profile says, compare two, or list a folder of them."
    command = add_command(subparsers, "show", text, run)
    command.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PROFILE",
        help="a profile, two profiles to compare, or a folder to list",
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page instead"
    )
    command.add_argument(
        "--keep-text",
        action="store_true",
        help="show a few of the prompts and answers that `tune --keep-text` kept in the page",
    )


def run(arguments: argparse.Namespace) -> None:
    """Show what was asked for."""
    paths: list[Path] = arguments.paths
    _check(arguments)
    if arguments.html:
        _write_page(paths[0], arguments.html, keep_text=arguments.keep_text)
    elif len(paths) == 2:
        _compare(paths[0], paths[1], as_json=arguments.json)
    elif paths[0].is_dir():
        _list(paths[0], as_json=arguments.json)
    else:
        show_profile(paths[0], as_json=arguments.json)


def show_profile(path: Path, *, as_json: bool) -> None:
    """Print one profile, with the figures behind it where they are there."""
    profile = load(path)
    if as_json:
        print_json(profile.model_dump(mode="json", exclude_none=True))
        return
    from ..console import LiteralConsole
    from .terminal import print_profile

    print_profile(profile, measurements_of(profile, path), path, LiteralConsole())


def measurements_of(profile: Profile, path: Path) -> Measurements | None:
    """Return the measurements beside a profile; None, with a word on stderr, if they are gone."""
    try:
        return load_measurements_of(profile, path)
    except SpectuneError as error:
        tell(f"spectune: showing the profile alone, since {error}")
        return None


def _check(arguments: argparse.Namespace) -> None:
    paths: list[Path] = arguments.paths
    if len(paths) > 2:
        raise UsageError(f"show compares two profiles, but was given {len(paths)}; name two")
    if len(paths) == 2 and (folder := next((p for p in paths if p.is_dir()), None)):
        raise UsageError(f"show compares two profiles, but {folder} is a folder; name a file")
    if arguments.html and (len(paths) > 1 or paths[0].is_dir()):
        raise UsageError("--html writes the report of one profile; name one file")
    if arguments.html and arguments.json:
        raise UsageError("--html writes a page and --json prints a document; give one of them")
    if arguments.keep_text and not arguments.html:
        raise UsageError("--keep-text says what the page holds; give --html FILE with it")


def _write_page(path: Path, out: Path, *, keep_text: bool) -> None:
    from ..texts import load_texts, texts_path
    from .page import write_report

    profile = load(path)
    check_writable(out, path, measurements_path(path), texts_path(path))
    texts = load_texts(texts_path(path)) if keep_text else ()
    write_report(profile, measurements_of(profile, path), path, out, texts)
    tell(f"Wrote {out}.")


def _compare(first: Path, second: Path, *, as_json: bool) -> None:
    from .differences import differences, differences_table

    found = differences(load(first), load(second))
    if as_json:
        rows = [{"field": d.field, "a": d.first, "b": d.second} for d in found]
        print_json({"a": str(first), "b": str(second), "differences": rows})
        return
    from ..console import LiteralConsole

    console = LiteralConsole()
    if found:
        names = (first.name, second.name) if first.name != second.name else (first, second)
        console.print(differences_table(found, *map(str, names)))
    else:
        console.print(f"{first.name} and {second.name} say the same.")


def _list(folder: Path, *, as_json: bool) -> None:
    from .listing import as_document, listing_table, read_folder

    entries, broken = read_folder(folder)
    if as_json:
        print_json(as_document(entries, broken))
        return
    from ..console import LiteralConsole

    console = LiteralConsole()
    if entries:
        console.print(listing_table(entries, datetime.now(UTC)))
    for path, error in broken:
        console.print(f"{path.name} is no profile: {error}")
