"""Options that several commands have, and what is made of them."""

import argparse
from typing import Any

from profiles import Profile, Sampling, validated
from profiles.errors import UsageError

MAX_THREADS = 1024
"""More are a mistake, and the system may refuse to make them."""


def add_command(
    subparsers: Any, name: str, text: str, run: object, **layout: Any
) -> argparse.ArgumentParser:
    """Add a command that can print JSON to the command line.

    Args:
        subparsers: The commands.
        name: What it is called.
        text: What it does, in a sentence.
        run: Is given the parsed arguments.
        **layout: Arguments of `ArgumentParser` on how its help looks.
    """
    command: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=text, **layout
    )
    command.set_defaults(command=run)
    command.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else"
    )
    return command


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the options of where and how a target is loaded."""
    command.add_argument(
        "--device",
        default="auto",
        help="auto (the first GPU, else the CPU), cpu, cuda, cuda:1 or mps",
    )
    command.add_argument(
        "--dtype",
        default="auto",
        help="auto (the fastest that the device computes in), float32, bfloat16, float16 or "
        "float64",
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)"
    )
    add_remote_code(command)


def add_remote_code(command: argparse._ActionsContainer) -> None:
    """Add the option of running what comes with a checkpoint."""
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run the code a checkpoint brings"
    )


def add_sampling(command: argparse.ArgumentParser, default: str) -> None:
    """Add the options of how tokens are drawn."""
    sampling = command.add_argument_group(f"sampling (default: {default})")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--sample-top-k", type=int, metavar="K", help="0 is off")
    sampling.add_argument("--sample-top-p", type=float, metavar="P", help="1 is off")


def sampling_of(arguments: argparse.Namespace, default: Sampling) -> Sampling:
    """Return the sampling asked for; what was not given is the default's."""
    given = {
        "temperature": arguments.temperature,
        "top_k": arguments.sample_top_k,
        "top_p": arguments.sample_top_p,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return validated(Sampling, default.model_dump() | changes, "the sampling options")


def threads_of(profile: Profile) -> int | None:
    """Return the CPU threads a profile was made with; None if it was made on a GPU."""
    return profile.device.threads if profile.device.kind == "cpu" else None


def set_threads(threads: int | None) -> None:
    """Let torch compute with so many CPU threads, or leave it its choice.

    Raises:
        UsageError: No machine has so many.
    """
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"--threads must be from 1 to {MAX_THREADS}, but is {threads}")
    import torch

    torch.set_num_threads(threads)
