"""`spectune check`: is a profile whole, and does it still hold on this machine?"""

import argparse
from pathlib import Path
from typing import Any

from profiles import Profile, Recheck, check_writable, is_sealed, load, load_measurements_of, save
from profiles.errors import SpectuneError, UsageError

from ..console import print_json
from .options import add_command, add_remote_code, set_threads, threads_of


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = (
        "Check that a profile and its measurements are whole and consistent, and, with "
        "--remeasure, that it is still faster than plain decoding here."
    )
    command = add_command(subparsers, "check", text, run)
    command.add_argument("profile", type=Path, help="the YAML file that `tune` wrote")
    again = command.add_argument_group(
        "measuring again",
        "says confirmed, inconclusive (the profile stays) or refuted (it is rewritten as plain, "
        "and the exit code is 1), and appends the figures to the profile",
    )
    again.add_argument("--remeasure", action="store_true", help="time it against plain decoding")
    again.add_argument("--prompts", type=Path, help="a file of prompts of its domain")
    again.add_argument(
        "--n-prompts", type=int, default=8, metavar="N", help="how many to use (default: 8)"
    )
    again.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="per answer (default: 64)"
    )
    again.add_argument(
        "--raw",
        action="store_true",
        help="leave out the chat template (default: as when the profile was made)",
    )
    again.add_argument(
        "--trust", action="store_true", help="measure though the profile does not fit here"
    )
    add_remote_code(again)


def run(arguments: argparse.Namespace) -> int:
    """Check a profile, and return 1 if measuring it again refuted it.

    Raises:
        SpectuneError: The profile or its measurements are not whole, or cannot be measured.
    """
    if arguments.remeasure != (arguments.prompts is not None):
        raise UsageError("--remeasure and --prompts need each other: give both or neither")
    path, profile = arguments.profile, load(arguments.profile)
    measurements = load_measurements_of(profile, path)
    n_measured = None if measurements is None else len(measurements.measured)
    found = None
    if arguments.remeasure and profile.decision == "speculate":
        profile, found = _remeasure(arguments, profile)
    if arguments.json:
        document = {"profile": profile.name, "valid": True, "decision": profile.decision}
        document |= {"edited": not is_sealed(profile), "measured_trees": n_measured}
        document["recheck"] = found and found.model_dump(mode="json")
        print_json(document)
    else:
        _tell(path, profile, found, was_asked=arguments.remeasure)
    return int(found is not None and found.verdict == "refuted")


def _remeasure(arguments: argparse.Namespace, profile: Profile) -> tuple[Profile, Recheck]:
    """Measure, and write what was found into the profile."""
    from ..progress import OnTerminal
    from ..rechecking import recheck, with_recheck

    check_writable(arguments.profile)
    set_threads(threads_of(profile))
    found = recheck(
        profile,
        arguments.prompts,
        n_prompts=arguments.n_prompts,
        max_new_tokens=arguments.max_new_tokens,
        raw=arguments.raw,
        trust=arguments.trust,
        trust_remote_code=arguments.trust_remote_code,
        progress=OnTerminal(),
    )
    if load(arguments.profile) != profile:
        raise SpectuneError(f"{arguments.profile} changed while it was measured: check it again.")
    changed = with_recheck(profile, found)
    save(changed, arguments.profile)
    return changed, found


def _tell(path: Path, profile: Profile, found: Recheck | None, *, was_asked: bool) -> None:
    print(f"{path} is valid: {profile.decision}, {profile.tree.label()}.")
    if not is_sealed(profile):
        print("It was edited after it was written, so it is decoded plainly unless trusted.")
    if found is not None:
        from ..rechecking import describe

        then = "; from now on it is decoded plainly" if found.verdict == "refuted" else ""
        print(f"{found.verdict}: {describe(found)}{then}.")
    elif was_asked:
        print("It decodes plainly already: there is nothing to measure again.")
