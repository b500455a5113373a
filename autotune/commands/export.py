"""`spectune export`: a profile in the terms of a serving engine."""

import argparse
from pathlib import Path
from typing import Any

from profiles import (
    ENGINES,
    Export,
    Profile,
    atomic_write,
    check_writable,
    export,
    load,
    measurements_path,
)

from ..console import print_json, tell
from .options import add_command


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "Write a profile as settings of a serving engine, or say why that engine cannot run it."
    command = add_command(subparsers, "export", text, run)
    command.add_argument("profile", type=Path, help="the YAML file that `tune` wrote")
    command.add_argument("--to", required=True, choices=ENGINES, metavar="ENGINE", help=_NAMES)
    command.add_argument(
        "--project",
        choices=["chain"],
        help="`chain`: take the best chain that the profile proved, with its own figures",
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="write it there, not to the terminal"
    )


def run(arguments: argparse.Namespace) -> None:
    """Export a profile: to a file, or to stdout."""
    profile = _with_folders(load(arguments.profile))
    exported = export(profile, arguments.to, chain=arguments.project == "chain")
    if arguments.out:
        check_writable(arguments.out, arguments.profile, measurements_path(arguments.profile))
        atomic_write(arguments.out, exported.text)
        tell(f"Wrote {arguments.out}.")
    if arguments.json:
        print_json(_document(exported))
    elif not arguments.out:
        print(exported.text, end="")


_NAMES = ", ".join(ENGINES)


def _document(exported: Export) -> dict[str, Any]:
    evidence = exported.evidence
    return {
        "engine": exported.engine,
        "speculate": not exported.tree.is_plain,
        "tree": exported.tree.model_dump(),
        "evidence": evidence.model_dump(exclude_none=True) if evidence else None,
        "settings": exported.settings,
        "comments": exported.comments,
        "text": exported.text,
    }


def _with_folders(profile: Profile) -> Profile:
    """Replace `demo`, a word of ours alone, by the folders it stands for."""
    from engine.demo import demo_head_path, demo_target_folder

    target, draft = profile.target, profile.draft
    changes: dict[str, Any] = {}
    if target.id == "demo":
        changes["target"] = target.model_copy(update={"id": str(demo_target_folder())})
    if draft.id == "demo":
        head = str(demo_head_path())
        changes["draft"] = draft.model_copy(update={"id": head})
        changes["alternatives"] = [
            rival.model_copy(update={"draft": head}) if rival.draft == "demo" else rival
            for rival in profile.alternatives
        ]
    return profile.model_copy(update=changes)
