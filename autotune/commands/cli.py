"""The command line: parse, call, print. Results go to stdout, everything else to stderr."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from profiles.errors import SpectuneError

from ..bench import command as bench
from ..console import print_whatever_comes, printable, tell
from ..report import command as show
from ..what_if import command as what_if
from . import check, export, run, tune

COMMANDS = (tune, run, bench, show, check, export, what_if)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    print_whatever_comes()
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except SpectuneError as error:
        tell(f"spectune: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        was_tuning = arguments.command is tune.run
        tell("spectune: stopped" + "; no profile was written" * was_tuning)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        tell(f"spectune: {place}{error.strerror or error}: check the path and the disk")
        return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are fit for a terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = _Parser(
        prog="spectune",
        description="Find the draft tree that makes speculative decoding fastest on this device, "
        "for these models and prompts, and prove that it is faster than plain decoding.",
        epilog="Begin with `tune`: it writes a profile, which the other commands read. `spectune "
        "COMMAND --help` lists the options of a command. Exit codes: 0 done, 1 "
        "failed, 2 wrong usage, 130 stopped by Ctrl-C.",
    )
    top.add_argument("--version", action="version", version=f"spectune {version('spectune')}")
    subparsers: Any = top.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return top
