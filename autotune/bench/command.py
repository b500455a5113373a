"""`spectune bench`: our decoding beside transformers' `generate` and the machine's floor."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import GREEDY, Profile, load
from profiles.errors import UsageError

from ..commands.options import add_command, add_device, set_threads
from ..console import print_json

if TYPE_CHECKING:
    from engine.pair import LoadedTarget
    from engine.trace import Trace

    from ..progress import Silent
    from .measuring import Bench


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = (
        "Time plain and speculative decoding beside transformers' generate and the floor: the "
        "least time that this machine's memory and arithmetic allow."
    )
    command = add_command(subparsers, "bench", text, bench)
    command.add_argument("--target", help="as in `tune` (default: the profile's)")
    command.add_argument(
        "--draft",
        action="append",
        default=[],
        help="as in `tune`; may be given several times; each is run with an untuned tree "
        "(default: lookup, or only the profile)",
    )
    command.add_argument("--prompts", required=True, type=Path, help="a file of prompts")
    command.add_argument("--profile", type=Path, help="a profile to run as it would serve")
    command.add_argument("--limit", type=int, default=8, metavar="N", help="prompts (default: 8)")
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens of an answer (default: 128)",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of prompts (default: 0)"
    )
    command.add_argument(
        "--compiled", action="store_true", help="also compile `generate`, which takes a minute"
    )
    command.add_argument(
        "--trust", action="store_true", help="use the profile's tree though it does not fit here"
    )
    command.add_argument(
        "--raw",
        action="store_true",
        help="leave out the chat template (default: as when the profile was made)",
    )
    add_device(command)


def bench(arguments: argparse.Namespace) -> None:
    """Time all contenders on the same prompts, in turns, and print what they reached."""
    profile = load(arguments.profile) if arguments.profile else None
    _check(arguments, profile)

    from ..progress import OnTerminal
    from . import measuring
    from .contenders import generate_modes

    progress = OnTerminal()
    loaded = _load_target(arguments, profile, progress)
    names = arguments.draft or ([] if profile else ["lookup"])
    contenders, drafts = measuring.speculating(
        loaded, names, profile, progress, trust=arguments.trust
    )
    modes, skipped = generate_modes(loaded, drafts, with_compiled=arguments.compiled)
    prompts = measuring.choose_prompts(
        loaded,
        arguments.prompts,
        n_prompts=arguments.limit,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        raw=arguments.raw or (profile is not None and profile.domain.template == "none"),
        progress=progress,
    )
    texts = measuring.record_texts(loaded, prompts, arguments.max_new_tokens, progress)
    result = measuring.bench(loaded, [*contenders, *modes], texts, progress, skipped)
    if arguments.json:
        print_json(_document(loaded, texts, result))
    else:
        _print(loaded, texts, result)


def _check(arguments: argparse.Namespace, profile: Profile | None) -> None:
    for name in ("limit", "max_new_tokens", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but is {value}")
    if profile is None and arguments.target is None:
        raise UsageError("bench needs a target, but none was given; pass --target or --profile")
    if profile is not None and profile.sampling != GREEDY:
        raise UsageError(
            "bench decodes greedily, as every contender can, but the profile samples at "
            f"temperature {profile.sampling.temperature}; use `run --compare` for it"
        )


def _load_target(
    arguments: argparse.Namespace, profile: Profile | None, progress: "Silent"
) -> "LoadedTarget":
    """Load the target where, and as, the options or else the profile say."""
    from engine.devices import device_like
    from engine.pair import load_target

    device, dtype, threads = arguments.device, arguments.dtype, arguments.threads
    if profile is not None:
        if device == "auto":
            device = device_like(profile.device.kind, profile.device.name)
        dtype = (profile.target.dtype or dtype) if dtype == "auto" else dtype
        threads = threads or profile.device.threads
    set_threads(threads)
    return load_target(
        arguments.target or (profile.target.id if profile else ""),
        dtype=dtype,
        device=device,
        trust_remote_code=arguments.trust_remote_code,
        progress=progress.say,
    )


def _document(loaded: "LoadedTarget", texts: "list[Trace]", result: "Bench") -> dict[str, Any]:
    from engine.fingerprint import describe_device

    return {
        "target": loaded.ref.id,
        "dtype": loaded.ref.dtype,
        "batch": 1,
        "device": describe_device(loaded.target.device),
        "prompts": len(texts),
        "tokens": sum(len(text.generated) for text in texts),
        "bandwidth_gb_per_s": result.limits.bytes_per_s / 1e9,
        "matrix_gflop_per_s": result.limits.operations_per_s / 1e9,
        "contenders": [standing.as_json() for standing in result.standings],
        "skipped": result.skipped,
    }


def _print(loaded: "LoadedTarget", texts: "list[Trace]", result: "Bench") -> None:
    from ..console import LiteralConsole
    from .table import contest_table

    console = LiteralConsole()
    title = f"{loaded.ref.id} ({loaded.ref.dtype}), greedy, batch 1, {len(texts)} prompts"
    console.print(contest_table(title, result.standings))
    limits = result.limits
    console.print(
        f"Floor: {limits.bytes_per_s / 1e9:.1f} GB/s read, {limits.operations_per_s / 1e9:.0f} "
        f"GFLOP/s in {loaded.ref.dtype}; the intervals (95 %) are over the prompts.",
    )
    for name, reason in result.skipped.items():
        console.print(f"Left out: {name}: {reason}.")
