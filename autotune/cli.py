"""The command line: parse, call, print. Results go to stdout, everything else to stderr."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from profiles.engine_spaces import ENGINE_SPACES
from profiles.errors import SpectuneError

from . import check_command, commands, export_command
from .bench import command as bench_command
from .console import print_whatever_comes, printable, tell
from .report import command as show_command
from .settings import Settings
from .what_if import command as what_if_command


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
        was_tuning = arguments.command is commands.tune
        tell("spectune: stopped" + "; no profile was written" * was_tuning)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        tell(f"spectune: {place}{error.strerror or error}: check the path and the disk")
        return 1


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


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
    for add in (_add_tune, _add_run, _add_bench, show_command.add_parser):
        add(subparsers)
    check_command.add_parser(subparsers)
    export_command.add_parser(subparsers)
    what_if_command.add_parser(subparsers)
    return top


def _command(subparsers: Subparsers, name: str, text: str, run: object) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
    command.set_defaults(command=run)
    command.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else"
    )
    return command


def _add_tune(subparsers: Subparsers) -> None:
    text = "Find and prove the fastest draft tree, and write it as a profile."
    command = _command(subparsers, "tune", text, commands.tune)
    command.add_argument(
        "--target",
        required=True,
        help="the model to speed up: `demo`, a folder, a hub id (org/name) or a .gguf file",
    )
    command.add_argument(
        "--draft",
        action="append",
        help="what guesses its tokens: `lookup` (the default) or `suffix`, which need no model, "
        "`demo`, the folder or hub id of an EAGLE-3 head or a small model, or `hybrid`, which "
        "joins every head or small model given beside it with suffix; may be given several times, "
        "the best one is taken",
    )
    command.add_argument(
        "--history",
        type=int,
        default=0,
        metavar="N",
        help="tokens of earlier answers that suffix and hybrid drafts look in (default: 0)",
    )
    command.add_argument(
        "--prompts",
        required=True,
        type=Path,
        help="a file of prompts like those to come: .jsonl, .json, .txt (one a line), .csv or "
        ".parquet",
    )
    command.add_argument("--domain", help="a name for these prompts (default: the file's name)")
    command.add_argument(
        "--out", type=Path, help="profile to write (default: spectune-DOMAIN.yaml)"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print how long the job would take, and stop"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="fewer prompts, shorter answers, fewer trees: a short job that proves less",
    )
    command.add_argument(
        "--budget-min",
        type=float,
        metavar="MIN",
        help="minutes the job may take: its counts are cut until its plan fits",
    )
    serving = command.add_argument_group(
        "a serving engine", "instead of our own: its servers are started, measured and ended"
    )
    serving.add_argument(
        "--backend",
        choices=["spectune", "vllm"],
        default="spectune",
        help="the engine to tune (default: spectune, our own)",
    )
    serving.add_argument(
        "--backend-python",
        type=Path,
        metavar="PYTHON",
        help="Python of the environment it is installed in (default: $SPECTUNE_VLLM_PYTHON, "
        "else this Python)",
    )
    serving.add_argument(
        "--backend-args",
        default="",
        metavar="ARGS",
        help="further arguments of its servers in one text, such as "
        "--backend-args='--enforce-eager'",
    )
    serving.add_argument(
        "--concurrency", type=int, metavar="N", help="requests served at once (default: 1)"
    )
    command.add_argument(
        "--storage",
        metavar="URL",
        help="database for the search's record, as an Optuna URL (default: a file beside the "
        "profile)",
    )
    command.add_argument(
        "--study",
        metavar="NAME",
        help="name of a search in --storage to share: run the same command on several machines or "
        "GPUs of one kind, and each measures a part of it",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="go on with the search of a stopped job, or, with more --trials, of a finished one",
    )
    command.add_argument(
        "--engine-space",
        choices=sorted(ENGINE_SPACES),
        help="take only drafts and trees that this engine can run",
    )
    command.add_argument(
        "--batch-sizes",
        type=_whole_numbers,
        metavar="N,N",
        help="prompts at a time for which trees are chosen and proved, such as 1,2,4,8 "
        "(default: 1)",
    )
    _add_device(command)
    for name, field, text in (
        ("tune-prompts", "n_tune", "prompts to search on"),
        ("holdout-prompts", "n_holdout", "other prompts, to prove the result on"),
        ("max-new-tokens", "max_new_tokens", "most tokens of an answer"),
        ("max-prompt-tokens", "max_prompt_tokens", "longer prompts are skipped"),
        ("trials", "n_trials", "trees to measure, plain decoding counted as one"),
        ("max-nodes", "max_nodes", "most nodes of a tree: tokens guessed per round"),
        (
            "max-depth",
            "max_depth",
            "deepest tree of a head or a small model: tokens guessed ahead",
        ),
    ):
        command.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{text} ({_defaults(field)})"
        )
    command.add_argument("--seed", type=int, default=0, help="seed of the whole job (default: 0)")
    _add_sampling(command, "greedy")
    command.add_argument("--raw", action="store_true", help="leave out the chat template")
    command.add_argument(
        "--keep-text",
        action="store_true",
        help="keep prompts and answers: all in NAME.texts.jsonl, a few in the report, both "
        "readable by you alone",
    )


def _defaults(field: str) -> str:
    """Return the default of a setting, and that of `--quick` where it is another."""
    usual, quick = getattr(Settings(), field), getattr(Settings.quick(), field)
    return f"default: {usual}" + (f", {quick} with --quick" if quick != usual else "")


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Return numbers that stand between commas; argparse tells of those that are none."""
    return tuple(int(part) for part in text.split(","))


_whole_numbers.__name__ = "list of whole numbers"  # as argparse calls what it expected


def _add_run(subparsers: Subparsers) -> None:
    text = "Decode prompts with a profile."
    command = _command(subparsers, "run", text, commands.run)
    command.add_argument("profile", type=Path, help="the YAML file that `tune` wrote")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one prompt")
    source.add_argument("--prompts", type=Path, help="a file of prompts")
    command.add_argument("--stream", action="store_true", help="print text as it comes")
    command.add_argument(
        "--compare",
        action="store_true",
        help="decode the first turn of every prompt plainly and with the profile, interleaved, "
        "and print both speeds",
    )
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="most tokens of an answer (default: 256)",
    )
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        help="a text that ends the answer; may be given several times",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    command.add_argument("--limit", type=int, metavar="N", help="use the first N prompts only")
    command.add_argument(
        "--trust", action="store_true", help="use the tree though the profile does not fit here"
    )
    command.add_argument(
        "--raw",
        action="store_true",
        help="leave out the chat template (default: as when the profile was made)",
    )
    command.add_argument(
        "--device", help="cpu, cuda, cuda:1 or mps (default: like the one the profile was made on)"
    )
    _add_remote_code(command)
    _add_sampling(command, "as in the profile")


def _add_bench(subparsers: Subparsers) -> None:
    command = _command(subparsers, "bench", bench_command.SUMMARY, bench_command.bench)
    bench_command.add_options(command)
    _add_device(command)


def _add_device(command: argparse.ArgumentParser) -> None:
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
    _add_remote_code(command)


def _add_remote_code(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run the code a checkpoint brings"
    )


def _add_sampling(command: argparse.ArgumentParser, default: str) -> None:
    sampling = command.add_argument_group(f"sampling (default: {default})")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--sample-top-k", type=int, metavar="K", help="0 is off")
    sampling.add_argument("--sample-top-p", type=float, metavar="P", help="1 is off")
